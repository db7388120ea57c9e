"""Planning of a run: what is refused before nodes measure, and a run that is watched and stopped meanwhile."""

from __future__ import annotations

import dataclasses
import math
import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.client.submit import Client
from coordinator.planner.given_plan import GivenPlan
from coordinator.planner.limits import Choices
from coordinator.planner.make_plan import make_plan
from coordinator.planner.planned import Planned
from coordinator.run import planning
from coordinator.run.checkpoint import CheckpointManager
from coordinator.run.driver import Participants
from coordinator.run.members import LinkCache, Member
from coordinator.run.planning import SizesChecked, check_sizes, check_waits
from coordinator.run.requests import RunRequest
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.errors import CapacityError, DeadlineError, PeerLostError, PlanError, RingTuneError
from ringtune.job.job import Job
from ringtune.run_control import events as rd
from ringtune.schedule.plan import Plan
from tests.coordinator.planner.test_replicas import boards, job_of
from tests.support.fake_agents import CALL_S, NO_TIMES, FakeCluster, facts, job

WHOLE: Any = {"train__batch_size": 8, "train__microbatches": 1}


def nodes(**changes: Any) -> dict[str, NodeFacts]:
    """Two nodes that were not measured."""
    return {name: facts(name, **NO_TIMES, **changes) for name in "ab"}


def checked(job: Job, members: dict[str, NodeFacts], **options: Any) -> SizesChecked:
    """What the look at these nodes says."""
    request = RunRequest(job=job, plan_only=False, num_nodes=2, join_s=1.0, **options)
    try:
        return check_sizes(request, members, math.inf, is_cancelled=lambda: False)
    except RingTuneError as error:
        return SizesChecked(error)


def between(wanted: Job, microbatches: int) -> dict[str, NodeFacts]:
    """Nodes on which the job fits with so many micro-batches, but not with its own number."""
    least, own = (
        max(make_plan(wanted, nodes(), microbatches=numbers).memory_bytes.values()) for numbers in ((microbatches,), ())
    )
    assert least < own
    small = nodes(memory_bytes=least)
    with pytest.raises(CapacityError):
        make_plan(wanted, small)
    return small


def test_look_refuses_a_job_that_no_plan_fits() -> None:
    """With the error of the planner itself."""
    small = nodes(memory_bytes=10)
    with pytest.raises(CapacityError) as refused:
        make_plan(job(), small)
    error = checked(job(), small).error
    assert (type(error), str(error)) == (CapacityError, str(refused.value))
    # A batch of eight rows fits only in parts: with ``--microbatches`` the nodes measure, without it is refused
    wanted = job(**WHOLE)
    small = between(wanted, 8)
    assert isinstance(checked(wanted, small).error, CapacityError)
    assert checked(wanted, small, choices=Choices(microbatches=(1, 2, 4, 8))).error is None
    # A plan with eight micro-batches fits although the job's one would not; a plan of another job is refused
    wanted = job(**WHOLE)
    small = between(wanted, 8)
    given = GivenPlan(plan=make_plan(wanted, small, microbatches=(8,)).plan)
    assert checked(wanted, small, plan=given).error is None
    assert isinstance(checked(wanted.with_overrides({"train.seed": 3}), small, plan=given).error, PlanError)


@pytest.mark.promise("6 every wait ends")
def test_look_leaves_the_nodes_half_of_the_wait_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers came 6 s into a wait of 20 s: the look takes 7 s at most; one that is cut refuses nothing."""
    seconds: list[float] = []

    def slow(*_: Any, **options: Any) -> Planned:
        seconds.append(options["effort"].seconds)
        raise DeadlineError("planning found nothing in time")

    monkeypatch.setattr(planning, "make_plan", slow)
    for plan_s in (60.0, 2.0):
        wanted = job(runtime__wait_s=20.0, runtime__plan_s=plan_s)
        request = RunRequest(job=wanted, plan_only=False, num_nodes=1, join_s=1.0)
        asked = {"a": facts("a", **NO_TIMES)}
        looked_at = check_sizes(request, asked, 120.0, is_cancelled=lambda: False, now_s=lambda: 106.0)
        assert looked_at.error is None
    assert seconds == [7.0, 2.0]


@pytest.mark.parametrize("fits", [True, False])
def test_plan_with_a_node_that_was_left_out_meanwhile_is_dropped(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the plan nor the error of the planner counts, as the others are planned with anew."""

    def made(*_: Any, **__: Any) -> Any:
        if not fits:
            raise CapacityError("node a needs more")
        return SimpleNamespace(plan=None)

    monkeypatch.setattr(planning, "make_plan", made)
    plans = list[Any]()
    planner, entries = planner_of_a_and_b(on_plan=plans.append)
    planner.is_checking_sizes = False
    monkeypatch.setattr(planning, "check_waits", lambda *_: None)
    planner.plan({name: facts(name) for name in "ab"})
    before = entries.get(timeout=CALL_S)
    planner.leave("b")
    before()
    assert plans == []
    planner.plan({"a": facts("a")})
    entries.get(timeout=CALL_S)()
    assert [type(plan) for plan in plans] == [planning.PlanReady if fits else rd.PlanFailed]


