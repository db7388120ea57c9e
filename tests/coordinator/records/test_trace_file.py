"""The trace as Chrome's trace event format, written piece by piece."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.records.books import RunBooks
from coordinator.records.trace_file import TraceText
from ringtune.engine.spans import Span
from ringtune.schedule.tables.words import parse_action
from ringtune.v1 import control_pb2
from tests.support.fake_agents import job
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
    books = RunBooks(plan, job(), profile_of(plan), written.append)
    report = control_pb2.ReportRequest(run_id="r", node="b", number=1)
    for action in ("Q1", "f0.0[2,3)"):
        report.spans.add(action=action, start_unix_s=1000.0, end_unix_s=1001.0)
    books.add_report(report)
    assert "node b reports what is no action, it is left out: 'Q1' is not an action" in caplog.text
    assert books.ledger.nodes["b"].busy_s == 1.0


def test_trace_counts_only_compute_as_busy() -> None:
    """Waiting for the wire keeps no processor busy."""
    assert span("f0.0[0,1)").is_compute
    assert not span(">h0.0#1@a").is_compute
    assert not span("<t1@a").is_compute
