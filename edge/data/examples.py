"""Interfaces of a task's data: files become rows, which owners share, and rows become examples of batches.

A *row* belongs to a file (a text, a question, an image), an *example* to a batch (a text, a window of a question's
context, an image). Rows are shared among owners, so that all windows of a question stay together.
"""

from __future__ import annotations

import abc
import functools
from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch

from edge.data.tokens import IGNORED, Batch
from ringtune.job.rows import Rows
from ringtune.run_control.evaluation import MAX_CLASSES, MIN_ROWS, name_of
from ringtune.schedule.batches import pack_rows

Values = tuple[tuple[str, float], ...]
NONE_LEFT_OUT: Final[Mapping[str, int]] = MappingProxyType({})


class Examples(Protocol):
    """The examples of one owner for training or evaluation."""

    def __len__(self) -> int:
        """Number of examples."""

    @property
    def of_rows(self) -> Sequence[int]:
        """Number of examples of each row; the examples of a row follow those of the row before."""

    @property
    def cut_rows(self) -> int:
        """Number of examples cut at ``train.max_length``, among those encoded so far."""

    @property
    def left_out(self) -> Mapping[str, int]:
        """Reason -> number of rows without an example."""

    def batch(self, chosen: Sequence[int], targets: Mapping[str, int]) -> Batch:
        """Make a batch of examples by index, padded to the longest; ``targets`` maps class names to indices."""

    def width(self, chosen: Sequence[int]) -> int:
        """Padded length of a batch of the chosen examples, in tokens."""

    def score(self, batch: Batch, predictions: torch.Tensor, key: int) -> Values:
        """Score predictions of the task's head row by row; return numbers for the report, summed by name.

        ``key`` is of the evaluation; windows of one question may be in different calls.
        """

    def forget_scores(self) -> None:
        """Drop the scores of an unfinished evaluation."""


class Source(Protocol):
    """Reader of a task's files."""

    def read(self, path: Path) -> Rows:
        """Read the rows of a file; raises ``DataError``."""

    def examples(self, rows: Sequence[Any], labels: Sequence[Any]) -> Examples:
        """Make the examples of these rows; ``labels`` are their ``Rows.targets``."""


class _OneForEachRow(Sized):
    left_out: Mapping[str, int] = NONE_LEFT_OUT

    @property
    def of_rows(self) -> Sequence[int]:
        """One example for each row."""
        return [1] * len(self)


class SummedExamples(_OneForEachRow, abc.ABC):
    """Examples, one for each row, with predictions summed over a whole evaluation.

    Only these sums leave the owner, never sums of a batch.

    Attributes:
        min_rows: with fewer rows no sum is reported, because it could reveal a row.
    """

    min_rows = MIN_ROWS

    def score(self, batch: Batch, predictions: torch.Tensor, key: int) -> Values:
        """Add predictions up; return all sums with the last row, before it nothing."""
        rows, sums = self._open.setdefault(key, (0, self.no_sums()))
        sums.add(batch, predictions)
        self._open[key] = (rows + len(batch.labels), sums)
        if self._open[key][0] < len(self):
            return ()
        del self._open[key]
        return sums.values(are_few=len(self) < self.min_rows)

    def forget_scores(self) -> None:
        """Drop the sums of an unfinished evaluation."""
        self._open.clear()

    @abc.abstractmethod
    def no_sums(self) -> Sums:
        """Make empty sums."""

    @functools.cached_property
    def _open(self) -> dict[int, tuple[int, Sums]]:
        return {}


class Sums(Protocol):
    """Sums over the rows of an evaluation."""

    def add(self, batch: Batch, predictions: torch.Tensor) -> None:
        """Add the rows of a micro-batch and their predictions."""

    def values(self, *, are_few: bool) -> Values:
        """Return the sums by name; with ``are_few`` none that could reveal a row."""


class ClassCounts:
    """Confusion counts: how often each class (an index >= 0) was predicted as each class."""

    def __init__(self) -> None:
        self._counts = Counter[tuple[int, int]]()

    def add(self, batch: Batch, predictions: torch.Tensor) -> None:
        """Count every element of labels and predictions, which have one shape."""
        self._counts.update(zip(batch.labels.flatten().tolist(), predictions.flatten().tolist(), strict=True))

    def values(self, *, are_few: bool) -> Values:
        """Return the counts by the names of ``ringtune.run_control.evaluation``; none of few rows or many classes."""
        if are_few:
            return ()
        pairs = sorted(pair for pair in self._counts if pair[0] >= 0)  # rows without a class of the run don't count
        if any(index >= MAX_CLASSES for pair in pairs for index in pair):
            return ()
        return tuple((name_of(*pair), float(self._counts[pair])) for pair in pairs)


class ClassifiedExamples(SummedExamples):
    """Examples of one class each, with confusion counts in evaluations."""

    def no_sums(self) -> Sums:
        """Make empty counts."""
        return ClassCounts()


class UnscoredExamples(_OneForEachRow):
    """Examples, one for each row, without scores: the head's own numbers suffice for an evaluation."""

    def score(self, batch: Batch, predictions: torch.Tensor, key: int) -> Values:
        """Return no numbers."""
        return ()

    def forget_scores(self) -> None:
        """Do nothing: no score is kept."""


class PackedExamples(UnscoredExamples):
    """Examples of a language model packed into sequences, which are the examples of batches then.

    Every owner packs its own rows by their lengths, equally each time (``pack_rows``); all else of a run counts
    sequences. Each row keeps its tokens and labels, so that its first token is no target of the row before.
    """

    def __init__(self, rows: Examples, max_length: int) -> None:
        self.rows = rows
        lengths = [rows.width([row]) for row in range(len(rows))]
        self._sequences = pack_rows(lengths, max_length)
        self.num_tokens = sum(lengths)
        self.left_out = rows.left_out

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def cut_rows(self) -> int:
        """Number of cut rows."""
        return self.rows.cut_rows

    def batch(self, chosen: Sequence[int], targets: Mapping[str, int]) -> Batch:
        """Make a batch of sequences, padded to the longest; the mask has 1 and 2 in turn for their rows."""
        found = [self._sequence(index, targets) for index in chosen]
        width = max(one.ids.shape[1] for one in found)
        padded = [Batch(*map(_padded, one[:4], (width,) * 4, (0, 0, 0, IGNORED))) for one in found]
        return Batch(*(torch.cat(each) for each in zip(*(one[:4] for one in padded), strict=True)))

    def _sequence(self, index: int, targets: Mapping[str, int]) -> Batch:
        """Join the rows of a sequence to a batch of one."""
        rows = [self.rows.batch([row], targets) for row in self._sequences[index]]
        turns = [row._replace(mask=row.mask * (1 + place % 2)) for place, row in enumerate(rows)]
        return Batch(*(torch.cat(parts, dim=1) for parts in zip(*(row[:4] for row in turns), strict=True)))

    def width(self, chosen: Sequence[int]) -> int:
        """Number of tokens of the longest chosen sequence."""
        return max(sum(self.rows.width([row]) for row in self._sequences[index]) for index in chosen)


def _padded(tensor: torch.Tensor, width: int, fill: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=fill)
