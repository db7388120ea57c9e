"""Training of all parameters, a group of units at a time (HiFT): ``[hift]`` of a job, and the owners of each group.

Where turns and sweeps have a common period, an owner never trains some groups. Two owners, turns of three steps, six
groups::

    step    0 1 2 3 4 5 | 6 7 8 9 10 11
    owner   a a a b b b | a a a b b  b
    group   0 1 2 3 4 5 | 0 1 2 3 4  5      a trains the groups 0 to 2 for ever, b the others
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from ringtune.config.sections import Adapter
from ringtune.errors import ContradictionError, JobError
from ringtune.models.adapter_config import FULL, trains_own_weights
from ringtune.models.family import MAX_BLOCKS
from ringtune.quantities import format_bytes
from ringtune.schedule.course import Course
from ringtune.schedule.methods import method_class, method_names
from ringtune.schedule.methods.hift import ALWAYS, BOTTOM_UP, DISK, MEMORY, ORDERS, STATES
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import owner_indices, turns_until_repeat, weights
from ringtune.schedule.units import EMBEDDING, unit_name, units_text
from ringtune.schedule.versions import ever_trained
from ringtune.storage.strict import Bounds, OneOf, check_fields
from ringtune.techniques.base import Copies, Shape, Technique
from ringtune.texts import counted, listed

MAX_UNITS = MAX_BLOCKS + 2
"""Limit of units in a group: all blocks, embedding and head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HiftSettings:
    """``[hift]``: which units train together, in which order, and where the optimizer state of the others is.

    Attributes:
        group_size: units of a group, which train in one step; embedding, each block and head are a unit each.
        order: in which a sweep trains the groups; random = shuffled once, by ``train.seed``.
        always_active: units that train at every step and are in no group: ``"embedding"``, ``"head"``, or both.
        state: where the optimizer state of a group is kept until its next step; drop = it is forgotten, and starts at
            zero again. On an accelerator memory is the device's, and disk is refused.
    """

    group_size: Annotated[int, Bounds(ge=1, le=MAX_UNITS)] = 1
    order: Annotated[str, OneOf(ORDERS)] = BOTTOM_UP
    always_active: Annotated[tuple[str, ...], OneOf(ALWAYS)] = ()
    state: Annotated[str, OneOf(STATES)] = MEMORY

    def __post_init__(self) -> None:
        """Refuse values out of range, unknown words, and a unit that stands twice."""
        check_fields(self, where="hift", error=JobError)
        if len(set(self.always_active)) < len(self.always_active):
            raise JobError(f"hift.always_active has a unit twice: {list(self.always_active)}; name each once")


def with_adapter(tables: Mapping[str, object]) -> dict[str, object]:
    """Add ``adapter.config = "full"`` to the sections of a job where the method needs it and no ``config`` is given."""
    train, adapter = tables.get("train"), tables.get("adapter", {})
    method = train.get("method") if isinstance(train, Mapping) else None
    if not isinstance(adapter, Mapping) or "config" in adapter or _default(method) == Adapter().config:
        return dict(tables)
    return {**tables, "adapter": {**adapter, "config": _default(method)}}


def without_default(adapter: Mapping[str, object], method: str) -> dict[str, object]:
    """Remove ``config`` from ``[adapter]`` where it is the method's default, so that the job may change its method.

    Example: a job of ringada with its ``seq_bn`` may become one of hift, a job with ``lora`` may not.
    """
    return {key: value for key, value in adapter.items() if key != "config" or value != _default(method)}


def _default(method: object) -> str:
    is_full = isinstance(method, str) and method in method_names() and method_class(method).full_parameters
    return FULL if is_full else Adapter().config


