"""Helpers as a job names them: in the plan, in its text, in given plans, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coordinator.planner.given_plan import GivenPlan, accept_plan
from coordinator.planner.make_plan import make_plan, refuse_if_full
from coordinator.planner.planned import Planned
from coordinator.screen.plan_text import plan_text
from ringtune.costs.profile import NodeFacts
from ringtune.errors import CapacityError, JobError, PlanError
from ringtune.quantities import format_bytes
from ringtune.schedule.course import Offload
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import Range
from tests.support.fake_agents import MODEL, facts, job

PAIRS = dataclasses.replace(MODEL, pair_token_bytes=24, pair_rounded_token_bytes=13, pair_projected_token_bytes=9)


def nodes(*names: str) -> dict[str, NodeFacts]:
    """Nodes of which the first owns rows."""
    return {
        name: dataclasses.replace(facts(name, **({} if name == names[0] else {"rows": 0})), model=PAIRS)
        for name in names
    }


def planned(mode: Any, *names: str, **more: Any) -> Planned:
    """The plan of a job with this ``offload.mode`` on these nodes."""
    return make_plan(job(offload__mode=mode, **more), nodes(*names))


def test_helpers_named_by_a_job_fit_whole_slices() -> None:
    """Every block of the host's slice that may train has that helper, and the result is that without helpers."""
    without, found = planned("off", "a", "b").plan, planned({"a": "b"}, "a", "b").plan
    assert found.placement.helpers == tuple(Helper(node="b", start=block, stop=block + 1) for block in range(2))
    assert found.placement.joined_helpers() == (Helper(node="b", start=0, stop=2),)
    assert found.course == without.course
    assert Plan.from_json(found.to_json()) == found


def test_helpers_that_change_the_result_are_of_the_course() -> None:
    """With an interval, or pairs that are rounded, another result comes out."""
    found = planned({"a": "b"}, "a", "b", offload__interval=3, offload__pairs="bfloat16").plan
    assert found.course.offload == Offload(blocks=(Range(0, 2),), interval=3, pairs="bfloat16")
    found = planned({"a": "b"}, "a", "b", offload__overlap=True, offload__merged=True, adapter__config="linear").plan
    assert found.course.offload == Offload(blocks=(Range(0, 2),), overlap=True, merged=True)


def test_helpers_of_private_blocks_are_none() -> None:
    """Blocks that never train have no helper."""
    found = planned({"a": "b"}, "a", "b", privacy__private_blocks=1).plan
    assert all(helper.start >= 1 for helper in found.placement.helpers)
    assert found.placement.helpers


def test_helpers_unknown_names_are_refused_with_the_nearest() -> None:
    """Names are known only when nodes are."""
    with pytest.raises(JobError, match=r"offload.mode.a = 'bb': no node of this run has the name 'bb'; did you mean"):
        planned({"a": "bb"}, "a", "bbb")
    with pytest.raises(JobError, match=r"offload.mode.z = 'a': no node of this run has the name 'z'; known here: a, b"):
        planned({"z": "a"}, "a", "b")


def test_helpers_of_hosts_without_blocks_are_told() -> None:
    """Who was named without need is said with the plan."""
    found = planned({"a": "b"}, "a", "b", train__method="single")
    host = found.plan.placement.hosts[0].node
    if host == "a":
        found = planned({"b": "a"}, "a", "b", train__method="single")
    assert not found.plan.placement.helpers
    assert "where no block trains, so they have no helper" in found.note


def test_helpers_stand_in_the_text_of_a_plan() -> None:
    """Who helps whom, with which blocks, how many bytes, and what that means for the result."""
    found = planned({"a": "b"}, "a", "b")
    text = "\n".join(plan_text(found.plan, found.memory, num_steps=0, measured=False, facts=nodes("a")["a"]))
    tokens = found.plan.course.batch_size * found.plan.course.max_length
    assert f"b fits the adapters of a's blocks [0, 2): at most {format_bytes(tokens * 2 * 24)} of pairs a step" in text
    assert "the result is that of a run without helpers" in text
    rounded = planned({"a": "b"}, "a", "b", offload__interval=2, offload__pairs="bfloat16")
    assert "pairs of adapters have hidden states in them" in text
    text = "\n".join(plan_text(rounded.plan, rounded.memory, num_steps=0, measured=False))
    assert "helpers add up 2 steps for one update; pairs travel rounded to 16 bits: the result is not" in text


def test_helpers_of_a_given_plan_are_those_of_the_job() -> None:
    """A plan with other helpers than the job's is refused; with auto any will do, in the job's manner."""
    found, known = planned({"a": "b"}, "a", "b").plan, nodes("a", "b")
    assert accept_plan(GivenPlan(plan=found), job(offload__mode={"a": "b"}), known).plan == found
    assert accept_plan(GivenPlan(plan=found), job(offload__mode="auto"), known).plan == found
    for other in (job(), job(offload__mode={"b": "a"}), job(offload__mode={"a": "b"}, offload__interval=2)):
        with pytest.raises(PlanError, match=r"the plan has .*, the job says offload.mode"):
            accept_plan(GivenPlan(plan=found), other, known)
    with pytest.raises(PlanError, match=r"helpers with interval 1, .* says interval 2"):
        accept_plan(GivenPlan(plan=found), job(offload__mode="auto", offload__interval=2), known)


def with_memory(found: dict[str, NodeFacts], **memory_bytes: int) -> dict[str, NodeFacts]:
    """These nodes with these budgets."""
    return {
        name: dataclasses.replace(one, memory_bytes=memory_bytes.get(name, one.memory_bytes))
        for name, one in found.items()
    }


def test_helpers_take_gradients_and_state_off_their_host() -> None:
    """The host holds neither gradients nor moments of adapters, the helper those and the adapters themselves."""
    without, found = (planned(mode, "a", "b", train__method="all") for mode in ("off", {"a": "b"}))
    state = 3 * PAIRS.adapter_block_bytes
    before, after = without.memory["a"].parts(), found.memory["a"].parts()
    assert before["optimizer"] - after["optimizer"] == 2 * state
    assert found.memory["b"].parts()["optimizer"] - without.memory["b"].parts()["optimizer"] == 2 * state
    more = found.memory["b"].parts()["adapters"] - without.memory["b"].parts()["adapters"]
    assert more == 2 * PAIRS.adapter_block_bytes


def test_helpers_without_room_are_refused_with_both_numbers() -> None:
    """A helper that can't hold what it fits is named, with whose blocks these are."""
    known = nodes("a", "b")
    plan = make_plan(job(offload__mode={"a": "b"}), known)
    room = plan.memory_bytes["b"] - 1
    with pytest.raises(CapacityError, match=r"node b needs .* to fit the adapters of a's blocks \[0, 2\) but has"):
        refuse_if_full(job(offload__mode={"a": "b"}), plan.plan, with_memory(known, b=room))


def test_helpers_whose_pairs_no_link_takes_are_refused_in_planning() -> None:
    """However much memory there is; else a link refuses them in the middle of the run. A given plan too."""
    large = dataclasses.replace(PAIRS, pair_token_bytes=1 << 30)
    roomy = {name: dataclasses.replace(one, model=large, memory_bytes=1 << 50) for name, one in nodes("a", "b").items()}
    wanted = job(offload__mode={"a": "b"})
    with pytest.raises(CapacityError, match=r"the pairs of a's blocks \[0, 1\) for helper b have .*; raise train"):
        make_plan(wanted, roomy)
    with pytest.raises(CapacityError, match="for helper b have"):
        refuse_if_full(wanted, planned({"a": "b"}, "a", "b").plan, roomy)
