"""Parcels in and out of one node, each to the part of the node that makes or takes its kind."""

from __future__ import annotations

from edge.compute.hosting import Hosted
from edge.compute.micro_batches import OpenItem
from edge.compute.offloading import Offloading
from edge.compute.replica import Replica
from edge.model.owner import OwnerParts
from ringtune.engine.diverged import diverged
from ringtune.errors import DivergedError, PlanError
from ringtune.files.pieces import Pieces
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.units import unit_name


class Parcels:
    """What one node sends to others, and takes from them, besides hidden states, gradients of them, and heads.

    Args:
        hosted: what it hosts.
        offloading: makes pairs and weights, and takes them.
        replica: makes gradients for the other hosts of its stage, and takes theirs.
    """

    def __init__(self, hosted: Hosted, offloading: Offloading, replica: Replica) -> None:
        self._hosted, self._offloading, self._replica = hosted, offloading, replica

    def take(self, key: TensorKey, entry: OpenItem) -> Pieces:
        """Return a parcel of an item that is on its way to another node."""
        if key.payload == Payload.UNIT_GRAD:
            return self._owner(key).unit_grad(key.boundary)
        if key.payload == Payload.REPLICA_GRAD:
            return self._replica.grads(key, entry)
        return self._offloading.take_parcel(key)

    def put(self, key: TensorKey, data: Pieces, entry: OpenItem) -> None:
        """Take a parcel of an item that another node made.

        Raises:
            IntegrityError: unreadable, or not what the key says.
            DivergedError: a gradient is not finite.
        """
        if key.payload not in (Payload.UNIT_GRAD, Payload.REPLICA_GRAD):
            self._offloading.put_parcel(key, data, entry.item.step)
            return
        try:
            if key.payload == Payload.REPLICA_GRAD:
                self._replica.put(key, data, entry)
            else:
                name = unit_name(key.boundary, len(self._hosted.skeleton.blocks))
                where = f"the gradient of the {name} for item {key.seq}"
                self._owner(key).load_unit_grad(key.boundary, data, where=where)
        except DivergedError as error:
            raise diverged(entry.item, str(error)) from error

    def _owner(self, key: TensorKey) -> OwnerParts:
        if self._hosted.owner is None:
            raise PlanError(f"the {key} needs an owner, which this node is not")
        return self._hosted.owner
