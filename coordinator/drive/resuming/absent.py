"""Which members a run goes on with where some of its own nodes do not come: rules, without a clock.

A run waits for the nodes that it had, for as long as its request says. If then all owners are there, or the job leaves
out those that are not, it goes on with all members that are there: whether their disks have what it needs, they are
asked next. A run that needs its own nodes, as its method does not move, waits in vain.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringtune.jobs.job import Job
from ringtune.jobs.parts.recovery import SKIP
from ringtune.rounds.checkpoint import Resume
from ringtune.schedule.changing_hands.placements import why_it_stays
from ringtune.schedule.whose_rows.leaving_out import why_it_waits


class Absent:
    """The nodes of a run that goes on that are not there.

    Args:
        resume: what the run goes on from.
        job: of the run.
    """

    def __init__(self, resume: Resume, job: Job) -> None:
        self._resume, self._job = resume, job

    def why_needed(self, missing: Sequence[str]) -> str:
        """Say why the run does not go on without these nodes; empty if it does, once it has waited for them."""
        course = self._resume.plan.course
        if stays := why_it_stays(course, self._resume.plan.placements):
            return f"their parts of the checkpoint are on no other node: {stays}"
        owners = [node for node in missing if course.owner(node) is not None]
        if not owners:
            return ""
        if self._job.recovery.owners != SKIP:
            return f"no other node has the rows of {', '.join(owners)}; or set recovery.owners = 'skip'"
        if len(owners) == len(course.owners):
            return "no other node than they owns rows"
        return why_it_waits(course, owners[0])

    def instead(self, living: Sequence[str], named: Sequence[str]) -> tuple[str, ...]:
        """Name the members with which the run goes on in place of the nodes that it had; none if it needs those.

        Args:
            living: members that a run may take.
            named: the nodes that it had, of which one at least is missing.
        """
        missing = [node for node in named if node not in living]
        return () if not living or self.why_needed(missing) else tuple(sorted(living))

    def waits(self, living: Sequence[str], named: Sequence[str], join_s: float) -> str:
        """Say for whom the run waits, how long, and what comes then."""
        missing = [node for node in named if node not in living]
        waits = f"waiting up to {join_s:g} s for node {', '.join(missing)}"
        if why := self.why_needed(missing):
            return f"{waits}, without which the run can't go on: {why}"
        return f"{waits}; then the run goes on without, if the disks of the others have what was trained there"
