"""Version of each unit that a forward must see, derived from the method: pure functions of (course, step).

A version is the number of updates of a unit so far. A forward sees all earlier updates, unless a method is stale on
purpose. Example: two items in flight at a unit, a turn of four steps::

    step              0  1  2  3 | 4  5
    forward sees      0  0  1  2 | 4  4      at the end of a turn everything is updated
"""

from __future__ import annotations

import functools

from ringtune.schedule.course import Course
from ringtune.schedule.turns import Item, StepKind
from ringtune.schedule.units import EMBEDDING, Units


def trained(course: Course, kind: StepKind, step: int) -> Units:
    """Return the units with a gradient of their weights in an item of this kind; empty without a backward.

    In a ``SCORE`` item these are all units that may train, without an invertible adapter, which has no score.
    """
    return _trained(course.plain, kind, step)


@functools.lru_cache(maxsize=4096)
def _trained(course: Course, kind: StepKind, step: int) -> Units:
    if not kind.has_backward:
        return Units(course.num_blocks)
    if kind is StepKind.SCORE:
        return course.trainable.within(0, course.head + 1)
    return course.method.trained(course, step)


def depth(course: Course, step: int) -> int:
    """Number of blocks that train at ``step``; ``course`` must have the run's decisions (``Course.decided``)."""
    return len(trained(course, StepKind.TRAIN, step).blocks)


@functools.lru_cache(maxsize=256)
def ever_trained(course: Course) -> Units:
    """Return every unit that trains at some step, or that the run may decide to train; none in a course of no steps."""
    soonest = course.soonest()
    return soonest.method.reach(soonest) if course.num_steps else Units(course.num_blocks)


def weight_version(course: Course, unit: int, step: int) -> int:
    """Number of updates of ``unit`` when all steps before ``step`` are done."""
    steps, offload = course.method.updates(course, unit, step), course.offload
    if offload is None or not offload.has_block(unit):
        return steps
    return offload.updates(steps, is_over=step >= course.num_steps)


def head_version(course: Course, step: int) -> int:
    """Number of updates of what an owner hands over when all steps before ``step`` are done: head, invertible adapter.

    Example: an invertible adapter that trains since step 4 and a head make 14 at step 9.
    """
    both = (course.head, EMBEDDING) if course.invertible else (course.head,)
    return sum(weight_version(course, unit, step) for unit in both)


def was_trained(course: Course, unit: int, step: int) -> bool:
    """Whether any step before ``step`` had a gradient of ``unit``, be it updated or, at a helper, only added up."""
    return course.method.updates(course, unit, step) > 0


def adds_up(course: Course, step: int) -> bool:
    """Whether gradients of steps before ``step`` wait for an update: a helped block's interval has not ended."""
    if course.offload is None or step >= course.num_steps:
        return False
    steps = (course.method.updates(course, block, step) for blocks in course.offload.blocks for block in range(*blocks))
    return any(count % course.offload.interval for count in steps)


def rate_at(course: Course, unit: int, step: int) -> tuple[int, int]:
    """Position of a unit's learning rate: updates before that of ``step``, and updates of the whole schedule."""
    if course.offload is not None and course.offload.has_block(unit):
        return course.offload.rate_at(step, course.num_steps)
    return course.method.rate_at(course, step)


def updated(course: Course, kind: StepKind, step: int) -> Units:
    """Return the units that are updated after an item of this kind; with helpers not every trained unit is."""
    return _updated(course.plain, kind, step)


@functools.lru_cache(maxsize=4096)
def _updated(course: Course, kind: StepKind, step: int) -> Units:
    units = trained(course, kind, step) if kind.has_update else Units(course.num_blocks)
    if course.offload is None:
        return units
    rises = (unit for unit in units if weight_version(course, unit, step + 1) > weight_version(course, unit, step))
    return Units.of(course.num_blocks, rises)


def in_flight(course: Course, unit: int) -> int:
    """Most train items between forward and update at ``unit``; 1 = no weight is ever stale."""
    return course.method.in_flight(course, unit)


@functools.lru_cache(maxsize=256)
def is_stale(course: Course) -> bool:
    """Whether any trainable unit may have several items in flight."""
    return any(in_flight(course, unit) > 1 for unit in course.trainable)


def may_be_stale(course: Course) -> bool:
    """Whether a unit may have several items in flight in some ring; used before a ring is chosen."""
    return course.method.in_flight_below(course, course.num_blocks) > 1


def forward_version(course: Course, unit: int, item: Item) -> int:
    """Number of updates of ``unit`` that a forward of ``item`` must see, neither more nor fewer.

    With one item in flight these are all earlier updates. With w items in flight, item k = 0, 1, ... of a turn sees all
    updates of earlier turns and ``max(0, k - w + 1)`` of that turn's.
    """
    stale = 0
    if item.kind.has_update:
        stale = min(item.step % course.local_iterations, in_flight(course, unit) - 1 + lag(course, unit))
    return weight_version(course, unit, item.step - stale)


def backward_version(course: Course, unit: int, item: Item) -> int:
    """Number of updates of ``unit`` before the backward of ``item``: all earlier ones, unless its host does not wait.

    If a host continues before its helper has updated, forward and backward see the same weights.
    """
    return forward_version(course, unit, item) if lag(course, unit) else weight_version(course, unit, item.step)


def lag(course: Course, unit: int) -> int:
    """Number of steps of a turn that the host of a unit may do before its helper has updated the unit."""
    return 0 if course.offload is None else course.offload.lag(unit)


def max_open_items(course: Course, start: int, stop: int) -> int:
    """Most items between forward and update at a host of the blocks ``[start, stop)``; 1 if it has none."""
    if start == stop:
        return 1
    return in_flight(course, start) + max(lag(course, block) for block in range(start, stop))


def awaits_next_backward(course: Course, unit: int, item: Item) -> bool:
    """Whether the update of ``item`` is installed only after the next item of its turn, forward and backward."""
    is_last = (item.step + 1) % course.local_iterations == 0 or item.step + 1 == course.num_steps
    return item.kind.has_update and not is_last and bool(lag(course, unit))


def awaited_forward(course: Course, unit: int, item: Item) -> int:
    """Return the step with the last forward that must pass ``unit`` before the update of ``item`` there.

    It is the last one that must not see this update. Example: two items in flight, a turn of four steps: the updates of
    its steps wait for the forwards of 1, 2, 3, 3.
    """
    end_of_turn = min(course.num_steps, (item.step // course.local_iterations + 1) * course.local_iterations)
    return min(item.step + in_flight(course, unit), end_of_turn) - 1


def unfreezing_steps(course: Course) -> tuple[int, ...]:
    """Return the steps at which more blocks begin to train; as ``unfreeze.at`` they repeat the run."""
    return course.method.changes(course)