def check_job(job: Any) -> None:
    """Refuse a job that combines a method for all parameters with what is for adapters or for parts of blocks."""
    train, adapter, privacy = job.train, job.adapter, job.privacy
    if not method_class(train.method).full_parameters:
        return
    name = f"train.method = {train.method!r}"
    if not trains_own_weights(adapter.config):
        raise ContradictionError(
            f"adapter.config = {adapter.config!r} and {name} can't go together: the method trains all parameters and "
            "has no adapters; remove adapter.config or change the method"
        )
    if job.operations.is_any:
        raise JobError(
            f"[operations] and {name} can't go together: a subnet that is passed by has no gradient, but the method "
            "trains whole units; remove the section or change the method"
        )
    if privacy.private_blocks and job.hift is not None and "embedding" in job.hift.always_active:
        raise ContradictionError(
            f"privacy.private_blocks = {privacy.private_blocks} and hift.always_active with the embedding can't go "
            "together: below private blocks, which never train, the embedding does not either; remove one of them"
        )


def check_group(settings: HiftSettings | None, num_blocks: int, private_blocks: int = 0) -> None:
    """Refuse groups of more units than take turns: with private blocks neither these nor the embedding do."""
    if settings is None:
        return
    units = num_blocks + len(ALWAYS) - len(settings.always_active) - private_blocks - (private_blocks > 0)
    if settings.group_size > units:
        raise JobError(
            f"hift.group_size is {settings.group_size}, but {units} units take turns (of {num_blocks} blocks, "
            f"embedding and head those that are not always active); give 1 to {units}"
        )


def check_course(job: Any, course: Course, _: Any) -> None:
    """Refuse a warm-up longer than the run, or one with which the learning rate is 0 at every step.

    The warm-up counts the sweeps that the run begins, or the steps where each step has its own learning rate.
    """
    train, num_steps = job.train, course.num_steps
    if not num_steps:
        return
    num_sweeps = course.method.rate_at(course, num_steps - 1)[1]
    if train.warmup_steps > num_steps:
        raise JobError(
            f"train.warmup_steps is {train.warmup_steps}, the run has {num_steps} steps, so that it would end before "
            "train.learning_rate is reached; lower it, or train for more steps"
        )
    key, value = ("warmup_steps", train.warmup_steps) if train.warmup_steps else ("warmup_share", train.warmup_share)
    if value and num_sweeps == 1 < num_steps:
        raise JobError(
            f"train.{key} = {value} counts sweeps over all groups with train.method = {train.method!r}, but the run's "
            f"{num_steps} steps are within the first sweep, so that the learning rate would be 0 at each of them; set "
            f"train.{key} = 0, or train for more steps"
        )


_MAX_FOLLOWED = 20_000


def lone_groups(course: Course) -> dict[str, tuple[int, ...]]:
    """Owner -> places in a sweep that it trains, for owners that never train all groups, however long the run.

    Empty where every owner trains every group in the end, and where blocks have adapters.
    """
    if not course.method.full_parameters or len(course.owners) < 2:
        return {}
    period = course.method.period(course)
    places: dict[str, set[int]] = {owner.node: set() for owner in course.owners}
    turns = turns_until_repeat(weights(course.owners, course.turns))
    steps = min(_MAX_FOLLOWED, turns * course.local_iterations * period)  # until owners and groups are as at the start
    for step, owner in enumerate(itertools.islice(_owners(course), steps)):
        places[owner].add(step % period)
    return {owner: tuple(sorted(groups)) for owner, groups in places.items() if len(groups) < period}


def mixing_iterations(course: Course) -> int | None:
    """The next longer turn, in steps, with which every owner trains every group; None if none within two sweeps."""
    period = course.method.period(course)
    for steps in range(course.local_iterations + 1, course.local_iterations + 2 * period + 1):
        if not lone_groups(dataclasses.replace(course, local_iterations=steps)):
            return steps
    return None


def _owners(course: Course) -> Iterator[str]:
    """Yield the owner of each step, without end."""
    for index in owner_indices(weights(course.owners, course.turns), 0):
        yield from itertools.repeat(course.owners[index].node, course.local_iterations)


def smaller_settings(settings: HiftSettings | None) -> Iterator[tuple[str, object]]:
    """Yield state on disk, then groups of one unit."""
    if settings is not None and settings.state == MEMORY:
        yield "hift.state", DISK
    if settings is not None and settings.group_size > 1:
        yield "hift.group_size", 1


