"""Invariant 1 with stages of several hosts: the adapters and head of one process, and equal bits at all replicas.

The reference (``tests.support.reference``) is plain transformers + adapters + autograd on the whole model.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from ringtune.run_control import events as rd
from ringtune.schedule.operation_tables import BatchOperations, Operations
from ringtune.schedule.placement import Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import turn_sequence
from sim.ring import VirtualRing
from tests.support.operation_masks import one_process
from tests.support.plans import changed
from tests.support.torch_ring import Case, TorchCarrier, distance, make_carrier, reference_of, write_inputs

EVERY_BLOCK = ((0, 4, (1, 1)),)
THREE = ((0, 4, (1, 2, 1)),)
TWO_STAGES = ((0, 2, (1, 1)), (2, 4, (1, 1)))
MIXED = ((0, 1, (1,)), (1, 3, (2, 1)), (3, 4, (1, 1, 1)))
RINGS = {"every-block": EVERY_BLOCK, "three": THREE, "two-stages": TWO_STAGES, "mixed": MIXED}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def case_of(folder: Path, **changes: Any) -> Case:
    """12 steps in turns of two: the lowest block trains for the last six."""
    values = {"num_steps": 12, "every_steps": 2, "local_iterations": 2, "microbatches": 4, "owners": ("a", "b")}
    return Case(folder=folder, **{**values, **changes})


def plan_of(case: Case, stages: tuple[tuple[int, int, tuple[int, ...]], ...]) -> Plan:
    """The plan of a case on stages: first block, one past the last, and the shares of the hosts."""
    names = iter("abcdefgh")
    pieces = [
        Slice(node=next(names), start=max(start, case.private_blocks), stop=stop, share=share)
        for start, stop, shares in stages
        for share in shares
    ]
    return changed(case.plan((("a", case.private_blocks, case.num_blocks),)), slices=tuple(pieces))


def run(case: Case, plan: Plan, seed: int = 0) -> TorchCarrier:
    """Run a case on the virtual ring with random delays."""
    carrier, rng = make_carrier(case, plan), random.Random(seed)
    result = VirtualRing(
        plan,
        action_s=lambda node, action: rng.random(),
        message_s=lambda source, target, payload: rng.choice([0.0, 0.1, 2.0]) * rng.random(),
        carrier=carrier,
    ).run()
    assert result.finish == rd.Finish("", "")
    return carrier


def distance_to_reference(case: Case, plan: Plan, against: Case | None = None) -> float:
    """Run and compare with one process; replicas have to have equal bits too."""
    carrier = run(case, plan)
    for stage in plan.placement.stages:
        digests = {carrier.executors[piece.node].copy_digest(piece.start, piece.stop) for piece in stage}
        assert len(digests) == 1, stage
    trained = reference_of(against or case)
    found = carrier.collected(plan, list(turn_sequence(plan.course))[-1].owner)
    return distance(found, {**trained.adapter(), **trained.head()})


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("ring", list(RINGS))
@pytest.mark.parametrize("method", ["ringada", "all"])
@pytest.mark.sampled(1)
def test_replicas_equal_one_process(folder: Path, ring: str, method: str) -> None:
    """AdamW in float64, unfreezing during the run, two owners: 1e-9."""
    case = case_of(folder, method=method)
    assert distance_to_reference(case, plan_of(case, RINGS[ring])) < 1e-9


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adafactor"])
@pytest.mark.sampled(1)
def test_replicas_with_other_optimizers_equal_one_process(folder: Path, optimizer: str) -> None:
    """Their state is replicated too."""
    case = case_of(folder, optimizer=optimizer)
    assert distance_to_reference(case, plan_of(case, MIXED)) < 1e-9


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("adapter", ["lora", "double_seq_bn", "par_bn"])
def test_replicas_with_other_adapters_equal_one_process(folder: Path, adapter: str) -> None:
    """Any adapter has gradients of parameters."""
    case = case_of(folder, adapter=adapter, num_steps=6)
    assert distance_to_reference(case, plan_of(case, TWO_STAGES)) < 1e-9


@pytest.mark.promise("1 partition invariance")
def test_replicas_with_dropout_equal_one_process(folder: Path) -> None:
    """Dropout is seeded per (step, micro-batch, unit), so it does not matter which host computes."""
    case = case_of(folder, dropout=0.2)
    assert distance_to_reference(case, plan_of(case, THREE)) < 1e-9


@pytest.mark.promise("1 partition invariance")
def test_replicas_with_private_blocks_equal_one_process(folder: Path) -> None:
    """Owners run block 0, which stays frozen."""
    case = case_of(folder, private_blocks=1)
    assert distance_to_reference(case, plan_of(case, EVERY_BLOCK)) < 1e-9


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(("optimizer", "bound"), [("sgd", 1e-6), ("adamw", 1e-3)])
@pytest.mark.thorough
def test_replicas_in_float32_stay_within_rounding(folder: Path, optimizer: str, bound: float) -> None:
    """50 steps; sums of sums round otherwise than one sum, which AdamW's first steps amplify."""
    case = case_of(folder, dtype="float32", optimizer=optimizer, num_steps=50)
    assert distance_to_reference(case, plan_of(case, THREE)) < bound


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(1)
def test_replicas_with_operations_equal_one_process(folder: Path, seed: int) -> None:
    """Tables in which a host's micro-batches may have no gradient at all."""
    rng = random.Random(seed)
    batches = [
        BatchOperations(owner=owner, batch_id=batch, rows=tuple("".join(rng.choices("1233", k=4)) for _ in range(4)))
        for owner in ("a", "b")
        for batch in range(4)
    ]
    case = case_of(folder, num_steps=8, operations=Operations(batches=tuple(batches)))
    plan = plan_of(case, MIXED)
    carrier = run(case, plan)
    found = carrier.collected(plan, list(turn_sequence(plan.course))[-1].owner)
    assert distance(found, one_process(case)) < 1e-9


def test_replicas_comparison_can_fail(folder: Path) -> None:
    """Negative control: a step more is far outside the bounds."""
    case = case_of(folder)
    assert distance_to_reference(case, plan_of(case, THREE), dataclasses.replace(case, num_steps=13)) > 1e-4
