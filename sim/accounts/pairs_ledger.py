"""Bytes that helpers add to the accounts of a virtual run, or take off them.

Pairs and weights, wherever they are::

    B: pairs as computed --C: packed--> on the way --Accept--> A: unpacked, then freed
    U at the helper: weights --> on the way --Accept--> U at the host: freed
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ringtune.costs.memory.sizes import Sizes
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.helping.helpers import Helper
from ringtune.schedule.placement import Placement
from sim.accounts.items import ItemKind


class Change(NamedTuple):
    """What an action for a helper, or at one, does to its node's account; see ``Effect`` of the ledger.

    Attributes:
        takes: bytes that it takes.
        touches: bytes besides that it holds for a moment.
        frees: bytes that it frees in the end.
        gradient: units that get a gradient.
        updates: units whose gradient is used up.
    """

    takes: float = 0.0
    touches: float = 0.0
    frees: float = 0.0
    gradient: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()


class Helping:
    """Bytes of pairs and weights under a placement.

    Args:
        placement: with helpers.
        sizes: of each node.
    """

    def __init__(self, placement: Placement, sizes: Mapping[str, Sizes]) -> None:
        self._helpers, self._sizes = placement.helpers, next(iter(sizes.values()))

    def parcel_bytes(self, key: TensorKey, size: float) -> float:
        """Bytes of pairs or weights on their way; pairs of a micro-batch of so many padded tokens."""
        one = self._of(key.boundary)
        blocks = one.stop - key.boundary if one is not None else 0
        return blocks * (self._sizes.sent_pair_bytes(size) if key.payload == Payload.PAIRS else self._sizes.helped.sent)

    def of_backward(self, node: str, units: tuple[int, ...], size: float) -> tuple[tuple[int, ...], float]:
        """Units of a backward that get a gradient at their host, and the bytes of the pairs that the others give."""
        own = tuple(unit for unit in units if self._of(unit) is None)
        return own, (len(units) - len(own)) * self._sizes.pair_bytes(size)

    def change(self, node: str, action: Action, item: ItemKind) -> Change | None:
        """What an action does; None if it is no action for a helper or at one."""
        units, one = tuple(range(action.start, action.stop)), self._of(action.start)
        if one is None:
            return None
        if action.op is Op.UPDATE:
            weights = (one.stop - action.start) * self._sizes.helped.sent
            return Change(takes=weights, updates=units) if node == one.node else Change(frees=weights)
        if action.op not in (Op.SHIP, Op.FIT):
            return None
        size = item.sizes[action.micro]
        computed = len(units) * self._sizes.pair_bytes(size)
        sent = (one.stop - action.start) * self._sizes.sent_pair_bytes(size)
        if action.op is Op.SHIP:
            return Change(takes=sent, frees=computed)
        return Change(touches=computed, frees=sent, gradient=units)

    def _of(self, block: int) -> Helper | None:
        return next((one for one in self._helpers if one.start <= block < one.stop), None)
