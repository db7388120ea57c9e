"""Which parcels an item has on a link, so that a node refuses all others."""

from __future__ import annotations

import functools

from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.exchanges.parcels import WAITING, weights_key
from ringtune.schedule.exchanges.replica_grads import replica_grads
from ringtune.schedule.lowering import fit_legs, item_updates
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages.replicas import other_owners, replicated_units, unit_grad_key
from ringtune.schedule.turns.turns import Item


@functools.lru_cache(maxsize=256)
def parcels(plan: Plan, item: Item, source: str, target: str) -> frozenset[TensorKey]:
    """Every parcel that ``source`` sends to ``target`` for an item: gradients, pairs and weights."""
    found = set(replica_grads(plan, item, source, target))
    if item.owner == source and target in other_owners(plan.course, source):
        found |= {unit_grad_key(item.seq, unit) for unit in replicated_units(plan.course, item)}
    if not plan.placement.helpers:
        return frozenset(found)
    for micro, way in enumerate(fit_legs(plan, item, target)):
        receives = (leg for leg in way if leg.op is Op.RECEIVE and leg.peer == source)
        found |= {TensorKey(leg.payload, item.seq, micro, leg.start) for leg in receives}
    updates = (update for update in item_updates(plan, item, target) if update.op is Op.UPDATE)
    return frozenset(found | {weights_key(update) for update in updates if _is_helped(plan, update, source, target)})


def most_waiting(plan: Plan, payload: str, source: str, target: str) -> int:
    """How many parcels of a kind may be on their way on a link or wait at its end."""
    if payload == Payload.REPLICA_GRAD:
        return WAITING[payload] * max(1, -(-plan.slice_of(target).num_blocks // 2))
    if payload != Payload.WEIGHTS:
        return WAITING[payload]
    ranges = sum(helper.node == source for helper in plan.placement.helpers_of(target))
    offload = plan.course.offload
    return WAITING[payload] * ranges * (2 if offload is not None and offload.overlap else 1)


def _is_helped(plan: Plan, update: Action, helper: str, host: str) -> bool:
    """Whether a helper updates the blocks of an update for their host."""
    helpers = plan.placement.helpers_of(host)
    return any(one.node == helper and one.has_block(update.start) for one in helpers)
