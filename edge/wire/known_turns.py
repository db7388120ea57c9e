"""The turns whose frames a node may get now: those that it was granted, and some that others may have been granted.

A grant reaches one node before another, so a frame may come for a turn that this node has not heard of. Such turns are
derived from the course, but only a bounded number beyond the last grant: a peer can't make a node look further.
"""

from __future__ import annotations

import bisect
import threading
from typing import NamedTuple

from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import ITEMS_AHEAD, StartPoint, Turn, turn_sequence


class Known(NamedTuple):
    """A turn, with the plan as it is for it; before its grant, one that trains all that any decision could."""

    turn: Turn
    plan: Plan


class KnownTurns:
    """The turns of one run at one node. Safe for threads.

    Args:
        plan: of the run.
        start: where it goes on.
    """

    def __init__(self, plan: Plan, start: StartPoint) -> None:
        self._plan, self._soonest = plan, plan.soonest()
        self._holder = start.holder
        self._sequence = turn_sequence(plan.course, start=start)
        self._known: list[Known] = []  # without gaps; the first of them is number self._forgotten
        self._forgotten = 0
        self._granted = -1
        # a round has that many turns at most, and every owner gets something in each; turns are granted ahead
        self._ahead = (len(plan.course.owners) + 1) ** 2 + 1 + ITEMS_AHEAD
        self._lock = threading.Lock()

    def granted(self, turn: Turn) -> None:
        """The coordinator said that a turn may be worked on; turns are granted in order."""
        known = Known(turn, self._plan.decided(turn.unfreeze_at))
        with self._lock:
            self._derive(turn.index)
            at = turn.index - self._forgotten
            if 0 <= at < len(self._known):
                self._known[at] = known
            elif at == len(self._known):  # one that no course foresees: a checkpoint because the user stops
                self._known.append(known)
            self._granted = max(self._granted, turn.index)

    def done_before(self, index: int) -> None:
        """This node has nothing left to do in the turns before ``index``."""
        with self._lock:
            useless = index - 1 - self._forgotten  # the last one of them tells who had the head
            if useless > 0:
                del self._known[:useless]
                self._forgotten += useless

    def by_index(self, index: int) -> Known | None:
        """A turn by its index; None if it is not known now."""
        with self._lock:
            self._derive(self._granted + self._ahead)
            at = index - self._forgotten
            return self._known[at] if 0 <= at < len(self._known) else None

    def by_seq(self, seq: int) -> Known | None:
        """The turn that an item belongs to; None if it is not known now."""
        with self._lock:
            self._derive(self._granted + self._ahead)
            at = bisect.bisect_right(self._known, seq, key=_first_seq) - 1
            return self._known[at] if at >= 0 and seq < self._known[at].turn.end_seq else None

    def holder_before(self, turn: Turn) -> str:
        """Who has the head before a turn; empty if that is not known any more."""
        if turn.index == 0:
            return self._holder
        before = self.by_index(turn.index - 1)
        return before.turn.owner if before else ""

    def span(self) -> tuple[int, int]:
        """The first and the last turn that are known now."""
        with self._lock:
            return self._forgotten, self._forgotten + len(self._known) - 1

    def _derive(self, last: int) -> None:
        """Know all turns up to ``last``, as far as there are any."""
        while self._forgotten + len(self._known) <= last:
            turn = next(self._sequence, None)
            if turn is None:
                break
            self._known.append(Known(turn, self._soonest))


def _first_seq(known: Known) -> int:
    return known.turn.first_seq
