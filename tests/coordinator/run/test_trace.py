"""The trace of a run: the format of its events, shares of time, and the actions of the last step."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from coordinator.run.recorder import RunRecorder
from coordinator.run.trace import MAX_SPANS, Activity, TraceText, step_begin, step_waits
from ringtune.costs.profile import Profile
from ringtune.engine.events import Span
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Action, Op, parse_action
from ringtune.schedule.turns import StepKind, Turn
from ringtune.v1 import control_pb2
from tests.support.fake_agents import facts, job
from tests.support.plans import make_plan
from tests.support.profiles import profile_of


def span(word: str, start_s: float = 1001.0, end_s: float = 1002.0) -> Span:
    """A printed action with its times."""
    return Span(parse_action(word, 4), start_s, end_s)


def trace(*spans: Span) -> list[dict[str, Any]]:
    """The complete events of a trace in which node b did these."""
    text = TraceText(["a", "b"], num_blocks=4, started_unix_s=1000.0)
    whole = text.begin() + text.spans("b", spans[:1]) + text.spans("b", spans[1:]) + text.end()
    return [event for event in json.loads(whole)["traceEvents"] if event["ph"] == "X"]


def test_trace_is_valid_even_if_nothing_happened() -> None:
    """A run that fails at once leaves a trace that opens."""
    text = TraceText(["a"], num_blocks=4, started_unix_s=0.0)
    assert json.loads(text.begin() + text.end())["displayTimeUnit"] == "ms"


def test_trace_events_have_microseconds_and_places() -> None:
    """Times are microseconds since the start; a node is a process, sends are a thread of their own."""
    compute, send = trace(span("F3.1[2,4)", 1000.5, 1000.75), span(">h3.1#4@a", 1000.75, 1000.8))
    assert (compute["ts"], compute["dur"]) == (500000.0, 250000.0)
    assert compute["pid"] == send["pid"] == 2
    assert compute["tid"] != send["tid"]
    assert (compute["name"], send["name"]) == ("forward with graph [2,4)", "send hidden state to a")
    assert compute["cat"] == "forward with graph"
    assert compute["args"] == {"action": "F3.1[2,4)", "item": 3, "microbatch": 1}


def test_trace_names_every_kind_of_action() -> None:
    """Equal work has an equal name, so that it gets one colour."""
    words = ["E0.0", "f0.0[0,1)", "F0.0[3,4)", "H0.0", "B0.0[3,4)", "U0[3,4)", "U0[head]", ">t1@a", "<g0.0#4@a"]
    names = [event["name"] for event in trace(*map(span, words))]
    assert names == [
        "embedding",
        "forward without graph [0,1)",
        "forward with graph [3,4)",
        "head",
        "backward [3,4)",
        "update [3,4)",
        "update head",
        "send head to a",
        "receive gradient from a",
    ]


def test_trace_has_a_named_thread_for_each_node_that_is_sent_to() -> None:
    """Sends to two nodes may overlap, which one thread can't show; each name stands once, before its first event."""
    text = TraceText(["a", "b", "c"], num_blocks=4, started_unix_s=1000.0)
    words = [">h0.0#2@a", ">g0.0#4@c", ">h0.1#2@a"]
    events = json.loads(text.begin() + text.spans("b", map(span, words)) + text.end())["traceEvents"]
    named = [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 2]
    assert named == ["compute", "wire a", "wire c"]
    sends = [event["tid"] for event in events if event["ph"] == "X"]
    assert sends[0] == sends[2] != sends[1]


def test_trace_has_no_negative_duration() -> None:
    """A node's clock may be set back while an action runs."""
    (event,) = trace(span("K1", 1001.0, 1000.0))
    assert (event["name"], event["cat"], event["dur"]) == ("save", "save", 0.0)


