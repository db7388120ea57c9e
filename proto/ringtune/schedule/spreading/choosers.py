"""The choosers of a course: the subnets that each have knapsacks of their own, and where each begins to choose.

A *chooser* is one subnet of one block, or all blocks of a group, which share one code. Where scores tie, a chooser
prefers the micro-batches from its ``first`` one on, cyclically. Weight magnitudes are the same for every micro-batch,
so this rule alone decides there. Example: 6 subnets of one block, 3 of 5 micro-batches full::

    micro-batch   0 1 2 3 4
    subnet 0      1 1 1 3 3     first 0
    subnet 1      1 1 1 3 3     first 0
    subnet 2      3 1 1 1 3     first 1
    subnet 3      3 3 1 1 1     first 2
    subnet 4      1 3 3 1 1     first 3
    subnet 5      1 1 3 3 1     first 4

Each subnet is full as often as the others, each micro-batch has 3 or 4 full subnets, and those are neighbours (the
last and the first one too), so that their weights lie in one piece. Each further block is rotated such that all
micro-batches have as even a number of full subnets as can be, and each further batch begins one micro-batch later.

With ``ties = "together"`` all choosers have the same first micro-batch, as if the items of Algorithm 2 stood in one
order: whole micro-batches are full, and others pass all blocks by, with the messages that they would have been.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ringtune.schedule.course import Course
from ringtune.schedule.operations.choice import BlockCapacity, Ties

_SLACK = 1e-9
"""What a capacity may lack of a whole row, of rounding in its last bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chooser:
    """One subnet of one block, or one group of blocks, whose operations are chosen together.

    Attributes:
        start: the first block.
        stop: the block after the last one.
        subnet: which subnet of the block; 0 in a group.
        first: the micro-batch of batch 0 from which on it prefers micro-batches of equal scores.
        capacity: of all its blocks together.
    """

    start: int
    stop: int
    subnet: int
    first: int
    capacity: BlockCapacity

    def first_of(self, batch_id: int, microbatches: int) -> int:
        """The micro-batch from which on it prefers micro-batches of equal scores in a batch."""
        return (self.first + batch_id) % microbatches

    def order(self, batch_id: int, microbatches: int) -> list[int]:
        """All micro-batches of a batch in the order of preference where scores tie."""
        first = self.first_of(batch_id, microbatches)
        return [(first + at) % microbatches for at in range(microbatches)]

    def full_rows(self, share: float = 1.0) -> int:
        """Rows of full operations that C^pf of a batch allows; ``share`` is of a whole batch's rows."""
        return whole(self.capacity.full * share, self.capacity.forward + self.capacity.backward)

    def forward_rows(self, share: float = 1.0) -> int:
        """Rows of forward-only operations that C^po of a batch allows; ``share`` is of a whole batch's rows."""
        return whole(self.capacity.forward_only * share, self.capacity.forward)


class Limits(NamedTuple):
    """What one chooser may do for the micro-batches of one batch, in whole numbers.

    Attributes:
        costs: of each micro-batch: its rows, or 1 where micro-batches are counted.
        full: of full operations together; at least one micro-batch fits.
        forward_only: of forward-only ones.
    """

    costs: tuple[int, ...]
    full: int
    forward_only: int


def limits_of(course: Course, chooser: Chooser, sizes: tuple[int, ...]) -> Limits:
    """What a chooser may do for a batch with micro-batches of so many rows.

    A batch with fewer rows than others has its share, or with fewer micro-batches where these are counted.
    """
    if course.choice is not None and course.choice.is_counted:
        rows = course.batch_size / course.microbatches
        costs, share = (1,) * len(sizes), len(sizes) / course.microbatches / rows
    else:
        costs, share = sizes, sum(sizes) / course.batch_size
    full = chooser.full_rows(share)
    return Limits(costs, max(full, min(costs)) if chooser.capacity.full else full, chooser.forward_rows(share))


def whole(capacity: float, cost: float) -> int:
    """How many whole times a cost fits a capacity: the rounding of capacities, down to rows; none at no cost."""
    return math.floor(capacity / cost * (1 + _SLACK) + _SLACK) if cost else 0


@functools.lru_cache(maxsize=16)
def choosers_of(course: Course) -> tuple[Chooser, ...]:
    """All choosers of a course, by block and subnet; none where tables are given.

    Blocks that may not train have none. How long the run is does not matter, so that a longer run has the same ones.
    """
    choice, found = course.choice, list[Chooser]()
    if choice is None or choice.tables:
        return ()
    totals = [0] * course.microbatches
    for start, stop in _ranges(course):
        capacity = _sum([choice.capacity(block) for block in range(start, stop)])
        chooser = Chooser(start=start, stop=stop, subnet=0, first=0, capacity=capacity)
        limits = limits_of(course, chooser, course.microbatch_sizes())
        full = min(course.microbatches, round(limits.full * course.microbatches / sum(limits.costs)))
        if choice.ties == Ties.TOGETHER:
            firsts = [0] * choice.subnets
        else:
            firsts, totals = _firsts(totals, choice.subnets, full)
        found += [dataclasses.replace(chooser, subnet=subnet, first=first) for subnet, first in enumerate(firsts)]
    return tuple(found)


def _firsts(totals: Sequence[int], subnets: int, full: int) -> tuple[list[int], list[int]]:
    """Where each subnet of a block begins, and how many subnets are full for each micro-batch up to this block.

    The block is rotated such that those totals are as even as can be; among equal rotations it takes the lowest.
    """
    count = len(totals)
    found = []
    for turned in range(count):
        firsts = [(turned + subnet * count // subnets) % count for subnet in range(subnets)]
        after = list(totals)
        for first in firsts:
            for micro in range(first, first + full):
                after[micro % count] += 1
        found.append((sum(each * each for each in after), turned, firsts, after))
    return min(found)[2:]


def _ranges(course: Course) -> list[tuple[int, int]]:
    groups = course.choice.groups if course.choice else ()
    shared = {block: at for at, group in enumerate(groups) for block in range(*group)}
    blocks, found = [block for block in range(course.num_blocks) if block in course.trainable], list[list[int]]()
    for block in blocks:
        same = found and block - 1 == found[-1][-1] and shared.get(block, -1) == shared.get(block - 1, -2)
        if same:
            found[-1].append(block)
        else:
            found.append([block])
    return [(run[0], run[-1] + 1) for run in found]


def _sum(capacities: Sequence[BlockCapacity]) -> BlockCapacity:
    if len(capacities) == 1:
        return capacities[0]
    return BlockCapacity(
        full=math.fsum(each.full for each in capacities),
        forward_only=math.fsum(each.forward_only for each in capacities),
        forward=math.fsum(each.forward for each in capacities),
        backward=math.fsum(each.backward for each in capacities),
    )
