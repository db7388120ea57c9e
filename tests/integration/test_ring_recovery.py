"""Real processes of which one is killed: the run goes on without it, and trains what one process trains."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.planner.given_plan import GivenPlan
from coordinator.run.requests import RunRequest
from coordinator.run.run_text import is_step
from ringtune.job.job import Job
from ringtune.schedule.migration import with_owner_back
from ringtune.schedule.plan import Plan
from tests.support import reference
from tests.support.cluster import AGENTS, START_S, Cluster, Follower, Outcome, running
from tests.support.copying_job import job_of
from tests.support.moves import slices_of
from tests.support.results import largest_difference, reference_of, trained

pytestmark = pytest.mark.slow
RING = (("a", 0, 1), ("c", 1, 3), ("d", 3, 4))


@pytest.fixture
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Owners a and b, and the hosts c and d, which have neither data nor a copy of the model."""
    with running(tmp_path_factory.mktemp("recovery"), owners=["a", "b"], hosts=["c", "d"]) as made:
        yield made
    assert not AGENTS


def follow(ring: Cluster, job: Job) -> Follower:
    """Carry the job out on a ring in which c is in the middle."""
    asked = RunRequest(job=job, plan_only=True, num_nodes=len(ring.agents), join_s=START_S)
    plan = Follower(ring.coordinator.run(asked)).wait().plan
    assert plan is not None
    placement = type(plan.placement)(slices=slices_of(RING))
    given = GivenPlan(plan=Plan.of(plan.course, placement))
    return Follower(ring.coordinator.run(RunRequest(job=job, join_s=START_S, plan=given)))


def of_kind(outcome: Outcome, kind: str) -> list[dict[str, Any]]:
    """Lines of the books."""
    return [line for line in outcome.metrics if line.get("kind") == kind]


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("after", [1, 13])
@pytest.mark.sampled(1)
def test_run_goes_on_without_a_host_that_is_killed(ring: Cluster, after: int) -> None:
    """After a first turn, and later; each step and evaluation is in the books once."""
    job = job_of(ring)
    follower = follow(ring, job)
    follower.wait_for_steps(after)
    ring.signal("c", signal.SIGKILL)
    outcome = follower.wait()
    ring.wait_exit("c")
    assert outcome.is_done, outcome.message
    wanted = reference_of(ring, job, outcome)
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9
    assert [line["step"] for line in outcome.metrics if is_step(line)] == list(range(1, 25))
    assert sorted(line["step"] for line in outcome.steps if is_step(line)) == list(range(1, 25))
    assert [line["step"] for line in of_kind(outcome, "evaluation")] == [8, 16, 24]
    (recovery,) = of_kind(outcome, "recovery")
    assert recovery["lost"] == ["c"] and recovery["step"] % 4 == 0 and recovery["seconds"] > 0
    assert {
        line["placement_number"] for line in outcome.metrics if is_step(line) and line["step"] > recovery["step"]
    } == {1}


@pytest.mark.promise("1 partition invariance")
def test_run_goes_on_without_a_host_that_stands_still_and_what_it_says_later_is_fenced(ring: Cluster) -> None:
    """For longer than its lease; when it goes on its late messages change nothing, and it is a member again."""
    job = job_of(ring)
    follower = follow(ring, job)
    follower.wait_for_steps(5)
    ring.signal("c", signal.SIGSTOP)
    try:
        follower.wait_for(lambda outcome: bool(of_kind(outcome, "recovery")))
    finally:
        ring.signal("c", signal.SIGCONT)
    outcome = follower.wait()
    assert outcome.is_done, outcome.message
    wanted = reference_of(ring, job, outcome)
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9
    assert [line["step"] for line in outcome.metrics if is_step(line)] == list(range(1, 25))
    ring.wait_idle("c")


@pytest.mark.thorough
def test_run_ends_when_an_owner_is_killed_and_says_so(ring: Cluster) -> None:
    """Its rows are nowhere else, and nothing is to be waited for; the run can be resumed."""
    follower = follow(ring, job_of(ring, recovery__wait_s=0.0))
    follower.wait_for_steps(5)
    ring.signal("b", signal.SIGKILL)
    outcome = follower.wait()
    ring.wait_exit("b")
    assert not outcome.is_done
    assert "b owns rows, which no other node has; start it again and --resume the run" in outcome.message


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("owner", ["a", "b"])
@pytest.mark.sampled(1)
def test_run_goes_on_without_the_rows_of_an_owner_that_is_killed(ring: Cluster, owner: str) -> None:
    """As one process that trains on what is left; its books say who was left out, and that the run is shorter."""
    job = job_of(ring, recovery__owners="skip")
    follower = follow(ring, job)
    follower.wait_for_steps(9)
    ring.signal(owner, signal.SIGKILL)
    outcome = follower.wait()
    ring.wait_exit(owner)
    assert outcome.is_done, outcome.message
    (recovery,) = of_kind(outcome, "recovery")
    assert recovery["left_out"] == [owner] and outcome.plan is not None
    after, step = outcome.plan, recovery["step"]
    before = Plan(with_owner_back(after.course, 24), after.placements)
    wanted = reference_of(ring, job, outcome, reference.turns_around(before, after, step))
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9
    steps = [line for line in outcome.metrics if is_step(line)]
    assert [line["step"] for line in steps] == list(range(1, recovery["num_steps"] + 1))
    assert all(line["initiator"] != owner for line in steps if line["step"] > step)
    assert recovery["num_steps"] < 24
    assert step in [manifest.step for manifest in outcome.checkpoints], "what is from before it needs the owner"
    assert outcome.report["training"]["left_out"] == [owner]
