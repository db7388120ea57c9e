"""What must hold for every plan and every timing, on a virtual clock."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ringtune.engine.events import Accept
from ringtune.engine.node_engine import NodeEngine
from ringtune.schedule.actions import Action, Op, Payload
from ringtune.schedule.lowering import route
from ringtune.schedule.methods import Everything
from ringtune.schedule.plan import Plan
from ringtune.schedule.table import build_table
from ringtune.schedule.turns import Item, StepKind, Turn, items, turn_sequence
from ringtune.schedule.versions import trained
from sim.ring import Message, RingResult, VirtualRing
from tests.support.plans import changed, make_plan, random_plan
from tests.support.validate import validate_table

FOUR_HOSTS = [("a", 0, 1), ("b", 1, 3), ("c", 3, 3), ("d", 3, 6)]


def run_with_random_delays(plan: Plan, rng: random.Random) -> RingResult:
    """Every node has its own speed, every action and message its own delay."""
    speeds = {node: rng.choice([0.1, 1.0, 3.0]) for node in plan.nodes}
    return VirtualRing(
        plan,
        action_s=lambda node, action: speeds[node] * rng.random(),
        message_s=lambda source, target, payload: rng.choice([0.0, 0.1, 2.0]) * rng.random(),
        control_s=lambda node: rng.random(),
        items_ahead=rng.choice([1, 16]),
    ).run()


def lowest_trained(plan: Plan, item: Item) -> int:
    """The lowest unit that gets a gradient in an item; above all units if none does."""
    return trained(plan.course, item.kind, item.step).lowest


def weight_changes(plan: Plan, result: RingResult) -> dict[tuple[str, str], list[Action]]:
    """Per node and unit (slice, head) the actions that add to its gradients or change it, in their order."""
    changes: dict[tuple[str, str], list[Action]] = {}
    for node, order in result.order.items():
        for action in order:
            if action.op in (Op.BACKWARD, Op.UPDATE, Op.HEAD):
                is_head = action.op is Op.HEAD or action.start == plan.course.num_blocks
                changes.setdefault((node, "head" if is_head else "slice"), []).append(action)
    return changes


@pytest.mark.promise("2 right version")
@pytest.mark.parametrize("block", range(15))
@pytest.mark.sampled(2)
def test_ring_any_plan_and_any_delays_carry_out_a_valid_table(block: int) -> None:
    """Whatever the plan and the timing, the run ends and every forward saw the right version."""
    for seed in range(block * 20, block * 20 + 20):
        rng = random.Random(seed)
        plan = random_plan(rng)
        result = run_with_random_delays(plan, rng)
        assert result.finish is not None and result.finish.error == "", (seed, result.finish)
        validate_table(plan, turn_sequence(plan.course), result.order)


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("method", ["ringada", "all", "pipeadapter"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.sampled(2)
def test_ring_order_of_weight_changes_is_equal_for_any_delays(method: str, microbatches: int) -> None:
    """The same plan gives every node the same order of heads, backwards and updates in 30 timings."""
    plan = make_plan(
        FOUR_HOSTS, ["b", "a", "e"], num_blocks=6, num_steps=14, microbatches=microbatches, method=method, eval_every=5
    )
    first = weight_changes(plan, run_with_random_delays(plan, random.Random(0)))
    for seed in range(1, 30):
        assert weight_changes(plan, run_with_random_delays(plan, random.Random(seed))) == first, seed


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled(10)
def test_ring_credits_bound_what_is_in_flight(seed: int) -> None:
    """Never more than ``credits`` hidden states of one (link, boundary) are sent and not yet taken."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    result = run_with_random_delays(plan, rng)
    taken: Counter[tuple[str, str, int]] = Counter()
    sent = [
        (message.sent_s, 1, (message.source, message.target, message.key.boundary))
        for message in result.messages
        if message.payload == Payload.HIDDEN
    ]
    accepted = [
        (entry.now_s, -1, (command.source, node, command.key.boundary))
        for node, handled in result.handled.items()
        for entry in handled
        for command in entry.commands
        if isinstance(command, Accept) and command.key.is_hidden
    ]
    for _, change, channel in sorted(sent + accepted, key=lambda event: (event[0], event[1])):
        taken[channel] += change
        assert taken[channel] <= plan.placement.credits, channel


@pytest.mark.promise("3 frozen means free")
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled(10)
def test_ring_no_gradient_below_the_lowest_trainable_block(seed: int) -> None:
    """A slice below the lowest trainable block is never sent a gradient and never keeps a graph."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    result = run_with_random_delays(plan, rng)
    by_seq = {item.seq: item for turn in turn_sequence(plan.course) for item in items(plan.course, turn)}
    for message in result.messages:
        if message.payload == Payload.GRAD:
            assert message.key.boundary > lowest_trained(plan, by_seq[message.key.seq])
    for spans in result.spans.values():
        for span in spans:
            if span.action.op is Op.FORWARD:
                assert span.action.start >= lowest_trained(plan, by_seq[span.action.seq])


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.sampled(8)
def test_ring_at_most_one_item_keeps_a_graph_at_a_node(seed: int) -> None:
    """A node's next forward with graph starts only after its previous item's update; PipeAdapter is the exception."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    if plan.course.method.name == "pipeadapter":
        plan = changed(plan, method=Everything())
    for actions in run_with_random_delays(plan, rng).order.values():
        open_items: set[int] = set()
        for action in actions:
            if action.op is Op.FORWARD:
                open_items.add(action.seq)
            elif action.op is Op.UPDATE and action.start < plan.course.num_blocks:
                open_items.discard(action.seq)
            assert len(open_items) <= 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(8)
