"""When helpers update, what they are sent, and where nobody can help.

Orders, versions and what waits are those of any plan: ``test_any_plan_on_virtual_clock``.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest

from ringtune.errors import PlanError
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Op, Payload
from ringtune.schedule.course import Offload
from ringtune.schedule.lowering import WAITING, max_waiting
from ringtune.schedule.methods import Hift, PipeAdapter
from ringtune.schedule.operation_tables import BatchOperations, Operations
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.table import build_table
from ringtune.schedule.turns import StepKind, items, turn_sequence
from ringtune.schedule.units import Range
from tests.features.plans import helped_plan, run
from tests.support.plans import changed, make_plan
from tests.support.validate import validate_table


@pytest.mark.parametrize(("steps", "interval", "updates"), [(10, 4, 3), (8, 4, 2), (3, 4, 1), (5, 1, 5)])
def test_helpers_update_once_an_interval_and_at_the_end(steps: int, interval: int, updates: int) -> None:
    """Ten steps with an interval of four are three updates, of which the last one has what is left over."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_blocks=4, num_steps=steps, method="all")
    helpers = (Helper(node="z", start=0, stop=2),)
    course = plan.course
    if interval > 1:
        course = dataclasses.replace(course, offload=Offload(blocks=(Range(0, 2),), interval=interval))
    plan = Plan(course, (dataclasses.replace(plan.placement, helpers=helpers),))
    order = run(plan, random.Random(1)).order
    at_helper = [action for action in order["z"] if action.op is Op.UPDATE]
    at_host = [action for action in order["a"] if action.op is Op.UPDATE and action.start == 0]
    assert at_helper == at_host
    assert len(at_helper) == updates
    assert len([action for action in order["b"] if action.op is Op.UPDATE]) == steps


@pytest.mark.promise("2 right version")
def test_update_of_a_helper_waits_for_a_forward_that_must_not_see_it() -> None:
    """Some steps have a forward at the host and no backward, long after the weights of the step before are there."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["c"], num_steps=8, local_iterations=4, method="all", train_rows=32)
    free = "2211"
    batches = tuple(BatchOperations(owner="c", batch_id=at, rows=(free if at % 2 else "1111", free)) for at in range(8))
    offload, helpers = Offload(blocks=(Range(0, 2),), overlap=True), (Helper(node="z", start=0, stop=2),)
    plan = changed(plan, operations=Operations(batches=batches), offload=offload, helpers=helpers)
    found = run(plan, random.Random(1), action_s=lambda node, action: 100.0 if action.op is Op.EMBED else 0.1)
    assert found.finish == rd.Finish("", "")
    validate_table(plan, tuple(turn_sequence(plan.course)), found.order)


@pytest.mark.promise("2 right version")
def test_helper_without_pairs_saves_before_later_updates() -> None:
    """Nothing but the checkpoint holds the updates of the next turn back, while its own blocks are slow."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["c"], num_steps=8, method="all", train_rows=32, checkpoint_every=2)
    batches = tuple(BatchOperations(owner="c", batch_id=at, rows=("3311",) * 2) for at in range(8))
    helpers = (Helper(node="b", start=0, stop=2),)
    plan = changed(plan, operations=Operations(batches=batches), helpers=helpers)
    times: dict[str, Any] = {"action_s": lambda node, action: 1.0, "control_s": lambda node: 0.0}
    order = run(plan, random.Random(1), items_ahead=16, **times).order["b"]
    done = [action.seq for action in order if action.op is Op.SAVE or (action.op is Op.UPDATE and action.start == 0)]
    assert len(done) == 12 and done == sorted(done)


def test_helpers_score_nothing_and_evaluate_nothing() -> None:
    """Only items with an update ship pairs."""
    plan = helped_plan(5)
    kinds = {item.seq: item.kind for turn in turn_sequence(plan.course) for item in items(plan.course, turn)}
    shipped = {
        action.seq
        for actions in run(plan, random.Random(2)).order.values()
        for action in actions
        if action.op is Op.SHIP
    }
    assert shipped and {kinds[seq] for seq in shipped} == {StepKind.TRAIN}


