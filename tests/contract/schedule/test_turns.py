"""Turns and items: who begins when, with which batch, and where evaluation comes."""

from __future__ import annotations

import random

import pytest

from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, Turn, items, turn_sequence
from tests.support.plans import make_plan, random_plan

RING = [("a", 0, 2), ("b", 2, 4)]


def _show(plan: Plan) -> list[str]:
    return [
        f"{turn.index:>2} r{turn.round} {turn.kind:<8} {turn.owner} seq [{turn.first_seq:>2},{turn.end_seq:>2}) "
        f"steps [{turn.first_step},{turn.end_step}) batch {turn.first_batch}"
        for turn in turn_sequence(plan.course)
    ]


def test_turns_go_round_and_evaluate_at_the_end() -> None:
    """Initiators take turns; every owner's stream goes on where it stopped; the end evaluates, head first."""
    plan = make_plan(RING, ["c", "a"], num_steps=7, local_iterations=2, eval_rows=5)
    assert _show(plan) == [
        " 0 r0 train    c seq [ 0, 2) steps [0,2) batch 0",
        " 1 r0 train    a seq [ 2, 4) steps [2,4) batch 0",
        " 2 r1 train    c seq [ 4, 6) steps [4,6) batch 2",
        " 3 r1 train    a seq [ 6, 7) steps [6,7) batch 2",
        " 4 r1 evaluate a seq [ 7, 9) steps [7,7) batch 0",
        " 5 r1 evaluate c seq [ 9,11) steps [7,7) batch 0",
    ]


def test_turns_evaluate_at_the_boundary_after_every_multiple() -> None:
    """``eval_every = 3`` with turns of 2 steps: after steps 4, 6 and at the end, never twice."""
    plan = make_plan(RING, ["a"], num_steps=9, local_iterations=2, eval_every=3, eval_rows=3)
    assert _show(plan) == [
        " 0 r0 train    a seq [ 0, 2) steps [0,2) batch 0",
        " 1 r1 train    a seq [ 2, 4) steps [2,4) batch 2",
        " 2 r1 evaluate a seq [ 4, 5) steps [4,4) batch 0",
        " 3 r2 train    a seq [ 5, 7) steps [4,6) batch 4",
        " 4 r2 evaluate a seq [ 7, 8) steps [6,6) batch 0",
        " 5 r3 train    a seq [ 8,10) steps [6,8) batch 6",
        " 6 r4 train    a seq [10,11) steps [8,9) batch 8",
        " 7 r4 evaluate a seq [11,12) steps [9,9) batch 0",
    ]


def test_turns_without_evaluation_rows_only_train() -> None:
    """An owner without evaluation rows has no evaluation turn."""
    plan = make_plan(RING, ["a", "b"], eval_rows=0, num_steps=4)
    assert {turn.kind for turn in turn_sequence(plan.course)} == {StepKind.TRAIN}


def test_turns_of_no_steps_are_one_evaluation() -> None:
    """A plan without steps evaluates once, every owner with rows."""
    plan = make_plan(RING, ["c", "a"], num_steps=0, eval_rows=5)
    assert _show(plan) == [
        " 0 r0 evaluate c seq [ 0, 2) steps [0,0) batch 0",
        " 1 r0 evaluate a seq [ 2, 4) steps [0,0) batch 0",
    ]


@pytest.mark.parametrize("seed", range(60))
def test_turns_count_steps_and_items_without_gaps(seed: int) -> None:
    """For any plan: indices, seqs and steps are consecutive, and each owner's batches are its own stream."""
    plan = random_plan(random.Random(seed))
    index = seq = step = 0
    batch = dict.fromkeys([owner.node for owner in plan.course.owners], 0)
    for turn in turn_sequence(plan.course):
        assert (turn.index, turn.first_seq, turn.first_step) == (index, seq, step)
        assert turn.num_items > 0
        if turn.kind is StepKind.TRAIN:
            assert turn.first_batch == batch[turn.owner]
            batch[turn.owner] += turn.num_items
        index, seq, step = index + 1, turn.end_seq, turn.end_step
    assert step == plan.course.num_steps
    assert sum(batch.values()) == plan.course.num_steps


def test_items_of_a_training_turn_are_full_batches() -> None:
    """Each item is one step with ``batch_size`` rows of the owner's next batch."""
    plan = make_plan(RING, ["a"], batch_size=4)
    turn = Turn(
        index=3, kind=StepKind.TRAIN, owner="a", round=1, first_seq=10, num_items=2, first_step=6, first_batch=4
    )
    expanded = [(item.seq, item.step, item.batch, item.rows, item.turn) for item in items(plan.course, turn)]
    assert expanded == [(10, 6, 4, 4, 3), (11, 7, 5, 4, 3)]


def test_items_of_an_evaluation_end_with_a_short_batch() -> None:
    """Evaluation does not advance the step, and passes every row once."""
    plan = make_plan(RING, ["a"], batch_size=4, eval_rows=9)
    turn = Turn(
        index=3, kind=StepKind.EVALUATE, owner="a", round=1, first_seq=10, num_items=3, first_step=6, first_batch=0
    )
    assert [(item.seq, item.step, item.batch, item.rows) for item in items(plan.course, turn)] == [
        (10, 6, 0, 4),
        (11, 6, 1, 4),
        (12, 6, 2, 1),
    ]


@pytest.mark.parametrize(
    ("kind", "backward", "update"),
    [
        (StepKind.TRAIN, True, True),
        (StepKind.EVALUATE, False, False),
        (StepKind.SCORE, True, False),
        (StepKind.MEASURE, True, False),
    ],
)
def test_step_kinds_say_what_flows(kind: StepKind, backward: bool, update: bool) -> None:
    """Only training changes weights; evaluation alone has no gradients."""
    assert (kind.has_backward, kind.has_update) == (backward, update)