def test_ring_recorded_events_give_the_same_commands(seed: int) -> None:
    """A fresh engine that is fed the events of a run answers with the very commands of that run."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    for node, handled in run_with_random_delays(plan, rng).handled.items():
        engine = NodeEngine(plan, node, wait_s=1e6)
        for entry in handled:
            assert engine.handle(entry.event, entry.now_s) == entry.commands


@pytest.mark.promise("6 every wait ends")
@pytest.mark.parametrize("payload", [Payload.HIDDEN, Payload.GRAD, Payload.HEAD])
def test_ring_lost_message_ends_in_an_error_that_names_it(payload: Payload) -> None:
    """If one message never arrives, the run fails by its deadline and says what was awaited from whom."""
    plan = make_plan(FOUR_HOSTS, ["a", "b"], num_blocks=6, num_steps=12)
    dropped: list[Message] = []

    def drop(message: Message) -> bool:
        if not dropped and message.payload == payload and message.sent_s > 10:
            dropped.append(message)
            return True
        return False

    ring = VirtualRing(plan, drop=drop, wait_s=100.0)
    result = ring.run()
    assert result.finish is not None and result.finish.error == "DeadlineError"
    assert "waited 100 s for" in result.finish.message and "from node" in result.finish.message
    word = {Payload.HIDDEN: "hidden state", Payload.GRAD: "gradient", Payload.HEAD: "head"}[payload]
    lost = ring.waiting_for(dropped[0].target)
    assert word in lost and f"from node {dropped[0].source}" in lost


def test_ring_owner_that_hosts_nothing_waits_as_long_as_the_turns_of_others_take() -> None:
    """A turn may take many times ``wait_s``; who has no part in it sees no progress and still must not give up."""
    hosts = [("a", 0, 2), ("b", 2, 4)]
    plan = make_plan(hosts, ["c", "d", "e"], num_steps=90, local_iterations=30, eval_rows=120, every_steps=20)
    ring = VirtualRing(plan, action_s=lambda node, action: 5.0, wait_s=100.0)
    result = ring.run()
    assert result.finish is not None
    assert (result.finish.error, result.finish.message) == ("", "")


def test_ring_frozen_hosts_run_ahead_of_the_initiator() -> None:
    """With one trainable block on the last of four equal hosts, steps overlap instead of adding up."""
    even = [("a", 0, 2), ("b", 2, 4), ("c", 4, 6), ("d", 6, 8)]
    plan = make_plan(
        even, ["owner"], num_blocks=8, num_steps=20, local_iterations=20, every_steps=1000, microbatches=1, eval_rows=0
    )

    def action_s(node: str, action: Action) -> float:
        if action.op in (Op.FORWARD, Op.FORWARD_FREE, Op.BACKWARD):
            return float(action.stop - action.start)
        return 0.0

    result = VirtualRing(plan, action_s=action_s).run()
    # one step alone takes 8 forwards and 1 backward; overlapped the busiest host (3 units) sets the pace
    assert result.wall_s == pytest.approx(9 + 19 * 3)


def test_ring_next_initiator_starts_before_the_turn_ends() -> None:
    """Frozen blocks work on the next initiator's first batch while the current one still trains."""
    plan = make_plan(FOUR_HOSTS, ["a", "d"], num_blocks=6, num_steps=8, local_iterations=4, every_steps=1000)
    result = VirtualRing(plan).run()
    turns: list[Turn] = list(turn_sequence(plan.course))
    end_of_first = max(s.end_s for s in result.spans["a"] if s.action.seq < turns[1].first_seq)
    starts = [s.start_s for s in result.spans["b"] if s.action.seq == turns[1].first_seq]
    assert min(starts) < end_of_first


def test_ring_evaluation_counts_every_owner_once_per_evaluation() -> None:
    """Each evaluation passes all evaluation batches of all owners."""
    plan = make_plan(FOUR_HOSTS, ["a", "b"], num_blocks=6, num_steps=8, eval_every=4, eval_rows=9, batch_size=4)
    result = VirtualRing(plan).run()
    logged = [entry for entry in result.logged if type(entry).__name__ == "LogEvaluation"]
    # 9 rows in batches of 4: micro-batches 2 + 2 + 1, each head counts 1 here; two owners
    assert [(entry.step, dict(entry.values)["count"]) for entry in logged] == [(4, 10.0), (8, 10.0)]
    assert sum(turn.kind is StepKind.EVALUATE for turn in turn_sequence(plan.course)) == 4


def test_ring_static_table_is_valid_for_any_plan() -> None:
    """The table that is printed for a plan passes its own validator."""
    for seed in range(100):
        plan = random_plan(random.Random(seed))
        turns = list(turn_sequence(plan.course))
        validate_table(plan, turns, build_table(plan, turns))
        assert route(plan, plan.course.owners[0].node)
