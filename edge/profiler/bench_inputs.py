"""The inputs of a measurement: a plan in which this node hosts one block, and batches in the sizes to be timed.

Where the job has operations with several subnets a block, the turns of the course may carry tables; a table in which
half of the block's subnets are passed by gives the time of a part of a block.

A batch that is computed on has exactly the wanted size: real rows, repeated or cut. Making a batch takes as long as
with the real rows, because a real one is made and thrown away.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch

from edge.data.dataset import OwnerDataset, RowPredictions
from edge.data.tokens import Batch
from ringtune.costs.measurement import Size
from ringtune.job.job import Job
from ringtune.models.family import CAUSAL_LM, QUESTION_ANSWERING, TAGGING
from ringtune.schedule.course import Course, FrozenWeights
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
    *,
    rows: int,
    tokens: int,
    block: int,
    num_blocks: int,
    hidden_size: int,
    labels: tuple[str, ...],
    has_rows: bool,
    subnets: int = 1,
    frozen: FrozenWeights | None = None,
) -> Plan:
    """Make a plan in which this node hosts one block and absent nodes host the rest.

    Step s unfreezes block N - 1 - s of N blocks.

    Args:
        job: for batch, wire dtype and seed.
        rows: of a micro-batch.
        tokens: of the longest row.
        block: that is hosted.
        num_blocks: of the model.
        hidden_size: of the model.
        labels: agreed class names.
        has_rows: whether this node is the owner.
        subnets: of each block, where turns shall carry tables.
        frozen: how frozen weights are held.
    """
    pieces = (
        Slice(node=_BELOW, start=0, stop=block),
        Slice(node=NODE, start=block, stop=block + 1),
        Slice(node=_ABOVE, start=block + 1, stop=num_blocks),
    )
    batch = rows * job.train.microbatches
    course = Course(
        method=RingAda(every_steps=1),
        num_blocks=num_blocks,
        owners=(Owner(node=NODE if has_rows else _ABOVE, train_rows=batch, eval_rows=batch),),
        num_steps=num_blocks + 1,
        local_iterations=1,
        batch_size=batch,
        microbatches=job.train.microbatches,
        max_length=tokens,
        hidden_size=hidden_size,
        wire_dtype=job.wire.dtype,
        labels=labels,
        seed=job.train.seed,
        choice=_any_table(subnets) if subnets > 1 else None,
        frozen=frozen,
    )
    return Plan.of(course, Placement(slices=tuple(piece for piece in pieces if piece.num_blocks)))


def whole_plan(plan: Plan) -> Plan:
    """Make a plan of a few steps in which this node owns and hosts everything."""
    course = plan.course
    owners = (dataclasses.replace(course.owners[0], node=NODE, eval_rows=0),)
    course = dataclasses.replace(course, owners=owners, num_steps=min(_HANDLED_STEPS, course.num_steps), choice=None)
    return Plan.of(course, Placement(slices=(Slice(node=NODE, start=0, stop=course.num_blocks),)))


def part_subnets(subnets: int) -> int:
    """How many of a block's subnets are active where a part of it is timed: half of them, or the smaller half."""
    return subnets // 2


def part_table(course: Course, block: int, subnets: int) -> Operations:
    """Make the table in which the upper subnets of ``block`` are passed by, and all else is full."""
    active, start = part_subnets(subnets), block * subnets
    row = list(FULL * course.num_blocks * subnets)
    row[start + active : start + subnets] = SHORTCUT * (subnets - active)
    rows = ("".join(row),) * course.microbatches
    batch = BatchOperations(owner=course.owners[0].node, batch_id=0, rows=rows)
    return Operations(batches=(batch,), subnets=subnets)


def _any_table(subnets: int) -> Choice:
    """Make the choice of operations of a course in which turns may carry any table with so many subnets a block."""
    capacity = BlockCapacity(full=1.0, forward_only=0.0, forward=1.0, backward=1.0)
    return Choice(policy=Policy.RANDOM.value, subnets=subnets, capacities=(capacity,))


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

    def score(self, course: Course, item: Item, batch: Batch, found: RowPredictions) -> tuple[tuple[str, float], ...]:
        """Score the predictions on the real rows behind the batch, as an evaluation does."""
        return self._real.score(course, item, batch, found)


def _first(item: Item, kind: StepKind) -> Item:
    return Item(seq=item.seq, kind=kind, step=item.step, owner=item.owner, batch=0, rows=item.rows, turn=item.turn)


def resized(batch: Batch, size: Size, task: str) -> Batch:
    """Repeat or cut a batch's rows and tokens to another size; every other row ends in padding.

    Args:
        batch: a real one.
        size: the wanted one; 0 tokens = leave the length.
        task: of the job, which decides what the labels are.
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
