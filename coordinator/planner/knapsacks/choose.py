"""Choose a run's table of operations from the scores that its nodes reported."""

from __future__ import annotations

from collections.abc import Sequence

from ringtune.schedule.course import Course
from ringtune.schedule.operations.scores import BlockScores
from ringtune.schedule.operations.table import Operations
from ringtune.schedule.spreading.expected import expected_table


def choose_table(course: Course, scores: Sequence[BlockScores], step: int = 0) -> Operations:
    """The table of a course's policy.

    Args:
        course: with a choice.
        scores: of every micro-batch of every batch and block that trains; none where the policy asks for none.
        step: of the decision; the policy random draws another table at each.
    """
    return expected_table(course)
