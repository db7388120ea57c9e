"""Draw a sweep: seconds of training over the first axis, a line or bars for each combination of the others."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.what_if.what_if import CellResult
from ringtune.errors import RingTuneError, UsageError
from ringtune.files.durable import write_durably
from ringtune.quantities import parse_bytes, parse_rate
from sim.what_ifs.sweep import Axis

FORMATS = (".png", ".svg")
_INCHES = (8.0, 5.0)
_DPI = 120
_MOST_TICKS = 12
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
    """Load the plotting library and check the picture's name, before anything is computed.

    Raises:
        UsageError: the name has another ending.
        RingTuneError: matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot {path} has to end in {' or '.join(FORMATS)}")
    try:
        return importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise RingTuneError("--plot needs the package 'matplotlib'; pip install matplotlib") from error


def write_plot(path: Path, axes: Sequence[Axis], before_s: float, cells: Sequence[CellResult], *, title: str) -> None:
    """Draw a sweep: numbers as points on a line, categories as bars side by side; cells without a time leave a gap.

    Args:
        path: of the picture, ``.png`` or ``.svg``.
        axes: of the grid; the first one goes to the right.
        before_s: seconds of training by the plan as it is, a dashed line.
        cells: results in the order of the grid.
        title: what was predicted.

    Raises:
        UsageError: the name has another ending.
        RingTuneError: matplotlib is not installed.
        StorageError: no room.
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
    picture = io.BytesIO()
    ending = path.suffix.lower()
    # neither a date nor random names inside: the same sweep gives the same file
    with importlib.import_module("matplotlib").rc_context({"svg.hashsalt": "ringtune", "svg.fonttype": "none"}):
        figure.savefig(picture, format=ending[1:], dpi=_DPI, metadata={"Date": None} if ending == ".svg" else {})
    write_durably(path, picture.getvalue())


def _series(axes: Sequence[Axis], cells: Sequence[CellResult]) -> dict[str, list[float]]:
    """List the heights over the first axis by the label of the other axes' values; no time is not a number."""
    found: dict[str, dict[str, float]] = {}
    for cell in cells:
        others = zip(axes[1:], cell.values[1:], strict=True)
        label = ", ".join(f"{axis.key} = {value}" for axis, value in others) or "what if"
        found.setdefault(label, {})[cell.values[0]] = math.nan if cell.wall_s is None else cell.wall_s
    return {label: [line.get(value, math.nan) for value in axes[0].values] for label, line in found.items()}


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
    if len(numbers) <= _MOST_TICKS:
        plot.set_xticks(numbers, axis.values)
    elif all(number.is_integer() for number in numbers):
        plot.xaxis.set_major_locator(importlib.import_module("matplotlib.ticker").MaxNLocator(integer=True))


def axis_label(key: str) -> str:
    """Name a key with its unit: ``microbatches (parts of a step)``, ``bob.compute (times as fast)``."""
    unit = _UNITS.get(key.rpartition(".")[2], "")
    return f"{key} ({unit})" if unit else key


def _numbers(values: Sequence[str]) -> list[float] | None:
    """Read the values as numbers, sizes as bytes; None if they are categories, as ``float32`` and ``int8``."""
    for read in (float, lambda text: float(parse_bytes(text)), parse_rate):
        with contextlib.suppress(ValueError, UsageError):
            return [read(value) for value in values]
    return None
