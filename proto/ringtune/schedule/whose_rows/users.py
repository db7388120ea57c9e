"""Whose row is which: users whose rows train adapters of their own (ColA, collaboration of users).

An owner's rows are in the order of its users: with 3 rows of anna and 5 of ben, the rows 0 to 2 are anna's. So an index
says whose row it is, every node can tell it for every batch from the course alone, and nothing of it travels.

Source: ColA, section 4.3 and Table 4 (joint, alone, collaboration).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ringtune.schedule.course import Course, stream_of
from ringtune.schedule.extent import Owner, UserRows
from ringtune.schedule.rows.batches import eval_rows
from ringtune.schedule.turns.turns import Item, StepKind, items, turn_sequence


class UserUse(NamedTuple):
    """What training made of one user's rows.

    Attributes:
        trained_rows: rows of all batches, each time counted.
        updates: of the user's adapters; one with no row of the user in its steps leaves them alone.
    """

    trained_rows: int
    updates: int


RowsOfUser = tuple[str, tuple[int, ...]]
"""A user, and the positions of their rows in a micro-batch, ascending."""


@functools.lru_cache(maxsize=256)
def users_of(course: Course) -> tuple[str, ...]:
    """Every user of a run, in the order of owners and rows; who has rows at several owners is one user."""
    return tuple(dict.fromkeys(user.name for owner in course.owners for user in owner.user_rows))


def rows_by_user(course: Course) -> tuple[UserRows, ...]:
    """How many rows each user of a run has at all owners together, in the order of ``users_of``."""
    found = {name: [0, 0] for name in users_of(course)}
    for owner in course.owners:
        for user in owner.user_rows:
            found[user.name][0] += user.train_rows
            found[user.name][1] += user.eval_rows
    return tuple(UserRows(name=name, train_rows=train, eval_rows=held_out) for name, (train, held_out) in found.items())


def user_sets(course: Course) -> tuple[str, ...]:
    """The users that have adapters of their own; none where all users train the same."""
    offload = course.offload
    return users_of(course) if offload is not None and offload.has_users else ()


def most_changed(course: Course) -> int:
    """At most so many users' adapters change at one update: of an owner one a row, for each step of an interval."""
    offload = course.offload
    if offload is None or not offload.has_users:
        return 1
    of_step = max(min(len(owner.user_rows), course.batch_rows(owner)) for owner in course.owners)
    return min(len(users_of(course)), of_step * offload.interval)


def uses_of_users(course: Course, steps: int) -> dict[str, UserUse]:
    """What the first ``steps`` steps make of the rows of each user who has adapters of their own, in their order.

    Steps of an interval that is not over yet have trained rows, and made no update but at the end of the run.
    """
    offload, users = course.offload, user_sets(course)
    if offload is None or not users:
        return {}
    rows, updates, waiting = dict.fromkeys(users, 0), dict.fromkeys(users, 0), set[str]()
    trained = (item for turn in turn_sequence(course) if turn.kind is StepKind.TRAIN for item in items(course, turn))
    for item in itertools.islice(trained, steps):
        owner = course.owner(item.owner)
        if owner is not None:
            for user in _users_at(owner, _rows(course, item, owner), is_training=True):
                rows[user] += 1
                waiting.add(user)
        if (item.step + 1) % offload.interval == 0 or item.step + 1 == course.num_steps:
            for user in waiting:
                updates[user] += 1
            waiting.clear()
    return {user: UserUse(rows[user], updates[user]) for user in users}


def rows_of_users(course: Course, item: Item, micro: int) -> tuple[RowsOfUser, ...]:
    """Whose rows a micro-batch has.

    Args:
        course: of the run.
        item: of one of its owners.
        micro: which micro-batch of the item.

    Returns:
        Each user with rows in it, in the order of ``users_of``; every position is of one user.
    """
    return _rows_of_users(course.plain, item, micro)


@functools.lru_cache(maxsize=4096)
def _rows_of_users(course: Course, item: Item, micro: int) -> tuple[RowsOfUser, ...]:
    sizes = course.microbatch_sizes(item.rows)
    first = sum(sizes[:micro])
    owner = course.owner(item.owner)
    if owner is None or len(owner.user_rows) == 1:
        return ((owner.user_rows[0].name if owner else item.owner, tuple(range(sizes[micro]))),)
    found: dict[str, list[int]] = {}
    own = _rows(course, item, owner)[first : first + sizes[micro]]
    for position, user in enumerate(_users_at(owner, own, is_training=item.kind is not StepKind.EVALUATE)):
        found.setdefault(user, []).append(position)
    return tuple((user, tuple(found[user])) for user in users_of(course) if user in found)


def _rows(course: Course, item: Item, owner: Owner) -> Sequence[int]:
    """The owner's rows of an item."""
    if item.kind is StepKind.EVALUATE:
        return eval_rows(owner.eval_rows, course.batch_size, item.batch)
    return stream_of(course, owner.node).rows(item.batch)


def _users_at(owner: Owner, rows: Iterable[int], *, is_training: bool) -> list[str]:
    """The user of each of these rows."""
    ends: list[tuple[int, str]] = []
    for user in owner.user_rows:
        before = ends[-1][0] if ends else 0
        ends.append((before + (user.train_rows if is_training else user.eval_rows), user.name))
    return [next(name for end, name in ends if row < end) for row in rows]
