"""Stages with several hosts as real processes: the result of one process, after a killed replica came back too."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from coordinator.planner.given_plan import GivenPlan
from coordinator.run.requests import RunRequest
from ringtune.job.job import Job
from ringtune.run_control.checkpoint import Resume
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from tests.support.cluster import AGENTS, START_S, Cluster, Follower, running
from tests.support.results import largest_difference, reference_of, trained

pytestmark = pytest.mark.slow

PIECES = (
    Slice(node="a", start=0, stop=1),
    Slice(node="b", start=1, stop=4, share=2),
    Slice(node="c", start=1, stop=4),
)


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Owners a and b, host c."""
    with running(tmp_path_factory.mktemp("replicas"), owners=["a", "b"], hosts=["c"]) as made:
        yield made
    assert not AGENTS


def plan_of(ring: Cluster, job: Job) -> Plan:
    """The course that the planner makes of the job, on block 0 at a and the others at b and c."""
    asked = RunRequest(job=job, plan_only=True, num_nodes=len(ring.agents), join_s=START_S)
    plan = Follower(ring.coordinator.run(asked)).wait().plan
    assert plan is not None
    return Plan.of(plan.course, Placement(slices=PIECES))


def follow(ring: Cluster, job: Job, plan: Plan) -> Follower:
    """Carry the plan out."""
    asked = RunRequest(job=job, plan_only=False, join_s=START_S, plan=GivenPlan(plan=plan))
    return Follower(ring.coordinator.run(asked))


@pytest.mark.promise("1 partition invariance")
def test_replicas_as_processes_equal_one_process(ring: Cluster) -> None:
    """Two owners, dropout, four micro-batches: adapters and head of one process, in float64."""
    job = ring.job(train__max_steps=12, train__microbatches=4, train__dropout=0.1)
    outcome = follow(ring, job, plan_of(ring, job)).wait()
    assert outcome.is_done, outcome.message
    wanted = reference_of(ring, job, outcome)
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9


@pytest.mark.thorough
def test_run_with_replicas_goes_on_when_one_was_killed(ring: Cluster) -> None:
    """Every replica has its shard; the run goes on from them and ends as one undisturbed process does."""
    job = ring.job(train__max_steps=24, train__microbatches=4, train__checkpoint_every=4, runtime__lease_s=8.0)
    follower = follow(ring, job, plan_of(ring, job))
    follower.wait_for(lambda outcome: len(outcome.checkpoints) >= 2)
    ring.signal("c", signal.SIGKILL)
    stopped = follower.wait()
    assert stopped.error == "PeerLostError", stopped.message
    ring.wait_exit("c")
    ring.start("c")
    ring.wait_idle(*ring.names)
    assert stopped.plan is not None
    manifests = tuple(reversed(stopped.checkpoints[-2:]))
    outcome = ring.follow(job, Resume(plan=stopped.plan, manifests=manifests)).wait()
    assert outcome.is_done, outcome.message
    wanted = reference_of(ring, job, outcome)
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9
