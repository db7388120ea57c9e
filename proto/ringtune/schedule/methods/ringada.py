"""Method ``ringada``: the head and the top block train first, and one more block is unfrozen at a time, top-down.

The steps of unfreezing are set by the job (every k steps, or a list), or decided by the run when the loss has stopped
improving (``schedule.turns``).

Source: RingAda, section III-A (top-down unfreezing) and IV (every k = 40 steps).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, Final

from ringtune.errors import PlanError
from ringtune.schedule.methods.base import TURNS_AHEAD, Method, Patience, method
from ringtune.schedule.run_shape import Extent
from ringtune.schedule.units import EMBEDDING, Units, head_of

EVERY_STEPS: Final = 40


@method
@dataclass(frozen=True, kw_only=True, slots=True)
class RingAda(Method):
    """The head and the top blocks train; one more block is unfrozen at a time.

    Attributes:
        every_steps: one more block every so many steps; 0 with ``at`` or ``auto``.
        at: one more block at each of these steps.
        auto: one more block when the loss has stopped improving; the run decides.
    """

    name = "ringada"
    section = "unfreeze"

    every_steps: int = EVERY_STEPS
    at: tuple[int, ...] = ()
    auto: Patience | None = None

    def __post_init__(self) -> None:
        """Refuse more than one form, and steps that are negative or out of order; raises ``PlanError``."""
        if self.every_steps < 0:
            raise PlanError(f"every_steps is {self.every_steps}, it has to be at least 1")
        if bool(self.every_steps) + bool(self.at) + (self.auto is not None) > 1:
            raise PlanError("every_steps, at and auto each say when blocks are unfrozen; keep one")
        if any(later <= earlier for earlier, later in itertools.pairwise((0, *self.at))):
            raise PlanError(f"blocks are unfrozen at {list(self.at)}, which has to be above 0 and strictly increasing")

    # ---- trained units ----------------------------------------------------------------------------

    def depth(self, extent: Extent, step: int) -> int:
        """Return the number of blocks that train at ``step``; with ``auto`` only valid after ``decided``.

        Example: with ``every_steps`` = 40 the depth is 1 up to step 39, and 2 from step 40 on.
        """
        if step < 0:
            return 0
        if self.every_steps:
            return min(max_depth(extent), 1 + step // self.every_steps)
        return 1 + bisect.bisect_right(self.at, step)

    def trained(self, extent: Extent, step: int) -> Units:
        """Return the head, the ``depth`` top blocks and, where block 0 is among them, the invertible adapter."""
        return extent.top(self.depth(extent, step))

    def reach(self, extent: Extent) -> Units:
        """Return the units that train at the last step, as the depth only grows."""
        return self.trained(extent, extent.num_steps - 1)

    def updates(self, extent: Extent, unit: int, step: int) -> int:
        """Return the updates of ``unit`` before ``step``: one per step, from the first step at which it trains."""
        first = 0 if unit == head_of(extent.num_blocks) else self._first_step(extent, unit)
        if unit == EMBEDDING and extent.invertible:
            first = self._first_step(extent, 0)
        return 0 if first is None else max(0, step - first)

    def _first_step(self, extent: Extent, block: int) -> int | None:
        needed = extent.num_blocks - block
        if not 1 <= needed <= max_depth(extent):
            return None
        if needed == 1:
            return 0
        if self.every_steps:
            return (needed - 1) * self.every_steps
        return self.at[needed - 2] if needed - 2 < len(self.at) else None

    def changes(self, extent: Extent) -> tuple[int, ...]:
        """Return the steps at which one more block begins to train; given as ``unfreeze.at`` they repeat the run."""
        blocks = reversed(range(extent.num_blocks - 1))
        first_steps = (self._first_step(extent, block) for block in blocks)
        return tuple(step for step in first_steps if step is not None and step < extent.num_steps)

    # ---- decisions --------------------------------------------------------------------------------

    @property
    def patience(self) -> Patience | None:
        """Return ``auto``; None where the job sets the steps."""
        return self.auto

    def decided(self, steps: tuple[int, ...]) -> Method:
        """Return RingAda with one more block at each of these steps."""
        if self.auto is None:
            return Method.decided(self, steps)
        return dataclasses.replace(self, every_steps=0, at=steps, auto=None)

    def soonest(self, extent: Extent) -> Method:
        """Return RingAda as if the loss never improved, so that each block is unfrozen as early as possible.

        Example: 3 owners, turns of 10 steps, a patience of 20: one more block at the steps 60, 90, 120, ...
        """
        if self.auto is None:
            return self
        length = extent.local_iterations
        turns = max(1, -(-self.auto.patience_steps // length))  # of the patience
        first, every = len(extent.owners) - 1 + turns + TURNS_AHEAD, turns - 1 + TURNS_AHEAD
        steps = range(first * length, extent.num_steps, every * length)[: max_depth(extent) - 1]
        return self.decided(tuple(steps)) if steps else self

    def expected(self) -> Method:
        """Return RingAda with the default ``every_steps`` where the loss decides; otherwise ``self``."""
        return self if self.auto is None else RingAda()

    # ---- settings ---------------------------------------------------------------------------------

    @classmethod
    def from_settings(cls, settings: Any, *, seed: int = 0) -> Method:
        """Make the method from ``[unfreeze]`` (``config.sections.Unfreeze``)."""
        if settings is None:
            return cls()
        if settings.every_steps is not None:
            return cls(every_steps=settings.every_steps)
        if not isinstance(settings.at, str):
            return cls(every_steps=0, at=settings.at)
        auto = Patience(patience_steps=settings.patience_steps, min_improvement=settings.min_improvement)
        return cls(every_steps=0, auto=auto)

    def check(self, extent: Extent) -> None:
        """Refuse more unfreezing steps than there are blocks to unfreeze; raises ``PlanError``."""
        most = max_depth(extent) - 1
        if len(self.at) > most:
            frozen = f", {extent.frozen_blocks} of them frozen," if extent.frozen_blocks else ""
            raise PlanError(
                f"blocks are unfrozen at {len(self.at)} steps, but of {extent.num_blocks} blocks{frozen} no more than "
                f"{most} can be, as the top one trains from the start; leave some out"
            )


def max_depth(extent: Extent) -> int:
    """Number of blocks that can ever train."""
    return extent.num_blocks - extent.frozen_blocks
