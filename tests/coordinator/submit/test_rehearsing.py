"""The sink that ends a rehearsal."""

from __future__ import annotations

import json

from coordinator.submit.rehearsing import Rehearsing
from ringtune.costs.rehearsal import REHEARSAL_S
from ringtune.v1 import control_pb2


def step(kind: str = "train") -> control_pb2.RunEvent:
    """An item that is through."""
    return control_pb2.RunEvent(step_json=json.dumps({"kind": kind, "step": 1}))


def test_rehearsal_ends_once_after_its_steps() -> None:
    """Training steps count, other items do not; the end is asked for once, by the run's id."""
    ended: list[str] = []
    sink = Rehearsing(2, ended.append, clock=lambda: 0.0)
    for event in (
        control_pb2.RunEvent(run_id="r-1"),
        control_pb2.RunEvent(state="training"),
        step(),
        step("evaluation"),
    ):
        sink(event)
    assert (ended, sink.is_enough) == ([], False)
    sink(step())
    sink(step())
    assert (ended, sink.is_enough) == (["r-1"], True)


def test_rehearsal_ends_when_its_time_is_over() -> None:
    """Steps that take long are not waited for; the time runs from the first of them."""
    now_s, ended = [0.0], list[str]()
    sink = Rehearsing(100, ended.append, clock=lambda: now_s[0])
    sink(control_pb2.RunEvent(run_id="r-1"))
    now_s[0] = 1000.0
    sink(control_pb2.RunEvent(state="training"))
    now_s[0] += REHEARSAL_S
    sink(step())
    assert not ended
    now_s[0] += 0.1
    sink(step())
    assert ended == ["r-1"]
