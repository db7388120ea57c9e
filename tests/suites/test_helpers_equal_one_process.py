"""Adapters that helpers fit are those of local training, for any helper, split, adapter and micro-batches.

The reference (``tests.support.reference``) is plain transformers + adapters + autograd on the whole model.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from edge.runtime.executor import NodeExecutor
from ringtune.config.sections import learning_rate
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Action, Payload
from ringtune.schedule.course import Offload
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import merged
from ringtune.schedule.turns import StartPoint, turn_sequence
from ringtune.schedule.units import Range
from sim.ring import VirtualRing
from tests.support import reference, resumed
from tests.support.plans import train_items
from tests.support.torch_ring import Case, TorchCarrier, distance, make_carrier, reference_of, write_inputs

ONE = (("a", 0, 4),)
TWO = (("b", 0, 1), ("a", 1, 4))
THREE = (("a", 0, 2), ("b", 2, 3), ("c", 3, 4))

Slices = tuple[tuple[str, int, int], ...]


def helper(node: str, start: int, stop: int) -> Helper:
    """A helper of the blocks [start, stop)."""
    return Helper(node=node, start=start, stop=stop)


WAYS: dict[str, tuple[Slices, tuple[Helper, ...]]] = {
    "one-idle-helper": (ONE, (helper("z", 0, 4),)),
    "two-idle-helpers": (ONE, (helper("z", 0, 1), helper("y", 1, 4))),
    "a-host-helps": (TWO, (helper("a", 0, 1),)),
    "hosts-help-each-other": (TWO, (helper("a", 0, 1), helper("b", 2, 4))),
    "some-of-several-hosts": (THREE, (helper("z", 0, 1), helper("a", 2, 3), helper("z", 3, 4))),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def helped(case: Case, slices: Slices, helpers: tuple[Helper, ...], *, interval: int = 1) -> Plan:
    """The case's plan with helpers."""
    plan = case.plan(slices)
    course = plan.course
    if interval > 1:
        blocks = merged(Range(one.start, one.stop) for one in helpers)
        course = dataclasses.replace(course, offload=Offload(blocks=blocks, interval=interval))
    return Plan(course, (dataclasses.replace(plan.placement, helpers=helpers),))


def run(case: Case, plan: Plan, *, seed: int = 0) -> TorchCarrier:
    """Run a plan on the virtual ring with random delays."""
    carrier, rng = make_carrier(case, plan), random.Random(seed)

    def action_s(node: str, action: Action) -> float:
        return rng.random()

    def message_s(source: str, target: str, payload: str) -> float:
        return rng.choice([0.0, 0.1, 2.0]) * rng.random()

    result = VirtualRing(plan, action_s=action_s, message_s=message_s, carrier=carrier).run()
    assert result.finish == rd.Finish("", "")
    return carrier


def collected(plan: Plan, carrier: TorchCarrier) -> dict[str, torch.Tensor]:
    """Adapters and head, as the hosts hand them over at the end."""
    return carrier.collected(plan, list(turn_sequence(plan.course))[-1].owner)


def distance_to_reference(case: Case, way: str) -> float:
    """How far adapters and head are from those of one process without helpers."""
    plan = helped(case, *WAYS[way])
    theirs = reference_of(case)
    return distance(collected(plan, run(case, plan)), {**theirs.adapter(), **theirs.head()})


