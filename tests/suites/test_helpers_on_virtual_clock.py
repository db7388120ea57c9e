"""What must hold for every plan with helpers and every timing, on a virtual clock."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from typing import Any

import pytest

from ringtune.engine import events as ev
from ringtune.errors import PlanError
from ringtune.schedule.actions import Action, Op, Payload
from ringtune.schedule.course import Offload
from ringtune.schedule.lowering import WAITING, max_waiting
from ringtune.schedule.methods import Hift, PipeAdapter
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import Velora, merged
from ringtune.schedule.table import build_table, format_table
from ringtune.schedule.turns import StepKind, items, turn_sequence
from ringtune.schedule.units import Range
from sim.ring import RingResult, VirtualRing
from tests.support.plans import changed, make_plan, random_plan
from tests.support.tables import parse_table
from tests.support.validate import validate_table

OUTSIDERS = ("y", "z")
"""Nodes that only help."""


def with_helpers(plan: Plan, rng: random.Random, *, interval: int = 1, overlap: bool = False) -> Plan:
    """The plan with helpers for random parts of its slices: other hosts, owners, or nodes that do nothing else."""
    helpers: list[Helper] = []
    for piece in plan.placement.hosts:
        start = max(piece.start, plan.course.frozen_blocks)
        borders = sorted(rng.sample(range(start, piece.stop + 1), min(4, piece.stop + 1 - start)))
        for first, last in itertools.pairwise(borders):
            others = [node for node in (*plan.nodes, *OUTSIDERS) if node != piece.node]
            if rng.random() < 0.8:
                helpers.append(Helper(node=rng.choice(others), start=first, stop=last))
    placement = dataclasses.replace(plan.placement, helpers=tuple(helpers))
    course = plan.course
    if (interval > 1 or overlap) and helpers:
        blocks = merged(Range(helper.start, helper.stop) for helper in helpers)
        course = dataclasses.replace(course, offload=Offload(blocks=blocks, interval=interval, overlap=overlap))
    return Plan(course, (placement,))


def some_plan(seed: int) -> Plan:
    """A random plan with helpers; some update helped blocks every few steps only, in some the hosts do not wait."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    while plan.course.method.name == "pipeadapter":
        plan = random_plan(rng)
    return with_helpers(plan, rng, interval=rng.choice([1, 1, rng.randint(2, 5)]), overlap=rng.random() < 0.4)


def run(plan: Plan, rng: random.Random) -> RingResult:
    """Every node has its own speed, every action and message its own delay."""
    speeds = {node: rng.choice([0.1, 1.0, 3.0]) for node in plan.nodes}
    return VirtualRing(
        plan,
        action_s=lambda node, action: speeds[node] * rng.random(),
        message_s=lambda source, target, payload: rng.choice([0.01, 0.1, 2.0]) * (0.1 + rng.random()),
        control_s=lambda node: rng.random(),
        items_ahead=rng.choice([1, 16]),
    ).run()


@pytest.mark.promise("2 right version")
@pytest.mark.parametrize("block", range(12))
@pytest.mark.sampled(2)
def test_helpers_any_plan_and_any_delays_carry_out_a_valid_table(block: int) -> None:
    """Whoever helps whom, the run ends, every forward and every fit saw the right version."""
    for seed in range(block * 15, block * 15 + 15):
        plan = some_plan(seed)
        result = run(plan, random.Random(seed))
        assert result.finish is not None and result.finish.error == "", (seed, result.finish)
        validate_table(plan, turn_sequence(plan.course), result.order)


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.sampled(2)
def test_helpers_order_of_fits_and_updates_is_equal_for_any_delays(seed: int) -> None:
    """Gradients are added up in one order, so the weights have equal bits."""
    plan = some_plan(seed)

    def changes(result: RingResult) -> dict[tuple[str, Op, int], list[Action]]:
        found: dict[tuple[str, Op, int], list[Action]] = {}
        for node, order in result.order.items():
            for action in order:
                if action.op in (Op.FIT, Op.BACKWARD, Op.HEAD, Op.UPDATE):
                    found.setdefault((node, action.op, action.start), []).append(action)
        return found

    first = changes(run(plan, random.Random(0)))
    for other in range(1, 12):
        assert changes(run(plan, random.Random(other))) == first, other


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.sampled(8)
def test_helpers_parcels_in_flight_are_bounded(seed: int) -> None:
    """Pairs wait with a host whose helper is slow; of weights one a range is under way."""
    plan = some_plan(seed)
    result = run(plan, random.Random(seed))
    ways = [
        (message.sent_s, 1, (message.payload, message.source, message.target))
        for message in result.messages
        if message.payload in (Payload.PAIRS, Payload.WEIGHTS)
    ]
    ways += [
        (entry.now_s, -1, (command.key.payload, command.source, node))
        for node, handled in result.handled.items()
        for entry in handled
        for command in entry.commands
        if isinstance(command, ev.AcceptParcel)
    ]
    ranges = Counter((one.node, plan.placement.host_of(one.start)) for one in plan.placement.helpers)
    waiting: Counter[tuple[str, str, str]] = Counter()
    for _, change, way in sorted(ways, key=lambda event: (event[0], event[1])):
        payload, source, target = way
        waiting[way] += change
        each = 2 if plan.course.offload is not None and plan.course.offload.overlap else 1
        most = each * ranges[source, target] if payload == Payload.WEIGHTS else WAITING[payload]
        assert 0 <= waiting[way] <= most == max_waiting(plan, payload, source, target), way
    assert not +waiting


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


def test_helpers_table_prints_and_reads() -> None:
    """With the words of pairs and weights; and every message has its other end."""
    plan = some_plan(3)
    table = build_table(plan, turn_sequence(plan.course))
    text = format_table(table, plan.course.num_blocks)
    assert parse_table(text, plan.course.num_blocks) == table
    validate_table(plan, turn_sequence(plan.course), table)


def test_helpers_score_nothing_and_evaluate_nothing() -> None:
    """Only items with an update ship pairs."""
    plan = some_plan(5)
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


def test_helpers_survive_a_file() -> None:
    """A plan without helpers has the digest that it had."""
    plan = some_plan(7)
    assert Plan.from_json(plan.to_json()) == plan
    bare = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_blocks=4)
    assert "helpers" not in bare.to_json()["placements"][0] and "offload" not in bare.to_json()["course"]
