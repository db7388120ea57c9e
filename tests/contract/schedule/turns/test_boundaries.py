"""What is due at turn boundaries, as a whole table, and the turns that come of it."""

from __future__ import annotations

import pytest

from ringtune.schedule.operations.choice import Choice
from ringtune.schedule.operations.given import GivenTable
from ringtune.schedule.turns.boundaries import checkpoint_is_due, evaluation_is_due, scores_are_due, table_is_due
from ringtune.schedule.turns.turns import StartPoint, hand_overs, turn_sequence
from tests.support.choosing import make_choice, table_of
from tests.support.plans import changed, make_plan

PLAN = changed(
    make_plan([("a", 0, 4)], ["a"], num_steps=60, local_iterations=10, checkpoint_every=20, eval_every=25),
    choice=make_choice(refresh_steps=16),
)


def test_boundaries_table_of_the_docstring() -> None:
    """60 steps in turns of 10, line by line."""
    steps = range(0, 61, 10)
    found = [
        [step for step in steps if step and checkpoint_is_due(PLAN.course, step)],
        [step for step in steps if step and evaluation_is_due(PLAN.course, step)],
        [step for step in steps if table_is_due(PLAN.course, step)],
    ]
    assert found == [[20, 40, 60], [30, 50, 60], [0, 20, 40, 50]]


@pytest.mark.parametrize(
    ("choice", "tables", "scores"),
    [
        (None, [], []),
        (make_choice(), [0], [0]),
        (make_choice("random"), [0], []),
        (make_choice("random", refresh_steps=30), [0, 30], []),
        (make_choice("magnitude", refresh_steps=31), [0, 40], [0, 40]),
        (make_choice(refresh_steps=100), [0], [0]),
    ],
)
def test_boundaries_tables_and_scores_of_a_choice(choice: Choice | None, tables: list[int], scores: list[int]) -> None:
    """A table is due at the start and where a multiple was passed; scores only for a policy that needs them."""
    course = changed(PLAN, choice=choice).course
    steps = range(0, 61, 10)
    assert [step for step in steps if table_is_due(course, step)] == tables
    assert [step for step in steps if scores_are_due(course, step)] == scores


def test_boundaries_given_tables_are_due_at_their_steps() -> None:
    """Nothing else says when a given table begins to hold."""
    tables = [GivenTable(step=step, operations=table_of(PLAN.course, step)) for step in (0, 30)]
    course = changed(PLAN, choice=Choice.given(tables)).course
    assert [step for step in range(0, 61, 10) if table_is_due(course, step)] == [0, 30]
    assert not any(scores_are_due(course, step) for step in range(0, 61, 10))


def test_boundaries_a_run_of_no_steps_chooses_nothing() -> None:
    """An evaluation alone needs no table."""
    course = changed(PLAN, num_steps=0).course
    assert [turn.kind.value for turn in turn_sequence(course)] == ["evaluate"]


def turns(start: StartPoint | None = None) -> list[tuple[str, str, int, int]]:
    """(kind, owner, step, items) of every turn of a small run."""
    plan = make_plan(
        [("a", 0, 4)], ["b", "a", "c"], num_steps=8, local_iterations=2, checkpoint_every=4, eval_every=4, eval_rows=3
    )
    course = changed(plan, choice=make_choice(refresh_steps=4)).course
    return [
        (turn.kind.value, turn.owner, turn.first_step, turn.num_items) for turn in turn_sequence(course, start=start)
    ]


def test_turns_with_scores_follow_the_head() -> None:
    """Scores come last at a boundary, from the owner on that has the head then; the whole sequence."""
    whole = [
        *[("score", owner, 0, 3) for owner in "bac"],
        ("train", "b", 0, 2),
        ("train", "a", 2, 2),
        ("checkpoint", "a", 4, 1),
        *[("evaluate", owner, 4, 1) for owner in "acb"],
        *[("score", owner, 4, 3) for owner in "bac"],
        ("train", "c", 4, 2),
        ("train", "b", 6, 2),
        ("checkpoint", "b", 8, 1),
        *[("evaluate", owner, 8, 1) for owner in "bac"],
    ]
    assert turns() == whole
    assert turns(StartPoint(step=4, holder="a")) == whole[6:]


@pytest.mark.parametrize("eval_rows", [0, 3])
@pytest.mark.parametrize("eval_every", [0, 2, 5])
@pytest.mark.parametrize("refresh_steps", [0, 2, 5])
def test_hand_overs_know_the_way_of_the_head_through_scores(
    eval_rows: int, eval_every: int, refresh_steps: int
) -> None:
    """Every hand-over of every run, from any checkpoint on, is among the pairs."""
    plan = make_plan(
        [("a", 0, 4)],
        ["a", "b", "c", "d"],
        num_steps=30,
        local_iterations=1,
        eval_every=eval_every,
        eval_rows=eval_rows,
    )
    course = changed(plan, choice=make_choice(refresh_steps=refresh_steps)).course
    for step in range(12):
        start = StartPoint.of(course, step=step, holder="abcd"[(step - 1) % 4] if step else "")
        holder = start.holder
        for turn in turn_sequence(course, start=start):
            assert holder == turn.owner or (holder, turn.owner) in hand_overs(course, start), (step, turn)
            holder = turn.owner
