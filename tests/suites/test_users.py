"""The results of users are their sets of adapters, of their kinds, also of blocks that never train.

That users train what plain loops with a set for each of them train is among the laws.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from safetensors.torch import load

from coordinator.run.result_files import users_folders
from ringtune.job.job import result_of_user
from ringtune.models.result_files import part_files
from ringtune.schedule.course import ALONE, COLLABORATION, HelperSettings
from ringtune.storage.pieces import Pieces
from ringtune.techniques.offload import helped
from tests.features.feature import Feature, carry_out, plan_of
from tests.features.offload import HELPER_OF, LINEAR, ON_THEIR_OWN, THREE, TOGETHER, sets_at_helpers, users
from tests.support.torch_ring import distance, same_bits

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
