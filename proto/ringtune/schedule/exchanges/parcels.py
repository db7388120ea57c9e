"""Parcels: messages of an item that are opaque to the wire, and how many of each kind may wait at a node.

A parcel is one safetensors blob with the key of a tensor. Each kind has its own credits on a link; they are told from
those of hidden states by a boundary above the head, which no hidden state enters.

================ ===================================================== ==============
payload          what is in it                                         waiting a link
================ ===================================================== ==============
``UNIT_GRAD``    gradient of embedding or head, for another owner      2: one a unit
``PAIRS``        inputs and output gradients of adapters, for a helper 2 micro-batches
``WEIGHTS``      adapters that a helper has updated, for their host    1 each range
``REPLICA_GRAD`` gradients of adapters, for another host of the stage  2 each range
================ ===================================================== ==============
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ringtune.schedule.actions import Action, Payload, TensorKey
from ringtune.schedule.course import Course

WAITING: Final[Mapping[str, int]] = {
    Payload.UNIT_GRAD: 2,
    Payload.PAIRS: 2,
    Payload.WEIGHTS: 1,
    Payload.REPLICA_GRAD: 2,
}
"""Parcels of a kind that may be on their way on a link or wait at its end; see ``expected_parcels.most_waiting``."""

PARCELS: Final = frozenset(WAITING)
"""Payloads that are parcels."""

_ABOVE_HEAD: Final[Mapping[str, int]] = {payload: at for at, payload in enumerate(WAITING, start=1)}


def credit_boundary(course: Course, payload: str) -> int:
    """The boundary of the credits of a kind of parcel: above the head, which no hidden state enters."""
    return course.head + _ABOVE_HEAD[payload]


def weights_key(update: Action) -> TensorKey:
    """The name of the weights that follow an update at a helper, and that come before the one at the host."""
    return TensorKey(Payload.WEIGHTS, update.seq, -1, update.start)
