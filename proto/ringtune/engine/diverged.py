"""What is said when training has diverged: a loss, a tensor or a weight is no finite number any more."""

from __future__ import annotations

from typing import Final

from ringtune.errors import DivergedError
from ringtune.schedule.course import Course
from ringtune.schedule.rows.batches import BatchStream, eval_rows
from ringtune.schedule.turns.turns import Item, StepKind

LOWER_THE_RATE = "lower train.learning_rate and train anew"
_MOST_ROWS: Final = 16


def diverged(item: Item, what: str, *, course: Course | None = None, micro: int | None = None) -> DivergedError:
    """Make the error for an item of which something is not finite.

    Example: the training diverged at step 13, a batch of owner a: the loss is nan (micro-batch 1, training rows 3 and
    8, counted from 0); lower train.learning_rate ...

    Args:
        item: the item.
        what: what was found, with its value.
        course: of the run, to name the rows by their numbers; None = they are not named.
        micro: of the item; None = it is of the whole batch.
    """
    when = "at" if item.kind.has_update else "in the evaluation after"
    where = f"{when} step {item.step + item.kind.has_update}, a batch of owner {item.owner}"
    rows = "" if course is None else f" ({_rows_in_words(course, item, micro)})"
    return DivergedError(f"the training diverged {where}: {what}{rows}; {LOWER_THE_RATE}")


def may_diverge(item: Item) -> bool:
    """Whether the item's numbers are of the training, not of a measurement."""
    return item.kind in (StepKind.TRAIN, StepKind.EVALUATE)


def rows_of(course: Course, item: Item, micro: int | None) -> tuple[int, ...]:
    """The numbers of an item's rows among those of its owner, from 0; of one micro-batch, or of all (None)."""
    owner = course.owner(item.owner)
    if owner is None:
        return ()
    if item.kind is StepKind.EVALUATE:
        rows = eval_rows(owner.eval_rows, course.batch_size, item.batch)
    else:
        rows = BatchStream(owner.train_rows, course.batch_size, course.seed, item.owner).rows(item.batch)
    if micro is None or micro < 0:
        return rows
    sizes = course.microbatch_sizes(item.rows)
    first = sum(sizes[:micro])
    return rows[first : first + sizes[micro]]


def _rows_in_words(course: Course, item: Item, micro: int | None) -> str:
    rows = sorted(rows_of(course, item, micro))
    more = f" and {len(rows) - _MOST_ROWS} more" if len(rows) > _MOST_ROWS else ""
    part = "" if micro is None or micro < 0 else f"micro-batch {micro}, "
    name = "evaluation" if item.kind is StepKind.EVALUATE else "training"
    return f"{part}{name} rows {', '.join(map(str, rows[:_MOST_ROWS]))}{more}, counted from 0"
