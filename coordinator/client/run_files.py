"""Files in a run's folder: parts of a resumed run, operation tables, and scalars for TensorBoard.

``report.json`` and ``trace.json`` are of the part that ended last. ``metrics.jsonl`` has the lines of all parts, also
of a killed one, so totals are computed from it. Steps after the checkpoint from which the next part resumed were
trained again, and count once.

::

    DIR/parts/stops.json     [40, 80]: the steps from which the run resumed
    DIR/parts/1/trace.json   of the first part, if it wrote one; and so on
    DIR/parts/1/ledger.jsonl.part   its ledger, of a part that was killed
    DIR/parts/1/adapter/     of a run that was done and then made longer: its result until then; or model/ or users/
    DIR/operations.json      the operation tables that the run has chosen, each with its step; given as the tables of
                             another run, they repeat this one without scores
    DIR/tensorboard/         the numbers of ``metrics.jsonl``, by tensorboardX, which needs neither torch nor
                             TensorBoard; it is loaded with the first line
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from coordinator.run.run_text import is_step
from ringtune.errors import IntegrityError, PlanError, UsageError
from ringtune.hints import hint_to_install
from ringtune.models.result_files import RESULT_FOLDERS
from ringtune.schedule.operation_tables import ScheduledTable, tables_from_json, tables_text
from ringtune.storage.durable import make_folder, rename_durably, storage_errors, write_durably
from ringtune.storage.strict import read_json, read_object
from ringtune.techniques.audit import LEDGER
from ringtune.v1 import control_pb2

FOLDER = "parts"
_STOPS = "stops.json"
PART = ".part"
"""Suffix of a file that is not complete."""

_OF_ONE_PART = ("trace.json", "report.json", LEDGER, LEDGER + PART, *RESULT_FOLDERS)


class RunParts:
    """The parts of one run."""

    def __init__(self, run_folder: Path) -> None:
        self._run = run_folder
        self._folder = run_folder / FOLDER

    def stops(self) -> tuple[int, ...]:
        """List the steps from which the run was resumed, ascending; none if it never was, or the file is damaged."""
        try:
            steps = read_json(self._folder / _STOPS)
            return tuple(sorted({int(step) for step in steps}))
        except (OSError, ValueError, TypeError):
            return ()

    def begin(self, step: int) -> None:
        """Begin the part that resumes from ``step``: move the files of the former part away."""
        stops = (*(stop for stop in self.stops() if stop < step), step)
        names = [entry.name for entry in self._folder.iterdir()] if self._folder.is_dir() else []
        target = self._folder / str(max((int(name) for name in names if name.isdecimal()), default=0) + 1)
        with storage_errors(target):
            make_folder(target)
            for name in _OF_ONE_PART:
                if (self._run / name).exists():
                    rename_durably(self._run / name, target / name)
        write_durably(self._folder / _STOPS, json.dumps(stops).encode())

    def completed(
        self, report: dict[str, Any], read_metrics: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> dict[str, Any]:
        """Add to a report ``parts``, totals of each earlier part, and ``whole``, totals of all parts.

        Example: a run of 100 steps resumed at 40 has one part of 40 steps, and a whole of 100. The report of a run that
        was never resumed stays as it is. ``read_metrics`` returns the lines of all steps.
        """
        stops = self.stops()
        if not stops:
            return report
        lines = list(filter(is_step, read_metrics()))
        ends = (*stops, max((int(line["step"]) for line in lines), default=0))
        parts = [_totals(lines, done, stop) for done, stop in zip((0, *ends), ends, strict=False)]
        return {**report, "parts": parts[:-1], "whole": _totals(lines, 0, ends[-1])}


def _totals(lines: Sequence[Mapping[str, Any]], done: int, stop: int) -> dict[str, Any]:
    """Sum the lines of the steps after ``done`` up to ``stop``: count, seconds, bytes by link, first and last loss."""
    chosen = [line for line in lines if done < int(line["step"]) <= stop]
    links: Counter[str] = Counter()
    for line in chosen:
        links.update({link: int(size) for link, size in line.get("bytes", {}).items()})
    losses = [line["loss"] for line in chosen if line.get("loss") is not None]
    return {
        "first_step": done + 1,
        "steps": len(chosen),
        "train_s": round(sum(float(line.get("seconds", 0.0)) for line in chosen), 6),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "links": dict(sorted(links.items())),
    }


NAME: Final = "operations.json"


class TablesFile:
    """The chosen operation tables of one run."""

    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / NAME
        self._texts: dict[int, str] | None = None  # what is in the file, each table by its step; None = not read yet

    def read(self) -> tuple[ScheduledTable, ...]:
        """Read the tables in the order of their steps; none if none was chosen.

        Raises ``IntegrityError``: the file is damaged.
        """
        try:
            return tables_from_json(read_json(self._path))
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, PlanError) as error:
            raise IntegrityError(f"{self._path} can't be read ({error}); remove it, the run chooses again") from error

    def add(self, text: str) -> None:
        """Add a table from an event; tables for its step and later ones are dropped.

        Raises ``IntegrityError``: the text is no table, or the file is damaged.
        """
        try:
            table = ScheduledTable.from_json(read_object(text, "the table that was chosen"))
        except PlanError as error:
            raise IntegrityError(f"the table that was chosen is not readable: {error}; use one version") from error
        self._write({**self._before(table.step), table.step: json.dumps(table.to_json())})

    def rewind_to(self, step: int) -> None:
        """Drop the tables for ``step`` and later ones: a resumed run chooses them again."""
        before = self._before(step)
        if before:
            self._write(before)
        else:
            with storage_errors(self._path):
                self._path.unlink(missing_ok=True)
            self._texts = {}

    def _before(self, step: int) -> dict[int, str]:
        """The texts of the tables before a step; the file is read once, as only this object writes it."""
        if not step:
            return {}
        if self._texts is None:
            self._texts = {table.step: json.dumps(table.to_json()) for table in self.read()}
        return {at: text for at, text in self._texts.items() if at < step}

    def _write(self, texts: dict[int, str]) -> None:
        write_durably(self._path, (tables_text(list(texts.values())) + "\n").encode())
        self._texts = texts


TENSORBOARD: Final = "tensorboard"
_OF_STEP: Final[tuple[str, ...]] = ("loss", "accuracy", "lr", "depth", "seconds")
_OF_EVALUATION: Final[tuple[str, ...]] = (
    "loss",
    "accuracy",
    "perplexity",
    "f1",
    "exact_match",
    "macro_f1",
    "matthews",
    "entity_f1",
    "mae",
    "pearson",
    "spearman",
)


def require_tensorboard(name: str) -> None:
    """Refuse a log other than TensorBoard's, and a missing library.

    Raises ``UsageError``: names the known logs, or the extra with the library.
    """
    if name != TENSORBOARD:
        raise UsageError(f"--log {name!r} is not one of {TENSORBOARD}; metrics.jsonl is always written")
    if importlib.util.find_spec("tensorboardX") is None:
        raise UsageError(f"--log tensorboard needs tensorboardX; {hint_to_install('tensorboard')}")


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of each number for TensorBoard in a line of metrics."""
    if is_step(line):
        figures, prefix, names = line, "train", _OF_STEP
        yield "train/sent_bytes", float(sum(line.get("bytes", {}).values()))
    elif line.get("kind") == "evaluation":
        figures, prefix, names = line, "eval", _OF_EVALUATION
    else:
        return
    for name in names:
        value = figures.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}/{name}", float(value)


class TensorBoardLog:
    """Writes the folder ``tensorboard`` of a run.

    Entries of an earlier run are hidden from the first step of this one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / TENSORBOARD
        self._begins_at = 0
        self._writer: Any = None

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Write an event that is a line of metrics."""
        match event.WhichOneof("event"):
            case "resumed_json":
                self._begins_at = int(read_object(event.resumed_json, "the step where the run continues")["step"]) + 1
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
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
