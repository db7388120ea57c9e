"""``ringada``: the head and the top block train first, and one more block is unfrozen at a time, top-down.

Which steps those are is settled by the job (every k steps, or a list), or decided by the run itself when the loss has
stopped improving (``schedule.unfreezing``).

Source: RingAda, section III-A (top-down unfreezing) and IV (every k = 40 steps).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, Final

from ringtune.errors import PlanError
from ringtune.schedule.extent import Extent
from ringtune.schedule.methods.base import Method, method
from ringtune.schedule.methods.patience import TURNS_AHEAD, Patience
from ringtune.schedule.units import Units, head_of

EVERY_STEPS: Final = 40


@method
@dataclass(frozen=True, kw_only=True, slots=True)
class RingAda(Method):
    """One more block at a time.

    Attributes:
        every_steps: one more every so many steps; 0 where one of the others says when.
        at: one more at each of these steps.
        auto: one more when the loss has stopped improving; the run decides.
    """

    name = "ringada"
    section = "unfreeze"

    every_steps: int = EVERY_STEPS
    at: tuple[int, ...] = ()
    auto: Patience | None = None

    def __post_init__(self) -> None:
        """Check that exactly one form is given.

        Raises:
            PlanError: it is not, or steps are out of order.
        """
        if self.every_steps < 0:
            raise PlanError(f"every_steps is {self.every_steps}, it has to be at least 1")
        if bool(self.every_steps) + bool(self.at) + (self.auto is not None) > 1:
            raise PlanError("every_steps, at and auto each say when blocks are unfrozen; keep one")
        if any(later <= earlier for earlier, later in itertools.pairwise((0, *self.at))):
            raise PlanError(f"blocks are unfrozen at {list(self.at)}, which has to be above 0 and strictly increasing")

    # ---- what trains ------------------------------------------------------------------------------

    def depth(self, extent: Extent, step: int) -> int:
        """How many blocks train at ``step``; where the run decides, ask the method that was decided."""
        if step < 0:
            return 0
        if self.every_steps:
            return min(most_depth(extent), 1 + step // self.every_steps)
        return 1 + bisect.bisect_right(self.at, step)

    def trained(self, extent: Extent, step: int) -> Units:
        """The head and the top blocks."""
        return Units.top(extent.num_blocks, self.depth(extent, step))

    def reach(self, extent: Extent) -> Units:
        """What trains at the last step: depth only grows."""
        return self.trained(extent, extent.num_steps - 1)

    def updates(self, extent: Extent, unit: int, step: int) -> int:
        """One a step from the first one at which it trains."""
        first = 0 if unit == head_of(extent.num_blocks) else self._first_step(extent, unit)
        return 0 if first is None else max(0, step - first)

    def _first_step(self, extent: Extent, block: int) -> int | None:
        """The first step at which ``block`` trains; None if it never does."""
        needed = extent.num_blocks - block
        if not 1 <= needed <= most_depth(extent):
            return None
        if needed == 1:
            return 0
        if self.every_steps:
            return (needed - 1) * self.every_steps
        return self.at[needed - 2] if needed - 2 < len(self.at) else None

    def changes(self, extent: Extent) -> tuple[int, ...]:
        """The steps at which one more block begins to train; given as ``unfreeze.at`` they give the same run."""
        blocks = reversed(range(extent.num_blocks - 1))
        found = (self._first_step(extent, block) for block in blocks)
        return tuple(step for step in found if step is not None and step < extent.num_steps)

    # ---- decisions --------------------------------------------------------------------------------

    @property
    def patience(self) -> Patience | None:
        """When the loss decides."""
        return self.auto

    def decided(self, steps: tuple[int, ...]) -> Method:
        """One more block at each of these steps."""
        if self.auto is None:
            return Method.decided(self, steps)
        return dataclasses.replace(self, every_steps=0, at=steps, auto=None)

    def soonest(self, extent: Extent) -> Method:
        """As if the loss never improved."""
        if self.auto is None:
            return self
        length = extent.local_iterations
        turns = max(1, -(-self.auto.patience_steps // length))  # of the patience
        first, every = len(extent.owners) - 1 + turns + TURNS_AHEAD, turns - 1 + TURNS_AHEAD
        steps = range(first * length, extent.num_steps, every * length)[: most_depth(extent) - 1]
        return self.decided(tuple(steps)) if steps else self

    def expected(self) -> Method:
        """One more block every so many steps as by default, where the loss decides."""
        return self if self.auto is None else RingAda()

    # ---- settings ---------------------------------------------------------------------------------

    @classmethod
    def from_settings(cls, settings: Any) -> Method:
        """From ``[unfreeze]`` (``jobs.sections.Unfreeze``)."""
        if settings is None:
            return cls()
        if settings.every_steps is not None:
            return cls(every_steps=settings.every_steps)
        if not isinstance(settings.at, str):
            return cls(every_steps=0, at=settings.at)
        auto = Patience(patience_steps=settings.patience_steps, min_improvement=settings.min_improvement)
        return cls(every_steps=0, auto=auto)

    def check(self, extent: Extent) -> None:
        """No more blocks are unfrozen than there are.

        Raises:
            PlanError: there are too many steps.
        """
        most = most_depth(extent) - 1
        if len(self.at) > most:
            frozen = f", {extent.frozen_blocks} of them frozen," if extent.frozen_blocks else ""
            raise PlanError(
                f"blocks are unfrozen at {len(self.at)} steps, but of {extent.num_blocks} blocks{frozen} no more than "
                f"{most} can be, as the top one trains from the start; leave some out"
            )


def most_depth(extent: Extent) -> int:
    """How many blocks can ever train."""
    return extent.num_blocks - extent.frozen_blocks
