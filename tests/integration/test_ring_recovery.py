"""Real processes that are lost, come back or come new: the run trains what one process trains, and its books say so.

``test_fault_points`` kills a host at chosen places.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import signal
from typing import Any

import pytest
from safetensors.torch import load

from coordinator.planner.replan import PlacementProposal
from coordinator.run import migration
from coordinator.run.run_text import is_step
from ringtune.costs.profile import LinkFacts, Profile
from ringtune.job.job import Job
from ringtune.run_control.checkpoint import Resume
from ringtune.schedule.migration import course_before
from ringtune.schedule.plan import Plan
from tests.support.cluster import RING, START_S, Cluster, Follower, Hold, Outcome
from tests.support.hift_reference import tensors_of, train_hift
from tests.support.moves import slices_of
from tests.support.reference import turns_as_written
from tests.support.results import datasets_of, largest_difference, reference_of, trained, turns_of

pytestmark = pytest.mark.slow


def job_of(ring: Cluster, **changes: object) -> Job:
    """24 steps in turns of 4, with checkpoints, and copies at the next host."""
    wanted: dict[str, Any] = {
        "train__max_steps": 24,
        "train__local_iterations": 4,
        "train__checkpoint_every": 8,
        "train__eval_every": 8,
        "recovery__copies": "next",
    }
    return ring.job(**{**wanted, **changes})


def followed(ring: Cluster, job: Job, hold: Hold | None = None) -> Follower:
    """The job on a ring in which c is in the middle."""
    return ring.follow(job, plan=ring.plan_on(job, RING), hold=hold)


def wait_for_turn(follower: Follower, *, steps: int) -> None:
    """Wait until so many steps are through, and all nodes are done with the first turn: its copies have arrived."""
    follower.wait_for(lambda outcome: len(outcome.steps) >= steps and any(map(is_step, outcome.metrics)))


def assert_trained(ring: Cluster, job: Job, outcome: Outcome, *, after: int = 0) -> None:
    """Adapters and head are those of one process; each step is in the books once, and was shown once."""
    assert outcome.is_done, outcome.message
    wanted = reference_of(ring, job, outcome)
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9
    steps = job.train.max_steps
    assert steps is not None
    for lines in (outcome.metrics, outcome.steps):
        assert sorted(line["step"] for line in lines if is_step(line)) == list(range(after + 1, steps + 1))


@pytest.mark.promise("1 partition invariance")
def test_run_goes_on_without_a_host_that_stands_still_and_what_it_says_later_is_fenced(ring: Cluster) -> None:
    """For longer than its lease; when it goes on its late messages change nothing, and it is a member again."""
    job = job_of(ring)
    follower = followed(ring, job, hold := Hold(ring, 5))
    wait_for_turn(follower, steps=5)
    ring.signal("c", signal.SIGSTOP)
    ring.end_lease("c")
    try:
        follower.wait_for(lambda outcome: bool(outcome.of_kind("recovery")))
    finally:
        ring.signal("c", signal.SIGCONT)
    hold.let_go()
    outcome = follower.wait()
    assert_trained(ring, job, outcome)
    assert [line["step"] for line in outcome.of_kind("evaluation")] == [8, 16, 24]
    (recovery,) = outcome.of_kind("recovery")
    assert recovery["lost"] == ["c"] and recovery["step"] % 4 == 0 and recovery["seconds"] > 0
    later = [line for line in outcome.metrics if is_step(line) and line["step"] > recovery["step"]]
    assert {line["placement_number"] for line in later} == {1}
    ring.wait_idle("c")


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize(("owner", "is_killed"), [("a", True), ("b", False)])
@pytest.mark.sampled(1)
def test_run_goes_on_without_the_rows_of_a_lost_owner_until_it_is_back(
    ring: Cluster, owner: str, is_killed: bool
) -> None:
    """As one process that trains on what is there; its books say who was left out and came back, and what it missed.

    It is another process of its name, or one that stood still for longer than its lease.
    """
    job = job_of(ring, recovery__owners="skip", train__max_steps=96, train__eval_every=48, runtime__wait_s=300.0)
    follower = followed(ring, job, hold := Hold(ring, 9))
    wait_for_turn(follower, steps=9)
    ring.signal(owner, signal.SIGKILL if is_killed else signal.SIGSTOP)
    ring.end_lease(owner)
    try:
        follower.wait_for(lambda outcome: bool(outcome.of_kind("recovery")))
        hold.let_go(until=9)
        # in the third turn without it one of them was its own; only turns that are granted are trained from here on
        follower.wait_for(lambda outcome: hold.has_begun)
    finally:
        ring.signal(owner, signal.SIGCONT)
    if is_killed:
        ring.wait_exit(owner)
        ring.start(owner)
    told = f"node {owner} is back; its rows are trained again from the next turn boundary on"
    follower.wait_for(lambda outcome: told in outcome.notes)
    hold.let_go()
    outcome = follower.wait()
    assert outcome.is_done, outcome.message
    lost, back = outcome.of_kind("recovery")
    assert lost["left_out"] == back["returned"] == [owner]
    wanted = reference_of(ring, job, outcome, turns_of(outcome, 96))
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9
    steps = [line for line in outcome.metrics if is_step(line)]
    missed = back["missed_turns"][owner]
    assert [line["step"] for line in steps] == list(range(1, 97 - 4 * missed)) and missed > 0
    away = {line["initiator"] for line in steps if lost["step"] < line["step"] <= back["step"]}
    assert owner not in away and owner in {line["initiator"] for line in steps if line["step"] > back["step"]}
    assert {lost["step"], back["step"]} <= {manifest.step for manifest in outcome.checkpoints}
    training = outcome.report["training"]
    assert (training["left_out"], training["missed_turns"]) == ([], {owner: missed})


@pytest.mark.thorough
@pytest.mark.promise("1 partition invariance")
def test_run_that_is_resumed_takes_in_an_owner_that_was_left_out_before(ring: Cluster) -> None:
    """It was the first host, is there when the run is resumed, and is taken in after a turn; resumed once more."""
    job = job_of(ring, recovery__owners="skip", train__max_steps=192, train__eval_every=48, runtime__wait_s=300.0)
    follower = followed(ring, job)
    wait_for_turn(follower, steps=9)
    ring.signal("a", signal.SIGKILL)
    parts = list[Outcome]()
    for _ in range(2):
        follower.wait_for(lambda outcome: bool(outcome.of_kind("recovery")))
        follower.driver.drain("stopped by the user")
        stopped = follower.wait()
        assert stopped.error == "InterruptedRunError" and stopped.plan is not None
        parts.append(stopped)
        if len(parts) == 1:
            ring.wait_exit("a")
            ring.start("a")
        ring.wait_idle(*ring.names)
        resume = Resume(plan=stopped.plan, manifests=(stopped.checkpoints[-1],))
        follower = ring.follow(job, resume, num_nodes=0, join_s=START_S)
    outcome = follower.wait()
    assert outcome.is_done, outcome.message
    outcome.metrics[:0] = [line for part in parts for line in part.metrics]
    lost, back = outcome.of_kind("recovery")
    assert lost["left_out"] == back["returned"] == ["a"]
    wanted = reference_of(ring, job, outcome, turns_of(outcome, 192))
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9
    assert outcome.report["training"]["missed_turns"] == back["missed_turns"]


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("owner", ["a", "b"])
@pytest.mark.sampled(1)
def test_run_waits_for_an_owner_that_is_killed_and_goes_on_when_it_is_back(ring: Cluster, owner: str) -> None:
    """With its blocks, and the head if it had it, from the copies; who was awaited was in the status."""
    job = job_of(ring)
    follower = followed(ring, job, hold := Hold(ring, 9))
    wait_for_turn(follower, steps=9)
    ring.signal(owner, signal.SIGKILL)
    follower.wait_for(lambda outcome: any("the run waits for node" in note for note in outcome.notes))
    status = ring.coordinator.run_status()
    assert status.phase == "waiting" and list(status.awaited) == [owner] and status.awaited_s > 0
    assert f"{owner} owns rows, which no other node has" in status.awaited_why
    ring.wait_exit(owner)
    ring.start(owner)
    follower.wait_for(lambda outcome: bool(outcome.of_kind("recovery")))
    hold.let_go()
    outcome = follower.wait()
    assert_trained(ring, job, outcome)
    (recovery,) = outcome.of_kind("recovery")
    assert recovery["lost"] == recovery["back"] == [owner] and recovery["step"] % 4 == 0
    assert outcome.plan is not None and outcome.plan.placements[-1].slices == slices_of(RING)
    assert [line["step"] for line in outcome.of_kind("evaluation")] == [8, 16, 24]


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("is_gone", [True, False])
@pytest.mark.sampled(1)
def test_run_is_resumed_where_a_host_is_gone_or_has_lost_its_disk(ring: Cluster, is_gone: bool) -> None:
    """Its blocks come from the copies at the next host: where it was, or in a placement without it."""
    job = job_of(ring)
    follower = followed(ring, job, hold := Hold(ring, 9))
    follower.wait_for(lambda outcome: len(outcome.checkpoints) >= 1)
    follower.driver.drain("stopped by the user")
    hold.let_go()
    stopped = follower.wait()
    assert stopped.error == "InterruptedRunError" and stopped.plan is not None
    ring.wait_idle(*ring.names)
    resume = Resume(plan=stopped.plan, manifests=tuple(reversed(stopped.checkpoints[-2:])))
    if is_gone:
        ring.signal("c", signal.SIGKILL)
        ring.wait_exit("c")
        ring.end_lease("c")
    shutil.rmtree(ring.folder / "state" / "c")
    outcome = ring.follow(job, resume, num_nodes=0, join_s=0.5 if is_gone else START_S).wait()
    assert outcome.resumed_at == resume.manifests[0].step
    assert_trained(ring, job, outcome, after=outcome.resumed_at)
    assert outcome.plan is not None
    last = outcome.plan.placements[-1]
    has_c = "c" in [piece.node for piece in last.slices]
    assert (has_c, last.placement_number) == ((False, 1) if is_gone else (True, 0))


@pytest.mark.promise("1 partition invariance")
def test_run_of_all_parameters_goes_back_to_its_checkpoint_without_a_host_that_is_gone(ring: Cluster) -> None:
    """By itself, as another run: the host's blocks are on the next host's disk, as they were at each checkpoint."""
    changes = {"train__method": "hift", "adapter__config": "full", "train__eval_every": 0}
    job = job_of(ring, **changes)
    follower = followed(ring, job, Hold(ring, 9))
    follower.wait_for(lambda outcome: len(outcome.checkpoints) >= 1)
    ring.signal("c", signal.SIGKILL)
    outcome = follower.wait()
    assert outcome.is_done, outcome.message
    assert outcome.resumed_at in [manifest.step for manifest in outcome.checkpoints]
    assert any("the run goes back to the checkpoint of step" in note for note in outcome.notes)
    assert outcome.plan is not None and outcome.plan.placements[-1].placement_number == 1
    assert "c" not in [piece.node for piece in outcome.plan.placements[-1].slices]
    wanted = tensors_of_hift(job, outcome.plan, ring)
    assert largest_difference(load(bytes(outcome.files["model/model.safetensors"])), wanted) < 1e-9


def tensors_of_hift(job: Job, plan: Plan, ring: Cluster, **how: Any) -> dict[str, Any]:
    """What one process trains, by the names in the model's file."""
    found = tensors_of(train_hift(job, plan, ring.model, datasets_of(ring, job), **how).model)
    head = {"heads.ringtune.1": "bert.pooler.dense", "heads.ringtune.4": "classifier"}  # as transformers calls it
    for ours, theirs in head.items():
        found |= {f"{theirs}.{kind}": found.pop(f"{ours}.{kind}") for kind in ("weight", "bias")}
    return found


