"""Trace of a run: every action with start and end, for Perfetto; and each node's shares of time in a turn.

In ``trace.json`` a node is a process; its compute actions are one thread, and its messages to each other node are a
thread. Times are microseconds since the start of training. The file is sent as it grows; after a failure it is
completed to valid JSON.

Of a node's time in a turn a part is *busy* (it computes), a part is *waiting* (between the first and the last of its
actions of one item, for the next message), and the rest is *idle* (there is no item for it)::

    item 7:    B B . . B      . = waiting      item 8:  B B
               |-------|                                |-|     between the two: idle

The last step begins at the end of the one before it; embeddings and frozen blocks may have run before that, at negative
times. Waits follow from dependencies: a forward needs the block below, a backward the block above. Spans are dropped
with their turn, so memory does not grow with the run.

Source: Trace Event Format (Chrome), JSON object form with complete events ("ph": "X").
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ringtune.engine.events import Span
from ringtune.run_control.events import LogMove
from ringtune.schedule.actions import Op, action_title, format_action
from ringtune.schedule.turns import StepKind, Turn

_COMPUTE_THREAD, _FIRST_WIRE_THREAD = 1, 2


class TraceText:
    """Writes a trace piece by piece.

    Args:
        started_unix_s: time zero.
        placement_number: of the present placement, an argument of each action; None = the run does not move.
    """

    def __init__(
        self, nodes: Iterable[str], *, num_blocks: int, started_unix_s: float, placement_number: int | None = None
    ) -> None:
        self._placement_number = placement_number
        self._pids = {node: index + 1 for index, node in enumerate(nodes)}
        self._num_blocks = num_blocks
        self._started_unix_s = started_unix_s
        self._wires: dict[tuple[int, str], int] = {}

    def begin(self) -> str:
        """Write the first piece: names of processes and threads."""
        events = [event for node in self._pids for event in self._names(node)]
        head = {"displayTimeUnit": "ms", "otherData": {"started_unix_s": self._started_unix_s}}
        return json.dumps(head)[:-1] + ', "traceEvents": [\n' + ",\n".join(json.dumps(event) for event in events)

    def joined(self, node: str) -> str:
        """Write the piece for one more node: names of its process and thread."""
        self._pids[node] = len(self._pids) + 1
        return "".join(",\n" + json.dumps(event) for event in self._names(node))

    def _names(self, node: str) -> list[dict[str, Any]]:
        pid = self._pids[node]
        order = {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        return [_name("process_name", pid, 0, node), order, _name("thread_name", pid, _COMPUTE_THREAD, "compute")]

    def spans(self, node: str, spans: Iterable[Span]) -> str:
        """Write the piece for spans of one node, in unix seconds."""
        events = (event for span in spans for event in self._events(self._pids[node], span))
        return "".join(",\n" + json.dumps(event) for event in events)

    def move(self, nodes: Iterable[str], command: LogMove, at_unix_s: float) -> str:
        """Write the piece for a move that ended at ``at_unix_s``; later actions are of its placement."""
        self._placement_number = command.part.placement.placement_number
        stays = {"stays because": command.problem} if command.problem else {}
        event = {
            "ph": "X",
            "name": f"move to placement {command.placement_number}",
            "cat": "MOVE",
            "tid": _COMPUTE_THREAD,
            "ts": round((at_unix_s - command.seconds - self._started_unix_s) * 1e6, 1),
            "dur": round(command.seconds * 1e6, 1),
            "args": {"step": command.step, **stays},
        }
        return "".join(",\n" + json.dumps({**event, "pid": self._pids[node]}) for node in nodes)

    def end(self) -> str:
        """Write the last piece."""
        return "\n]}\n"

    def _events(self, pid: int, span: Span) -> Iterator[dict[str, Any]]:
        """Yield the event of a span, preceded by the name of its thread if that is new."""
        action, thread = span.action, _COMPUTE_THREAD
        if not span.is_compute:
            if (pid, action.peer) not in self._wires:
                self._wires[pid, action.peer] = _FIRST_WIRE_THREAD + len(self._wires)
                yield _name("thread_name", pid, self._wires[pid, action.peer], f"wire {action.peer}")
            thread = self._wires[pid, action.peer]
        args: dict[str, Any] = {"action": format_action(action, self._num_blocks), "item": action.seq}
        if self._placement_number is not None:
            args["placement_number"] = self._placement_number
        if action.micro >= 0:
            args["microbatch"] = action.micro
        yield {
            "ph": "X",
            "name": action_title(action, self._num_blocks),
            "cat": action.op.name,
            "pid": pid,
            "tid": thread,
            "ts": round((span.start_s - self._started_unix_s) * 1e6, 1),
            "dur": round(max(0.0, span.end_s - span.start_s) * 1e6, 1),
            "args": args,
        }


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


MAX_SPANS: Final = 4000
"""Limit of shown actions of a step, enough for 200 nodes with micro-batches of their own. The rest is counted."""
_MAX_ITEMS: Final = 512
_MAY_RUN_AHEAD: Final = (Op.EMBED, Op.FORWARD_FREE, Op.SKIP, Op.KEEP, Op.READ)
MESSAGES: Final = ">"
"""Suffix of a node name: a wait for messages of the node, in transit or not sent yet, after their computation."""


@dataclass(slots=True)
class _Item:
    """One item at one node: start of its first action, end of its last one, and seconds of its actions."""

    start_s: float
    end_s: float
    busy_s: float

    def add(self, start_s: float, end_s: float) -> None:
        """Add an action."""
        self.start_s, self.end_s = min(self.start_s, start_s), max(self.end_s, end_s)
        self.busy_s += end_s - start_s


class _NodeTime:
    """The items of one node that are not counted yet; beyond ``_MAX_ITEMS`` the oldest are merged."""

    def __init__(self) -> None:
        self._items: dict[int, _Item] = {}

    def add(self, seq: int, start_s: float, end_s: float) -> None:
        """Add an action of an item."""
        if seq in self._items:
            self._items[seq].add(start_s, end_s)
            return
        self._items[seq] = _Item(start_s, end_s, end_s - start_s)
        if len(self._items) > _MAX_ITEMS:
            oldest, second = sorted(self._items)[:2]
            old = self._items.pop(oldest)
            self._items[second].add(old.start_s, old.start_s)
            self._items[second].busy_s += old.busy_s
            self._items[second].end_s = max(self._items[second].end_s, old.end_s)

    def shares(self, begin_s: float, end_s: float, end_seq: int) -> list[float]:
        """Return the shares busy, waiting and idle, with the sum 1, of the time from ``begin_s`` to ``end_s``.

        Items from ``end_seq`` on continue after ``end_s``.
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
    """Start and end of a turn's actions, and the actions of its last step."""

    turn: Turn
    last: list[tuple[str, Span]] = field(default_factory=list)
    left_out: int = 0
    start_s: float = math.inf
    end_s: float = -math.inf
    end_before_last_s: float = -math.inf

    def add(self, node: str, span: Span) -> None:
        """Add an action."""
        self.start_s, self.end_s = min(self.start_s, span.start_s), max(self.end_s, span.end_s)
        if span.action.seq < self.turn.end_seq - 1:
            self.end_before_last_s = max(self.end_before_last_s, span.end_s)
        elif len(self.last) < MAX_SPANS:
            self.last.append((node, span))
        else:
            self.left_out += 1


