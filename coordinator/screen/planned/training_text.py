"""Say before a run starts what it trains on, and how much: a line for the run, one for each owner, one of classes."""

from __future__ import annotations

from coordinator.planner.fitting.frozen import frozen_line
from coordinator.records.training_facts import training_facts
from ringtune.schedule.course import Course
from ringtune.schedule.owner_turns import BY_ROWS

_MOST_OWNERS = 8
_MOST_CLASSES = 8
_LONGEST_NAME = 30


def training_lines(course: Course) -> list[str]:
    """Describe what is trained on, how often, and what a person may not expect; nothing of a course of no steps."""
    if not course.num_steps:
        return []
    facts = training_facts(course)
    how = f"turns of {_counted(course.local_iterations, 'step')}, {'by rows' if course.turns == BY_ROWS else 'equal'}"
    lines = [
        f"trains {_counted(facts['steps'], 'step')} in {_counted(facts['rounds'], 'round')} ({how}): "
        f"{facts['used_rows']:,} of {facts['rows']:,} rows ({facts['used_share']:.0%}), {facts['epochs']:.3g} epochs"
    ]
    owners = list(facts["owners"].items())
    width = max(len(name) for name, _ in owners)
    for name, own in owners[:_MOST_OWNERS]:
        times = _times(own["least_times"], own["most_times"])
        lines.append(
            f"  {name:<{width}}  {_counted(own['steps'], 'step')} of {_counted(own['rows_of_batch'], 'row')}: "
            f"{own['used_rows']:,} of its {own['rows']:,} rows{times}"
        )
    if len(owners) > _MOST_OWNERS:
        epochs = [own["epochs"] for _, own in owners[_MOST_OWNERS:]]
        lines.append(f"  and {len(epochs)} more owners, {min(epochs):.3g} to {max(epochs):.3g} epochs each")
    if course.labels:
        lines.append(f"{len(course.labels)} classes: {_classes(course.labels)}")
    lines += [line] if (line := frozen_line(course.frozen)) else []
    return [*lines, *(f"note: {text}" for text in facts["notes"])]


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _times(least: int, most: int) -> str:
    """Say how often each row is used that is used at all."""
    least = max(1, least)
    if most <= 1:
        return ", each once" if most else ""
    return f", each {most} times" if least == most else f", each {least} to {most} times"


def _classes(labels: tuple[str, ...]) -> str:
    """List the first names; those with spaces at an end, or none to see, in quotes."""
    shown = [label if label == label.strip() and label.isprintable() and label else repr(label) for label in labels]
    cut = [name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…" for name in shown[:_MOST_CLASSES]]
    return ", ".join(cut) + (f" and {len(shown) - _MOST_CLASSES} more" if len(shown) > _MOST_CLASSES else "")
