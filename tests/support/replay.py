"""Feed a node's recording to a fresh engine: the same events have to give the same commands."""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge.runtime.reporter import FORMAT, to_json
from ringtune.engine import events as ev
from ringtune.engine.node_engine import NodeEngine
from ringtune.errors import IntegrityError, PlanError, RingTuneError
from ringtune.schedule.actions import Action, TensorKey, op_of
from ringtune.schedule.operation_tables import Operations
from ringtune.schedule.placement import Passage
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, Turn
from ringtune.storage.strict import with_renamed_key

_NO_TABLES: Mapping[str, Operations] = types.MappingProxyType({})
_EVENTS: dict[str, Any] = {cls.__name__: cls for cls in ev.Event.__args__}


def event_from_json(value: Sequence[Any], tables: Mapping[str, Operations] = _NO_TABLES) -> ev.Event:
    """Read what ``to_json`` wrote for an event; ``tables`` are those that a turn may name."""
    try:
        name, *fields = value
        event = _EVENTS[name](*fields)
        if isinstance(event, ev.TurnGranted):
            turn: Any = event.turn
            steps = tuple(turn.get("unfreeze_at", ()))
            table = tables[turn["operations"]] if turn.get("operations") else None
            changes = {"kind": StepKind(turn["kind"]), "unfreeze_at": steps, "operations": table}
            changes["passages"] = tuple(Passage(*passage) for passage in turn.get("passages", ()))
            return ev.TurnGranted(Turn(**{**turn, **changes}))
        if isinstance(event, ev.ActionDone):
            recorded: Any = event.action
            values = tuple((str(key), float(number)) for key, number in event.values)
            return ev.ActionDone(Action(op_of(recorded[0]), *recorded[1:]), values)
        if isinstance(event, ev.TensorArrived | ev.ParcelArrived):
            return type(event)(TensorKey(*event.key), event.source)
    except (KeyError, TypeError, ValueError, PlanError) as error:
        raise IntegrityError(f"{value!r} is not a recorded event: {error}; record the run anew") from error
    return event  # type: ignore[no-any-return]


def replay(lines: Iterable[str], plan: Plan, node: str) -> int:
    """Feed a recording to a fresh engine."""
    engine: NodeEngine | None = None
    tables: dict[str, Operations] = {}
    count = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        entry = _parse(line, number)
        if engine is None or "recording" in entry:  # a run that moves has an engine for each placement
            engine = _engine_of(entry, plan, node)
            continue
        if "table" in entry:
            tables[entry["digest"]] = Operations.from_json(entry["table"])
            continue
        try:
            event, now_s, expected = event_from_json(entry["event"], tables), float(entry["now_s"]), entry["commands"]
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
    if header.get("recording") != FORMAT:
        raise IntegrityError(f"a recording begins with its format {FORMAT}, not with {header}; record the run anew")
    parts = {part.digest: part for part in plan.parts}
    if header.get("node") != node or header.get("plan_digest") not in parts:
        said = f"node {header.get('node')}, plan {str(header.get('plan_digest'))[:12]}"
        raise IntegrityError(f"the recording is of {said}, not of node {node}, plan {plan.digest[:12]}; take the other")
    start = StartPoint(**with_renamed_key(header["start"], "epoch", "placement_number")) if "start" in header else None
    return NodeEngine(parts[header["plan_digest"]], node, wait_s=float(header["wait_s"]), start=start)
