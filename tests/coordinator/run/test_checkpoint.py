"""From which step a run goes on and with which nodes; reports of nodes, and which complaint is believed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.planner.limits import Effort
from coordinator.run import checkpoint, recovery
from coordinator.run.checkpoint import CheckpointManager, Disks, ResumeChooser, ResumePoint
from coordinator.run.driver import AbsentNodes, Participants
from coordinator.run.members import LinkCache, Member
from coordinator.run.recovery import GRACE_S, PeerSuspicions, Reports
from coordinator.run.report import RunLedger
from coordinator.run.requests import RunRequest
from coordinator.run.run_driver import RunWork
from ringtune.errors import IntegrityError, ModelError
from ringtune.job.job import Job, Model
from ringtune.run_control import events as rd
from ringtune.run_control.checkpoint import CheckpointManifest, Resume, SavedPart, Shard
from ringtune.run_control.continuation import job_digest
from ringtune.schedule.methods.hift import Hift
from ringtune.schedule.migration import Source, with_owner, without_owner
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import NONE_DONE, Evaluations
from ringtune.techniques.replicas import CopyDigest
from ringtune.v1 import control_pb2
from tests.support.fake_agents import job
from tests.support.plans import make_method, make_plan
from tests.support.profiles import profile_of

RUN = "r20260101-000000-00000000"
SLICES = [("a", 0, 1), ("c", 1, 3), ("d", 3, 4)]
PLAN = make_plan(SLICES, ["a", "b"], num_steps=20, method="all").with_copies(True)
JOB = Job(model=Model(path="m"))
HEAD, OLDER_HEAD = (SavedPart(step, RUN, has_head=True) for step in (8, 4))
COPIES = {
    "a": [SavedPart(8, RUN, (3,)), SavedPart(4, RUN, (3,)), OLDER_HEAD],
    "b": [HEAD],
    "c": [SavedPart(8, RUN, (0,)), SavedPart(4, RUN, (0,))],
    "d": [SavedPart(8, RUN, (1, 2)), SavedPart(4, RUN, (1, 2))],
}


def manifest(step: int, plan: Plan = PLAN, *, with_shards: bool = True, **changes: Any) -> CheckpointManifest:
    """A checkpoint of the plan, or the end of a turn; the owners have the head in turn."""
    values: dict[str, Any] = {
        "run_id": RUN,
        "plan_digest": plan.digest,
        "job_digest": job_digest(JOB),
        "model_digest": profile_of(plan).nodes[0].model.digest,
        "step": step,
        "holder": "a" if step == 8 else "b",
        "shards": tuple(Shard(node=node, sha256=node * 64, size_bytes=1) for node in plan.nodes) if with_shards else (),
        "attempt": RUN,
    }
    return CheckpointManifest(**{**values, **changes})


CHECKPOINTS = (manifest(8), manifest(4))


def choose(
    nodes: Sequence[str],
    *,
    plan: Plan = PLAN,
    manifests: tuple[CheckpointManifest, ...] = CHECKPOINTS,
    parts: Mapping[str, Sequence[SavedPart]] = COPIES,
    damaged: Mapping[str, Mapping[int, str]] | None = None,
    more: Sequence[str] = (),
    measured: Plan | None = None,
    **changes: Any,
) -> tuple[ResumePoint | None, tuple[str, ...]]:
    """The choice with these nodes; each has whole shards but for what is damaged."""
    whole = profile_of(measured or plan, more=more)
    there = dataclasses.replace(whole, nodes=tuple(node for node in whole.nodes if node.node in (*nodes, *more)))
    steps = [one.step for one in manifests]
    problems = {node: {step: (damaged or {}).get(node, {}).get(step, "") for step in steps} for node in nodes}
    disks = Disks(problems, {node: parts[node] for node in nodes if node in parts})
    job = JOB.with_overrides({key.replace("__", "."): value for key, value in changes.items()})
    return ResumeChooser(Resume(plan=plan, manifests=manifests), job, there, disks, Effort(seconds=5.0)).choose()


def chosen(nodes: Sequence[str], **values: Any) -> ResumePoint:
    """How a run goes on that does."""
    found, _ = choose(nodes, **values)
    assert found is not None
    return found


def test_run_goes_on_as_it_was_also_where_a_disk_is_lost() -> None:
    """Each node has its own shard, and the plan is the very one."""
    found = chosen("abcd")
    assert (found.manifest, found.planned.plan, found.sources, found.told) == (CHECKPOINTS[0], PLAN, None, "")
    assert (found.start.step, found.start.holder, found.start.placement_number) == (8, "a", 0)
    # The node loads from the copy at the next host; the others from their own shards
    found = chosen("abcd", damaged={"c": {8: "c has no shard", 4: "c has no shard"}})
    assert found.planned.plan == PLAN and found.start.step == 8 and "c has no shard" in found.told
    assert found.sources == {
        "a": (Source("a", 0, 1, "a" * 64),),
        "b": (),
        "c": (Source("d", 1, 3),),
        "d": (Source("d", 3, 4, "d" * 64),),
    }
    assert found.head_sha256 == "a" * 64


def test_owner_takes_the_head_from_a_host_that_keeps_a_copy() -> None:
    """The disk of the owner that had it is lost, and with two copies a host has one."""
    parts = {"d": [*COPIES["d"], SavedPart(8, RUN, (0,)), SavedPart(8, RUN, has_head=True)]}
    found = chosen("abcd", parts=parts, damaged={"a": {8: "a has no shard", 4: "a has no shard"}})
    assert (found.start.holder, found.heads) == ("a", {"a": ("d", "")})


FULL = {"train__method": "hift", "adapter__config": "full"}


def test_run_of_all_parameters_goes_on_from_the_disks_that_are_there() -> None:
    """An owner whose disk is lost takes embedding and head from another one; blocks that nobody has end it."""
    plan = make_plan(SLICES, ["a", "b"], num_steps=20, method=Hift())
    saved, lost = (manifest(8, plan),), {"b": {8: "b has no shard"}}
    found = chosen("abcd", plan=plan, manifests=saved, damaged=lost, parts={}, **FULL)
    assert found.planned.plan == plan and found.heads == {"a": ("a", "a" * 64), "b": ("a", "a" * 64)}
    assert found.sources is not None and found.sources["c"] == (Source("c", 1, 3, "c" * 64),)
    with pytest.raises(IntegrityError, match="no joined node has the trained tensors of blocks 1, 2, which node c had"):
        chosen("abd", plan=plan, manifests=saved, parts={}, **FULL)
    parts = {"d": [SavedPart(8, RUN, (1, 2)), SavedPart(4, "", is_best=True)]}
    known = Evaluations(step=6, best=0.3, best_step=4, waited=1)
    keeps = FULL | {"train__keep_best": True, "train__eval_every": 2}
    saved = (manifest(8, plan, evaluations=known),)
    found = chosen("abd", plan=plan, manifests=saved, parts=parts, **keeps)
    before, after = found.planned.plan.placements
    assert before == plan.placement and "c" not in {piece.node for piece in after.slices}
    assert found.start.evaluations.best is None and "the best result so far, that of step 4, can't be" in found.told


def test_run_of_all_parameters_takes_back_an_owner_that_is_there_when_it_is_resumed() -> None:
    """From another owner's shard; it stays out where it has no room, is not there, or was not to be left out."""
    whole = make_plan(SLICES, ["a", "b"], num_steps=20, method=Hift())
    plan = Plan(without_owner(whole.course, "b", 1), whole.placements)
    known = Evaluations(step=6, best=0.3, best_step=4, waited=1)
    saved = (manifest(8, plan, evaluations=known),)
    parts = {node: [SavedPart(4, "", is_best=True)] for node in "acd"}
    keeps = {"train__keep_best": True, "train__eval_every": 2, "train__max_steps": 20, "train__local_iterations": 2}
    how: dict[str, Any] = {"plan": plan, "manifests": saved, "parts": parts, **FULL, **keeps}
    skips = {**how, "measured": whole, "recovery__owners": "skip"}
    found = chosen("abcd", **skips)
    after = found.planned.plan
    assert after == Plan(with_owner(plan.course, "b", 4, 20), plan.placements)
    assert found.heads == {"a": ("a", "a" * 64), "b": ("a", "a" * 64)} and found.start.holder == "a"
    assert found.sources is not None and found.sources["c"] == (Source("c", 1, 3, "c" * 64),)
    assert found.start.evaluations.best is None and found.told.startswith("the run continues from the checkpoint of ")
    assert "the rows of b are trained again (b has missed 3 turns)" in found.told
    assert "the best of the evaluations from here on, which are with them, is kept" in found.told
    for nodes, changes in (("acd", {}), ("abcd", {"recovery__owners": "wait"})):
        found = chosen(nodes, **{**skips, **changes})
        assert (found.planned.plan, found.sources, found.told) == (plan, None, "")
    found = chosen("acd", **{**skips, "measured": plan, "more": ("b",)})  # it has no rows
    assert (found.planned.plan, found.start.evaluations) == (plan, known)
    assert found.told.startswith("the rows of b stay left out: node b has 0 training and 0 evaluation rows")


