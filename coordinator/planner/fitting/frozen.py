"""How the frozen weights of a run are held: the job's wish, what the nodes can do, and what fits.

``auto`` rounds no more than it has to: float32 where a plan fits, else bfloat16, else int8. Products are computed in
bfloat16 only where every node that takes part does so fast, whoever hosts what in the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from coordinator.planner.draft import Draft
from ringtune.costs.profile import NodeFacts
from ringtune.errors import CapacityError, PlanError
from ringtune.jobs.job import Job
from ringtune.jobs.parts.frozen import frozen_choices
from ringtune.jobs.sections import AUTO
from ringtune.schedule.course import Course
from ringtune.schedule.frozen_weights import FrozenWeights, dtype_of, name_of

T = TypeVar("T")


def frozen_of(job: Job, nodes: Iterable[NodeFacts]) -> tuple[FrozenWeights | None, ...]:
    """The ways of holding frozen weights to be tried on these nodes, in order; None is float32."""
    is_native = all(node.fast_bfloat16 for node in nodes)
    return frozen_choices(job, is_native=is_native)


def with_frozen(draft: Draft, frozen: FrozenWeights | None) -> Draft:
    """Copy a draft with its frozen weights held so."""
    return dataclasses.replace(draft, course=dataclasses.replace(draft.course, frozen=frozen))


def as_timed(job: Job, draft: Draft, nodes: Sequence[NodeFacts]) -> Draft:
    """Copy a draft with its frozen weights held as when the nodes were timed, if its job allows that."""
    known = {name_of(frozen): frozen for frozen in frozen_of(job, nodes)}
    timed = next((node.shape.frozen for node in nodes if node.shape.is_measured), "")
    return with_frozen(draft, known[timed]) if timed in known else draft


def timed_otherwise(course: Course, nodes: Iterable[NodeFacts]) -> str:
    """Say that nodes were timed with frozen weights held in another way; empty if they were not."""
    timed = {node.shape.frozen for node in nodes if node.shape.is_measured} - {name_of(course.frozen)}
    if not timed:
        return ""
    return (
        f"the nodes were timed with frozen weights in {' and '.join(sorted(timed))}, the plan has them in "
        f"{name_of(course.frozen)}: predicted times are rough"
    )


def first_that_fits(
    choices: Sequence[FrozenWeights | None], place: Callable[[FrozenWeights | None], T]
) -> tuple[T, tuple[tuple[str, str], ...]]:
    """Take the first way of holding frozen weights with which a run can be placed.

    Args:
        choices: in the order of preference.
        place: makes the plan for one of them.

    Returns:
        The plan, and for each way before it its name and what is too large.

    Raises:
        CapacityError: it can be placed with none of them; the message is that of the last.
    """
    too_large: list[tuple[str, str]] = []
    for frozen in choices[:-1]:
        try:
            return place(frozen), tuple(too_large)
        except CapacityError as error:
            too_large.append((name_of(frozen), str(error).partition(";")[0]))
    return place(choices[-1]), tuple(too_large)


def check_given_frozen(job: Job, course: Course) -> None:
    """Refuse a given plan whose frozen weights are held in another type than the job asks for.

    How they are multiplied is the plan's matter: every node can do both.

    Raises:
        PlanError: names both types.
    """
    has = dtype_of(course.frozen)
    if job.runtime.frozen not in (AUTO, has):
        raise PlanError(
            f"the plan has frozen = {has}, the job says {job.runtime.frozen} (runtime.frozen); change it, or plan anew "
            "with 'ringtune plan JOB --save FILE'"
        )


def frozen_line(frozen: FrozenWeights | None) -> str:
    """Say how frozen weights are held, if not as computed."""
    if frozen is None:
        return ""
    how = "multiplied in bfloat16" if frozen.native else "widened to float32 a matrix at a time"
    scale = ", a scale for each row" if frozen.dtype == "int8" else ""
    return f"frozen weights in {frozen.dtype}{scale}, {how}"


def reason_line(frozen: FrozenWeights | None, too_large: Sequence[tuple[str, str]] | None) -> str:
    """Say why ``auto`` took a type: what the types before it lacked. Empty where there was nothing to choose."""
    if too_large is None:
        return ""
    why = "; ".join(f"in {name} {lacking}" for name, lacking in too_large) or "they fit unrounded"
    return f"  frozen weights in {name_of(frozen)}: {why}"
