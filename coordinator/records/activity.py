"""What each node did in a turn, for those who look on: shares of its time, and the actions of the turn's last step.

Spans are added as nodes report them, and forgotten with their turn, so that memory does not grow with the run. Of a
node's time in a turn a part is *busy* (it computes), a part is *waiting* (between the first and the last of its
actions of one item, so that the next message has to come first), and the rest is *idle* (there is no item for it)::

    item 7:    B B . . B      . = waiting      item 8:  B B
               |-------|                                |-|     between the two: idle
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ringtune.engine.spans import Span
from ringtune.schedule.turns.turns import StepKind, Turn

MOST_SPANS: Final = 4000
"""Actions of a step that are shown; 200 nodes with micro-batches of their own have so many. The rest is counted."""
_MOST_ITEMS: Final = 512


@dataclass(slots=True)
class _Item:
    """One item at one node: from its first action to its last one so far, and the seconds of its actions."""

    start_s: float
    end_s: float
    busy_s: float

    def add(self, start_s: float, end_s: float) -> None:
        """Add an action."""
        self.start_s, self.end_s = min(self.start_s, start_s), max(self.end_s, end_s)
        self.busy_s += end_s - start_s


class _NodeTime:
    """The items of one node that are not counted yet; of very many the oldest are put together."""

    def __init__(self) -> None:
        self._items: dict[int, _Item] = {}

    def add(self, seq: int, start_s: float, end_s: float) -> None:
        """Add an action of an item."""
        if seq in self._items:
            self._items[seq].add(start_s, end_s)
            return
        self._items[seq] = _Item(start_s, end_s, end_s - start_s)
        if len(self._items) > _MOST_ITEMS:
            oldest, second = sorted(self._items)[:2]
            old = self._items.pop(oldest)
            self._items[second].add(old.start_s, old.start_s)
            self._items[second].busy_s += old.busy_s
            self._items[second].end_s = max(self._items[second].end_s, old.end_s)

    def shares(self, begin_s: float, end_s: float, end_seq: int) -> list[float]:
        """Count the time from ``begin_s`` to ``end_s``; items from ``end_seq`` on go on after it.

        Returns:
            The shares busy, waiting and idle, which add up to 1.
        """
        busy_s, covered_s, until_s = 0.0, 0.0, begin_s
        for seq, item in sorted(self._items.items(), key=lambda entry: (entry[1].start_s, entry[0])):
            goes_on = seq >= end_seq
            if item.start_s >= end_s:
                continue
            long_s = item.end_s - item.start_s
            inside = max(0.0, min(item.end_s, end_s) - max(item.start_s, begin_s)) / long_s if long_s else 1.0
            busy_s += item.busy_s * inside
            last_s = end_s if goes_on else min(item.end_s, end_s)
            covered_s += max(0.0, last_s - max(item.start_s, until_s))
            until_s = max(until_s, last_s)
            if goes_on:
                self._items[seq] = _Item(end_s, max(item.end_s, end_s), item.busy_s * (1.0 - inside))
            else:
                del self._items[seq]
        total_s = end_s - begin_s
        if total_s <= 0:
            return [0.0, 0.0, 1.0]
        covered = min(1.0, covered_s / total_s)
        busy = min(covered, busy_s / total_s)
        return [round(busy, 4), round(covered - busy, 4), round(1.0 - covered, 4)]


@dataclass(slots=True)
class _TurnSpans:
    """What is kept of a turn: when its actions began and ended, and those of its last step."""

    turn: Turn
    last: list[tuple[str, Span]] = field(default_factory=list)
    left_out: int = 0
    start_s: float = math.inf
    end_s: float = -math.inf

    def add(self, node: str, span: Span) -> None:
        """Note one action."""
        self.start_s, self.end_s = min(self.start_s, span.start_s), max(self.end_s, span.end_s)
        if span.action.seq == self.turn.end_seq - 1:
            if len(self.last) < MOST_SPANS:
                self.last.append((node, span))
            else:
                self.left_out += 1


class Activity:
    """Counts what nodes do in the turns that are granted."""

    def __init__(self) -> None:
        self._turns: list[_TurnSpans] = []
        self._nodes: dict[str, _NodeTime] = defaultdict(_NodeTime)
        self._counted_s = -math.inf

    def granted(self, turns: Iterable[Turn]) -> None:
        """Expect the actions of these turns."""
        self._turns += [_TurnSpans(turn) for turn in turns]

    def add(self, node: str, spans: Iterable[Span]) -> None:
        """Count the compute actions that a node reports; those of no granted turn are left out."""
        for span in spans:
            if not span.is_compute:
                continue
            seq = span.action.seq
            for kept in self._turns:
                if kept.turn.first_seq <= seq < kept.turn.end_seq:
                    kept.add(node, span)
                    self._nodes[node].add(seq, span.start_s, max(span.start_s, span.end_s))

    def turn_done(self, turn: Turn, nodes: Sequence[str]) -> dict[str, Any] | None:
        """Close a turn, and those before it; what later turns had in its time counts too.

        Args:
            turn: that every node has done.
            nodes: of the placement that holds.

        Returns:
            What to show of it; None for a turn that trained nothing, or of which nothing was reported.
        """
        found = next((kept for kept in self._turns if kept.turn.index == turn.index), None)
        self._turns = [kept for kept in self._turns if kept.turn.index > turn.index]
        if found is None or found.end_s <= self._counted_s:
            return None
        begin_s = self._counted_s if math.isfinite(self._counted_s) else found.start_s
        self._counted_s = found.end_s
        shares = {node: self._nodes[node].shares(begin_s, found.end_s, turn.end_seq) for node in nodes}
        if turn.kind is not StepKind.TRAIN:
            return None
        return {
            "step": turn.end_step,
            "initiator": turn.owner,
            "seconds": round(found.end_s - begin_s, 6),
            "nodes": shares,
            "spans": last_step(found.last),
            "left_out": found.left_out,
        }


def last_step(spans: Sequence[tuple[str, Span]]) -> list[list[Any]]:
    """Write actions as ``[node, letter, micro-batch, start, stop, begins at, takes]``, in ms from the first of them."""
    if not spans:
        return []
    zero_s = min(span.start_s for _, span in spans)
    return [
        [
            node,
            str(span.action.op),
            span.action.micro,
            span.action.start,
            span.action.stop,
            round((span.start_s - zero_s) * 1e3, 3),
            round(max(0.0, span.end_s - span.start_s) * 1e3, 3),
        ]
        for node, span in sorted(spans, key=lambda entry: (entry[1].start_s, entry[0]))
    ]
