"""Gradients that a host exchanges with the other hosts of its stage (``schedule.replica_grads``).

Items are taken in their order: the gradients of an item leave when its last micro-batch here has gone backward and all
items before have been updated here. Its updates wait for the gradients of every other host.
"""

from __future__ import annotations

from collections import deque

from ringtune.engine import events as ev
from ringtune.engine.flows import ItemState
from ringtune.schedule.actions import Action, TensorKey
from ringtune.schedule.exchanges.replica_grads import is_replicated, replica_grad_key
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages.dealing import replicas


class ReplicaSums:
    """What one host owes the other hosts of its stage, and what they owe it; nothing where it is the only one.

    Args:
        plan: of the run.
        node: the host.
    """

    __slots__ = ("_arrived", "_names", "_node", "_plan", "_queue", "_rank", "_sent")

    def __init__(self, plan: Plan, node: str) -> None:
        self._plan, self._node = plan, node
        self._names = replicas(plan.placement, node)
        self._rank = self._names.index(node) if self._names else 0
        self._queue: deque[ItemState] = deque()
        self._sent = -1
        self._arrived: dict[TensorKey, str] = {}

    def take_on(self, state: ItemState) -> None:
        """Note an item that updates blocks here."""
        if self._names and self._updates(state):
            self._queue.append(state)

    def arrived(self, event: ev.ParcelArrived) -> None:
        """Note that gradients of another host are in the inbox."""
        self._arrived[event.key] = event.source

    def leaving(self) -> list[ev.Command]:
        """The gradients of the oldest item, once all its micro-batches here have gone backward; each only once."""
        while self._queue and not self._updates(self._queue[0]):
            self._queue.popleft()
        if not self._queue:
            return []
        state = self._queue[0]
        if state.backwards or self._sent == state.item.seq:
            return []
        self._sent = state.item.seq
        keys = [replica_grad_key(update, self._rank) for update in self._updates(state)]
        return [ev.SendParcel(key, name) for key in keys for name in self._names if name != self._node]

    def may_update(self, update: Action) -> bool:
        """Whether own gradients have left and those of every other host are here."""
        if not self._is_shared(update):
            return True
        return self._sent == update.seq and all(key in self._arrived for key in self._awaited(update))

    def messages(self, update: Action) -> list[ev.Command]:
        """What is done right before an update: the gradients of the other hosts are taken, in ring order."""
        if not self._is_shared(update):
            return []
        return [ev.AcceptParcel(key, self._arrived.pop(key)) for key in self._awaited(update)]

    def missing(self, update: Action) -> str:
        """The first host whose gradients an update waits for; empty if it waits for none."""
        keys = self._awaited(update) if self._is_shared(update) else []
        return next((self._names[key.micro] for key in keys if key not in self._arrived), "")

    def _awaited(self, update: Action) -> list[TensorKey]:
        return [replica_grad_key(update, rank) for rank in range(len(self._names)) if rank != self._rank]

    def _updates(self, state: ItemState) -> list[Action]:
        return [update for update in state.updates if self._is_shared(update)]

    def _is_shared(self, update: Action) -> bool:
        return bool(self._names) and is_replicated(self._plan, self._node, update)