def test_one_owner_that_can_not_come_back_keeps_no_other_one_out() -> None:
    """Of three owners two are left out, and one of them has no rows any more when the run is resumed."""
    whole = make_plan([("c", 0, 2), ("d", 2, 4)], ["a", "b", "e"], num_steps=24, method=Hift())
    course = without_owner(without_owner(whole.course, "b", 1), "e", 1)
    plan = Plan(course, whole.placements)
    saved, changes = (manifest(8, plan),), FULL | {"train__max_steps": 24, "train__local_iterations": 2}
    for back, lacks in (("b", "e"), ("e", "b")):
        measured = Plan(without_owner(whole.course, lacks, 1), whole.placements)
        how: dict[str, Any] = {"plan": plan, "manifests": saved, "parts": {}, "measured": measured, **changes}
        found = chosen("abcde", more=(lacks,), recovery__owners="skip", **how)
        assert [owner.node for owner in found.planned.plan.course.owners] == ["a", back]
        assert f"the rows of {lacks} stay left out: node {lacks} has 0 training" in found.told
        assert f"the rows of {back} are trained again" in found.told


@pytest.mark.parametrize("owner", ["a", "b"])
def test_best_result_stays_where_an_owner_without_evaluation_rows_is_taken_back(owner: str) -> None:
    """It has no part of the result, of which another owner keeps embedding and head: that one has to be there."""
    plan = make_plan([("c", 0, 2), ("d", 2, 4)], ["a", "b"], num_steps=20, method=Hift())
    rows = {"a": 3, "b": 3} | {owner: 0}
    owners = tuple(dataclasses.replace(one, eval_rows=rows[one.node]) for one in plan.course.owners)
    whole = Plan(dataclasses.replace(plan.course, owners=owners), plan.placements)
    other, keeps = "b" if owner == "a" else "a", {"train__keep_best": True, "train__eval_every": 2}
    more: dict[str, Any] = {"train__max_steps": 20, "train__local_iterations": 2, "recovery__owners": "skip", **keeps}
    parts = {node: [SavedPart(4, "", is_best=True)] for node in f"cd{other}"}
    how = {"measured": whole, "parts": parts, **FULL, **more}
    without = Plan(without_owner(whole.course, owner, 1), whole.placements)
    known = Evaluations(step=6, best=0.3, best_step=4, waited=1, head_at=other)
    found = chosen("abcd", plan=without, manifests=(manifest(8, without, holder=other, evaluations=known),), **how)
    assert found.planned.plan.course.owner(owner) is not None
    assert found.start.evaluations == known and "best" not in found.told
    missing = {"cd": other, f"d{other}": "c"}
    for there, node in missing.items():
        how["parts"] = {node: [SavedPart(4, "", is_best=True)] for node in there}
        found = chosen("abcd", plan=without, manifests=(manifest(8, without, holder=other, evaluations=known),), **how)
        assert found.start.evaluations == dataclasses.replace(known, best=None, best_step=0, head_at="")
        assert f"that of step 4, can't be kept: the part of node {node} is missing" in found.told


