"""The plan of a measurement: this node hosts one block of a model whose other blocks are elsewhere.

Where the job has operations with several subnets a block, the turns of the course may carry tables; a table in which
half of the block's subnets are passed by tells what a part of a block takes.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from ringtune.jobs.job import Job
from ringtune.schedule.course import Course
from ringtune.schedule.extent import Owner
from ringtune.schedule.frozen_weights import FrozenWeights
from ringtune.schedule.methods import RingAda
from ringtune.schedule.operations.choice import BlockCapacity, Choice, Policy
from ringtune.schedule.operations.codes import FULL, SHORTCUT
from ringtune.schedule.operations.table import BatchOperations, Operations
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan

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
    """Make the choice of a course whose turns may carry any table with so many subnets a block."""
    capacity = BlockCapacity(full=1.0, forward_only=0.0, forward=1.0, backward=1.0)
    return Choice(policy=Policy.RANDOM.value, subnets=subnets, capacities=(capacity,))
