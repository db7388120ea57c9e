"""What operations leave to be done: counted by hand for whole blocks, subnets, and slices that are passed by."""

from __future__ import annotations

import dataclasses

import pytest

from ringtune.costs.times.operation_shares import Done, all_full, done_of, total
from ringtune.costs.times.seconds import CourseCosts
from ringtune.schedule.operations.table import BatchOperations, Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import Item, items, turn_sequence
from tests.support.plans import make_plan
from tests.support.profiles import profile_of

SLICES = [("a", 0, 2), ("b", 2, 4)]


def planned(*rows: str, subnets: int = 1, method: str = "all") -> tuple[Plan, Item]:
    """A plan whose batches all have these operations, and its first item: four rows of owner a."""
    batches = tuple(BatchOperations(owner="a", batch_id=at, rows=rows) for at in range(3))
    plan = make_plan(
        SLICES,
        ["a"],
        method=method,
        train_rows=12,
        microbatches=2,
        operations=Operations(batches=batches, subnets=subnets),
    )
    turn = next(turn for turn in turn_sequence(plan.course) if turn.kind.has_update)
    return plan, items(plan.course, turn)[0]


def test_operations_are_counted_by_node_in_rows_of_blocks() -> None:
    """Two rows a micro-batch: node b is passed by for the second one, and node a runs a block without a graph."""
    plan, item = planned("1111", "2133")
    done = done_of(plan, item)
    assert done["a"] == Done(full=6, forward_only=2, sent_bytes=done["a"].sent_bytes)
    assert done["b"] == Done(full=4, skipped=4, sent_bytes=done["b"].sent_bytes)
    assert done["b"].shares() == {"full": 0.5, "forward_only": 0.0, "skipped": 0.5}


def test_operations_of_subnets_count_as_parts_of_a_block() -> None:
    """In ``1132`` half of a block is full."""
    plan, item = planned("1132" * 4, "3333" * 4, subnets=4)
    both = total(done_of(plan, item).values())
    assert (both.full, both.forward_only, both.skipped) == (4, 2, 2 + 8)
    assert both.paper_compute == pytest.approx(4 + 0.4 * 2)
    assert both.paper_sent == pytest.approx(4 + 0.5 * 2)


def test_full_is_forward_only_where_a_block_does_not_train() -> None:
    """RingAda's first step trains the top block alone."""
    plan, item = planned("1111", "1113", method="ringada")
    done = done_of(plan, item)
    assert (done["a"].full, done["a"].forward_only) == (0, 8)
    assert (done["b"].full, done["b"].forward_only, done["b"].skipped) == (2, 4, 2)


def test_messages_are_those_of_the_way() -> None:
    """All full: to b and back, and the gradient as well; where b is passed by nothing travels."""
    plan, item = planned("1111", "1133")
    table, full = (total(done_of(each, item).values()).sent_bytes for each in (plan, all_full(plan)))
    assert (table, full) == (2 * 4, 4 * 4)


def test_seconds_and_bytes_follow_the_profile() -> None:
    """Half of the micro-batches are half of the work; a message has its mean length."""
    plan, item = planned("1111", "3333")
    costs = CourseCosts(all_full(plan).course, profile_of(plan))
    table, full = (total(done_of(each, item, costs).values()) for each in (plan, all_full(plan)))
    assert table.work_s == pytest.approx(full.work_s / 2)
    assert 0 < table.sent_bytes == pytest.approx(full.sent_bytes / 2)


def test_all_full_has_neither_tables_nor_a_choice() -> None:
    """It is what is compared with."""
    plan, _ = planned("1111", "3333")
    assert all_full(plan).course == dataclasses.replace(plan.course, operations=None)
