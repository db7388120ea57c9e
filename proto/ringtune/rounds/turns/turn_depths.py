"""The coordinator's part in unfreezing: which turn may be granted, and which decisions it carries.

Where the course settles everything, this does nothing. Under ``auto`` a decision must not depend on timing: the loss of
a train turn counts when the turn is closed, with all its steps reported, and turn t is granted only when t - 2 is
closed.
"""

from __future__ import annotations

import dataclasses
import math

from ringtune.schedule.course import Course
from ringtune.schedule.methods.patience import TURNS_AHEAD
from ringtune.schedule.turns.turns import StartPoint, StepKind, Turn
from ringtune.schedule.turns.unfreezing import NOTHING_KNOWN


class TurnDepths:
    """The unfreezing decisions of one run.

    Args:
        course: of the run.
        start: where it goes on; None = it begins.

    Attributes:
        unfreezing: what is known of the closed turns.

    Raises:
        PlanError: what ``start`` knows is not of this course and step.
    """

    def __init__(self, course: Course, start: StartPoint | None) -> None:
        self.unfreezing = start.unfreezing if start else NOTHING_KNOWN
        self.unfreezing.check(course, start.step if start else 0)
        self._course = course
        self._losses: dict[int, dict[int, tuple[float, float]]] = {}

    def may_grant(self, turn: Turn) -> bool:
        """Whether all losses are known on which the depth of this turn may depend."""
        if not self._course.decides or turn.kind is not StepKind.TRAIN:
            return True
        return turn.first_step // self._course.local_iterations < self.unfreezing.num_turns + TURNS_AHEAD

    def decided(self, turn: Turn, last: Turn | None) -> Turn:
        """The turn with the decisions that hold for it.

        A turn between train turns takes the decisions of the turn before it, ``last``.
        """
        if not self._course.decides:
            return turn
        step = turn.first_step
        if turn.kind is not StepKind.TRAIN and last is not None:
            return dataclasses.replace(turn, unfreeze_at=last.unfreeze_at)
        return dataclasses.replace(turn, unfreeze_at=self.unfreezing.holding(step))

    def note(self, turn: Turn, seq: int, values: tuple[tuple[str, float], ...]) -> None:
        """Note the loss of a finished item of an open turn; a second report of an item changes nothing."""
        if self._course.decides and turn.kind is StepKind.TRAIN:
            found = dict(values)
            sums = (found.get("loss_sum", math.nan), found.get("count", 0.0))
            self._losses.setdefault(turn.index, {}).setdefault(seq, sums)

    def is_complete(self, turn: Turn) -> bool:
        """Whether every loss of the turn that counts is here."""
        if not self._course.decides or turn.kind is not StepKind.TRAIN:
            return True
        return len(self._losses.get(turn.index, ())) == turn.num_items

    def close(self, turn: Turn) -> None:
        """Add a closed turn's mean loss to what is known; turns are closed in order."""
        losses = self._losses.pop(turn.index, None)
        if losses is None:
            return
        count = sum(losses[seq][1] for seq in sorted(losses))
        loss_sum = sum(losses[seq][0] for seq in sorted(losses))
        self.unfreezing = self.unfreezing.after(self._course, loss_sum / count if count else math.nan)

    def forget_open(self) -> None:
        """Forget the losses of turns that are not closed: they are begun anew."""
        self._losses.clear()
