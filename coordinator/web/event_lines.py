"""Lines of the page's list of events: who joined, was lost or moved, what was saved, and how the run ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from coordinator.records.evaluation_text import figures_text
from coordinator.records.step_lines import placement_number, shown
from ringtune.quantities import format_seconds


class EventLine(NamedTuple):
    """One line.

    Attributes:
        kind: joined, lost, move, checkpoint, unfreeze, evaluation, note, phase, failed or done.
        text: for people.
        at_unix_s: when it was heard; None = not known.
    """

    kind: str
    text: str
    at_unix_s: float | None = None


def metrics_event(line: Mapping[str, Any]) -> EventLine | None:
    """Write the line of an entry of ``metrics.jsonl``; None for steps, and for what is no event."""
    match line.get("kind"):
        case "unfreeze":
            return EventLine("unfreeze", f"from step {shown(int(line['step']))} on {line['depth']} blocks train")
        case "evaluation":
            best = " (the best so far)" if line.get("is_best") else ""
            told = figures_text(line) if line.get("count") else "no rows"
            return EventLine("evaluation", f"evaluated after step {line['step']}: {told}{best}")
        case "stop":
            told = f"ends early after step {line['step']}: no better loss since step {line.get('best_step')}"
            return EventLine("note", told)
        case "move":
            return EventLine("move", _move(line))
        case "replan":
            return EventLine("move", f"another placement is better from step {shown(int(line['step']))} on")
        case "recovery":
            return EventLine("lost" if line.get("lost") else "move", _recovery(line))
        case "operations":
            return EventLine("note", f"another operation table holds from step {shown(int(line['step']))} on")
    return None


def _move(line: Mapping[str, Any]) -> str:
    if problem := line.get("problem"):
        return f"stays on placement {placement_number(line)} after step {line['step']}: {problem}"
    return f"moved to placement {line.get('to')} after step {line['step']}, in {format_seconds(float(line['seconds']))}"


def _recovery(line: Mapping[str, Any]) -> str:
    lost = ", ".join(map(str, line.get("lost", ())))
    back = f"goes on from step {line['step']}, after {format_seconds(float(line['seconds']))}"
    if there := ", ".join(map(str, line.get("back", ()))):
        return f"node {lost} was lost, and {there} is back; the run {back}"
    if lost:
        return f"node {lost} is lost; the run {back}"
    return f"step {line.get('bad_step')} was not finite; the run {back}"
