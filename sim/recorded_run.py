"""Seconds of every action of a recorded run, from its ``trace.json``.

The file is an object with ``traceEvents``. ``process_name`` events name the node of a ``pid``; a complete event
(``"ph": "X"``) with an ``action`` among its arguments is one action, as ``ringtune.schedule.actions`` prints it, with
``ts`` and ``dur`` in microseconds. Sent and received messages are left out.

Source: Trace Event Format (Chrome), JSON object form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtune.errors import IntegrityError, InvalidInputError, PlanError
from ringtune.schedule.actions import Action, Op, parse_action
from ringtune.storage.strict import parse_json, read_given

_MICROS = 1e6
_REMEDY = "copy the run's folder again, or train anew"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Compute actions of a run.

    Attributes:
        samples: (node, action, seconds) in the order of their ends.
        wall_s: from the start of the first action to the end of the last one, over all nodes.
        num_steps: items with an update.
    """

    samples: tuple[tuple[str, Action, float], ...]
    wall_s: float
    busy_s: Mapping[str, float]
    num_steps: int


def read_trace(path: Path, num_blocks: int) -> Recording:
    """Read the compute actions of a run of a model with ``num_blocks`` blocks.

    Raises:
        InvalidInputError: there is no such file.
        IntegrityError: it is cut off, or no trace; names line and byte, or event.
        PlanError: it has an unknown action, or none.
    """
    events = _events(path)
    names = {
        _process(event): str(event["args"]["name"])
        for event in events
        if event.get("name") == "process_name" and isinstance(event.get("args"), dict) and "name" in event["args"]
    }
    spans = []
    for index, event in enumerate(events):
        if event.get("ph") == "X" and isinstance(event.get("args"), dict) and "action" in event["args"]:
            spans.append(span_of(event, names, num_blocks, f"{path}, event {index + 1}"))
    spans = [span for span in spans if span[1].op not in (Op.SEND, Op.RECEIVE)]
    if not spans:
        raise PlanError(f"{path} has no compute action; give the trace.json of a run that began to train")
    spans.sort(key=lambda span: span[3])
    busy_s: dict[str, float] = {}
    for node, _, start_s, end_s in spans:
        busy_s[node] = busy_s.get(node, 0.0) + end_s - start_s
    return Recording(
        samples=tuple((node, action, end_s - start_s) for node, action, start_s, end_s in spans),
        wall_s=spans[-1][3] - min(start_s for _, _, start_s, _ in spans),
        busy_s=busy_s,
        num_steps=len({action.seq for _, action, _, _ in spans if action.op is Op.UPDATE}),
    )


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        text = read_given(path)
    except OSError as error:
        raise InvalidInputError(f"can't read the trace {path}: {error.strerror}; give a run's trace.json") from error
    except UnicodeDecodeError as error:
        raise IntegrityError(f"{path} is damaged at byte {error.start}: no text; {_REMEDY}") from error
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, byte {len(text[: error.pos].encode())}"
        is_cut = not text[error.pos :].strip() or text[error.pos :].count("\n") == 0
        what = "is cut off" if is_cut else "is no JSON"
        raise IntegrityError(f"{path} {what} at {at} of {len(text.encode())}: {error.msg}; {_REMEDY}") from error
    except ValueError as error:
        raise IntegrityError(f"{path} is no JSON: {error}; {_REMEDY}") from error
    events = value.get("traceEvents") if isinstance(value, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise IntegrityError(f"{path} is no trace: it has no list 'traceEvents' of events; {_REMEDY}")
    return events


def _process(event: Mapping[str, Any]) -> object:
    """The ``pid`` of an event; None if it is no whole number."""
    process = event.get("pid")
    return process if isinstance(process, int) else None


def _finite(time: object) -> float:
    """A time as float; NaN if it is no number or too large."""
    try:
        return float(time) if isinstance(time, int | float) else math.nan
    except OverflowError:
        return math.nan


def span_of(
    event: Mapping[str, Any], names: Mapping[Any, str], num_blocks: int, where: str
) -> tuple[str, Action, float, float]:
    """Read node, action, start and end of a complete event with an action.

    Raises:
        IntegrityError: its process has no name, or its times are none.
        PlanError: an unknown action.
    """
    node = names.get(_process(event))
    if node is None:
        raise IntegrityError(f"{where}: process {event.get('pid')!r} has no name; {_REMEDY}")
    try:
        action = parse_action(str(event["args"]["action"]), num_blocks)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error
    times = (event.get("ts"), event.get("dur"))
    start, length = (_finite(time) for time in times)
    if not (math.isfinite(start) and math.isfinite(length) and length >= 0):
        raise IntegrityError(f"{where}: 'ts' and 'dur' are {times[0]!r} and {times[1]!r}, no times; {_REMEDY}")
    return node, action, start / _MICROS, (start + length) / _MICROS
