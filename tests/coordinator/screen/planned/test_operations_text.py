"""Tables of operations on the screen: given ones, and those that are only assumed."""

from __future__ import annotations

import dataclasses

from coordinator.screen.planned.operations_text import choice_lines, operations_lines, saved_lines
from coordinator.screen.planned.plan_text import plan_text
from ringtune.schedule.operations.choice import BlockCapacity, Choice
from ringtune.schedule.operations.table import BatchOperations, Operations
from ringtune.schedule.plan import Plan
from tests.support.plans import make_plan

EACH = BlockCapacity(full=2.0, forward_only=1.0, forward=1.0, backward=1.0)
SLICES = [("a", 0, 1), ("b", 1, 2)]


def test_given_operations_are_written_by_micro_batch_and_block() -> None:
    """The first batches, a word for each block, and how many more there are."""
    batches = tuple(BatchOperations(owner="a", batch_id=at, rows=("1132", "3333")) for at in range(3))
    plan = make_plan(SLICES, ["a"], num_blocks=2, microbatches=2, operations=Operations(batches=batches, subnets=2))
    lines = operations_lines(plan, most_batches=1)
    assert lines == [
        "operations: 1 full, 2 forward-only, 3 shortcut; a word for each block, a code for each subnet",
        "  owner a, batch 0",
        "    micro-batch 0  11 32",
        "    micro-batch 1  33 33",
        "  and 2 more batches",
    ]
    text = plan_text(plan, {}, measured=False)
    assert text[-len(operations_lines(plan)) :] == operations_lines(plan)
    assert "operations are given, for 3 batches" in text


def test_operations_to_be_chosen_are_marked_as_assumed() -> None:
    """Nobody takes the expected table for that of the run."""
    choice = Choice(policy="two-stage", subnets=2, capacities=(EACH,), refresh_steps=12)
    even = make_plan(SLICES, ["a"], num_blocks=2, microbatches=2)
    plan = Plan(dataclasses.replace(even.course, choice=choice), even.placements)
    assert operations_lines(plan)[0].startswith("operations, assumed until the run has chosen: 1 full")
    assert choice_lines(plan) == [
        "operations of 2 subnets a block are chosen by the policy two-stage by weight-magnitude and fisher before "
        "training, and anew every 12 steps"
    ]


def test_plan_without_operations_says_nothing_of_them() -> None:
    """Whoever asks for none sees none."""
    plan = make_plan(SLICES, ["a"], num_blocks=2)
    assert operations_lines(plan) == choice_lines(plan) == []
    assert "operations" not in "\n".join(plan_text(plan, {}, measured=False))


def test_saved_operations_are_told_by_node_then_as_compute_and_bytes() -> None:
    """Measured, predicted and the paper's count stand side by side; what is not known is left out."""
    node = {"full": 0.6, "forward_only": 0.2, "skipped": 0.2}
    figures = {"measured": 0.7, "predicted": 0.69, "paper": 0.68}
    lines = saved_lines({"nodes": {"a": node}, "compute": figures, "bytes": {**figures, "measured": None}})
    assert lines == [
        "operations of its train steps, as shares of all full:",
        "  a  60% full, 20% forward-only, 20% skipped",
        "  compute  70% measured, 69% predicted, 68% by the paper's count",
        "  bytes  69% predicted, 68% by the paper's count",
    ]
    assert saved_lines(None) == []
