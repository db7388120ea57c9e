"""Real processes: a run is stopped, one of its nodes loses its disk or is gone for good, and the run is resumed."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator

import pytest

from coordinator.run.requests import RunRequest
from coordinator.run.run_text import is_step
from ringtune.job.job import Job
from ringtune.run_control.checkpoint import Resume
from tests.integration.test_ring_recovery import follow
from tests.support.cluster import AGENTS, START_S, Cluster, Follower, Outcome, running
from tests.support.copying_job import job_of
from tests.support.results import largest_difference, reference_of, trained

pytestmark = pytest.mark.slow


@pytest.fixture
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Owners a and b, and the hosts c and d, of which c is in the middle of the ring."""
    with running(tmp_path_factory.mktemp("others"), owners=["a", "b"], hosts=["c", "d"]) as made:
        yield made
    assert not AGENTS


def stopped(ring: Cluster, job: Job) -> Resume:
    """Train past the first checkpoint, stop with another one, and return what there is to go on from."""
    follower = follow(ring, job)
    follower.wait_for(lambda outcome: len(outcome.checkpoints) >= 1)
    follower.driver.drain("stopped by the user")
    outcome = follower.wait()
    assert outcome.error == "InterruptedRunError" and outcome.plan is not None
    ring.wait_idle(*ring.names)
    return Resume(plan=outcome.plan, manifests=tuple(reversed(outcome.checkpoints[-2:])))


def resumed(ring: Cluster, job: Job, resume: Resume, *, join_s: float = START_S) -> Outcome:
    """Go on, and check steps and weights."""
    request = RunRequest(job=job, join_s=join_s, resume=resume)
    outcome = Follower(ring.coordinator.run(request)).wait()
    assert outcome.is_done, outcome.message
    step = resume.manifests[0].step
    assert outcome.resumed_at == step
    assert [line["step"] for line in outcome.metrics if is_step(line)] == list(range(step + 1, 25))
    wanted = reference_of(ring, job, outcome)
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9
    return outcome


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("is_gone", [True, False])
@pytest.mark.sampled(1)
def test_run_is_resumed_where_a_host_is_gone_or_has_lost_its_disk(ring: Cluster, is_gone: bool) -> None:
    """Its blocks come from the copies at the next host: where it was, or in a placement without it."""
    job = job_of(ring)
    resume = stopped(ring, job)
    if is_gone:
        ring.signal("c", signal.SIGKILL)
        ring.wait_exit("c")
        ring.wait_lost("c")
    shutil.rmtree(ring.folder / "state" / "c")
    outcome = resumed(ring, job, resume, join_s=0.5 if is_gone else START_S)
    assert outcome.plan is not None
    last = outcome.plan.placements[-1]
    assert ("c" in [piece.node for piece in last.slices], last.placement_number) == (
        (False, 1) if is_gone else (True, 0)
    )
