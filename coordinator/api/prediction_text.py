"""A prediction, a what-if and a sweep as text, JSON, CSV, files and plots."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coordinator.api.output import Plot, require_plot_place
from coordinator.api.prediction_inputs import MeasuredRun, measured_json
from coordinator.planner.what_if import (
    JOB_KEYS,
    CellResult,
    PredictedPlan,
    course_differences,
    difference_text,
    is_same_work,
)
from coordinator.run.trace import TraceText
from coordinator.screen.tables import table_lines
from ringtune.costs.memory_sizes import gathers_scores
from ringtune.engine.events import Span
from ringtune.errors import RingTuneError, StorageError, UsageError
from ringtune.plan_keys import PLAN_KEYS
from ringtune.quantities import format_bytes, format_seconds, parse_bytes, parse_rate
from ringtune.schedule.plan import Plan
from ringtune.storage.durable import require_own, write_durably
from sim.prediction import Prediction
from sim.sweep import Axis

PREDICTION_FILE, TRACE_FILE = "prediction.json", "trace.json"


def share_text(share: float | None) -> str:
    """Return a share in percent: 0.375 is ``37.5 %``; None is an empty text."""
    return "" if share is None else f"{100 * share:.1f} %"


def prediction_lines(plan: Plan, predicted: Prediction, measured: MeasuredRun | None = None) -> list[str]:
    """Return a prediction as lines: the whole run, then tables of nodes, links and depths.

    ``measured`` are the times of a real run of ``plan``.
    """
    course = plan.course
    besides = "evaluations, checkpoints and scores" if gathers_scores(course) else "evaluations and checkpoints"
    times = len(plan.placements) - 1
    moves = f"{format_seconds(predicted.moves_s)} of {times} move{'s' * (times > 1)}, " if times else ""
    lines = [
        f"{course.method.name}, {course.num_blocks} blocks on {len(plan.nodes)} nodes, {predicted.num_steps} steps of "
        f"{course.batch_size} rows in {course.microbatches} micro-batches, digest {plan.digest[:12]}",
        f"predicted training {format_seconds(predicted.wall_s)}: {format_seconds(predicted.train_s)} of steps, {moves}"
        f"{format_seconds(predicted.evaluation_s)} of {besides}; "
        f"hosts idle {share_text(predicted.bubble_share)} of it; {predicted.num_actions:,} actions",
    ]
    if plan.course.decides:
        lines.append("the run decides itself when it unfreezes; predicted is a loss that never improves: the soonest")
    if gathers_scores(course):
        lines.append("the run chooses its operations by scores; predicted are as many of each kind, evenly spread")
    if measured is not None:
        if count := len(measured.stayed):
            lines.append(f"left out: {count} placement{'s' * (count > 1)} to which the run failed to move")
        real = measured_json(measured, predicted)
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
    return [*lines, "", *_nodes(predicted, measured), *_links(predicted, measured), *_depths(predicted)]


def _nodes(predicted: Prediction, measured: MeasuredRun | None) -> list[str]:
    wall_s = measured.recording.wall_s if measured is not None else 0.0
    titles = ["node", "blocks", "busy", *["measured"] * bool(wall_s), "idle", "needs", "has", "used", "held at once"]
    rows = [
        [
            node.node,
            node.blocks,
            share_text(node.busy_share),
            *([share_text(measured.recording.busy_s.get(node.node, 0.0) / wall_s)] if measured and wall_s else []),
            share_text(node.idle_share),
            format_bytes(node.needed_bytes),
            format_bytes(node.budget_bytes),
            share_text(node.needed_bytes / node.budget_bytes if node.budget_bytes else None),
            format_bytes(node.peak_memory_bytes),
        ]
        for node in predicted.nodes
    ]
    return table_lines(titles, rows, left=2)


def _links(predicted: Prediction, measured: MeasuredRun | None) -> list[str]:
    if not predicted.links:
        return []
    real = measured.sent_bytes if measured is not None else {}
    has_units = any(link.unit_gradient_bytes for link in predicted.links)
    rows = [
        [
            f"{link.source} > {link.target}",
            format_bytes(link.sent_bytes),
            *([format_bytes(real.get((link.source, link.target), 0))] if real else []),
            share_text(link.busy_share),
            *([format_bytes(link.unit_gradient_bytes)] if has_units else []),
        ]
        for link in predicted.links
    ]
    titles = ["link", "sent", *["measured"] * bool(real), "busy", *["of these unit gradients"] * has_units]
    return ["", *table_lines(titles, rows)]


def _depths(predicted: Prediction) -> list[str]:
    if not predicted.depths:
        return []
    rows = [
        [depth.trains or str(depth.depth), str(depth.steps), format_seconds(depth.step_s), format_seconds(depth.wall_s)]
        for depth in predicted.depths
    ]
    what = "trains" if predicted.depths[0].trains else "trained blocks"
    return ["", *table_lines([what, "steps", "per step", "in total"], rows)]


def check_out(folder: Path) -> None:
    """Refuse a folder with a ``trace.json`` that no prediction wrote; raises ``StorageError`` or ``UsageError``."""
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"--out {folder} is no folder; choose another")
    if (folder / TRACE_FILE).exists() and not (folder / PREDICTION_FILE).exists():
        raise UsageError(f"--out {folder} holds the trace of a real run; choose another")


def write_prediction(folder: Path, plan: Plan, predicted: Prediction, value: dict[str, Any]) -> None:
    """Write ``prediction.json``, and ``trace.json`` in the format of a real run.

    Raises ``StorageError``: no room; earlier files are unchanged.
    """
    text = TraceText(plan.nodes, num_blocks=plan.course.num_blocks, started_unix_s=0.0)
    pieces = [text.begin()]
    for node, action, start_s, end_s in predicted.spans:
        pieces.append(text.spans(node, [Span(action, start_s, end_s)]))
    write_durably(folder / PREDICTION_FILE, (json.dumps(value, indent=1) + "\n").encode())
    write_durably(folder / TRACE_FILE, ("".join(pieces) + text.end()).encode())


_NONE = "-"
_WORTH_SAYING = 0.02
_MAX_CHARACTERS = 1 << 16
_COLUMNS = ("wall_s", "ratio", "trained_rows", "rows_per_s", "bubble_share", "fullest_node", "fullest_share", "error")


def ratio(after_s: float | None, before_s: float) -> float | None:
    """Return after / before: 150 s after 100 s is 1.5; None without a time."""
    return after_s / before_s if after_s is not None and before_s else None


def comparison_lines(before: PredictedPlan, after: PredictedPlan) -> list[str]:
    """Return before, after and their ratio as lines, then every node's idle share and memory.

    If the two do different work their seconds have no ratio: the differences are named, and steps compared by depth.
    """
    first, other = before.prediction, after.prediction
    is_same = is_same_work(before, after)
    steps = [each.train_s / each.num_steps if each.num_steps else 0.0 for each in (first, other)]
    sent = [float(sum(link.sent_bytes for link in each.links)) for each in (first, other)]
    rows = [
        ["training", *_pair((first.wall_s, other.wall_s), format_seconds, is_same=is_same)],
        ["a step", *_pair(steps, format_seconds, is_same=is_same)],
        ["rows per second", *_pair((before.rows_per_s, after.rows_per_s), "{:.4g}".format)],
        ["hosts idle", share_text(first.bubble_share), share_text(other.bubble_share), ""],
        ["sent", *_pair(sent, format_bytes, is_same=is_same)],
    ]
    lines = [*table_lines(["", "before", "after", "ratio"], rows), *_differences(before, after, is_same=is_same)]
    lines += ["", *_compared_nodes(before, after)]
    lines += [after.note] if after.note else []
    return [*lines, f"left out: {', '.join(after.left_out)}"] if after.left_out else lines


def loss_lines(losses: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each loss of nodes at once, with what follows, and how often the run continues."""
    rows = []
    for row in losses:
        moves = f"after {format_seconds(row['seconds'])}" if row["seconds"] else "no blocks move"
        lasts = row["why"] if row["seconds"] is None else f"{moves}, {row['layout']}"
        waits = f"for {', '.join(row['awaited'])}, " if row["awaited"] else ""
        rows.append([", ".join(row["lost"]), row["outcome"], f"{waits}{lasts}"])
    good = sum(row["outcome"] != "ends" for row in losses)
    return [
        *table_lines(["lost at once", "the run", ""], rows, left=3),
        f"in {good} of {len(losses)} cases it goes on or waits; seconds are of the move, once the loss is noticed",
    ]


