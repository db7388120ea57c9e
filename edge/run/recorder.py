"""Record one node's engine: events and commands as JSON lines.

The first line says what is needed to build the engine again, each further line is one event, the time at
which it was handled (monotonic seconds), and the commands it gave::

    {"recording": 1, "node": "node-1", "plan_digest": "6f...", "wait_s": 300.0}
    {"now_s": 12.25, "event": ["HeadArrived", 2, "node-0"], "commands": [["AcceptHead", 2, "node-0"]]}
    {"table": {"subnets": 1, "batches": [...]}, "digest": "ab..."}

The last one is an operation table; the turns after it name it by its digest.

Feeding the events to a fresh engine must give the very commands (``tests.support.replay``); anything else is a hidden
input.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

from ringtune.engine import events as ev
from ringtune.schedule.actions import Op
from ringtune.schedule.operations.table import Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StartPoint, Turn

FORMAT = 1


def header_line(plan: Plan, node: str, wait_s: float, start: StartPoint | None = None) -> str:
    """Write the first line of a recording: format, node, plan, longest wait, and where the run went on, if it did."""
    header: dict[str, Any] = {"recording": FORMAT, "node": node, "plan_digest": plan.digest, "wait_s": wait_s}
    if start is not None:
        header["start"] = {"step": start.step, "holder": start.holder}
        if start.first_turn:  # it moved to another placement, and turns go on
            header["start"] |= {
                "first_turn": start.first_turn,
                "first_seq": start.first_seq,
                "placement_number": start.placement_number,
            }
    return json.dumps(header)


def table_line(operations: Operations) -> str:
    """Write the line of an operation table; it comes before the first turn that carries the table."""
    return json.dumps({"table": operations.to_json(), "digest": operations.digest}, separators=(",", ":"))


def record_line(now_s: float, event: ev.Event, commands: Sequence[ev.Command]) -> str:
    """Write one line of a recording: an event, the time of its handling and the commands that it gave."""
    entry = {"now_s": now_s, "event": to_json(event), "commands": [to_json(command) for command in commands]}
    return json.dumps(entry, separators=(",", ":"))


def to_json(value: ev.Event | ev.Command) -> list[Any]:
    """Convert an event or a command to ``[class name, field, ...]``: ``["HeadArrived", 2, "node-0"]``."""
    return [type(value).__name__, *(_plain(field) for field in value)]


@functools.lru_cache(maxsize=8)
def digest_of(operations: Operations) -> str:
    """The digest of a table, by which turns name it; computed once."""
    return operations.digest


def _plain(field: Any) -> Any:
    if isinstance(field, Turn):
        value = {entry.name: getattr(field, entry.name) for entry in dataclasses.fields(field)}
        return value | {"operations": digest_of(field.operations) if field.operations is not None else ""}
    if isinstance(field, Op):
        return field.letter
    if isinstance(field, tuple):
        return [_plain(part) for part in field]
    return field