@pytest.mark.thorough
@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("owner", ["a", "b"])
def test_run_of_all_parameters_takes_a_lost_owner_back_from_its_next_checkpoint(ring: Cluster, owner: str) -> None:
    """As one process on the turns that are left, and with the bits of the run that is resumed from there by hand."""
    changes = {"train__method": "hift", "adapter__config": "full", "train__eval_every": 0, "train__max_steps": 120}
    job = job_of(ring, **changes, recovery__owners="skip")
    ring.coordinator.sinks.append(hold := Hold(ring, 1, after="resumed_json"))
    try:
        follower = followed(ring, job)
        follower.wait_for(lambda outcome: len(outcome.checkpoints) >= 1)
        ring.signal(owner, signal.SIGKILL)
        ring.end_lease(owner)
        follower.wait_for(lambda outcome: hold.has_begun)
        ring.wait_exit(owner)
        ring.start(owner)
        told = f"node {owner} is back; its rows are trained again from the next checkpoint on, from which another run"
        follower.wait_for(lambda outcome: any(note.startswith(told) for note in outcome.notes))
    finally:
        ring.coordinator.sinks.remove(hold)
    lost_at, lost = follower.outcome.resumed_at, follower.outcome.plan
    hold.let_go()
    outcome = follower.wait()
    assert outcome.is_done and outcome.plan is not None and lost is not None, outcome.message
    saved = next(one for one in outcome.checkpoints if one.step == outcome.resumed_at)
    assert saved.step > lost_at and outcome.plan.course.missed[owner] > 0
    whole = Plan(course_before(lost.course, 120), lost.placements)
    turns = turns_as_written(whole, [(lost_at, lost), (saved.step, outcome.plan)])
    wanted = tensors_of_hift(job, whole, ring, turns=turns)
    assert largest_difference(load(bytes(outcome.files["model/model.safetensors"])), wanted) < 1e-9
    ring.wait_idle(*ring.names)
    by_hand = ring.follow(job, Resume(plan=lost, manifests=(saved,)), num_nodes=0, join_s=START_S).wait()
    assert by_hand.is_done and by_hand.plan == outcome.plan, by_hand.message
    assert by_hand.files["model/model.safetensors"] == outcome.files["model/model.safetensors"]


