"""The rule of ``unfreeze.at = "auto"``: the next block is unfrozen when the loss has stopped improving.

A pure fold over the mean losses of the finished train turns, in their order; no clock and no arrival order. The loss
that is judged is the mean over the last turn of every owner, because owners' data differ; where turns go by rows, each
owner counts by its rows. It improves if it falls below the best one by more than ``min_improvement`` of that. After
``patience_steps`` steps without improvement, counted from the best loss or from the last unfreezing, one more block is
unfrozen. The first round only sets the best loss, and so does later the first turn of an owner with few rows: a mean
over other owners can't be compared. A turn of an owner with fewer rows than the mean owner hardly moves the judged
loss, so it counts as fewer steps.

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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ringtune.errors import PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.methods.patience import TURNS_AHEAD, Patience
from ringtune.schedule.owner_turns import latest_owners, next_owner, turn_counts, weights

_WORST: Final = sys.float_info.max / 4  # a mean of such losses is finite, however it is rounded


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfreezing:
    """The knowledge of the rule after some finished train turns; checkpoints keep it.

    Attributes:
        num_turns: train turns that are finished.
        recent: mean loss of the last turn of each owner that has had one, in the order of these turns.
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
        turn, length = self.num_turns, course.local_iterations
        last = self._last_losses(course, min(loss, _WORST) if math.isfinite(loss) else _WORST)
        found = dataclasses.replace(self, num_turns=turn + 1, recent=tuple(last.values()))
        if turn + 1 < len(course.owners):
            return found
        judged, is_first = _mean(course, last), len(last) > len(self.recent)
        if self.best is None or is_first or judged < self.best - patience.min_improvement * abs(self.best):
            return dataclasses.replace(found, best=judged, waited_steps=0)
        if self.unfreeze_at and turn * length < self.unfreeze_at[-1]:
            return found
        waited = self.waited_steps + _counted_steps(course, min(length, course.num_steps - turn * length), [*last][-1])
        step = (turn + TURNS_AHEAD) * length
        if waited < patience.patience_steps or len(self.unfreeze_at) >= _most(course) or step >= course.num_steps:
            return dataclasses.replace(found, waited_steps=waited)
        return dataclasses.replace(found, waited_steps=0, unfreeze_at=(*self.unfreeze_at, step))

    def _last_losses(self, course: Course, loss: float) -> dict[int, float]:
        """The loss of each owner's last turn after one more turn, by the owners' indices, the newest last."""
        own, num_turns = weights(course.owners, course.turns), course.turns_of_owners(self.num_turns)
        last = dict(zip(latest_owners(own, num_turns), self.recent, strict=True))
        owner = next_owner(own, turn_counts(own, num_turns))
        last.pop(owner, None)
        return {**last, owner: loss}

    def without(self, before: Course, after: Course) -> Unfreezing:
        """The knowledge without the losses of the owners that another course leaves out from now on."""
        names = [owner.node for owner in before.owners]
        order = latest_owners(weights(before.owners, before.turns), before.turns_of_owners(self.num_turns))
        last = zip(order, self.recent, strict=False)  # nothing is known where the course decides all
        kept = tuple(loss for at, loss in last if after.owner(names[at]) is not None)
        return dataclasses.replace(self, recent=kept)

    def holding(self, step: int) -> tuple[int, ...]:
        """The decisions that hold for a turn that begins at ``step``."""
        return tuple(at for at in self.unfreeze_at if at <= step)

    def check(self, course: Course, step: int) -> None:
        """Refuse knowledge that is not of a run of ``course`` that has done ``step`` steps.

        Raises:
            PlanError: it is not; where the course leaves nothing to the run there is nothing to know.
        """
        num_turns = -(-step // course.local_iterations) if course.decides else 0
        owners = latest_owners(weights(course.owners, course.turns), course.turns_of_owners(num_turns))
        fits = self.num_turns == num_turns and len(self.recent) == len(owners)
        if not fits or any(at % course.local_iterations for at in self.unfreeze_at):
            raise PlanError(
                f"what is known of the losses is of {self.num_turns} turns, step {step} comes after {num_turns}; the "
                "checkpoint is of another run"
            )
        course.decided(self.unfreeze_at)


NOTHING_KNOWN = Unfreezing()
"""The knowledge at the beginning of a run, and where the course leaves nothing to the run."""


def _mean(course: Course, last: Mapping[int, float]) -> float:
    """The mean of the owners' last losses by what each owner counts."""
    own = weights(course.owners, course.turns)
    total = sum(own[owner] for owner in last)
    return math.fsum(loss / (total / own[owner]) for owner, loss in last.items())


def _counted_steps(course: Course, steps: int, owner: int) -> int:
    """How many of the steps of an owner's turn count as waited: fewer where it counts less than the mean owner."""
    own = weights(course.owners, course.turns)
    return min(steps, steps * own[owner] * len(own) // sum(own))


def _most(course: Course) -> int:
    """How many blocks can be unfrozen besides the top block, which trains from the start."""
    return course.num_blocks - course.frozen_blocks - 1