def test_books_leave_out_what_is_no_action(caplog: pytest.LogCaptureFixture) -> None:
    """A word that nobody knows ends no run: node and word are logged, the spans beside it count."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"])
    written: list[Any] = []
    books = RunRecorder(plan, job(), profile_of(plan), written.append)
    report = control_pb2.ReportRequest(run_id="r", node="b", number=1)
    for action in ("Q1", "f0.0[2,3)"):
        report.spans.add(action=action, start_unix_s=1000.0, end_unix_s=1001.0)
    books.add_report(report)
    assert "node b reports an invalid action, which is left out: 'Q1' is not an action" in caplog.text
    assert books.ledger.nodes["b"].busy_s == 1.0


def test_trace_counts_only_compute_as_busy() -> None:
    """Waiting for the wire keeps no processor busy."""
    assert span("f0.0[0,1)").is_compute
    assert not span(">h0.0#1@a").is_compute
    assert not span("<t1@a").is_compute


def turn(index: int, *, steps: int = 2, kind: StepKind = StepKind.TRAIN) -> Turn:
    """A turn of some steps, behind others of as many."""
    first = index * steps
    return Turn(
        index=index, kind=kind, owner="a", round=0, first_seq=first, num_items=steps, first_step=first, first_batch=0
    )


def turn_span(seq: int, start_s: float, end_s: float, op: Op = Op.BACKWARD) -> Span:
    """An action of an item."""
    return Span(Action(op, seq, 0, 0, 2), start_s, end_s)


def test_activity_shares_add_up() -> None:
    """The docstring's picture: 3 s of work, 2 s of waiting inside an item, the rest idle."""
    kept = Activity()
    kept.granted([turn(0)])
    kept.add("a", [turn_span(0, 0, 1), turn_span(0, 1, 2), turn_span(0, 4, 5), turn_span(1, 8, 10)])
    kept.add("b", [turn_span(1, 0, 10)])
    found = kept.turn_done(turn(0), ["a", "b", "c"])
    assert found is not None
    assert found["nodes"] == {"a": [0.5, 0.2, 0.3], "b": [1.0, 0.0, 0.0], "c": [0.0, 0.0, 1.0]}
    assert (found["step"], found["seconds"]) == (2, 10.0)


def test_activity_counts_what_a_later_turn_did_meanwhile() -> None:
    """Work for the next turn that is done early is busy time of this one, and is not counted again."""
    kept = Activity()
    kept.granted([turn(0), turn(1)])
    kept.add("a", [turn_span(0, 0, 4), turn_span(2, 4, 6), turn_span(1, 9, 10)])
    assert kept.turn_done(turn(0), ["a"])["nodes"] == {"a": [0.7, 0.3, 0.0]}  # type: ignore[index]
    kept.add("a", [turn_span(2, 10, 12), turn_span(3, 18, 20)])
    assert kept.turn_done(turn(1), ["a"])["nodes"] == {"a": [0.4, 0.0, 0.6]}  # type: ignore[index]


def test_activity_shows_the_last_step_of_a_turn() -> None:
    """Its actions in the order of their starts, in milliseconds from the first one."""
    kept = Activity()
    kept.granted([turn(0)])
    kept.add("b", [turn_span(1, 5.5, 6.0)])
    kept.add("a", [turn_span(0, 0, 1), turn_span(1, 5.0, 5.25, Op.FORWARD)])
    found = kept.turn_done(turn(0), ["a", "b"])
    assert found is not None
    assert found["spans"] == [["a", "F", 0, 0, 2, 0.0, 250.0], ["b", "B", 0, 0, 2, 500.0, 500.0]]


def test_last_step_begins_where_the_one_before_ends() -> None:
    """An embedding that ran ahead lies before it; what needs the update of the step before does not, however early."""
    for ends_s, forward_s, begin_s in ((5.0, 5.5, 5.0), (5.0, 4.5, 4.5), (0.5, 5.5, 1.0), (-math.inf, 5.5, 1.0)):
        spans = [("a", turn_span(1, 1.0, 2.0, Op.EMBED)), ("a", turn_span(1, forward_s, 6.0, Op.FORWARD))]
        assert step_begin(spans, ends_s) == begin_s
    kept = Activity()
    kept.granted([turn(0)])
    kept.add("a", [turn_span(0, 0, 5), turn_span(1, 1.0, 1.5, Op.EMBED), turn_span(1, 5.5, 6.0, Op.FORWARD)])
    found = kept.turn_done(turn(0), ["a"])
    assert found is not None
    assert [(letter, at) for _, letter, _, _, _, at, _ in found["spans"]] == [("E", -4000.0), ("F", 500.0)]


