"""What is known of a run after its events, and whose books may be dropped."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from coordinator.server.run_record import RunRecord, chain_of, in_order, to_drop
from ringtune.errors import IntegrityError
from ringtune.v1 import control_pb2

DAY_S = 86_400.0
NOW_S = 100 * DAY_S
ONE, TWO, THREE = (f"r20260102-00000{number}-00000000" for number in (1, 2, 3))


def record(run_id: str = ONE, **changes: Any) -> RunRecord:
    """A run that has just begun."""
    values = {
        "started_unix_s": 1.0,
        "first_run": run_id,
        "model": "tiny",
        "method": "ringada",
        "submitted_by": "ann@desk",
        **changes,
    }
    return RunRecord(run_id=run_id, **values)


def ended(run_id: str = ONE, *, days_ago: float = 0.0, **changes: Any) -> RunRecord:
    """A run that was fetched."""
    values = {"state": "done", "num_steps": 8, "is_fetched": True, "ended_unix_s": NOW_S - days_ago * DAY_S, **changes}
    return record(run_id, **values)


def event(kind: str, value: object) -> control_pb2.RunEvent:
    """An event; a table becomes JSON."""
    return control_pb2.RunEvent(**{kind: json.dumps(value) if isinstance(value, dict) else value})  # type: ignore[arg-type]


def test_record_follows_the_events_of_a_run() -> None:
    """Steps of the plan, steps done, the newest checkpoint, and the end with its time."""
    found = record()
    for entry in (
        event("plan_json", {"course": {"num_steps": 8}}),
        event("step_json", {"kind": "train", "step": 1}),
        event("step_json", {"kind": "train", "step": 4}),
        event("step_json", {"kind": "evaluate", "step": 7}),
        event("checkpoint_json", {"step": 4}),
    ):
        found = found.after(entry, 5.0)
    assert (found.num_steps, found.steps_done, found.saved_step, found.state) == (8, 4, 4, "running")
    assert not found.is_resumable
    done = found.after(event("done", True), 7.0)
    assert (done.state, done.ended_unix_s, done.is_resumable) == ("done", 7.0, False)


@pytest.mark.parametrize(("error", "state"), [("InterruptedRunError", "stopped"), ("PeerLostError", "failed")])
def test_record_tells_a_run_that_was_stopped_from_one_that_failed(error: str, state: str) -> None:
    """Both can go on if there is a checkpoint, and only then."""
    failure = control_pb2.RunEvent(failure=control_pb2.RunFailure(error=error, message="why"))
    found = record().after(failure, 9.0)
    assert (found.state, found.message, found.ended_unix_s, found.is_resumable) == (state, "why", 9.0, False)
    assert record(saved_step=4).after(failure, 9.0).is_resumable


def test_record_of_a_run_that_goes_on_begins_at_its_checkpoint() -> None:
    """What it goes on from is done and saved already."""
    found = record().after(event("resumed_json", {"step": 6, "passed_over": []}), 2.0)
    assert (found.steps_done, found.saved_step) == (6, 6)


def test_record_comes_back_from_its_text_and_nothing_else_does() -> None:
    """Damage, a state that there is not, and an id that leaves the folder are refused."""
    whole = ended(message="x")
    assert RunRecord.parse(whole.to_text()) == whole
    for text in ("{", "[]", whole.to_text().replace("done", "asleep"), whole.to_text().replace(ONE, "../../x")):
        with pytest.raises(IntegrityError):
            RunRecord.parse(text)


def test_books_that_nobody_fetched_are_never_dropped() -> None:
    """Neither by age nor by size; those of a run that ended before its plan hold nothing to fetch."""
    old = ended(ONE, days_ago=90, is_fetched=False, size_bytes=1000)
    nothing = ended(TWO, days_ago=90, is_fetched=False, num_steps=0)
    running = record(THREE, num_steps=8)
    assert to_drop([old, nothing, running], now_unix_s=NOW_S, keep_days=7, keep_bytes=0) == (TWO,)


def test_books_that_nobody_fetches_go_after_their_own_time_if_one_is_set() -> None:
    """Example: with 60 days the run of 90 days ago goes; size alone drops neither, and one that goes on stays."""
    old = ended(ONE, days_ago=90, is_fetched=False, size_bytes=1000)
    young = ended(TWO, days_ago=30, is_fetched=False, size_bytes=1000)
    running = record(THREE, num_steps=8)
    runs = [old, young, running]
    assert to_drop(runs, now_unix_s=NOW_S, keep_days=7, keep_bytes=0, keep_unfetched_days=60) == (ONE,)
    assert to_drop(runs, now_unix_s=NOW_S, keep_days=7, keep_bytes=0, keep_unfetched_days=60, busy={ONE}) == ()


def test_books_go_by_age_then_by_size_oldest_first() -> None:
    """Example: 8 days with 7 kept; and of two young ones the older one, until what is left fits."""
    runs = [ended(ONE, days_ago=8, size_bytes=10), ended(TWO, days_ago=2, size_bytes=10), ended(THREE, size_bytes=10)]
    assert to_drop(runs, now_unix_s=NOW_S, keep_days=7, keep_bytes=100) == (ONE,)
    assert to_drop(runs, now_unix_s=NOW_S, keep_days=7, keep_bytes=15) == (ONE, TWO)
    assert to_drop(runs, now_unix_s=NOW_S, keep_days=90, keep_bytes=30) == ()
    assert to_drop(runs, now_unix_s=NOW_S, keep_days=7, keep_bytes=100, busy={ONE}) == ()


def test_books_of_a_run_stay_with_those_of_the_run_that_goes_on_with_it() -> None:
    """Its folder is written from both."""
    first = ended(ONE, days_ago=30)
    second = ended(TWO, days_ago=1, first_run=ONE)
    assert to_drop([first, second], now_unix_s=NOW_S, keep_days=7, keep_bytes=100) == ()
    old = replace(second, ended_unix_s=NOW_S - 8 * DAY_S)
    assert to_drop([first, old], now_unix_s=NOW_S, keep_days=7, keep_bytes=100) == (ONE, TWO)
    records = {entry.run_id: entry for entry in (first, second, ended(THREE))}
    assert [entry.run_id for entry in chain_of(records, TWO)] == [ONE, TWO]
    assert [entry.run_id for entry in chain_of(records, ONE)] == [ONE]


def test_runs_are_in_the_order_of_their_start_also_within_a_second() -> None:
    """Their ids are random below that."""
    late, early = record(ONE, started_unix_s=5.2), record(TWO, started_unix_s=5.1, first_run=ONE)
    assert in_order([late, early]) == [early, late]
    assert chain_of({ONE: late, TWO: early}, ONE) == (early, late)
