"""When a loss counts as one that has stopped improving: the settings of methods that let the run decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ringtune.errors import PlanError

PATIENCE_STEPS: Final = 20
MIN_IMPROVEMENT: Final = 0.01
TURNS_AHEAD: Final = 2
"""What a turn's loss decides holds so many turns later: the turn after it is granted while it trains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """When the loss counts as one that has stopped improving.

    Attributes:
        patience_steps: so many steps without improvement.
        min_improvement: what counts as one, as a share of the best loss.
    """

    patience_steps: int = PATIENCE_STEPS
    min_improvement: float = MIN_IMPROVEMENT

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.patience_steps < 1:
            raise PlanError(f"patience_steps is {self.patience_steps}, it has to be at least 1")
        if not 0 <= self.min_improvement < 1:
            raise PlanError(f"min_improvement is {self.min_improvement}, it has to be in [0, 1)")
