"""How much of each owner's rows a course trains on: a pure function of the course, known before anything runs.

Example: 12 steps in turns of 4 by owners a and b, with 100 and 24 rows in batches of 8. Owner a has the turns 0 and 2:
8 steps, 64 of its 100 rows, each once. Owner b has 4 steps: all of its 24 rows, 8 of them twice.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ringtune.schedule.course import Course
from ringtune.schedule.extent import Owner
from ringtune.schedule.owner_turns import turn_counts, weights
from ringtune.schedule.rows.batches import BatchStream


@dataclass(frozen=True, kw_only=True, slots=True)
class RowUse:
    """The use that a run makes of one owner's rows.

    Attributes:
        owner: its node.
        rows: training rows that it has.
        batch_rows: rows of each of its batches.
        steps: steps of the run on them.
        used_rows: rows that are trained on at least once.
        least: times that the least used row is trained on.
        most: times that the most used row is trained on.
    """

    owner: str
    rows: int
    batch_rows: int
    steps: int
    used_rows: int
    least: int
    most: int

    @property
    def trained_rows(self) -> int:
        """Rows of all its batches, each time counted."""
        return self.steps * self.batch_rows

    @property
    def epochs(self) -> float:
        """How often each of its rows is trained on, in the mean."""
        return self.trained_rows / self.rows


def steps_of_owners(course: Course) -> tuple[int, ...]:
    """How many steps of the run are on the batches of each owner, in the order of the owners."""
    length, own = course.local_iterations, weights(course.owners, course.turns)
    whole, rest = divmod(course.num_steps, length)
    whole = course.turns_of_owners(whole)
    before, after = turn_counts(own, whole), turn_counts(own, whole + 1)
    steps = (count * length + rest * (later - count) for count, later in zip(before, after, strict=True))
    return tuple(steps)


@functools.lru_cache(maxsize=16)
def row_uses(course: Course) -> tuple[RowUse, ...]:
    """The use that a run makes of each owner's rows, in the order of the owners; those that were left out come last."""
    there = [_use(course, owner, steps) for owner, steps in zip(course.owners, steps_of_owners(course), strict=True)]
    return (*there, *(_use(course, one.owner, one.turns * course.local_iterations) for one in course.left_out))


def _use(course: Course, owner: Owner, steps: int) -> RowUse:
    """Count by batches; the first rows are in batch 0, and again in the last batch as far as that needs filling up."""
    size = course.batch_rows(owner)
    stream = BatchStream(owner.train_rows, course.batch_size, course.seed, owner.node)
    epochs, rest = divmod(steps, stream.num_batches)
    more = {stream.batch_id(index) for index in range(epochs * stream.num_batches, steps)}
    first, last, twice = 0 in more, stream.num_batches - 1 in more, stream.num_batches * size - owner.train_rows
    used = owner.train_rows if epochs else rest * size - (twice if first and last else 0)
    most = epochs + bool(more)
    if twice:
        most = max(most, 2 * epochs + first + last)
    return RowUse(
        owner=owner.node,
        rows=owner.train_rows,
        batch_rows=size,
        steps=steps,
        used_rows=used,
        least=epochs,
        most=most,
    )
