"""The memory estimate bounds what really waits at a node, for any plan and any timing."""

from __future__ import annotations

import dataclasses
import random

import pytest

from ringtune.costs.memory_estimate import node_memory
from ringtune.costs.profile import Profile
from ringtune.engine import events as ev
from ringtune.engine.events import Handled
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.lowering import legs
from ringtune.schedule.methods import Hift
from ringtune.schedule.operation_tables import BlockCapacity, Choice
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, items, turn_sequence
from ringtune.schedule.units import Range
from ringtune.schedule.versions import trained
from sim.prediction import predict
from sim.ring import VirtualRing
from tests.suites.test_helpers_on_virtual_clock import some_plan
from tests.suites.test_hift_on_virtual_clock import hift_plan
from tests.support.model_facts import WEIGHTLESS
from tests.support.plans import changed, make_plan, random_operations, random_plan
from tests.support.profiles import random_profile


def last_actions(plan: Plan, node: str) -> set[Action]:
    """The action of each micro-batch at a node after which nothing of it is needed there."""
    every = (item for turn in turn_sequence(plan.course) for item in items(plan.course, turn))
    ways = ((item, micro, way) for item in every for micro, way in enumerate(legs(plan, item, node)) if way)
    return {way[-1].bind(item.seq, micro) for item, micro, way in ways}


def peak_waiting(plan: Plan, node: str, handled: list[Handled]) -> int:
    """Most hidden states and gradients that one node held at once, in its inbox or between two actions."""
    last = last_actions(plan, node)
    inbox = peak = 0
    held: set[tuple[int, int]] = set()
    for _, event, commands in handled:
        if isinstance(event, ev.TensorArrived):
            inbox += 1
        if isinstance(event, ev.ActionDone):
            action = event.action
            if action.op is Op.EMBED:
                held.add((action.seq, action.micro))
            elif action in last:
                held.discard((action.seq, action.micro))
        peak = max(peak, inbox + len(held))
        for command in commands:
            if isinstance(command, ev.Accept):
                inbox -= 1
                held.add((command.key.seq, command.key.micro))
            elif isinstance(command, ev.SendTensor):
                held.discard((command.key.seq, command.key.micro))
            peak = max(peak, inbox + len(held))
    return peak


@pytest.mark.parametrize("seed", range(80))
@pytest.mark.sampled(20)
def test_memory_buffers_bound_what_waits_at_every_node(seed: int) -> None:
    """No timing makes a node hold more tensors than the planner counted."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    speeds = {node: rng.choice([0.01, 1.0, 10.0]) for node in plan.nodes}
    result = VirtualRing(
        plan,
        action_s=lambda node, action: speeds[node] * rng.random(),
        message_s=lambda source, target, payload: rng.choice([0.0, 0.1, 5.0]) * rng.random(),
    ).run()
    tensor_bytes = plan.course.microbatch_sizes()[0] * plan.course.max_length * plan.course.hidden_size * 4
    for node in plan.nodes:
        estimate = node_memory(plan, node, WEIGHTLESS, optimizer="sgd", activation_token_bytes=0)
        assert peak_waiting(plan, node, result.handled[node]) * tensor_bytes <= estimate.parts()["buffers"], node


@pytest.mark.parametrize("seed", range(80))
@pytest.mark.sampled(20)
def test_memory_activations_bound_the_graphs_that_are_kept(seed: int) -> None:
    """No timing makes a node keep more graphs than those of one item, as deep as the run ever trains."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    result = VirtualRing(
        plan,
        action_s=lambda node, action: rng.random(),
        message_s=lambda source, target, payload: rng.choice([0.0, 5.0]) * rng.random(),
    ).run()
    lowest = trained(plan.course, StepKind.TRAIN, plan.course.num_steps - 1).lowest
    tokens = plan.course.microbatch_sizes()[0] * plan.course.max_length
    for node in plan.nodes:
        graphs = peak = 0
        for action in result.order[node]:
            if action.op in (Op.FORWARD, Op.BACKWARD):
                graphs += (action.stop - action.start) * (1 if action.op is Op.FORWARD else -1)
                assert action.start >= lowest
            peak = max(peak, graphs)
        estimate = node_memory(plan, node, WEIGHTLESS, optimizer="sgd", activation_token_bytes=1)
        assert graphs == 0
        assert peak * tokens <= estimate.parts()["activations"]


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("hosts", [2, 3, 5, 8])
def test_memory_of_an_owner_at_the_top_bounds_its_own_micro_batches(hosts: int) -> None:
    """Those wait between its frozen blocks and those with a graph while another owner's head is slow."""
    slices = [(f"h{at}", at, at + 1) for at in range(hosts - 1)] + [("o", hosts - 1, hosts + 2)]
    plan = make_plan(
        slices,
        ["p", "o"],
        num_blocks=hosts + 2,
        every_steps=1000,
        num_steps=40,
        local_iterations=10,
        batch_size=4,
        microbatches=4,
        eval_rows=0,
    )
    slow = {"p": 50.0, "o": 0.2}
    result = VirtualRing(plan, action_s=lambda node, action: slow.get(node, 0.05)).run()
    bound = node_memory(plan, "o", WEIGHTLESS, optimizer="sgd", activation_token_bytes=0).parts()["buffers"]
    tensor_bytes = plan.course.microbatch_sizes()[0] * plan.course.max_length * plan.course.hidden_size * 4
    assert result.finish is not None
    assert not result.finish.error
    assert peak_waiting(plan, "o", result.handled["o"]) * tensor_bytes <= bound


