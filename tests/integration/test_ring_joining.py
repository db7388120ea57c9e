"""Real processes that are killed and started again, or come new, while a run is under way."""

from __future__ import annotations

import dataclasses
import itertools
import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.planner.given_plan import GivenPlan
from coordinator.planner.replan import PlacementProposal
from coordinator.run import migration
from coordinator.run.requests import RunRequest
from coordinator.run.run_text import is_step
from ringtune.costs.profile import LinkFacts, Profile
from ringtune.job.job import Job
from ringtune.schedule.plan import Plan
from tests.support.cluster import AGENTS, START_S, Cluster, Follower, Outcome, running
from tests.support.copying_job import job_of
from tests.support.moves import slices_of
from tests.support.results import largest_difference, reference_of, trained

pytestmark = pytest.mark.slow
RING = (("a", 0, 1), ("c", 1, 3), ("b", 3, 4))


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Owners a and b, and the host c, which has neither data nor a copy of the model."""
    with running(tmp_path_factory.mktemp("joining"), owners=["a", "b"], hosts=["c"]) as made:
        yield made
    assert not AGENTS


def planned(ring: Cluster, job: Job, slices: Any) -> tuple[Plan, Profile]:
    """The job on these slices, and the profile of its nodes."""
    driver = ring.coordinator.run(RunRequest(job=job, plan_only=True, num_nodes=len(ring.agents), join_s=START_S))
    follower = Follower(driver)
    plan = follower.wait().plan
    assert plan is not None
    placement = type(plan.placement)(slices=slices_of(slices))
    return Plan.of(plan.course, placement), Profile.from_json(follower.outcome.profile)


def of_kind(outcome: Outcome, kind: str) -> list[dict[str, Any]]:
    """Lines of the books."""
    return [line for line in outcome.metrics if line.get("kind") == kind]


def assert_trained(ring: Cluster, job: Job, outcome: Outcome) -> None:
    """Adapters and head are those of one process; each step is in the books once, and was shown once."""
    assert outcome.is_done, outcome.message
    wanted = reference_of(ring, job, outcome)
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9
    steps = job.train.max_steps
    assert steps is not None
    for lines in (outcome.metrics, outcome.steps):
        assert sorted(line["step"] for line in lines if is_step(line)) == list(range(1, steps + 1))


def restart(ring: Cluster, name: str) -> None:
    """Start a node again that was killed."""
    ring.wait_exit(name)
    ring.start(name)


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("owner", ["a", "b"])
@pytest.mark.sampled(1)
def test_run_waits_for_an_owner_that_is_killed_and_goes_on_when_it_is_back(ring: Cluster, owner: str) -> None:
    """With its blocks, and the head if it had it, from the copies; who was awaited was in the status."""
    job = job_of(ring)
    plan, _ = planned(ring, job, RING)
    follower = Follower(ring.coordinator.run(RunRequest(job=job, join_s=START_S, plan=GivenPlan(plan=plan))))
    follower.wait_for_steps(9)
    ring.signal(owner, signal.SIGKILL)
    follower.wait_for(lambda outcome: any("the run waits for node" in note for note in outcome.notes))
    status = ring.coordinator.run_status()
    assert status.phase == "waiting" and list(status.awaited) == [owner] and status.awaited_s > 0
    assert f"{owner} owns rows, which no other node has" in status.awaited_why
    restart(ring, owner)
    outcome = follower.wait()
    assert_trained(ring, job, outcome)
    (recovery,) = of_kind(outcome, "recovery")
    assert recovery["lost"] == recovery["back"] == [owner] and recovery["step"] % 4 == 0
    assert outcome.plan is not None and outcome.plan.placements[-1].slices == plan.placement.slices
    assert [line["step"] for line in of_kind(outcome, "evaluation")] == [8, 16, 24]
    ring.wait_idle(*ring.names)


def measured(profile: Profile, names: str) -> Profile:
    """The profile of these nodes as if they were on machines of their own, whose links were measured."""
    links = (
        LinkFacts(source=source, target=target, rate_bytes_per_s=1e9, latency_s=1e-4)
        for source, target in itertools.permutations(names, 2)
    )
    return Profile(nodes=tuple(node for node in profile.nodes if node.node in names), links=tuple(links))


def pays(patch: pytest.MonkeyPatch, slices: Any) -> None:
    """Let the planner find that these slices pay, as soon as all of their nodes are there."""

    def replanned(part: Plan, job: Job, profile: Profile, **_: object) -> PlacementProposal | None:
        found = dataclasses.replace(part.placement, slices=slices_of(slices))
        is_there = {piece.node for piece in found.slices} <= profile.by_name.keys()
        pays = is_there and found.slices != part.placement.slices
        return PlacementProposal(found, "the ring of the test", 1000.0, 1.0, 5.0) if pays else None

    patch.setattr(migration, "replanned", replanned)


class Hold:
    """Keeps the grants of a run back, so that it has not ended when a node has come.

    Args:
        follower: of the run.
    """

    def __init__(self, follower: Follower) -> None:
        self._moving = follower.driver._require_moving()
        self._lock, self._held, self._is_open = threading.Lock(), list[Any](), False
        self._grant = self._moving.grant
        self._moving.grant = self._keep  # type: ignore[method-assign]

    def _keep(self, turns: Any) -> None:
        with self._lock:
            if self._is_open or not turns:
                self._grant(turns)
            else:
                self._held.append(turns)

    def let_go(self) -> None:
        """Grant what was kept back, and whatever follows."""
        with self._lock:
            self._is_open = True
            for turns in self._held:
                self._grant(turns)


def until_c_may_have_blocks(follower: Follower) -> None:
    """Wait until the run knows of c."""
    follower.wait_for(lambda outcome: any("node c may get blocks of this run" in note for note in outcome.notes))


def moves(outcome: Outcome) -> list[dict[str, Any]]:
    """The moves that came about."""
    return [line for line in of_kind(outcome, "move") if not line.get("problem")]


LONG: dict[str, Any] = {"train__max_steps": 96, "train__eval_every": 0, "train__checkpoint_every": 48}


@pytest.mark.thorough
def test_host_that_is_killed_and_started_again_takes_blocks_again(
    ring: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on without it, and moves back to it when the planner finds that this pays."""
    pays(monkeypatch, RING)
    job = job_of(ring, **LONG, runtime__wait_s=300.0)
    plan, profile = planned(ring, job, RING)
    asked = RunRequest(job=job, join_s=START_S, plan=GivenPlan(plan=plan), profile=measured(profile, "abc"))
    follower = Follower(ring.coordinator.run(asked))
    follower.wait_for_steps(5)
    ring.signal("c", signal.SIGKILL)
    follower.wait_for(lambda outcome: bool(of_kind(outcome, "recovery")))
    hold = Hold(follower)
    restart(ring, "c")
    until_c_may_have_blocks(follower)
    hold.let_go()
    outcome = follower.wait()
    assert_trained(ring, job, outcome)
    (recovery,) = of_kind(outcome, "recovery")
    assert recovery["lost"] == ["c"] and "back" not in recovery
    (move,) = moves(outcome)
    assert move["fetched_bytes"]["c"] > 0
    assert outcome.plan is not None
    middle, last = outcome.plan.placements[-2:]
    assert not any(piece.node == "c" for piece in middle.hosts) and last.slices == plan.placement.slices
    ring.wait_idle(*ring.names)


