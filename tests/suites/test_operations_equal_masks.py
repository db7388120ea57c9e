"""Operation tables: a ring that skips work gives what one process gives that masks the same work and throws it away.

The reference runs every block for every micro-batch. Where a table says "forward-only", the block's contribution is
added without its gradient; where it says "shortcut", the block's input is its output.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ringtune.schedule.actions import Op
from ringtune.schedule.operation_tables import FORWARD_ONLY, FULL, SHORTCUT, BatchOperations, Operations
from tests.support.operation_masks import SPLITS, collected, one_process, run, train_items
from tests.support.torch_ring import Case, distance, write_inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def random_table(seed: int, owners: tuple[str, ...], codes: str) -> Operations:
    """Other operations for every micro-batch of every batch; no two rows of a batch are equal."""
    rng = random.Random(seed)
    rows = ["".join(row) for row in itertools.product(sorted(set(codes)), repeat=4)]
    weights = [functools.reduce(lambda product, code: product * codes.count(code), row, 1) for row in rows]
    entries = []
    for owner in owners:
        for batch_id in range(4):
            chosen: dict[str, None] = {}
            while len(chosen) < 4:
                chosen.setdefault(rng.choices(rows, weights)[0])
            entries.append(BatchOperations(owner=owner, batch_id=batch_id, rows=tuple(chosen)))
    return Operations(batches=tuple(entries))


def case_of(folder: Path, codes: str = "11123", **changes: Any) -> Case:
    """12 steps, four micro-batches, two owners, each batch with its own operations."""
    values = {"num_steps": 12, "microbatches": 4, "owners": ("a", "b"), "every_steps": 3, **changes}
    operations = random_table(3, values["owners"], codes)
    return Case(folder=folder, **{"operations": operations, **values})


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    ("adapter", "method"),
    [(adapter, method) for adapter in ("seq_bn", "lora") for method in ("ringada", "all")] + [("linear", "all")],
)
@pytest.mark.sampled(1)
def test_table_of_operations_on_a_ring_equals_masks(folder: Path, split: str, adapter: str, method: str) -> None:
    """Every micro-batch of every batch has other operations; 12 AdamW steps in float64: 1e-9."""
    case = case_of(folder, adapter=adapter, method=method)
    plan = case.plan(SPLITS[split])
    _, carrier = run(case, plan)
    assert distance(collected(plan, carrier), one_process(case)) < 1e-9


def test_table_of_operations_changes_the_result(folder: Path) -> None:
    """Negative control: without the table, and with forward-only taken for full, the result is another one."""
    case = case_of(folder)
    plan = case.plan(SPLITS["two"])
    found = collected(plan, run(case, plan)[1])
    batches = case.operations.batches if case.operations else ()
    full = tuple(
        dataclasses.replace(entry, rows=tuple(row.replace(FORWARD_ONLY, FULL) for row in entry.rows))
        for entry in batches
    )
    for other in (None, Operations(batches=full)):
        changed = dataclasses.replace(case, operations=other)
        plan = changed.plan(SPLITS["two"])
        assert distance(collected(plan, run(changed, plan)[1]), found) > 1e-4


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(1)
def test_timing_changes_no_bit_of_a_run_with_operations(folder: Path, seed: int) -> None:
    """Other delays, same bits in float32 with dropout."""
    case = case_of(folder, dtype="float32", dropout=0.1, num_steps=8)
    plan = case.plan(SPLITS["four"])
    first = collected(plan, run(case, plan, seed=100)[1])
    other = collected(plan, run(case, plan, seed=seed)[1])
    assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.promise("3 frozen means free")
def test_skipped_slices_get_no_bytes_and_do_nothing(folder: Path) -> None:
    """Slices with nothing but shortcuts: no message comes or goes there, and no block is run."""
    row = SHORTCUT * 2 + FULL * 2
    entries = tuple(BatchOperations(owner="a", batch_id=at, rows=(row,) * 4) for at in range(8))
    case = case_of(folder, owners=("a",), method="all", num_steps=6)
    case = dataclasses.replace(case, operations=Operations(batches=entries))
    plan = case.plan((("b", 0, 1), ("c", 1, 2), ("d", 2, 4)))
    result, carrier = run(case, plan)
    trained = {item.seq for item in train_items(plan)}
    messages = [message for message in result.messages if message.key.seq in trained]
    assert {(message.source, message.target) for message in messages} == {("a", "d"), ("d", "a")}
    for node in ("b", "c"):
        assert {action.op for action in result.order[node] if action.seq in trained} <= {Op.UPDATE}
    assert distance(collected(plan, carrier), one_process(case)) < 1e-9


@pytest.mark.promise("3 frozen means free")
def test_backward_stops_at_the_lowest_full_block_of_each_micro_batch(folder: Path) -> None:
    """One micro-batch each: all full, the top half, the top block, none; counted on the wire."""
    rows = (FULL * 4, SHORTCUT + FORWARD_ONLY + FULL * 2, FORWARD_ONLY * 3 + FULL, FORWARD_ONLY * 4)
    entries = tuple(BatchOperations(owner="a", batch_id=at, rows=rows) for at in range(8))
    case = case_of(folder, owners=("a",), method="all", num_steps=1)
    case = dataclasses.replace(case, operations=Operations(batches=entries))
    plan = case.plan((("b", 0, 1), ("c", 1, 2), ("d", 2, 3), ("e", 3, 4)))
    result, _ = run(case, plan)
    gradients = sorted(
        (message.key.micro, message.source, message.target) for message in result.messages if message.payload == "g"
    )
    assert gradients == [
        *((0, source, target) for source, target in (("a", "e"), ("c", "b"), ("d", "c"), ("e", "d"))),
        *((1, source, target) for source, target in (("a", "e"), ("e", "d"))),
        (2, "a", "e"),
    ]
