"""Interfaces of a task's data: files become rows, which owners share, and rows become examples of batches.

A *row* belongs to a file (a text, a question, an image), an *example* to a batch (a text, a window of a question's
context, an image). Rows are shared among owners, so that all windows of a question stay together.

A task says how its rows become tokens, which labels they have, and how an evaluation is scored; ``TextExamples`` makes
the batches of all tasks of texts from these three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch

from edge.data.tokens import IGNORED, Batch, Encoder, Padder, TokenRow
from ringtune.job.rows import Rows
from ringtune.run_control.evaluation import MAX_CLASSES, MIN_ROWS, name_of
from ringtune.schedule.batches import pack_rows

Values = tuple[tuple[str, float], ...]
NONE_LEFT_OUT: Final[Mapping[str, int]] = MappingProxyType({})
Labels = Callable[[Sequence[int], Mapping[str, int], torch.Tensor, torch.Tensor], torch.Tensor]
"""Makes the labels of a batch from indices of examples, class names -> indices, and padded ids and mask (B, T)."""


class Scores(Protocol):
    """Row-by-row scores of evaluations."""

    def add(self, batch: Batch, predictions: torch.Tensor, key: int) -> Values:
        """Score predictions of the task's head; return numbers for the report, summed by name.

        ``key`` is of the evaluation; windows of one question may be in different calls.
        """

    def forget(self) -> None:
        """Drop the scores of unfinished evaluations."""


class Examples(Protocol):
    """The examples of one owner for training or evaluation."""

    @property
    def scores(self) -> Scores | None:
        """Scores of evaluations; None = the head's own numbers suffice."""

    @property
    def of_rows(self) -> Sequence[int]:
        """Number of examples of each row; the examples of a row follow those of the row before."""

    @property
    def cut_rows(self) -> int:
        """Number of examples cut at ``train.max_length``, among those encoded so far."""

    @property
    def left_out(self) -> Mapping[str, int]:
        """Reason -> number of rows without an example."""

    def __len__(self) -> int:
        """Number of examples."""

    def batch(self, chosen: Sequence[int], targets: Mapping[str, int]) -> Batch:
        """Make a batch of examples by index, padded to the longest; ``targets`` maps class names to indices."""

    def width(self, chosen: Sequence[int]) -> int:
        """Padded length of a batch of the chosen examples, in tokens."""


class Source(Protocol):
    """Reader of a task's files."""

    def read(self, path: Path) -> Rows:
        """Read the rows of a file; raises ``DataError``."""

    def examples(self, rows: Sequence[Any], labels: Sequence[Any]) -> Examples:
        """Make the examples of these rows; ``labels`` are their ``Rows.targets``."""


class TextExamples:
    """The ``Examples`` of all tasks of texts.

    Args:
        rows: tokens of each example, encoded at their use or before.
        of_rows: see ``Examples``; None = one example for each row.
        cut_rows: see ``Examples``; an ``Encoder`` counts them itself.
        names_examples: whether a batch says which examples it has, for its scores.
    """

    def __init__(
        self,
        rows: Sequence[TokenRow],
        labels: Labels,
        padder: Padder,
        *,
        scores: Scores | None = None,
        of_rows: Sequence[int] | None = None,
        cut_rows: int = 0,
        left_out: Mapping[str, int] = NONE_LEFT_OUT,
        names_examples: bool = False,
    ) -> None:
        self._rows, self._labels, self._padder = rows, labels, padder
        self.scores, self.left_out = scores, left_out
        self._of_rows, self._cut_rows, self._names_examples = of_rows, cut_rows, names_examples

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def of_rows(self) -> Sequence[int]:
        """Number of examples of each row."""
        return [1] * len(self) if self._of_rows is None else self._of_rows

    @property
    def cut_rows(self) -> int:
        """Number of cut rows, among those encoded so far."""
        return self._rows.cut_rows if isinstance(self._rows, Encoder) else self._cut_rows

    def batch(self, chosen: Sequence[int], targets: Mapping[str, int]) -> Batch:
        """Make a batch of the chosen examples."""
        ids, mask, types = self._padder.pad([self._rows[index] for index in chosen])
        places = torch.tensor(list(chosen), dtype=torch.int64) if self._names_examples else None
        labels = self._labels(chosen, targets, ids, mask)
        return Batch(ids=ids, mask=mask, token_type_ids=types, labels=labels, examples=places)

    def width(self, chosen: Sequence[int]) -> int:
        """Number of tokens of the longest chosen example."""
        return max(len(self._rows[index].ids) for index in chosen)


