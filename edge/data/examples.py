"""Turn an owner's files into rows, which owners share, and examples, of which batches are made.

A *row* is what the file has (a text, a question, an image), an *example* is what a batch has (a text, a window of a
question's context, an image). Rows are shared among owners, so that all windows of a question stay together.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from edge.data.tokens import Batch
from ringtune.rounds.class_counts import LEAST_ROWS, MOST_CLASSES, name_of

Values = tuple[tuple[str, float], ...]


class Rows(NamedTuple):
    """The rows of one file.

    Attributes:
        rows: in file order.
        labels: class name of each; empty for a task without classes.
        skipped: rows of the file that can't be used.
        users: whose each is; empty where the job names no column of users.
    """

    rows: Sequence[Any]
    labels: tuple[str, ...] = ()
    skipped: int = 0
    users: tuple[str, ...] = ()


class Examples(Protocol):
    """The examples that one owner trains or evaluates on."""

    def __len__(self) -> int:
        """Number of examples."""

    @property
    def of_rows(self) -> Sequence[int]:
        """How many examples each row became; a row's follow those of the row before."""

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
            key: of the evaluation; examples that belong together may come in different calls.

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
            DataError: the file can't be used; says where and why.
        """

    def examples(self, rows: Sequence[Any], labels: Sequence[str]) -> Examples:
        """Make the examples of these rows, of which ``labels`` are the class names."""


class Classified(Sized):
    """Examples that are one a row, of which an evaluation may count the predicted classes."""

    @property
    def of_rows(self) -> Sequence[int]:
        """One of each row."""
        return [1] * len(self)

    def score(self, batch: Batch, predictions: torch.Tensor, key: int) -> Values:
        """Add predicted classes (B,) up over a whole evaluation, so that no count is of a batch alone.

        Returns:
            With the last row the counts of all, by the names of ``ringtune.rounds.class_counts``; before it nothing.
            An owner of few rows counts none.
        """
        counts = self._open.setdefault(key, Counter())
        counts.update(zip(batch.labels.tolist(), predictions.tolist(), strict=True))
        if counts.total() < len(self):
            return ()
        del self._open[key]
        if len(self) < LEAST_ROWS:
            return ()
        pairs = sorted(pair for pair in counts if pair[0] >= 0)  # rows without a class of the run don't count
        if any(index >= MOST_CLASSES for pair in pairs for index in pair):
            return ()
        return tuple((name_of(*pair), float(counts[pair])) for pair in pairs)

    def forget_scores(self) -> None:
        """Drop the counts of an evaluation that did not end."""
        self._open.clear()

    @functools.cached_property
    def _open(self) -> dict[int, Counter[tuple[int, int]]]:
        return {}


class Unscored(Sized):
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