@pytest.mark.parametrize(
    ("helpers", "words"),
    [
        ((Helper(node="b", start=2, stop=4),), "can't be their helper"),
        ((Helper(node="z", start=1, stop=3),), "no single node hosts"),
        ((Helper(node="z", start=1, stop=1),), "need names and ascending ranges"),
        ((Helper(node="z", start=0, stop=2), Helper(node="y", start=1, stop=2)), "don't overlap"),
        ((Helper(node="", start=0, stop=2),), "need names"),
    ],
)
def test_helpers_that_fit_no_slice_are_refused(helpers: tuple[Helper, ...], words: str) -> None:
    """The placement names range and node."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_blocks=4)
    with pytest.raises(PlanError, match=words):
        dataclasses.replace(plan.placement, helpers=helpers)


def test_helpers_other_than_the_course_says_are_refused() -> None:
    """What is updated every few steps depends on who is helped, so it is of the course."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_blocks=4)
    course = dataclasses.replace(plan.course, offload=Offload(blocks=(Range(0, 2),), interval=2))
    placement = dataclasses.replace(plan.placement, helpers=(Helper(node="z", start=2, stop=4),))
    with pytest.raises(PlanError, match=r"lets helpers fit the blocks .*0, 2.*, the placement has"):
        Plan(course, (placement,))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": PipeAdapter()}, "pipeadapter keeps several versions"),
        ({"method": Hift()}, "hift trains all parameters"),
        ({"velora": Velora(blocks=(Range(1, 2),), layers=("down",))}, r"velora is for weights .* the blocks \[0, 2\)"),
        ({"frozen_blocks": 1}, "never train"),
    ],
)
def test_helpers_where_nobody_can_help_are_refused(changes: dict[str, Any], words: str) -> None:
    """The reason, and what could be done."""
    plan = changed(make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_blocks=4), **changes)
    placement = dataclasses.replace(plan.placement, helpers=(Helper(node="z", start=0, stop=2),))
    with pytest.raises(PlanError, match=words):
        Plan(plan.course, (placement,))


@pytest.mark.parametrize("owner", ["a", "c"])
def test_helpers_get_no_pairs_of_private_blocks(owner: str) -> None:
    """They never train, so nothing of them leaves an owner, be it the host of the blocks above or not."""
    plan = make_plan([("a", 2, 4), ("b", 4, 6)], [owner], num_blocks=6, method="all", private_blocks=2)
    for start, stop in ((0, 2), (1, 3)):
        with pytest.raises(PlanError, match="which no single node hosts"):
            dataclasses.replace(plan.placement, helpers=(Helper(node="z", start=start, stop=stop),))
    placement = dataclasses.replace(plan.placement, helpers=(Helper(node="z", start=2, stop=4),))
    found = Plan(plan.course, (placement,))
    table = build_table(found, turn_sequence(found.course))
    shipped = {action for actions in table.values() for action in actions if action.op is Op.SHIP}
    assert shipped and {(action.start, action.stop) for action in shipped} == {(2, 4)}
    assert {action.start for action in table["z"] if action.op in (Op.RECEIVE, Op.FIT, Op.UPDATE)} == {2}


@pytest.mark.promise("7 bounded memory")
def test_helpers_have_one_update_of_a_range_under_way() -> None:
    """And the one before it, where hosts do not wait; pairs wait with a host whose helper is slow."""
    for seed in range(20):
        plan = helped_plan(seed)
        ranges = Counter((one.node, plan.placement.host_of(one.start)) for one in plan.placement.helpers)
        each = 2 if plan.course.offload is not None and plan.course.offload.overlap else 1
        for (helper, host), count in ranges.items():
            assert max_waiting(plan, Payload.WEIGHTS, helper, host) == each * count, seed
            assert max_waiting(plan, Payload.PAIRS, host, helper) == WAITING[Payload.PAIRS], seed


@pytest.mark.parametrize("seed", [24, 42])
def test_helpers_that_are_hosts_do_not_wait_for_each_other_in_a_table(seed: int) -> None:
    """A host that helps another one sends its weights before it waits for those of its own blocks."""
    plan = helped_plan(seed)
    turns = tuple(turn_sequence(plan.course))
    validate_table(plan, turns, build_table(plan, turns))
