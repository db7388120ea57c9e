"""Write predictions beside the columns of their rows: as csv, as jsonl, or on the screen; and sum them up."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from coordinator.predicting.process import Predicted
from ringtune.errors import DataError, UsageError
from ringtune.files.durable import replacing
from ringtune.jobs.job import Job
from ringtune.models.family import CLASS_TASKS, REGRESSION, TAGGING

_OF_CLASS = "of_class"
_MOST_COUNTED = 1000


class Writer(Protocol):
    """Takes one prediction after the other."""

    def add(self, found: Predicted) -> None:
        """Write a row with what is predicted for it.

        Raises:
            DataError: the row has a column of that name already.
        """


class JsonWriter:
    """Writes an object a line: the row's columns, then the predicted ones.

    Args:
        file: where to.
        event: what each object is called; empty = it is not called anything.
    """

    def __init__(self, file: IO[str], event: str = "") -> None:
        self._file, self._head = file, {"event": event} if event else {}

    def add(self, found: Predicted) -> None:
        """Write a row; probabilities are a table."""
        self._file.write(json.dumps({**self._head, **joined(found)}, ensure_ascii=False) + "\n")
        self._file.flush()


class CsvWriter:
    """Writes lines with commas, the header before the first.

    Args:
        file: where to; opened with ``newline=""``.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file, self._csv = file, csv.writer(file)
        self._header: list[str] = []

    def add(self, found: Predicted) -> None:
        """Write a row; each class has a column with its probability."""
        shares = {f"probability_{label}": share for label, share in found.said.get(_OF_CLASS, {}).items()}
        line = _joined(
            found.row, {**{name: value for name, value in found.said.items() if name != _OF_CLASS}, **shares}
        )
        if not self._header:
            self._header = list(line)
            self._csv.writerow(self._header)
        if line.keys() != set(self._header):
            other = next(iter(line.keys() ^ set(self._header)))
            raise DataError(
                f"rows differ in column {other!r}, which csv can't say; write .jsonl with --save FILE.jsonl"
            )
        self._csv.writerow([_cell(line[name]) for name in self._header])
        self._file.flush()


@contextmanager
def writer_to(path: Path, data: Path) -> Iterator[Writer]:
    """Give the writer of a file, which is there once the context is left without an error, and not before.

    Raises:
        UsageError: the name ends in neither .csv nor .jsonl, or the file is the rows' own.
    """
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".jsonl"):
        raise UsageError(f"--save {path} ends in {path.suffix!r}; predictions are written as .csv or .jsonl")
    if path.exists() and path.resolve() == data.resolve():
        raise UsageError(f"--save {path} would replace the rows; give it another name")
    with replacing(path) as content:
        file = io.TextIOWrapper(content, encoding="utf-8", newline="")
        try:
            yield CsvWriter(file) if suffix == ".csv" else JsonWriter(file)
        finally:
            file.detach()  # which writes what is left; the file is closed by whoever opened it


class Summary:
    """Counts predictions, and those that are right where the rows say what is.

    Of rows with classes each is counted, of tagged texts each word; of numbers the errors are.

    Args:
        job: of the run.
    """

    def __init__(self, job: Job) -> None:
        has_tags = job.model.task == TAGGING
        self._column = job.data.tags if has_tags else job.data.label if job.model.task in CLASS_TASKS else ""
        self._counted = "words" if has_tags else "rows"
        self._names: Counter[str] = Counter()
        self._rows = self._judged = self._right = 0
        self._number = job.data.label if job.model.task == REGRESSION else ""
        self._squares = self._sizes = 0.0
        self._ended_at_once = 0

    def add(self, found: Predicted) -> None:
        """Count a row."""
        self._rows += 1
        self._ended_at_once += found.said.get("tokens") == 0
        if self._number:
            self._judge(float(found.said["predicted"]), found.row.get(self._number))
        if not self._column:
            return
        said, truth = found.said["predicted"], found.row.get(self._column)
        if not isinstance(said, list):
            self._count(str(said), truth)
            return
        known = truth if isinstance(truth, list) and len(truth) == len(said) else [None] * len(said)
        for name, true in zip(said, known, strict=True):
            if name is not None:
                self._count(name, true)

    def _judge(self, said: float, truth: object) -> None:
        try:
            error = said - float(truth if isinstance(truth, str | int | float) else math.nan)
        except (ValueError, OverflowError):
            return
        if math.isfinite(error):
            self._judged += 1
            self._squares, self._sizes = self._squares + error**2, self._sizes + abs(error)

    def _errors(self) -> dict[str, float]:
        return {"mse": self._squares / self._judged, "mae": self._sizes / self._judged}

    def _count(self, named: str, truth: object) -> None:
        if named in self._names or len(self._names) < _MOST_COUNTED:
            self._names[named] += 1
        if isinstance(truth, str | int) and not isinstance(truth, bool) and str(truth).strip():
            self._judged += 1
            self._right += str(truth) == named

    def to_json(self) -> dict[str, Any]:
        """The counts as values; ``accuracy`` where rows or words have a class or tag."""
        found: dict[str, Any] = {"rows": self._rows}
        found |= {"ended_at_once": self._ended_at_once} if self._ended_at_once else {}
        if self._column:
            found["tags" if self._counted == "words" else "classes"] = dict(sorted(self._names.items()))
        if self._judged and self._number:
            found |= {"judged": self._judged, **{name: round(value, 6) for name, value in self._errors().items()}}
        elif self._judged:
            found |= {"judged": self._judged, "accuracy": round(self._right / self._judged, 6)}
        return found

    def lines(self) -> Iterable[str]:
        """The counts in words."""
        rows = f"{self._rows:,} row{'s' * (self._rows != 1)}"
        if self._column:
            counts = ", ".join(f"{count:,} {name}" for name, count in sorted(self._names.items()))
            yield f"{rows}: {counts}"
        else:
            yield rows
        if self._ended_at_once:
            yield f"{self._ended_at_once:,} of them got an empty text: the model's first token was that of the end"
        if self._judged and self._number:
            errors = ", ".join(f"{name} {value:.4f}" for name, value in self._errors().items())
            yield f"{errors} on the {self._judged:,} rows that have a {self._number!r} of their own"
        elif self._judged:
            share = self._right / self._judged
            judged = f"{self._judged:,} {self._counted}"
            yield f"accuracy {share:.4f} on the {judged} that have a {self._column!r} of their own"


def joined(found: Predicted) -> dict[str, Any]:
    """Return a row's own columns and the predicted ones; probabilities are a table.

    Raises:
        DataError: the row has a column of that name already.
    """
    said = {("probabilities" if name == _OF_CLASS else name): value for name, value in found.said.items()}
    return _joined(found.row, said)


def _joined(row: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    twice = next((name for name in said if name in row), "")
    if twice:
        raise DataError(f"the rows have a column {twice!r}, which a prediction is called; rename it")
    return {**row, **said}


def _cell(value: Any) -> str:
    """A cell: text as it is, nothing for null, lists and tables as JSON."""
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
