"""What a prediction holds at a node is never more than the plan counted, for any plan, profile and technique.

That this bounds what really waits at a node, in any timing, is a law of any plan: ``test_any_plan_on_virtual_clock``.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from ringtune.costs.memory_estimate import node_memory
from ringtune.costs.memory_sizes import MemorySettings
from ringtune.costs.profile import Profile
from ringtune.run_control import events as rd
from ringtune.schedule.methods import Everything, Hift, RingAda
from ringtune.schedule.operation_tables import BlockCapacity, Choice
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import Range
from sim.prediction import predict
from tests.features.plans import AnyRun, PlanKind, helped_plan, hift_plan, invertible_plan
from tests.suites.test_any_plan_on_virtual_clock import peak_waiting
from tests.support.plans import changed, make_plan, random_operations, random_plan, random_replicas
from tests.support.profiles import WEIGHTLESS, random_profile
from tests.support.recorded_ring import RecordedRing


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


def with_pairs(profile: Profile, adapter_bytes: int, token_bytes: int, kept_bytes: float) -> Profile:
    """The profile of a model that takes little but for its adapters and their pairs."""
    model = dataclasses.replace(
        profile.nodes[0].model, adapter_block_bytes=adapter_bytes, pair_token_bytes=token_bytes,
        pair_rounded_token_bytes=token_bytes, pair_projected_token_bytes=token_bytes,
    )  # fmt: skip
    small = {"activation_token_bytes": kept_bytes, "train_tokens": 0.0, "eval_tokens": 0.0}
    nodes = (dataclasses.replace(node, model=model, **small) for node in profile.nodes)  # type: ignore[arg-type]
    return dataclasses.replace(profile, nodes=tuple(nodes))


def recomputing(plan: Plan, rng: random.Random, share: float) -> Plan:
    """The plan in which some blocks run again, in this share of all plans."""
    if rng.random() >= share:
        return plan
    lowest = rng.randrange(plan.course.num_blocks)
    return changed(plan, recompute=(Range(lowest, rng.randint(lowest, plan.course.num_blocks - 1) + 1),))


def of_operations(seed: int, rng: random.Random) -> tuple[Plan, Profile]:
    """Graphs of parts of blocks, of slices that are passed by, and of scores."""
    plan = with_operations(random_plan(rng), rng)
    return plan, random_profile(plan, rng)


def of_full_parameters(seed: int, rng: random.Random) -> tuple[Plan, Profile]:
    """Weights, gradients, state in memory, on disk or dropped, copies on their way."""
    plan = hift_plan(seed)
    if isinstance(plan.course.method, Hift):
        method = dataclasses.replace(plan.course.method, drops_state=rng.random() < 0.3)
        plan = changed(plan, method=method, state_on_disk=rng.random() < 0.4)
    plan = recomputing(plan, rng, 0.5)
    return plan, full_parameters_of(random_profile(plan, rng))


def of_invertible(seed: int, rng: random.Random) -> tuple[Plan, Profile]:
    """Weights, gradients and moments of an adapter at the embedding, larger than all else; often with operations."""
    plan = changed(invertible_plan(seed), method=rng.choice([Everything(), RingAda(every_steps=1)]))
    plan = recomputing(plan, rng, 0.3) if seed % 2 else with_operations(plan, rng)
    profile = random_profile(plan, rng)
    nodes = (
        dataclasses.replace(node, model=dataclasses.replace(node.model, embedding_train_bytes=10**7))
        for node in profile.nodes
    )
    return plan, dataclasses.replace(profile, nodes=tuple(nodes))


def of_replicas(seed: int, rng: random.Random) -> tuple[Plan, Profile]:
    """Gradients of the other hosts of a stage too."""
    plan = random_replicas(rng, with_operations=seed % 2 == 1)
    return plan, random_profile(plan, rng)


def of_helpers(sizes: tuple[int, int, float]) -> Callable[[int, random.Random], tuple[Plan, Profile]]:
    """Pairs at hosts, on their way and at helpers, of a model with these sizes."""

    def made(seed: int, rng: random.Random) -> tuple[Plan, Profile]:
        plan = recomputing(helped_plan(1410 + seed), rng, 0.3)
        return plan, with_pairs(random_profile(plan, rng), *sizes)

    return made


PREDICTED: dict[str, Callable[[int, random.Random], tuple[Plan, Profile]]] = {
    "operations": of_operations,
    "full-parameters": of_full_parameters,
    "invertible": of_invertible,
    "replicas": of_replicas,
    "helpers-large-adapters": of_helpers((10**8, 1, 1.0)),
    "helpers-large-pairs": of_helpers((1, 10**6, 1.0)),
    "helpers-large-graphs": of_helpers((1, 10**6, 1.1e6)),
    "helpers": of_helpers((3_000, 96, 1_000.0)),
}


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.thorough) for block in range(1, 12))])
@pytest.mark.parametrize("name", PREDICTED)
def test_prediction_holds_no_more_than_was_planned(name: str, block: int) -> None:
    """As the ledger of the simulator counts it: weights, gradients, moments, graphs, and what waits or travels."""
    for seed in range(block * 7, block * 7 + 7):
        rng = random.Random(seed)
        plan, profile = PREDICTED[name](seed, rng)
        found = predict(plan, profile, MemorySettings(rng.choice(["adamw", "sgd"])))
        for node in found.nodes:
            assert node.peak_memory_bytes <= node.needed_bytes, (seed, node)
        assert any(node.peak_memory_bytes for node in found.nodes), seed


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
    one = AnyRun(PlanKind(name="slow", plan=lambda seed: plan), 0)
    one.result = RecordedRing(plan, action_s=lambda node, action: slow.get(node, 0.05)).run()
    bound = node_memory(plan, "o", WEIGHTLESS, optimizer="sgd", activation_token_bytes=0).parts()["buffers"]
    tensor_bytes = plan.course.microbatch_sizes()[0] * plan.course.max_length * plan.course.hidden_size * 4
    assert one.result.finish == rd.Finish("", "")
    assert peak_waiting(one, "o") * tensor_bytes <= bound


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.sampled(4)
def test_memory_of_what_is_kept_of_turns_is_in_a_prediction_too(seed: int) -> None:
    """As many bytes more as the plan says, and within what it says a node needs."""
    rng = random.Random(seed)
    plan = changed(random_plan(rng), copies=False)
    facts = random_profile(plan, rng)
    keeping = changed(plan, copies=True)
    without, found = (predict(each, facts) for each in (plan, keeping))
    total = 0
    for before, after in zip(without.nodes, found.nodes, strict=True):
        model = facts.by_name[after.node].model
        estimate = node_memory(keeping, after.node, model, optimizer="adamw", activation_token_bytes=0)
        kept_bytes = estimate.parts()["kept"]
        assert after.peak_memory_bytes == before.peak_memory_bytes + kept_bytes
        assert after.peak_memory_bytes <= after.needed_bytes
        total += kept_bytes
    assert total
