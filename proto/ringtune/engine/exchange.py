"""Updates that need something of another node, or give it something: of copies, of helpers, and of those they help.

=========== ==================================================== ====================================
part        whose updates                                        what travels
=========== ==================================================== ====================================
``copies``  of embedding and head at every owner                 gradients of units, before an update
``helping`` of adapters of other nodes' blocks, at their helper  pairs, and weights after an update
installs    of adapters that a helper has updated, at their host weights, before an update
``sums``    of blocks that several nodes host, at each of them    gradients, before an update
=========== ==================================================== ====================================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ringtune.engine import events as ev
from ringtune.engine.awaited import awaited_copy, awaited_grads, awaited_weights
from ringtune.engine.copies import Copies
from ringtune.engine.flows import ItemState
from ringtune.engine.helping import Helping, Installs
from ringtune.engine.replica_sums import ReplicaSums
from ringtune.schedule.actions import Action, Op, Payload
from ringtune.schedule.plan import Plan


class Exchange:
    """What one node exchanges with others for updates.

    Args:
        plan: of the run.
        node: which node.

    Attributes:
        copies: of embedding and head; they wait for nothing with adapters.
        helping: what this node fits for others.
        sums: what this node and the other hosts of its stage send each other.
    """

    __slots__ = ("_course", "_installs", "copies", "helping", "sums")

    def __init__(self, plan: Plan, node: str) -> None:
        self._course = plan.course
        self.copies = Copies(plan.course, node)
        self.helping = Helping(plan.placement)
        self._installs = Installs(plan.placement, node)
        self.sums = ReplicaSums(plan, node)

    def take_on(self, state: ItemState) -> None:
        """Note an item with such updates."""
        self.copies.take_on(state)
        self.helping.take_on(state)
        self.sums.take_on(state)

    def parcel_came(self, event: ev.ParcelArrived) -> None:
        """Note gradients that another owner or replica sent, pairs of a host, or weights of a helper."""
        key, source = event
        if key.payload == Payload.UNIT_GRAD:
            self.copies.arrived(key.seq, key.boundary, source)
        elif key.payload == Payload.REPLICA_GRAD:
            self.sums.arrived(event)
        elif key.payload == Payload.WEIGHTS:
            self._installs.arrived(event)
        else:
            self.helping.arrived(event)

    def may_save(self, seq: int) -> bool:
        """Whether copies and adapters of others have had all updates before an item."""
        return self.copies.may_save(seq) and self.helping.may_save(seq)

    def may_update(self, update: Action) -> bool:
        """Whether what an update of own blocks needs from a helper or from replicas is here."""
        return self._installs.may_update(update) and self.sums.may_update(update)

    def next_update(
        self, heads: Iterable[ItemState], backwards: Iterable[ItemState]
    ) -> tuple[Action, ItemState] | None:
        """An update of others' adapters, or of a copy, that is possible; see ``Copies.next_update``."""
        return self.helping.next_update() or self.copies.next_update(heads, backwards)

    def messages_before(self, update: Action, state: ItemState) -> list[ev.Command]:
        """What is done right before an update: gradients leave or are taken, as are weights of a helper."""
        if update.op is Op.SAVE or update in state.helped:
            return []
        if self._course.method.full_parameters:
            return self.copies.messages(update, state, self._course)
        return self._installs.messages(update) or self.sums.messages(update)

    def awaited(self, states: Sequence[ItemState]) -> str:
        """What the oldest item waits for from another node once its micro-batches are through; empty for nothing."""
        if not states or states[0].flows_left:
            return ""
        state = states[0]
        unit = self.copies.awaited(state)
        if unit is not None:
            return awaited_copy(state.item, unit, self._course.head)
        install = next((update for update in state.updates if not self.may_update(update)), None)
        if install is None:
            return ""
        if replica := self.sums.missing(install):
            return awaited_grads(state.item, install.start, replica)
        return awaited_weights(state.item, install.start, self._installs.helper_of(install))
