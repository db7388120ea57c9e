"""Arrival of messages on the virtual clock, over measured links.

A message waits for its link, its sender's uplink and its receiver's downlink. The rate of a link is that of its slower
end. The uplink of a node has the rate of the fastest link that leaves it, its downlink that of the fastest that enters
it; a message on a slower link uses a share only. A message takes its share of both from the moment it is ready, so that
a message to a busy receiver does not block the sender's uplink.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ringtune.costs.profile import LinkFacts, Profile
from ringtune.schedule.actions import TensorKey
from sim.ledger import REPLICA_GRAD, UNIT_GRAD, Items


class MessageCost(NamedTuple):
    """The cost of a message for the processors at its two ends, in seconds.

    Attributes:
        from_source_s: computing time that it takes from the source.
        from_target_s: computing time that it takes from the target.
        late_at_source_s: delay of its departure while the source computes.
        late_at_target_s: delay of its reception while the target computes.
    """

    from_source_s: float
    from_target_s: float
    late_at_source_s: float
    late_at_target_s: float


class Transport(Protocol):
    """Arrival times of messages; messages of one link keep their order.

    The key of a head has the turn in place of the item.
    """

    def send(self, key: TensorKey, source: str, target: str, now_s: float) -> tuple[float, MessageCost | None]:
        """The arrival of a message that is sent at ``now_s``, and its cost for the processors at its ends, if any."""

    def credit_s(self, source: str, target: str, now_s: float) -> float:
        """The arrival of a credit that is returned at ``now_s``."""

    def control_s(self, source: str, target: str, now_s: float) -> float:
        """The arrival of a control message between a node and the coordinator, sent at ``now_s``."""


class _Passage(NamedTuple):
    """The times of all messages of one kind and size on a link."""

    link: _Link
    num_bytes: float
    around_s: float
    on_wire_s: float
    uplink_s: float
    downlink_s: float
    cost: MessageCost | None


class _Side:
    """One direction of a node's connection: the time until which it is taken, and its bytes per second."""

    def __init__(self) -> None:
        self.free_s = 0.0
        self.rate = 0.0


class _Link:
    """One directed link with its totals."""

    def __init__(self, facts: LinkFacts | None, uplink: _Side, downlink: _Side) -> None:
        self.uplink, self.downlink = uplink, downlink
        self.rate = facts.rate_bytes_per_s if facts else None
        self.latency_s = facts.latency_s if facts else 0.0
        self.facts = facts
        self.free_s = self.arrived_s = self.busy_s = self.sent_bytes = self.unit_bytes = 0.0


