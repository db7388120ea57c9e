"""Method ``all``: the head and every block that is not frozen train from the first step on, and no weight is stale."""

from __future__ import annotations

from dataclasses import dataclass

from ringtune.schedule.methods.base import Method, method
from ringtune.schedule.run_shape import Extent
from ringtune.schedule.units import Units


@method
@dataclass(frozen=True, kw_only=True, slots=True)
class Everything(Method):
    """All units that may train do so at every step."""

    name = "all"

    def trained(self, extent: Extent, step: int) -> Units:
        """Return all units that may train."""
        return extent.trainable

    def reach(self, extent: Extent) -> Units:
        """Return all units that may train."""
        return extent.trainable

    def updates(self, extent: Extent, unit: int, step: int) -> int:
        """One update per step for a unit that may train; 0 for a frozen one."""
        return max(0, step) if unit in extent.trainable else 0
