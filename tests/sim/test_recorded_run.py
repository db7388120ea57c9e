"""Recorded runs: a trace is read back as it was written, and a damaged one says where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.run.trace import TraceText
from ringtune.costs.profile import WHOLE_WORKS, Work
from ringtune.engine.events import Span
from ringtune.errors import IntegrityError, InvalidInputError, PlanError, RingTuneError
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.units import EMBEDDING
from sim.prediction import predict
from sim.recorded_run import Recording, read_trace
from tests.support.cases import cases
from tests.support.plans import make_plan
from tests.support.profiles import all_pairs, profile_of

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=4, eval_rows=5)
PROFILE = profile_of(PLAN, links=all_pairs("ab", 1e6, 0.01))


def trace_text(spans: list[tuple[str, Action, float, float]], started_unix_s: float = 0.0) -> str:
    """A trace as a coordinator writes it."""
    text = TraceText(PLAN.nodes, num_blocks=PLAN.course.num_blocks, started_unix_s=started_unix_s)
    body = "".join(
        text.spans(node, [Span(action, started_unix_s + start, started_unix_s + end)])
        for node, action, start, end in spans
    )
    return text.begin() + body + text.end()


def read(path: Path, text: str) -> Recording:
    """What stands in a trace of that text."""
    (path / "trace.json").write_text(text)
    return read_trace(path / "trace.json", PLAN.course.num_blocks)


def test_read_trace_gives_back_what_was_written(tmp_path: Path) -> None:
    """Every compute action with its node and seconds; messages are left out."""
    spans = [
        ("a", Action(Op.EMBED, 0, 0, EMBEDDING, EMBEDDING + 1), 1.0, 1.5),
        ("a", Action(Op.SEND, 0, 0, 2, 0, "b", "h"), 1.5, 9.0),
        ("b", Action(Op.BACKWARD, 0, 1, 2, 4), 2.0, 4.0),
        ("b", Action(Op.UPDATE, 0, -1, PLAN.course.head, PLAN.course.head + 1), 4.0, 4.25),
    ]
    found = read(tmp_path, trace_text(spans))
    assert found == Recording(
        samples=(("a", spans[0][1], 0.5), ("b", spans[2][1], 2.0), ("b", spans[3][1], 0.25)),
        wall_s=3.25,
        busy_s={"a": 0.5, "b": 2.25},
        num_steps=1,
    )


def test_read_trace_replays_to_the_same_wall_time(tmp_path: Path) -> None:
    """Virtual run, trace, replay: as exact as a trace's tenth of a microsecond."""
    first = predict(PLAN, PROFILE, keep_spans=True)
    found = read(tmp_path, trace_text(list(first.spans), started_unix_s=1.7e9))
    around = dict.fromkeys((Work.ENCODE, Work.DECODE, Work.HAND_OVER), 0.0)
    times = {**dict.fromkeys(WHOLE_WORKS, 0.001), **around}
    other = profile_of(PLAN, times=times, links=all_pairs("ab", 1e6, 0.01))
    again = predict(PLAN, other, samples=found.samples, same_run=True)
    assert len(found.samples) == first.num_actions
    assert found.wall_s == pytest.approx(first.wall_s, abs=1e-5)
    assert again.wall_s == pytest.approx(first.wall_s, abs=1e-4)
    assert predict(PLAN, other).wall_s < first.wall_s / 10


WHOLE = trace_text(list(predict(PLAN, PROFILE, keep_spans=True).spans))


