"""What is due at a turn boundary: a checkpoint, an evaluation, the choice of an operation table.

Each is due at the first boundary at which a multiple of its steps was passed. Turns of 10 steps, a checkpoint every 20,
an evaluation every 25 and tables every 16 steps, 60 steps in all::

    step            0    10   20   30   40   50   60
    checkpoint                x         x         x
    evaluation                     x         x    x
    table           x         x         x    x

Checkpoint and evaluation belong to the turn before, a table to the turn that begins there. So a table is not chosen at
the very end, and a run that goes on from a checkpoint chooses again what was chosen at its step.
"""

from __future__ import annotations

from ringtune.schedule.course import Course


def boundary_before(course: Course, step: int) -> int:
    """The turn boundary before the one at ``step``; 0 at the very beginning."""
    return max(0, step - 1 - (step - 1) % course.local_iterations)


def checkpoint_is_due(course: Course, step: int) -> bool:
    """Whether every node saves after the turn that ends at ``step``."""
    if course.checkpoint_every < 1:
        return False
    return step == course.num_steps or _passes_multiple(course, course.checkpoint_every, step)


def evaluation_is_due(course: Course, step: int) -> bool:
    """Whether the owners evaluate after the turn that ends at ``step``."""
    return step == course.num_steps or _passes_multiple(course, course.eval_every, step)


def table_is_due(course: Course, step: int) -> bool:
    """Whether the run chooses an operation table before the train turn that begins at ``step``."""
    choice = course.choice
    if choice is None or step >= course.num_steps:
        return False
    if choice.tables:
        return choice.given_at(step) is not None
    return not step or _passes_multiple(course, choice.refresh_steps, step)


def scores_are_due(course: Course, step: int) -> bool:
    """Whether scores are gathered before the train turn that begins at ``step``."""
    return course.choice is not None and bool(course.choice.scores) and table_is_due(course, step)


def _passes_multiple(course: Course, every: int, step: int) -> bool:
    return every > 0 and boundary_before(course, step) // every != step // every
