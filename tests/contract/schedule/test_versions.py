"""What trains when, and which version of the weights a forward must see."""

from __future__ import annotations

import random

import pytest

from ringtune.schedule.actions import Op
from ringtune.schedule.lowering import item_updates
from ringtune.schedule.methods import RingAda
from ringtune.schedule.turns import StepKind, items, turn_sequence
from ringtune.schedule.versions import (
    awaited_forward,
    depth,
    forward_version,
    in_flight,
    is_stale,
    may_be_stale,
    trained,
    unfreezing_steps,
    weight_version,
)
from tests.support.cases import cases
from tests.support.plans import changed, make_plan, random_plan, train_items

AB = [("a", 0, 2), ("b", 2, 4)]


def test_depth_grows_by_one_block_every_k_steps() -> None:
    """RingAda starts with the top block and stops at the lowest."""
    plan = make_plan(AB, ["a"], every_steps=3, num_steps=20)
    assert [depth(plan.course, step) for step in range(13)] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4]
    assert [trained(plan.course, StepKind.TRAIN, step).lowest for step in (0, 3, 6, 9, 99)] == [3, 2, 1, 0, 0]


def test_depth_before_the_first_step_is_nothing() -> None:
    """A run of no steps, which only evaluates, trains nothing in whatever form the steps were given."""
    forms = [{}, {"unfreeze": "at", "unfreeze_at": (2,)}, {"unfreeze": "auto"}]
    assert [depth(make_plan(AB, ["a"], **form).course, -1) for form in forms] == [0, 0, 0]  # type: ignore[arg-type]


@cases("seed", range(10))
def test_every_steps_is_the_same_schedule_as_its_steps(seed: int) -> None:
    """The first form is a short way to write the second one."""
    plan = random_plan(random.Random(seed))
    steps = unfreezing_steps(plan.course)
    is_ringada = isinstance(plan.course.method, RingAda)
    other = changed(plan, method=RingAda(every_steps=0, at=steps)) if is_ringada else plan
    assert is_ringada or not steps
    blocks = range(plan.course.num_blocks + 1)
    for step in range(plan.course.num_steps):
        assert depth(plan.course, step) == depth(other.course, step)
        assert [weight_version(plan.course, block, step) for block in blocks] == [
            weight_version(other.course, block, step) for block in blocks
        ]


@pytest.mark.promise("2 right version")
def test_forward_version_of_pipeadapter_lags_by_what_is_in_flight() -> None:
    """Three hosts, turns of 5 and 3 steps: the lowest lags by up to 2 steps, the top and the head never."""
    slices = [("a", 0, 1), ("b", 1, 1), ("c", 1, 3), ("d", 3, 4)]
    plan = make_plan(slices, ["a"], method="pipeadapter", num_steps=8, local_iterations=5)
    versions = {block: [forward_version(plan.course, block, item) for item in train_items(plan)] for block in range(5)}
    assert versions == {
        0: [0, 0, 0, 1, 2, 5, 5, 5],
        1: [0, 0, 1, 2, 3, 5, 5, 6],
        2: [0, 0, 1, 2, 3, 5, 5, 6],
        3: [0, 1, 2, 3, 4, 5, 6, 7],
        4: [0, 1, 2, 3, 4, 5, 6, 7],
    }
    awaited = {block: [awaited_forward(plan.course, block, item) for item in train_items(plan)] for block in (0, 1, 3)}
    assert awaited == {0: [2, 3, 4, 4, 4, 7, 7, 7], 1: [1, 2, 3, 4, 4, 6, 7, 7], 3: [0, 1, 2, 3, 4, 5, 6, 7]}
    assert [in_flight(plan.course, block) for block in range(5)] == [3, 2, 2, 1, 1]


@pytest.mark.promise("2 right version")
@cases("seed", range(20))
def test_forward_version_of_the_other_methods_is_every_update(seed: int) -> None:
    """Without staleness nothing waits for a later forward, and at most one item is in flight."""
    plan = random_plan(random.Random(seed))
    if plan.course.method.name == "pipeadapter":
        plan = changed(plan, local_iterations=1)
    assert not is_stale(plan.course) and not may_be_stale(plan.course)
    for item in train_items(plan):
        for block in range(plan.course.num_blocks + 1):
            assert forward_version(plan.course, block, item) == weight_version(plan.course, block, item.step)
            assert (in_flight(plan.course, block), awaited_forward(plan.course, block, item)) == (1, item.step)


@cases("seed", range(25))
def test_weight_version_is_the_number_of_past_updates(seed: int) -> None:
    """For any plan the closed form equals counting the updates that the lowering hands out."""
    plan = random_plan(random.Random(seed))
    counted = dict.fromkeys(range(plan.course.num_blocks + 1), 0)
    for turn in turn_sequence(plan.course):
        for item in items(plan.course, turn):
            assert {block: weight_version(plan.course, block, item.step) for block in counted} == counted
            for node in plan.nodes:
                updates = [action for action in item_updates(plan, item, node) if action.op is Op.UPDATE]
                for update in updates:
                    for block in range(update.start, update.stop):
                        counted[block] += 1


@cases(
    ("kind", "units"),
    [
        (StepKind.TRAIN, [3, 4]),
        (StepKind.EVALUATE, []),
        (StepKind.CHECKPOINT, []),
        (StepKind.SCORE, [0, 1, 2, 3, 4]),
    ],
)
def test_trained_units_depend_on_the_kind(kind: StepKind, units: list[int]) -> None:
    """Evaluation keeps no graph; scoring keeps all of it; training as deep as its step trains."""
    found = trained(make_plan(AB, ["a"]).course, kind, 0)
    assert list(found) == units
    assert found.lowest == (units[0] if units else 5)
