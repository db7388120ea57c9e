"""When a batch comes again: the steps of its later visits, by the order of turns and batches.

Example: an owner with three batches, turns of two steps, two owners that take turns::

    its position in the stream    0  1    2  3    4  5
    batch                         1  0    2  2    0  1      each pass over the rows in an order of its own
    step                          0  1    4  5    8  9
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ringtune.schedule.course import Course, stream_of
from ringtune.schedule.owner_turns import EQUAL, turn_counts, weights
from ringtune.schedule.turns.boundaries import evaluation_is_due
from ringtune.schedule.turns.turns import Item, StepKind


def later_visits(course: Course, item: Item) -> Iterator[int]:
    """Yield the steps at which the batch of a train or evaluation item comes again, in ascending order."""
    if item.kind is StepKind.EVALUATE:
        boundaries = range(_next_boundary(course, item.step), course.num_steps, course.local_iterations)
        yield from (step for step in boundaries if evaluation_is_due(course, step))
        if item.step < course.num_steps:
            yield course.num_steps
        return
    stream = stream_of(course.plain, item.owner)
    batch, index = stream.batch_id(item.batch), item.batch // stream.num_batches + 1
    while step_of(course, item.owner, index * stream.num_batches) < course.num_steps:
        step = step_of(course, item.owner, stream.position(batch, index))
        if step >= course.num_steps:
            break
        yield step
        index += 1


def step_of(course: Course, owner: str, position: int) -> int:
    """The step at which an owner trains the batch at a position of its stream, in a run without end."""
    turn, offset = divmod(position, course.local_iterations)
    return _turn_of(course.plain, owner, turn) * course.local_iterations + offset


def _next_boundary(course: Course, step: int) -> int:
    return (step // course.local_iterations + 1) * course.local_iterations


@functools.lru_cache(maxsize=1 << 14)
def _turn_of(course: Course, owner: str, count: int) -> int:
    """The number of an owner's train turn that comes after ``count`` others of its own, among those of all owners.

    Turns of an owner that was left out came before it.
    """
    left_out = sum(one.turns for one in course.left_out)
    at = next(index for index, one in enumerate(course.owners) if one.node == owner)
    if course.turns == EQUAL:
        return left_out + count * len(course.owners) + at
    own = weights(course.owners, course.turns)
    least, most = count, (count + 1) * (sum(own) // own[at] + 1) + len(own)
    while least < most:  # the first number of turns by which it has had one more than ``count``
        middle = (least + most) // 2
        if turn_counts(own, middle)[at] > count:
            most = middle
        else:
            least = middle + 1
    return left_out + least - 1
