"""What a table of operations spares: slices that are skipped do nothing, and backward stops at each micro-batch's own.

That a ring with tables trains what masks train is among the laws.
"""

from __future__ import annotations

from typing import Any

import pytest

from ringtune.schedule.actions import Op
from ringtune.schedule.operation_tables import FORWARD_ONLY, FULL, SHORTCUT, BatchOperations, Operations
from tests.features.feature import Feature
from tests.support.operation_masks import collected, one_process, run, train_items
from tests.support.torch_ring import Case, distance


def case_of(rows: tuple[str, ...], num_steps: int) -> Case:
    """All train, and each batch of the owner has these rows."""
    entries = tuple(BatchOperations(owner="a", batch_id=at, rows=rows) for at in range(8))
    changes: dict[str, Any] = {"owners": ("a",), "method": "all", "microbatches": 4, "num_steps": num_steps}
    return Feature(name="table/given", changes=changes | {"operations": Operations(batches=entries)}).case


@pytest.mark.promise("3 frozen means free")
def test_skipped_slices_get_no_bytes_and_do_nothing() -> None:
    """Slices with nothing but shortcuts: no message comes or goes there, and no block is run."""
    row = SHORTCUT * 2 + FULL * 2
    case = case_of((row,) * 4, num_steps=4)
    plan = case.plan((("b", 0, 1), ("c", 1, 2), ("d", 2, 4)))
    result, carrier = run(case, plan)
    trained = {item.seq for item in train_items(plan)}
    messages = [message for message in result.messages if message.key.seq in trained]
    assert {(message.source, message.target) for message in messages} == {("a", "d"), ("d", "a")}
    for node in ("b", "c"):
        assert {action.op for action in result.order[node] if action.seq in trained} <= {Op.UPDATE}
    assert distance(collected(plan, carrier), one_process(case)) < 1e-9


@pytest.mark.promise("3 frozen means free")
def test_backward_stops_at_the_lowest_full_block_of_each_micro_batch() -> None:
    """One micro-batch each: all full, the top half, the top block, none; counted on the wire."""
    rows = (FULL * 4, SHORTCUT + FORWARD_ONLY + FULL * 2, FORWARD_ONLY * 3 + FULL, FORWARD_ONLY * 4)
    case = case_of(rows, num_steps=1)
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
