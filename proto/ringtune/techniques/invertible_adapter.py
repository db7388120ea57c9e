"""An invertible adapter at the embedding (``inv_adapter`` of a bottleneck): who has it, and when it trains.

It is computed after the embedding, and its inverse before a language model's decoder, so every owner has it. It trains
as the unit below block 0, at the steps that train block 0: before, no gradient gets there, and it is applied with the
values with which it began. Where micro-batches pass blocks by, it trains in all that take part: gradients pass
forward-only and skipped blocks unchanged. At the end of a turn it goes to the next owner with the head::

    step          0 1 2 3 | 4 5 6 7        ringada, two blocks, one more from step 4 on
    head          0 1 2 3 | 4 5 6 7        updates before the step
    block 0       0 0 0 0 | 0 1 2 3
    embedding     0 0 0 0 | 0 1 2 3        an embedding with a graph waits for the head of its turn

Source: MAD-X, section 2.2.3; adapters 1.3.0, ``InvertibleAdaptersMixin`` and ``CausalLMHead``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ringtune.errors import JobError, PlanError
from ringtune.models.adapter_config import invertible_of
from ringtune.models.family import Dimensions, Family
from ringtune.schedule.course import Course
from ringtune.schedule.units import EMBEDDING
from ringtune.schedule.versions import ever_trained
from ringtune.techniques.base import Technique, Term


def check_family(adapter_config: str, family: Family, dimensions: Dimensions) -> None:
    """Refuse an invertible adapter for a family without one in the library; raises ``JobError``."""
    if invertible_of(adapter_config) is not None and (family.plugged or dimensions.fixed):
        raise JobError(
            f"adapter.config = {adapter_config!r}: AdapterHub has no invertible adapters for {family.model_type}; "
            "leave inv_adapter out, as in seq_bn"
        )


def courses(job: Any, course: Course, nodes: Sequence[Any]) -> tuple[Course]:
    """Return the course, with the invertible adapter if the job has one; raises ``JobError``."""
    if invertible_of(job.adapter.config) is None:
        return (course,)
    try:
        return (dataclasses.replace(course, invertible=True),)
    except PlanError as error:
        raise JobError(f"adapter.config = {job.adapter.config!r} has an invertible adapter: {error}") from error


def course_lines(course: Course) -> list[str]:
    """Say when the invertible adapter trains; nothing without one."""
    if not course.invertible or not course.num_steps:
        return []
    trains = EMBEDDING in ever_trained(course)
    return [f"invertible adapter at the embedding: {'trains while block 0 does' if trains else 'never trains'}"]


def memory_terms(course: Course, share: Any, sizes: Any) -> Iterator[Term]:
    """Yield the terms of an owner; the inverse before a decoder has a gradient and a graph of its own."""
    if not (share.is_owner and course.invertible):
        return
    trains, micro = EMBEDDING in ever_trained(course), course.microbatch_sizes()
    trained, state = sizes.trained_bytes(EMBEDDING), sizes.state_bytes(EMBEDDING) if trains else 0
    yield Term("head", "invertible adapter with gradients and moments", 1, (3 if trains else 1) * trained + state)
    graph = round(sizes.invertible_bytes(micro[0] * course.max_length))
    yield Term("activations", "graph of the invertible adapter", len(micro) + 1 if trains else 1, graph)


TECHNIQUE: Final = Technique(
    name="invertible_adapter", courses=courses, course_lines=course_lines, memory_terms=memory_terms
)