def _differences(before: PredictedPlan, after: PredictedPlan, *, is_same: bool) -> list[str]:
    differences = course_differences(before, after)
    lines = [f"after the change: {difference_text(differences)}"] if differences else []
    if is_same:
        return lines
    old, new = ({(each.depth, each.trains): each for each in plan.prediction.depths} for plan in (before, after))
    rows = [
        [
            trains or str(depth),
            *(str(each.steps) if each else _NONE for each in pair),
            *(format_seconds(each.step_s) if each else _NONE for each in pair),
            _times(pair[1].step_s, pair[0].step_s) if pair[0] and pair[1] else _NONE,
        ]
        for depth, trains in sorted(old | new)
        for pair in [(old.get((depth, trains)), new.get((depth, trains)))]
    ]
    what = "trains" if any(trains for _, trains in old | new) else "trained blocks"
    titles = [what, "steps", "after", "a step", "after", "ratio"]
    return [
        *lines,
        "the two do not do the same work: compare rows per second, or steps that train as many blocks",
        "",
        *table_lines(titles, rows),
    ]


def _pair(values: Sequence[float], text: Callable[[float], str], *, is_same: bool = True) -> list[str]:
    """Write the values before and after, and their ratio; none if they are not of the same work."""
    before, after = values
    return [text(before), text(after), _times(after, before) if is_same else _NONE]


