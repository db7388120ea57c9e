"""Rows are looked up for every item: that compares no tables, and what is kept of it stays small."""

from __future__ import annotations

import dataclasses
import random
import tracemalloc

import pytest

from ringtune.schedule.course import Course
from ringtune.schedule.lowering import lower
from ringtune.schedule.operations.codes import patterns_of
from ringtune.schedule.operations.table import BatchOperations, Operations
from tests.support.plans import make_plan


def course() -> Course:
    """A course with a table of its own, equal to any other one's."""
    plan = make_plan([("a", 0, 4)], ["a"], train_rows=8, batch_size=4, microbatches=2)
    batches = tuple(BatchOperations(owner="a", batch_id=batch, rows=("1113", "2111")) for batch in range(2))
    return dataclasses.replace(plan.course, operations=Operations(batches=batches))


def test_rows_are_found_without_comparing_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run simulated twice in a process once compared all batches of its two tables for every item."""
    both = [course(), course()]
    assert both[0] == both[1]
    compared = []
    equals = BatchOperations.__eq__

    def watched(self: BatchOperations, other: object) -> bool:
        compared.append(self)
        return equals(self, other)

    monkeypatch.setattr(BatchOperations, "__eq__", watched)
    for each in both:
        table = each.operations
        assert table is not None
        assert [table.rows_of("a", batch) for batch in (0, 1, 2)] == [("1113", "2111"), ("1113", "2111"), ()]
    assert not compared


def test_patterns_of_a_row_are_those_of_its_blocks() -> None:
    """Of four blocks with two subnets; an empty row has none, which is all full."""
    assert patterns_of("11122233", 1, 3, 2) == ("12", "22")
    assert patterns_of("1123", 0, 2, 1) == ("1", "1")
    assert patterns_of("", 0, 2, 2) == ()


@pytest.mark.promise("7 bounded memory")
def test_ways_of_many_rows_take_little_memory() -> None:
    """Tables of whole blocks may bring any row; every node looks its ways up, so it keeps some of them only."""
    plan = make_plan([(f"n{at}", 3 * at, 3 * at + 3) for at in range(4)], ["n0"], method="all", num_blocks=12)
    rng = random.Random(0)
    rows = ["".join(rng.choice("123") for _ in range(12)) for _ in range(2000)]
    lower.cache_clear()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for row in rows:
            lower(plan, "n0", 0, row)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        lower.cache_clear()
    assert taken < 3_000_000
