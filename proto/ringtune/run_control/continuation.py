"""Continuation of a run: its length, the job keys on which its result depends, and differences between two jobs.

A run of N steps and a longer one are equal up to step N, if none of these steps depends on the number of steps. Then
the longer run may continue from a checkpoint of the shorter one, and ends with the same bits as from its start.

A key of which several values give the same bits may change with ``--resume`` from one of them to another: the place of
optimizer state, in memory or on disk, belongs to the placement. Dropped state belongs to the course and can't change.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ringtune.config.sections import ERROR, LENGTHS
from ringtune.errors import IntegrityError, InvalidInputError, JobError
from ringtune.job.job import Job
from ringtune.schedule.course import Course
from ringtune.schedule.migration import course_before, reduced_num_steps
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import EQUAL
from ringtune.schedule.versions import weight_version
from ringtune.storage.strict import json_digest, read_dataclass
from ringtune.storage.text_files import AUTO
from ringtune.techniques import TECHNIQUES

_OF_NO_RESULT: Final = ("runtime", "placement", "recovery", "audit")
_KEYS_OF_NO_RESULT: Final = ("train.sample_prompt",)
_MAX_TOLD = 5
_MAX_CHARACTERS = 200
_LATER: Final[dict[str, object]] = {
    "train.turns": EQUAL,
    "data.user": "",
    "data.held_out": 0.0,
    "data.text_pair": "",
    "data.words": "words",
    "data.tags": "tags",
    "data.missing": ERROR,
    "data.encoding": AUTO,
    "train.patience_evals": 0,
    "train.keep_best": False,
    "train.warmup_share": 0.0,
}
"""Job keys added in later versions, outside of techniques: each with the value that means the former behaviour."""


def job_digest(job: Job) -> str:
    """SHA-256 of the job keys on which the result depends.

    Those are all but ``[runtime]``, ``[placement]``, ``[recovery]``, ``[audit]``, ``train.sample_prompt``, and
    ``Technique.unused_keys``.

    A key added in a later version is left out where it has the value of the former behaviour, so that digests last.
    """
    later = _LATER | {name: value for technique in TECHNIQUES for name, value in technique.later_keys.items()}
    keys, unused = _result_keys(job), _unused_keys(job)
    return json_digest(
        {
            name: value
            for name, value in keys.items()
            if name not in unused and (name not in later or value != later[name])
        }
    )


def changed_keys(before: Job, now: Job) -> tuple[str, ...]:
    """List the dotted keys with different values in two jobs, sorted, among those that ``job_digest`` has of both."""
    old, new = _result_keys(before), _result_keys(now)
    names = sorted((old.keys() | new.keys()) - _unused_keys(before) - _unused_keys(now))
    return tuple(name for name in names if old.get(name) != new.get(name))


def describe_changes(before: Job, now: Job, *, but: Collection[str] = ()) -> str:
    """Describe the changed keys with both values, five at most, except those in ``but``.

    Example: ``train.rounds was 2, now 3; train.seed was 0, now 1``.
    """
    old, new = _result_keys(before), _result_keys(now)
    names = [name for name in changed_keys(before, now) if name not in but]
    told = [f"{name} was {_value(old, name)}, now {_value(new, name)}" for name in names[:_MAX_TOLD]]
    return "; ".join(told) + (f"; and {len(names) - _MAX_TOLD} more" if len(names) > _MAX_TOLD else "")


def _value(keys: Mapping[str, object], name: str) -> str:
    said = repr(keys[name]) if name in keys else "not set"
    return said if len(said) <= _MAX_CHARACTERS else f"{said[:_MAX_CHARACTERS]}…"


def _result_keys(job: Job) -> dict[str, object]:
    tables = job.to_tables()
    return {
        f"{section}.{key}": value
        for section, keys in tables.items()
        for key, value in keys.items()
        if section not in _OF_NO_RESULT and f"{section}.{key}" not in _KEYS_OF_NO_RESULT
    }


def _unused_keys(job: Job) -> set[str]:
    return {name for technique in TECHNIQUES for name in technique.unused_keys(job)}


def equal_keys(before: Job, now: Job) -> tuple[str, ...]:
    """List the keys whose values in two jobs give the same bits; see ``Technique.equal_values``."""
    old, new = _result_keys(before), _result_keys(now)
    return tuple(name for name, equal in _equal_values() if old.get(name) in equal and new.get(name) in equal)


def _equal_values() -> Iterator[tuple[str, Sequence[object]]]:
    return itertools.chain.from_iterable(technique.equal_values.items() for technique in TECHNIQUES)


def with_state_where_asked(plan: Plan, job: Job) -> Plan:
    """Copy a plan with ``state_on_disk`` of every placement as in the job."""
    on_disk = job.keeps_state_on_disk
    placements = tuple(dataclasses.replace(placement, state_on_disk=on_disk) for placement in plan.placements)
    return dataclasses.replace(plan, placements=placements)


def equal_jobs(job: Job, plan: Plan) -> tuple[tuple[Job, Plan], ...]:
    """List (job, plan) for each value of a key with the same bits; the given pair alone if there is no other."""
    keys = _result_keys(job)
    values = [(name, value) for name, equal in _equal_values() if keys.get(name) in equal for value in equal]
    jobs = [job.with_overrides({name: value}) for name, value in values] or [job]
    return tuple((variant, with_state_where_asked(plan, variant)) for variant in jobs)


LENGTH_KEYS: Final = tuple(f"train.{name}" for name in LENGTHS)

_AGAIN = "so a longer run can't continue this one; train the longer one from its start"


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """The length keys of a job; None = the key is not set."""

    rounds: int | None = None
    max_steps: int | None = None
    epochs: float | None = None

    @staticmethod
    def of(job: Job) -> Length:
        """Read the length from a job."""
        return Length(rounds=job.train.rounds, max_steps=job.train.max_steps, epochs=job.train.epochs)

    @staticmethod
    def from_json(value: object) -> Length:
        """Read the dictionary of a length; raises ``IntegrityError``."""
        try:
            return read_dataclass(Length, value, where="", error=JobError)
        except InvalidInputError as error:
            raise IntegrityError(f"a length that the run had is damaged: {error}") from error

    def applied(self, job: Job) -> Job:
        """Copy a job with this length."""
        train = dataclasses.replace(job.train, **dataclasses.asdict(self))
        return dataclasses.replace(job, train=train)


def num_steps_of(job: Job, plan: Plan) -> int:
    """Count the steps that a job asks of the owners of a plan, without the turns that are left out."""
    whole = whole_num_steps(job, plan.course)
    return reduced_num_steps(plan.course, whole) if plan.course.left_out else whole


def whole_num_steps(job: Job, course: Course) -> int:
    """Count the steps that a job asks of all owners of a course, with those that are left out."""
    return job.train.num_steps([owner.train_rows for owner in course.all_owners])


def plan_of_checkpoint(job: Job, plan: Plan, known: Collection[str], lengths: Sequence[Length] = ()) -> Plan:
    """Return the plan under which a checkpoint was written: with the owners that were lost, or not yet back, then.

    That is the first plan with a digest in ``known``, going back loss by loss and return by return; ``plan`` itself
    where none matches. ``lengths`` are former ones of the run.
    """
    candidate = plan
    while True:
        if any(not written.isdisjoint(known) for written in digests(job, candidate, lengths).values()):
            return candidate
        if not candidate.course.left_out:
            return plan
        candidate = Plan(course_before(candidate.course, whole_num_steps(job, candidate.course)), candidate.placements)


def longer(plan: Plan, job: Job) -> Plan:
    """Extend a plan to the number of steps that its job asks for; raises ``JobError`` or ``PlanError``."""
    was, now = plan.course.num_steps, num_steps_of(job, plan)
    if now < was:
        raise JobError(f"the run has {was} steps and the job asks for {now}; a run can get longer, not shorter")
    if job.train.lr_schedule != "constant":
        raise JobError(f"train.lr_schedule = {job.train.lr_schedule!r} ends with the last step, {_AGAIN}")
    if plan.course.decides:
        raise JobError(f"unfreeze.at = 'auto' decides nothing near the last step, {_AGAIN}")
    course = dataclasses.replace(plan.course, num_steps=now)
    if any(weight_version(plan.course, unit, was) != weight_version(course, unit, was) for unit in course.trainable):
        raise JobError(f"offload.interval = {job.offload.interval} had its last update early, at step {was}, {_AGAIN}")
    return dataclasses.replace(plan, course=course)


def digests(job: Job, plan: Plan, lengths: Sequence[Length]) -> dict[str, set[str]]:
    """Digests of plans, by digest of the job, under which checkpoints of a run may have been written.

    ``lengths`` are former ones of the run.
    """
    written: dict[str, set[str]] = {}
    for variant, placed in equal_jobs(job, plan):
        written.setdefault(job_digest(variant), set()).update(part.digest for part in placed.parts)
        for length in lengths:
            before = length.applied(variant)
            course = dataclasses.replace(placed.course, num_steps=num_steps_of(before, placed))
            parts = dataclasses.replace(placed, course=course).parts
            written.setdefault(job_digest(before), set()).update(part.digest for part in parts)
    return written
