"""Draw the loss of a run over its steps, with the steps from which more blocks train."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ringtune.errors import RingTuneError, UsageError
from ringtune.files.durable import write_durably

FORMATS: Final = (".png", ".svg")
_INCHES: Final = (8.0, 4.5)
_DPI: Final = 120
_SMOOTHED: Final = 10


class Plot:
    """A picture that a notebook shows and ``save`` writes.

    Args:
        figure: of matplotlib.
        summary: what it shows, in words.

    Attributes:
        figure: the ``matplotlib.figure.Figure``, to be changed at will.
    """

    def __init__(self, figure: Any, summary: str) -> None:
        self.figure = figure
        self._summary = summary

    def __repr__(self) -> str:
        return f"{self._summary}\n(a picture; save('loss.png') writes it, a notebook shows it)"

    def save(self, path: str | Path) -> Path:
        """Write the picture as ``.png`` or ``.svg``; return its path.

        Raises:
            UsageError: the name has another ending.
            StorageError: it can't be written.
        """
        target = Path(path)
        if target.suffix.lower() not in FORMATS:
            raise UsageError(f"the picture {target} has to end in {' or '.join(FORMATS)}")
        write_durably(target, self._drawn(target.suffix.lower()[1:]))
        return target

    def _repr_png_(self) -> bytes:
        """Return what a notebook shows."""
        return self._drawn("png")

    def _drawn(self, ending: str) -> bytes:
        picture = io.BytesIO()
        # neither a date nor random names inside: the same run gives the same file
        with importlib.import_module("matplotlib").rc_context({"svg.hashsalt": "ringtune", "svg.fonttype": "none"}):
            metadata = {"Date": None} if ending == "svg" else {}
            self.figure.savefig(picture, format=ending, dpi=_DPI, metadata=metadata)
        return picture.getvalue()


def draw_losses(steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], *, title: str) -> Plot:
    """Draw the loss of each step, its mean over some steps, evaluations, and a line wherever the depth grows.

    Args:
        steps: rows with ``step``, ``loss`` and ``depth``.
        evaluations: rows with ``step`` and ``loss``.
        title: of the picture.

    Raises:
        RingTuneError: matplotlib is not installed.
        UsageError: there is no step yet.
    """
    try:
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=_INCHES, layout="constrained")
    except ModuleNotFoundError as error:
        raise RingTuneError("plot() needs the package 'matplotlib'; pip install matplotlib") from error
    shown = [row for row in steps if row["loss"] is not None]
    if not shown:
        raise UsageError("there is nothing to plot: the run has no step yet")
    plot = figure.subplots()
    numbers, losses = [row["step"] for row in shown], [row["loss"] for row in shown]
    plot.plot(numbers, losses, color="tab:blue", alpha=0.35, linewidth=1.0, label="loss of a step")
    plot.plot(numbers, smoothed(losses), color="tab:blue", label=f"mean of the last {_SMOOTHED} steps")
    if evaluations:
        plot.plot(
            [row["step"] for row in evaluations], [row["loss"] for row in evaluations], "o", color="tab:red",
            label="evaluation",
        )  # fmt: skip
    for step, depth in unfreezings(shown):
        plot.axvline(step, color="grey", linestyle=":", linewidth=1.0)
        plot.annotate(f"depth {depth}", (step, 1.0), xycoords=("data", "axes fraction"), rotation=90, fontsize="small",
                      va="top", ha="right", color="grey")  # fmt: skip
    plot.set_title(title)
    plot.set_xlabel("step")
    plot.set_ylabel("loss")
    plot.xaxis.set_major_locator(importlib.import_module("matplotlib.ticker").MaxNLocator(integer=True))
    plot.legend()
    return Plot(figure, _summary(title, shown, evaluations))


def _summary(title: str, steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> str:
    first, last = steps[0], steps[-1]
    mean = smoothed([row["loss"] for row in steps])[-1]
    lines = [
        f"{title}: loss {first['loss']:.4f} at step {first['step']}, {last['loss']:.4f} at step {last['step']}, "
        f"mean of the last {min(_SMOOTHED, len(steps))} steps {mean:.4f}"
    ]
    if evaluations:
        told = [f"{row['loss']:.4f} at step {row['step']}" for row in evaluations]
        best = min(range(len(told)), key=lambda at: float(evaluations[at]["loss"]))
        more = f", the lowest {told[best]}" if best != len(told) - 1 else ""
        lines.append(f"evaluation: loss {told[-1]}{more}")
    if grown := unfreezings(steps):
        lines.append("more blocks train: " + ", ".join(f"depth {depth} from step {step}" for step, depth in grown))
    return "\n".join(lines)


def unfreezings(steps: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """List (step, depth) of each step that trains more blocks than all before it; the first step is none."""
    found: list[tuple[int, int]] = []
    deepest = steps[0]["depth"] if steps else 0
    for row in steps:
        if row["depth"] > deepest:
            deepest = row["depth"]
            found.append((row["step"], deepest))
    return found


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return for each loss the mean of it and of those before it, ten at most."""
    windows = [losses[max(0, index + 1 - _SMOOTHED) : index + 1] for index in range(len(losses))]
    return [sum(window) / len(window) for window in windows]
