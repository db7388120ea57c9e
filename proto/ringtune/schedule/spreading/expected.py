"""The table that predictions assume as long as nobody knows the scores.

It has as many operations of each kind as the capacities allow, spread as the knapsacks spread them where all scores
tie. For a course of three subnets a block that are full for 3 of 5 micro-batches and forward-only for one::

    block     0   1
    micro 0   131 321
    micro 1   112 131
    micro 2   113 112
    micro 3   211 113
    micro 4   321 211
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

from ringtune.schedule.course import Course
from ringtune.schedule.operations.choice import Policy
from ringtune.schedule.operations.codes import FORWARD_ONLY, FULL, SHORTCUT
from ringtune.schedule.operations.table import BatchOperations, Operations
from ringtune.schedule.rows.batches import num_batches
from ringtune.schedule.spreading.choosers import Chooser, choosers_of, limits_of, whole


@functools.lru_cache(maxsize=16)
def expected_table(course: Course) -> Operations:
    """The table of a course, or what its choice will be like: counts as its capacities allow, evenly spread.

    Pruning keeps so many whole subnets, here evenly spread over the model; which ones is not known before the scores.
    A course without table and choice has an empty table: everything is full.
    """
    choice = course.choice
    if course.operations is not None or choice is None:
        return course.operations or Operations()
    if choice.tables:
        return choice.tables[0].operations
    if choice.policy == Policy.STANDARD:
        return Operations(subnets=choice.subnets)
    codes_of = _pruned if Policy(choice.policy).is_pruning else _spread
    batches = []
    for owner in course.owners:
        sizes = course.microbatch_sizes(course.batch_rows(owner))
        for batch_id in range(num_batches(owner.train_rows, course.batch_size)):
            rows = codes_of(course, sizes, batch_id % course.microbatches)
            batches.append(BatchOperations(owner=owner.node, batch_id=batch_id, rows=rows))
    return Operations(batches=tuple(batches), subnets=choice.subnets)


def table_rows(course: Course, codes: Iterable[tuple[Chooser, Sequence[str]]]) -> tuple[str, ...]:
    """The rows of one batch; all subnets are full whose chooser is not named, and all micro-batches that are not.

    Args:
        course: with a choice.
        codes: of some choosers, the operation for each micro-batch.
    """
    subnets = course.choice.subnets if course.choice else 1
    rows = [[FULL] * (course.num_blocks * subnets) for _ in range(course.microbatches)]
    for chooser, found in codes:
        for block in range(chooser.start, chooser.stop):
            for micro, code in enumerate(found):
                rows[micro][block * subnets + chooser.subnet] = code
    return tuple("".join(row) for row in rows)


def kept_subnets(course: Course) -> float:
    """How many subnets pruning keeps of those that train: the share that all capacities have of the whole cost.

    Each block of a group counts as one.
    """
    kept = 0.0
    for chooser in choosers_of(course):
        each = chooser.capacity
        share = (each.full + each.forward_only) / ((each.forward + each.backward) * course.batch_size)
        kept += min(1.0, share) * (chooser.stop - chooser.start)
    return kept


@functools.lru_cache(maxsize=1024)
def _spread(course: Course, sizes: tuple[int, ...], batch_id: int) -> tuple[str, ...]:
    return table_rows(course, [(chooser, _codes(course, chooser, sizes, batch_id)) for chooser in choosers_of(course)])


def _codes(course: Course, chooser: Chooser, sizes: tuple[int, ...], batch_id: int) -> list[str]:
    limits, codes = limits_of(course, chooser, sizes), [SHORTCUT] * len(sizes)
    order = chooser.order(batch_id, len(sizes))
    for code, limit in ((FULL, limits.full), (FORWARD_ONLY, limits.forward_only)):
        rest = [micro for micro in order if codes[micro] == SHORTCUT]
        for at in _taken(tuple(limits.costs[micro] for micro in rest), limit):
            codes[rest[at]] = code
    return codes


@functools.lru_cache(maxsize=1024)
def _taken(costs: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """The items that a knapsack takes where all are worth the same: as many as fit, and none that can be left out.

    Of all such choices it is the one that leaves out the latest item, then the next latest one, and so on.
    """
    found, needed = [], _most(costs, limit)
    for at in reversed(range(len(costs))):
        if _most(costs[:at], limit) < needed:
            found.append(at)
            limit, needed = limit - costs[at], needed - 1
    return tuple(found)


def _most(costs: Sequence[int], limit: int) -> int:
    """How many items fit together."""
    return sum(each <= limit for each in itertools.accumulate(sorted(costs)))


@functools.lru_cache(maxsize=16)
def _pruned(course: Course, sizes: tuple[int, ...], _batch_id: int) -> tuple[str, ...]:
    choosers = choosers_of(course)
    total = sum(chooser.stop - chooser.start for chooser in choosers)
    keep, kept, passed, found = kept_subnets(course), 0, 0, []
    for chooser in choosers:
        blocks = chooser.stop - chooser.start
        passed += blocks
        fits = kept + blocks <= whole(keep * passed / total, 1)
        kept += blocks if fits else 0
        found.append((chooser, (FULL if fits else SHORTCUT) * len(sizes)))
    return table_rows(course, found)
