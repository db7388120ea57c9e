"""A run without an owner: the turns of all others, in their order, and nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest

from ringtune.errors import PlanError
from ringtune.rounds.row_use import steps_of_owners
from ringtune.schedule.course import Course
from ringtune.schedule.extent import Owner
from ringtune.schedule.plan import Plan
from ringtune.schedule.prefixes.visits import step_of
from ringtune.schedule.turns.turns import StartPoint, StepKind, Turn, hand_overs, holder_after, turn_sequence
from ringtune.schedule.whose_rows.leaving_out import (
    all_owners,
    head_holder,
    steps_of_rest,
    with_owner_back,
    without_owner,
)
from tests.support.plans import make_plan


def course_of(rng: random.Random) -> Course:
    """Any course of two to five owners."""
    names = [chr(ord("a") + index) for index in range(rng.randint(2, 5))]
    rng.shuffle(names)
    length = rng.choice([1, 2, 3])
    plan = make_plan([("a", 0, 4)], ["a"], num_steps=rng.randint(1, 40), local_iterations=length)
    return dataclasses.replace(
        plan.course,
        owners=tuple(Owner(node=name, train_rows=rng.randint(1, 90), eval_rows=rng.choice([0, 3])) for name in names),
        turns=rng.choice(["equal", "rows"]),
        eval_every=rng.choice([0, 4]),
        checkpoint_every=rng.choice([0, 5]),
    )


def train_turns(course: Course, start: StartPoint | None = None) -> list[Turn]:
    """The train turns of a course."""
    return [turn for turn in turn_sequence(course, start=start) if turn.kind is StepKind.TRAIN]


def what(turn: Turn) -> tuple[str, int, int]:
    """What a turn trains on."""
    return turn.owner, turn.first_batch, turn.num_items


@pytest.mark.parametrize("seed", range(300))
def test_others_have_the_turns_that_they_would_have_had(seed: int) -> None:
    """Leave out owner after owner at any boundary; the turns that follow are those before without the owner's."""
    rng = random.Random(seed)
    course = course_of(rng)
    whole, befores = course.num_steps, list[Course]()
    wanted = train_turns(course)
    done: list[Turn] = []
    while len(course.owners) > 1 and rng.random() < 0.8:
        lost = rng.choice(course.owners).node
        more = rng.randint(0, len(wanted))
        done, left = [*done, *wanted[:more]], wanted[more:]
        befores.append(course)
        course = without_owner(course, lost, len(done))
        assert steps_of_rest(course, whole) == course.num_steps
        wanted = [turn for turn in left if turn.owner != lost]
        step = sum(turn.num_items for turn in done)
        start = StartPoint.of(course, step=step)
        found = train_turns(course, start)
        assert [what(turn) for turn in found] == [what(turn) for turn in wanted]
        assert course.num_steps == step + sum(turn.num_items for turn in wanted)
        assert [turn.first_step for turn in found] == [
            step + sum(turn.num_items for turn in found[:at]) for at in range(len(found))
        ]
        wanted = found
        if found:
            last = found[-1]
            assert holder_after(course, course.num_steps) == last.owner
            pairs = hand_overs(course, start)
            ways = itertools.pairwise([start.holder, *(turn.owner for turn in turn_sequence(course, start=start))])
            assert {(one, other) for one, other in ways if one != other} <= pairs
    for before in reversed(befores):
        course = with_owner_back(course, whole)
        assert course == before


@pytest.mark.parametrize("seed", range(60))
def test_rows_and_visits_are_counted_for_the_turns_that_there_are(seed: int) -> None:
    """Steps of the others, and the step of each of their batches, are those of the turns after the loss."""
    rng = random.Random(seed)
    course = course_of(rng)
    before = train_turns(course)
    more = rng.randint(0, len(before))
    lost = rng.choice(course.owners).node
    after = without_owner(course, lost, more)
    rest = train_turns(after, StartPoint.of(after, step=sum(turn.num_items for turn in before[:more])))
    counted = {owner.node: 0 for owner in after.owners}
    for turn in (*before[:more], *rest):
        if turn.owner != lost:
            counted[turn.owner] += turn.num_items
    assert dict(zip(counted, steps_of_owners(after), strict=True)) == counted
    for turn in rest:
        assert [step_of(after, turn.owner, turn.first_batch + at) for at in range(turn.num_items)] == [
            *range(turn.first_step, turn.end_step)
        ]


def test_rounds_count_on() -> None:
    """With equal turns a round is one turn of each owner that is there."""
    course = make_plan([("a", 0, 4)], ["a", "b", "c"], num_steps=18, local_iterations=2).course
    after = without_owner(course, "b", 3)
    found = train_turns(after, StartPoint.of(after, step=6))
    assert [(turn.owner, turn.round) for turn in found] == [("a", 1), ("c", 1), ("a", 2), ("c", 2)]


def test_course_without_an_owner_survives_json_and_has_its_owners_again() -> None:
    """What was left out is in the plan, with its place."""
    plan = make_plan([("a", 0, 4)], ["a", "b", "c", "d"], num_steps=18, local_iterations=2)
    course = without_owner(without_owner(plan.course, "b", 3), "d", 4)
    assert [owner.node for owner in course.owners] == ["a", "c"]
    assert [owner.node for owner in all_owners(course)] == ["a", "b", "c", "d"]
    changed = Plan(course, plan.placements)
    assert Plan.from_json(json.loads(json.dumps(changed.to_json()))) == changed
    assert changed.digest != plan.digest


def test_owner_that_can_not_be_left_out_is_refused() -> None:
    """The only one, one that is none, and places that can't be."""
    course = make_plan([("a", 0, 4)], ["a", "b"], num_steps=18).course
    with pytest.raises(PlanError, match="node c can't be left out: c owns no rows"):
        without_owner(course, "c", 1)
    alone = without_owner(course, "b", 1)
    with pytest.raises(PlanError, match="no other node than a owns rows"):
        without_owner(alone, "a", 2)
    with pytest.raises(PlanError, match="from place -1"):
        dataclasses.replace(alone, left_out=(dataclasses.replace(alone.left_out[0], at=-1),))
    with pytest.raises(PlanError, match="distinct"):
        dataclasses.replace(course, left_out=alone.left_out)


def test_next_owner_keeps_the_head() -> None:
    """In their order, around."""
    course = make_plan([("a", 0, 4)], ["a", "b", "c"], num_steps=18).course
    assert [head_holder(course, node) for node in ("a", "b", "c", "x")] == ["b", "c", "a", ""]
    assert head_holder(make_plan([("a", 0, 4)], ["a"], num_steps=18).course, "a") == ""
