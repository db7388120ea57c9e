"""``offload.mode = "auto"``: who helps where it pays, who does not where it does not, and both numbers beside it."""

from __future__ import annotations

import dataclasses

import pytest

from coordinator.planner.explain import explain, explanation_text
from coordinator.planner.make_plan import make_plan
from coordinator.planner.planned import Planned, measured_time
from coordinator.planner.what_if import WhatIf
from ringtune.costs.profile import Profile
from ringtune.errors import CapacityError, PlanError
from ringtune.job.job import Job
from ringtune.techniques.offload import helped, helpers_by_host
from tests.support import offloading
from tests.support.fake_agents import job
from tests.support.offloading import LINEAR_PARAMS, LOW_RANK_PARAMS, MEGABIT

ROOM = 400_000_000


def nodes(adapter_params: int, *, bytes_per_s: float, weak_bytes: int = 10**11, strong_bytes: int = ROOM) -> Profile:
    """The weak node owns the rows; the strong one has room for adapters, but for no block with its activations."""
    found = offloading.profile(adapter_params, bytes_per_s=bytes_per_s)
    kept = []
    for one in found.nodes:
        if one.node != "owner":
            is_weak = one.node == "weak"
            kept.append(
                dataclasses.replace(
                    one,
                    train_rows=64 if is_weak else 0,
                    labels=("neg", "pos") if is_weak else (),
                    eval_labels=(),
                    eval_rows=0,
                    memory_bytes=weak_bytes if is_weak else strong_bytes,
                    activation_token_bytes=800_000,
                )
            )
    links = tuple(link for link in found.links if "owner" not in (link.source, link.target))
    return Profile(nodes=tuple(kept), links=links)


def wanted(mode: object = "auto", **changes: object) -> Job:
    """The job of these nodes."""
    of_all = {"train__batch_size": 16, "train__microbatches": 4, "train__max_length": 64, "train__max_steps": 6}
    return job(train__method="all", offload__mode=mode, **{**of_all, **changes})


def planned(profile: Profile, mode: object = "auto", **changes: object) -> Planned:
    """The plan of the job on the nodes of a profile."""
    return make_plan(wanted(mode, **changes), profile.by_name, links=profile.links)


def why(found: Planned) -> str:
    """The explanation of a plan."""
    assert found.choice is not None
    return "\n".join(explanation_text(explain(found.choice, relative=False, helping=found.helping)))


def test_auto_takes_a_helper_where_the_job_gets_faster() -> None:
    """Adapters as large as their matrices, on a fast link: predicted with the helper, and faster than without."""
    profile = nodes(LINEAR_PARAMS, bytes_per_s=1e9)
    found = planned(profile)
    assert helpers_by_host(found.plan) == {"weak": "strong"}
    assert found.plan == planned(profile, {"weak": "strong"}).plan
    assert found.helping is not None
    (trial,) = found.helping.trials
    assert trial.is_taken and trial.with_s is not None and trial.without_s is not None
    assert trial.with_s < trial.without_s
    time = measured_time(found, profile, "adamw")
    assert time is not None and (time.steps_s, time.by) == (trial.with_s, "simulator")
    text = why(found)
    assert "strong for weak: " in text and text.count("all steps") >= 2 and ": taken" in text
    assert "fits adapters of weak's [0, 4)" in text


@pytest.mark.parametrize("pairs", ["float32", "bfloat16"])
def test_auto_refuses_low_rank_on_a_slow_link(pairs: str) -> None:
    """Both numbers stand beside the refusal, rounded pairs or not."""
    found = planned(nodes(LOW_RANK_PARAMS, bytes_per_s=MEGABIT), offload__pairs=pairs)
    assert not found.plan.placement.helpers and found.plan.course.offload is None
    assert found.helping is not None
    (trial,) = found.helping.trials
    assert trial.with_s is not None and trial.without_s is not None and trial.with_s > trial.without_s
    assert "without: it does not pay" in why(found)


def test_auto_says_of_a_helper_without_room_what_it_lacks() -> None:
    """Memory is checked before anything is simulated."""
    profile = nodes(LINEAR_PARAMS, bytes_per_s=1e9)
    small = tuple(
        dataclasses.replace(one, memory_bytes=one.memory_bytes if one.node == "weak" else 10**7)
        for one in profile.nodes
    )
    found = planned(dataclasses.replace(profile, nodes=small))
    assert not found.plan.placement.helpers
    assert "it does not fit: node strong needs " in why(found)


def test_auto_helps_where_nothing_fits_otherwise() -> None:
    """Without a helper the slice does not fit, so one is taken although the link is slow."""

    def short(mode: object, **more: int) -> Planned:
        tight = nodes(LINEAR_PARAMS, bytes_per_s=MEGABIT, strong_bytes=200_000_000, **more)
        return planned(tight, mode, train__max_length=16)

    room = short("off").memory_bytes["weak"] - 10_000_000  # fewer credits save a little too
    assert short({"weak": "strong"}).memory_bytes["weak"] <= room
    with pytest.raises(CapacityError):
        short("off", weak_bytes=room)
    found = short("auto", weak_bytes=room)
    assert helpers_by_host(found.plan) == {"weak": "strong"}
    assert "no split of the blocks fits without a helper" in why(found)
    assert "strong for weak: taken, so that every slice fits" in why(found)
    with pytest.raises(CapacityError):
        short("auto", weak_bytes=10**6)


def test_auto_without_links_helps_nobody_and_says_why() -> None:
    """What pairs take is not known then."""
    profile = nodes(LINEAR_PARAMS, bytes_per_s=1e9)
    found = make_plan(wanted(), profile.by_name)
    assert not found.plan.placement.helpers
    assert "no helpers, as links were not measured" in why(found)


def test_auto_of_a_plan_counts_helpers_whatever_was_named_before() -> None:
    """The plan that auto makes is that without helpers, plus these helpers."""
    profile = nodes(LINEAR_PARAMS, bytes_per_s=1e9)
    assert helped(planned(profile).plan, {}) == planned(profile, "off").plan


def test_auto_is_asked_for_by_a_what_if_that_plans_anew() -> None:
    """``offload`` of a what-if is ``offload.mode`` of the job: auto, off, or who helps whom."""
    profile = nodes(LINEAR_PARAMS, bytes_per_s=1e9)
    bare = planned(profile, "off").plan
    question = WhatIf(plan=bare, profile=profile, optimizer="adamw", dtype="float32", job=wanted("off"))
    for value, helper_of in (("auto", {"weak": "strong"}), ("weak=strong", {"weak": "strong"}), ("off", {})):
        assert helpers_by_host(question.after([f"offload={value}"]).plan) == helper_of
    for users in ("alone", "collaboration"):
        linear = dataclasses.replace(question, job=wanted("off", adapter__config="linear"))
        found = linear.after(["offload=auto", f"users={users}"]).plan.course.offload
        assert found is not None and (found.users, found.merged) == (users, users == "collaboration")
    with pytest.raises(PlanError, match="there is no node 'stron'; did you mean 'strong'"):
        question.after(["offload=weak=stron"])