def copies(plan: Plan) -> Iterator[Copies]:
    """Yield embedding and head where there are several owners."""
    owners = tuple(owner.node for owner in plan.course.owners)
    if plan.course.method.full_parameters and plan.course.num_steps and len(owners) > 1:
        yield Copies("embedding and head", owners, "let one node own all rows (data.owners = 1)")


def course_notes(course: Course) -> list[str]:
    """Warn of owners that train some of the groups only, because turns and sweeps have a common period."""
    lone = lone_groups(course)
    if not lone:
        return []
    period, steps = course.method.period(course), mixing_iterations(course)
    remedy = f"; train.local_iterations = {steps} would mix them" if steps else ""
    return [
        f"turns of {course.local_iterations} steps and sweeps of {period} have a common period, so that rows of "
        f"{listed([*lone], 5)} train some of the groups only{remedy}"
    ]


_MAX_GROUPS = 8
_EMBEDDING_TELLS = "with texts, the embedding's which tokens it had and, of learned positions, where they stood"
_HEAD_TELLS = "the head's about how many rows of each class"


def groups_lines(course: Course, memory: Mapping[str, Any]) -> list[str]:
    """Describe groups, sweeps and gradients of copies; empty with adapters. ``memory`` has the sizes of gradients."""
    if not course.method.full_parameters or not course.num_steps:
        return []
    period = course.method.period(course)
    kinds = [course.method.trained(course, step) for step in range(period)]
    shown = " | ".join(units_text(units) for units in kinds[:_MAX_GROUPS])
    more = f" | and {period - _MAX_GROUPS} more" if period > _MAX_GROUPS else ""
    rate = course.method.rate_at(course, course.num_steps - 1)[1]
    lines = [
        f"trains all parameters, one group a step: {shown}{more}",
        f"a sweep over all groups is {counted(period, 'step')}; the run has {counted(rate, 'sweep')}, and the "
        "learning rate advances once a sweep",
    ]
    return [*lines, *_copies_lines(course, memory)]


def _copies_lines(course: Course, memory: Mapping[str, Any]) -> list[str]:
    """Describe the gradients from initiators to the other owners, for their copies of embedding and head."""
    if len(course.owners) < 2:
        return []
    reach = ever_trained(course)
    sizes = {term.what: term.each_bytes for estimate in memory.values() for term in estimate.terms}
    parts = []
    for unit in (EMBEDDING, course.head):
        if unit in reach:
            name = unit_name(unit, course.num_blocks)
            size = sizes.get(f"gradient of the {name} on its way")
            parts.append(f"{name}{f' (at most {format_bytes(size)})' if size else ''}")
    lines = [
        f"every owner has a copy of embedding and head; a step that trains one sends its gradient to the other owners: "
        f"{', '.join(parts)}"
    ]
    tells = [_EMBEDDING_TELLS] if EMBEDDING in reach else []
    tells += [_HEAD_TELLS] if course.labels and course.head in reach else []
    if tells:
        lines.append(f"note: these gradients tell the other owners much of a batch: {'; '.join(tells)}")
    return lines


def check_model(job: Any, shape: Shape) -> None:
    """Refuse groups of more units than a model has, and blocks whose inputs need the embedding; raises ``JobError``."""
    check_group(job.hift, shape.dimensions.num_blocks, job.privacy.private_blocks)
    if shape.passes_more and job.method.full_parameters:
        raise JobError(
            f"{shape.where}: train.method = {job.method.name!r} trains the embedding, and inputs of the blocks of this "
            f"{shape.family.model_type} go to them without a way back for gradients; use adapters"
        )


TECHNIQUE: Final = Technique(
    name="full_parameters",
    equal_values={"hift.state": (MEMORY, DISK)},
    check_job=check_job,
    check_course=check_course,
    check_model=check_model,
    smaller_settings=lambda job: smaller_settings(job.hift),
    copies=copies,
    course_notes=course_notes,
    training_lines=lambda plan, memory: groups_lines(plan.course, memory),
)
