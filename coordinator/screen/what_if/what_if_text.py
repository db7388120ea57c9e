"""Write the comparison of a what-if and the cells of a sweep as text, JSON and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from coordinator.screen.prediction_text import share_text
from coordinator.screen.text_table import table_lines
from coordinator.what_if.differences import course_differences, difference_text, is_same_work
from coordinator.what_if.what_if import JOB_KEYS, CellResult, PredictedPlan
from ringtune.plan_keys import PLAN_KEYS
from ringtune.quantities import format_bytes, format_seconds
from sim.prediction import NodePrediction
from sim.what_ifs.sweep import Axis

_NONE = "-"
_WORTH_SAYING = 0.02
_COLUMNS = ("wall_s", "ratio", "trained_rows", "rows_per_s", "bubble_share", "fullest_node", "fullest_share", "error")


def ratio(after_s: float | None, before_s: float) -> float | None:
    """Ratio of the time after to the time before: 150 s after 100 s is 1.5; None without a time."""
    return after_s / before_s if after_s is not None and before_s else None


def comparison_lines(before: PredictedPlan, after: PredictedPlan) -> list[str]:
    """Write before, after and their ratio as lines for people, then every node's idle share and memory.

    Where they do other work, their seconds have no ratio: what differs is said, and steps are compared by depth.
    """
    one, other = before.prediction, after.prediction
    is_same = is_same_work(before, after)
    steps = [found.train_s / found.num_steps if found.num_steps else 0.0 for found in (one, other)]
    sent = [float(sum(link.sent_bytes for link in found.links)) for found in (one, other)]
    rows = [
        [
            "training",
            format_seconds(one.wall_s),
            format_seconds(other.wall_s),
            _times(other.wall_s, one.wall_s) if is_same else _NONE,
        ],
        ["a step", *map(format_seconds, steps), _times(steps[1], steps[0]) if is_same else _NONE],
        ["rows per second", *(f"{each.rows_per_s:.4g}" for each in (before, after)), _per_second(before, after)],
        ["hosts idle", share_text(one.bubble_share), share_text(other.bubble_share), ""],
        ["sent", format_bytes(sent[0]), format_bytes(sent[1]), _times(sent[1], sent[0]) if is_same else _NONE],
    ]
    lines = [*table_lines(["", "before", "after", "ratio"], rows), *_differences(before, after, is_same=is_same)]
    lines += ["", *_nodes(before, after)]
    lines += [after.note] if after.note else []
    return [*lines, f"left out: {', '.join(after.left_out)}"] if after.left_out else lines


def _differences(before: PredictedPlan, after: PredictedPlan, *, is_same: bool) -> list[str]:
    differences = course_differences(before, after)
    lines = [f"after the change: {difference_text(differences)}"] if differences else []
    if is_same:
        return lines
    old, new = ({(each.depth, each.trains): each for each in found.prediction.depths} for found in (before, after))
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
    titles = [
        "trains" if any(trains for _, trains in old | new) else "trained blocks",
        "steps",
        "after",
        "a step",
        "after",
        "ratio",
    ]
    return [
        *lines,
        "the two do not do the same work: compare rows per second, or steps that train as many blocks",
        "",
        *table_lines(titles, rows),
    ]


def _times(after: float, before: float) -> str:
    return f"{after / before:.3f}" if before else _NONE


def _per_second(before: PredictedPlan, after: PredictedPlan) -> str:
    return _times(after.rows_per_s, before.rows_per_s)


def _nodes(before: PredictedPlan, after: PredictedPlan) -> list[str]:
    old = {node.node: node for node in before.prediction.nodes}
    new = {node.node: node for node in after.prediction.nodes}
    titles = ["node", "blocks", "after", "idle", "after", "needs", "after", "has"]
    rows = []
    for name in [*old, *(name for name in new if name not in old)]:
        pair = (old.get(name), new.get(name))
        last = pair[1] or pair[0]
        rows.append(
            [
                name,
                *(_blocks(node) for node in pair),
                *(share_text(node.idle_share) if node else _NONE for node in pair),
                *(format_bytes(node.needed_bytes) if node else _NONE for node in pair),
                format_bytes(last.budget_bytes) if last else _NONE,
            ]
        )
    return table_lines(titles, rows)


def _blocks(node: NodePrediction | None) -> str:
    return _NONE if node is None else node.blocks


def comparison_json(before: PredictedPlan, after: PredictedPlan) -> dict[str, Any]:
    """Return before, after and the ratio of their seconds as a JSON object; no ratio where they do other work."""
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
    """Write the time before, then a table with a line for each cell."""
    titles = [*(axis.key for axis in axes), "training", "ratio", "rows/s", "idle", "fullest", ""]
    rows = []
    for cell in cells:
        if cell.wall_s is None:
            rows.append([*cell.values, *[_NONE] * 5, _short(cell.error)])
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
    """Name the cell that trains the same rows soonest, and how a job asks for it.

    Nothing where an axis is no key of a job, as a node's speed is no choice, or where less than 2 % is gained.

    Example: ``soonest: microbatches = 2, 0.660 of the time; set train.microbatches = 2``.
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


def _short(error: str) -> str:
    return error if len(error) <= 60 else f"{error[:57]}..."


def sweep_rows(axes: Sequence[Axis], before: PredictedPlan, cells: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Return a JSON object for each cell: the values of the axes, then its results."""
    found = []
    for cell in cells:
        is_same = cell.trained_rows == before.trained_rows
        figures = {**asdict(cell), "ratio": ratio(cell.wall_s, before.prediction.wall_s) if is_same else None}
        axis_values = {axis.key: value for axis, value in zip(axes, cell.values, strict=True)}
        found.append({**axis_values, **{name: figures[name] for name in _COLUMNS}})
    return found


def sweep_csv(axes: Sequence[Axis], rows: Sequence[dict[str, Any]]) -> str:
    """Write the cells as CSV with a line of titles; a figure that a cell lacks is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*(axis.key for axis in axes), *_COLUMNS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
