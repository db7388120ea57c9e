"""``[unfreeze]``: when a method that unfreezes top-down trains one more block."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ringtune.errors import JobError
from ringtune.jobs.sections import MOST_STEPS, check_range
from ringtune.schedule.methods.patience import MIN_IMPROVEMENT, PATIENCE_STEPS
from ringtune.schedule.methods.ringada import EVERY_STEPS


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfreeze:
    """``[unfreeze]``: when RingAda trains one more block, top-down.

    Attributes:
        every_steps: one more block every so many steps; 40 if neither this nor ``at`` is given.
        at: one more block at each of these steps, or ``"auto"``: whenever the loss has stopped improving.
        patience_steps: with ``at = "auto"``: one more block after so many steps without improvement; 20 if not given.
        min_improvement: with ``at = "auto"``: how far the loss has to fall to count as improved, as a share of the best
            loss; 0.01 if not given.
    """

    every_steps: int | None = None
    at: tuple[int, ...] | str | None = None
    patience_steps: int | None = None
    min_improvement: float | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range, and fill in what was left out."""
        if self.every_steps is not None and self.at is not None:
            raise JobError(
                f"unfreeze.every_steps = {self.every_steps} and unfreeze.at both say when to unfreeze; keep one"
            )
        if self.every_steps is None and self.at is None:
            object.__setattr__(self, "every_steps", EVERY_STEPS)
        if self.every_steps is not None:
            check_range("unfreeze.every_steps", self.every_steps, 1, MOST_STEPS)
        if isinstance(self.at, str):
            self._check_auto()
            return
        for name in ("patience_steps", "min_improvement"):
            if getattr(self, name) is not None:
                raise JobError(f"unfreeze.{name} has a meaning with unfreeze.at = 'auto' only; remove it")
        if any(later <= earlier for earlier, later in itertools.pairwise((0, *(self.at or ())))):
            raise JobError(f"unfreeze.at is {list(self.at or ())}, it has to be above 0 and strictly increasing")
        if self.at:
            check_range("unfreeze.at", self.at[-1], 1, MOST_STEPS)

    def _check_auto(self) -> None:
        if self.at != "auto":
            raise JobError(f"unfreeze.at = {self.at!r} is neither a list of steps nor 'auto'")
        if self.patience_steps is None:
            object.__setattr__(self, "patience_steps", PATIENCE_STEPS)
        if self.min_improvement is None:
            object.__setattr__(self, "min_improvement", MIN_IMPROVEMENT)
        check_range("unfreeze.patience_steps", self.patience_steps or 0, 1, MOST_STEPS)
        if not 0 <= (self.min_improvement or 0) < 1:
            raise JobError(f"unfreeze.min_improvement is {self.min_improvement}, it has to be in [0, 1)")