def measured(profile: Profile, names: str) -> Profile:
    """The profile of these nodes as if they were on machines of their own, whose links were measured."""
    links = (
        LinkFacts(source=source, target=target, rate_bytes_per_s=1e9, latency_s=1e-4)
        for source, target in itertools.permutations(names, 2)
    )
    return Profile(nodes=tuple(node for node in profile.nodes if node.node in names), links=tuple(links))


def pays(patch: pytest.MonkeyPatch) -> None:
    """Let the planner find that the ring pays, as soon as all of its nodes are there."""

    def replanned(part: Plan, job: Job, profile: Profile, **_: object) -> PlacementProposal | None:
        found = dataclasses.replace(part.placement, slices=slices_of(RING))
        is_there = {piece.node for piece in found.slices} <= profile.by_name.keys()
        pays = is_there and found.slices != part.placement.slices
        return PlacementProposal(found, "the ring of the test", 1000.0, 1.0, 5.0) if pays else None

    patch.setattr(migration, "replanned", replanned)


@pytest.mark.thorough
@pytest.mark.parametrize("was_lost", [True, False])
def test_node_that_comes_in_mid_run_takes_blocks(
    ring: Cluster, monkeypatch: pytest.MonkeyPatch, was_lost: bool
) -> None:
    """A host that was killed, or a new one that the run has not known: the run moves to it where that pays."""
    pays(monkeypatch)
    changes = {
        "train__max_steps": 96,
        "train__eval_every": 0,
        "train__checkpoint_every": 48,
        "placement__replan": "auto",
    }
    job = job_of(ring, **changes, runtime__wait_s=300.0)
    plan = ring.plan_on(job, RING if was_lost else (("a", 0, 2), ("b", 2, 4)))
    profile = Profile.from_json(ring.planned(job).profile)
    if not was_lost:
        ring.signal("c", signal.SIGTERM)
        ring.wait_exit("c")
    hold = Hold(ring, 5, after="recovery" if was_lost else "")
    follower = ring.follow(job, plan=plan, profile=measured(profile, "abc" if was_lost else "ab"), hold=hold)
    wait_for_turn(follower, steps=5)
    if was_lost:
        ring.signal("c", signal.SIGKILL)
        follower.wait_for(lambda outcome: bool(outcome.of_kind("recovery")))
        ring.wait_exit("c")
    ring.start("c")
    follower.wait_for(lambda outcome: any("node c may get blocks of this run" in note for note in outcome.notes))
    hold.let_go()
    outcome = follower.wait()
    assert_trained(ring, job, outcome)
    assert [line["lost"] for line in outcome.of_kind("recovery")] == [["c"]] * was_lost
    (move,) = [line for line in outcome.of_kind("move") if not line.get("problem")]
    assert move["step"] > 0 and "c" in move["fetched_bytes"]
    assert outcome.report["nodes"]["c"]["actions"] > 0 and outcome.report["nodes"]["c"]["blocks"] == [1, 3]
    assert outcome.plan is not None
    middle, last = outcome.plan.placements[-2:]
    assert "c" not in [piece.node for piece in middle.hosts] and last.slices == slices_of(RING)
    trace = json.loads(outcome.files["trace.json"])
    assert "c" in [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
