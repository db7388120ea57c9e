"""Updates that need parcels of other nodes, or send some: of copies, replicas and helpers.

=========== ==================================================== ====================================
part        updates                                              parcels
=========== ==================================================== ====================================
``copies``  of embedding and head at every owner                 gradients of units, before an update
``helping`` of adapters of other nodes' blocks, at their helper  pairs, and weights after an update
installs    of adapters that a helper has updated, at their host weights, before an update
``sums``    of blocks that several nodes host, at each of them    gradients, before an update
=========== ==================================================== ====================================

Copies (``schedule.stages``): every item that trains the unit updates a copy, in the order of the items. For an item of
another owner it waits for the gradient, and for own items before it that still use the unit. It need not wait for own
updates or checkpoints before it: they precede the gradient, which could not be computed before they were possible here.
The embedding is the largest unit, so its copy is not updated while blocks of this node keep graphs: gradient and state
take the room of the graphs. This can't deadlock: the initiator of an item has the embedding of all items before, so
nothing that these graphs wait for waits for that update. The update of the head could be waited for, and is therefore
not held back.

Replicas (``schedule.lowering``): items are taken in their order. The gradients of an item leave when its last
micro-batch here has gone backward and all items before have been updated here. Its updates wait for the gradients of
every other host.

Helpers (``schedule.placement``): gradients are added up in the order of items and micro-batches. A range of blocks is
updated when all its pairs of an item are fitted, even if those of blocks below are missing. The next item's pairs
follow after all updates of an item. An item may have no pairs, where an operation table skips the blocks; so an update
also waits until the link to the host has room for its weights. The host never waits for later weights than those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from ringtune.engine import events as ev
from ringtune.engine.failure_texts import Awaited
from ringtune.engine.paths import Channel, Credits, ItemState, MicroBatchState
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.course import Course
from ringtune.schedule.lowering import credit_boundary, is_replicated, max_waiting, replica_grad_key, weights_key
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import other_owners, replicas, replicated_units, unit_grad_key
from ringtune.schedule.units import EMBEDDING, unit_name

Arrived = dict[TensorKey, ev.ParcelArrived]
"""Parcels in the inbox, in the order in which they came, even of turns that are not granted here yet."""


class UnitCopies:
    """Updates of one owner's embedding and head for items of other owners.

    There are none with adapters, and none at nodes that own no rows.
    """

    def __init__(self, course: Course, node: str, arrived: Arrived) -> None:
        others = other_owners(course, node) if course.owner(node) is not None else ()
        self._credit_boundary = credit_boundary(course, Payload.UNIT_GRAD)
        self._under_way: Mapping[str, deque[int]] = {other: deque() for other in others}
        self._queue: deque[ItemState] = deque()
        self._arrived = arrived

    # ---- arrivals -----------------------------------------------------------------------------------

    def take_on(self, state: ItemState) -> None:
        """Note an item of another owner that updates copies here."""
        if state.copies:
            self._queue.append(state)

    def note_credit(self, source: str, boundary: int) -> bool:
        """Note that ``source`` has taken the oldest gradient from here; False if the credit is not for a gradient."""
        units = self._under_way.get(source)
        if not units or boundary != self._credit_boundary:
            return False
        units.popleft()
        return True

    # ---- choice of the next update ------------------------------------------------------------------

    def may_save(self, seq: int) -> bool:
        """Whether the copies have had all updates before item ``seq``."""
        self._drop_done()
        return not self._queue or self._queue[0].item.seq > seq

    def may_send(self, unit: int) -> bool:
        """Whether every other owner has taken the last gradient of this unit."""
        return not any(unit in units for units in self._under_way.values())

    def next_update(
        self, heads: Iterable[ItemState], backwards: Iterable[ItemState]
    ) -> tuple[Action, ItemState] | None:
        """Choose the update of a copy for the oldest item of another owner; None if it is not possible yet.

        ``heads`` are own items with heads that are not done, ``backwards`` items with backwards of blocks here.
        """
        self._drop_done()
        if not self._queue:
            return None
        state = self._queue[0]
        came = (key for key in self._arrived if key[:2] == (Payload.UNIT_GRAD, state.item.seq))
        unit = next((key.boundary for key in came), None)  # as they were sent: credits go by that
        if unit is None or _is_used_before(state.item.seq, heads) or (unit == EMBEDDING and _keeps_graphs(backwards)):
            return None
        return next(update for update in state.copies if update.start == unit), state

    def messages(self, update: Action, state: ItemState, course: Course) -> list[ev.Command]:
        """Make the messages right before an update: send the gradient of an own item, take that of another one."""
        unit = update.start
        if unit not in replicated_units(course, state.item):
            return []
        if not state.is_own:
            return [ev.AcceptParcel(*self._arrived.pop(unit_grad_key(update.seq, unit)))]
        for units in self._under_way.values():
            units.append(unit)
        return [ev.SendParcel(unit_grad_key(update.seq, unit), target) for target in self._under_way]

    def awaited(self, state: ItemState) -> int | None:
        """The unit with a missing gradient for an item of another owner; None if there is none."""
        units = (update.start for update in state.copies)
        return next((unit for unit in units if unit_grad_key(state.item.seq, unit) not in self._arrived), None)

    def _drop_done(self) -> None:
        while self._queue and not self._queue[0].copies:
            self._queue.popleft()


def _is_used_before(seq: int, heads: Iterable[ItemState]) -> bool:
    """Whether an own micro-batch before item ``seq`` needs the copies: until its head, which may be a tied one."""
    return any(state.heads and state.item.seq < seq for state in heads)


def _keeps_graphs(backwards: Iterable[ItemState]) -> bool:
    """Whether a micro-batch is between forward and backward of hosted blocks."""
    going = (flow.place for state in backwards for flow in state.backwards)
    return any(place is not None and not place.is_upward for place in going)


class ReplicaSums:
    """Gradients that the hosts of one stage send each other; empty where it has one host."""

    def __init__(self, plan: Plan, node: str, arrived: Arrived) -> None:
        self._plan, self._node, self._arrived = plan, node, arrived
        self._names = replicas(plan.placement, node)
        self._rank = self._names.index(node) if self._names else 0
        self._queue: deque[ItemState] = deque()
        self._sent = -1

    def take_on(self, state: ItemState) -> None:
        """Note an item that updates blocks here."""
        if self._names and self._updates(state):
            self._queue.append(state)

    def leaving(self) -> list[ev.Command]:
        """Send the gradients of the oldest item, once all its micro-batches here have gone backward."""
        while self._queue and not self._queue[0].backwards and not self._updates(self._queue[0]):
            self._queue.popleft()
        if not self._queue or self._queue[0].backwards or self._sent == self._queue[0].item.seq:
            return []
        state = self._queue[0]
        self._sent = state.item.seq
        keys = [replica_grad_key(update, self._rank) for update in self._updates(state)]
        return [ev.SendParcel(key, name) for key in keys for name in self._names if name != self._node]

    def may_update(self, update: Action) -> bool:
        """Whether own gradients are sent and those of every other replica are here."""
        if not self._is_shared(update):
            return True
        return self._sent == update.seq and all(key in self._arrived for key in self._awaited(update))

    def messages(self, update: Action) -> list[ev.Command]:
        """Take the gradients of the other replicas, in ring order, right before an update."""
        if not self._is_shared(update):
            return []
        return [ev.AcceptParcel(*self._arrived.pop(key)) for key in self._awaited(update)]

    def missing(self, update: Action) -> str:
        """The first replica with missing gradients for an update; empty if there is none."""
        keys = self._awaited(update) if self._is_shared(update) else []
        return next((self._names[key.micro] for key in keys if key not in self._arrived), "")

    def _awaited(self, update: Action) -> list[TensorKey]:
        return [replica_grad_key(update, rank) for rank in range(len(self._names)) if rank != self._rank]

    def _updates(self, state: ItemState) -> list[Action]:
        return [update for update in state.updates if self._is_shared(update)]

    def _is_shared(self, update: Action) -> bool:
        return bool(self._names) and is_replicated(self._plan, self._node, update)


class HelperItems:
    """Items with pairs for this helper, and the pairs that have arrived."""

    def __init__(self, plan: Plan, node: str, room: Credits, arrived: Arrived) -> None:
        self._placement, boundary = plan.placement, credit_boundary(plan.course, Payload.WEIGHTS)
        hosts = {plan.placement.host_of(helper.start) for helper in plan.placement.helped_by(node)}
        self._room = {
            host: room.channel(host, boundary, max_waiting(plan, Payload.WEIGHTS, node, host)) for host in hosts
        }
        self._queue: deque[ItemState] = deque()
        self._arrived = arrived

    def take_on(self, state: ItemState) -> None:
        """Note an item that has pairs for this node, or a checkpoint, which keeps those after it waiting."""
        if _is_open(state):
            self._queue.append(state)

    def may_save(self, seq: int) -> bool:
        """Whether everything before item ``seq`` is fitted and updated."""
        self._drop_done()
        return not self._queue or self._queue[0].item.seq >= seq

    def next_update(self) -> tuple[Action, ItemState] | None:
        """Choose the update of a range for the oldest item: its pairs are fitted, and its host has room for weights."""
        self._drop_done()
        if not self._queue:
            return None
        state = self._queue[0]
        for update in state.helped:
            if self._room_for(update).left > 0 and not any(_has_fit(flow, update) for flow in state.fits):
                return update, state
        return None

    def next_fit(self) -> MicroBatchState | None:
        """Choose the oldest micro-batch, if its pairs are here."""
        self._drop_done()
        if not self._queue or not self._queue[0].fits:
            return None
        flow = self._queue[0].fits[0]
        place = flow.place
        if place is None or place.receive is None:
            return None
        payload, boundary, _ = place.receive
        tensor = self._arrived.pop(TensorKey(payload, flow.seq, flow.micro, boundary), None)
        if tensor is not None:
            flow.arrived = tensor
        return flow if flow.arrived is not None else None

    def passed(self, flow: MicroBatchState) -> None:
        """Move a micro-batch behind its fit."""
        place = flow.place
        flow.place = None if place is None else place.next
        if flow.place is None:
            flow.state.fits.popleft()

    def updated(self, update: Action, state: ItemState) -> list[ev.Command]:
        """Note an update; send the weights to their host."""
        state.helped.remove(update)
        room = self._room_for(update)
        room.left -= 1
        return [ev.SendParcel(weights_key(update), room.target)]

    def _room_for(self, update: Action) -> Channel:
        return self._room[self._placement.host_of(update.start)]

    def _drop_done(self) -> None:
        while self._queue and not _is_open(self._queue[0]):
            self._queue.popleft()


def _is_open(state: ItemState) -> bool:
    """Whether pairs, updates for hosts or a save of an item are not done."""
    return bool(state.fits or state.helped) or any(update.op is Op.SAVE for update in state.updates)


def _has_fit(flow: MicroBatchState, update: Action) -> bool:
    """Whether pairs of the updated blocks are not fitted yet in a micro-batch."""
    place = flow.place
    while place is not None:
        if place.start < update.stop and update.start < place.stop:
            return True
        place = place.next
    return False


class ParcelExchange:
    """All parcels of one node for updates."""

    def __init__(self, plan: Plan, node: str, room: Credits) -> None:
        self._course = plan.course
        self._arrived: Arrived = {}
        self.copies = UnitCopies(plan.course, node, self._arrived)
        self.helping = HelperItems(plan, node, room, self._arrived)
        self._helpers = plan.placement.helpers_of(node)
        self.sums = ReplicaSums(plan, node, self._arrived)

    def take_on(self, state: ItemState) -> None:
        """Note an item that may have such updates."""
        self.copies.take_on(state)
        self.helping.take_on(state)
        self.sums.take_on(state)

    def note_parcel(self, event: ev.ParcelArrived) -> None:
        """Note a parcel in the inbox."""
        self._arrived[event.key] = event

    def may_save(self, seq: int) -> bool:
        """Whether copies and helped adapters have had all updates before item ``seq``."""
        return self.copies.may_save(seq) and self.helping.may_save(seq)

    def may_update(self, update: Action) -> bool:
        """Whether the parcels of a helper or of replicas for an update of own blocks are here."""
        is_here = not self._helper_of(update) or weights_key(update) in self._arrived
        return is_here and self.sums.may_update(update)

    def next_update(
        self, heads: Iterable[ItemState], backwards: Iterable[ItemState]
    ) -> tuple[Action, ItemState] | None:
        """Choose a possible update of helped adapters or of a copy; see ``Copies.next_update``."""
        return self.helping.next_update() or self.copies.next_update(heads, backwards)

    def messages_before(self, update: Action, state: ItemState) -> list[ev.Command]:
        """Make the messages right before an update: gradients are sent or taken, weights of a helper taken."""
        if update.op is Op.SAVE or update in state.helped:
            return []
        if self._course.method.full_parameters:
            return self.copies.messages(update, state, self._course)
        if self._helper_of(update):
            return [ev.AcceptParcel(*self._arrived.pop(weights_key(update)))]
        return self.sums.messages(update)

    def awaited(self, states: Sequence[ItemState]) -> Awaited | None:
        """Describe the parcel that the oldest item awaits after its micro-batches; None if there is none.

        Example: ``the updated adapters of step 7 (train), from block 2 on, from helper z``.
        """
        if not states or states[0].flows_left:
            return None
        state = states[0]
        owner, of_step = state.item.owner, f"of step {state.item.step} ({state.item.kind.value})"
        unit = self.copies.awaited(state)
        if unit is not None:
            name = unit_name(unit, self._course.head)
            return Awaited(f"the gradient of the {name} {of_step}, from node {owner}", owner)
        install = next((update for update in state.updates if not self.may_update(update)), None)
        if install is None:
            return None
        where, helper = f"{of_step}, from block {install.start} on", self._helper_of(install)
        if replica := self.sums.missing(install):
            return Awaited(f"the gradients {where}, of the replica on node {replica}", replica)
        return Awaited(f"the updated adapters {where}, from helper {helper}", helper)

    def _helper_of(self, update: Action) -> str:
        """The helper that sends the weights of an update; empty if this node computes it."""
        if not self._helpers:
            return ""
        return next((helper.node for helper in self._helpers if helper.has_block(update.start)), "")
