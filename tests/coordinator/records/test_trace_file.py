"""The trace as Chrome's trace event format, written piece by piece."""

from __future__ import annotations

import json
from typing import Any

from coordinator.records.trace_file import Span, TraceText, is_compute


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
    compute, send = trace(Span("F3.1[2,4)", 1000.5, 1000.75), Span(">h3.1#4@a", 1000.75, 1000.8))
    assert (compute["ts"], compute["dur"]) == (500000.0, 250000.0)
    assert compute["pid"] == send["pid"] == 2
    assert compute["tid"] != send["tid"]
    assert compute["name"] == "F [2,4)"
    assert compute["cat"] == "forward"
    assert compute["args"] == {"action": "F3.1[2,4)", "item": 3, "microbatch": 1}


def test_trace_names_every_kind_of_action() -> None:
    """Equal work has an equal name, so that it gets one colour."""
    words = ["E0.0", "f0.0[0,1)", "F0.0[3,4)", "H0.0", "B0.0[3,4)", "U0[3,4)", "U0[head]", ">t1@a", "<g0.0#4@a"]
    names = [event["name"] for event in trace(*(Span(word, 1001.0, 1002.0) for word in words))]
    assert names == ["E", "f [0,1)", "F [3,4)", "H", "B [3,4)", "U [3,4)", "U head", ">t a", "<g a"]


def test_trace_keeps_words_that_it_does_not_know() -> None:
    """An action of a newer version is shown as it is."""
    (event,) = trace(Span("Q1", 1001.0, 1000.0))
    assert (event["name"], event["cat"], event["dur"]) == ("Q1", "other", 0.0)


def test_trace_counts_only_compute_as_busy() -> None:
    """Waiting for the wire keeps no processor busy."""
    assert is_compute("f0.0[0,1)")
    assert not is_compute(">h0.0#1@a")
    assert not is_compute("<t1@a")
