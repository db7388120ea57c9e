"""Offload: results of users, what helpers hold and hosts do not, weights that come late, and pairs that lose something.

That a ring with helpers trains what one process trains, and users what plain loops with a set of adapters for each of
them train, is among the laws.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from safetensors.torch import load

from coordinator.run.result_files import users_folders
from ringtune.job.job import result_of_user
from ringtune.models.result_files import part_files
from ringtune.schedule.actions import Payload
from ringtune.schedule.course import ALONE, COLLABORATION, HelperSettings
from ringtune.schedule.plan import Plan
from ringtune.storage.pieces import Pieces
from ringtune.techniques.offload import helped
from tests.features.feature import Feature, Tensors, carry_out, plan_of, run_of
from tests.features.offload import (
    HELPER_OF,
    INTERVALS,
    LINEAR,
    MERGED_HELPERS,
    ON_THEIR_OWN,
    THREE,
    TOGETHER,
    helped_plan,
    sets_at_helpers,
    users,
    with_helpers,
)
from tests.support import torch_ring
from tests.support.torch_ring import Case, TorchCarrier, distance, make_carrier, same_bits, shard_metadata

MANNERS = pytest.mark.parametrize("manner", [ON_THEIR_OWN, TOGETHER], ids=[ALONE, COLLABORATION])


def short(manner: dict[str, Any], adapters: dict[str, str], **changes: Any) -> Feature:
    """A short run of which the parts of the result are kept, and the sets at the helpers."""
    values = {"adapter": "lora[r=4]", "num_steps": 2, "eval_every": 0, **changes}
    return dataclasses.replace(
        users("/short", manner, adapters, **values),
        tensors=lambda carrier, plan, holder: sets_at_helpers(carrier),
        load=lambda case, folder: None,
    )


@MANNERS
def test_users_results_are_their_sets_and_say_their_kind(manner: dict[str, Any]) -> None:
    """The nodes' parts together have each tensor of each user once; the config comes with each of them."""
    feature = short(manner, {"ben": LINEAR})
    run = carry_out(feature, feature.plan_on("three"))
    names = run.plan.course.users
    assert {name for sent in run.files.values() for name in sent} <= set(part_files(names))
    sent = {node: {name: Pieces.of(each) for name, each in files.items()} for node, files in run.files.items()}
    merged = users_folders(sent, {user: result_of_user(feature.case.job, user) for user in names})
    found = {
        f"{user}/{name.split('.layer.')[1]}": value
        for user in names
        for name, value in load(bytes(merged[f"users/{user}/adapter.safetensors"])).items()
    }
    assert same_bits(found, run.tensors)
    if manner == ON_THEIR_OWN:  # negative control: the sets of two users of one kind differ
        anna, own = (
            {name.partition("/")[2]: found[name] for name in found if name.startswith(user)} for user in ("anna", "c/")
        )
        assert distance(anna, own) > 1e-3
    head = {"head_config.json", "model_head.safetensors", "adapter.safetensors"}
    folders = {user: {path.split("/")[-1] for path in merged if f"/{user}/" in path} for user in names}
    kinds = {"anna": "adapter_config.json", "ben": "adapter.json", "c": "adapter_config.json"}
    assert folders == {user: head | {kind} for user, kind in kinds.items()}


@MANNERS
@pytest.mark.sampled(1)
def test_adapters_of_private_blocks_have_the_kind_of_their_user(manner: dict[str, Any]) -> None:
    """They never train and are no helper's; a user's folder has them as they began, so that it is whole."""
    other = "seq_bn" if manner == ON_THEIR_OWN else LINEAR
    feature = short(manner, {"ben": other}, private_blocks=1)
    plan = feature.plan(feature.case, (("a", 1, 2), ("b", 2, 3), ("c", 3, 4)))
    files = carry_out(feature, plan).files
    for user in ("anna", "ben"):
        path = f"users/{user}/adapter.safetensors"
        names = {name for part in files.values() if path in part for name in load(part[path])}
        assert {name.split(".layer.")[1][0] for name in names} == set("0123")
        assert all("lora" in name for name in names) is any("lora" in name for name in names) is (user == "anna")


@MANNERS
@pytest.mark.sampled(1)
def test_one_user_trains_what_all_train_together(manner: dict[str, Any]) -> None:
    """With one owner and no column of users the sets are those of a run without users, bit by bit."""
    feature = short(manner, {}, owners=("a",))
    own, joint = (
        carry_out(feature, helped(plan_of(feature.case, THREE), HELPER_OF, HelperSettings(**values))).tensors
        for values in (manner, manner | {"users": "joint"})
    )
    assert same_bits({f"a/{name}": value for name, value in joint.items()}, own)


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
