"""The interfaces of a task's data: files become rows, which owners share, and rows become examples of batches.

A *row* is what the file has (a text, a question, an image), an *example* is what a batch has (a text, a window of a
question's context, an image). Rows are shared among owners, so that all windows of a question stay together.
"""

from __future__ import annotations

import abc
import functools
from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Protocol

import torch

from edge.data.tokens import Batch
from ringtune.job.rows import Rows
from ringtune.run_control.evaluation import MAX_CLASSES, MIN_ROWS, name_of

Values = tuple[tuple[str, float], ...]


class Examples(Protocol):
    """The examples that one owner trains or evaluates on."""

    def __len__(self) -> int:
        """Number of examples."""

    @property
    def of_rows(self) -> Sequence[int]:
        """How many examples each row became; a row's follow those of the row before."""

    @property
    def cut_rows(self) -> int:
        """How many examples are cut at ``train.max_length``, of those that have been encoded so far."""

    def batch(self, chosen: Sequence[int], targets: Mapping[str, int]) -> Batch:
        """Make a batch of the chosen examples, padded to the longest.

        Args:
            chosen: indices of examples.
            targets: class name -> index.
        """

    def width(self, chosen: Sequence[int]) -> int:
        """Padded length of a batch of the chosen examples, in tokens."""

    def score(self, batch: Batch, predictions: torch.Tensor, key: int) -> Values:
        """Judge predictions row by row.

        Args:
            batch: rows of a micro-batch.
            predictions: what the task's head predicted for them.
            key: of the evaluation; examples that belong together may be in different calls.

        Returns:
            Numbers to be summed by name.
        """

    def forget_scores(self) -> None:
        """Drop the scores of an evaluation that did not end, because a new run begins."""


class Source(Protocol):
    """How a task reads its files."""

    def read(self, path: Path) -> Rows:
        """Read the rows of a file.

        Raises:
            DataError: the file can't be used; names place and reason.
        """

    def examples(self, rows: Sequence[Any], labels: Sequence[Any]) -> Examples:
        """Make the examples of these rows; ``labels`` are their ``Rows.targets``."""


class SummedExamples(Sized, abc.ABC):
    """Examples that are one a row, whose predictions their owner adds up over a whole evaluation.

    Only the sums leave the owner, and no sum is of a batch alone.

    Attributes:
        min_rows: of fewer rows no sum is reported, as it could reveal one of them.
    """

    min_rows = MIN_ROWS

    @property
    def of_rows(self) -> Sequence[int]:
        """One of each row."""
        return [1] * len(self)

    def score(self, batch: Batch, predictions: torch.Tensor, key: int) -> Values:
        """Add predictions up.

        Returns:
            With the last row the sums of all; before it nothing.
        """
        rows, sums = self._open.setdefault(key, (0, self.no_sums()))
        sums.add(batch, predictions)
        self._open[key] = (rows + len(batch.labels), sums)
        if self._open[key][0] < len(self):
            return ()
        del self._open[key]
        return sums.values(are_few=len(self) < self.min_rows)

    def forget_scores(self) -> None:
        """Drop the sums of an evaluation that did not end."""
        self._open.clear()

    @abc.abstractmethod
    def no_sums(self) -> Sums:
        """Make the sums of no rows."""

    @functools.cached_property
    def _open(self) -> dict[int, tuple[int, Sums]]:
        return {}


class Sums(Protocol):
    """The sums over the rows of an evaluation."""

    def add(self, batch: Batch, predictions: torch.Tensor) -> None:
        """Add the rows of a micro-batch, with what was predicted for them."""

    def values(self, *, are_few: bool) -> Values:
        """Return the sums by name; where the rows are few none that could tell what one of them is."""


class ClassCounts:
    """How often each class (an index, not negative) was predicted as each class."""

    def __init__(self) -> None:
        self._counts = Counter[tuple[int, int]]()

    def add(self, batch: Batch, predictions: torch.Tensor) -> None:
        """Count every place of labels and predictions, which have one shape."""
        self._counts.update(zip(batch.labels.flatten().tolist(), predictions.flatten().tolist(), strict=True))

    def values(self, *, are_few: bool) -> Values:
        """Return the counts by the names of ``ringtune.run_control.evaluation``; none of few rows or many classes."""
        if are_few:
            return ()
        pairs = sorted(pair for pair in self._counts if pair[0] >= 0)  # what has no class of the run doesn't count
        if any(index >= MAX_CLASSES for pair in pairs for index in pair):
            return ()
        return tuple((name_of(*pair), float(self._counts[pair])) for pair in pairs)


class ClassifiedExamples(SummedExamples):
    """Examples of one class each, of which an evaluation counts the predicted classes."""

    def no_sums(self) -> Sums:
        """Make the counts of no rows."""
        return ClassCounts()


class UnscoredExamples(Sized):
    """Examples that are one a row, and not scored row by row, because the head counts all that an evaluation needs."""

    @property
    def of_rows(self) -> Sequence[int]:
        """One of each row."""
        return [1] * len(self)

    def score(self, batch: Batch, predictions: torch.Tensor, key: int) -> Values:
        """Return no further numbers."""
        return ()

    def forget_scores(self) -> None:
        """Do nothing: no score is kept."""