def _times(after: float, before: float) -> str:
    return f"{after / before:.3f}" if before else _NONE


def _compared_nodes(before: PredictedPlan, after: PredictedPlan) -> list[str]:
    old = {node.node: node for node in before.prediction.nodes}
    new = {node.node: node for node in after.prediction.nodes}
    titles = ["node", "blocks", "after", "idle", "after", "needs", "after", "has"]
    rows = []
    for name in old | new:
        pair = (old.get(name), new.get(name))
        last = pair[1] or pair[0]
        rows.append(
            [
                name,
                *(node.blocks if node else _NONE for node in pair),
                *(share_text(node.idle_share) if node else _NONE for node in pair),
                *(format_bytes(node.needed_bytes) if node else _NONE for node in pair),
                format_bytes(last.budget_bytes) if last else _NONE,
            ]
        )
    return table_lines(titles, rows)


def comparison_json(before: PredictedPlan, after: PredictedPlan) -> dict[str, Any]:
    """Return before, after and the ratio of their seconds as a JSON object; no ratio if they do different work."""
    wall_s, is_same = (after.prediction.wall_s, before.prediction.wall_s), is_same_work(before, after)
    return {
        "before": before.to_json(),
        "after": after.to_json(),
        "same_work": is_same,
        "changed": {name: list(values) for name, values in course_differences(before, after).items()},
        "ratio": ratio(*wall_s) if is_same else None,
        "rows_per_s_ratio": ratio(after.rows_per_s, before.rows_per_s),
    }


def sweep_lines(axes: Sequence[Axis], before: PredictedPlan, cells: Sequence[CellResult]) -> list[str]:
    """Return the time before, then a table with a line for each cell."""
    titles = [*(axis.key for axis in axes), "training", "ratio", "rows/s", "idle", "fullest", ""]
    rows = []
    for cell in cells:
        if cell.wall_s is None:
            error = cell.error if len(cell.error) <= 60 else f"{cell.error[:57]}..."
            rows.append([*cell.values, *[_NONE] * 5, error])
            continue
        rows.append(
            [
                *cell.values,
                format_seconds(cell.wall_s),
                _times(cell.wall_s, before.prediction.wall_s) if cell.trained_rows == before.trained_rows else _NONE,
                f"{cell.rows_per_s:.4g}",
                share_text(cell.bubble_share),
                f"{cell.fullest_node} {share_text(cell.fullest_share)}",
                "",
            ]
        )
    lines = [f"training by the plan as it is: {format_seconds(before.prediction.wall_s)}", ""]
    lines += table_lines(titles, rows)
    if any(cell.wall_s is not None and cell.trained_rows != before.trained_rows for cell in cells):
        lines.append("no ratio where a cell trains another number of rows than the plan as it is: compare rows/s")
    return [*lines, *_faster(axes, before, cells)]


def _faster(axes: Sequence[Axis], before: PredictedPlan, cells: Sequence[CellResult]) -> list[str]:
    """Name the fastest cell that trains the same rows, and the job keys that set it.

    Empty if an axis is no key of a job, as a node's speed, or if less than 2 % is gained. Example: ``soonest:
    microbatches = 2, 0.660 of the time; set train.microbatches = 2``.
    """
    same = [cell for cell in cells if cell.wall_s is not None and cell.trained_rows == before.trained_rows]
    if not same or any(axis.key not in JOB_KEYS for axis in axes):
        return []
    best = min(same, key=lambda cell: cell.wall_s or math.inf)
    if best.wall_s is None or best.wall_s > before.prediction.wall_s * (1 - _WORTH_SAYING):
        return []
    values = [(axis.key, value) for axis, value in zip(axes, best.values, strict=True)]
    said = ", ".join(f"{key} = {value}" for key, value in values)
    keys = ", ".join(f"{JOB_KEYS[key]} = {value if PLAN_KEYS[key] is int else repr(value)}" for key, value in values)
    return [f"soonest: {said}, {_times(best.wall_s, before.prediction.wall_s)} of the time; set {keys}"]


