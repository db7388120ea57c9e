"""HiFT on a virtual clock, any groups, rings, owners, delays: right versions, equal copies, few gradients waiting."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest

from ringtune.engine import events as ev
from ringtune.engine.node_engine import NodeEngine
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Action, Op, Payload
from ringtune.schedule.lowering import links
from ringtune.schedule.methods import Hift, Method
from ringtune.schedule.methods.hift import ALWAYS, ORDERS
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Extent
from ringtune.schedule.table import build_table, format_table
from ringtune.schedule.turns import StartPoint, StepKind, items, turn_sequence
from ringtune.schedule.units import EMBEDDING, Units
from ringtune.schedule.versions import trained
from sim.ring import Message, RingResult, VirtualRing
from tests.support.plans import changed, make_plan, random_plan
from tests.support.tables import parse_table
from tests.support.validate import validate_table


@dataclass(frozen=True)
class ScatteredFull(Method):
    """Any units train at a step, the embedding too: harder than any groups."""

    name = "scattered-full"
    full_parameters: ClassVar[bool] = True

    seed: int

    def trained(self, extent: Extent, step: int) -> Units:
        """Drawn anew for each step."""
        rng = random.Random(1000 * self.seed + step)
        chosen = [unit for unit in range(-1, extent.num_blocks + 1) if rng.random() < 0.4]
        return Units.of(extent.num_blocks, chosen or [rng.randint(-1, extent.num_blocks)])


def hift_plan(seed: int) -> Plan:
    """Any ring, owners and groups; each third plan trains any units instead."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    first = plan.placement.hosts[0]  # takes the blocks that were private
    slices = tuple((piece.node, 0 if piece is first else piece.start, piece.stop) for piece in plan.placement.slices)
    plan = changed(plan, private_blocks=0, slices=slices, method=Hift())
    always = tuple(unit for unit in ALWAYS if rng.random() < 0.3)
    method: Method = Hift(
        group_size=rng.randint(1, 5), order=rng.choice(ORDERS), seed=rng.randint(0, 9), always_active=always
    )
    return changed(plan, method=ScatteredFull(seed) if seed % 3 == 2 else method)


def run(plan: Plan, seed: int, start: StartPoint | None = None) -> RingResult:
    """With nodes and links of very different speeds."""
    rng = random.Random(seed)
    speeds = {node: rng.choice([0.01, 1.0, 10.0]) for node in plan.nodes}
    slow = rng.choice([0.1, 5.0, 50.0])
    return VirtualRing(
        plan,
        action_s=lambda node, action: speeds[node] * rng.random(),
        message_s=lambda source, target, payload: slow * rng.random() if payload == "u" else 0.5 * rng.random(),
        control_s=lambda node: rng.random(),
        items_ahead=rng.choice([1, 16]),
        start=start,
    ).run()


@pytest.mark.promise("2 right version")
@pytest.mark.parametrize("first", range(0, 200, 20))
@pytest.mark.sampled(2)
def test_hift_any_plan_and_any_delays_carry_out_a_valid_table(first: int) -> None:
    """No deadlock; forwards, heads, embeddings and checkpoints see all earlier updates, copies have each once."""
    for seed in range(first, first + 20):
        plan = hift_plan(seed)
        result = run(plan, seed)
        assert result.finish == rd.Finish("", ""), (seed, result.finish)
        validate_table(plan, turn_sequence(plan.course), result.order)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.sampled(8)
def test_hift_has_a_valid_table_that_is_read_back(seed: int) -> None:
    """What is printed of a plan could be carried out, gradients of units included."""
    plan = hift_plan(seed)
    turns = tuple(turn_sequence(plan.course))
    table = build_table(plan, turns)
    validate_table(plan, turns, table)
    assert parse_table(format_table(table, plan.course.num_blocks), plan.course.num_blocks) == table


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("always", [(), ("head",), ("embedding", "head")])
@pytest.mark.parametrize("owners", [("b",), ("b", "a"), ("a", "e", "c")])
@pytest.mark.sampled(2)
def test_hift_order_of_weight_changes_is_equal_for_any_delays(owners: tuple[str, ...], always: tuple[str, ...]) -> None:
    """Each unit's gradients and updates have one order at every node that has it, in 16 timings."""
    plan = make_plan(
        [("a", 0, 1), ("b", 1, 3), ("c", 3, 3), ("d", 3, 6)],
        owners,
        num_blocks=6, num_steps=14, method=Hift(group_size=3, order="random", seed=1, always_active=always),
        eval_every=5, checkpoint_every=4,
    )  # fmt: skip
    first = weight_changes(plan, run(plan, 0))
    for seed in range(1, 16):
        assert weight_changes(plan, run(plan, seed)) == first, seed


