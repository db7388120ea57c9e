"""An owner's labelled texts: read, shared out, and cut into batches of tensors.

Raw texts, token ids and labels stay in this object; a run only sees embedded batches.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from edge.data.tokens import Batch, Encoder
from edge.model.heads import IGNORED
from ringtune.batches import BatchStream, eval_rows, split_rows
from ringtune.errors import DataError
from ringtune.job import Job
from ringtune.plan import Plan
from ringtune.turns import Item, StepKind


class Row(NamedTuple):
    """One labelled text."""

    text: str
    label: str


class OwnerDataset:
    """The training and evaluation rows of one owner.

    Args:
        train: rows to train on.
        evaluation: rows to evaluate on.
        tokenizer_folder: the model's folder.
        source: names the rows in errors.

    Attributes:
        labels: class names in its training rows, sorted.
        eval_labels: class names in its evaluation rows, sorted.
    """

    def __init__(
        self, train: Sequence[Row], evaluation: Sequence[Row], *, tokenizer_folder: Path, source: str = "data"
    ) -> None:
        self._rows = (*train, *evaluation)
        self._num_train = len(train)
        self._source = source
        self._encoder = Encoder(tokenizer_folder, [row.text for row in self._rows])
        self._targets: Mapping[str, int] = {}
        self._streams: dict[tuple[int, int, str], BatchStream] = {}
        self.labels = tuple(sorted({row.label for row in train}))
        self.eval_labels = tuple(sorted({row.label for row in evaluation}))

    @staticmethod
    def load(
        job: Job,
        path: Path,
        eval_path: Path | None,
        *,
        share: int = 0,
        num_owners: int = 1,
        tokenizer_folder: Path,
    ) -> OwnerDataset:
        """Read the files and keep one share of their rows.

        Evaluation rows are always shared evenly; an owner may get none of a short file.

        Args:
            job: names of the columns, the split and the seed.
            path: training rows, csv or jsonl.
            eval_path: evaluation rows; None = no evaluation.
            share: which share of the rows, in ``[0, num_owners)``.
            num_owners: number of shares; the split depends on (seed, number, rule) only.
            tokenizer_folder: the model's folder.

        Raises:
            DataError: no file, no such column, no rows, or an empty label.
            ModelError: the folder has no tokenizer.
        """
        rows = read_rows(path, text=job.data.text, label=job.data.label)
        mine = split_rows(
            len(rows),
            num_owners=num_owners,
            share=share,
            seed=job.train.seed,
            split=job.data.split,
            labels=[row.label for row in rows],
        )
        evaluation: list[Row] = []
        if eval_path is not None:
            all_rows = read_rows(eval_path, text=job.data.text, label=job.data.label)
            evaluation = all_rows[len(all_rows) * share // num_owners : len(all_rows) * (share + 1) // num_owners]
        train = [rows[index] for index in mine]
        return OwnerDataset(train, evaluation, tokenizer_folder=tokenizer_folder, source=str(path))

    @property
    def train_rows(self) -> int:
        """Rows that it trains on."""
        return self._num_train

    @property
    def eval_rows(self) -> int:
        """Rows that it evaluates on."""
        return len(self._rows) - self._num_train

    def set_labels(self, labels: Sequence[str]) -> None:
        """Fix the classes of the run: the index of a name is its target.

        Raises:
            DataError: a row has a class outside ``labels``.
        """
        unknown = sorted({*self.labels, *self.eval_labels} - set(labels))
        if unknown:
            raise DataError(
                f"{self._source} has rows of class {unknown[0]!r}, the run has {', '.join(labels)}; "
                "add the class to data.labels or correct the rows"
            )
        self._targets = {label: index for index, label in enumerate(labels)}

    def batch(self, plan: Plan, item: Item) -> Batch:
        """The whole batch of an item, padded to its longest row; the item has to be this owner's."""
        if item.kind is StepKind.EVALUATE:
            rows = [self._num_train + row for row in eval_rows(self.eval_rows, plan.batch_size, item.batch)]
        else:
            key = (plan.batch_size, plan.seed, item.owner)
            if key not in self._streams:
                self._streams[key] = BatchStream(self.train_rows, plan.batch_size, plan.seed, item.owner)
            rows = list(self._streams[key].rows(item.batch))
        labels = [self._targets.get(self._rows[row].label, IGNORED) for row in rows]
        return self._encoder.batch(rows, labels, max_length=plan.max_length)


def read_rows(path: Path, *, text: str, label: str) -> list[Row]:
    """Read the columns ``text`` and ``label`` of a csv (with a header) or jsonl file.

    Raises:
        DataError: no file, another suffix, a column is missing, a value is not text, or no rows.
    """
    if not path.is_file():
        raise DataError(f"{path} is not there; set data.train, data.eval or --data")
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl}
    if path.suffix.lower() not in readers:
        raise DataError(f"{path} ends in {path.suffix!r}; rows are read from .csv or .jsonl")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [
                _row(path, number, found, text, label) for number, found in readers[path.suffix.lower()](path, file)
            ]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}); convert it") from error
    if not rows:
        raise DataError(f"{path} has no rows; give it data or leave it out")
    return rows


def _read_csv(path: Path, file: Iterator[str]) -> Iterator[tuple[int, Mapping[str, object]]]:
    reader = csv.DictReader(file, strict=True)
    try:
        for found in reader:
            yield reader.line_num, {key: value for key, value in found.items() if key is not None}
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error


def _read_jsonl(path: Path, file: Iterator[str]) -> Iterator[tuple[int, Mapping[str, object]]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise DataError(f"{path}, line {number} is not a JSON object")
        yield number, found


def _row(path: Path, number: int, found: Mapping[str, object], text: str, label: str) -> Row:
    for column in (text, label):
        if found.get(column) is None:
            known = ", ".join(repr(name) for name in found)
            raise DataError(
                f"{path}, line {number} has no column {column!r}; it has {known}; set data.text, data.label"
            )
    words, name = found[text], found[label]
    if not isinstance(words, str):
        raise DataError(f"{path}, line {number}: column {text!r} is not text")
    if not isinstance(name, str | int) or not str(name).strip():
        raise DataError(f"{path}, line {number}: column {label!r} is not a class name")
    return Row(text=words, label=str(name))
