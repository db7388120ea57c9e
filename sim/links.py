"""Links as they were measured: a message waits for its link, for its sender's uplink and its receiver's downlink.

A pair's rate is that of its slower end. The uplink of a node is taken as fast as the fastest link that leaves it, its
downlink as the fastest that enters it: a message that goes out at less leaves room for another one beside it.
"""

from __future__ import annotations

from collections.abc import Callable

from ringtune.costs import PlanCosts
from ringtune.profile import Profile
from sim.transport import Parcel


class MeasuredLinks:
    """Arrival times from a profile's links.

    Args:
        costs: of the plan: bytes of messages, and the time of making and reading them.
        profile: with the links; without any, messages take only the time of making and reading them.
        size: (payload, seq, micro) -> padded tokens of the micro-batch.
        control_latency_s: of a word between a node and the coordinator.
    """

    def __init__(
        self,
        costs: PlanCosts,
        profile: Profile,
        *,
        size: Callable[[str, int, int], float],
        control_latency_s: float = 0.0,
    ) -> None:
        self._costs, self._size, self._control_latency_s = costs, size, control_latency_s
        self._uplink: dict[str, float] = {}
        self._downlink: dict[str, float] = {}
        for link in profile.links:
            rate = link.rate_bytes_per_s
            self._uplink[link.source] = max(rate, self._uplink.get(link.source, 0.0))
            self._downlink[link.target] = max(rate, self._downlink.get(link.target, 0.0))
        self._up_free_s: dict[str, float] = {}
        self._down_free_s: dict[str, float] = {}
        self._free_s: dict[tuple[str, str], float] = {}
        self._arrived_s: dict[tuple[str, str], float] = {}
        self.sent_bytes: dict[tuple[str, str], float] = {}
        self.busy_s: dict[tuple[str, str], float] = {}

    def arrival_s(self, parcel: Parcel, now_s: float) -> float:
        """When it is there, decoded; counts its bytes.

        Raises:
            PlanError: the profile has links, but not this one.
        """
        payload, source, target, seq, micro, boundary = parcel
        size = self._size(payload, seq, micro)
        num_bytes = self._costs.message_bytes(payload, boundary, size)
        pair = (source, target)
        self.sent_bytes[pair] = self.sent_bytes.get(pair, 0.0) + num_bytes
        link = self._costs.link(source, target)
        arrival_s = now_s + self._costs.around_message_s(source, target, payload, size)
        if link is not None:
            start_s = max(
                arrival_s,
                self._free_s.get(pair, 0.0),
                self._up_free_s.get(source, 0.0),
                self._down_free_s.get(target, 0.0),
            )
            on_wire_s = num_bytes / link.rate_bytes_per_s
            self._free_s[pair] = start_s + on_wire_s
            self._up_free_s[source] = start_s + num_bytes / self._uplink[source]
            self._down_free_s[target] = start_s + num_bytes / self._downlink[target]
            self.busy_s[pair] = self.busy_s.get(pair, 0.0) + on_wire_s
            arrival_s = start_s + on_wire_s + link.latency_s
        arrival_s = max(arrival_s, self._arrived_s.get(pair, 0.0))
        self._arrived_s[pair] = arrival_s
        return arrival_s

    def credit_s(self, source: str, target: str, now_s: float) -> float:
        """A credit is short: it takes the latency."""
        link = self._costs.link(source, target)
        return now_s + (link.latency_s if link is not None else 0.0)

    def control_s(self, source: str, target: str, now_s: float) -> float:
        """Words to and from the coordinator are short."""
        return now_s + self._control_latency_s
