"""The coordinator's part in ending a run early: which turn waits for an evaluation.

Where the job has no patience this does nothing: turns are granted beyond an evaluation while it is carried out.
"""

from __future__ import annotations

import math

from ringtune.schedule.turns.early_stop import NONE_DONE
from ringtune.schedule.turns.turns import StartPoint, StepKind, Turn


class TurnStopping:
    """The decision of one run to end early.

    Args:
        patience_evals: evaluations without a better loss after which the run ends; 0 = it does not.
        start: where the run goes on; None = it begins.

    Attributes:
        evaluations: what is known of them.
    """

    def __init__(self, patience_evals: int, start: StartPoint | None) -> None:
        self._patience = patience_evals
        self.evaluations = start.evaluations if start else NONE_DONE
        self._waits = False

    @property
    def has_ended(self) -> bool:
        """Whether the run ends with the last evaluation that was judged."""
        return self.evaluations.end_a_run(self._patience)

    def may_grant(self, turn: Turn) -> bool:
        """Whether every evaluation is judged on which it depends whether this turn is granted at all."""
        return not (self._patience and self._waits and turn.kind is StepKind.TRAIN)

    def granted(self, turn: Turn) -> None:
        """Note that a turn is granted."""
        self._waits = self._waits or turn.kind is StepKind.EVALUATE

    def judge(self, step: int, values: tuple[tuple[str, float], ...]) -> bool:
        """Take a complete evaluation; return whether the run ends with it."""
        if not self._patience:
            return False
        sums = dict(values)
        count = sums.get("count", 0.0)
        loss = sums.get("loss_sum", math.nan) / count if count else math.nan
        self.evaluations, self._waits = self.evaluations.after(step, loss), False
        return self.has_ended

    def forget_open(self) -> None:
        """Wait for no evaluation that is not complete: the turns that are not closed are begun anew."""
        self._waits = False
