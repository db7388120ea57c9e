"""Whose rows train which group of units: where turns and sweeps keep step, an owner never trains some groups.

Two owners, turns of three steps, six groups::

    step    0 1 2 3 4 5 | 6 7 8 9 10 11
    owner   a a a b b b | a a a b b  b
    group   0 1 2 3 4 5 | 0 1 2 3 4  5      a trains the groups 0 to 2 for ever, b the others
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from ringtune.schedule.course import Course
from ringtune.schedule.owner_turns import owner_indices, turns_until_repeat, weights

_MOST_FOLLOWED = 20_000


def lone_groups(course: Course) -> dict[str, tuple[int, ...]]:
    """Owner -> the places in a sweep that its steps train, for owners that would never train all, however long the run.

    Empty where every owner trains every group in the end, and where blocks have adapters.
    """
    if not course.method.full_parameters or len(course.owners) < 2:
        return {}
    period = course.method.period(course)
    places: dict[str, set[int]] = {owner.node: set() for owner in course.owners}
    for step, owner in enumerate(itertools.islice(_owners(course), _horizon(course, period))):
        places[owner].add(step % period)
    return {owner: tuple(sorted(found)) for owner, found in places.items() if len(found) < period}


def mixing_iterations(course: Course) -> int | None:
    """The next longer turn with which every owner trains every group; None if none of twice a sweep does."""
    period = course.method.period(course)
    for steps in range(course.local_iterations + 1, course.local_iterations + 2 * period + 1):
        if not lone_groups(dataclasses.replace(course, local_iterations=steps)):
            return steps
    return None


def _horizon(course: Course, period: int) -> int:
    """Steps after which owners and groups meet again as at the beginning, at most ``_MOST_FOLLOWED``."""
    turns = turns_until_repeat(weights(course.owners, course.turns))
    return min(_MOST_FOLLOWED, turns * course.local_iterations * period)


def _owners(course: Course) -> Iterator[str]:
    """The owner of each step for ever."""
    for index in owner_indices(weights(course.owners, course.turns), 0):
        yield from itertools.repeat(course.owners[index].node, course.local_iterations)
