"""Know the turns whose frames a node may get now: granted ones, and some granted only to others as yet.

A grant reaches one node before another, so a frame may come for a turn that this node has not heard of. Such turns are
derived from the course, but only a bounded number beyond the last grant: a peer can't make a node look further.
"""

from __future__ import annotations

import bisect
import threading
from typing import NamedTuple

from ringtune.schedule.owner_turns import most_turns_apart
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import ITEMS_AHEAD, StartPoint, StepKind, Turn, turn_sequence


class Known(NamedTuple):
    """A turn with the plan that holds for it.

    Before the turn's grant the plan is one under which everything trains that any decision could let train.

    Attributes:
        turn: the turn.
        plan: that holds for it.
        is_open: whether the run has yet to say which operations its items have.
    """

    turn: Turn
    plan: Plan
    is_open: bool = False


class KnownTurns:
    """The turns of one run whose frames one node may get now; safe for threads.

    Args:
        plan: of the run.
        start: where it goes on.
    """

    def __init__(self, plan: Plan, start: StartPoint) -> None:
        self._plan, self._soonest = plan, plan.soonest()
        self._holder = start.holder
        self._sequence = turn_sequence(plan.course, start=start)
        self._known: list[Known] = []  # without gaps; the first of them is number self._forgotten
        self._forgotten = self._first = start.first_turn
        self._granted = start.first_turn - 1
        # a node that lags waits for its own turn at the latest; a checkpoint, evaluations and scores may follow each
        owners = plan.course.owners
        between = len(owners) * (2 if plan.course.choice else 1) + 2
        self._ahead = most_turns_apart(owners, plan.course.turns) * between + 2 + ITEMS_AHEAD
        self._lock = threading.Lock()

    def granted(self, turn: Turn) -> None:
        """Take a turn that the coordinator granted; turns are granted in order."""
        known = Known(turn, self._plan.decided(turn.unfreeze_at, turn.operations))
        with self._lock:
            self._derive(turn.index)
            at = turn.index - self._forgotten
            if 0 <= at < len(self._known):
                self._known[at] = known
            elif at == len(self._known):  # one that no course foresees: a checkpoint because the user stops
                self._known.append(known)
            self._granted = max(self._granted, turn.index)

    def done_before(self, index: int) -> None:
        """Forget the turns before ``index``, which this node has done; the last one stays, for who had the head."""
        with self._lock:
            useless = index - 1 - self._forgotten  # the last one of them tells who had the head
            if useless > 0:
                del self._known[:useless]
                self._forgotten += useless

    def by_index(self, index: int) -> Known | None:
        """Find a turn by its index; None if it is not known now."""
        with self._lock:
            self._derive(self._granted + self._ahead)
            at = index - self._forgotten
            return self._known[at] if 0 <= at < len(self._known) else None

    def by_seq(self, seq: int) -> Known | None:
        """Find the turn of an item; None if it is not known now."""
        with self._lock:
            self._derive(self._granted + self._ahead)
            at = bisect.bisect_right(self._known, seq, key=_first_seq) - 1
            return self._known[at] if at >= 0 and seq < self._known[at].turn.end_seq else None

    def holder_before(self, turn: Turn) -> str:
        """Name the node that has the head before a turn; empty if the turn before is not known any more."""
        if turn.index == self._first:
            return self._holder
        before = self.by_index(turn.index - 1)
        return before.turn.owner if before else ""

    def span(self) -> tuple[int, int]:
        """Indices of the first and the last turn that are known now."""
        with self._lock:
            return self._forgotten, self._forgotten + len(self._known) - 1

    def _derive(self, last: int) -> None:
        """Derive the turns up to index ``last`` from the course, as far as it has any."""
        while self._forgotten + len(self._known) <= last:
            turn = next(self._sequence, None)
            if turn is None:
                break
            is_open = self._plan.course.choice is not None and turn.kind is StepKind.TRAIN
            self._known.append(Known(turn, self._soonest, is_open))


def _first_seq(known: Known) -> int:
    return known.turn.first_seq