class MeasuredLinks:
    """Arrival times from the links of a profile.

    Args:
        granted: the items of the run, with the padded tokens of each micro-batch, and its costs: bytes of messages, and
            seconds to encode and decode them.
        profile: with the links; without any, messages take only the time to encode and decode.
        control_latency_s: of a message between a node and the coordinator.
        slow_computing: whether messages take computing time at nodes without a spare core; recorded times of actions
            already contain it.
    """

    def __init__(
        self,
        granted: Items,
        profile: Profile,
        *,
        control_latency_s: float = 0.0,
        slow_computing: bool = True,
    ) -> None:
        self._costs, self._by_seq, self._control_latency_s = granted.costs, granted.by_seq, control_latency_s
        self._slow_computing = slow_computing
        self._uplinks: dict[str, _Side] = {}
        self._downlinks: dict[str, _Side] = {}
        self._links: dict[tuple[str, str], _Link] = {}
        self._passages: dict[tuple[str, str, str, int, float], _Passage] = {}
        for link in profile.links:
            for side in (self._side(self._uplinks, link.source), self._side(self._downlinks, link.target)):
                side.rate = max(link.rate_bytes_per_s, side.rate)

    @property
    def sent_bytes(self) -> dict[tuple[str, str], float]:
        """Bytes by (source, target) of each link that was used."""
        return {pair: link.sent_bytes for pair, link in self._links.items() if link.sent_bytes}

    @property
    def unit_gradient_bytes(self) -> dict[tuple[str, str], float]:
        """Bytes of ``sent_bytes`` that were gradients of embedding and head for other owners."""
        return {pair: link.unit_bytes for pair, link in self._links.items() if link.unit_bytes}

    @property
    def busy_s(self) -> dict[tuple[str, str], float]:
        """Seconds for which each used link carried a message, by (source, target)."""
        return {pair: link.busy_s for pair, link in self._links.items() if link.sent_bytes}

    def send(self, key: TensorKey, source: str, target: str, now_s: float) -> tuple[float, MessageCost | None]:
        """The arrival of a message that is sent at ``now_s``, decoded, and its cost for processors; counts its bytes.

        A message costs a processor time where a node has no spare core. Raises ``PlanError``.
        """
        payload, seq, micro, boundary = key
        # padded tokens of the micro-batch; 0 where the bytes of the message do not depend on them
        size = 0.0 if micro < 0 or payload == REPLICA_GRAD else self._by_seq[seq].sizes[micro]
        kind = (source, target, payload, boundary, size)
        link, num_bytes, around_s, on_wire_s, uplink_s, downlink_s, cost = self._passages.get(kind) or self._passage(
            kind
        )
        link.sent_bytes += num_bytes
        if payload == UNIT_GRAD:
            link.unit_bytes += num_bytes
        arrival_s = now_s + around_s
        if link.rate is not None:
            up_s, down_s = link.uplink.free_s, link.downlink.free_s
            up_s, down_s = up_s if up_s > arrival_s else arrival_s, down_s if down_s > arrival_s else arrival_s
            link.uplink.free_s, link.downlink.free_s = up_s + uplink_s, down_s + downlink_s
            begin_s = up_s if up_s > down_s else down_s
            link.free_s = end_s = (begin_s if begin_s > link.free_s else link.free_s) + on_wire_s
            link.busy_s += on_wire_s
            arrival_s = end_s + link.latency_s
        if arrival_s < link.arrived_s:
            arrival_s = link.arrived_s
        link.arrived_s = arrival_s
        return arrival_s, cost

    def credit_s(self, source: str, target: str, now_s: float) -> float:
        """``now_s`` plus the latency of the link."""
        link = self._links.get((source, target)) or self._link(source, target)
        return now_s + link.latency_s

    def control_s(self, source: str, target: str, now_s: float) -> float:
        """``now_s`` plus ``control_latency_s``."""
        return now_s + self._control_latency_s

    @staticmethod
    def _side(sides: dict[str, _Side], node: str) -> _Side:
        return sides.setdefault(node, _Side())

    def _link(self, source: str, target: str) -> _Link:
        facts = self._costs.link(source, target)
        uplink, downlink = self._side(self._uplinks, source), self._side(self._downlinks, target)
        self._links[source, target] = link = _Link(facts, uplink, downlink)
        return link

    def _passage(self, kind: tuple[str, str, str, int, float]) -> _Passage:
        source, target, payload, boundary, size = kind
        link = self._links.get((source, target)) or self._link(source, target)
        num_bytes = self._costs.message_bytes(payload, boundary, size)
        size = self._costs.sent_size(boundary, size)
        around_s = self._costs.around_message_s(source, target, payload, size, num_bytes=num_bytes)
        taken_s = (0.0, 0.0)
        if self._slow_computing:
            taken_s = self._costs.taken_s(source, target, payload, num_bytes, size)
        late_s = (link.facts.busy_source_s, link.facts.busy_target_s) if link.facts else (0.0, 0.0)
        cost = MessageCost(*taken_s, *late_s) if any(taken_s) or any(late_s) else None
        on_wire_s = (0.0, 0.0, 0.0)
        if link.rate is not None:
            on_wire_s = (num_bytes / link.rate, num_bytes / link.uplink.rate, num_bytes / link.downlink.rate)
        self._passages[kind] = passage = _Passage(link, num_bytes, around_s, *on_wire_s, cost)
        return passage
