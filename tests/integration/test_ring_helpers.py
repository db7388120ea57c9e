"""Helpers as real processes: the same adapters as without them, and what is said when a helper dies."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.planner.given_plan import GivenPlan
from coordinator.run.requests import RunRequest
from ringtune.job.job import Job
from ringtune.run_control.checkpoint import Resume
from ringtune.schedule.course import ALONE, COLLABORATION, Offload
from ringtune.schedule.placement import Helper, Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import Range
from tests.support.cluster import AGENTS, START_S, Cluster, Follower, Outcome, running

pytestmark = pytest.mark.slow

SLICES = (Slice(node="a", start=0, stop=2), Slice(node="b", start=2, stop=4))
Z_HELPS = (Helper(node="z", start=0, stop=1), Helper(node="z", start=1, stop=2), Helper(node="z", start=2, stop=4))


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Owner and host a, host b, and z, which has neither data nor a copy of the model."""
    with running(tmp_path_factory.mktemp("helpers"), owners=["a"], hosts=["b", "z"]) as made:
        yield made
    assert not AGENTS


def job_of(ring: Cluster, **changes: object) -> Job:
    """Eight steps of two micro-batches in float32."""
    wanted: dict[str, Any] = {"model__dtype": "float32", "wire__dtype": "float32", "train__max_steps": 8}
    wanted["offload__mode"] = "auto"
    return ring.job(**{**wanted, **changes})


def course_of(ring: Cluster, job: Job) -> Plan:
    """What the planner makes of the job, without a run."""
    asked = RunRequest(job=job, plan_only=True, num_nodes=len(ring.agents), join_s=START_S)
    plan = Follower(ring.coordinator.run(asked)).wait().plan
    assert plan is not None
    return plan


def helped(ring: Cluster, job: Job, helpers: tuple[Helper, ...] = Z_HELPS) -> Plan:
    """The job on hosts a and b, with these helpers, whoever would help by the planner."""
    course = dataclasses.replace(course_of(ring, job).course, offload=None)
    return Plan.of(course, Placement(slices=SLICES, helpers=helpers))


def follow(ring: Cluster, job: Job, plan: Plan) -> Follower:
    """Carry the plan out."""
    asked = RunRequest(job=job, plan_only=False, join_s=START_S, plan=GivenPlan(plan=plan))
    return Follower(ring.coordinator.run(asked))


def files_of(outcome: Outcome) -> dict[str, bytearray]:
    """Adapter and head, as the run hands them over."""
    assert outcome.is_done, outcome.message
    return {name: data for name, data in outcome.files.items() if name.endswith(".safetensors")}


def test_helper_process_gives_the_bits_of_the_run_without_it(ring: Cluster) -> None:
    """Losses, adapters and head are equal in every bit."""
    alone, job = job_of(ring, offload__mode="off"), job_of(ring)
    bare = follow(ring, alone, helped(ring, alone, ())).wait()
    found = follow(ring, job, helped(ring, job)).wait()
    assert files_of(found) == files_of(bare)
    assert [line["loss"] for line in found.metrics] == [line["loss"] for line in bare.metrics]
    assert_figures(found.report, job)


@pytest.mark.parametrize("users", [ALONE, COLLABORATION])
@pytest.mark.sampled(1)
def test_user_gets_a_folder_with_the_bits_of_a_run_of_one_user(ring: Cluster, users: str) -> None:
    """The one owner is the one user: alone as without helpers, in collaboration as with merged adapters."""
    is_merged = users == COLLABORATION
    joint = job_of(ring, adapter__config="lora", offload__merged=is_merged)
    own = job_of(ring, adapter__config="lora", offload__merged=is_merged, offload__users=users)
    plan = helped(ring, joint)
    wanted, found = (follow(ring, job, in_manner(plan, job)).wait() for job in (joint, own))
    theirs, ours = files_of(wanted), files_of(found)
    assert ours == {name.replace("adapter/", "users/a/", 1): data for name, data in theirs.items()}


def in_manner(plan: Plan, job: Job) -> Plan:
    """The plan in which helpers fit as the job says."""
    manner = job.offload.helper_settings
    offload = None if manner.is_exact else Offload(blocks=(Range(0, 4),), **dataclasses.asdict(manner))
    return Plan(dataclasses.replace(plan.course, offload=offload), plan.placements)


def assert_figures(report: dict[str, Any], job: Job) -> None:
    """What travelled is told by kind, and what z took of memory and time."""
    links, pairs, weights = report["links"], report["pair_links"], report["helper_weight_links"]
    assert {link: links[link] for link in ("a>z", "b>z")} == pairs  # nothing else goes to z: no hidden states
    assert {link: links[link] for link in ("z>a", "z>b")} == weights
    assert min(pairs.values()) > max(weights.values()) > 0
    fitted = report["nodes"]["z"]
    assert 0 < fitted["fit_s"] <= fitted["busy_s"]
    assert fitted["peak_rss_bytes"] > 0 and fitted["blocks"] == [4, 4]
    assert 0 < fitted["hosted_bytes"] < report["nodes"]["b"]["hosted_bytes"] / 10  # adapters, no base weights
    assert report["offload"]["staleness"] == "none" and job.offload.is_on


@pytest.mark.thorough
def test_helper_killed_is_named_and_the_checkpoint_before_is_gone_on_from(ring: Cluster) -> None:
    """SIGKILL of the helper ends the run with its name; with it back, the run goes on to the same bits.

    It updates every fourth step, checkpoints are every third: what it had added up is in most of them.
    """
    job = job_of(ring, train__max_steps=60, train__checkpoint_every=3, offload__interval=4)
    plan = helped(ring, job)
    course = dataclasses.replace(plan.course, offload=Offload(blocks=(Range(0, 4),), interval=4))
    plan = Plan(course, plan.placements)
    wanted = follow(ring, job, plan).wait()
    follower = follow(ring, job, plan)
    follower.wait_for(lambda outcome: len(outcome.checkpoints) >= 2)
    ring.signal("z", signal.SIGKILL)
    outcome = follower.wait()
    assert outcome.error == "PeerLostError", outcome.message
    assert "helper z" in outcome.message and "--resume" in outcome.message, outcome.message
    ring.wait_exit("z")
    ring.start("z")
    ring.wait_idle("a", "b", "z")
    resume = Resume(plan=plan, manifests=tuple(reversed(outcome.checkpoints)))
    found = ring.follow(job, resume).wait()
    assert found.resumed_at == outcome.checkpoints[-1].step
    assert files_of(found) == files_of(wanted)
