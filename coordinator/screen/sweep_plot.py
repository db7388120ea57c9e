"""Draw a sweep: wall time over the first axis, a line for each combination of the others."""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.what_if.what_if import CellResult
from ringtune.errors import RingTuneError, UsageError
from ringtune.files.durable import write_durably
from sim.sweep import Axis

FORMATS = (".png", ".svg")
_INCHES = (8.0, 5.0)
_DPI = 120


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


def write_plot(path: Path, axes: Sequence[Axis], before_s: float, cells: Sequence[CellResult]) -> None:
    """Draw a sweep; cells without a time leave a gap.

    Args:
        path: of the picture, ``.png`` or ``.svg``.
        axes: of the grid; the first one goes to the right.
        before_s: wall time of the plan as it is, a dashed line.
        cells: results in the order of the grid.

    Raises:
        UsageError: the name has another ending.
        RingTuneError: matplotlib is not installed.
        StorageError: no room.
    """
    figure = check_plot(path).Figure(figsize=_INCHES, layout="constrained")
    plot = figure.subplots()
    first, others = axes[0], axes[1:]
    places = _places(first.values)
    lines: dict[tuple[str, ...], dict[str, float]] = {}
    for cell in cells:
        line = lines.setdefault(cell.values[1:], {})
        if cell.wall_s is not None:
            line[cell.values[0]] = cell.wall_s
    for values, line in lines.items():
        label = ", ".join(f"{axis.key} = {value}" for axis, value in zip(others, values, strict=True))
        heights = [line.get(value, float("nan")) for value in first.values]
        plot.plot(places, heights, marker="o", label=label or "what if")
    plot.axhline(before_s, color="grey", linestyle="--", label="as it is")
    if not _are_numbers(first.values):
        plot.set_xticks(places, first.values)
    plot.set_xlabel(first.key)
    plot.set_ylabel("predicted wall time, seconds")
    plot.set_ylim(bottom=0)
    plot.legend()
    picture = io.BytesIO()
    ending = path.suffix.lower()
    # neither a date nor random names inside: the same sweep gives the same file
    with importlib.import_module("matplotlib").rc_context({"svg.hashsalt": "ringtune", "svg.fonttype": "none"}):
        figure.savefig(picture, format=ending[1:], dpi=_DPI, metadata={"Date": None} if ending == ".svg" else {})
    write_durably(path, picture.getvalue())


def _are_numbers(values: Sequence[str]) -> bool:
    try:
        return bool([float(value) for value in values])
    except ValueError:
        return False


def _places(values: Sequence[str]) -> list[float]:
    """Places of the values on the axis: numbers stand at their value, other texts side by side.

    Example: 1 and 4 stand at 1 and 4, "iid" and "dirichlet" at 0 and 1.
    """
    return [float(value) for value in values] if _are_numbers(values) else [float(i) for i in range(len(values))]
