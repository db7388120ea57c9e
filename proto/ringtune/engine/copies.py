"""An owner's copies of embedding and head (``schedule.replicas``): which gradients came, which may leave.

A copy is updated by every item that trains its unit, in the order of the items. The update of an item of another owner
waits for the gradient, and for own items before it that still use the unit as it is. It need not wait for own updates
or checkpoints before it: the gradient could not have been computed before those were possible here, and they go first.

The embedding is the largest unit, so its copy is not updated while blocks of this node keep graphs: its gradient and
state take the room that graphs leave. Nothing that these graphs wait for waits for that update: whoever began an item
has the embedding of all items before. It could wait for the head, which is updated at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from ringtune.engine import events as ev
from ringtune.engine.flows import ItemState
from ringtune.schedule.actions import Action, Payload
from ringtune.schedule.course import Course
from ringtune.schedule.exchanges.parcels import credit_boundary
from ringtune.schedule.stages.replicas import other_owners, replicated_units, unit_grad_key
from ringtune.schedule.units import EMBEDDING


class Copies:
    """The copies of one owner; those of a node that owns nothing, or with adapters, wait for nothing.

    Args:
        course: of the run.
        node: which node.
    """

    __slots__ = ("_arrived", "_credit_boundary", "_queue", "_under_way")

    def __init__(self, course: Course, node: str) -> None:
        others = other_owners(course, node) if course.owner(node) is not None else ()
        self._credit_boundary = credit_boundary(course, Payload.UNIT_GRAD)
        self._under_way: Mapping[str, deque[int]] = {other: deque() for other in others}
        self._queue: deque[ItemState] = deque()
        self._arrived: dict[tuple[int, int], str] = {}

    # ---- what comes in ------------------------------------------------------------------------------

    def take_on(self, state: ItemState) -> None:
        """Note an item of another owner that updates copies here."""
        if state.copies:
            self._queue.append(state)

    def arrived(self, seq: int, unit: int, source: str) -> None:
        """Note that the gradient of a unit is in the inbox."""
        self._arrived[seq, unit] = source

    def credit_came(self, source: str, boundary: int) -> bool:
        """Note that ``source`` took the oldest gradient of this node; whether the credit was for one."""
        units = self._under_way.get(source)
        if not units or boundary != self._credit_boundary:
            return False
        units.popleft()
        return True

    # ---- what may go on -----------------------------------------------------------------------------

    def may_save(self, seq: int) -> bool:
        """Whether the copies have had all updates before an item."""
        self._drop_done()
        return not self._queue or self._queue[0].item.seq > seq

    def may_send(self, unit: int) -> bool:
        """Whether every other owner has taken the gradient of this unit that was sent before."""
        return not any(unit in units for units in self._under_way.values())

    def next_update(
        self, heads: Iterable[ItemState], backwards: Iterable[ItemState]
    ) -> tuple[Action, ItemState] | None:
        """The update of a copy for the oldest item of another owner, if that is possible now.

        Args:
            heads: own items whose heads may still be to come.
            backwards: items that may still go backward through blocks of this node.
        """
        self._drop_done()
        if not self._queue:
            return None
        state = self._queue[0]
        units = (unit for seq, unit in self._arrived if seq == state.item.seq)  # as they were sent: credits go by that
        unit = next(units, None)
        if unit is None or _is_used_before(state.item.seq, heads) or (unit == EMBEDDING and _keeps_graphs(backwards)):
            return None
        return next(update for update in state.copies if update.start == unit), state

    def messages(self, update: Action, state: ItemState, course: Course) -> list[ev.Command]:
        """What is done right before an update: the gradient of an own item leaves, that of another one is taken."""
        unit = update.start
        if unit not in replicated_units(course, state.item):
            return []
        if not state.is_own:
            return [ev.AcceptParcel(unit_grad_key(update.seq, unit), self._arrived.pop((update.seq, unit)))]
        for units in self._under_way.values():
            units.append(unit)
        return [ev.SendParcel(unit_grad_key(update.seq, unit), target) for target in self._under_way]

    def awaited(self, state: ItemState) -> int | None:
        """The unit whose gradient an item of another owner waits for; None if it waits for none."""
        return next((update.start for update in state.copies if (update.seq, update.start) not in self._arrived), None)

    def _drop_done(self) -> None:
        while self._queue and not self._queue[0].copies:
            self._queue.popleft()


def _is_used_before(seq: int, heads: Iterable[ItemState]) -> bool:
    """Whether an own micro-batch before an item needs the copies as they are: until its head, which may be tied."""
    return any(own.heads and own.item.seq < seq for own in heads)


def _keeps_graphs(backwards: Iterable[ItemState]) -> bool:
    """Whether hosted blocks keep graphs of some micro-batch: it is through them and has not come back."""
    going = (flow.place for state in backwards for flow in state.backwards)
    return any(place is not None and not place.is_upward for place in going)
