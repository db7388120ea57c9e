"""Real processes that move from one placement to the next: the result is that of one process, whatever fails."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.planner.given_plan import GivenPlan
from coordinator.run.requests import RunRequest
from coordinator.run.run_text import is_step
from ringtune.job.job import Job
from ringtune.run_control.checkpoint import Resume
from ringtune.schedule.plan import Plan
from tests.support.cluster import AGENTS, START_S, Cluster, Follower, Outcome, running
from tests.support.moves import moving
from tests.support.replay import replay
from tests.support.results import largest_difference, reference_of, trained

pytestmark = pytest.mark.slow

FIRST = (("a", 0, 2), ("b", 2, 4))
SECOND = (("c", 0, 1), ("b", 1, 3), ("a", 3, 4))
THIRD = (("b", 0, 4),)


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Owners a and b, and the hosts c and d, which have neither data nor a copy of the model."""
    with running(tmp_path_factory.mktemp("moves"), owners=["a", "b"], hosts=["c", "d"]) as made:
        yield made
    assert not AGENTS


def job_of(ring: Cluster, **changes: object) -> Job:
    """24 steps in turns of 4 or as the cluster's jobs have it, with checkpoints."""
    wanted: dict[str, Any] = {"train__max_steps": 24, "train__checkpoint_every": 4, "train__dropout": 0.0}
    return ring.job(**{**wanted, **changes})


def plan_of(ring: Cluster, job: Job, *later: tuple[int, Any]) -> Plan:
    """The job on the first placement, and on later ones from some turns on."""
    asked = RunRequest(job=job, plan_only=True, num_nodes=len(ring.agents), join_s=START_S)
    plan = Follower(ring.coordinator.run(asked)).wait().plan
    assert plan is not None
    (still,) = moving(plan, (1, FIRST)).placements[1:]
    first = Plan.of(plan.course, type(still)(slices=still.slices))
    return moving(first, *later)


def follow(ring: Cluster, job: Job, plan: Plan) -> Follower:
    """Carry the plan out."""
    return Follower(ring.coordinator.run(RunRequest(job=job, join_s=START_S, plan=GivenPlan(plan=plan))))


def moves_of(outcome: Outcome) -> list[dict[str, Any]]:
    """What the run's books say of moves."""
    return [line for line in outcome.metrics if line.get("kind") == "move"]


def assert_trained(ring: Cluster, job: Job, outcome: Outcome) -> None:
    """Adapters and head are those of one process."""
    assert outcome.is_done, outcome.message
    wanted = reference_of(ring, job, outcome)
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9


@pytest.mark.promise("1 partition invariance")
def test_processes_move_twice_and_train_what_one_process_trains(ring: Cluster) -> None:
    """A host that comes new borrows the base weights and takes over what was trained; one that leaves only stops."""
    job = job_of(ring, train__local_iterations=4, train__eval_every=8, runtime__record=True)
    plan = plan_of(ring, job, (2, SECOND), (4, THIRD))
    outcome = follow(ring, job, plan).wait()
    assert_trained(ring, job, outcome)
    for node, count in {"a": 3, "b": 3, "c": 1}.items():  # an engine for each placement gives its commands again
        recording = outcome.files[f"recordings/{node}.jsonl"].decode().splitlines()
        assert sum(line.startswith('{"recording"') for line in recording) == count
        assert replay(recording, plan, node) > 20
    moves = moves_of(outcome)
    assert [(move["step"], move["placement_number"], move.get("problem")) for move in moves] == [
        (8, 1, None),
        (16, 2, None),
    ]
    assert all(move["seconds"] > 0 for move in moves) and sum(moves[1]["fetched_bytes"].values()) > 0
    numbers = {line["step"]: line["placement_number"] for line in outcome.metrics if is_step(line)}
    assert numbers == {step: (step - 1) // 8 for step in range(1, 25)}
    assert outcome.report["moves"][1]["placement_number"] == 2 and outcome.report["nodes"]["b"]["blocks"] == [0, 4]


@pytest.mark.thorough
def test_run_goes_on_from_checkpoints_before_and_after_a_move(ring: Cluster) -> None:
    """A checkpoint of the first placement moves at once where its step is the boundary; one of the second stays."""
    job = job_of(ring, train__local_iterations=4, train__lr_schedule="linear")
    plan = plan_of(ring, job, (3, SECOND))
    whole = follow(ring, job, plan).wait()
    assert_trained(ring, job, whole)
    assert [(manifest.step, manifest.placement_number) for manifest in whole.checkpoints[-4:]] == [
        (12, 0),
        (16, 1),
        (20, 1),
        (24, 1),
    ]
    for step, moved in ((16, []), (12, [(12, 1)])):
        (manifest,) = [one for one in stopped_after(ring, job, plan, step) if one.step == step]
        asked = RunRequest(job=job, join_s=START_S, resume=Resume(plan=plan, manifests=(manifest,)))
        outcome = Follower(ring.coordinator.run(asked)).wait()
        assert_trained(ring, job, outcome)
        assert outcome.resumed_at == step
        assert {line["placement_number"] for line in outcome.metrics if is_step(line)} == {1}
        assert [(move["step"], move["placement_number"]) for move in moves_of(outcome)] == moved
        assert outcome.files["adapter/adapter.safetensors"] == whole.files["adapter/adapter.safetensors"]


def stopped_after(ring: Cluster, job: Job, plan: Plan, step: int) -> list[Any]:
    """The checkpoints of a run that is stopped once there is one of this step; nodes keep the last two."""
    follower = follow(ring, job, plan)
    follower.wait_for(lambda outcome: any(manifest.step == step for manifest in outcome.checkpoints))
    follower.driver.stop("stopped by the test")
    found = follower.wait().checkpoints
    ring.wait_idle(*ring.names)
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.thorough
def test_node_that_cannot_move_leaves_the_run_where_it_is(ring: Cluster, number: signal.Signals) -> None:
    """A host that comes new is dead, or stands still: the run stays on the placement that it has, and says why."""
    job = job_of(ring, train__local_iterations=4, runtime__wait_s=10.0, runtime__lease_s=30.0)
    plan = plan_of(ring, job, (2, (("a", 0, 1), ("d", 1, 4))), (4, THIRD))
    follower = follow(ring, job, plan)
    follower.wait_for_steps(1)
    ring.signal("d", number)
    try:
        outcome = follower.wait()
    finally:
        ring.signal("d", signal.SIGCONT) if number is signal.SIGSTOP else ring.wait_exit("d")
        if number is signal.SIGKILL:
            ring.start("d")
        ring.wait_idle(*ring.names)
    assert_trained(ring, job, outcome)
    first, second = moves_of(outcome)
    assert (first["to"], first["placement_number"], first["step"]) == (1, 0, 8) and "node d" in first["problem"]
    assert (second["to"], second["placement_number"], second["step"], second.get("problem")) == (2, 2, 16, None)
