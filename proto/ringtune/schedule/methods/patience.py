"""When a loss counts as one that has stopped improving: the settings of methods that let the run decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ringtune.errors import PlanError

PATIENCE_STEPS: Final = 20
MIN_IMPROVEMENT: Final = 0.01
TURNS_AHEAD: Final = 2
"""Turns after which a turn's loss decides: turn t + 1 is granted already while turn t trains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """When the loss counts as one that has stopped improving.

    Attributes:
        patience_steps: so many steps without improvement.
        min_improvement: how far the loss has to fall to count as improved, as a share of the best loss.
    """

    patience_steps: int = PATIENCE_STEPS
    min_improvement: float = MIN_IMPROVEMENT

    def __post_init__(self) -> None:
        """Refuse a patience below one step, and an improvement outside ``[0, 1)``."""
        if self.patience_steps < 1:
            raise PlanError(f"patience_steps is {self.patience_steps}, it has to be at least 1")
        if not 0 <= self.min_improvement < 1:
            raise PlanError(f"min_improvement is {self.min_improvement}, it has to be in [0, 1)")
