"""Write a predicted run as text, as JSON, and as the files of ``ringtune sim --out``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coordinator.records.trace_file import TraceText
from coordinator.screen.text_table import table_lines
from coordinator.what_if.prediction_inputs import MeasuredRun, measured_json
from ringtune.costs.memory.operations import gathers_scores
from ringtune.engine.spans import Span
from ringtune.errors import StorageError, UsageError
from ringtune.files.durable import write_durably
from ringtune.quantities import format_bytes, format_seconds
from ringtune.schedule.plan import Plan
from sim.prediction import Prediction

PREDICTION_FILE, TRACE_FILE = "prediction.json", "trace.json"


def share_text(share: float | None) -> str:
    """Write a share in percent: 0.375 is ``37.5 %``; None is an empty text."""
    return "" if share is None else f"{100 * share:.1f} %"


def prediction_lines(plan: Plan, found: Prediction, measured: MeasuredRun | None = None) -> list[str]:
    """Write a prediction as lines for people: the whole run, then tables of nodes, links and depths.

    Args:
        plan: that was predicted.
        found: the prediction.
        measured: what a real run of it took.
    """
    course = plan.course
    besides = "evaluations, checkpoints and scores" if gathers_scores(course) else "evaluations and checkpoints"
    times = len(plan.placements) - 1
    moves = f"{format_seconds(found.moves_s)} of {times} move{'s' * (times > 1)}, " if times else ""
    lines = [
        f"{course.method.name}, {course.num_blocks} blocks on {len(plan.nodes)} nodes, {found.num_steps} steps of "
        f"{course.batch_size} rows in {course.microbatches} micro-batches, digest {plan.digest[:12]}",
        f"predicted training {format_seconds(found.wall_s)}: {format_seconds(found.train_s)} of steps, {moves}"
        f"{format_seconds(found.evaluation_s)} of {besides}; "
        f"hosts idle {share_text(found.bubble_share)} of it; {found.num_actions:,} actions",
    ]
    if plan.course.decides:
        lines.append("the run decides itself when it unfreezes; predicted is a loss that never improves: the soonest")
    if gathers_scores(course):
        lines.append("the run chooses its operations by scores; predicted are as many of each kind, evenly spread")
    if measured is not None:
        if measured.stayed:
            placements = f"{len(measured.stayed)} placement{'s' * (len(measured.stayed) > 1)}"
            lines.append(f"left out: {placements} to which the run failed to move")
        real = measured_json(measured, found)
        again = f" (resumed, {real['steps']} steps)" if measured.start else ""
        parts = "" if real["steps_s"] is None else f": {format_seconds(real['steps_s'])} of steps"
        errors = [
            f"{100 * share:+.1f} %{of}"
            for share, of in ((real["error_share"], ""), (real["steps_error_share"], " of the steps"))
            if share is not None
        ]
        off = f"; the prediction is off by {', '.join(errors)}" if errors else ""
        lines.append(f"measured training {format_seconds(real['wall_s'])}{parts}{again}{off}")
        lines.append("(training: from the first action to the last one, without joining, measuring and collecting)")
    return [*lines, "", *_nodes(found, measured), *_links(found, measured), *_depths(found)]


def _nodes(found: Prediction, measured: MeasuredRun | None) -> list[str]:
    titles = ["node", "blocks", "busy", "idle", "needs", "has", "used", "held at once"]
    rows = [
        [
            node.node,
            node.blocks,
            share_text(node.busy_share),
            share_text(node.idle_share),
            format_bytes(node.needed_bytes),
            format_bytes(node.budget_bytes),
            share_text(node.needed_bytes / node.budget_bytes if node.budget_bytes else None),
            format_bytes(node.peak_memory_bytes),
        ]
        for node in found.nodes
    ]
    if measured is not None and measured.recording.wall_s:
        titles.insert(3, "measured")
        for row in rows:
            row.insert(3, share_text(measured.recording.busy_s.get(row[0], 0.0) / measured.recording.wall_s))
    return table_lines(titles, rows, left=2)


def _links(found: Prediction, measured: MeasuredRun | None) -> list[str]:
    if not found.links:
        return []
    titles = ["link", "sent", "busy"]
    rows = [
        [f"{link.source} > {link.target}", format_bytes(link.sent_bytes), share_text(link.busy_share)]
        for link in found.links
    ]
    if any(link.unit_gradient_bytes for link in found.links):
        titles.append("of these unit gradients")
        for row, link in zip(rows, found.links, strict=True):
            row.append(format_bytes(link.unit_gradient_bytes))
    if measured is not None and measured.sent_bytes:
        titles.insert(2, "measured")
        for row, link in zip(rows, found.links, strict=True):
            row.insert(2, format_bytes(measured.sent_bytes.get((link.source, link.target), 0)))
    return ["", *table_lines(titles, rows)]


def _depths(found: Prediction) -> list[str]:
    if not found.depths:
        return []
    rows = [
        [depth.trains or str(depth.depth), str(depth.steps), format_seconds(depth.step_s), format_seconds(depth.wall_s)]
        for depth in found.depths
    ]
    return [
        "",
        *table_lines(["trains" if found.depths[0].trains else "trained blocks", "steps", "per step", "in total"], rows),
    ]


def prediction_json(plan: Plan, found: Prediction, measured: MeasuredRun | None = None) -> dict[str, Any]:
    """Return a prediction as a JSON object, with ``measured`` if there is a real run."""
    value: dict[str, Any] = {"plan_digest": plan.digest, "method": plan.course.method.name, **found.to_json()}
    if measured is not None:
        value["measured"] = measured_json(measured, found)
    return value


def check_out(folder: Path) -> None:
    """Refuse a folder whose ``trace.json`` was not written by a prediction.

    Raises:
        StorageError: ``folder`` is no folder.
        UsageError: it holds a real run.
    """
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"--out {folder} is no folder; choose another")
    if (folder / TRACE_FILE).exists() and not (folder / PREDICTION_FILE).exists():
        raise UsageError(f"--out {folder} holds the trace of a real run; choose another")


def write_prediction(folder: Path, plan: Plan, found: Prediction, value: dict[str, Any]) -> None:
    """Write ``prediction.json``, and ``trace.json`` in the form of a real run's.

    Raises:
        StorageError: no room; what was there before still is.
    """
    text = TraceText(plan.nodes, num_blocks=plan.course.num_blocks, started_unix_s=0.0)
    pieces = [text.begin()]
    for node, action, start_s, end_s in found.spans:
        pieces.append(text.spans(node, [Span(action, start_s, end_s)]))
    write_durably(folder / PREDICTION_FILE, (json.dumps(value, indent=1) + "\n").encode())
    write_durably(folder / TRACE_FILE, ("".join(pieces) + text.end()).encode())
