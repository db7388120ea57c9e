"""Checkpoints of a run: the shards that nodes saved, and the choice of step and nodes to resume from.

A checkpoint is complete when every node has its shard on disk. Its manifest then goes to the submitter, and only when
the submitter has that on disk too may nodes drop older shards.

A run resumes from the newest step that is on disks, however it is saved::

    every node of the placement is there, with its shard        as it was: each loads its own
    else, all that was trained is on disks that are there
        every node of the placement is there                    as it was, but blocks are fetched from other nodes
        one is not                                              the same, in a placement of those that are there
    else                                                        an older checkpoint

A run with a method that forbids moves needs its own nodes and shards. Where all parameters train, every owner has
embedding and head, and takes them from its own shard, or from that of another owner. So does an owner that was left out
and is there again: its turns count from that step on.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final, NamedTuple

from coordinator.planner.limits import Effort
from coordinator.planner.make_plan import keep_plan
from coordinator.planner.planned import Planned
from coordinator.planner.replan import placed_without
from coordinator.run.events import EventSink
from coordinator.run.run_text import owners_text
from ringtune.config.sections import SKIP_OWNER
from ringtune.costs.profile import Profile
from ringtune.errors import CapacityError, IntegrityError, ModelError, RingTuneError, StorageError
from ringtune.job.job import Job
from ringtune.run_control import events as rd
from ringtune.run_control.checkpoint import CheckpointHolders, CheckpointManifest, Resume, SavedPart, Shard
from ringtune.run_control.continuation import job_digest, whole_num_steps
from ringtune.schedule.course import Course
from ringtune.schedule.migration import Source, return_reason, rows_reason, stay_reason, with_owner, without_owner
from ringtune.schedule.operation_tables import Operations
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import collected_blocks
from ringtune.schedule.turns import StartPoint
from ringtune.techniques.replicas import CopyDigest
from ringtune.v1 import control_pb2


class Disks(NamedTuple):
    """What the nodes that are there said of their disks.

    Attributes:
        problems: node -> step -> what is wrong with its shard, empty = intact.
        parts: node -> its files beside shards.
    """

    problems: Mapping[str, Mapping[int, str]]
    parts: Mapping[str, Sequence[SavedPart]]


class ResumePoint(NamedTuple):
    """The step from which a run resumes, and how.

    Attributes:
        planned: the plan, with another placement or without an owner where need be.
        sources: by node, of its blocks; None = each has all in its shard.
        head_sha256: of the holder's shard that has the head; empty = a file beside it, or that of ``manifest``.
        heads: where every owner has a head, or the one with it takes it from another node: owner -> the node that has
            it on its disk, and the digest of its shard.
        told: what the user should know.
    """

    manifest: CheckpointManifest
    planned: Planned
    start: StartPoint
    sources: Mapping[str, tuple[Source, ...]] | None = None
    head_sha256: str = ""
    heads: Mapping[str, tuple[str, str]] = {}
    told: str = ""


class ResumeChooser:
    """The choice for one run."""

    def __init__(self, resume: Resume, job: Job, profile: Profile, disks: Disks, effort: Effort) -> None:
        self._resume, self._job, self._profile, self._disks, self._effort = resume, job, profile, disks, effort.begun()
        self._facts = profile.by_name

    def choose(self) -> tuple[ResumePoint | None, tuple[str, ...]]:
        """Choose the newest step of which everything is there.

        Returns:
            How the run resumes, and why each newer step was passed over. None: it had no checkpoint, and begins anew.

        Raises:
            IntegrityError: no checkpoint is whole; names what is wrong with each.
            ModelError: the nodes have another model than the run began with.
            RingTuneError: the plan can't be resumed on these nodes.
        """
        chosen, taken, told = None, tuple[str, ...](), list[str]()
        for node in [node for node in self._resume.returning(self._job) if node in self._facts]:
            try:
                chosen, taken = self._choose((*taken, node)), (*taken, node)
            except RingTuneError as error:
                told.append(f"the rows of {node} stay left out: {error}")
        point, passed = chosen or self._choose()
        return point and point._replace(told="; ".join(filter(None, (point.told, *told)))), passed

    def _choose(self, back: tuple[str, ...] = ()) -> tuple[ResumePoint | None, tuple[str, ...]]:
        """Choose as ``choose`` does, with the turns of the owners ``back`` that were left out."""
        passed: list[str] = []
        for manifest in self._resume.manifests:
            point, course = self._as_it_was(manifest), self._course(manifest, back)
            if isinstance(point, str) or (isinstance(course, Course) and self._taken_back(course)):
                point = self._from_disks(manifest, course, point if isinstance(point, str) else "")
            if isinstance(point, ResumePoint):
                self._check_model(point)
                return point, tuple(passed)
            passed.append(f"{manifest.name} can't be used: {point}")
        if self._resume.saved_step < 0:
            return None, tuple(passed)
        raise IntegrityError(f"{'. '.join(passed)}. No other checkpoint is left; start the run without --resume")

    def _as_it_was(self, manifest: CheckpointManifest) -> ResumePoint | str:
        """Resume from each node's own shard, or say why not."""
        missing = self._missing(manifest)
        if missing:
            return f"node {', '.join(missing)} is not there"
        if not manifest.shards:
            return ""
        problems = self._disks.problems
        silent = [shard.node for shard in manifest.shards if manifest.step not in problems.get(shard.node, {})]
        if silent:
            raise IntegrityError(
                f"node {silent[0]} did not report whether its shards are intact; use one version everywhere"
            )
        wrong = [
            problems[shard.node][manifest.step] for shard in manifest.shards if problems[shard.node][manifest.step]
        ]
        if wrong:
            return "; ".join(wrong)
        plan = self._resume.whole(manifest.placement_number)
        planned = keep_plan(self._job, self._resume.rest(manifest.placement_number), self._facts)
        placement = plan.at(manifest.placement_number).placement
        start = self._start(manifest, plan.course, manifest.holder, placement)
        return ResumePoint(
            manifest,
            dataclasses.replace(planned, plan=plan),
            start,
            told=self._told_best(manifest, plan.course, placement),
        )

    def _from_disks(self, manifest: CheckpointManifest, course: Course | str, why: str) -> ResumePoint | str:
        """Resume from shards on any disk, or say why not."""
        plan = self._resume.plan
        if stays := stay_reason(plan.course, from_disks=True):
            return f"{why or 'it has no shards'}; the run needs its own nodes: {stays}"
        if isinstance(course, str):
            return course
        placement = plan.at(manifest.placement_number).placement
        where = CheckpointHolders(manifest, plan.course, placement, self._disks.parts, self._disks.problems)
        owners = [owner.node for owner in course.owners]
        problem, head = where.why_not(owners), where.head_at(owners)
        if problem or head is None:
            return "; ".join(filter(None, (why, problem)))
        after, part, planned = self._placed(manifest, course)
        holder = next((owner for owner in (head[0], manifest.holder, *owners) if owner in owners), "")
        start = self._start(manifest, course, holder, part.placement)
        sources = {node: where.sources(part.placement, node) for node in part.nodes}
        heads = {holder: head} if holder != head[0] else {}
        if course.method.full_parameters:
            heads = {owner: where.head_for(owner, owners) or head for owner in owners}
        told = self._told(manifest, course, part.placement, why)
        return ResumePoint(manifest, dataclasses.replace(planned, plan=after), start, sources, head[1], heads, told)

    def _course(self, manifest: CheckpointManifest, back: Sequence[str]) -> Course | str:
        """The course without the owners that are not there, or why the run waits for them; with owners ``back``."""
        course = self._resume.plan.course
        turns = course.turns_of(manifest.step)
        for owner in [each.node for each in course.owners if each.node not in self._facts]:
            if self._job.recovery.owners != SKIP_OWNER:
                return f"node {owner} has not joined, and no other node has its rows"
            if why := rows_reason(course, owner, manifest.step, manifest.unfreezing.unfreeze_at):
                return f"node {owner} has not joined, and its rows can't be left out: {why}"
            course = without_owner(course, owner, turns)
        for owner in back:
            num_steps = whole_num_steps(self._job, course)
            if not return_reason(course, owner, manifest.step, num_steps):
                course = with_owner(course, owner, turns, num_steps)
        return course

    def _taken_back(self, course: Course) -> tuple[str, ...]:
        """The owners of a course that are left out in that of the checkpoints."""
        before = self._resume.plan.course
        return tuple(owner.node for owner in course.owners if before.owner(owner.node) is None)

    def _placed(self, manifest: CheckpointManifest, course: Course) -> tuple[Plan, Plan, Planned]:
        """The plan, the part of it that holds at once, and what the nodes need from there on.

        It has another placement from the step of the manifest on if a node of its own is not there.
        """
        plan = Plan(course, self._resume.whole(manifest.placement_number).placements)
        missing = self._missing(manifest)
        rest = Plan(course, self._resume.rest(manifest.placement_number).placements)
        if not missing:
            return plan, plan.at(manifest.placement_number), keep_plan(self._job, rest, self._facts)
        try:
            placement = placed_without(rest.parts[0], self._job, self._profile, missing, self._effort, goes_on=True)
        except (CapacityError, StorageError) as error:
            raise type(error)(f"node {', '.join(missing)} is not there, and {error}") from error
        turns, last = course.turns_of(manifest.step), self._resume.plan.placements[-1]
        placement_number = last.placement_number + 1
        after = plan.extended(placement, turns, placement_number=placement_number)
        return after, after.parts[-1], keep_plan(self._job, after.parts[-1], self._facts)

    def _missing(self, manifest: CheckpointManifest) -> tuple[str, ...]:
        nodes = self._resume.rest(manifest.placement_number).nodes
        return tuple(node for node in nodes if node not in self._facts)

    def _start(self, manifest: CheckpointManifest, course: Course, holder: str, placement: Placement) -> StartPoint:
        before, unfreezing = self._resume.plan.course, manifest.unfreezing
        evaluations = manifest.evaluations.without(before, course)
        if self._lacks_best(manifest, course, placement):
            evaluations = dataclasses.replace(evaluations, best=None, best_step=0, head_at="")
        return StartPoint.of(
            course,
            step=manifest.step,
            holder=holder,
            unfreezing=unfreezing if course == before else unfreezing.without(before, course),
            operations=manifest.operations,
            evaluations=evaluations,
            placement_number=placement.placement_number,
        )

    def _lacks_best(self, manifest: CheckpointManifest, course: Course, placement: Placement) -> tuple[str, ...]:
        """The nodes that would send a part of the manifest's best result which they do not have.

        Hosts send the blocks of ``placement``, and one owner embedding and head. Empty where nodes do not keep it.
        """
        known, before = manifest.evaluations, self._resume.plan.at(manifest.placement_number).placement
        if known.best is None or not self._job.keeps_best_on_disk:
            return ()
        head = known.head_at or self._resume.plan.course.owners[0].node
        hosts = (piece.node for piece in placement.hosts if collected_blocks(placement, piece.node))

        def has_best(node: str) -> bool:
            is_there = any(part.is_best and part.step == known.best_step for part in self._disks.parts.get(node, ()))
            return is_there and collected_blocks(placement, node) == collected_blocks(before, node)

        lacking = {node for node in (head, *hosts) if not has_best(node)}
        return tuple(sorted(lacking if course.owner(head) else {*lacking, head}))

    def _told_best(self, manifest: CheckpointManifest, course: Course, placement: Placement) -> str:
        nodes = ", ".join(self._lacks_best(manifest, course, placement))
        if not nodes:
            return ""
        return (
            f"the best result so far, that of step {manifest.evaluations.best_step}, can't be kept: the part of node "
            f"{nodes} is missing, or the blocks are placed anew; the best of the evaluations from here on is kept"
        )

    def _told(self, manifest: CheckpointManifest, course: Course, placement: Placement, why: str) -> str:
        if why:
            number = placement.placement_number
            text = f"{why}; {manifest.name} is taken from copies on the other nodes, in placement {number}"
        elif self._taken_back(course):
            text = f"the run continues from {manifest.name}"
        else:
            return ""
        best = self._told_best(manifest, course, placement)
        return text + owners_text(self._job, self._resume.plan.course, course) + f"; {best}" * bool(best)

    def _check_model(self, point: ResumePoint) -> None:
        nodes = point.planned.plan.nodes  # an owner that stays out may have another one
        digest = next(facts.model.digest for node, facts in self._facts.items() if node in nodes)
        if digest != point.manifest.model_digest:
            raise ModelError(
                f"the run began with model {point.manifest.model_digest[:12]}…, the nodes have {digest[:12]}… now; "
                "put the same folder back; of a run that an earlier ringtune began, give the result as adapter.from"
            )


