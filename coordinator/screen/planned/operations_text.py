"""Write tables of operations as text: what each subnet does for each micro-batch of the first batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ringtune.quantities import format_bytes, format_seconds
from ringtune.schedule.operations.codes import pattern_of
from ringtune.schedule.operations.table import BatchOperations
from ringtune.schedule.plan import Plan
from ringtune.schedule.spreading.expected import expected_table

MOST_BATCHES = 2


def choice_lines(plan: Plan) -> list[str]:
    """Write in a line how a run gets its operations; nothing where everything is full."""
    course = plan.course
    if course.choice is None:
        batches = len(course.operations.batches) if course.operations else 0
        return [f"operations are given, for {batches} batches"] if course.operations is not None else []
    choice = course.choice
    if choice.tables:
        return [f"operations are given, {len(choice.tables)} tables, which follow each other"]
    what = f"{choice.subnets} subnets a block" if choice.subnets > 1 else "whole blocks"
    what = "whole slices" if choice.by_slice else what
    scores = " and ".join(choice.scores)
    by = f" by {scores}" if scores else ""
    anew = f", and anew every {choice.refresh_steps} steps" if choice.refresh_steps else ""
    return [f"operations of {what} are chosen by the policy {choice.policy}{by} before training{anew}"]


def operations_lines(plan: Plan, *, most_batches: int = MOST_BATCHES) -> list[str]:
    """Write the table of a plan with a legend: its first batches, and where it is only assumed.

    Example: ``1132 3333`` is a micro-batch that passes the second of two blocks of four subnets by.
    """
    course = plan.course
    if not course.may_skip:
        return []
    table = expected_table(course)
    assumed = ", assumed until the run has chosen" if course.operations is None else ""
    lines = [f"operations{assumed}: 1 full, 2 forward-only, 3 shortcut; a word for each block, a code for each subnet"]
    for entry in table.batches[:most_batches]:
        lines += _batch(entry, course.num_blocks, table.subnets)
    more = len(table.batches) - most_batches
    return [*lines, f"  and {more} more batches"] if more > 0 else lines


def saved_lines(operations: Mapping[str, Any] | None) -> list[str]:
    """Write what operations left to be done on each node, and what they saved; nothing where everything was full.

    Args:
        operations: of a run's report.
    """
    if not operations:
        return []
    width = max(len(node) for node in operations["nodes"])
    lines = ["operations of its train steps, as shares of all full:"]
    for node, shares in operations["nodes"].items():
        full, forward, skipped = (f"{shares[name]:.0%}" for name in ("full", "forward_only", "skipped"))
        lines.append(f"  {node:<{width}}  {full} full, {forward} forward-only, {skipped} skipped")
    lines += [f"  {name:<{width}}  {_shares(operations[name])}" for name in ("compute", "bytes")]
    scores = operations.get("scores") or {"batches": 0}
    if not scores["batches"]:
        return lines
    on_top = f"{format_seconds(scores['busy_s'])} and {format_bytes(scores['sent_bytes'])} on top"
    steps = f"{format_seconds(operations['compute']['busy_s'])} and {format_bytes(operations['bytes']['sent_bytes'])}"
    return [
        *lines,
        f"  {'scores':<{width}}  {on_top}, measured, for {scores['batches']} batches; the steps took {steps}",
    ]


def _shares(figures: Mapping[str, Any]) -> str:
    """Example: ``62 % measured, 61 % predicted, 60 % by the paper's count``."""
    words = {"measured": "measured", "predicted": "predicted", "paper": "by the paper's count"}
    known = [f"{figures[name]:.0%} {word}" for name, word in words.items() if figures.get(name) is not None]
    if "all_full_s" in figures and figures["all_full_s"] is None:
        known.insert(0, "not measured")
    return ", ".join(known) or "nothing to compare with"


def _batch(entry: BatchOperations, num_blocks: int, subnets: int) -> Iterator[str]:
    yield f"  owner {entry.owner}, batch {entry.batch_id}"
    for micro, row in enumerate(entry.rows):
        words = " ".join(pattern_of(row, block, subnets) for block in range(num_blocks))
        yield f"    micro-batch {micro}  {words}"