def weight_changes(plan: Plan, result: RingResult) -> dict[tuple[str, str], list[Action]]:
    """Per node and part (embedding, slice, head) the actions that add to its gradients, change or save it."""
    changes: dict[tuple[str, str], list[Action]] = {}
    for node, order in result.order.items():
        for action in order:
            if action.op in (Op.BACKWARD, Op.UPDATE, Op.HEAD, Op.SAVE):
                parts = {EMBEDDING: "embedding", plan.course.head: "head"}
                changes.setdefault((node, parts.get(action.start, "slice")), []).append(action)
    return changes


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("owners", [1, 2])
@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_hift_goes_on_in_the_middle_of_a_sweep(nodes: int, owners: int, group_size: int) -> None:
    """From any turn boundary a run does what the whole run did from there, for group sizes that divide 6 and not."""
    names = ["a", "b", "c", "d"][:nodes]
    cuts = {1: [0, 4], 2: [0, 1, 4], 4: [0, 1, 2, 3, 4]}[nodes]
    plan = make_plan(
        [(name, cuts[at], cuts[at + 1]) for at, name in enumerate(names)],
        ["a", "b"][:owners],
        method=Hift(group_size=group_size), num_steps=14, local_iterations=2, eval_rows=0, checkpoint_every=2,
    )  # fmt: skip
    whole = run(plan, 1)
    for step in (2, 4, 6):
        holder = plan.course.owners[(step // 2 - 1) % owners].node
        start = StartPoint.of(plan.course, step=step, holder=holder)
        turns = list(turn_sequence(plan.course, start=start))
        rest = run(plan, step, start)
        assert rest.finish == rd.Finish("", "")
        validate_table(plan, turns, rest.order, start=start)
        done = next(turn for turn in turn_sequence(plan.course) if turn.first_step == step and turn.kind == "train")
        for key, order in weight_changes(plan, rest).items():
            after = [action for action in weight_changes(plan, whole)[key] if action.seq >= done.first_seq]
            assert [action._replace(seq=0) for action in order] == [action._replace(seq=0) for action in after]


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled(10)
def test_hift_few_gradients_of_units_are_under_way(seed: int) -> None:
    """Never more than one of each unit from an owner to another one, however slow that is to take them."""
    plan = hift_plan(seed)
    result = run(plan, seed)
    sent = [
        (each.sent_s, 1, (each.source, each.target, each.key.boundary))
        for each in result.messages
        if each.payload == Payload.UNIT_GRAD
    ]
    taken = [
        (entry.now_s, -1, (command.source, node, command.key.boundary))
        for node, handled in result.handled.items()
        for entry in handled
        for command in entry.commands
        if isinstance(command, ev.AcceptParcel)
    ]
    assert len(sent) == len(taken)
    waiting: Counter[tuple[str, str, int]] = Counter()
    for _, change, way in sorted(sent + taken, key=lambda event: (event[0], event[1])):
        waiting[way] += change
        assert waiting[way] <= 1


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled(10)
def test_hift_sends_each_gradient_of_a_unit_once_to_every_other_owner(seed: int) -> None:
    """Over links that the plan has; no head is handed over."""
    plan = hift_plan(seed)
    result = run(plan, seed)
    others = len(plan.course.owners) - 1
    expected: Counter[tuple[int, int]] = Counter()
    for item in (item for turn in turn_sequence(plan.course) for item in items(plan.course, turn)):
        units = trained(plan.course, item.kind, item.step) if item.kind is StepKind.TRAIN else Units(0)
        expected += Counter({(item.seq, unit): others for unit in (EMBEDDING, plan.course.head) if unit in units})
    found = Counter((each.key.seq, each.key.boundary) for each in result.messages if each.payload == "u")
    assert found == expected
    assert not any(each.payload == Payload.HEAD for each in result.messages)
    assert {(each.source, each.target) for each in result.messages} <= links(plan)


@pytest.mark.promise("3 frozen means free")
@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_hift_nothing_below_the_group_keeps_a_graph(seed: int) -> None:
    """Backward stops at the lowest unit of the group; only the embedding's group brings a gradient to the owner."""
    plan = hift_plan(seed)
    result = run(plan, seed)
    by_seq = {item.seq: item for turn in turn_sequence(plan.course) for item in items(plan.course, turn)}
    for order in result.order.values():
        for action in order:
            if action.op in (Op.FORWARD, Op.BACKWARD):
                item = by_seq[action.seq]
                assert action.start >= trained(plan.course, item.kind, item.step).lowest


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(8)
def test_hift_recorded_events_give_the_same_commands(seed: int) -> None:
    """A fresh engine that is fed the events of a run answers with the very commands of that run."""
    plan = hift_plan(seed)
    for node, handled in run(plan, seed).handled.items():
        engine = NodeEngine(plan, node, wait_s=1e6)
        for entry in handled:
            assert engine.handle(entry.event, entry.now_s) == entry.commands


@pytest.mark.promise("6 every wait ends")
def test_hift_a_gradient_that_never_comes_is_named() -> None:
    """A host that owns data too says which gradient it waits for, and from whom."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], method=Hift(order="top2down"), num_steps=4)

    def lost(message: Message) -> bool:
        return message.payload == Payload.UNIT_GRAD

    result = VirtualRing(plan, wait_s=50.0, drop=lost).run()
    assert result.finish is not None and result.finish.error == "DeadlineError"
    assert "the gradient of the head of step 0 (train), from node a" in result.finish.message