def case_of(folder: Path, **changes: Any) -> Case:
    """12 steps in turns of four, of which the lowest block trains in the last three."""
    return Case(folder=folder, **{"num_steps": 12, "every_steps": 3, "owners": ("a", "c"), **changes})


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.sampled(1)
def test_helpers_of_any_kind_give_the_adapters_of_one_process(folder: Path, way: str, microbatches: int) -> None:
    """RingAda's serial bottleneck, AdamW in float64, unfreezing during the run: 1e-9."""
    assert distance_to_reference(case_of(folder, microbatches=microbatches), way) < 1e-9


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "adapter",
    [
        "seq_bn",
        "double_seq_bn",
        "seq_bn[reduction_factor=4,scaling=3.0]",
        "lora[r=4,alpha=16]",
        "lora[r=4,alpha=2,selfattn_lora=False,intermediate_lora=True,output_lora=True]",
    ],
)
@pytest.mark.sampled(1)
def test_helpers_fit_any_adapter_exactly(folder: Path, adapter: str, dropout: float) -> None:
    """Scaled or not, with dropout in the model or without, two micro-batches in flight."""
    steps = 24 if dropout else 12
    case = case_of(folder, adapter=adapter, dropout=dropout, microbatches=2, method="all", num_steps=steps)
    assert distance_to_reference(case, "some-of-several-hosts") < 1e-9


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.sampled(1)
def test_helpers_of_recomputed_blocks_give_the_adapters_of_one_process(folder: Path, dropout: float) -> None:
    """Pairs are recorded in the second run, whose dropout is that of the first."""
    case = case_of(folder, method="all", adapter="lora[r=4]", dropout=dropout, microbatches=2)
    plan = helped(case, *WAYS["hosts-help-each-other"])
    plan = Plan(plan.course, (dataclasses.replace(plan.placement, recompute=(Range(0, 3),)),))
    theirs = reference_of(case)
    assert distance(collected(plan, run(case, plan)), {**theirs.adapter(), **theirs.head()}) < 1e-9


@pytest.mark.parametrize(
    "adapter",
    ["lora[r=4,alpha=16]", "linear[alpha=2.0]", "lora[r=4,attn_matrices=['q']]|linear[alpha=2.0,attn_matrices=['v']]"],
)
@pytest.mark.sampled(1)
def test_helpers_of_merged_adapters_give_those_of_one_process(folder: Path, tmp_path: Path, adapter: str) -> None:
    """The host multiplies by one matrix, made anew at each update; its adapters are in a file, for the result."""
    case = case_of(folder, method="all", adapter=adapter, microbatches=2, local_iterations=2, checkpoint_every=8)
    plan = with_offload(helped(case, *WAYS["some-of-several-hosts"]), merged=True)
    carrier = make_carrier(case, plan)
    for node, executor in carrier.executors.items():
        executor.offloading.keep_on_disk(tmp_path / node, {"node": node})
        assert not any(".ringtune." in name for name in hosted_names(plan, node, executor))
    result = resumed.run(plan, carrier, 1)
    theirs = reference_of(case)
    assert distance(collected(plan, carrier), {**theirs.adapter(), **theirs.head()}) < 1e-9
    saved = next(entry for entry in result.logged if isinstance(entry, rd.LogCheckpoint))
    again = resumed.rebuilt(case, plan, carrier.shards[saved.step], saved)
    resumed.run(plan, again, 2, start=StartPoint.of(plan.course, step=saved.step, holder=saved.holder))
    assert resumed.same_bits(collected(plan, again), collected(plan, carrier))


def with_offload(plan: Plan, **settings: Any) -> Plan:
    """The plan with what changes its result."""
    blocks = merged(Range(one.start, one.stop) for one in plan.placement.helpers)
    return Plan(dataclasses.replace(plan.course, offload=Offload(blocks=blocks, **settings)), plan.placements)


def hosted_names(plan: Plan, node: str, executor: NodeExecutor) -> list[str]:
    """The names of the weights of a node's blocks that a helper fits."""
    blocks, helpers = executor._hosted.skeleton.blocks, plan.placement.helpers_of(node)
    indices = [index for one in helpers for index in range(one.start, one.stop)]
    return [name for index in indices for name, _ in blocks[index].named_parameters()]


@pytest.mark.promise("5 timing changes nothing")
def test_helpers_give_equal_bits_in_any_timing(folder: Path) -> None:
    """Gradients are added up in one order, at a helper as at a host."""
    case = case_of(folder, microbatches=4, dtype="float32", method="all", num_steps=8)
    plan = helped(case, *WAYS["some-of-several-hosts"])
    first, other = (collected(plan, run(case, plan, seed=seed)) for seed in (1, 2))
    assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.promise("1 partition invariance")
def test_helpers_leave_moments_and_gradients_with_them(folder: Path) -> None:
    """A host of helped blocks has neither, and hands out all adapters."""
    case = case_of(folder, method="all", num_steps=4)
    plan = helped(case, *WAYS["one-idle-helper"])
    carrier = run(case, plan)
    host, fitter = (carrier.executors[node]._hosted for node in ("a", "z"))
    assert not host.optimizers.units and not host.blocks.parameters(0, 4)
    assert sorted(fitter.optimizers.units) == [0, 1, 2, 3]
    assert fitter.optimizers.held_bytes > 0
    assert not carrier.executors["z"].adapter_files(with_head=False)
    assert carrier.executors["a"].live_bytes() == carrier.executors["z"].live_bytes() == 0


