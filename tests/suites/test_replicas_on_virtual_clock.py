"""Stages with several hosts keep all rules, whatever the plan, the shares and the timing."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ringtune.costs.memory_estimate import node_memory
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Op, Payload
from ringtune.schedule.lowering import max_waiting
from ringtune.schedule.placement import Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.table import build_table, format_table
from ringtune.schedule.turns import turn_sequence
from sim.prediction import predict
from tests.suites.test_any_method_on_virtual_clock import Scattered, peak_graphs
from tests.suites.test_memory_on_virtual_clock import peak_waiting
from tests.suites.test_ring_on_virtual_clock import run_with_random_delays, weight_changes
from tests.support.model_facts import WEIGHTLESS
from tests.support.plans import changed, make_plan, random_replicas
from tests.support.profiles import random_profile
from tests.support.tables import parse_table
from tests.support.validate import validate_table


def plan_of(seed: int) -> Plan:
    """Any plan with replicas; every third one has a method that trains any units, every second one operations."""
    plan = random_replicas(random.Random(seed), with_operations=seed % 2 == 1)
    return changed(plan, method=Scattered(seed)) if seed % 3 == 0 else plan


@pytest.mark.promise("2 right version")
@pytest.mark.parametrize("first", range(0, 240, 20))
@pytest.mark.sampled(1)
def test_replicas_carry_out_a_valid_table(first: int) -> None:
    """No deadlock, every forward sees its version, and each host has all gradients before its update."""
    for seed in range(first, first + 20):
        plan = plan_of(seed)
        result = run_with_random_delays(plan, random.Random(seed))
        assert result.finish == rd.Finish("", ""), (seed, result.finish)
        validate_table(plan, turn_sequence(plan.course), result.order)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_replicas_have_a_table_that_can_be_read_back(first: int) -> None:
    """What is printed of a plan with replicas is an order that could be carried out."""
    for seed in range(first, first + 20):
        plan = plan_of(seed)
        turns = tuple(turn_sequence(plan.course))
        table = build_table(plan, turns)
        validate_table(plan, turns, table)
        text = format_table(table, plan.course.num_blocks)
        assert parse_table(text, plan.course.num_blocks) == table, seed


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(3)
def test_replicas_order_of_weight_changes_is_equal_for_any_delays(seed: int) -> None:
    """Ten timings of one plan change weights in one order."""
    plan = plan_of(seed)
    first = weight_changes(plan, run_with_random_delays(plan, random.Random(0)))
    for other in range(1, 10):
        assert weight_changes(plan, run_with_random_delays(plan, random.Random(other))) == first


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled(10)
def test_replicas_gradients_under_way_are_bounded(seed: int) -> None:
    """Between two replicas no more gradients are under way than the receiver admits."""
    plan = plan_of(seed)
    result = run_with_random_delays(plan, random.Random(seed))
    is_grad = Payload.REPLICA_GRAD
    sent = [
        (message.sent_s, 1, (message.source, message.target))
        for message in result.messages
        if message.payload == is_grad
    ]
    taken = [
        (entry.now_s, -1, (command.source, node))
        for node, handled in result.handled.items()
        for entry in handled
        for command in entry.commands
        if type(command).__name__ == "AcceptParcel" and command.key.payload == is_grad
    ]
    assert len(sent) == len(taken)
    under_way: Counter[tuple[str, str]] = Counter()
    for _, change, link in sorted(sent + taken, key=lambda event: (event[0], event[1])):
        under_way[link] += change
        assert under_way[link] <= max_waiting(plan, is_grad, *link), link


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("seed", range(80))
@pytest.mark.sampled(12)
def test_replicas_stay_within_their_memory_estimate(seed: int) -> None:
    """No timing makes a host of a stage hold more tensors or graphs than the planner counted for its micro-batches."""
    plan = plan_of(seed)
    result = run_with_random_delays(plan, random.Random(seed))
    tokens = plan.course.microbatch_sizes()[0] * plan.course.max_length
    for node in plan.nodes:
        estimate = node_memory(plan, node, WEIGHTLESS, optimizer="sgd", activation_token_bytes=1)
        waiting = peak_waiting(plan, node, result.handled[node])
        assert waiting * tokens * plan.course.hidden_size * 4 <= estimate.parts()["buffers"], node
        assert peak_graphs(result, node) * tokens <= estimate.parts()["activations"], node


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.sampled(8)
def test_replicas_hold_no_more_than_the_planner_counted(seed: int) -> None:
    """Weights, moments, gradients of other hosts and graphs together, as the ledger of a prediction counts them."""
    rng = random.Random(seed)
    plan = random_replicas(rng, with_operations=seed % 2 == 1)
    found = predict(plan, random_profile(plan, rng), optimizer=rng.choice(["sgd", "adamw"]))
    for node in found.nodes:
        assert node.peak_memory_bytes <= node.needed_bytes, node.node


def test_replicas_share_the_micro_batches_as_their_shares_say() -> None:
    """Shares 2 and 1 of six micro-batches are four and two; each host sends its gradients once a step."""
    plan = make_plan([("a", 0, 4)], ["c"], num_blocks=4, microbatches=6, batch_size=6, num_steps=4, method="all")
    plan = changed(plan, slices=(Slice(node="a", start=0, stop=4, share=2), Slice(node="b", start=0, stop=4)))
    result = run_with_random_delays(plan, random.Random(0))
    forwards = {node: sum(one.op is Op.FORWARD for one in order) for node, order in result.order.items()}
    assert (forwards["a"], forwards["b"]) == (4 * 4, 4 * 2)
    sent = [one for order in result.order.values() for one in order if one.payload == Payload.REPLICA_GRAD]
    assert len(sent) == 4 * 2 * 2
