"""Choose from which saved step a run goes on, with the nodes that are there, and what each of them loads.

::

    every node of the placement is there, with its shard        as it was: each loads its own
    else, all that was trained is on disks that are there
        every node of the placement is there                    as it was, but blocks come from whoever has them
        one is not                                              the same, in a placement of those that are there
    else                                                        an older checkpoint

The newest step goes first, however it is saved. What a method forbids to move needs its own nodes and shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coordinator.planner.effort import Effort
from coordinator.planner.make_plan import keep_plan
from coordinator.planner.placing_again.recover import placed_without
from coordinator.planner.planned import Planned
from ringtune.costs.profile import Profile
from ringtune.errors import CapacityError, IntegrityError, ModelError
from ringtune.jobs.job import Job
from ringtune.jobs.parts.recovery import SKIP
from ringtune.rounds.checkpoint import CheckpointManifest, Resume
from ringtune.rounds.whereabouts import SavedPart, SavedSource, Whereabouts
from ringtune.schedule.changing_hands.placements import why_it_stays
from ringtune.schedule.course import Course
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StartPoint
from ringtune.schedule.whose_rows.leaving_out import why_it_waits, without_owner


class Disks(NamedTuple):
    """What the nodes that are there said of their disks.

    Attributes:
        problems: node -> step -> what is wrong with its shard, empty = intact.
        parts: node -> its files beside shards.
    """

    problems: Mapping[str, Mapping[int, str]]
    parts: Mapping[str, Sequence[SavedPart]]


class GoingOn(NamedTuple):
    """From where a run goes on, and how.

    Attributes:
        manifest: of the step.
        planned: the plan, with another placement or without an owner where need be.
        start: where it goes on.
        sources: by node, of its blocks; None = each has all in its shard.
        head_sha256: of the holder's shard that has the head; empty = a file beside it, or that of ``manifest``.
        told: what the user should know.
    """

    manifest: CheckpointManifest
    planned: Planned
    start: StartPoint
    sources: Mapping[str, tuple[SavedSource, ...]] | None = None
    head_sha256: str = ""
    told: str = ""


class Choosing:
    """The choice for one run.

    Args:
        resume: what it may go on from.
        job: of the run.
        profile: of the nodes that are there.
        disks: theirs.
        effort: how hard to look for another placement.
    """

    def __init__(self, resume: Resume, job: Job, profile: Profile, disks: Disks, effort: Effort) -> None:
        self._resume, self._job, self._profile, self._disks, self._effort = resume, job, profile, disks, effort
        self._facts = profile.by_name

    def choose(self) -> tuple[GoingOn | None, tuple[str, ...]]:
        """Choose the newest step of which everything is there.

        Returns:
            How the run goes on, and why each newer step was passed over. None: it had no checkpoint, and begins anew.

        Raises:
            IntegrityError: no checkpoint is whole; names what is wrong with each.
            ModelError: the nodes have another model than the run began with.
            RingTuneError: the plan can't go on with these nodes.
        """
        passed: list[str] = []
        for manifest in self._resume.manifests:
            found = self._as_it_was(manifest)
            if isinstance(found, str):
                found = self._from_disks(manifest, found)
            if isinstance(found, GoingOn):
                self._check_model(found)
                return found, tuple(passed)
            passed.append(f"{manifest.name} can't be used: {found}")
        if self._resume.saved_step < 0:
            return None, tuple(passed)
        raise IntegrityError(f"{'. '.join(passed)}. No other checkpoint is left; start the run without --resume")

    def _as_it_was(self, manifest: CheckpointManifest) -> GoingOn | str:
        """Go on with each node's own shard, or say why not."""
        missing = self._missing(manifest)
        if missing:
            return f"node {', '.join(missing)} is not there"
        if not manifest.shards:
            return ""
        found = self._disks.problems
        silent = [one.node for one in manifest.shards if manifest.step not in found.get(one.node, {})]
        if silent:
            raise IntegrityError(
                f"node {silent[0]} did not say whether its shards are whole; use one version everywhere"
            )
        wrong = [found[one.node][manifest.step] for one in manifest.shards if found[one.node][manifest.step]]
        if wrong:
            return "; ".join(wrong)
        plan = self._resume.plan
        planned = keep_plan(self._job, self._resume.rest(manifest.placement_number), self._facts)
        start = self._start(manifest, plan.course, manifest.holder, manifest.placement_number)
        return GoingOn(manifest, dataclasses.replace(planned, plan=plan), start)

    def _from_disks(self, manifest: CheckpointManifest, why: str) -> GoingOn | str:
        """Go on with what is on any disk, or say why not."""
        plan = self._resume.plan
        if stays := why_it_stays(plan.course, plan.placements):
            return f"{why or 'it has no shards'}; the run needs its own nodes: {stays}"
        course = self._course(manifest)
        if isinstance(course, str):
            return course
        placement = plan.at(manifest.placement_number).placement
        where = Whereabouts(manifest, plan.course, placement, self._disks.parts, self._disks.problems)
        owners = [owner.node for owner in course.owners]
        problem, head = where.why_not(owners), where.head_at(owners)
        if problem or head is None:
            return "; ".join(filter(None, (why, problem)))
        after, part, planned = self._placed(manifest, course)
        start = self._start(manifest, course, head[0], part.placement.placement_number)
        sources = {node: where.sources(part.placement, node) for node in part.nodes}
        told = self._told(manifest, course, part.placement.placement_number, why)
        return GoingOn(manifest, dataclasses.replace(planned, plan=after), start, sources, head[1], told)

    def _course(self, manifest: CheckpointManifest) -> Course | str:
        """The course without the owners that are not there, or why the run waits for them."""
        course = self._resume.plan.course
        turns = -(-manifest.step // course.local_iterations)
        for owner in [one.node for one in course.owners if one.node not in self._facts]:
            if self._job.recovery.owners != SKIP:
                return f"node {owner} is not there, whose rows no other node has"
            if why := why_it_waits(course, owner):
                return f"node {owner} is not there, whose rows can't be left out: {why}"
            course = without_owner(course, owner, turns)
        return course

    def _placed(self, manifest: CheckpointManifest, course: Course) -> tuple[Plan, Plan, Planned]:
        """The plan, the part of it that holds at once, and what the nodes need from there on.

        It has another placement from the step of the manifest on if a node of its own is not there.

        Raises:
            CapacityError: the nodes that are there have no memory for the model.
        """
        plan = Plan(course, self._resume.plan.placements)
        missing = self._missing(manifest)
        rest = Plan(course, self._resume.rest(manifest.placement_number).placements)
        if not missing:
            return plan, plan.at(manifest.placement_number), keep_plan(self._job, rest, self._facts)
        try:
            placement = placed_without(rest.parts[0], self._job, self._profile, missing, self._effort)
        except CapacityError as error:
            raise CapacityError(f"node {', '.join(missing)} is not there, and {error}") from error
        turns, placement_number = -(-manifest.step // course.local_iterations), plan.placements[-1].placement_number + 1
        after = plan.extended(placement, turns, placement_number=placement_number)
        return after, after.parts[-1], keep_plan(self._job, after.parts[-1], self._facts)

    def _missing(self, manifest: CheckpointManifest) -> tuple[str, ...]:
        nodes = self._resume.rest(manifest.placement_number).nodes
        return tuple(node for node in nodes if node not in self._facts)

    def _start(self, manifest: CheckpointManifest, course: Course, holder: str, placement_number: int) -> StartPoint:
        before, unfreezing = self._resume.plan.course, manifest.unfreezing
        return StartPoint.of(
            course,
            step=manifest.step,
            holder=holder,
            unfreezing=unfreezing if course == before else unfreezing.without(before, course),
            operations=manifest.operations,
            evaluations=manifest.evaluations,
            placement_number=placement_number,
        )

    def _told(self, manifest: CheckpointManifest, course: Course, placement_number: int, why: str) -> str:
        if not why:
            return ""
        out = [one.owner.node for one in course.left_out[len(self._resume.plan.course.left_out) :]]
        rows = f"; the rows of {', '.join(out)} are left out, so that the run ends with step {course.num_steps}"
        return (
            f"{why}; {manifest.name} is taken from copies on the other nodes, in placement {placement_number}"
            + rows * bool(out)
        )

    def _check_model(self, found: GoingOn) -> None:
        digest = next(iter(self._facts.values())).model.digest
        if digest != found.manifest.model_digest:
            raise ModelError(
                f"the run began with model {found.manifest.model_digest[:12]}…, the nodes have {digest[:12]}… now; "
                "put the same folder back"
            )