class Activity:
    """Each node's use of time in the granted turns."""

    def __init__(self) -> None:
        self._turns: list[_TurnSpans] = []
        self._nodes: dict[str, _NodeTime] = defaultdict(_NodeTime)
        self._counted_s = -math.inf

    def granted(self, turns: Iterable[Turn]) -> None:
        """Expect the actions of these turns."""
        self._turns += [_TurnSpans(turn) for turn in turns]

    def add(self, node: str, spans: Iterable[Span]) -> None:
        """Add a node's compute actions; those of no granted turn are left out."""
        for span in spans:
            if not span.is_compute:
                continue
            seq = span.action.seq
            for kept in self._turns:
                if kept.turn.first_seq <= seq < kept.turn.end_seq:
                    kept.add(node, span)
                    self._nodes[node].add(seq, span.start_s, max(span.start_s, span.end_s))

    def turn_done(self, turn: Turn, nodes: Sequence[str]) -> dict[str, Any] | None:
        """Close a turn and those before it; return its activity event for the nodes of the present placement.

        Actions of later turns within its time count too. None for a turn that trained nothing or has no actions.
        """
        ended = next((kept for kept in self._turns if kept.turn.index == turn.index), None)
        self._turns = [kept for kept in self._turns if kept.turn.index > turn.index]
        if ended is None or ended.end_s <= self._counted_s:
            return None
        begin_s = self._counted_s if math.isfinite(self._counted_s) else ended.start_s
        step_begins_s = step_begin(ended.last, max(ended.end_before_last_s, self._counted_s))
        self._counted_s = ended.end_s
        shares = {node: self._nodes[node].shares(begin_s, ended.end_s, turn.end_seq) for node in nodes}
        if turn.kind is not StepKind.TRAIN:
            return None
        return {
            "step": turn.end_step,
            "initiator": turn.owner,
            "seconds": round(ended.end_s - begin_s, 6),
            "nodes": shares,
            "spans": last_step(ended.last, step_begins_s),
            "waits": step_waits(ended.last, step_begins_s) if not ended.left_out else {},
            "left_out": ended.left_out,
        }