def with_operations(plan: Plan, rng: random.Random) -> Plan:
    """The plan with tables of any number of subnets, given or chosen by the run."""
    subnets = rng.choice([1, 2, 4])
    kind = rng.choice(["table", "random", "two-stage", "magnitude"])
    if kind == "table":
        codes = rng.choice(["123", "13"])
        return changed(plan, operations=random_operations(rng, plan.course, codes=codes, subnets=subnets))
    full = rng.choice([0.3, 0.5, 1.0]) * plan.course.batch_size
    capacity = BlockCapacity(full=2 * full, forward_only=rng.choice([0.0, 1.0]), forward=1.0, backward=1.0)
    refresh = rng.choice([0, 2])
    return changed(plan, choice=Choice(policy=kind, subnets=subnets, capacities=(capacity,), refresh_steps=refresh))


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("seed", range(80))
@pytest.mark.sampled(20)
def test_memory_with_operations_bounds_what_the_ledger_counts(seed: int) -> None:
    """Graphs of parts of blocks, of slices that are passed by, and of scores: never more than the planner counted."""
    rng = random.Random(seed)
    plan = with_operations(random_plan(rng), rng)
    found = predict(plan, random_profile(plan, rng), optimizer=rng.choice(["sgd", "adamw"]))
    for node in found.nodes:
        assert node.peak_memory_bytes <= node.needed_bytes, node.node


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_memory_of_full_parameters_bounds_what_a_prediction_holds(first: int) -> None:
    """Weights, gradients, state in memory, on disk or dropped, copies on their way: never more than was planned."""
    for seed in range(first, first + 20):
        rng = random.Random(seed)
        plan = hift_plan(seed)
        if isinstance(plan.course.method, Hift):
            method = dataclasses.replace(plan.course.method, drops_state=rng.random() < 0.3)
            plan = changed(plan, method=method, state_on_disk=rng.random() < 0.4)
        if rng.random() < 0.5:
            first = rng.randrange(plan.course.num_blocks)
            plan = changed(plan, recompute=(Range(first, rng.randint(first, plan.course.num_blocks - 1) + 1),))
        facts = full_parameters_of(random_profile(plan, rng))
        prediction = predict(plan, facts, optimizer=rng.choice(["adamw", "sgd"]))
        for node in prediction.nodes:
            assert node.peak_memory_bytes <= node.needed_bytes, (seed, node)
        assert all(node.peak_memory_bytes for node in prediction.nodes if node.stop > node.start)


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("seed", range(12))
def test_memory_of_what_is_kept_of_turns_is_in_a_prediction_too(seed: int) -> None:
    """As many bytes more as the plan says, and within what it says a node needs."""
    rng = random.Random(seed)
    plan = changed(random_plan(rng), copies=False)
    facts = random_profile(plan, rng)
    keeping = changed(plan, copies=True)
    without, found = (predict(each, facts, optimizer="adamw") for each in (plan, keeping))
    total = 0
    for before, after in zip(without.nodes, found.nodes, strict=True):
        model = facts.by_name[after.node].model
        estimate = node_memory(keeping, after.node, model, optimizer="adamw", activation_token_bytes=0)
        kept_bytes = estimate.parts()["kept"]
        assert after.peak_memory_bytes == before.peak_memory_bytes + kept_bytes
        assert after.peak_memory_bytes <= after.needed_bytes
        total += kept_bytes
    assert total


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled(10)
def test_memory_buffers_and_graphs_of_full_parameters_are_bounded(seed: int) -> None:
    """No timing makes a node hold more tensors or graphs than the planner counted, those of the embedding too."""
    rng = random.Random(seed)
    plan = hift_plan(seed)
    speeds = {node: rng.choice([0.01, 1.0, 10.0]) for node in plan.nodes}
    result = VirtualRing(
        plan,
        action_s=lambda node, action: speeds[node] * rng.random(),
        message_s=lambda source, target, payload: rng.choice([0.0, 0.1, 5.0]) * rng.random(),
    ).run()
    tokens = plan.course.microbatch_sizes()[0] * plan.course.max_length
    for node in plan.nodes:
        estimate = node_memory(plan, node, WEIGHTLESS, optimizer="sgd", activation_token_bytes=0)
        waiting = peak_waiting(plan, node, result.handled[node])
        assert waiting * tokens * plan.course.hidden_size * 4 <= estimate.parts()["buffers"], (seed, node)


