"""The coordinator's part in ending a run early, and in keeping its best result: which turn waits for an evaluation.

Where the job has no patience and keeps no best result this does nothing: turns are granted beyond an evaluation while
it is carried out.
"""

from __future__ import annotations

import math

from ringtune.rounds.turns.best_results import BestResults
from ringtune.schedule.turns.early_stop import NONE_DONE
from ringtune.schedule.turns.turns import StartPoint, StepKind, Turn


class TurnStopping:
    """What one run decides by its evaluations.

    Args:
        patience_evals: evaluations without a better loss after which the run ends; 0 = it does not.
        start: where the run goes on; None = it begins.
        keeps_best: whether the result of the best evaluation is kept.

    Attributes:
        evaluations: what is known of them.
        settled: what whoever goes on with the run may count on: the same, or, while a best result is not sent yet,
            what was known before its evaluation, which is repeated then.
        best: the result that is wanted.
    """

    def __init__(self, patience_evals: int, start: StartPoint | None, *, keeps_best: bool = False) -> None:
        self._patience, self._keeps_best = patience_evals, keeps_best
        self.evaluations = self.settled = start.evaluations if start else NONE_DONE
        self.best = BestResults()
        self._waits = False

    @property
    def _is_watching(self) -> bool:
        return self._patience > 0 or self._keeps_best

    @property
    def has_ended(self) -> bool:
        """Whether the run ends with the last evaluation that was judged."""
        return self.evaluations.end_a_run(self._patience)

    def may_grant(self, turn: Turn) -> bool:
        """Whether every evaluation is judged, and its result sent, on which it depends whether a turn is granted."""
        if self.best.wanted is not None:
            return False
        if not self._waits or turn.kind is StepKind.EVALUATE:
            return True
        return turn.kind is not StepKind.TRAIN and not self._keeps_best

    def granted(self, turn: Turn) -> None:
        """Note that a turn is granted."""
        self._waits = self._is_watching and (self._waits or turn.kind is StepKind.EVALUATE)

    def judge(self, step: int, values: tuple[tuple[str, float], ...]) -> bool:
        """Take a complete evaluation; return whether the run ends with it."""
        if not self._is_watching:
            return False
        sums = dict(values)
        count = sums.get("count", 0.0)
        loss = sums.get("loss_sum", math.nan) / count if count else math.nan
        is_news = step > self.evaluations.step
        self.evaluations, self._waits = self.evaluations.after(step, loss), False
        if self._keeps_best and is_news and self.is_best(step):
            self.best.wanted = step
        else:
            self.settled = self.evaluations
        return self.has_ended

    def is_best(self, step: int) -> bool | None:
        """Whether the evaluation after a step is the best one so far; None where no best result is kept."""
        if not self._keeps_best:
            return None
        return self.evaluations.best is not None and self.evaluations.best_step == step

    def sent(self) -> None:
        """Note that the best result is where it is kept."""
        self.best.wanted, self.settled = None, self.evaluations

    def forget_open(self) -> None:
        """Wait for no evaluation that is not complete: the turns that are not closed are begun anew."""
        self._waits = False
        self.best.forget_asked()