def step_begin(spans: Sequence[tuple[str, Span]], end_before_s: float) -> float:
    """The begin of a step: the end of the former one, but not after its first action that can't run ahead.

    ``end_before_s`` is the end of the former step's last action; -inf = there is none.
    """
    first_s = min((span.start_s for _, span in spans), default=0.0)
    bound = [span.start_s for _, span in spans if span.action.op not in _MAY_RUN_AHEAD]
    return max(first_s, min([end_before_s, *bound]))


def last_step(spans: Sequence[tuple[str, Span]], begin_s: float) -> list[list[Any]]:
    """Write actions as ``[node, letter, micro-batch, start, stop, begin, duration]``, in ms from ``begin_s``."""
    return [
        [
            node,
            str(span.action.op),
            span.action.micro,
            span.action.start,
            span.action.stop,
            round((span.start_s - begin_s) * 1e3, 3),
            round(max(0.0, span.end_s - span.start_s) * 1e3, 3),
        ]
        for node, span in sorted(spans, key=lambda entry: (entry[1].start_s, entry[0]))
    ]


def step_waits(spans: Sequence[tuple[str, Span]], begin_s: float) -> dict[str, dict[str, float]]:
    """Sum the seconds of a step in which each node waits, by the node that it waits for.

    From an action after a gap its dependencies are followed back through the gap: seconds in which a node computes, or
    is busy with other work, are its own, those of its messages are under ``node>``::

        a   F . . . . H         a waits 4: 1 for a message of its own, 2 for b that computes, 1 for the message of b
        b   . . F F . .

    Waits with unknown causes are left out.
    """
    needed = _needs(spans)
    by_node: dict[str, list[Span]] = defaultdict(list)
    for node, span in sorted(spans, key=lambda entry: entry[1].start_s):
        by_node[node].append(span)
    waits_of: dict[str, dict[str, float]] = {}
    for node, node_spans in by_node.items():
        waits: dict[str, float] = defaultdict(float)
        until_s = begin_s
        for span in node_spans:
            at_s, action = span.start_s, span
            while at_s > until_s and (need := needed.get(id(action))) is not None:
                source, before = need
                if source == node:  # what it needs is here already: something else of this machine kept it
                    break
                earlier = needed.get(id(before))
                ready_s = max(until_s, earlier[1].end_s if earlier else until_s)
                ends_s, ready_s = min(at_s, max(until_s, before.end_s)), min(at_s, ready_s)
                waits[f"{source}{MESSAGES}"] += at_s - ends_s
                others = ((max(each.start_s, ready_s), min(each.end_s, ends_s)) for each in by_node[source])
                busy_s = sum(max(0.0, end_s - start_s) for start_s, end_s in others)
                waits[source] += busy_s
                waits[f"{earlier[0] if earlier else source}{MESSAGES}"] += max(0.0, ends_s - ready_s - busy_s)
                at_s, action = ready_s, before
            until_s = max(until_s, span.end_s)
        waits_of[node] = {of: round(seconds, 6) for of, seconds in sorted(waits.items()) if seconds > 0 and of != node}
    return waits_of


def _needs(spans: Sequence[tuple[str, Span]]) -> dict[int, tuple[str, Span]]:
    """The last dependency of each action, by ``id`` of its span: the block below, the head, or the block above."""
    up: dict[tuple[int, int], tuple[str, Span]] = {}
    down: dict[tuple[int, int], tuple[str, Span]] = {}
    heads: dict[int, tuple[str, Span]] = {}
    for node, span in spans:
        action = span.action
        if action.op is Op.EMBED:
            up[action.micro, 0] = node, span
        elif action.op is Op.HEAD:
            heads[action.micro] = node, span
        elif action.op.is_forward:
            up[action.micro, action.stop] = node, span
        elif action.op is Op.BACKWARD:
            down[action.micro, action.start] = node, span
    top = max((stop for _, stop in up), default=0)
    needs: dict[int, tuple[str, Span]] = {}
    for _, span in spans:
        action = span.action
        need: tuple[str, Span] | None = None
        if action.op is Op.HEAD:
            need = up.get((action.micro, top))
        elif action.op is Op.BACKWARD:
            need = down.get((action.micro, action.stop)) or heads.get(action.micro)
        elif action.op.is_forward and action.op is not Op.EMBED:
            need = up.get((action.micro, action.start))
        if need is not None and need[1] is not span:
            needs[id(span)] = need
    return needs