def full_parameters_of(profile: Profile) -> Profile:
    """The profile of a model whose parameters all train."""
    nodes = []
    for node in profile.nodes:
        model = dataclasses.replace(
            node.model, block_bytes=0, adapter_block_bytes=53_000, embedding_bytes=0,
            embedding_train_bytes=9_000, token_table_bytes=8_000,
        )  # fmt: skip
        nodes.append(dataclasses.replace(node, model=model, shape=dataclasses.replace(node.shape, adapter="full")))
    return dataclasses.replace(profile, nodes=tuple(nodes))


def with_pairs(profile: Profile, *, adapter_bytes: int, token_bytes: int, kept_bytes: float) -> Profile:
    """The profile of a model that takes little but for its adapters and their pairs."""
    model = dataclasses.replace(
        profile.nodes[0].model, adapter_block_bytes=adapter_bytes, pair_token_bytes=token_bytes,
        pair_rounded_token_bytes=token_bytes, pair_projected_token_bytes=token_bytes,
    )  # fmt: skip
    small = {"activation_token_bytes": kept_bytes, "train_tokens": 0.0, "eval_tokens": 0.0}
    nodes = (dataclasses.replace(node, model=model, **small) for node in profile.nodes)  # type: ignore[arg-type]
    return dataclasses.replace(profile, nodes=tuple(nodes))


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("first", range(1410, 1470, 20))
@pytest.mark.parametrize(
    ("adapter_bytes", "token_bytes", "kept_bytes"),
    [(10**8, 1, 1.0), (1, 10**6, 1.0), (1, 10**6, 1.1e6), (3_000, 96, 1_000.0)],
)
@pytest.mark.sampled(2)
def test_memory_of_helpers_bounds_what_a_prediction_holds(
    first: int, adapter_bytes: int, token_bytes: int, kept_bytes: float
) -> None:
    """Pairs at hosts, on their way and at helpers, gradients and state where they are: never more than was planned."""
    for seed in range(first, first + 20):
        rng = random.Random(seed)
        plan = some_plan(seed)
        if rng.random() < 0.3:
            lowest = rng.randrange(plan.course.num_blocks)
            plan = changed(plan, recompute=(Range(lowest, rng.randint(lowest, plan.course.num_blocks - 1) + 1),))
        profile = with_pairs(
            random_profile(plan, rng), adapter_bytes=adapter_bytes, token_bytes=token_bytes, kept_bytes=kept_bytes
        )
        prediction = predict(plan, profile, optimizer=rng.choice(["adamw", "sgd"]))
        for node in prediction.nodes:
            assert node.peak_memory_bytes <= node.needed_bytes, (seed, node)