def sweep_rows(axes: Sequence[Axis], before: PredictedPlan, cells: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Return a JSON object for each cell: the values of the axes, then its results."""
    rows = []
    for cell in cells:
        is_same = cell.trained_rows == before.trained_rows
        figures = {**asdict(cell), "ratio": ratio(cell.wall_s, before.prediction.wall_s) if is_same else None}
        axis_values = {axis.key: value for axis, value in zip(axes, cell.values, strict=True)}
        rows.append({**axis_values, **{name: figures[name] for name in _COLUMNS}})
    return rows


def require_sweep_place(path: Path) -> None:
    """Refuse a path that has anything but an earlier sweep, recognised by its titles; raises ``UsageError``."""
    require_own(path, "CSV file of a sweep that 'ringtune what-if' wrote", _is_sweep)


def _is_sweep(path: Path) -> bool:
    with path.open(encoding="utf-8") as file:
        return file.readline(_MAX_CHARACTERS).rstrip().endswith(",".join(("", *_COLUMNS)))


def sweep_csv(axes: Sequence[Axis], rows: Sequence[dict[str, Any]]) -> str:
    """Return the cells as CSV with a line of titles; missing figures are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*(axis.key for axis in axes), *_COLUMNS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


_INCHES = (8.0, 5.0)
_MAX_TICKS = 12
_UNITS = {
    "compute": "times as fast",
    "memory": "bytes",
    "rate": "bytes a second",
    "latency": "seconds",
    "microbatches": "parts of a step",
    "batch_size": "rows of a step",
    "num_steps": "steps",
    "local_iterations": "steps of a turn",
    "every_steps": "steps until one more block trains",
    "eval_every": "steps between evaluations",
    "checkpoint_every": "steps between checkpoints",
    "credits": "tensors in flight on a link",
}


def check_plot(path: Path) -> Any:
    """Load matplotlib and check the path of the plot, before anything is computed.

    Raises:
        UsageError: something else is there, or the name has another ending.
        RingTuneError: matplotlib is not installed.
    """
    require_plot_place(path)
    try:
        return importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise RingTuneError("--plot needs the package 'matplotlib'; pip install matplotlib") from error


def write_plot(path: Path, axes: Sequence[Axis], before_s: float, cells: Sequence[CellResult], *, title: str) -> None:
    """Draw a sweep: numbers as points on a line, categories as bars; cells without a time leave a gap.

    The first axis is the x-axis; ``before_s``, the training seconds of the unchanged plan, is a dashed line.
    """
    figure = check_plot(path).Figure(figsize=_INCHES, layout="constrained")
    plot = figure.subplots()
    first = axes[0]
    _draw(plot, first, _series(axes, cells))
    plot.axhline(before_s, color="grey", linestyle="--", label="as it is")
    plot.set_title(title)
    plot.set_xlabel(axis_label(first.key))
    plot.set_ylabel("predicted training (seconds)")
    plot.set_ylim(bottom=0)
    plot.legend()
    Plot(figure, title).save(path)


def _series(axes: Sequence[Axis], cells: Sequence[CellResult]) -> dict[str, list[float]]:
    """Return label of the other axes' values -> heights over the first axis; NaN without a time."""
    curves: dict[str, dict[str, float]] = {}
    for cell in cells:
        others = zip(axes[1:], cell.values[1:], strict=True)
        label = ", ".join(f"{axis.key} = {value}" for axis, value in others) or "what if"
        curves.setdefault(label, {})[cell.values[0]] = math.nan if cell.wall_s is None else cell.wall_s
    return {label: [line.get(value, math.nan) for value in axes[0].values] for label, line in curves.items()}


def _draw(plot: Any, axis: Axis, series: Mapping[str, Sequence[float]]) -> None:
    """Draw every series, with ticks at the values themselves unless there are too many."""
    numbers = _numbers(axis.values)
    if numbers is None:
        width = 0.8 / max(1, len(series))
        for index, (label, heights) in enumerate(series.items()):
            shift = (index - (len(series) - 1) / 2) * width
            plot.bar([place + shift for place in range(len(heights))], heights, width=width, label=label)
        plot.set_xticks(range(len(axis.values)), axis.values)
        return
    for label, heights in series.items():
        plot.plot(numbers, heights, marker="o", label=label)
    if len(numbers) <= _MAX_TICKS:
        plot.set_xticks(numbers, axis.values)
    elif all(number.is_integer() for number in numbers):
        plot.xaxis.set_major_locator(importlib.import_module("matplotlib.ticker").MaxNLocator(integer=True))


def axis_label(key: str) -> str:
    """Return a key with its unit: ``microbatches (parts of a step)``, ``bob.compute (times as fast)``."""
    unit = _UNITS.get(key.rpartition(".")[2], "")
    return f"{key} ({unit})" if unit else key


def _numbers(values: Sequence[str]) -> list[float] | None:
    """Return the values as numbers, sizes as bytes; None if they are categories, as ``float32`` and ``int8``."""
    for read in (float, lambda text: float(parse_bytes(text)), parse_rate):
        with contextlib.suppress(ValueError, UsageError):
            return [read(value) for value in values]
    return None
