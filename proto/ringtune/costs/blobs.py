"""The largest message that a link takes, and which heads and gradients of units a run would send that are larger.

A head is handed over with its optimizer state; where all parameters train, gradients of embedding and head go to the
other owners. Their sizes follow from course and model, so that a run which could not send them is refused in planning.
"""

from __future__ import annotations

from typing import Final

from ringtune.costs.memory.sizes import Sizes
from ringtune.errors import PlanError
from ringtune.quantities import format_bytes
from ringtune.schedule.course import Course
from ringtune.schedule.units import EMBEDDING
from ringtune.schedule.versions import ever_trained

MAX_BLOB_BYTES: Final = 1 << 30
"""Bytes of the largest head with its moments, gradient of a unit, or probe, that is admitted."""


def check_blobs(course: Course, sizes: Sizes) -> None:
    """Refuse a course that would send something larger than a link takes.

    Example: the whole table of 262,144 tokens of width 1,152 is 1.13 GiB, which a tied model sends with each update.

    Raises:
        PlanError: names it, both numbers, and what can be done.
    """
    if len(course.owners) < 2 or not course.num_steps:
        return
    if not course.method.full_parameters:
        smaller = "set train.optimizer = 'sgd', which keeps no state, or " if sizes.head_bytes <= MAX_BLOB_BYTES else ""
        _check("head with its optimizer state", sizes.head_bytes + sizes.head_state_bytes, smaller)
        return
    reach = ever_trained(course)
    if course.head in reach:
        _check("gradient of the head", sizes.unit_grad_bytes(course.head), "")
    if EMBEDDING in reach:
        smaller = "" if sizes.is_tied else "lower train.batch_size or train.max_length, or "
        what = "gradient of the embedding, a table tied to the head," if sizes.is_tied else "gradient of the embedding"
        _check(what, sizes.unit_grad_bytes(EMBEDDING), smaller)


def _check(what: str, num_bytes: int, remedy: str) -> None:
    if num_bytes > MAX_BLOB_BYTES:
        raise PlanError(
            f"the {what} has up to {format_bytes(num_bytes)}, a message between owners at most "
            f"{format_bytes(MAX_BLOB_BYTES)}; {remedy}give one node all rows (data.owners = 1, or --data at one node)"
        )
