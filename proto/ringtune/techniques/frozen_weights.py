"""Frozen weights in small types: ``runtime.frozen`` of a job, the types that a planner may choose, and their bytes.

The type follows from the job, and from processors and memory of the nodes. ``auto`` takes the first type that fits:
float32, bfloat16, int8, nf4. Products are computed in bfloat16 only if every node multiplies bfloat16 fast, so that the
result does not depend on the placement.

Matrices of a GGUF file stay in its blocks with ``auto``, and with ``float32``, where products are in float32; the other
types round them once more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from ringtune.config.sections import AUTO
from ringtune.errors import ContradictionError, JobError, PlanError
from ringtune.models.four_bit import BLOCK, GROUP
from ringtune.schedule.course import (
    AS_COMPUTED,
    BFLOAT16,
    FROZEN_DTYPES,
    GGUF,
    INT8,
    NF4,
    Course,
    FrozenWeights,
    dtype_of,
    name_of,
)
from ringtune.schedule.methods import method_class
from ringtune.schedule.plan import Plan
from ringtune.techniques.base import ANEW, Technique
from ringtune.techniques.compute import is_rounded
from ringtune.techniques.operations import needs_base_gradients, operations_of


def check_job(job: Any) -> None:
    """Refuse small frozen weights where the other sections of a job exclude them; raises ``JobError``."""
    problem = not_small_reason(job)
    if problem and job.runtime.frozen in FROZEN_DTYPES:
        kind = ContradictionError if method_class(job.train.method).full_parameters else JobError
        raise kind(f"runtime.frozen = {job.runtime.frozen!r} {problem}")


def not_small_reason(job: Any) -> str:
    """Say why a job can't have frozen weights in a small type, and the remedy; empty if it can."""
    if method_class(job.train.method).full_parameters:
        return f"has no meaning with train.method = {job.train.method!r}, where no weight is frozen; remove it"
    if job.model.dtype != AS_COMPUTED:
        return f"rounds weights that model.dtype = {job.model.dtype!r} wants exact; remove one of them"
    return ""


def frozen_choices(job: Any, *, is_native: bool, is_gguf: bool = False) -> tuple[FrozenWeights | None, ...]:
    """List the types of frozen weights that a planner tries in order; None for float32.

    ``is_native`` says whether every node multiplies bfloat16 fast, ``is_gguf`` whether the model is a GGUF file.
    With products in bfloat16 frozen matrices are held in it in place of float32, so that no graph keeps a rounded copy.
    Example: ``auto`` gives None, bfloat16, int8, nf4.
    """
    wish, is_native = job.runtime.frozen, is_native or is_rounded(job)
    can_be_small = not (not_small_reason(job) or needs_base_gradients(job.operations, job.adapter))
    if is_gguf and wish in (AS_COMPUTED, AUTO) and can_be_small:
        return (FrozenWeights(dtype=GGUF, native=is_native and (wish == AUTO or is_rounded(job))),)
    first = FrozenWeights(dtype=BFLOAT16, native=True) if is_rounded(job) and can_be_small else None
    if wish == AS_COMPUTED:
        return (first,)
    if wish != AUTO:
        return (FrozenWeights(dtype=wish, native=is_native),)
    if not can_be_small:
        return (None,)
    return (
        *([None] if first is None else []),
        *(FrozenWeights(dtype=dtype, native=is_native) for dtype in FROZEN_DTYPES),
    )


def first_choice(job: Any, model: Any) -> FrozenWeights | None:
    """Return how frozen weights of a GGUF file are held where no planner has chosen; None for other models."""
    return frozen_choices(job, is_native=False, is_gguf=True)[0] if model.gguf_block_bytes else None


def frozen_of(job: Any, nodes: Iterable[Any]) -> tuple[FrozenWeights | None, ...]:
    """List the types of frozen weights to try on these nodes, in order; None for float32."""
    nodes = list(nodes)
    is_native = all(node.fast_bfloat16 for node in nodes)
    is_gguf = any(node.model.gguf_block_bytes for node in nodes)
    return frozen_choices(job, is_native=is_native, is_gguf=is_gguf)


def courses(job: Any, course: Course, nodes: Sequence[Any]) -> tuple[Course, ...]:
    """Copy the course once for each type of frozen weights."""
    return tuple(dataclasses.replace(course, frozen=frozen) for frozen in frozen_of(job, nodes))


def smaller_settings(job: Any) -> Iterator[tuple[str, object]]:
    """Yield the types smaller than the job's."""
    if not_small_reason(job) or needs_base_gradients(operations_of(job), job.adapter):
        return
    sizes = (AS_COMPUTED, *FROZEN_DTYPES)
    if job.runtime.frozen in sizes:
        yield from (("runtime.frozen", dtype) for dtype in sizes[sizes.index(job.runtime.frozen) + 1 :])


