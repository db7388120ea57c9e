"""Any split of any feature gives what one process gives: all that trains, losses and evaluations."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from edge.model.slice import BlockRunner
from ringtune.run_control import events as rd
from tests.features.catalog import COUNTS, IN_FLIGHT, IN_ORDER
from tests.features.feature import Feature, carry_out, each, each_split, each_technique, one_process, run_of, wanted_of
from tests.features.memory import COMPUTE, FROZEN, FROZEN_WAYS, VELORA
from tests.features.methods import DRAWN, UNFREEZING
from tests.features.models import FAMILY, PACKED
from tests.features.offload import COMPUTE_HELPERS, INTERVALS, OVERLAP
from tests.features.operations import CHOICES, COMPUTE_OPERATIONS, SUBNETS, TABLES
from tests.support.tiny_families import DECODERS
from tests.support.torch_ring import distance, reference_of, same_bits

MASKED = re.compile(f"family/(?!vit|{'|'.join(DECODERS)}).*")
"""Padding comes after a row's tokens, and a decoder never looks at what comes later."""


def require_equal(feature: Feature, split: str) -> None:
    """Compare a run with all that its reference says."""
    run, wanted = run_of(feature, split), wanted_of(feature, split)
    assert distance(run.tensors, wanted.tensors) <= feature.bound
    rel = max(feature.bound, 1e-9)
    if wanted.losses is not None:
        assert run.losses == pytest.approx(wanted.losses, rel=rel)
    if wanted.evaluations is not None:
        assert run.evaluations.keys() == wanted.evaluations.keys()
        for step, sums in run.evaluations.items():
            assert sums == pytest.approx(wanted.evaluations[step], rel=rel)
    if wanted.tables is not None:
        assert run.logged(rd.LogOperations) == wanted.tables


@pytest.mark.promise("1 partition invariance")
@each_split(IN_ORDER, COUNTS)
def test_any_split_equals_one_process(feature: Feature, split: str) -> None:
    """In float64 to 1e-9, unless the feature says otherwise."""
    require_equal(feature, split)


@pytest.mark.promise("2 right version")
@each_split(IN_FLIGHT)
def test_items_in_flight_equal_their_rule(feature: Feature, split: str) -> None:
    """Each forward sees the version that the rule names, written out in one process."""
    require_equal(feature, split)


@pytest.mark.promise("1 partition invariance")
@each([*FROZEN_WAYS, *COMPUTE, *COMPUTE_OPERATIONS, *COMPUTE_HELPERS[:4]])
def test_any_split_gives_the_same_bits(feature: Feature) -> None:
    """Every node multiplies alike, natively, widened, and with all products of a block in bfloat16."""
    first, *others = [run_of(feature, split).tensors for split in [*feature.splits][:4]]
    assert all(same_bits(first, other) for other in others)


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(
    ("optimizer", "same", "bound"),
    [("sgd", True, 1e-6), ("adamw", True, 1e-6), ("sgd", False, 1e-5), ("adamw", False, 1e-3)],
)
@pytest.mark.parametrize("split", ["three", "stages"])
@pytest.mark.sampled(1)
def test_float32_stays_within_rounding(optimizer: str, same: bool, bound: float, split: str) -> None:
    """Same micro-batches 1e-6; others 1e-5 with SGD, 1e-3 with AdamW, whose first steps amplify rounding."""
    stages = {"stages": (("a", 0, 4, 1), ("b", 0, 4, 2), ("c", 0, 4, 1))}
    changes = {"dtype": "float32", "optimizer": optimizer, "num_steps": 8, "every_steps": 2}
    feature = Feature(name="float32/rounding", changes=changes, splits=Feature(name="").splits | stages)
    against = feature.case if same else dataclasses.replace(feature.case, microbatches=1)
    wanted = reference_of(against)
    # sums of sums of several hosts round otherwise than one sum
    bound = max(bound, {"sgd": 1e-6, "adamw": 1e-3}[optimizer]) if split == "stages" else bound
    assert distance(run_of(feature, split).tensors, wanted.adapter() | wanted.head()) < bound


def test_comparison_can_fail() -> None:
    """Negative control: one step more or another unfreezing is far outside the bounds."""
    feature = DRAWN
    for case in (dataclasses.replace(feature.case, num_steps=7), dataclasses.replace(feature.case, every_steps=2)):
        other = reference_of(case)
        assert distance(run_of(feature, feature.split).tensors, other.adapter() | other.head()) > 1e-4


EXACT_FROZEN = [feature for feature in FROZEN if feature.bound < 1e-4]


@each_technique([*VELORA, *EXACT_FROZEN, *TABLES, *SUBNETS, *CHOICES, *INTERVALS, *OVERLAP, *UNFREEZING, *IN_FLIGHT])
def test_feature_that_changes_the_result_is_seen(feature: Feature) -> None:
    """Negative control: one process without the feature trains something else."""
    plain = dataclasses.replace(feature.case, operations=None, frozen=None)
    plain = dataclasses.replace(plain, method="all" if plain.method == "pipeadapter" else plain.method)
    run = run_of(feature, feature.split)
    assert distance(run.tensors, one_process(plain, run).tensors) > 10 * max(feature.bound, 1e-7)


@each([feature for feature in FAMILY if MASKED.fullmatch(feature.name)] + PACKED[:2])
def test_lost_mask_is_seen(monkeypatch: pytest.MonkeyPatch, feature: Feature) -> None:
    """Negative control: nodes that take padding for tokens, or packed rows for one, give another result."""
    original = BlockRunner.context
    monkeypatch.setattr(
        BlockRunner, "context", lambda self, hidden, mask: original(self, hidden, torch.ones_like(mask))
    )
    run = carry_out(feature, feature.plan_on(feature.split))
    assert distance(run.tensors, wanted_of(feature, feature.split).tensors) > 1e-6