CUTS = [0, WHOLE.index("\n", len(WHOLE) // 2), len(WHOLE) - 2, *(37 * at * len(WHOLE) // 450 for at in range(1, 12))]


@cases("at", CUTS)
def test_read_trace_says_where_it_is_cut_off(at: int, tmp_path: Path) -> None:
    """Line and byte of the end, and the file; also between two lines."""
    with pytest.raises(IntegrityError) as caught:
        read(tmp_path, WHOLE[:at])
    message = str(caught.value)
    assert "trace.json is cut off at line " in message
    assert f"of {at}:" in message
    line = int(message.split("line ")[1].split(",")[0])
    assert line in (WHOLE[:at].count("\n") + 1, WHOLE[:at].count("\n"))


def test_read_trace_damaged_inside_says_at_which_byte(tmp_path: Path) -> None:
    """A byte that makes no sense in the middle is no cut."""
    at = WHOLE.index('"ph"', len(WHOLE) // 2)
    with pytest.raises(IntegrityError, match=rf"is no JSON at line \d+, byte {at + 4} of"):
        read(tmp_path, WHOLE[: at + 4] + "#" + WHOLE[at + 5 :])


def test_read_trace_that_is_no_text_says_at_which_byte(tmp_path: Path) -> None:
    """A binary file given by mistake."""
    (tmp_path / "trace.json").write_bytes(b"{}\xff\xfe")
    with pytest.raises(IntegrityError, match="is damaged at byte 2"):
        read_trace(tmp_path / "trace.json", 4)


def test_read_trace_needs_a_file(tmp_path: Path) -> None:
    """A path that is not there."""
    with pytest.raises(InvalidInputError, match=r"can't read the trace .*nothing\.json"):
        read_trace(tmp_path / "nothing.json", 4)


def event(**changes: object) -> dict[str, Any]:
    """A complete event of node a."""
    return {"ph": "X", "pid": 1, "tid": 1, "ts": 0.0, "dur": 5.0, "args": {"action": "E0.0"}, **changes}


NAME = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "a"}}


@cases(
    ("value", "error", "message"),
    [
        ([], IntegrityError, "it has no list 'traceEvents'"),
        ({"traceEvents": 3}, IntegrityError, "it has no list 'traceEvents'"),
        ({"traceEvents": [3]}, IntegrityError, "it has no list 'traceEvents'"),
        ({"traceEvents": [NAME]}, PlanError, "has no compute action"),
        ({"traceEvents": [NAME, event(args={"action": ">h0.0#1@b"})]}, PlanError, "has no compute action"),
        ({"traceEvents": [event()]}, IntegrityError, "event 1: process 1 has no name"),
        ({"traceEvents": [NAME, event(dur=-1)]}, IntegrityError, "event 2: 'ts' and 'dur' are 0.0 and -1"),
        ({"traceEvents": [NAME, event(dur="5")]}, IntegrityError, "event 2: 'ts' and 'dur'"),
        ({"traceEvents": [NAME, event(ts=float("nan"))]}, IntegrityError, "'ts' and 'dur' are nan and 5.0"),
        ({"traceEvents": [NAME, event(args={"action": "Q7"})]}, PlanError, "event 2: 'Q7' is not an action"),
    ],
)
def test_read_trace_refuses_what_is_no_trace(
    value: object, error: type[RingTuneError], message: str, tmp_path: Path
) -> None:
    """With the event that is wrong."""
    with pytest.raises(error) as caught:
        read(tmp_path, json.dumps(value))
    assert message in str(caught.value)


@cases(
    "text",
    [
        '{"traceEvents": ' + "[" * 100_000,
        '{"traceEvents": ' + "1" * 5000 + "}",
        '{"traceEvents": [{"name": "process_name", "pid": [], "args": {"name": "a"}}]}',
        '{"traceEvents": [{"ph": "X", "pid": {}, "args": {"action": "f12.0[0,1)"}}]}',
        json.dumps({"traceEvents": [NAME, event(ts=10**400)]}),
    ],
)
def test_read_trace_of_hostile_values_is_refused(text: str, tmp_path: Path) -> None:
    """Found by fuzzing: each of them was an error of Python's."""
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(RingTuneError):
        read_trace(tmp_path / "trace.json", 4)


def test_read_trace_leaves_other_events_out(tmp_path: Path) -> None:
    """Counters and events of other tools are none of ours."""
    events = [NAME, event(), event(args={}), {"ph": "C", "pid": 1}, {"ph": "X"}]
    assert len(read(tmp_path, json.dumps({"traceEvents": events})).samples) == 1
