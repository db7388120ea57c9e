"""Say how a run trains all parameters: its groups and sweeps, and what owners tell each other by their gradients."""

from __future__ import annotations

from collections.abc import Mapping

from ringtune.costs.memory.terms import MemoryEstimate
from ringtune.quantities import format_bytes
from ringtune.schedule.course import Course
from ringtune.schedule.turns.versions import ever_trained
from ringtune.schedule.units import EMBEDDING, unit_name, units_text

_MOST_GROUPS = 8
_EMBEDDING_TELLS = "with texts, the embedding's which tokens it had and, of learned positions, where they stood"
_HEAD_TELLS = "the head's about how many rows of each class"


def groups_lines(course: Course, memory: Mapping[str, MemoryEstimate]) -> list[str]:
    """Describe groups, sweeps and gradients of copies; nothing of a run whose blocks have adapters.

    Args:
        course: of the run.
        memory: what each node holds at most, gradients on their way among it.
    """
    if not course.method.full_parameters or not course.num_steps:
        return []
    period = course.method.period(course)
    kinds = [course.method.trained(course, step) for step in range(period)]
    shown = " | ".join(units_text(units) for units in kinds[:_MOST_GROUPS])
    more = f" | and {period - _MOST_GROUPS} more" if period > _MOST_GROUPS else ""
    rate = course.method.rate_at(course, course.num_steps - 1)[1]
    lines = [
        f"trains all parameters, one group a step: {shown}{more}",
        f"a sweep over all groups is {_counted(period, 'step')}; the run has {_counted(rate, 'sweep')}, and the "
        "learning rate advances once a sweep",
    ]
    return [*lines, *_copies_lines(course, memory)]


def _copies_lines(course: Course, memory: Mapping[str, MemoryEstimate]) -> list[str]:
    """Say what goes from each initiator to the other owners, who have copies of embedding and head."""
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


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