@pytest.mark.parametrize("owner", ["a", "b"])
def test_owner_that_is_back_with_another_model_stays_out(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever its name is among the others; checkpoints carry on naming the model of the run."""
    whole = make_plan([("c", 0, 1), ("d", 1, 3), ("e", 3, 4)], ["a", "b"], num_steps=20, method=Hift())
    plan = Plan(without_owner(whole.course, owner, 1), whole.placements)
    job = JOB.with_overrides({"train.method": "hift", "adapter.config": "full", "recovery.owners": "skip"})
    nodes = tuple(
        dataclasses.replace(facts, model=dataclasses.replace(facts.model, digest="f" * 64))
        if facts.node == owner
        else facts
        for facts in profile_of(whole).nodes
    )
    saved = manifest(8, plan, holder="b" if owner == "a" else "a", job_digest=job_digest(job))
    checkpoints = CheckpointManager("r", job, Resume(plan=plan, manifests=(saved,)))
    for node in whole.nodes:
        checkpoints.note_states(node, [control_pb2.ShardState(step=8)] * (node != owner))
    planned = checkpoints.planned(dataclasses.replace(profile_of(whole), nodes=nodes), Effort(seconds=5.0))
    assert planned is not None and planned.plan == plan and checkpoints.taken_back == ()
    assert checkpoints._model_digest == saved.model_digest


@pytest.mark.parametrize("lacking", ["", "c"])
def test_best_result_on_the_disks_is_forgotten_where_it_is_not_whole(lacking: str) -> None:
    """A run of all parameters keeps the best of later evaluations then, and says so."""
    plan = make_plan(SLICES, ["a", "b"], num_steps=20, method=Hift())
    known = Evaluations(step=6, best=0.3, best_step=4, waited=1)
    parts = {node: [SavedPart(4, "", is_best=True)] for node in "abcd" if node != lacking}
    changes = FULL | {"train__keep_best": True, "train__eval_every": 2}
    found = chosen("abcd", plan=plan, manifests=(manifest(8, plan, evaluations=known),), parts=parts, **changes)
    assert found.start.evaluations == (dataclasses.replace(known, best=None, best_step=0) if lacking else known)
    assert ("that of step 4, can't be kept: the part of node c is missing" in found.told) is bool(lacking)


def test_nodes_of_a_resumed_run_are_told_what_was_trained() -> None:
    """With the sources of their blocks on the disks of others."""
    told = (CopyDigest(0, "0" * 64), CopyDigest(PLAN.course.head, "f" * 64))
    manager = CheckpointManager("run", JOB, Resume(plan=PLAN, manifests=(manifest(8, digests=told),)))
    manager._chosen = chosen(["a", "b", "c"], manifests=(manifest(8, digests=told), manifest(4)))
    manager.go_on("c", request := control_pb2.PrepareRequest())
    assert request.saved.sources and [(each.unit, each.sha256) for each in request.saved.digests] == [*told]


def test_checkpoint_without_copies_has_the_digests_of_whoever_trained_its_units() -> None:
    """A node is believed those of its own blocks without a helper; its owner that of the head; copies have theirs."""
    helpers = (Helper(node="b", start=2, stop=3),)
    plan = Plan(PLAN.course, (dataclasses.replace(PLAN.placement, helpers=helpers),))
    manager = CheckpointManager(RUN, JOB, None)

    def saved(node: str) -> control_pb2.Saved:
        units = [control_pb2.CopyDigest(unit=unit, sha256=f"{node}{unit}") for unit in range(-1, 6)]
        return control_pb2.Saved(step=8, sha256=node * 64, bytes=1, digests=units)

    for copies in ((), (CopyDigest(1, "copied"),)):
        for node in "abcd":
            manager.note_saved(node, [saved(node)])
        found = manager.manifest(plan, rd.LogCheckpoint(8, "b", digests=copies))
        wanted = {0: "a0", 1: "c1", 3: "d3", 4: "b4"} | dict(copies)
        assert dict(found.digests) == wanted and CheckpointManifest.parse(json.dumps(found.to_json())) == found


def test_run_goes_on_without_a_node_in_another_placement() -> None:
    """From the turn of the checkpoint on; a node that had no part in the run may host."""
    rows: list[tuple[str, ...]] = [(), ("e",)]
    for more in rows:
        found = chosen("abd", more=more)
        before, after = found.planned.plan.placements
        assert before == PLAN.placement and (after.placement_number, after.first_turn, after.copies) == (1, 4, True)
        hosts = {piece.node for piece in after.slices}
        assert "c" not in hosts and hosts <= {"a", "b", "d", *more} and found.start.placement_number == 1
        assert found.sources is not None
        taken = [source for sources in found.sources.values() for source in sources]
        assert sum(source.stop - source.start for source in taken) == 4
        assert {source.node for source in taken if source.start in (1, 2)} == {"d"}
        assert found.told.startswith("node c is not there; the checkpoint of step 8 is taken from copies")


def test_node_that_an_audit_has_named_takes_no_part_in_a_resumed_run() -> None:
    """Nor in one that is resumed from the checkpoints of that one; whole manifests of before have the same digest."""
    named = manifest(8, excluded=("c",))
    assert CheckpointManifest.from_json(named.to_json()) == named
    assert "excluded" not in manifest(8).to_json()
    members: Any = SimpleNamespace(links=LinkCache())
    request = RunRequest(JOB, resume=Resume(plan=PLAN, manifests=(named, manifest(4))))
    participants = Participants("r20261129-120000-89abcdef", members, lease_s=1.0)
    work = RunWork(participants, request)
    assert participants.excluded == {"c"}
    member = Member(node="c", address="127.0.0.1:1", instance="c")
    assert "computed otherwise" in work._join_handler._refusal_reason(member, set())
    events = list[control_pb2.RunEvent]()
    work._checkpoints.log(PLAN, rd.LogKept(12, "a"), events.append, is_kept=True)
    assert CheckpointManifest.from_json(json.loads(events[0].kept_turn_json)).excluded == ("c",)
    participants.output.listeners.append(events.append)
    work._feed(rd.TurnChecked(3))
    work._rounds.excluded.add("d")
    for _ in range(2):  # at once, as the run may end before the next turn, and once
        work._feed(rd.TurnChecked(4, ("d",), ""))
    told = [CheckpointManifest.from_json(json.loads(event.kept_turn_json)) for event in events]
    assert [(each.step, each.excluded) for each in told] == [(12, ("c",)), (12, ("c", "d"))]


def test_run_that_had_lost_a_node_goes_on_without_it() -> None:
    """Its plan has a placement without it since; nobody asks for the node, and nothing is passed over."""
    moved = make_plan([("a", 0, 2), ("d", 2, 4)], ["a", "b"], num_steps=20, method="all").placement
    after = PLAN.extended(dataclasses.replace(moved, copies=True), 2)
    newest = manifest(8, after.at(1), placement_number=1)
    found, passed = choose("abd", plan=after, manifests=(newest,), parts={})
    assert found is not None and (found.planned.plan, found.start.placement_number, found.sources) == (after, 1, None)
    assert passed == ()
    # D and its copy of c's blocks are gone, and c's newest shard is damaged: the checkpoint before is taken
    parts = {**COPIES, "d": [SavedPart(4, RUN, (1, 2))]}
    found, passed = choose("abcd", parts=parts, damaged={"c": {8: "c: torn"}})
    assert found is not None and found.manifest == CHECKPOINTS[1] and found.sources is None
    assert passed == (
        "the checkpoint of step 8 can't be used: c: torn; no joined node has the trained tensors of blocks 1, 2, "
        "which node c had, or copies of them",
    )


def test_run_of_which_nothing_is_whole_is_refused_or_begins_anew() -> None:
    """Two neighbours are gone, and all that is missing is told."""
    with pytest.raises(IntegrityError, match=r"step 8 .*node c, d is not there; .*blocks 1, 2.*step 4.*without --res"):
        choose("ab")
    # It says why
    found, passed = choose("abcd", manifests=(manifest(8, with_shards=False),), parts={})
    assert found is None and len(passed) == 1
    # Its digest is in the manifest
    with pytest.raises(ModelError, match="put the same folder back"):
        choose("abcd", manifests=(manifest(8, model_digest="ff" * 32),))


def test_end_of_a_turn_is_taken_before_an_older_checkpoint() -> None:
    """It is in files beside shards at every node; where one has none, the checkpoint is taken."""
    turn = manifest(8, with_shards=False)
    own = {"a": (0, 3), "b": (), "c": (1, 2, 0), "d": (3, 1, 2)}
    parts = {node: [SavedPart(8, RUN, blocks), *([HEAD] if node in "ab" else [])] for node, blocks in own.items()}
    found = chosen("abcd", manifests=(turn, CHECKPOINTS[1]), parts=parts)
    assert (found.manifest, found.planned.plan, found.told) == (turn, PLAN, "")
    assert found.sources is not None and found.sources["c"] == (Source("c", 1, 3),)
    older, passed = choose("abcd", manifests=(turn, CHECKPOINTS[1]), parts={})
    assert older is not None and older.manifest == CHECKPOINTS[1]
    assert passed == (
        "the end of step 8 can't be used: no joined node has the trained tensors of blocks 0, 1, 2, 3, which node "
        "a, c, d had, or copies of them",
    )


def test_missing_owner_is_waited_for_or_left_out() -> None:
    """Its rows are nowhere else; where they are left out, the copy of the head is at the next owner."""
    with pytest.raises(IntegrityError, match="node a has not joined, and no other node has its rows"):
        choose("bcd")
    found = chosen("bcd", recovery__owners="skip")
    course = found.planned.plan.course
    assert [owner.node for owner in course.owners] == ["b"] and course.num_steps < 20
    assert (found.start.holder, found.head_sha256) == ("b", "")
    assert "the rows of a are left out" in found.told and "the best" not in found.told
    known = Evaluations(step=4, best=0.5, best_step=4)
    best = tuple(dataclasses.replace(one, evaluations=known) for one in CHECKPOINTS)
    keeps = {"recovery__owners": "skip", "train__keep_best": True, "train__eval_every": 4}
    found = chosen("bcd", manifests=best, **keeps)
    assert found.start.evaluations == NONE_DONE
    assert "the best of the evaluations from here on, which are without them, is kept" in found.told
    assert chosen("abd", manifests=best, **keeps).start.evaluations == known


@pytest.mark.parametrize("method", ["pipeadapter", "single"])
def test_methods_that_do_not_move_need_their_own_nodes(method: str) -> None:
    """They say why, where they can't."""
    plan = make_plan(SLICES, ["a", "b"], num_steps=20, method=make_method(method))
    saved = (manifest(8, plan),)
    if method == "single":
        assert chosen("abd", plan=plan, manifests=saved).start.placement_number == 1
        return
    with pytest.raises(IntegrityError, match="needs its own nodes: the result of pipeadapter depends on the ring"):
        choose("abd", plan=plan, manifests=saved)


def test_absent_hosts_are_done_without_and_owners_are_not() -> None:
    """After the wait all members that are there stand in; what is needed is named."""
    absent = AbsentNodes(Resume(plan=PLAN, manifests=CHECKPOINTS), JOB)
    assert absent.instead(["a", "b", "d", "e"], PLAN.nodes) == ("a", "b", "d", "e")
    told = absent.waits(["a", "b", "d"], PLAN.nodes, 60.0, hosts_s=9.0)
    assert told.startswith("waiting up to 9 s for node c; then the run continues without")
    assert absent.instead(["b", "c", "d"], PLAN.nodes) == ()
    told = absent.waits(["b", "c", "d"], PLAN.nodes, 60.0, hosts_s=9.0)
    assert told.startswith("waiting up to 60 s for node a, ") and "no other node has the rows of a" in told
    skips = AbsentNodes(Resume(plan=PLAN, manifests=CHECKPOINTS), JOB.with_overrides({"recovery.owners": "skip"}))
    assert skips.instead(["b", "d"], PLAN.nodes) == ("b", "d")
    assert skips.instead(["c", "d"], PLAN.nodes) == ()
    stale = make_plan(SLICES, ["a", "b"], num_steps=20, method="pipeadapter")
    stays = AbsentNodes(Resume(plan=stale, manifests=(manifest(8, stale),)), JOB)
    assert stays.instead(["a", "b", "d"], stale.nodes) == ()
    assert "depends on the ring" in stays.need_reason(["c"])


@pytest.mark.parametrize(
    ("is_resumed", "num_shards", "saved", "problem"),
    [
        (True, 2, [control_pb2.SavedPart(blocks=range(1 << 16)), *[control_pb2.SavedPart()] * 4095], ""),
        (True, 3, [], "3 shards and 0 files of 0 blocks beside them; 2, 4,096 and 65,536 are"),
        (True, 2, [control_pb2.SavedPart()] * 4097, "2 shards and 4,097 files"),
        (True, 0, [control_pb2.SavedPart(blocks=range(1 << 15))] * 3, "3 files of 98,304 blocks"),
        (False, 1, [], "1 shards and 0 files of 0 blocks beside them; 0, 0 and"),
        (False, 0, [control_pb2.SavedPart()], "1 files"),
    ],
)
def test_disk_has_no_more_than_can_be(
    is_resumed: bool, num_shards: int, saved: list[control_pb2.SavedPart], problem: str
) -> None:
    """A node says no more than it was asked of its shards, and a bounded number of files; nothing where it has none."""
    checkpoints = CheckpointManager("r", JOB, Resume(plan=PLAN, manifests=CHECKPOINTS) if is_resumed else None)
    states = [control_pb2.ShardState(step=step) for step in range(num_shards)]
    with pytest.raises(IntegrityError, match=f"node a says .*{problem}") if problem else nullcontext():
        checkpoints.note_states("a", states, saved)
    assert ("a" in checkpoints._parts) is not bool(problem)


def complaint(node: str) -> rd.NodeFailed:
    """What a node says that lost a link."""
    return rd.NodeFailed(node, "PeerLostError", f"node {node} lost a link")


def test_blame_waits_for_the_accused_to_speak_and_prefers_who_kept_silent() -> None:
    """A complaint is believed only after a moment."""
    suspicions = PeerSuspicions()
    suspicions.add(complaint("a"), "b", 10.0)
    assert suspicions.verdict(10.0 + GRACE_S / 2) is None
    assert suspicions.verdict(10.0 + GRACE_S) == complaint("a")
    assert suspicions.verdict(10.0 + GRACE_S) is None, "it is told once"
    # If a complains about b and b about c, it is c who is gone, though a was first
    suspicions = PeerSuspicions()
    suspicions.add(complaint("a"), "b", 10.0)
    suspicions.add(complaint("b"), "c", 10.1)
    assert suspicions.verdict(10.2 + GRACE_S) == complaint("b")
    # A cable that is cut between two nodes makes both complain
    suspicions = PeerSuspicions()
    suspicions.add(complaint("a"), "b", 10.0)
    suspicions.add(complaint("b"), "a", 10.1)
    assert suspicions.verdict(20.0) == complaint("a")


def test_blame_for_a_broken_link_is_of_the_end_with_more_of_them() -> None:
    """One that is alone with its complaint takes out itself, and whoever breaks links one other node at most."""
    suspicions = PeerSuspicions()
    of_b = rd.NodeFailed("a", "PeerLostError", "a lost b", "b")
    for _ in range(2):
        suspicions.add(of_b, "b", 0.0)
        assert suspicions.suspect(of_b) == "a"
        suspicions.forgive()
    suspicions.add(of_b._replace(node="c"), "b", 0.0)  # c and b are left, and b has had two
    assert suspicions.suspect(of_b._replace(node="c")) == "b"
    suspicions.add(rd.NodeFailed("b", "PeerLostError", "b lost d", "d"), "d", 0.0)
    assert suspicions.suspect(rd.NodeFailed("d", "PeerLostError", "d lost b", "b")) == "b"
    suspicions.add(of_b._replace(lost="e"), "e", 0.0)  # e is dead, which a has only noticed first
    suspicions.died("e")
    suspicions.forgive()
    suspicions.add(of_b._replace(node="f", lost="a"), "a", 0.0)
    suspicions.add(of_b._replace(node="f", lost="c"), "c", 0.0)
    assert suspicions.suspect(of_b._replace(node="f", lost="a")) == "f"


class _NoBooks:
    """Books into which nothing is written, of a run of which eight items are granted."""

    plan, nodes, end_seq = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"]), ("a", "b", "new"), 8

    def note_end(self, seq: int, at_unix_s: float) -> None:
        """Ignore it."""

    def add_report(self, request: control_pb2.ReportRequest) -> None:
        """Ignore it."""


def take(reports: Reports, **values: Any) -> list[rd.Event]:
    """The events of a report."""
    recorder: Any = _NoBooks()
    return list(reports.take(control_pb2.ReportRequest(node="a", **values), recorder))


def copy(turn: int, unit: int) -> control_pb2.CopyDigest:
    """The digest of a copy as a node sends it."""
    return control_pb2.CopyDigest(turn=turn, unit=unit, sha256=f"{unit:02}")


def test_node_that_says_too_much_takes_nothing_from_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of steps that nobody has trained, digests of turns that nobody has granted: only its own are dropped."""
    monkeypatch.setattr(checkpoint, "_MAX_SAVED", 3)
    monkeypatch.setattr(recovery, "_MAX_TURNS", 3)
    plan, checkpoints = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"]), CheckpointManager("r", job(), None)
    reports, recorder = Reports(checkpoints), _NoBooks()
    shards = [control_pb2.Saved(step=step, sha256="ab" * 32, bytes=1) for step in (4, *range(90, 99))]

    def told(node: str, **values: Any) -> None:
        [*reports.take(control_pb2.ReportRequest(node=node, **values), recorder)]  # type: ignore[arg-type]

    told("a", number=1, saved=shards[:1], kept=[copy(0, 1)])
    with pytest.raises(IntegrityError, match="node b reports too many digests of copies"):
        told("b", number=1, saved=shards, kept=[copy(turn, 1) for turn in range(9)])
    assert checkpoints.unsaved(plan, 4) == ["b"]
    told("a", number=2, kept=[copy(1, 1)], turns_done=[0])
    told("b", number=2, saved=shards[:1])
    assert checkpoints.unsaved(plan, 4) == ["b"]  # the older of its own were dropped
    # A node that has not told its shard has failed, and there is no manifest
    members: Any = SimpleNamespace(links=LinkCache())
    participants = Participants("r", members, lease_s=1.0)
    work: Any = RunWork(participants, RunRequest(JOB))
    work._checkpoints, work._placed = checkpoints, SimpleNamespace(migration=SimpleNamespace(part=plan))
    work._carry_out(rd.LogCheckpoint(4, "a"))
    failed = participants.queue.get_nowait()
    assert (failed.node, failed.error) == ("b", "IntegrityError")
    assert "did not report its shard of step 4; use one version everywhere" in failed.message
    assert checkpoints.saved_step == -1


def test_digests_of_copies_go_with_the_end_of_their_turn() -> None:
    """Also if they came in an earlier report; a turn has its own only."""
    reports = Reports(CheckpointManager("r", job(), None))
    assert take(reports, number=1, copies=[copy(0, -1), copy(1, 4)]) == []
    (done,) = take(reports, number=2, copies=[copy(0, 4)], turns_done=[0])
    assert done == rd.TurnReported("a", 0, (), (CopyDigest(-1, "-1"), CopyDigest(4, "04")))
    assert take(reports, number=3, turns_done=[1]) == [rd.TurnReported("a", 1, (), (CopyDigest(4, "04"),))]
    assert take(reports, number=4, turns_done=[2]) == [rd.TurnReported("a", 2)]
    given = [copy(3, unit) for unit in range(5)]
    (done,) = take(reports, number=5, kept=given, turns_done=[3])
    assert done == rd.TurnReported("a", 3, kept=tuple(CopyDigest(unit, f"{unit:02}") for unit in range(5)))
    with pytest.raises(IntegrityError, match="node a reports too many digests of copies"):  # of four blocks and a head
        take(reports, number=6, kept=[*given, copy(3, 4)])
    # The ends of turns that the run repeats are never reported
    reports = Reports(CheckpointManager("r", job(), None))
    take(reports, number=1, copies=[copy(0, 4)], kept=[copy(0, 1)])
    reports.forgive()
    assert take(reports, number=2, turns_done=[0]) == [rd.TurnReported("a", 0)]
    # An owner has two copies, of embedding and head
    reports = Reports(CheckpointManager("r", job(), None))
    with pytest.raises(IntegrityError, match="node a reports too many digests of copies"):
        take(reports, number=1, copies=[copy(0, -1), copy(0, 4), copy(0, 4)])


@pytest.mark.parametrize("lost_peer", ["a", ""])
def test_error_of_a_node_that_the_run_has_gone_on_without_ends_nothing(lost_peer: str) -> None:
    """It stood still, is a member again, and says that its neighbour closed the link: because it was lost itself."""
    before = make_plan([("a", 0, 2), ("c", 2, 4)], ["a"])
    recorder: Any = _NoBooks()
    recorder.plan = before.extended(make_plan([("a", 0, 4)], ["a"]).placement, 1)
    error = {"error": "PeerLostError", "message": "node a closed the link", "lost_peer": lost_peer}

    def heard(node: str, placement_number: int) -> bool:
        reports = Reports(CheckpointManager("r", job(), None))
        request = control_pb2.ReportRequest(node=node, number=1, **error)  # type: ignore[arg-type]
        events = list(reports.take(request, recorder, placement_number))
        return bool(events) or reports.suspicions.verdict(math.inf) is not None

    assert heard("c", 0) and heard("a", 0) and heard("a", 1)
    assert not heard("c", 1)


def _step(**changes: Any) -> Callable[[control_pb2.ReportRequest], object]:
    values = {"loss_sum": 1.0, "count": 4.0, **changes.pop("values", {})}
    made = {"seq": 3, "step": 3, "kind": "train", "at_unix_s": 1e9, **changes}
    numbers = [control_pb2.Number(name=name, value=value) for name, value in values.items()]
    return lambda report: report.steps.add(values=numbers, **made)


def _part(part: str, **values: Any) -> Callable[[control_pb2.ReportRequest], object]:
    return lambda report: getattr(report, part).add(**values)


DIGEST = "ab" * 32
HOSTILE = [
    (_step(seq=1 << 62), "item 4611686018427387904 of step 3, which nobody granted"),
    (_step(seq=8), "which nobody granted"),
    (_step(seq=-1), "which nobody granted"),
    (_step(kind="x" * 70_000), "an item of kind 'xxx"),
    (_step(at_unix_s=math.nan), "figures of item 3 at nan"),
    (_step(at_unix_s=1e300), "figures of item 3 at"),
    (_step(values={"loss_sum": math.nan}), "'loss_sum' = nan of item 3"),
    (_step(values={"loss_sum": math.inf}), "'loss_sum' = inf"),
    (_step(values={"count": math.nan}), "'count' = nan"),
    (_step(values={"count": -1.0}), "'count' = -1.0"),
    (_step(values={"questions": 1e300}), "'questions' = 1e+300"),
    (_step(values={f"n{n}": 0.0 for n in range(99)}), "101 figures"),
    (_part("traffic", seq=9, target="b", payload="h", bytes=1), "bytes of item 9, which nobody granted"),
    (_part("traffic", seq=1, target="x\x1b[2J", payload="h", bytes=1), "which is none of the plan"),
    (_part("traffic", seq=1, target="b", payload="?", bytes=1), "which is none of the plan"),
    (_part("traffic", seq=1, target="b", payload="h", bytes=1 << 60), "bytes for item 1"),
    (_part("transfers", source="c", bytes=1, seconds=1.0, at_unix_s=1e9), "1 bytes from 'c'"),
    (_part("transfers", source="b", bytes=1, seconds=math.inf, at_unix_s=1e9), "a message after inf s"),
    (_part("spans", action="E1.0", start_unix_s=math.nan, end_unix_s=1.0), "an action from nan"),
    (_part("spans", action="E1.0", start_unix_s=0.0, end_unix_s=math.inf), "to inf"),
    (_part("spans", action="E1.0", start_unix_s=0.0, end_unix_s=1.0, worked_s=math.nan), "of nan s"),
    (_step(values={"n" * 70_000: 0.0}), "a figure of item 3 with a name of more than 120 characters"),
    (_part("kept", turn=1, unit=2, sha256="a" * 70_000), "a digest of 70,000 characters for unit 2"),
    (_part("copies", turn=1, unit=2, sha256="a" * 65), "a digest of 65 characters for unit 2"),
    (_part("saved", turn=1, step=4, sha256="../x", bytes=1), "a shard of step 4"),
    (_part("saved", turn=1, step=-4, sha256=DIGEST, bytes=1), "a shard of step -4"),
    (lambda report: setattr(report, "number", 1 << 62), "with number 4611686018427387904 after 1"),
    (lambda report: setattr(report, "lost_peer", "nobody"), "that it lost 'nobody'"),
]


def test_report_with_figures_that_are_none_is_refused() -> None:
    """Before anything counts on them; the error names the node and is short."""
    recorder: Any = _NoBooks()
    for spoil, message in HOSTILE:
        reports = Reports(CheckpointManager("r", job(), None))
        take(reports, number=1)
        request = control_pb2.ReportRequest(node="a", number=2)
        spoil(request)
        with pytest.raises(IntegrityError, match=r"^node a reports ") as caught:
            list(reports.take(request, recorder))
        assert message in str(caught.value), message
        assert len(str(caught.value)) < 500 and str(caught.value).isprintable(), message


def test_report_of_granted_items_is_taken() -> None:
    """Negative control; and a score item may have any loss, since nobody trains on it."""
    reports = Reports(CheckpointManager("r", job(), None))
    request = control_pb2.ReportRequest(node="a", number=1)
    for add in (
        _step(),
        _step(kind="score", values={"loss_sum": math.nan}),
        _part("traffic", seq=8, target="b", payload="t", bytes=1),
        _part("transfers", source="b", bytes=1, seconds=1.0, at_unix_s=1e9),
        _part("spans", action="E1.0", start_unix_s=-4e8, end_unix_s=-4e8 + 1),
        _part("saved", turn=1, step=4, sha256=DIGEST, bytes=1),
    ):
        add(request)
    recorder: Any = _NoBooks()
    assert [type(event) for event in reports.take(request, recorder)] == [rd.StepReported] * 2
    # A node that has joined may be lost before the plan has it
    lost = control_pb2.ReportRequest(node="a", number=2, error="PeerLostError", message="new is gone", lost_peer="new")
    assert list(reports.take(lost, recorder)) == [] and reports.suspicions.verdict(math.inf) is not None


def test_totals_that_are_no_figures_are_refused() -> None:
    """An error of ours with the node, whatever a JSON number may be."""
    ledger = RunLedger(_NoBooks.plan, job())
    totals = {"peak_rss_bytes": 7, "hosted_bytes": 1, "cpu_s": 0.5, "peak_versions": 1, "peak_version_bytes": 0}
    ledger.add_totals("a", totals)
    values: tuple[Any, ...] = (math.inf, math.nan, -1, 1 << 70, 10**400, "7", None, True)
    for name, value in itertools.product(totals, values):
        with pytest.raises(IntegrityError, match="the totals of node a are not readable"):
            ledger.add_totals("a", {**totals, name: value})