def class_labels(names: Sequence[str]) -> Labels:
    """Label each example with the index of its class."""

    def labels(chosen: Sequence[int], targets: Mapping[str, int], *_: torch.Tensor) -> torch.Tensor:
        return torch.tensor([targets.get(names[index], IGNORED) for index in chosen], dtype=torch.int64)

    return labels


class Sums(Protocol):
    """Sums over the rows of an evaluation."""

    def add(self, batch: Batch, predictions: torch.Tensor) -> None:
        """Add the rows of a micro-batch and their predictions."""

    def values(self, *, are_few: bool) -> Values:
        """Return the sums by name; with ``are_few`` none that could reveal a row."""


class SummedScores:
    """The ``Scores`` of predictions summed over a whole evaluation; only these sums leave the owner, none of a batch.

    Args:
        num_rows: of an evaluation.
        no_sums: makes empty sums.

    Attributes:
        min_rows: with fewer rows no sum is reported, because it could reveal a row.
    """

    def __init__(self, num_rows: int, no_sums: Callable[[], Sums]) -> None:
        self._num_rows, self._no_sums, self.min_rows = num_rows, no_sums, MIN_ROWS
        self._open: dict[int, tuple[int, Sums]] = {}

    def add(self, batch: Batch, predictions: torch.Tensor, key: int) -> Values:
        """Add predictions up; return all sums with the last row, before it nothing."""
        rows, sums = self._open.pop(key) if key in self._open else (0, self._no_sums())
        sums.add(batch, predictions)
        rows += len(batch.labels)
        if rows < self._num_rows:
            self._open[key] = rows, sums
            return ()
        return sums.values(are_few=self._num_rows < self.min_rows)

    def forget(self) -> None:
        """Drop the sums of an unfinished evaluation."""
        self._open.clear()


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


class PackedExamples:
    """The ``Examples`` of a language model packed into sequences, which are the examples of batches then.

    Every owner packs its own rows by their lengths, equally each time (``pack_rows``); all else of a run counts
    sequences. Each row keeps its tokens and labels, so that its first token is no target of the row before.
    """

    def __init__(self, rows: Examples, max_length: int) -> None:
        self.rows = rows
        lengths = [rows.width([row]) for row in range(len(rows))]
        self._sequences = pack_rows(lengths, max_length)
        self.num_tokens = sum(lengths)
        self.left_out = rows.left_out
        self.scores = None

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def of_rows(self) -> Sequence[int]:
        """One for each sequence."""
        return [1] * len(self)

    @property
    def cut_rows(self) -> int:
        """Number of cut rows."""
        return self.rows.cut_rows

    def batch(self, chosen: Sequence[int], targets: Mapping[str, int]) -> Batch:
        """Make a batch of sequences, padded to the longest; the mask has 1 and 2 in turn for their rows."""
        sequences = [self._sequence(index, targets) for index in chosen]
        width = max(sequence.ids.shape[1] for sequence in sequences)
        padded = [Batch(*map(_padded, sequence[:4], (width,) * 4, (0, 0, 0, IGNORED))) for sequence in sequences]
        return Batch(*(torch.cat(each) for each in zip(*(sequence[:4] for sequence in padded), strict=True)))

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
