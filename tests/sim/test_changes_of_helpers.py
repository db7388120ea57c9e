"""What-if changes of who helps whom, and of helpers and hosts that leave."""

from __future__ import annotations

import dataclasses

import pytest

from ringtune.costs.profile import Profile
from ringtune.errors import PlanError
from ringtune.schedule.course import HelperSettings
from ringtune.techniques.offload import helped, helpers_by_host
from sim.prediction import predict
from sim.what_if import change_all, drop_from_plan
from tests.support.cases import cases
from tests.support.moves import moving
from tests.support.offloading import LINEAR_PARAMS, plan, profile
from tests.support.plans import make_plan
from tests.support.profiles import profile_of


def _with_adapter(adapter: str) -> Profile:
    bare = profile(LINEAR_PARAMS)
    shapes = [dataclasses.replace(one.shape, adapter=adapter) for one in bare.nodes]
    nodes = (dataclasses.replace(one, shape=shape) for one, shape in zip(bare.nodes, shapes, strict=True))
    return dataclasses.replace(bare, nodes=tuple(nodes))


PROFILE = _with_adapter("linear")
THREE = make_plan([("a", 0, 1), ("b", 1, 3), ("c", 3, 4)], ["a", "b"])


def test_change_of_offload_names_helpers_or_nobody() -> None:
    """Each way back leads to the very plan, and the prediction follows."""
    bare = change_all(PROFILE, plan(), ["offload=off"])[1]
    assert bare == helped(plan(), {})
    assert change_all(PROFILE, bare, ["offload=weak=strong"])[1] == plan()
    assert predict(bare, PROFILE).wall_s != predict(plan(), PROFILE).wall_s


def test_change_of_offload_keeps_the_manner() -> None:
    """Interval and pairs of the plan stay."""
    before = helped(plan(), {"weak": "strong"}, HelperSettings(interval=3, pairs="bfloat16"))
    after = change_all(PROFILE, before, ["offload=weak=owner"])[1]
    assert after.course.offload == before.course.offload
    assert helpers_by_host(after) == {"weak": "owner"}


@cases(
    ("changes", "said"),
    [
        (["offload=weak=stron"], "there is no node 'stron'; did you mean 'strong'"),
        (["offload=weak"], "write 'off', or HOST=HELPER with each host once"),
        (["offload=weak=strong+weak=owner"], "write 'off', or HOST=HELPER with each host once"),
        (["offload=weak=weak"], "so it can't be their helper"),
        (["offload=auto"], "write 'off', or HOST=HELPER"),
        (["users=each"], "offload.users = 'each' is not one of joint, alone, collaboration"),
        (["offload=off", "users=alone"], "--change users=alone: helpers fit users' adapters, and there are none"),
    ],
)
def test_changes_of_helpers_and_users_refuse_by_name(changes: list[str], said: str) -> None:
    """A slip is named with what was meant; so are users without helpers."""
    with pytest.raises(PlanError, match=said):
        change_all(PROFILE, plan(), changes)


def test_change_of_users_gives_each_adapters_and_takes_them_back() -> None:
    """Collaboration is merged, alone is not; the way back leads to the very plan."""
    alone = change_all(PROFILE, plan(), ["users=alone"])[1]
    together = change_all(PROFILE, alone, ["users=collaboration"])[1]
    assert alone == helped(plan(), {"weak": "strong"}, HelperSettings(users="alone"))
    assert together == helped(plan(), {"weak": "strong"}, HelperSettings(users="collaboration", merged=True))
    assert change_all(PROFILE, alone, ["users=joint"])[1] == plan()
    bare = helped(plan(), {})
    assert change_all(PROFILE, bare, ["offload=weak=strong", "users=alone"])[1] == alone


def test_change_of_offload_needs_the_bytes_of_pairs() -> None:
    """A profile of adapters that nobody can fit has none."""
    with pytest.raises(PlanError, match="the profile says nothing of pairs"):
        change_all(profile_of(THREE), THREE, ["offload=a=b"])


def test_drop_of_a_helper_is_refused_where_users_have_adapters_of_their_own() -> None:
    """The host would train them all together; a host may leave with its helper's heir."""
    alone = helped(THREE, {"a": "b", "b": "c", "c": "b"}, HelperSettings(users="alone"))
    with pytest.raises(PlanError, match=r"--drop c: node b has no helper then, .* give --replan JOB"):
        drop_from_plan(alone, "c")
    kept = drop_from_plan(helped(THREE, {"a": "b", "b": "a", "c": "b"}, HelperSettings(users="alone")), "c")
    assert helpers_by_host(kept) == {"a": "b", "b": "a"} and kept.course.offload is not None
    assert kept.course.offload.users == "alone"


def test_drop_of_a_helper_leaves_its_hosts_to_themselves() -> None:
    """Of a host that leaves, the helper goes too; a helper of its heir fits the heir's new blocks."""
    before = helped(THREE, {"a": "z", "b": "z", "c": "b"}, HelperSettings(interval=2))
    assert helpers_by_host(drop_from_plan(before, "z")) == {"c": "b"}
    found = drop_from_plan(before, "c")
    told = [(one.node, one.start, one.stop) for one in found.placement.joined_helpers()]
    assert told == [("z", 0, 1), ("z", 1, 4)]
    assert found.course.offload is not None and found.course.offload.interval == 2


def test_drop_of_a_helper_leaves_the_others_in_every_placement() -> None:
    """A plan that moves keeps who helps whom in each of its placements."""
    before = helped(moving(THREE, (2, [("a", 0, 2), ("b", 2, 4)])), {"a": "z", "b": "y"}, HelperSettings(interval=2))
    found = drop_from_plan(before, "z")
    assert [helpers_by_host(part) for part in found.parts] == [{"b": "y"}, {"b": "y"}]
    assert [[one.start for one in part.placement.helpers] for part in found.parts] == [[1, 2], [2, 3]]


def test_change_to_collaboration_needs_adapters_that_can_be_merged() -> None:
    """Where the profile says which adapters these are."""
    alone = change_all(PROFILE, plan(), ["users=alone"])[1]
    change_all(_with_adapter("lora"), alone, ["users=collaboration"])
    said = "--change users=collaboration: adapter 'mlp' can't be merged into its matrix"
    with pytest.raises(PlanError, match=said):
        change_all(_with_adapter("mlp"), alone, ["users=collaboration"])
