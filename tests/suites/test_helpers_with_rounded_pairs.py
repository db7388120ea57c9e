"""Pairs that lose something on the wire: a run with them ends near the exact one, and says which units were on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from ringtune.schedule.course import Offload
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import Range
from tests.suites.test_helpers_equal_one_process import WAYS, case_of, collected, helped, run
from tests.support.torch_ring import Case, make_carrier, shard_metadata, write_inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def trained(case: Case, plan: Plan) -> tuple[torch.Tensor, list[bool]]:
    """All that a run trained as one vector, and whether each node that is helped records signs."""
    carrier = run(case, plan)
    tensors = collected(plan, carrier)
    hosted: list[Any] = [executor._hosted for executor in carrier.executors.values()]
    signs = [one.captures.with_signs for one in hosted if one.captures is not None]
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)]), signs


@pytest.mark.parametrize(("pairs", "least", "most"), [("bfloat16", 1e-6, 1e-2), ("velora", 0.0, 1e-12)])
@pytest.mark.sampled(1)
def test_rounded_pairs_end_near_exact_ones(folder: Path, pairs: str, least: float, most: float) -> None:
    """Of what the run changed, so much differs; of 32 values in 32 parts VeLoRA loses nothing.

    Pairs that are exact say nothing of units.
    """
    case = case_of(folder, adapter="seq_bn[reduction_factor=4]", optimizer="sgd", method="all", num_steps=6)
    exact = helped(case, *WAYS["one-idle-helper"])
    course = dataclasses.replace(exact.course, offload=Offload(blocks=(Range(0, 4),), pairs=pairs))
    (wanted, no_signs), (got, signs) = trained(case, exact), trained(case, Plan(course, exact.placements))
    begun, _ = trained(dataclasses.replace(case, num_steps=1), begin(case))
    share = float((got - wanted).norm()) / float((wanted - begun).norm())
    assert least <= share <= most
    assert signs == [True] and no_signs == [False]


def test_vectors_of_pairs_are_in_the_part_of_their_host(folder: Path) -> None:
    """A run that goes on projects on those that it began with, and shows them to its helper once more."""
    case = case_of(folder, method="all", num_steps=4)
    exact = helped(case, *WAYS["one-idle-helper"])
    course = dataclasses.replace(exact.course, offload=Offload(blocks=(Range(0, 4),), pairs="velora"))
    plan = Plan(course, exact.placements)
    before, after = run(case, plan).executors["a"], make_carrier(case, plan).executors["a"]
    vectors = before.offloading.vectors
    assert vectors is not None and len(vectors.tensors()) == 4
    after.load_shard(before.shard(shard_metadata("a", 4), with_head=True), shard_metadata("a", 4), with_head=True)
    assert after.offloading.vectors is not None
    found = after.offloading.vectors.tensors()
    assert all(value.numel() and torch.equal(found[name], value) for name, value in vectors.tensors().items())


def begin(case: Case) -> Plan:
    """The case's plan with its first step only."""
    return helped(dataclasses.replace(case, num_steps=1), *WAYS["one-idle-helper"])