@pytest.mark.thorough
def test_new_node_joins_a_run_of_two(ring: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was not there when the run was planned, and has no copy of the model; its figures are in the books."""
    pays(monkeypatch, RING)
    job = job_of(ring, **LONG, runtime__wait_s=300.0)
    plan, profile = planned(ring, job, (("a", 0, 2), ("b", 2, 4)))
    ring.signal("c", signal.SIGTERM)
    ring.wait_exit("c")
    asked = RunRequest(job=job, join_s=START_S, plan=GivenPlan(plan=plan), profile=measured(profile, "ab"))
    follower = Follower(ring.coordinator.run(asked))
    follower.wait_for_steps(5)
    hold = Hold(follower)
    ring.start("c")
    until_c_may_have_blocks(follower)
    hold.let_go()
    outcome = follower.wait()
    assert_trained(ring, job, outcome)
    (move,) = moves(outcome)
    assert move["step"] > 0 and "c" in move["fetched_bytes"]
    assert outcome.report["nodes"]["c"]["actions"] > 0 and outcome.report["nodes"]["c"]["blocks"] == [1, 3]
    assert outcome.plan is not None and outcome.plan.placements[-1].slices == slices_of(RING)
    trace = json.loads(outcome.files["trace.json"])
    assert "c" in [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    ring.wait_idle(*ring.names)
