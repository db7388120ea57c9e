"""What the page watches: events in a bounded box, members, and a folder."""

from __future__ import annotations

import json

from coordinator.web.watching import MemberNow, Watching, member_lines
from ringtune.v1 import control_pb2
from tests.support.page_runs import RUN_ID, beginning, metrics, step_line

IDLE, LOST = MemberNow("idle", 10, 20, "cpu"), MemberNow("lost", 10, 20, "cpu")


def test_watching_takes_events_at_the_next_tick() -> None:
    """Who tells waits for nothing; a tick says whether there is anything new."""
    watching = Watching()
    for event in beginning():
        watching.hear(event)
    assert watching.state.run_id == ""
    assert watching.tick(0.0)
    assert watching.state.run_id == RUN_ID
    assert not watching.tick(0.1)


def test_watching_keeps_no_files() -> None:
    """Results are megabytes, and the page shows none."""
    watching = Watching()
    watching.hear(control_pb2.RunEvent(file=control_pb2.FileChunk(path="x", chunk=b"y")))
    assert not watching.tick(0.0)


def test_watching_box_is_bounded() -> None:
    """If the page's thread stands still, the oldest events are dropped, and the run goes on."""
    watching = Watching(most_waiting=10)
    for index in range(25):
        watching.hear(control_pb2.RunEvent(note=str(index)))
    watching.tick(0.0)
    assert [text for _, text, _ in watching.state.section("events")] == [str(index) for index in range(15, 25)]


def test_watching_goes_on_after_an_event_that_it_can_not_read() -> None:
    """One damaged event is left out, with a line in the log."""
    watching = Watching()
    for event in (*beginning(), control_pb2.RunEvent(metrics_json="{"), metrics(step_line(1))):
        watching.hear(event)
    watching.hear(control_pb2.RunEvent(metrics_json=json.dumps({"kind": "train"})))
    watching.tick(0.0)
    assert watching.state.curves["loss"].points() == [(1, 2.0)]


def test_watching_says_who_comes_and_goes() -> None:
    """Members are asked for once a second, and changes are lines of the list."""
    members = {"a": IDLE}
    watching = Watching(members=lambda: dict(members))
    watching.tick(0.0)
    members["a"] = LOST
    assert not watching.tick(0.5)
    assert watching.tick(1.0)
    texts = [text for _, text, _ in watching.state.section("events")]
    assert texts == ["node a joined", "node a is lost: it is silent"]


def test_member_lines_of_all_changes() -> None:
    """Joined, lost, back, left; another figure alone is no line; who is lost when first seen has two."""
    before = {"a": IDLE, "b": LOST, "c": IDLE, "d": IDLE}
    now = {"a": LOST, "b": IDLE, "c": MemberNow("running", 99, 20, "cpu"), "e": IDLE, "f": LOST}
    assert [line.text for line in member_lines(before, now)] == [
        "node a is lost: it is silent",
        "node b is back",
        "node d left",
        "node e joined",
        "node f joined",
        "node f is lost: it is silent",
    ]
