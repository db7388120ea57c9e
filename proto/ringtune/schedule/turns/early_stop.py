"""The rule of ``train.patience_evals``: a run ends when so many evaluations in a row were no better than the best.

A pure fold over the evaluations in their order. The loss that is judged is the mean over all evaluated rows, tokens or
windows of all owners; it is better if it is lower than the best one by any amount. No turn that trains is granted
between an evaluation and its judgement, so the run ends at the same step whatever the timing ::

    evaluation after step   10   20   30   40        patience_evals = 2
    loss                   0.7  0.5  0.6  0.5
    waited                   0    0    1    2        the run ends with step 40
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluations:
    """What is known of the evaluations that were done; checkpoints keep it.

    Attributes:
        step: after which the last one was; -1 before the first. An evaluation that is repeated counts once.
        best: the lowest loss; None before the first that is a finite number.
        best_step: after which it was.
        waited: evaluations since then.
    """

    step: int = -1
    best: float | None = None
    best_step: int = 0
    waited: int = 0

    def after(self, step: int, loss: float) -> Evaluations:
        """The knowledge after one more evaluation; a loss that is not a finite number is no better than any."""
        if step <= self.step:
            return self
        if math.isfinite(loss) and (self.best is None or loss < self.best):
            return Evaluations(step=step, best=loss, best_step=step)
        return dataclasses.replace(self, step=step, waited=self.waited + 1)

    def end_a_run(self, patience_evals: int) -> bool:
        """Whether a run with this patience ends now; with 0 it never does."""
        return 0 < patience_evals <= self.waited


NONE_DONE: Final = Evaluations()
