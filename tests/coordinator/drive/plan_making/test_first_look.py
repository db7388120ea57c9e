"""The look at what nodes say before they measure: it refuses what no plan fits, and nothing else."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from coordinator.drive.plan_making import planning
from coordinator.drive.plan_making.first_look import FirstLook, Looked
from coordinator.drive.requests import RunRequest
from coordinator.planner.alternatives import Choices
from coordinator.planner.given.given_plan import GivenPlan
from coordinator.planner.make_plan import make_plan
from coordinator.planner.planned import Planned
from ringtune.costs.profile import NodeFacts
from ringtune.errors import CapacityError, DeadlineError, PlanError
from ringtune.jobs.job import Job
from tests.support.fake_agents import CALL_S, NO_TIMES, facts, job

WHOLE: Any = {"train__batch_size": 8, "train__microbatches": 1}


def nodes(**changes: Any) -> dict[str, NodeFacts]:
    """Two nodes that were not measured."""
    return {name: facts(name, **NO_TIMES, **changes) for name in "ab"}


def looked(job: Job, members: dict[str, NodeFacts], **options: Any) -> Looked:
    """What the look at these nodes says."""
    verdicts: queue.SimpleQueue[Looked] = queue.SimpleQueue()
    request = RunRequest(job=job, plan_only=False, num_nodes=2, join_s=1.0, **options)
    look = FirstLook(request, tuple(members), verdicts.put)
    for node in members.values():
        look.take(node)
    return verdicts.get(timeout=CALL_S)


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
    error = looked(job(), small).error
    assert (type(error), str(error)) == (CapacityError, str(refused.value))


def test_look_lets_a_job_pass_that_fits_with_a_number_of_microbatches_that_may_be_chosen() -> None:
    """A batch of eight rows fits only in parts: with ``--microbatches`` the nodes measure, without it is refused."""
    wanted = job(**WHOLE)
    small = between(wanted, 8)
    assert isinstance(looked(wanted, small).error, CapacityError)
    assert looked(wanted, small, choices=Choices(microbatches=(1, 2, 4, 8))).error is None


def test_look_judges_the_given_plan() -> None:
    """A plan with eight micro-batches fits although the job's one would not; a plan of another job is refused."""
    wanted = job(**WHOLE)
    small = between(wanted, 8)
    given = GivenPlan(plan=make_plan(wanted, small, microbatches=(8,)).plan)
    assert looked(wanted, small, plan=given).error is None
    assert isinstance(looked(wanted.with_overrides({"train.seed": 3}), small, plan=given).error, PlanError)


@pytest.mark.promise("6 every wait ends")
def test_look_leaves_the_nodes_half_of_the_wait_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers came 6 s into a wait of 20 s: the look takes 7 s at most; one that is cut refuses nothing."""
    seconds: list[float] = []

    def slow(*_: Any, **options: Any) -> Planned:
        seconds.append(options["effort"].seconds)
        raise DeadlineError("planning found nothing in time")

    monkeypatch.setattr(planning, "make_plan", slow)
    now_s, verdicts = [100.0], queue.SimpleQueue[Looked]()
    for plan_s in (60.0, 2.0):
        wanted = job(runtime__wait_s=20.0, runtime__plan_s=plan_s)
        request = RunRequest(job=wanted, plan_only=False, num_nodes=1, join_s=1.0)
        look = FirstLook(request, ("a",), verdicts.put, now_s=lambda: now_s[0])
        now_s[0] += 6.0
        look.take(facts("a", **NO_TIMES))
        assert verdicts.get(timeout=CALL_S).error is None
    assert seconds == [7.0, 2.0]
