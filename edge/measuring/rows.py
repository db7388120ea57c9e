"""Make batches of an owner's rows in the sizes at which work is timed.

The batch that is computed on has exactly the wanted size: real rows, repeated or cut. Making a batch costs what it
costs with the real rows, because a real one is made and thrown away.
"""

from __future__ import annotations

from typing import Any

import torch

from edge.data.rows import OwnerDataset, Predicting
from edge.data.tokens import Batch
from ringtune.costs.measured.measuring import Size
from ringtune.models.family import CAUSAL_LM, QUESTION_ANSWERING, TAGGING
from ringtune.schedule.course import Course
from ringtune.schedule.turns.turns import Item, StepKind

_PADDED_SHARE = 4


class SizedRows:
    """Stands in for an ``OwnerDataset``, with batches of a wanted size.

    Args:
        real: the owner's rows.
        task: of the job.
        rows: of a batch.

    Attributes:
        train_rows: of one batch.
        eval_rows: of one batch.
    """

    def __init__(self, real: OwnerDataset, task: str, rows: int) -> None:
        self._real = real
        self._task = task
        self._size = Size(rows, 0)
        self._made: dict[tuple[StepKind, Size], Batch] = {}
        self.train_rows = self.eval_rows = rows

    def take_size(self, rows: int, tokens: int) -> None:
        """Set the size of the batches from now on; 0 tokens leave the length as it is, for images."""
        self._size = Size(rows, tokens)

    def set_labels(self, labels: tuple[str, ...]) -> None:
        """Set the classes of the measurement."""
        self._real.set_labels(labels)

    def batch(self, course: Course, item: Item) -> Batch:
        """Make a batch of the wanted size, in the time that a batch of real rows takes."""
        kind = StepKind.EVALUATE if item.kind is StepKind.EVALUATE and self._real.eval_rows else StepKind.TRAIN
        real = self._real.batch(course, _first(item, kind))
        if (kind, self._size) not in self._made:
            self._made[kind, self._size] = resized(real, self._size, self._task)
        return self._made[kind, self._size]

    def score(self, course: Course, item: Item, batch: Batch, found: Predicting) -> tuple[tuple[str, float], ...]:
        """Score the predictions on the real rows behind the batch, as an evaluation does."""
        return self._real.score(course, item, batch, found)


def _first(item: Item, kind: StepKind) -> Item:
    return Item(seq=item.seq, kind=kind, step=item.step, owner=item.owner, batch=0, rows=item.rows, turn=item.turn)


def resized(batch: Batch, size: Size, task: str) -> Batch:
    """Repeat or cut a batch's rows and tokens to another size; every other row ends in padding.

    Args:
        batch: a real one.
        size: the wanted one; 0 tokens = leave the length.
        task: of the job, which says what the labels are.
    """
    chosen = torch.arange(size.rows) % len(batch.mask)
    taken = Batch(*(None if tensor is None else tensor[chosen] for tensor in batch))  # type: ignore[arg-type]
    if not size.tokens:
        return taken
    columns = torch.arange(size.tokens) % taken.mask.shape[1]
    labels = taken.labels
    if task in (CAUSAL_LM, TAGGING):
        labels = labels[:, columns]
    elif task == QUESTION_ANSWERING:
        labels = labels.clamp(max=size.tokens - 1)
    return taken._replace(
        ids=taken.ids[:, columns],
        mask=uneven_mask(size),
        token_type_ids=taken.token_type_ids[:, columns],
        labels=labels,
    )


def uneven_mask(size: Size) -> torch.Tensor:
    """Make a mask (B, T) in which rows 0, 2, 4, ... end in a quarter of padding: 8 tokens are 6 ones and 2 zeros.

    A mask costs time and memory, and most batches of a run have one.
    """
    mask = torch.ones(size.rows, size.tokens, dtype=torch.int64)
    mask[::2, size.tokens - size.tokens // _PADDED_SHARE :] = 0
    return mask


def known_labels(job_labels: tuple[str, ...], real: OwnerDataset | None, *, has_classes: bool) -> tuple[str, ...]:
    """Sort all class names that the job or this node's rows have; made-up names fill up to two.

    A task without classes has none. Example: rows of the class "yes" alone give "yes" and "(one)".
    """
    if not has_classes:
        return ()
    own: set[Any] = {*real.labels, *real.eval_labels} if real else set()
    labels = sorted({*job_labels, *own})
    return tuple([*labels, *(name for name in ("(one)", "(other)") if name not in labels)][: max(2, len(labels))])
