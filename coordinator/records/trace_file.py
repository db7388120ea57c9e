"""Write trace.json: every action of every node with its start and end, in the format that Perfetto opens.

A node is a process; its compute actions are one thread, and what it sends to another node is a thread for each of
those. Times are microseconds since the run started. The file is written as it grows, so that a long run needs no
memory for it; what was written before a failure is completed into a valid file.

Source: Trace Event Format (Chrome), JSON object form with complete events ("ph": "X").
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from ringtune.engine.spans import Span
from ringtune.rounds.events.move_events import LogMove
from ringtune.schedule.tables.words import action_title, format_action

_COMPUTE_THREAD, _FIRST_WIRE_THREAD = 1, 2


class TraceText:
    """Writes a trace piece by piece.

    Args:
        nodes: in the order in which they are shown.
        num_blocks: blocks of the model.
        started_unix_s: time zero.
        placement_number: of the placement that holds, which actions then say; None = the run stays on one.
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
        """Write the first piece: the names of processes and threads."""
        events = [event for node in self._pids for event in self._names(node)]
        head = {"displayTimeUnit": "ms", "otherData": {"started_unix_s": self._started_unix_s}}
        return json.dumps(head)[:-1] + ', "traceEvents": [\n' + ",\n".join(json.dumps(event) for event in events)

    def joined(self, node: str) -> str:
        """Write the piece for one more node: the names of its process and thread."""
        self._pids[node] = len(self._pids) + 1
        return "".join(",\n" + json.dumps(event) for event in self._names(node))

    def _names(self, node: str) -> list[dict[str, Any]]:
        pid = self._pids[node]
        order = {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        return [_name("process_name", pid, 0, node), order, _name("thread_name", pid, _COMPUTE_THREAD, "compute")]

    def spans(self, node: str, spans: Iterable[Span]) -> str:
        """Write the piece for some spans of one node, in unix seconds."""
        events = (event for span in spans for event in self._events(self._pids[node], span))
        return "".join(",\n" + json.dumps(event) for event in events)

    def move(self, nodes: Iterable[str], command: LogMove, at_unix_s: float) -> str:
        """Write the piece for a move that is over at ``at_unix_s``; actions are of its placement from here on."""
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
        """Yield the event of a span, after the name of its thread if that is new."""
        peer = span.action.peer
        if span.is_compute:
            yield self._event(pid, _COMPUTE_THREAD, span)
            return
        if (pid, peer) not in self._wires:
            thread = self._wires[pid, peer] = _FIRST_WIRE_THREAD + len(self._wires)
            yield _name("thread_name", pid, thread, f"wire {peer}")
        yield self._event(pid, self._wires[pid, peer], span)

    def _event(self, pid: int, thread: int, span: Span) -> dict[str, Any]:
        action = span.action
        args: dict[str, Any] = {"action": format_action(action, self._num_blocks), "item": action.seq}
        if self._placement_number is not None:
            args["placement_number"] = self._placement_number
        if action.micro >= 0:
            args["microbatch"] = action.micro
        return {
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
