"""Users with adapters of their own: every host of blocks that may train has a helper, by the job or by the planner."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coordinator.planner.draft import job_draft
from coordinator.planner.explain import explain, explanation_text
from coordinator.planner.given_plan import GivenPlan, accept_plan
from coordinator.planner.make_plan import keep_plan, make_plan
from coordinator.planner.memory import MemoryCaps
from coordinator.planner.planned import Planned
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.errors import CapacityError, DataError, JobError, PlanError
from ringtune.job.job import Job
from ringtune.schedule.course import HelperSettings
from ringtune.schedule.run_shape import UserRows
from ringtune.techniques.offload import helped, helpers_by_host
from tests.coordinator.planner.test_helper_choice import nodes, wanted
from tests.coordinator.planner.test_helpers import PAIRS
from tests.support.fake_agents import facts, job
from tests.support.offloading import LINEAR_PARAMS, MEGABIT

ANNA, BEN = UserRows(name="anna", train_rows=12), UserRows(name="ben", train_rows=8)


def job_of(mode: Any = "auto", users: str = "alone", **more: Any) -> Job:
    """A job whose users have adapters of their own."""
    return job(offload__mode=mode, offload__users=users, train__method="all", **more)


def of_users(*names: str, **changes: Any) -> dict[str, NodeFacts]:
    """Nodes of which the first owns rows of two users."""
    found = {name: dataclasses.replace(facts(name, rows=0), model=PAIRS, **changes) for name in names}
    owner = dataclasses.replace(facts(names[0]), model=PAIRS, **changes)
    rows = dataclasses.replace(owner, train_rows=20, eval_rows=0, eval_labels=(), users=(ANNA, BEN))
    return {**found, names[0]: rows}


def has_all_helpers(found: Planned) -> bool:
    """Whether every host has a helper."""
    return helpers_by_host(found.plan).keys() == {piece.node for piece in found.plan.placement.hosts}


def test_users_of_nodes_are_in_the_course() -> None:
    """Where the job names the column; otherwise each owner is one user."""
    known = of_users("a", "b")
    with_column = make_plan(job_of(data__user="who"), known).plan
    assert with_column.course.users == ("anna", "ben")
    assert make_plan(job_of(), known).plan.course.users == ("a",)
    nobody = {name: dataclasses.replace(one, users=()) for name, one in known.items()}
    with pytest.raises(DataError, match="the facts have no users of node a; measure anew"):
        make_plan(job_of(data__user="who"), nobody)


def test_users_who_changed_are_refused_by_name() -> None:
    """A run goes on, and a given plan is taken, with the same users only."""
    known, wish = of_users("a", "b"), job_of(data__user="who")
    plan = make_plan(wish, known).plan
    assert keep_plan(wish, plan, known).plan == accept_plan(GivenPlan(plan=plan), wish, known).plan == plan
    others = (dataclasses.replace(ANNA, train_rows=11), dataclasses.replace(BEN, train_rows=9))
    changed = {**known, "a": dataclasses.replace(known["a"], users=others)}
    said = r"node a has rows of anna \(11 and 0\), ben \(9 and 0\), the run began with anna \(12 and 0\)"
    with pytest.raises(DataError, match=said):
        keep_plan(wish, plan, changed)
    with pytest.raises(DataError, match="the plan says anna"):
        accept_plan(GivenPlan(plan=plan), wish, changed)


def test_given_plans_have_the_adapters_of_users_that_the_job_wants() -> None:
    """A plan without helpers, or with one set for all, would train something else."""
    known, wish = of_users("a", "b"), job_of()
    for other, said in (
        ("off", "the plan has no helpers"),
        ({"a": "b", "b": "a"}, "the plan has helpers with interval"),
    ):
        plan = make_plan(job(offload__mode=other, train__method="all"), known).plan
        with pytest.raises(PlanError, match=rf"{said}.*, the job says interval 1, pairs in float32, users alone; plan"):
            accept_plan(GivenPlan(plan=plan), wish, known)


@pytest.mark.parametrize("users", ["alone", "collaboration"])
def test_auto_gives_every_host_a_helper_and_says_so(users: str) -> None:
    """Even without links, where nobody would help otherwise."""
    more = {"offload__merged": True, "adapter__config": "linear"} if users == "collaboration" else {}
    found = make_plan(job_of(users=users, **more), of_users("a", "b", "c"))
    assert has_all_helpers(found) and found.plan.course.offload is not None
    assert found.plan.course.offload.users == users
    assert found.helping is not None and found.choice is not None
    text = "\n".join(explanation_text(explain(found.choice, relative=False, helping=found.helping)))
    assert f"offload.users = '{users}', so every host of blocks that may train has one, whether it pays or not" in text
    assert text.count(": taken") == len(found.plan.placement.hosts)


def test_auto_takes_the_fastest_helper_where_each_user_has_adapters() -> None:
    """On a link on which no helper pays, the one whose link is least slow is taken."""
    slow = nodes(LINEAR_PARAMS, bytes_per_s=MEGABIT)
    near = dataclasses.replace(slow.by_name["strong"], node="near", block_graph_s=9.0, memory_bytes=10**9)
    fast = nodes(LINEAR_PARAMS, bytes_per_s=1e8).links
    links = tuple(
        dataclasses.replace(link, source=source, target=target)
        for link in fast
        for source, target in [tuple("near" if one == "strong" else one for one in (link.source, link.target))]
    )
    between = tuple(
        dataclasses.replace(link, source=source, target=target)
        for link in slow.links
        for source, target in [tuple("near" if one == "weak" else one for one in (link.source, link.target))]
    )
    profile = Profile(nodes=(*slow.nodes, near), links=(*slow.links, *links, *between))
    found = make_plan(wanted(offload__users="alone"), profile.by_name, links=profile.links)
    assert found.helping is not None and has_all_helpers(found)
    weak = [one for one in found.helping.trials if one.host == "weak"]
    assert helpers_by_host(found.plan)["weak"] == "near"
    times = {one.helper: one.with_s or 0.0 for one in weak}
    assert times["near"] < times["strong"]
    assert [one.helper for one in weak if one.is_taken] == ["near"]


def test_auto_alone_is_refused_as_a_node_can_not_help_itself() -> None:
    """One line with both keys and the remedy."""
    with pytest.raises(JobError, match=r"offload.users = 'alone' needs a helper .* node a, the only one .* add a node"):
        make_plan(job_of(), of_users("a"))


def test_auto_without_room_for_all_users_adapters_says_so() -> None:
    """The bytes of a node, and what every host needs."""
    with pytest.raises(CapacityError, match=r"node . needs .*; with offload.users = 'alone' every host .* add a node"):
        make_plan(job_of(), of_users("a", "b", memory_bytes=10))


def test_named_helpers_decide_who_hosts() -> None:
    """A node for which the job names no helper hosts no block that may train, however fast it is."""
    known = of_users("a", "b", "c")
    for host, helper in (("a", "b"), ("b", "a"), ("c", "a")):
        found = make_plan(job_of({host: helper}), known)
        assert [piece.node for piece in found.plan.placement.hosts] == [host]
        assert helpers_by_host(found.plan) == {host: helper}
    everybody = {"a": "b", "b": "a"}
    assert has_all_helpers(make_plan(job_of(everybody), known))
    small = {**known, "c": dataclasses.replace(known["c"], memory_bytes=10)}
    with pytest.raises(
        CapacityError, match=r"node c needs .*, and no other split of the blocks over the nodes with hel"
    ):
        make_plan(job_of({"c": "a"}), small)


def test_sets_of_all_users_count_before_slices_are_chosen() -> None:
    """The search knows what a host of both users' adapters holds, as the check of the plan does."""
    known, wish = of_users("a", "z"), job_of({"a": "z"}, data__user="who")
    found = make_plan(wish, known)
    caps = MemoryCaps(job_draft(wish, list(known.values()), PAIRS), known, optimizer="adamw", dtype="float32")
    searched = caps.estimate_of("a", 0, 4, 0)
    assert searched.parts()["adapters"] == found.memory["a"].parts()["adapters"] == 4 * 2 * PAIRS.adapter_block_bytes
    assert not caps.fits("z", 0, 4, 0) and caps.fits_empty("z")


def test_hosts_without_helpers_are_no_plan() -> None:
    """Whoever takes a helper away is told which block lacks it."""
    plan = make_plan(job_of({"a": "b", "b": "a"}), of_users("a", "b")).plan
    with pytest.raises(PlanError, match=r"block . has no helper; give every host one, or set offload.users = 'joint'"):
        helped(plan, {"a": "b"}, HelperSettings(users="alone"))


def test_helper_without_room_for_what_it_fits_is_refused_by_name() -> None:
    """The search knows slices only; the ring that it finds is refused by what its helper lacks."""
    job = job_of(mode={"a": "b"}, adapter__config="linear", train__checkpoint_every=0)
    nodes = of_users("a", "b")
    needs = make_plan(job, nodes).memory["b"].total_bytes
    nodes["b"] = dataclasses.replace(nodes["b"], memory_bytes=needs - 1)
    with pytest.raises(CapacityError, match=r"node b needs .* to fit the adapters of a's blocks"):
        make_plan(job, nodes)