def test_look_at_a_node_that_was_left_out_meanwhile_is_dropped() -> None:
    """The job fits on no ring with it; the other one is looked at anew, and asked for its times once."""
    looked_at = list[SizesChecked]()
    planner, entries = planner_of_a_and_b(on_sizes_checked=looked_at.append)
    planner.take_sizes(nodes()["a"])
    planner.take_sizes(nodes(memory_bytes=10)["b"])
    before = entries.get(timeout=CALL_S)
    planner.leave("b")
    before()
    assert looked_at == [] and planner.is_checking_sizes
    entries.get(timeout=CALL_S)()
    assert [checked.error for checked in looked_at] == [None] and not planner.is_checking_sizes


def planner_of_a_and_b(
    *, on_sizes_checked: Any = lambda checked: None, on_plan: Any = lambda made: None
) -> tuple[planning.RunPlanner, queue.SimpleQueue[Any]]:
    """A planner for two nodes, and what it has queued for the run's thread."""
    members: Any = SimpleNamespace(links=LinkCache())
    participants = Participants("run", members, lease_s=1.0)
    planner = planning.RunPlanner(
        participants,
        RunRequest(job=job(), num_nodes=2),
        CheckpointManager("run", job(), None),
        on_sizes_checked=on_sizes_checked,
        on_plan=on_plan,
        enter=lambda phase: None,
    )
    planner.begin([Member(node=name, address="127.0.0.1:1", instance="i") for name in "ab"])
    return planner, participants.queue


class SlowPlanner:
    """Plans when it is let go on; sees when nobody waits for its plan any more."""

    def __init__(self) -> None:
        self.began, self.may_end, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.was_cancelled = False

    def __call__(self, *args: Any, **options: Any) -> Planned:
        """Wait, then plan as ever; the look before anything is measured, which has no links, goes on at once."""
        if not options["links"]:
            return make_plan(*args, **options)
        self.began.set()
        self.may_end.wait(4 * CALL_S)
        self.was_cancelled = options["effort"].is_cancelled()
        self.ended.set()
        return make_plan(*args, **options)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowPlanner]:
    """A planner in the place of the real one."""
    planner = SlowPlanner()
    monkeypatch.setattr(planning, "make_plan", planner)
    yield planner
    planner.may_end.set()
    assert not planner.began.is_set() or planner.ended.wait(CALL_S)


def test_run_is_stopped_while_it_is_planned(slow: SlowPlanner) -> None:
    """A Ctrl-C ends the run at once, and the planner hears that nobody waits for it."""
    with FakeCluster("a", "b") as cluster:
        run = cluster.server.coordinator.run(RunRequest(job=job(), plan_only=False, num_nodes=2, join_s=CALL_S))
        assert slow.began.wait(CALL_S)
        with Client(cluster.server.address) as client:
            status = client.status()
        assert (status.run.phase, [node.state for node in status.nodes]) == ("planning", ["running", "running"])
        run.drain("Ctrl-C")
        assert run.join(CALL_S)
        assert all(agent.released.wait(CALL_S) for agent in cluster.agents.values())
        slow.may_end.set()
        assert slow.ended.wait(CALL_S) and slow.was_cancelled
    assert run.board.read().message.startswith("Ctrl-C")


@pytest.mark.promise("6 every wait ends")
def test_run_loses_a_node_while_it_is_planned(slow: SlowPlanner) -> None:
    """A node that fails during planning is named at once, not after the plan."""
    with FakeCluster("a", "b") as cluster:
        run = cluster.server.coordinator.run(RunRequest(job=job(), plan_only=False, num_nodes=2, join_s=CALL_S))
        assert slow.began.wait(CALL_S)
        run.participants.node_failed("b", PeerLostError("node b is gone"))
        assert run.join(CALL_S)
    assert run.board.read().message == "node b is gone"


def planned(rate: float, **changes: object) -> tuple[Job, Plan, Profile]:
    """A plan for three boards, and their profile with links of another rate."""
    job = job_of(placement__replicas="never", **changes)
    facts, links = boards((1, 1, 1))
    found = make_plan(job, facts, links=links)
    slow = tuple(dataclasses.replace(link, rate_bytes_per_s=rate) for link in links)
    return job, found.plan, Profile(nodes=tuple(facts.values()), links=slow)


def test_waits_that_a_message_outlasts_are_refused() -> None:
    """Long enough for 1 Mbit/s is the default of five minutes."""
    check_waits(*planned(125e3))
    # Both times and the link are named; a longer wait is a remedy, and so are smaller messages
    with pytest.raises(PlanError, match=r"from n\d to n\d \(0.008 Mbit/s\), but nodes wait for .*wait_s = 300 s"):
        check_waits(*planned(1e3))
    check_waits(*planned(1e3, runtime__wait_s=100_000))
    # What is assumed of them may be far from the truth
    job, plan, profile = planned(1e3)
    links = tuple(dataclasses.replace(link, is_assumed=True) for link in profile.links)
    check_waits(job, plan, dataclasses.replace(profile, links=links))
