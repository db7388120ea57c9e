"""What helpers hold and hosts do not, weights that come late, and pairs that lose something on the wire.

That a ring with helpers trains what one process trains is among the laws.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load

from ringtune.schedule.actions import Payload
from ringtune.schedule.plan import Plan
from tests.features.feature import Feature, Tensors, carry_out, run_of
from tests.features.offload import INTERVALS, MERGED_HELPERS, helped_plan, with_helpers
from tests.support import torch_ring
from tests.support.torch_ring import Case, TorchCarrier, make_carrier, shard_metadata


def trained(case: Case, plan: Plan) -> tuple[TorchCarrier, Tensors]:
    """The nodes after a run, and what they trained."""
    carrier = make_carrier(case, plan)
    result = torch_ring.run(plan, carrier, 0)
    return carrier, carrier.collected(plan, torch_ring.holder_of(plan, result))


def case_of(way: str = "one-idle-helper", **changes: Any) -> tuple[Case, Plan]:
    """A short run with an idle helper."""
    values = {"method": "all", "num_steps": 4, "eval_every": 0, **changes}
    feature = with_helpers("/short", way, changes=values)
    return feature.case, feature.plan_on(way)


@pytest.mark.promise("1 partition invariance")
def test_helpers_leave_moments_and_gradients_with_them() -> None:
    """A host of helped blocks has neither, and hands out all adapters."""
    carrier, _ = trained(*case_of())
    host, fitter = (carrier.executors[node]._hosted for node in ("a", "z"))
    assert not host.optimizers.units and not host.blocks.parameters(0, 4)
    assert sorted(fitter.optimizers.units) == [0, 1, 2, 3]
    assert fitter.optimizers.held_bytes > 0
    assert not carrier.executors["z"].adapter_files(with_head=False)
    assert carrier.executors["a"].live_bytes() == carrier.executors["z"].live_bytes() == 0


@pytest.mark.parametrize("feature", MERGED_HELPERS[:3], ids=lambda one: one.name)
@pytest.mark.sampled(1)
def test_host_of_merged_adapters_has_none(feature: Feature) -> None:
    """It multiplies by one matrix, made anew at each update."""
    plan = feature.plan_on(feature.split)
    for node, executor in make_carrier(feature.case, plan).executors.items():
        blocks, helpers = executor._hosted.skeleton.blocks, plan.placement.helpers_of(node)
        names = [
            name for one in helpers for at in range(one.start, one.stop) for name, _ in blocks[at].named_parameters()
        ]
        assert not any(".ringtune." in name for name in names)


@pytest.mark.parametrize("feature", [one for one in INTERVALS if "/10-4" in one.name], ids=lambda one: one.name)
@pytest.mark.sampled(1)
def test_sums_in_mid_interval_are_in_the_shard_of_the_helper(feature: Feature) -> None:
    """At step 6 of intervals of four, two steps have been added up."""
    shards = run_of(feature, feature.split).notes.shards[6]
    assert any(name.startswith("sums/") for name in load(shards["y"]))


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize("way", ["one-idle-helper", "some-of-several-hosts"])
@pytest.mark.sampled(1)
def test_helpers_with_overlap_send_the_weights_of_the_update_and_no_later_ones(way: str) -> None:
    """On a link on which weights take long the helper has updated again before they are read; a fast link agrees."""
    changes = {"method": "all", "num_steps": 6, "local_iterations": 3, "eval_every": 0}
    feature = with_helpers("/late", way, {"overlap": True}, changes=changes)

    def adapters(weights_s: float) -> Tensors:
        return carry_out(
            feature,
            feature.plan_on(way),
            action_s=lambda node, action: 0.01,
            message_s=lambda source, target, payload: weights_s if payload == Payload.WEIGHTS else 0.001,
        ).tensors

    assert torch_ring.same_bits(adapters(0.0), adapters(5.0))


def as_vector(tensors: Tensors) -> torch.Tensor:
    """All tensors as one vector."""
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


@pytest.mark.parametrize(("pairs", "least", "most"), [("bfloat16", 1e-6, 1e-2), ("velora", 0.0, 1e-12)])
@pytest.mark.sampled(1)
def test_rounded_pairs_end_near_exact_ones(pairs: str, least: float, most: float) -> None:
    """Of what the run changed, so much differs; of 32 values in 32 parts VeLoRA loses nothing.

    Pairs that are exact say nothing of units.
    """
    case, exact = case_of(adapter="seq_bn[reduction_factor=4]", optimizer="sgd", owners=("a",))
    rounded = helped_plan(case, (("a", 0, 4),), "one-idle-helper", pairs=pairs)
    runs = [trained(case, plan) for plan in (exact, rounded)]
    wanted, got = (as_vector(tensors) for _, tensors in runs)
    begun = as_vector(trained(*case_of(adapter=case.adapter, optimizer="sgd", owners=("a",), num_steps=1))[1])
    assert least <= float((got - wanted).norm()) / float((wanted - begun).norm()) <= most
    captures = [[one._hosted.parts.captures for one in carrier.executors.values()] for carrier, _ in runs]
    signs = [[one._kinds[0][1]._with_signs for one in each if one is not None] for each in captures]
    assert signs == [[False], [True]]


def test_vectors_of_pairs_are_in_the_part_of_their_host() -> None:
    """A run that goes on projects on those that it began with, and shows them to its helper once more."""
    case, _ = case_of()
    plan = helped_plan(case, (("a", 0, 4),), "one-idle-helper", pairs="velora")
    before, after = trained(case, plan)[0].executors["a"], make_carrier(case, plan).executors["a"]
    vectors = before.offloading.vectors
    assert vectors is not None and len(vectors.tensors()) == 4
    after.load_shard(before.shard(shard_metadata("a", 4), with_head=True), shard_metadata("a", 4), with_head=True)
    assert after.offloading.vectors is not None
    found = after.offloading.vectors.tensors()
    assert all(value.numel() and torch.equal(found[name], value) for name, value in vectors.tensors().items())
