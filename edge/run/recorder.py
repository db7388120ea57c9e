"""The record of one node's engine: events and commands as JSON lines, and the replay that checks them.

The first line says what is needed to build the engine again, each further line is one event, the time at
which it was handled (monotonic seconds), and the commands it gave::

    {"recording": 1, "node": "node-1", "plan_digest": "6f...", "wait_s": 300.0}
    {"now_s": 12.25, "event": ["HeadArrived", 2, "node-0"], "commands": [["AcceptHead", 2, "node-0"]]}

Feeding the events to a fresh engine must give the very commands; anything else is a hidden input.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from ringtune.engine import events as ev
from ringtune.engine.node_engine import NodeEngine
from ringtune.errors import IntegrityError, PlanError, RingTuneError
from ringtune.schedule.actions import Action, Op, TensorKey, op_of
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, Turn

_FORMAT = 1
_EVENTS: dict[str, Any] = {cls.__name__: cls for cls in ev.Event.__args__}


def header_line(plan: Plan, node: str, wait_s: float, start: StartPoint | None = None) -> str:
    """The first line of a recording."""
    header = {"recording": _FORMAT, "node": node, "plan_digest": plan.digest, "wait_s": wait_s}
    return json.dumps(header | ({"start": {"step": start.step, "holder": start.holder}} if start else {}))


def record_line(now_s: float, event: ev.Event, commands: Sequence[ev.Command]) -> str:
    """One handled event with what it gave."""
    entry = {"now_s": now_s, "event": to_json(event), "commands": [to_json(command) for command in commands]}
    return json.dumps(entry, separators=(",", ":"))


def to_json(value: ev.Event | ev.Command) -> list[Any]:
    """An event or a command as ``[class name, field, ...]``."""
    return [type(value).__name__, *(_plain(field) for field in value)]


def _plain(field: Any) -> Any:
    if isinstance(field, Turn):
        return dataclasses.asdict(field)
    if isinstance(field, Op):
        return field.letter
    if isinstance(field, tuple):
        return [_plain(part) for part in field]
    return field


def event_from_json(value: Sequence[Any]) -> ev.Event:
    """Read what ``to_json`` wrote for an event.

    Raises:
        IntegrityError: it is no event.
    """
    try:
        name, *fields = value
        event = _EVENTS[name](*fields)
        if isinstance(event, ev.TurnGranted):
            turn: Any = event.turn
            steps = tuple(turn.get("unfreeze_at", ()))
            return ev.TurnGranted(Turn(**{**turn, "kind": StepKind(turn["kind"]), "unfreeze_at": steps}))
        if isinstance(event, ev.ActionDone):
            recorded: Any = event.action
            values = tuple((str(key), float(number)) for key, number in event.values)
            return ev.ActionDone(Action(op_of(recorded[0]), *recorded[1:]), values)
        if isinstance(event, ev.TensorArrived):
            return ev.TensorArrived(TensorKey(*event.key), event.source)
    except (KeyError, TypeError, ValueError, PlanError) as error:
        raise IntegrityError(f"{value!r} is not a recorded event: {error}; record the run anew") from error
    return event  # type: ignore[no-any-return]


def replay(lines: Iterable[str], plan: Plan, node: str) -> int:
    """Feed a recording to a fresh engine.

    Returns:
        How many events were replayed.

    Raises:
        IntegrityError: the recording is of another plan or node, is not readable, or the engine gave other
            commands; names the line and both answers.
    """
    engine: NodeEngine | None = None
    count = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        entry = _parse(line, number)
        if engine is None:
            engine = _engine_of(entry, plan, node)
            continue
        try:
            event, now_s, expected = event_from_json(entry["event"]), float(entry["now_s"]), entry["commands"]
        except (KeyError, TypeError, ValueError, PlanError) as error:
            raise IntegrityError(f"line {number} of the recording is incomplete: {error}; record anew") from error
        given = json.loads(json.dumps(_handle(engine, event, now_s, number)))
        if given != expected:
            raise IntegrityError(f"line {number}: the engine gave {given} for {entry['event']}, recorded is {expected}")
        count += 1
    return count


def _handle(engine: NodeEngine, event: ev.Event, now_s: float, number: int) -> list[list[Any]]:
    try:
        return [to_json(command) for command in engine.handle(event, now_s)]
    except (RingTuneError, LookupError) as error:
        raise IntegrityError(f"line {number} of the recording does not follow from those before it: {error}") from error


def _parse(line: str, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise IntegrityError(f"line {number} of the recording is not JSON: {error}; record the run anew") from error
    if not isinstance(entry, dict):
        raise IntegrityError(f"line {number} of the recording is not an object; record the run anew")
    return entry


def _engine_of(header: dict[str, Any], plan: Plan, node: str) -> NodeEngine:
    if header.get("recording") != _FORMAT:
        raise IntegrityError(f"a recording begins with its format {_FORMAT}, not with {header}; record the run anew")
    if header.get("node") != node or header.get("plan_digest") != plan.digest:
        said = f"node {header.get('node')}, plan {str(header.get('plan_digest'))[:12]}"
        raise IntegrityError(f"the recording is of {said}, not of node {node}, plan {plan.digest[:12]}; take the other")
    start = StartPoint.of(plan.course, **header["start"]) if "start" in header else None
    return NodeEngine(plan, node, wait_s=float(header["wait_s"]), start=start)
