"""Write the lines of ``metrics.jsonl`` for TensorBoard, too: one more sink of a run's events.

The files are written by tensorboardX, which needs neither torch nor TensorBoard; it is loaded with the first line.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from coordinator.records.step_lines import is_step
from ringtune.errors import UsageError
from ringtune.files.strict import read_object
from ringtune.hints import hint_to_install
from ringtune.v1 import control_pb2

TENSORBOARD: Final = "tensorboard"
_OF_STEP: Final[tuple[str, ...]] = ("loss", "accuracy", "lr", "depth", "seconds")
_OF_EVALUATION: Final[tuple[str, ...]] = (
    "loss",
    "accuracy",
    "perplexity",
    "f1",
    "exact_match",
    "macro_f1",
    "entity_f1",
    "mae",
    "pearson",
    "spearman",
)


def require_tensorboard(name: str) -> None:
    """Refuse another log than TensorBoard's, and that one without its library.

    Raises:
        UsageError: names what there is, or the extra that brings the library.
    """
    if name != TENSORBOARD:
        raise UsageError(f"--log {name!r} is not one of {TENSORBOARD}; metrics.jsonl is always written")
    if importlib.util.find_spec("tensorboardX") is None:
        raise UsageError(f"--log tensorboard needs tensorboardX; {hint_to_install('tensorboard')}")


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield name and value of each number that a line of metrics has for TensorBoard."""
    if is_step(line):
        found, prefix, names = line, "train", _OF_STEP
        yield "train/sent_bytes", float(sum(line.get("bytes", {}).values()))
    elif line.get("kind") == "evaluation":
        found, prefix, names = line, "eval", _OF_EVALUATION
    else:
        return
    for name in names:
        value = found.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}/{name}", float(value)


class TensorBoardLog:
    """Writes into the folder ``tensorboard`` of a run.

    What an earlier run left there is hidden from the step on at which this one begins.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / TENSORBOARD
        self._begins_at = 0
        self._writer: Any = None

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Write one event, if it is a line of metrics."""
        match event.WhichOneof("event"):
            case "resumed_json":
                self._begins_at = int(read_object(event.resumed_json, "where the run goes on")["step"]) + 1
            case "metrics_json":
                self._write(read_object(event.metrics_json, "a line of metrics"))

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._writer is None:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._begins_at)
        step = int(line.get("step", 0))
        for name, value in scalars(line):
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left to the disk."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
