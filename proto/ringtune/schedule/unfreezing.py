"""The rule of ``unfreeze.at = "auto"``: the next block is unfrozen when the loss has stopped improving.

A pure fold over the mean losses of the finished train turns, in their order; no clock and no arrival order. The loss
that is judged is the mean over one round (the last turn of every owner), because owners' data differ. It improves
if it falls below the best one by more than ``min_improvement`` of that. After ``patience_steps`` steps without
improvement, counted from the best loss or from the last unfreezing, one more block is unfrozen.

What the loss of turn t decides holds from turn t + 2 on: turn t + 1 is granted already while t trains, so that frozen
blocks can work ahead. Three owners, turns of 10 steps, a patience of 20, and a loss that never improves ::

    turn             0   1   2   3   4   5   6   7   8   9
    waited steps             0  10  20      10  20      10    turns 5 and 8 were still trained with the depth before
    depth            1   1   1   1   1   1   2   2   2   3

Source: RingAda, section IV, unfreezes every k steps; the criterion is that of learning rates reduced on a plateau.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass

from ringtune.errors import PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.methods.patience import TURNS_AHEAD, Patience


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfreezing:
    """The knowledge of the rule after some finished train turns; checkpoints keep it.

    Attributes:
        num_turns: train turns that are finished.
        recent: mean losses of the last ones, at most one per owner.
        best: the best loss so far; None before the first whole round.
        waited_steps: steps without improvement that count.
        unfreeze_at: the decisions: at each of these steps, the first ones of turns, one more block is unfrozen.
    """

    num_turns: int = 0
    recent: tuple[float, ...] = ()
    best: float | None = None
    waited_steps: int = 0
    unfreeze_at: tuple[int, ...] = ()

    def after(self, course: Course, loss: float) -> Unfreezing:
        """The knowledge after one more train turn with this mean loss.

        A loss that is not a finite number counts as the worst.
        """
        patience = course.method.patience or Patience()
        loss = loss if math.isfinite(loss) else sys.float_info.max
        turn, length = self.num_turns, course.local_iterations
        recent = (*self.recent, loss)[-len(course.owners) :]
        found = dataclasses.replace(self, num_turns=turn + 1, recent=recent)
        if len(recent) < len(course.owners):
            return found
        judged = math.fsum(value / len(recent) for value in recent)
        if self.best is None or judged < self.best - patience.min_improvement * abs(self.best):
            return dataclasses.replace(found, best=judged, waited_steps=0)
        if self.unfreeze_at and turn * length < self.unfreeze_at[-1]:
            return found
        waited = self.waited_steps + min(length, course.num_steps - turn * length)
        step = (turn + TURNS_AHEAD) * length
        if waited < patience.patience_steps or len(self.unfreeze_at) >= _most(course) or step >= course.num_steps:
            return dataclasses.replace(found, waited_steps=waited)
        return dataclasses.replace(found, waited_steps=0, unfreeze_at=(*self.unfreeze_at, step))

    def holding(self, step: int) -> tuple[int, ...]:
        """The decisions that hold for a turn that begins at ``step``."""
        return tuple(at for at in self.unfreeze_at if at <= step)

    def check(self, course: Course, step: int) -> None:
        """Refuse knowledge that is not of a run of ``course`` that has done ``step`` steps.

        Raises:
            PlanError: it is not; where the course leaves nothing to the run there is nothing to know.
        """
        num_turns = -(-step // course.local_iterations) if course.decides else 0
        fits = self.num_turns == num_turns and len(self.recent) == min(num_turns, len(course.owners))
        if not fits or any(at % course.local_iterations for at in self.unfreeze_at):
            raise PlanError(
                f"what is known of the losses is of {self.num_turns} turns, step {step} comes after {num_turns}; the "
                "checkpoint is of another run"
            )
        course.decided(self.unfreeze_at)


NOTHING_KNOWN = Unfreezing()
"""The knowledge at the beginning of a run, and where the course leaves nothing to the run."""


def _most(course: Course) -> int:
    """How many blocks can be unfrozen besides the top block, which trains from the start."""
    return course.num_blocks - course.frozen_blocks - 1
