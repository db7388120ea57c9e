"""Inputs of a measurement: a plan in which this node hosts one block, and batches of the sizes to be timed.

Where the job has operations, turns may carry a table in which half of the block's subnets take the shortcut; its time
is that of a part of a block. A computed batch has exactly the given size: real rows, repeated or cut. To make one takes
as long as with real rows, because a real batch is made first and thrown away.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch

from edge.data.dataset import OwnerDataset
from edge.data.examples import Values
from edge.data.tokens import Batch
from ringtune.costs.measurement import Size
from ringtune.job.job import Job
from ringtune.models.family import LANGUAGE_TASKS, QUESTION_ANSWERING, TAGGING, Dimensions
from ringtune.models.passed_values import PassedValues
from ringtune.schedule.course import AS_COMPUTED, Course, FrozenWeights
from ringtune.schedule.methods import RingAda
from ringtune.schedule.operation_tables import (
    FULL,
    SHORTCUT,
    BatchOperations,
    BlockCapacity,
    Choice,
    Operations,
    Policy,
)
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner
from ringtune.schedule.turns import Item, StepKind

NODE: Final = "measured"
_BELOW, _ABOVE = "below", "above"
_HANDLED_STEPS = 4


def bench_plan(
    job: Job,
    size: Size,
    dimensions: Dimensions,
    *,
    block: int,
    labels: tuple[str, ...],
    has_rows: bool,
    subnets: int = 1,
    frozen: FrozenWeights | None = None,
    passed: PassedValues | None = None,
) -> Plan:
    """Make a plan in which this node hosts ``block`` alone; step s unfreezes block N - 1 - s of N blocks.

    ``block`` is the index of the hosted block; ``labels`` are class names that all owners agreed on; ``has_rows``:
    this node is the owner. With more than one of ``subnets`` a block, turns may carry operation tables.
    """
    batch, num_blocks = size.rows * job.train.microbatches, dimensions.num_blocks
    pieces = (
        Slice(node=_BELOW, start=0, stop=block),
        Slice(node=NODE, start=block, stop=block + 1),
        Slice(node=_ABOVE, start=block + 1, stop=num_blocks),
    )
    course = Course(
        method=RingAda(every_steps=1),
        num_blocks=num_blocks,
        owners=(Owner(node=NODE if has_rows else _ABOVE, train_rows=batch, eval_rows=batch),),
        num_steps=num_blocks + 1,
        local_iterations=1,
        batch_size=batch,
        microbatches=job.train.microbatches,
        max_length=size.tokens,
        hidden_size=dimensions.hidden,
        wire_dtype=job.wire.dtype,
        labels=labels,
        seed=job.train.seed,
        choice=_any_table(subnets) if subnets > 1 else None,
        frozen=frozen,
        compute=job.train.compute or AS_COMPUTED,
        entering=() if passed is None else passed.entering,
        returning=() if passed is None else passed.returning,
    )
    return Plan.of(course, Placement(slices=tuple(piece for piece in pieces if piece.num_blocks)))


def whole_plan(plan: Plan) -> Plan:
    """Make a plan of a few steps in which this node owns and hosts everything."""
    course = plan.course
    owners = (dataclasses.replace(course.owners[0], node=NODE, eval_rows=0),)
    course = dataclasses.replace(course, owners=owners, num_steps=min(_HANDLED_STEPS, course.num_steps), choice=None)
    return Plan.of(course, Placement(slices=(Slice(node=NODE, start=0, stop=course.num_blocks),)))


def part_subnets(subnets: int) -> int:
    """Number of active subnets where a part of a block is timed: half, rounded down."""
    return subnets // 2


def part_table(course: Course, block: int, subnets: int) -> Operations:
    """Make the table in which the upper subnets of ``block`` take the shortcut and all others are full."""
    active, start = part_subnets(subnets), block * subnets
    row = list(FULL * course.num_blocks * subnets)
    row[start + active : start + subnets] = SHORTCUT * (subnets - active)
    rows = ("".join(row),) * course.microbatches
    batch = BatchOperations(owner=course.owners[0].node, batch_id=0, rows=rows)
    return Operations(batches=(batch,), subnets=subnets)


def _any_table(subnets: int) -> Choice:
    """Make a choice of operations that allows turns any table with so many subnets a block."""
    capacity = BlockCapacity(full=1.0, forward_only=0.0, forward=1.0, backward=1.0)
    return Choice(policy=Policy.RANDOM.value, subnets=subnets, capacities=(capacity,))


_PADDED_SHARE = 4


class SizedRows:
    """An ``OwnerDataset`` with batches of a chosen size, made of the owner's rows."""

    def __init__(self, real: OwnerDataset, task: str, rows: int) -> None:
        self._real, self._task = real, task
        self._size = Size(rows, 0)
        self._made: dict[tuple[StepKind, Size], Batch] = {}
        self.train_rows = self.eval_rows = rows

    def take_size(self, rows: int, tokens: int) -> None:
        """Set the size of later batches; 0 tokens keep the real length, for images."""
        self._size = Size(rows, tokens)

    def set_labels(self, labels: tuple[str, ...]) -> None:
        """Set the classes of the real rows."""
        self._real.set_labels(labels)

    def batch(self, course: Course, item: Item) -> Batch:
        """Make a batch of the set size; takes at least as long as a batch of real rows."""
        kind = StepKind.EVALUATE if item.kind is StepKind.EVALUATE and self._real.eval_rows else StepKind.TRAIN
        real = self._real.batch(course, _first(item, kind))
        if (kind, self._size) not in self._made:
            self._made[kind, self._size] = resized(real, self._size, self._task)
        return self._made[kind, self._size]

    def score(self, course: Course, item: Item, batch: Batch, predictions: torch.Tensor | None) -> Values:
        """Score the predictions with the real rows, as an evaluation does."""
        return self._real.score(course, item, batch, predictions)


def _first(item: Item, kind: StepKind) -> Item:
    return Item(seq=item.seq, kind=kind, step=item.step, owner=item.owner, batch=0, rows=item.rows, turn=item.turn)


def resized(batch: Batch, size: Size, task: str) -> Batch:
    """Repeat or cut a batch to ``size``; rows 0, 2, 4, ... end in padding.

    0 tokens keep the length. The task decides whether labels are per row, per token or positions.
    """
    chosen = torch.arange(size.rows) % len(batch.mask)
    taken = Batch(*(None if tensor is None else tensor[chosen] for tensor in batch))  # type: ignore[arg-type]
    if not size.tokens:
        return taken
    columns = torch.arange(size.tokens) % taken.mask.shape[1]
    labels = taken.labels
    if task in (*LANGUAGE_TASKS, TAGGING):
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
    """Make a mask (B, T) in which the last quarter of rows 0, 2, 4, ... is padding: 8 tokens are 6 ones and 2 zeros.

    A mask costs time and memory, and most batches of a run have one.
    """
    mask = torch.ones(size.rows, size.tokens, dtype=torch.int64)
    mask[::2, size.tokens - size.tokens // _PADDED_SHARE :] = 0
    return mask


def known_labels(job_labels: tuple[str, ...], real: OwnerDataset | None, *, has_classes: bool) -> tuple[str, ...]:
    """Sort all class names of the job and of this node's rows; made-up names fill up to two.

    A task without classes has none. Example: rows of class "yes" alone give "yes" and "(one)".
    """
    if not has_classes:
        return ()
    own: set[Any] = {*real.labels, *real.eval_labels} if real else set()
    labels = sorted({*job_labels, *own})
    return tuple([*labels, *(name for name in ("(one)", "(other)") if name not in labels)][: max(2, len(labels))])
