"""The continuation of a run: its length, the keys of a job that its result depends on, and differences of two jobs.

A run of N steps and one of more steps do the same up to step N, if none of these steps depends on the last one. Then
the longer one may continue from a checkpoint of the shorter one, and has the same bits in the end as from the start.

``hift.state`` may change with ``--resume`` between memory and disk, which give the same bits and belong to the
placement. State that is dropped belongs to the course: a run neither begins nor ends to drop it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ringtune.config.sections import ERROR, LENGTHS
from ringtune.errors import IntegrityError, InvalidInputError, JobError
from ringtune.job.job import Job
from ringtune.schedule.course import Course
from ringtune.schedule.methods.hift import DISK, MEMORY
from ringtune.schedule.migration import all_owners, reduced_num_steps, with_owner_back
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import EQUAL
from ringtune.schedule.versions import weight_version
from ringtune.storage.strict import json_digest, read_dataclass
from ringtune.storage.text_files import AUTO
from ringtune.techniques import TECHNIQUES

_OF_NO_RESULT: Final = ("runtime", "placement", "recovery")
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
}
"""Keys of later versions that are of no technique, each with the value that stands for the behaviour before."""


def job_digest(job: Job) -> str:
    """SHA-256 of everything in a job that can change its result: all but how it is carried out.

    A key that versions before did not have is left out where it says what these did, so that digests last.
    """
    later = _LATER | {name: value for technique in TECHNIQUES for name, value in technique.later_keys.items()}
    keys = _result_keys(job)
    return json_digest({name: value for name, value in keys.items() if name not in later or value != later[name]})


def changed_keys(before: Job, now: Job) -> tuple[str, ...]:
    """The dotted keys in which two jobs differ, sorted; ``[runtime]`` and ``[placement]`` do not count."""
    old, new = _result_keys(before), _result_keys(now)
    names = sorted(old.keys() | new.keys())
    return tuple(name for name in names if old.get(name) != new.get(name))


def describe_changes(before: Job, now: Job, *, but: Collection[str] = ()) -> str:
    """Describe in which keys two jobs differ, five at most, with both values; those of ``but`` may differ.

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


STATE_KEY: Final = "hift.state"
"""The key of a job that says where the state of units is that rest."""

_SAME_BITS: Final = (MEMORY, DISK)


def only_moves_state(before: Job, now: Job) -> bool:
    """Whether two jobs differ in no more than where state rests, as far as ``hift.state`` goes."""
    if before.hift is None or now.hift is None:
        return False
    return before.hift.state in _SAME_BITS and now.hift.state in _SAME_BITS


def with_state_where_asked(plan: Plan, job: Job) -> Plan:
    """Copy a plan so that its nodes keep the state of units that rest where the job wants it."""
    on_disk = job.keeps_state_on_disk
    placements = tuple(dataclasses.replace(one, state_on_disk=on_disk) for one in plan.placements)
    return dataclasses.replace(plan, placements=placements)


def state_places(job: Job, plan: Plan) -> tuple[tuple[Job, Plan], ...]:
    """List a job and its plan with state in each place that gives the same bits; as they are where there is one."""
    if job.hift is None or job.hift.state not in _SAME_BITS:
        return ((job, plan),)
    jobs = [job.with_overrides({STATE_KEY: state}) for state in _SAME_BITS]
    return tuple((one, with_state_where_asked(plan, one)) for one in jobs)


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
    return reduced_num_steps(plan.course, whole) if plan.course.left_out else whole


def plan_of_checkpoint(job: Job, plan: Plan, known: Collection[str], lengths: Sequence[Length] = ()) -> Plan:
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
    """The plan of a run that continues beyond its end, because its job asks for more steps.

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
    """Refuse a course in which steps depend on the number of steps.

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