def check_plan(job: Any, plan: Plan, _: Any) -> None:
    """Refuse a given plan with another type of frozen weights than the job's; raises ``PlanError``.

    Native or widened products are not compared: every node can do both.
    """
    has = dtype_of(plan.course.frozen)
    if job.runtime.frozen not in (AUTO, has, *([AS_COMPUTED] if is_rounded(job) and has == BFLOAT16 else [])):
        raise PlanError(
            f"the plan has frozen = {has}, the job says {job.runtime.frozen} (runtime.frozen); change it, or {ANEW}"
        )


def timing_mismatch(course: Course, node: Any) -> str:
    """Say that a node was timed with another type of frozen weights; empty if it was not."""
    timed, planned = node.shape.frozen, name_of(course.frozen)
    return "" if timed == planned else f"frozen weights in {timed}, the run has them in {planned} (runtime.frozen)"


def rough_times(plan: Plan, nodes: Iterable[Any]) -> list[str]:
    """Warn that nodes were timed with another type of frozen weights; empty if they were not."""
    timed = {node.shape.frozen for node in nodes if node.shape.is_measured} - {name_of(plan.course.frozen)}
    if not timed:
        return []
    return [
        f"the nodes were timed with frozen weights in {' and '.join(sorted(timed))}, the plan has them in "
        f"{name_of(plan.course.frozen)}: predicted times are rough"
    ]


_SCALES: Final = {
    BFLOAT16: "",
    INT8: ", a scale for each row",
    NF4: ", a scale for each 64 numbers (outside of blocks int8)",
    GGUF: ", as they are in the file",
}


def frozen_lines(course: Course) -> list[str]:
    """Describe the type of frozen weights; empty for float32."""
    frozen = course.frozen
    if frozen is None:
        return []
    how = "multiplied in bfloat16" if frozen.native else "widened to float32 a matrix at a time"
    return [f"frozen weights in {frozen.dtype}{_SCALES[frozen.dtype]}, {how}"]


def reason_line(course: Course, too_large: Sequence[tuple[Course, str]] | None) -> str:
    """Say why ``auto`` took a type, with what the former types lacked; empty where there was no choice."""
    if too_large is None:
        return ""
    why = "; ".join(f"in {name_of(way.frozen)} {lacking}" for way, lacking in too_large) or "they fit unrounded"
    return f"  frozen weights in {name_of(course.frozen)}: {why}"


MAX_WIDENED_BYTES: Final = 16 << 20
"""Limit of a widened matrix in bytes; a larger one is widened and multiplied by parts of this size."""

CHUNK: Final = 1 << 18
"""Numbers of 4 bits, or of blocks of GGUF, that are widened at once."""


def frozen_bytes(
    whole_bytes: int,
    *,
    params: int,
    rows: int,
    item_bytes: int,
    frozen: FrozenWeights | None,
    in_blocks: bool = True,
    gguf_bytes: int = 0,
) -> int:
    """Bytes of weights with their frozen matrices in a small type.

    Args:
        whole_bytes: of all these weights in the type of the computation.
        params: numbers in their frozen matrices.
        rows: of these matrices together; int8 has a scale for each.
        item_bytes: of a number in the type of the computation.
        frozen: the small type; None = none.
        in_blocks: whether the matrices are those of a block; others are in int8 with ``nf4``.
        gguf_bytes: of these matrices in the model's GGUF file.
    """
    if frozen is None:
        return whole_bytes
    match frozen.dtype:
        case "bfloat16":
            small_bytes = 2 * params
        case "gguf":
            small_bytes = gguf_bytes
        case "nf4" if in_blocks:
            blocks = -(-params // BLOCK)
            small_bytes = blocks * BLOCK // 2 + blocks + 4 * -(-blocks // GROUP)
        case _:
            small_bytes = params + 4 * rows
    return whole_bytes - params * item_bytes + small_bytes


def widened_bytes(largest_params: int, *, item_bytes: int, frozen: FrozenWeights | None) -> int:
    """Bytes of the buffer for the largest frozen matrix, widened; 0 where it is multiplied natively in bfloat16.

    Those of 4 bits and of GGUF need work space of a chunk besides: codes, and numbers in float32 that are then rounded.
    """
    if frozen is None or (frozen.native and frozen.dtype == BFLOAT16):
        return 0
    wide_bytes = min(MAX_WIDENED_BYTES, largest_params * (2 if frozen.native else item_bytes))
    chunk = min(CHUNK, largest_params) if frozen.dtype in (NF4, GGUF) else 0
    return wide_bytes + chunk // 2 * 4 + (chunk * 4 if frozen.native else 0)


TECHNIQUE: Final = Technique(
    name="frozen_weights",
    course_fields=("frozen",),
    check_job=check_job,
    courses=courses,
    smaller_settings=smaller_settings,
    check_plan=check_plan,
    timing_mismatch=timing_mismatch,
    course_lines=frozen_lines,
    notes=rough_times,
)
