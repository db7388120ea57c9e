"""Text about training: rows, epochs and turns, and what techniques add."""

from __future__ import annotations

import functools

from coordinator.run.run_text import training_facts
from ringtune.costs.offload_costs import step_traffic
from ringtune.costs.profile import NodeFacts
from ringtune.schedule.course import Course
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import BY_ROWS
from ringtune.techniques import TECHNIQUES
from ringtune.texts import counted, listed

_MAX_OWNERS = 8
_MAX_CLASSES = 8
_LONGEST_NAME = 30


def training_lines(course: Course) -> list[str]:
    """Describe rows, epochs and turns of a course, with warnings; empty for a course without steps."""
    if not course.num_steps:
        return []
    facts, row = training_facts(course), "sequence" if course.packed else "row"
    how = f"turns of {counted(course.local_iterations, 'step')}, {'by rows' if course.turns == BY_ROWS else 'equal'}"
    lines = [
        f"trains {counted(facts['steps'], 'step')} in {counted(facts['rounds'], 'round')} ({how}): "
        f"{facts['used_rows']:,} of {facts['rows']:,} {row}s ({facts['used_share']:.0%}), {facts['epochs']:.3g} epochs"
    ]
    owners = list(facts["owners"].items())
    width = max(len(name) for name, _ in owners)
    for name, counts in owners[:_MAX_OWNERS]:
        times = _times(counts["least_times"], counts["most_times"])
        lines.append(
            f"  {name:<{width}}  {counted(counts['steps'], 'step')} of {counted(counts['rows_of_batch'], row)}: "
            f"{counts['used_rows']:,} of its {counts['rows']:,} {row}s{times}"
        )
    if len(owners) > _MAX_OWNERS:
        epochs = [counts["epochs"] for _, counts in owners[_MAX_OWNERS:]]
        lines.append(f"  and {counted(len(epochs), 'more owner')}, {min(epochs):.3g} to {max(epochs):.3g} epochs each")
    if course.labels:
        lines.append(f"{len(course.labels)} classes: {_classes(course.labels)}")
    lines += [line for technique in TECHNIQUES for line in technique.course_lines(course)]
    return [*lines, *(f"note: {text}" for text in facts["notes"])]


def _times(least: int, most: int) -> str:
    """Say how often each used row is used."""
    least = max(1, least)
    if most <= 1:
        return ", each once" if most else ""
    return f", each {most} times" if least == most else f", each {least} to {most} times"


def _classes(labels: tuple[str, ...]) -> str:
    """List the first names; those with spaces at an end or invisible characters in quotes."""
    shown = [label if label == label.strip() and label.isprintable() and label else repr(label) for label in labels]
    cut = [name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…" for name in shown]
    return listed(cut, _MAX_CLASSES)


def helper_lines(plan: Plan, facts: NodeFacts | None = None) -> list[str]:
    """Describe what techniques do at other nodes than hosts and owners; ``facts`` of any node add the bytes."""
    traffic = functools.partial(step_traffic, plan, facts=facts) if facts is not None else None
    kinds = facts.model.kinds if facts is not None else ()
    return [line for technique in TECHNIQUES for line in technique.helper_lines(plan, traffic, kinds)]


def run_lines(plan: Plan) -> list[str]:
    """Describe the training of a run and its helpers, for a screen beside the nodes."""
    return [*training_lines(plan.course), *helper_lines(plan)]
