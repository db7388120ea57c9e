"""Method ``pipeadapter``: all units train, batches overlap, forwards see stale weights; a baseline of RingAda's paper.

Host p of P, bottom to top, has P - p items between forward and update, the head one. With w items in flight, item k =
0, 1, ... of a turn sees the updates of the turn's items before ``k - w + 1``; at the end of a turn everything is
updated.

Source: RingAda, section IV, baseline PipeAdapter (1F1B across batches with stale weights).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ringtune.errors import PlanError
from ringtune.schedule.methods.base import Method, method
from ringtune.schedule.methods.everything import Everything
from ringtune.schedule.placement import Slice
from ringtune.schedule.run_shape import Extent


@method
@dataclass(frozen=True, kw_only=True, slots=True)
class PipeAdapter(Everything):
    """All units train at every step, with stale weights on purpose.

    Attributes:
        hosts_above: for each block the number of hosts up to the head, its own included; the result depends on them.
            Empty before a ring is chosen.
    """

    name = "pipeadapter"

    hosts_above: tuple[int, ...] = ()

    def in_flight(self, extent: Extent, unit: int) -> int:
        """One item for each host from ``unit`` up to the head, at most the steps of a turn."""
        hosts = self.hosts_above[unit] if 0 <= unit < len(self.hosts_above) else 1
        return self.in_flight_below(extent, hosts)

    def in_flight_below(self, extent: Extent, hosts: int) -> int:
        """One item for each of ``hosts``, at most the steps of a turn."""
        return max(1, min(hosts, extent.local_iterations))

    def fitted(self, slices: Sequence[Slice]) -> Method:
        """Return the method with the number of hosts from each block of this ring up to the head.

        Blocks below the first slice count as in it. Example: the slices [0, 2) and [2, 4) give 2, 2, 1, 1.
        """
        hosts = [piece for piece in slices if piece.num_blocks]
        stop = hosts[-1].stop if hosts else 0
        above = tuple(sum(1 for piece in hosts if piece.stop > block) for block in range(stop))
        return self if above == self.hosts_above else dataclasses.replace(self, hosts_above=above)

    def check(self, extent: Extent) -> None:
        """Refuse ``hosts_above`` without one number for each block, or with a number below 1; raises ``PlanError``."""
        if self.hosts_above and (len(self.hosts_above) != extent.num_blocks or min(self.hosts_above) < 1):
            raise PlanError(f"hosts_above of pipeadapter has {list(self.hosts_above)} for {extent.num_blocks} blocks")
