"""What a node does as a helper (``schedule.helpers``): the pairs that it fits, and the updates that follow.

Everything is in the order of items and micro-batches, so that gradients are added up in one order: a range of blocks
is updated when all its pairs of an item are fitted, even before those of blocks below are here. The next item's pairs
come after all updates of an item.
"""

from __future__ import annotations

from collections import deque

from ringtune.engine import events as ev
from ringtune.engine.flows import Flow, ItemState
from ringtune.schedule.actions import Action, TensorKey
from ringtune.schedule.exchanges.parcels import weights_key
from ringtune.schedule.placement import Placement


class Helping:
    """Items that one node helps with, and what of them is here.

    Args:
        placement: who helps whom.
    """

    __slots__ = ("_arrived", "_placement", "_queue")

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._queue: deque[ItemState] = deque()
        self._arrived: dict[TensorKey, ev.ParcelArrived] = {}

    def take_on(self, state: ItemState) -> None:
        """Note an item that has pairs for this node."""
        if state.fits or state.helped:
            self._queue.append(state)

    def arrived(self, event: ev.ParcelArrived) -> None:
        """Note that pairs are in the inbox; they may be of a turn that is granted to others only."""
        self._arrived[event.key] = event

    def may_save(self, seq: int) -> bool:
        """Whether everything before an item is fitted and updated."""
        self._drop_done()
        return not self._queue or self._queue[0].item.seq > seq

    def next_update(self) -> tuple[Action, ItemState] | None:
        """The update of a range of blocks for the oldest item, once all pairs of these are fitted."""
        self._drop_done()
        if not self._queue:
            return None
        state = self._queue[0]
        update = next((one for one in state.helped if not any(_has_fit(flow, one) for flow in state.fits)), None)
        return None if update is None else (update, state)

    def next_fit(self) -> Flow | None:
        """The oldest micro-batch whose pairs are here."""
        self._drop_done()
        if not self._queue or not self._queue[0].fits:
            return None
        flow = self._queue[0].fits[0]
        place = flow.place
        if place is None or place.receive is None:
            return None
        payload, boundary, _ = place.receive
        found = self._arrived.pop(TensorKey(payload, flow.seq, flow.micro, boundary), None)
        if found is not None:
            flow.arrived = found
        return flow if flow.arrived is not None else None

    def passed(self, flow: Flow) -> None:
        """Go on behind a fit of a micro-batch."""
        place = flow.place
        flow.place = None if place is None else place.next
        if flow.place is None:
            flow.state.fits.popleft()

    def updated(self, update: Action, state: ItemState) -> list[ev.Command]:
        """Note an update; the weights go to their host."""
        state.helped.remove(update)
        return [ev.SendParcel(weights_key(update), self._placement.host_of(update.start))]

    def _drop_done(self) -> None:
        while self._queue and not self._queue[0].fits and not self._queue[0].helped:
            self._queue.popleft()


def _has_fit(flow: Flow, update: Action) -> bool:
    """Whether pairs of the blocks of an update are still to be fitted in a micro-batch."""
    place = flow.place
    while place is not None:
        if place.start < update.stop and update.start < place.stop:
            return True
        place = place.next
    return False


class Installs:
    """Weights that helpers of one host have sent back, and that it has not taken yet.

    Args:
        placement: who helps whom.
        node: the host.
    """

    __slots__ = ("_arrived", "_helpers")

    def __init__(self, placement: Placement, node: str) -> None:
        self._helpers = placement.helpers_of(node)
        self._arrived: dict[TensorKey, str] = {}

    def helper_of(self, update: Action) -> str:
        """The helper whose weights an update takes; empty if it is an update of this node's own."""
        if not self._helpers:
            return ""
        return next((one.node for one in self._helpers if one.has_block(update.start)), "")

    def arrived(self, event: ev.ParcelArrived) -> None:
        """Note that weights are in the inbox."""
        self._arrived[event.key] = event.source

    def may_update(self, update: Action) -> bool:
        """Whether what an update needs from a helper is here."""
        return not self.helper_of(update) or weights_key(update) in self._arrived

    def messages(self, update: Action) -> list[ev.Command]:
        """What is done right before an update: the weights of a helper are taken."""
        key = weights_key(update)
        return [ev.AcceptParcel(key, self._arrived.pop(key))] if self.helper_of(update) else []