# ---- an update every few steps -----------------------------------------------------------------------


def accumulated(case: Case, plan: Plan, blocks: range, interval: int) -> dict[str, torch.Tensor]:
    """A plain loop: gradients of some blocks' adapters are summed over so many batches, all else steps every time."""
    job, datasets = case.job, case.datasets()
    model = reference.whole_model(job, plan, case.folder / "model")
    at = reference.seed_units(model, job)
    helped = [
        parameter
        for index, block in model.iter_layers()
        if index in blocks
        for parameter in block.parameters()
        if parameter.requires_grad
    ]
    ids = {id(parameter) for parameter in helped}
    others = [value for value in model.parameters() if value.requires_grad and id(value) not in ids]
    rare, often = reference.plain_optimizer(job, helped), reference.plain_optimizer(job, others)
    every = train_items(plan)
    num_updates = math.ceil(len(every) / interval)
    model.eval()
    for module in (model.heads[model.active_head], *(block for _, block in model.iter_layers())):
        module.train()
    for item in every:
        reference.backward(model, job, plan, item, datasets[item.owner], at)
        update(often, learning_rate(job.train, item.step, len(every)))
        if (item.step + 1) % interval == 0 or item is every[-1]:
            update(rare, learning_rate(job.train, item.step // interval, num_updates))
    return {**reference.adapter_of(model), **reference.Trained(model=model).head()}


def update(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """One step at a rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize(("steps", "interval"), [(16, 4), (10, 4), (3, 5)])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.sampled(1)
def test_helpers_with_an_interval_equal_accumulated_gradients(
    folder: Path, steps: int, interval: int, optimizer: str
) -> None:
    """Sums over four batches, and of the two that are left over at the end; the rate follows updates."""
    case = case_of(
        folder, method="all", num_steps=steps, local_iterations=2, microbatches=2, optimizer=optimizer, dropout=0.1
    )
    plan = helped(case, TWO, (helper("z", 0, 1), helper("y", 1, 3)), interval=interval)
    theirs = accumulated(case, plan, range(3), interval)
    assert distance(collected(plan, run(case, plan)), theirs) < 1e-9


@pytest.mark.parametrize("interval", [pytest.param(1, marks=pytest.mark.thorough), 4])
def test_helpers_resume_with_equal_bits(folder: Path, interval: int) -> None:
    """Also in the middle of an interval: moments and sums are in the helper's part, adapters in the host's too."""
    case = case_of(
        folder, method="all", num_steps=10, local_iterations=2, checkpoint_every=6, microbatches=2, dtype="float32"
    )
    plan = helped(case, TWO, (helper("z", 0, 1), helper("y", 1, 3)), interval=interval)
    whole = make_carrier(case, plan)
    result = resumed.run(plan, whole, 1)
    assert result.finish == rd.Finish("", "")
    saved = next(entry for entry in result.logged if isinstance(entry, rd.LogCheckpoint))
    assert saved.step == 6
    sums = [name for name in load(whole.shards[6]["y"]) if name.startswith("sums/")]
    assert bool(sums) is (interval == 4)
    again = resumed.rebuilt(case, plan, whole.shards[6], saved)
    start = StartPoint.of(plan.course, step=6, holder=saved.holder)
    end = resumed.run(plan, again, 2, start=start)
    assert end.finish == rd.Finish("", "")
    holder = resumed.holder_of(plan, result)
    assert resumed.same_bits(again.collected(plan, holder), whole.collected(plan, holder))


# ---- a host that does not wait -------------------------------------------------------------------------


def lagging(case: Case, plan: Plan, blocks: Collection[int]) -> dict[str, torch.Tensor]:
    """A plain loop: some blocks compute with the adapters of the step before, and within a turn only.

    Gradients of linear adapters do not depend on the adapters themselves, so the newest ones take them as they are.
    """
    job, datasets = case.job, case.datasets()
    model = reference.whole_model(job, plan, case.folder / "model")
    at = reference.seed_units(model, job)
    optimizer = reference.plain_optimizer(job, [value for value in model.parameters() if value.requires_grad])
    behind = [
        parameter
        for index, block in model.iter_layers()
        if index in blocks
        for parameter in block.parameters()
        if parameter.requires_grad
    ]
    before = [parameter.detach().clone() for parameter in behind]
    for item in train_items(plan):
        newest = [parameter.detach().clone() for parameter in behind]
        if item.step % plan.course.local_iterations:
            put(behind, before)
        reference.backward(model, job, plan, item, datasets[item.owner], at)
        put(behind, newest)
        before = newest
        update(optimizer, learning_rate(job.train, item.step, plan.course.num_steps))
    return {**reference.adapter_of(model), **reference.Trained(model=model).head()}


def put(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    """Give parameters these values."""
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


@pytest.mark.parametrize("way", ["some-of-several-hosts", "one-idle-helper"])
@pytest.mark.parametrize("weights_s", [0.0, 50.0])
@pytest.mark.sampled(1)
def test_helpers_with_overlap_equal_a_loop_one_step_behind(folder: Path, way: str, weights_s: float) -> None:
    """What is stale is stated exactly: one step, within a turn, for the blocks with helpers and no others.

    Also where a helper has done its next update before the weights of one are at their host.
    """
    case = case_of(folder, method="all", adapter="linear[alpha=2.0]", microbatches=2, num_steps=11)
    plan = with_offload(helped(case, *WAYS[way]), overlap=True)
    blocks = (0, 1, 2, 3) if way == "one-idle-helper" else (0, 2, 3)
    theirs = lagging(case, plan, blocks)
    carrier = make_carrier(case, plan)
    VirtualRing(
        plan, carrier=carrier, message_s=lambda source, target, kind: weights_s if kind == Payload.WEIGHTS else 0.0
    ).run()
    assert distance(collected(plan, carrier), theirs) < 1e-9
    exact = reference_of(case)
    assert distance(theirs, {**exact.adapter(), **exact.head()}) > 1e-6


@pytest.mark.promise("5 timing changes nothing")
def test_helpers_with_overlap_send_the_weights_of_the_update_and_no_later_ones(folder: Path) -> None:
    """On a link on which weights take long the helper has updated again before they are read; a fast link agrees."""
    case = case_of(folder, method="all", microbatches=2, num_steps=11)
    plan = with_offload(helped(case, *WAYS["one-idle-helper"]), overlap=True)

    def adapters(weights_s: float) -> dict[str, torch.Tensor]:
        carrier = make_carrier(case, plan)
        result = VirtualRing(
            plan,
            action_s=lambda node, action: 0.01,
            message_s=lambda source, target, payload: weights_s if payload == Payload.WEIGHTS else 0.001,
            carrier=carrier,
        ).run()
        assert result.finish == rd.Finish("", "")
        return collected(plan, carrier)

    assert resumed.same_bits(adapters(0.0), adapters(5.0))


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("adapter", ["seq_bn", "lora[r=4]"])
@pytest.mark.sampled(1)
def test_helpers_with_overlap_give_equal_bits_in_any_timing_and_after_a_resume(folder: Path, adapter: str) -> None:
    """A turn ends with everything installed, so a checkpoint has no two versions."""
    case = case_of(
        folder, method="all", adapter=adapter, num_steps=12, checkpoint_every=8, microbatches=2, dtype="float32"
    )
    plan = with_offload(helped(case, *WAYS["hosts-help-each-other"]), overlap=True, interval=3)
    carriers = [make_carrier(case, plan) for _ in range(2)]
    results = [resumed.run(plan, carrier, seed) for seed, carrier in enumerate(carriers)]
    first, *others = [collected(plan, carrier) for carrier in carriers]
    assert all(resumed.same_bits(first, other) for other in others)
    saved = next(entry for entry in results[0].logged if isinstance(entry, rd.LogCheckpoint))
    again = resumed.rebuilt(case, plan, carriers[0].shards[saved.step], saved)
    resumed.run(plan, again, 7, start=StartPoint.of(plan.course, step=saved.step, holder=saved.holder))
    assert resumed.same_bits(collected(plan, again), first)
