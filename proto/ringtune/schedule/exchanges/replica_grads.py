"""Gradients that replicas send each other, so that each does the update of all micro-batches of a batch.

Each host of a stage adds up the gradients of its own micro-batches. When it has its last one of an item, it sends the
sum to every other host of the stage. Each host adds the sums up in ring order, its own among them, so that all compute
the same bits, and updates. Hosts a and b of one stage, micro-batches 0 and 2 at a, 1 at b::

    a | ... B7.0[2,4)  B7.2[2,4)  >r7.0#2@b               <r7.1#2@b  U7[2,4)
    b | ... B7.1[2,4)  >r7.1#2@a             <r7.0#2@a    U7[2,4)

The place of a micro-batch in the name is that of the sender among the hosts of the stage. A host whose micro-batches
have no gradient sends an empty sum: nobody has to know what others did. It sends the sum of an item after its own
update of the item before, so no more than two of them are under way on a link.
"""

from __future__ import annotations

from ringtune.schedule.actions import Action, Op, Payload, TensorKey, message
from ringtune.schedule.lowering import item_updates
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages.dealing import replicas
from ringtune.schedule.turns.turns import Item
from ringtune.schedule.units import EMBEDDING


def is_replicated(plan: Plan, node: str, update: Action) -> bool:
    """Whether other hosts do the same update of the same blocks."""
    if not replicas(plan.placement, node) or update.op is not Op.UPDATE:
        return False
    return EMBEDDING < update.start < plan.course.head


def replica_grad_key(update: Action, rank: int) -> TensorKey:
    """The name of the gradients that the host at place ``rank`` of a stage sends for an update."""
    return TensorKey(Payload.REPLICA_GRAD, update.seq, rank, update.start)


def replica_grads(plan: Plan, item: Item, source: str, target: str) -> tuple[TensorKey, ...]:
    """The gradients that ``source`` sends to ``target`` for an item; none where they are no replicas."""
    names = replicas(plan.placement, target)
    if source not in names or source == target:
        return ()
    updates = (update for update in item_updates(plan, item, target) if is_replicated(plan, target, update))
    return tuple(replica_grad_key(update, names.index(source)) for update in updates)


def replica_messages(plan: Plan, node: str, update: Action) -> tuple[Action, ...]:
    """The messages before an update: own gradients to every other replica, then theirs, in ring order."""
    if not is_replicated(plan, node, update):
        return ()
    names = replicas(plan.placement, node)
    own = replica_grad_key(update, names.index(node))
    others = [(rank, name) for rank, name in enumerate(names) if name != node]
    sends = [message(Op.SEND, own, name) for _, name in others]
    return (*sends, *(message(Op.RECEIVE, replica_grad_key(update, rank), name) for rank, name in others))
