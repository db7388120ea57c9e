"""From which step a run goes on, with which nodes: as it was, from copies, in another placement, or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from coordinator.planner.limits import Effort
from coordinator.run.checkpoint import Disks, ResumeChooser, ResumePoint
from coordinator.run.driver import AbsentNodes
from ringtune.errors import IntegrityError, ModelError
from ringtune.job.job import Job, Model
from ringtune.run_control.checkpoint import CheckpointManifest, Resume, SavedPart, SavedSource, Shard
from ringtune.run_control.continuation import job_digest
from ringtune.schedule.plan import Plan
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
    **changes: Any,
) -> tuple[ResumePoint | None, tuple[str, ...]]:
    """The choice with these nodes; each has whole shards but for what is damaged."""
    whole = profile_of(plan, more=more)
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


def test_run_goes_on_as_it_was_where_all_is_whole() -> None:
    """Each node has its own shard, and the plan is the very one."""
    found = chosen("abcd")
    assert (found.manifest, found.planned.plan, found.sources, found.told) == (CHECKPOINTS[0], PLAN, None, "")
    assert (found.start.step, found.start.holder, found.start.placement_number) == (8, "a", 0)


def test_run_goes_on_where_a_disk_is_lost_in_the_placement_that_it_had() -> None:
    """The node loads from the copy at the next host; the others from their own shards."""
    found = chosen("abcd", damaged={"c": {8: "c has no shard", 4: "c has no shard"}})
    assert found.planned.plan == PLAN and found.start.step == 8 and "c has no shard" in found.told
    assert found.sources == {
        "a": (SavedSource("a", 0, 1, "a" * 64),),
        "b": (),
        "c": (SavedSource("d", 1, 3),),
        "d": (SavedSource("d", 3, 4, "d" * 64),),
    }
    assert found.head_sha256 == "a" * 64


@pytest.mark.parametrize("more", [(), ("e",)])
def test_run_goes_on_without_a_node_in_another_placement(more: tuple[str, ...]) -> None:
    """From the turn of the checkpoint on; a node that had no part in the run may host."""
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


def test_run_that_had_lost_a_node_goes_on_without_it() -> None:
    """Its plan has a placement without it since; nobody asks for the node, and nothing is passed over."""
    moved = make_plan([("a", 0, 2), ("d", 2, 4)], ["a", "b"], num_steps=20, method="all").placement
    after = PLAN.extended(dataclasses.replace(moved, copies=True), 2)
    newest = manifest(8, after.at(1), placement_number=1)
    found, passed = choose("abd", plan=after, manifests=(newest,), parts={})
    assert found is not None and (found.planned.plan, found.start.placement_number, found.sources) == (after, 1, None)
    assert passed == ()


def test_newer_step_is_passed_over_where_nobody_has_it_with_who_had_it() -> None:
    """D and its copy of c's blocks are gone, and c's newest shard is damaged: the checkpoint before is taken."""
    parts = {**COPIES, "d": [SavedPart(4, RUN, (1, 2))]}
    found, passed = choose("abcd", parts=parts, damaged={"c": {8: "c: torn"}})
    assert found is not None and found.manifest == CHECKPOINTS[1] and found.sources is None
    assert passed == (
        "the checkpoint of step 8 can't be used: c: torn; no joined node has the trained tensors of blocks 1, 2, "
        "which node c had, or copies of them",
    )


def test_run_of_which_nothing_is_whole_is_refused_with_all_that_is_missing() -> None:
    """Two neighbours are gone."""
    with pytest.raises(IntegrityError, match=r"step 8 .*node c, d is not there; .*blocks 1, 2.*step 4.*without --res"):
        choose("ab")


def test_end_of_a_turn_is_taken_before_an_older_checkpoint() -> None:
    """It is in files beside shards at every node; where one has none, the checkpoint is taken."""
    turn = manifest(8, with_shards=False)
    own = {"a": (0, 3), "b": (), "c": (1, 2, 0), "d": (3, 1, 2)}
    parts = {node: [SavedPart(8, RUN, blocks), *([HEAD] if node in "ab" else [])] for node, blocks in own.items()}
    found = chosen("abcd", manifests=(turn, CHECKPOINTS[1]), parts=parts)
    assert (found.manifest, found.planned.plan, found.told) == (turn, PLAN, "")
    assert found.sources is not None and found.sources["c"] == (SavedSource("c", 1, 3),)
    older, passed = choose("abcd", manifests=(turn, CHECKPOINTS[1]), parts={})
    assert older is not None and older.manifest == CHECKPOINTS[1]
    assert passed == (
        "the end of step 8 can't be used: no joined node has the trained tensors of blocks 0, 1, 2, 3, which node "
        "a, c, d had, or copies of them",
    )


def test_run_without_checkpoints_begins_anew_where_its_turns_are_lost() -> None:
    """It says why."""
    found, passed = choose("abcd", manifests=(manifest(8, with_shards=False),), parts={})
    assert found is None and len(passed) == 1


def test_missing_owner_is_waited_for_or_left_out() -> None:
    """Its rows are nowhere else; where they are left out, the copy of the head is at the next owner."""
    with pytest.raises(IntegrityError, match="node a has not joined, and no other node has its rows"):
        choose("bcd")
    found = chosen("bcd", recovery__owners="skip")
    course = found.planned.plan.course
    assert [owner.node for owner in course.owners] == ["b"] and course.num_steps < 20
    assert (found.start.holder, found.head_sha256) == ("b", "")
    assert "the rows of a are left out" in found.told


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


def test_other_model_is_refused() -> None:
    """Its digest is in the manifest."""
    with pytest.raises(ModelError, match="put the same folder back"):
        choose("abcd", manifests=(manifest(8, model_digest="ff" * 32),))


def test_absent_hosts_are_done_without_and_owners_are_not() -> None:
    """After the wait all members that are there stand in; what is needed is named."""
    absent = AbsentNodes(Resume(plan=PLAN, manifests=CHECKPOINTS), JOB)
    assert absent.instead(["a", "b", "d", "e"], PLAN.nodes) == ("a", "b", "d", "e")
    assert "then the run continues without" in absent.waits(["a", "b", "d"], PLAN.nodes, 60.0)
    assert absent.instead(["b", "c", "d"], PLAN.nodes) == ()
    assert "no other node has the rows of a" in absent.waits(["b", "c", "d"], PLAN.nodes, 60.0)
    skips = AbsentNodes(Resume(plan=PLAN, manifests=CHECKPOINTS), JOB.with_overrides({"recovery.owners": "skip"}))
    assert skips.instead(["b", "d"], PLAN.nodes) == ("b", "d")
    assert skips.instead(["c", "d"], PLAN.nodes) == ()
    stale = make_plan(SLICES, ["a", "b"], num_steps=20, method="pipeadapter")
    stays = AbsentNodes(Resume(plan=stale, manifests=(manifest(8, stale),)), JOB)
    assert stays.instead(["a", "b", "d"], stale.nodes) == ()
    assert "depends on the ring" in stays.need_reason(["c"])
