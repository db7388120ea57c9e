"""Products of blocks in bfloat16: ``train.compute`` of a job.

Each matrix product of a block rounds its factors to bfloat16, sums in float32, and rounds its result: in frozen and
trained matrices, adapters and attention, forward and backward. Weights that train, gradients that are added up,
moments, norms and the hidden state between blocks stay float32. Frozen matrices are held in bfloat16, unless
``runtime.frozen`` says a smaller type, and multiplied natively.

Results are equal for any split, as every node rounds alike, but differ from float32's by rounding. So do products of
subnets, of VeLoRA, whose projections are in bfloat16, too, its vectors in float32, and those of helpers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Final

from ringtune.errors import JobError
from ringtune.schedule.course import AS_COMPUTED, BFLOAT16, Course
from ringtune.schedule.plan import Plan
from ringtune.techniques.base import Technique


def is_rounded(job: Any) -> bool:
    """Whether products of blocks are in bfloat16."""
    return job.train.compute == BFLOAT16  # type: ignore[no-any-return]


def check_job(job: Any) -> None:
    """Refuse products in bfloat16 of a model in float64; raises ``JobError``."""
    if is_rounded(job) and job.model.dtype != AS_COMPUTED:
        raise JobError(
            f"train.compute = 'bfloat16' rounds products, which model.dtype = {job.model.dtype!r} wants exact; remove "
            "one of them"
        )


def courses(job: Any, course: Course, nodes: Sequence[Any]) -> tuple[Course]:
    """Return the course with the job's products."""
    return (dataclasses.replace(course, compute=BFLOAT16) if is_rounded(job) else course,)


def timing_mismatch(course: Course, node: Any) -> str:
    """Say that a node was timed with other products; empty if it was not."""
    timed = node.shape.compute
    return "" if timed == course.compute else f"products in {timed}, the run has them in {course.compute}"


def course_lines(course: Course) -> list[str]:
    """Describe the products; nothing for float32."""
    return [] if course.compute == AS_COMPUTED else [f"products of blocks in {course.compute}, sums in float32"]


def slow_nodes(plan: Plan, nodes: Iterable[Any]) -> list[str]:
    """Warn of nodes that multiply bfloat16 slower than float32."""
    slow = sorted(node.node for node in nodes if not node.fast_bfloat16)
    if plan.course.compute == AS_COMPUTED or not slow:
        return []
    return [
        f"train.compute = 'bfloat16': {', '.join(slow)} has no fast products of it, so they may take longer than in "
        "float32"
    ]


TECHNIQUE: Final = Technique(
    name="compute",
    later_keys={"train.compute": None},
    check_job=check_job,
    courses=courses,
    timing_mismatch=timing_mismatch,
    course_lines=course_lines,
    notes=slow_nodes,
)
