"""How long a run is, and when a longer run goes on with what a shorter one trained.

A run of N steps and one of more steps do the same up to step N, if nothing that they do depends on their last step.
Then the longer one may go on from a checkpoint of the shorter one, and ends with the very bits as if it had been
that long from the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from ringtune.errors import IntegrityError, InvalidInputError, JobError
from ringtune.files.strict import read_dataclass
from ringtune.jobs.job import Job
from ringtune.jobs.sections import LENGTHS
from ringtune.rounds.job_changes import job_digest
from ringtune.rounds.state_place import state_places
from ringtune.schedule.course import Course
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.versions import weight_version
from ringtune.schedule.whose_rows.leaving_out import all_owners, steps_of_rest, with_owner_back

LENGTH_KEYS: Final = tuple(f"train.{name}" for name in LENGTHS)
"""Keys of a job that say how long its run is."""

_AGAIN = "so a longer run does not go on with what this one trained; train the longer one from its start"


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """The length that a job asks for.

    Attributes:
        rounds: as in the job; None = it asks for steps or epochs, or for the default.
        max_steps: as in the job; None = it does not ask for steps.
        epochs: as in the job; None = it does not ask for epochs.
    """

    rounds: int | None = None
    max_steps: int | None = None
    epochs: float | None = None

    @staticmethod
    def of(job: Job) -> Length:
        """The length of a job."""
        return Length(rounds=job.train.rounds, max_steps=job.train.max_steps, epochs=job.train.epochs)

    @staticmethod
    def from_json(value: object) -> Length:
        """Read the dictionary of a length.

        Raises:
            IntegrityError: it is none.
        """
        try:
            return read_dataclass(Length, value, where="", error=JobError)
        except InvalidInputError as error:
            raise IntegrityError(f"a length that the run had is damaged: {error}") from error

    def applied(self, job: Job) -> Job:
        """The job with this length and all else as it is."""
        train = dataclasses.replace(job.train, **dataclasses.asdict(self))
        return dataclasses.replace(job, train=train)


def num_steps_of(job: Job, plan: Plan) -> int:
    """How many steps a job asks of the owners of a plan; turns that are left out have none."""
    whole = job.train.num_steps([owner.train_rows for owner in all_owners(plan.course)])
    return steps_of_rest(plan.course, whole) if plan.course.left_out else whole


def as_it_was(job: Job, plan: Plan, known: Collection[str], lengths: Sequence[Length] = ()) -> Plan:
    """The plan under which a checkpoint was written: with owners that it has left out since, as far as need be.

    Args:
        job: of the run.
        plan: of the run now.
        known: digests of the plans of checkpoints.
        lengths: that the run had before.
    """
    found = plan
    while True:
        if any(not written.isdisjoint(known) for written in digests(job, found, lengths).values()):
            return found
        if not found.course.left_out:
            return plan
        whole = job.train.num_steps([owner.train_rows for owner in all_owners(found.course)])
        found = Plan(with_owner_back(found.course, whole), found.placements)


def longer(plan: Plan, job: Job) -> Plan:
    """The plan of a run that goes on beyond its end, because its job asks for more steps.

    Raises:
        JobError: it asks for fewer steps, or what the run has done depends on its number of steps.
        PlanError: the placement is not for so long a run.
    """
    was, now = plan.course.num_steps, num_steps_of(job, plan)
    if now < was:
        raise JobError(f"the run has {was} steps and the job asks for {now}; a run can get longer, not shorter")
    _require_endless(job, plan.course)
    course = dataclasses.replace(plan.course, num_steps=now)
    if any(weight_version(plan.course, unit, was) != weight_version(course, unit, was) for unit in course.trainable):
        raise JobError(f"offload.interval = {job.offload.interval} had its last update early, at step {was}, {_AGAIN}")
    return dataclasses.replace(plan, course=course)


def _require_endless(job: Job, course: Course) -> None:
    """Refuse a course whose steps depend on their number.

    Raises:
        JobError: names the key.
    """
    if job.train.lr_schedule != "constant":
        raise JobError(f"train.lr_schedule = {job.train.lr_schedule!r} ends with the last step, {_AGAIN}")
    if course.decides:
        raise JobError(f"unfreeze.at = 'auto' decides nothing near the last step, {_AGAIN}")


def digests(job: Job, plan: Plan, lengths: Sequence[Length]) -> dict[str, set[str]]:
    """The digests of plans under which checkpoints of a run may have been written, by the digest of the job.

    Args:
        job: as it is now.
        plan: as it is now.
        lengths: that the run had before.
    """
    found: dict[str, set[str]] = {}
    for one, placed in state_places(job, plan):
        found.setdefault(job_digest(one), set()).update(part.digest for part in placed.parts)
        for length in lengths:
            before = length.applied(one)
            course = dataclasses.replace(placed.course, num_steps=num_steps_of(before, placed))
            parts = dataclasses.replace(placed, course=course).parts
            found.setdefault(job_digest(before), set()).update(part.digest for part in parts)
    return found