def test_step_waits_are_for_whoever_works_on_what_is_needed() -> None:
    """A step of two nodes; every second of a gap is somebody's, and a node that works all the time waits for nobody.

    ::

        seconds   0  1  2  3  4  5  6  7  8  9
        a         E  F  F  .  .  H  .  .  .  B
        b         .  .  .  .  F  .  .  B  B  .
    """
    step = [
        ("a", Span(Action(Op.EMBED, 0, 0, -1, 0), 0, 1)),
        ("a", Span(Action(Op.FORWARD, 0, 0, 0, 2), 1, 3)),
        ("b", Span(Action(Op.FORWARD, 0, 0, 2, 4), 4, 5)),
        ("a", Span(Action(Op.HEAD, 0, 0, 4, 5), 5, 6)),
        ("b", Span(Action(Op.BACKWARD, 0, 0, 2, 4), 7, 9)),
        ("a", Span(Action(Op.BACKWARD, 0, 0, 0, 2), 9, 10)),
    ]
    assert step_waits(step, 0.0) == {"a": {"a>": 2.0, "b": 3.0}, "b": {"a": 4.0, "a>": 2.0}}
    assert step_waits([one for one in step if one[0] == "a"], 0.0) == {"a": {}}


def test_activity_leaves_messages_and_strange_items_out() -> None:
    """What travels keeps no processor busy; an item of no granted turn is nobody's."""
    kept = Activity()
    kept.granted([turn(0)])
    kept.add("a", [Span(Action(Op.SEND, 0, 0, 2, 0, "b", "h"), 0, 9), turn_span(77, 0, 9)])
    assert kept.turn_done(turn(0), ["a"]) is None


def test_activity_is_bounded() -> None:
    """Of a step with very many actions some are left out, and counted; of long turns items are put together."""
    kept = Activity()
    kept.granted([turn(0, steps=2000)])
    kept.add("a", (turn_span(seq, seq, seq + 0.5) for seq in range(1999)))
    kept.add("a", (turn_span(1999, 1999 + at / 10_000, 1999 + (at + 0.5) / 10_000) for at in range(MAX_SPANS + 5)))
    found = kept.turn_done(turn(0, steps=2000), ["a"])
    assert found is not None
    assert (len(found["spans"]), found["left_out"]) == (MAX_SPANS, 5)
    assert found["nodes"]["a"][0] == pytest.approx(0.5, abs=0.01)


def test_activity_of_an_evaluation_is_not_shown() -> None:
    """It takes its time; the next train turn begins after it."""
    kept = Activity()
    kept.granted([turn(0, kind=StepKind.EVALUATE), turn(1)])
    kept.add("a", [turn_span(0, 0, 5), turn_span(2, 5, 6), turn_span(3, 7, 10)])
    assert kept.turn_done(turn(0, kind=StepKind.EVALUATE), ["a"]) is None
    assert kept.turn_done(turn(1), ["a"])["seconds"] == 5.0  # type: ignore[index]


def test_books_tell_an_onlooker_and_nobody_else() -> None:
    """What nodes did is neither sent to the submitter nor kept; without an onlooker it is not even counted."""
    sent: list[control_pb2.RunEvent] = []
    seen: list[control_pb2.RunEvent] = []
    books = RunRecorder(
        make_plan([("a", 0, 2), ("b", 2, 4)], ["a"]), job(), Profile(nodes=(facts("a"), facts("b"))), sent.append
    )
    books.onlooker = seen.append
    books.granted([turn(0)])
    report = control_pb2.ReportRequest(node="a")
    report.spans.add(action="F1.0[0,2)", start_unix_s=10.0, end_unix_s=11.0)
    books.add_report(report)
    books.log(rd.LogTurn(turn(0)))
    assert [event.WhichOneof("event") for event in seen] == ["activity_json"]
    assert "activity_json" not in {event.WhichOneof("event") for event in sent}