def _saved_alone(plan: Plan, node: str, holder: str) -> set[int]:
    """Return the units that are as trained in the shard of ``node``: its blocks without a helper, and the head."""
    piece, trainer_of = plan.slice_of(node), plan.placement.trainer_of
    return {block for block in range(piece.start, piece.stop) if trainer_of(block) == node} | (
        {plan.course.head} if node == holder else set()
    )


_MAX_PARTS: Final = 4096
"""Most files beside the shards of a run on one disk: copies of some hundred nodes at the ends of eight turns."""
_MAX_PART_BLOCKS: Final = 1 << 16
"""Most blocks in all of these files."""
_MAX_SAVED: Final = 4096
"""Most steps of which shards are remembered until all nodes have saved theirs."""


class CheckpointManager:
    """The checkpoints of one run: those that it may resume from, and those that it saves.

    Args:
        resume: what to resume from; None = begin.
        excluded: nodes that an audit has named so far.

    Attributes:
        keep_from_step: nodes may drop shards of earlier steps.

    Raises:
        PlanError: the checkpoints are of another job or plan.
    """

    def __init__(self, run_id: str, job: Job, resume: Resume | None, excluded: Set[str] = frozenset()) -> None:
        if resume is not None:
            resume.check(job)
        self.keep_from_step = 0
        self._job, self._excluded = job, excluded
        self._resume = resume
        self._attempt = run_id
        self.shards_run = resume.run_id if resume else run_id
        self._problems: dict[str, dict[int, str]] = {}
        self._parts: dict[str, tuple[SavedPart, ...]] = {}
        self._chosen: ResumePoint | None = None
        self._passed_over: tuple[str, ...] = ()
        self._model_digest = ""
        self._saved: dict[str, dict[int, tuple[Shard, dict[int, str]]]] = {}  # by node and step, with digests of units
        self._noted: int | None = None
        self._newest_step: int | None = None
        self._best_steps = dict[int, int]()  # by step of the checkpoint
        self._told: dict[str, CheckpointManifest] = {}  # by kind of event: the last one

    @property
    def needed_nodes(self) -> tuple[str, ...]:
        """Names of the nodes on which the run resumes if they are there in time; none if it begins."""
        return self._resume.rest(self._resume.manifests[0].placement_number).nodes if self._resume else ()

    @property
    def start(self) -> StartPoint | None:
        """The point from which the run resumes, once it was chosen; None = it begins."""
        return self._chosen.start if self._chosen else None

    @property
    def taken_back(self) -> tuple[str, ...]:
        """Owners that the run takes back as it is resumed, once the point was chosen."""
        before = self._resume.plan.course if self._resume else None
        owners = self._chosen.planned.plan.course.owners if self._chosen else ()
        return tuple(owner.node for owner in owners if before is not None and before.owner(owner.node) is None)

    def stopped(self, reason: str) -> str:
        """Say why a run was stopped, and what of it is saved.

        Example: ``stopped by the user, with a checkpoint of step 20``.
        """
        step = self.saved_step
        return f"{reason}, with a checkpoint of step {step}" if step >= 0 else f"{reason}; there is no checkpoint"

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint of the run, or of the run that it resumes; -1 = there is none."""
        return self._newest_step if self._newest_step is not None else self._saved_before

    @property
    def _saved_before(self) -> int:
        """The step of the newest checkpoint that the run resumes from, or that is before it; -1 = there is none."""
        if self._resume is None:
            return -1
        last = self.start.step if self.start else self._resume.manifests[0].step
        saved = (manifest.step for manifest in self._resume.manifests if manifest.shards)
        return max((step for step in saved if step <= last), default=-1)

    # ---- going on ---------------------------------------------------------------------------------

    def ask_about(self, node: str, request: control_pb2.InspectRequest) -> None:
        """Add to an inspection the digests of the node's shards, so that it says what its disk has of the run.

        An owner refuses rows other than those of the run's start.
        """
        if self._resume is None:
            return
        request.checkpoint_run = request.rows_run = self.shards_run
        for manifest in self._resume.manifests_of(node):
            request.shards.add(step=manifest.step, sha256=manifest.shard_of(node).sha256)

    def note_states(
        self, node: str, states: Sequence[control_pb2.ShardState], saved: Sequence[control_pb2.SavedPart] = ()
    ) -> None:
        """Remember what a node said of its shards, and of the files beside them.

        Raises:
            IntegrityError: it said more than it was asked, or than a disk has.
        """
        num_asked, most = (len(self._resume.manifests_of(node)), _MAX_PARTS) if self._resume else (0, 0)
        num_blocks = sum(len(part.blocks) for part in saved)
        if len(states) > num_asked or len(saved) > most or num_blocks > _MAX_PART_BLOCKS:
            raise IntegrityError(
                f"node {node} says that its disk has {len(states):,} shards and {len(saved):,} files of {num_blocks:,} "
                f"blocks beside them; {num_asked}, {most:,} and {_MAX_PART_BLOCKS:,} are the most that can be; use one "
                "version on all machines"
            )
        self._problems[node] = {state.step: state.problem for state in states}
        self._parts[node] = tuple(
            SavedPart(part.step, part.attempt, tuple(part.blocks), part.has_head, part.is_best) for part in saved
        )

    def planned(self, profile: Profile, effort: Effort) -> Planned | None:
        """Choose the point to resume from, and check the plan against the nodes; None if the run begins.

        Remembers the digest of the nodes' base model for the manifests.

        Raises:
            IntegrityError: no checkpoint is whole, or a node did not say.
            ModelError: the nodes have another model than the run began with.
            RingTuneError: the plan can't be resumed on these nodes.
        """
        self._model_digest = profile.nodes[0].model.digest
        if self._resume is None:
            return None
        disks = Disks(self._problems, self._parts)
        choice = ResumeChooser(self._resume, self._job, profile, disks, effort)
        self._chosen, self._passed_over = choice.choose()
        if self._chosen:
            self._model_digest = self._chosen.manifest.model_digest
        for manifest in self._resume.manifests:
            self._note_best(manifest)
        return self._chosen.planned if self._chosen else None

    def tell(self, emit: EventSink) -> None:
        """Send the submitter the step from which the run resumes: 0 where no trained state is left."""
        if self._resume is None:
            return
        step = self.start.step if self.start else 0
        resumed = {"step": step, "saved_step": self._saved_before, "passed_over": self._passed_over}
        emit(control_pb2.RunEvent(resumed_json=json.dumps(resumed)))
        if self._chosen and self._chosen.told:
            emit(control_pb2.RunEvent(note=self._chosen.told))

    def go_on(self, node: str, request: control_pb2.PrepareRequest) -> None:
        """Add to a preparation what the node shall load, if the run resumes from a saved step."""
        if self._resume is None:
            return
        request.checkpoint_run = self.shards_run
        if self._chosen is None:  # nothing is left: it begins anew, with its shards where they were
            request.saved.attempt = self._attempt
            return
        manifest, sources = self._chosen.manifest, self._chosen.sources
        request.checkpoint_plan = manifest.plan_digest
        request.start_holder = self._chosen.start.holder
        if sources is None:
            request.shard.step = manifest.step
            request.shard.sha256 = manifest.shard_of(node).sha256
            return
        request.saved.step, request.saved.attempt = manifest.step, manifest.attempt or self.shards_run
        request.saved.head_sha256 = self._chosen.head_sha256
        if node in self._chosen.heads:
            request.saved.head_from, request.saved.head_sha256 = self._chosen.heads[node]
        for source in sources[node]:
            request.saved.sources.add(**source._asdict())  # fields have the same names
        for digest in manifest.digests:
            request.saved.digests.add(unit=digest.unit, sha256=digest.sha256)

    # ---- saving -----------------------------------------------------------------------------------

    def note_saved(self, node: str, saved: Sequence[control_pb2.Saved]) -> None:
        """Remember which shards a node has on disk; hearing of a shard twice has no further effect."""
        for entry in saved:
            shards = self._saved.setdefault(node, {})
            units = {digest.unit: digest.sha256 for digest in entry.digests}
            shards[entry.step] = Shard(node=node, sha256=entry.sha256, size_bytes=entry.bytes), units
            if len(shards) > _MAX_SAVED:
                del shards[min(shards)]

    def unsaved(self, plan: Plan, step: int) -> list[str]:
        """Return the nodes of this part of the plan that have not told their shard of a step."""
        return [node for node in plan.nodes if step not in self._saved.get(node, {})]

    def log(self, plan: Plan, command: rd.LogCheckpoint | rd.LogKept, emit: EventSink, *, is_kept: bool) -> None:
        """Send the manifest of a checkpoint, or of a turn that nodes keep, for the run that resumes from there.

        ``plan`` is the part that holds. Only a run that is kept (``is_kept``) is resumed from the end of a turn.
        """
        if isinstance(command, rd.LogCheckpoint):
            self._told["checkpoint_json"] = self.manifest(plan, command)
            self._emit("checkpoint_json", emit)
        elif is_kept:
            self._told["kept_turn_json"] = self._manifest(plan, command)
            self._emit("kept_turn_json", emit)

    def _emit(self, kind: str, emit: EventSink) -> None:
        told: dict[str, Any] = {kind: json.dumps(self._told[kind].to_json())}
        emit(control_pb2.RunEvent(**told))

    def tell_excluded(self, emit: EventSink) -> None:
        """Send the last manifests again once an audit has named a node: the run may end before the next ones."""
        excluded = tuple(sorted(self._excluded))
        for kind in [kind for kind, manifest in self._told.items() if manifest.excluded != excluded]:
            self._told[kind] = dataclasses.replace(self._told[kind], excluded=excluded)
            self._emit(kind, emit)

    def manifest(self, plan: Plan, saved: rd.LogCheckpoint) -> CheckpointManifest:
        """Make the manifest of a checkpoint that every node of this part of the plan has saved (``unsaved``)."""
        step = self._newest_step = saved.step
        shards, digests = list[Shard](), dict[int, str]()
        for node in plan.nodes:
            shard, units = self._saved[node].pop(step)
            shards.append(shard)
            digests |= {unit: units[unit] for unit in _saved_alone(plan, node, saved.holder) if unit in units}
        digests |= dict(saved.digests)
        saved = saved._replace(digests=tuple(itertools.starmap(CopyDigest, sorted(digests.items()))))
        manifest = self._manifest(plan, saved, tuple(shards), saved.operations)
        self._note_best(manifest)
        return manifest

    def _note_best(self, manifest: CheckpointManifest) -> None:
        if manifest.evaluations.best is not None:
            self._best_steps[manifest.step] = manifest.evaluations.best_step

    @property
    def best_steps(self) -> tuple[int, ...]:
        """Steps of the best results at the checkpoints from which the run may be resumed."""
        steps = (best for step, best in self._best_steps.items() if step >= self.keep_from_step)
        return tuple(sorted({*steps}))

    def _manifest(
        self,
        plan: Plan,
        command: rd.LogCheckpoint | rd.LogKept,
        shards: tuple[Shard, ...] = (),
        operations: Operations | None = None,
    ) -> CheckpointManifest:
        return CheckpointManifest(
            run_id=self.shards_run,
            plan_digest=plan.digest,
            job_digest=job_digest(self._job),
            model_digest=self._model_digest,
            step=command.step,
            holder=command.holder,
            shards=shards,
            unfreezing=command.unfreezing,
            operations=operations,
            evaluations=command.evaluations,
            placement_number=plan.placement.placement_number,
            attempt=self._attempt,
            excluded=tuple(sorted(self._excluded)),
            digests=command.digests,
        )

    def note_kept(self, step: int) -> bool:
        """Note that the manifest of ``step`` is on disk; True if nodes may now drop more shards than before.

        Hearing of a manifest from both the submitter and the keeper of the run has no further effect.

        The checkpoint before it stays: after notes of steps 100, 200 and 300 shards of steps before 200 may go.
        """
        if self._noted is not None and step <= self._noted:
            return False
        before = self._noted if self._noted is not None else self.start.step if self.start else 0
        self._noted = step
        has_more = before > self.keep_from_step
        self.keep_from_step = max(self.keep_from_step, before)
        return has_more
