"""The state of a page, folded from events, and the streams that bring it: frames, boxes, and feeds of a run."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from coordinator.client.submit import Client
from coordinator.run.trace import TraceText
from coordinator.web.feeds import FolderFeed, RunFeed, trace_tail
from coordinator.web.metrics import MAX_LINKS, MAX_NODES, MetricsCollector
from coordinator.web.page_state import MAX_EVENTS, MAX_MARKS, SECTIONS, PageState, Point, ThinCurve
from coordinator.web.streams import SHOWN_CURVES, BrowserState, Framer, MemberStatus, PageData, Streams
from ringtune import cli
from ringtune.engine.events import Span
from ringtune.errors import IntegrityError, UsageError
from ringtune.schedule.actions import Action, Op
from ringtune.v1 import control_pb2
from tests.support.cases import cases
from tests.support.fake_agents import CALL_S, FakeCluster, job, run
from tests.support.kept_runs import Gate, ended, keeping, start
from tests.support.page_runs import (
    PLAN,
    RUN_ID,
    activity,
    beginning,
    metrics,
    profile,
    progress,
    state_of,
    step_line,
    trained,
)
from tests.support.plans import make_plan

FEW = settings(max_examples=20)
VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=120)


def curve_of(values: list[float], most: int = 8) -> ThinCurve:
    """A curve of values at the steps from 1 on."""
    curve = ThinCurve(most)
    for step, value in enumerate(values, 1):
        curve.add(step, value)
    return curve


def test_thin_curve_shows_the_docstrings_example() -> None:
    """Fewer steps than buckets: each is there."""
    assert curve_of([3.0, 1.0, 2.0]).points() == [(1, 3.0), (2, 1.0), (3, 2.0)]
    # Of each stretch the lowest and the highest value stay, at their own steps
    curve = ThinCurve(4)
    for step, value in enumerate([5.0, 3.0, 4.0, 2.0, 9.0, 1.0, 2.0, 2.0, 7.0, 6.0, 8.0, 7.0, 3.0]):
        curve.add(step, value)
    assert curve.points() == [(0, 5.0), (3, 2.0), (4, 9.0), (5, 1.0), (9, 6.0), (10, 8.0), (12, 3.0)]
    # The steps from there on are those of the second attempt
    curve = curve_of([5.0, 4.0, 3.0], 16)
    curve.add(2, 9.0)
    assert curve.points() == [(1, 5.0), (2, 9.0)]


@FEW
@given(VALUES)
def test_thin_curve_has_true_points_in_order_and_the_extremes(values: list[float]) -> None:
    """Each point is one of the run's, none stands before another, and neither peak nor pit nor the end is lost."""
    points = curve_of(values).points()
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert all(values[step - 1] == value for step, value in points)
    shown = [value for _, value in points]
    assert (min(shown), max(shown)) == (min(values), max(values))
    assert points[-1] == (len(values), values[-1])


@FEW
@given(VALUES)
def test_thin_curve_is_bounded(values: list[float]) -> None:
    """Two points of each bucket and the newest one are all there can be."""
    assert len(curve_of(values, 8).points()) <= 2 * 8 + 1


@FEW
@given(VALUES, st.integers(1, 40))
def test_thin_curve_tells_those_who_follow_only_what_is_new(values: list[float], every: int) -> None:
    """Who takes settled points from where it was, and starts anew with each generation, has the whole curve."""
    had: list[Point] = []
    curve, generation = ThinCurve(8), -1
    for step, value in enumerate(values, 1):
        curve.add(step, value)
        if step % every == 0 or step == len(values):
            had = had if generation == curve.generation else []
            had += curve.settled(len(had))
            generation = curve.generation
    assert [*had, *curve.unsettled()] == curve.points()


@FEW
@given(VALUES, st.integers(0, 120))
def test_thin_curve_that_is_cut_has_nothing_after(values: list[float], last: int) -> None:
    """A run that goes back forgets its later steps, and goes on from there."""
    curve = curve_of(values)
    before = curve.points()
    curve.cut(last)
    assert set(curve.points()) <= {point for point in before if point.step <= last}
    curve.add(last + 1, 0.5)
    assert curve.points()[-1] == Point(last + 1, 0.5)


def texts(state: PageState) -> list[str]:
    """The lines of the list of events."""
    return [text for _, text, _ in state.section("events")]


def test_page_state_has_the_plans_slices() -> None:
    """Who hosts what, owns rows, has which budget, and what the plan needs of it."""
    plan = state_of(beginning()).section("plan")
    assert [(one["node"], one["start"], one["stop"], one["owner"]) for one in plan["nodes"]] == [
        ("a", 0, 2, True),
        ("b", 2, 4, True),
    ]
    assert {one["budget_bytes"] for one in plan["nodes"]} == {1 << 30}
    assert all(one["needed_bytes"] > 0 for one in plan["nodes"])
    assert (plan["num_blocks"], plan["num_steps"], plan["microbatches"]) == (4, 8, 2)
    # A run that was resumed on other nodes is shown as they host it
    moved = PLAN.extended(make_plan([("b", 0, 4)], ["a", "b"]).placement, 1, placement_number=3)
    state = state_of(
        [
            control_pb2.RunEvent(plan_json=json.dumps(moved.to_json())),
            control_pb2.RunEvent(resumed_json=json.dumps({"step": moved.course.local_iterations})),
        ]
    )
    assert ("b", 0, 4) in [(one["node"], one["start"], one["stop"]) for one in state.section("plan")["nodes"]]
    # A plan alone is shown, too
    state = state_of([control_pb2.RunEvent(run_id=RUN_ID), control_pb2.RunEvent(plan_json=json.dumps(PLAN.to_json()))])
    assert {one["needed_bytes"] for one in state.section("plan")["nodes"]} == {0}
    state.take(control_pb2.RunEvent(profile_json=json.dumps(profile().to_json())), None)
    assert {one["budget_bytes"] for one in state.section("plan")["nodes"]} == {1 << 30}


def test_page_state_has_the_true_losses_units_and_traffic() -> None:
    """The curve is the one of the metrics, step by step."""
    state = state_of(trained(8))
    assert state.curves["loss"].points() == [(step, 1.0 + 1.0 / step) for step in range(1, 9)]
    assert state.curves["seconds"].points()[-1] == (8, 4.0)
    assert state.section("run")["last"]["step"] == state.steps_done == 8
    # A mark where another number of blocks trains; the units of the newest step, the head included
    state = state_of(trained(5))
    assert state.section("marks") == [[1, 1], [3, 2], [5, 3]]
    assert state.section("trains") == [[1, 5]]
    # Bytes so far and of the newest step, most first, with the measured rate
    assert state_of(trained(3)).section("links") == [["a", "b", 3000, 1000, 1e6], ["b", "a", 30, 10, 1e6]]


def test_page_state_shows_each_step_once_before_its_turn_is_done() -> None:
    """They stand behind the settled ones, and are forgotten with the turn's metrics."""
    state = state_of([*beginning(), *(progress(step_line(step)) for step in (1, 2, 3))])
    assert sorted(state.ahead) == [1, 2, 3]
    assert state.curves["loss"].points() == []
    for step in (1, 2):
        state.take(metrics(step_line(step)), None)
    assert (sorted(state.ahead), len(state.curves["loss"].points())) == ([3], 2)
    # Seconds, and bytes of links: the books of a run that was taken up go back
    state = state_of([*beginning(), *(metrics(step_line(step)) for step in (1, 2, 3, 2, 3, 4))])
    assert state.curves["seconds"].last == (4, 2.0)
    assert state.section("run")["steps_s"] == 2.0
    once = state_of([*beginning(), *(metrics(step_line(step)) for step in (1, 2, 3, 4))])
    assert state.section("links") == once.section("links")


RECOVERY = {"kind": "recovery", "step": 2, "lost": ["b"], "placement_number": 0, "seconds": 1.5, "fetched_bytes": {}}


def test_page_state_marks_a_lost_node_by_a_recovery() -> None:
    """The node is red, the list says so, and steps that are done again are not there twice."""
    state = state_of([*beginning(), *(progress(step_line(step)) for step in (1, 2, 3, 4))])
    state.take(metrics(RECOVERY), 5.0)
    assert state.section("nodes")["b"]["lost"]
    assert not state.section("nodes")["a"]["lost"]
    assert "node b is lost; the run continues from step 2, after 1.5 s" in texts(state)
    assert sorted(state.ahead) == [1, 2]
    state.take(progress(step_line(3, loss=9.0)), None)
    assert state.section("run")["last"]["loss"] == 9.0


def test_page_state_node_that_is_back_is_lost_no_more() -> None:
    """An owner for which the run has waited, and a host that gets blocks again."""
    state = state_of(beginning())
    state.take(metrics({**RECOVERY, "back": ["b"]}), 5.0)
    assert not state.section("nodes")["b"]["lost"]
    assert "node b was lost, and b is back; the run continues from step 2, after 1.5 s" in texts(state)
    state.take(metrics(RECOVERY), 6.0)
    move = {"kind": "move", "step": 4, "to": 0, "placement_number": 0, "seconds": 1.0}
    state.take(metrics({**move, "problem": "b is not there"}), 7.0)
    assert state.section("nodes")["b"]["lost"]
    state.take(metrics(move), 8.0)
    assert not state.section("nodes")["b"]["lost"]
    state.take(metrics(RECOVERY), 9.0)
    state.take(metrics({**RECOVERY, "lost": [], "returned": ["b"]}), 10.0)
    assert not state.section("nodes")["b"]["lost"]
    assert "node b is back, and its rows are trained again; the run continues from step 2, after 1.5 s" in texts(state)


def test_page_state_says_why_a_run_ends() -> None:
    """With patience, and where the best result is kept."""
    state = state_of(beginning())
    state.take(metrics({"kind": "evaluation", "step": 40, "count": 9, "loss": 0.5, "is_best": True}), 5.0)
    state.take(metrics({"kind": "stop", "step": 80, "best": 0.5, "best_step": 40}), 6.0)
    assert "evaluated after step 40: loss 0.5000 on 9 rows (the best so far)" in texts(state)
    assert "ends early after step 80: no better evaluation since step 40" in texts(state)
    # A run that fails because a node is lost shows which one
    state = state_of(beginning())
    failure = control_pb2.RunFailure(error="PeerLostError", message="node b is lost: last contact 10 s ago")
    state.take(control_pb2.RunEvent(failure=failure), 7.0)
    assert state.section("nodes")["b"]["lost"]
    assert (state.is_over, state.section("run")["phase"]) == (True, "failed")
    full = control_pb2.RunFailure(error="StorageError", message="node a: its disk is full")
    state.take(control_pb2.RunEvent(failure=full), 8.0)
    assert not state.section("nodes")["a"]["lost"], "it is there, and has another problem"


def test_page_state_ends_with_the_figures_of_the_result() -> None:
    """While it trains those of the newest evaluation; then those of the best one, and that the loss had risen since."""
    state, risen = state_of(beginning()), "evaluation loss has risen since step 4 (0.5 -> 0.9): ..."
    for step, loss, accuracy in ((4, 0.5, 0.75), (8, 0.9, 0.25)):
        line = {"kind": "evaluation", "step": step, "count": 9, "loss": loss, "accuracy": accuracy}
        state.take(metrics(line | ({"risen": risen} if step == 8 else {})), 5.0)
    shown = state.section("run")["evaluation"]
    assert (shown["step"], shown["risen"], "is_result" in shown) == (8, risen, False)
    result = {"step": 4, "count": 9, "loss": 0.5, "accuracy": 0.75}
    state.take(control_pb2.RunEvent(report_json=json.dumps({"eval": result, "risen": risen})), 9.0)
    assert state.section("run")["evaluation"] == {**result, "risen": risen, "is_result": True}


def test_page_state_keeps_a_bounded_list_of_harmless_texts() -> None:
    """Escapes and very long texts of other machines are made harmless before they are kept."""
    state = state_of([*beginning(), control_pb2.RunEvent(note="\x1b[2J" + "x" * 5000)])
    assert "\x1b" not in texts(state)[-1]
    assert len(texts(state)[-1]) < 700
    # Of the run before only the list of events is left
    state = state_of([*trained(4), *beginning(run_id=RUN_ID.replace("0a", "0b"))])
    assert state.curves["loss"].points() == []
    assert not state.is_over
    assert f"run {RUN_ID} begins" in texts(state)
    # The newest stay
    state = state_of([*beginning(), *(control_pb2.RunEvent(note=f"note {index}") for index in range(1000))])
    assert len(texts(state)) == MAX_EVENTS
    assert texts(state)[-1] == "note 999"


@pytest.mark.parametrize("num_steps", [3000, pytest.param(100_000, marks=pytest.mark.thorough)])
def test_page_state_is_small_whatever_the_length_of_the_run(num_steps: int) -> None:
    """What a browser gets of 200 nodes and as many as 100,000 steps is bounded."""
    nodes = [f"n{index:03}" for index in range(200)]
    plan = make_plan(
        [(node, at, at + 1) for at, node in enumerate(nodes)],
        nodes[:20],
        num_blocks=200,
        num_steps=num_steps,
        every_steps=400,
    )
    links = {f"{one}>{two}": 1000 for one, two in itertools.pairwise(nodes)}
    state = PageState()
    for event in beginning(plan):
        state.take(event, 0.0)
    for step in range(1, num_steps + 1):
        sent = links if step % 1000 == 0 else {"n000>n001": 7}
        line = {"kind": "train", "step": step, "depth": 1 + step // 400, "loss": 1.0 / step, "seconds": 0.1}
        state.take(metrics({**line, "bytes": sent, "initiator": "n000", "round": 1}), 0.0)
    state.take(activity(num_steps, nodes), 0.0)
    frame = Framer(state).frame(BrowserState())
    assert len(frame) < 400_000
    assert len(state.curves["loss"].points()) <= 1025
    assert len(state.section("marks")) <= MAX_MARKS


def test_page_state_says_when_a_run_moves_and_is_saved() -> None:
    """Checkpoints, evaluations and moves are lines of the list; version 0.2.0 called the placement number ``epoch``."""
    for key in ["placement_number", "epoch"]:
        state = state_of(beginning())
        state.take(control_pb2.RunEvent(checkpoint_json=json.dumps({"step": 4})), 1.0)
        state.take(metrics({"kind": "evaluation", "step": 4, "loss": 0.25, "accuracy": 0.75, "count": 9}), 1.0)
        state.take(metrics({"kind": "move", "step": 4, "to": 2, key: 1, "seconds": 2.0, "problem": "no room"}), 1.0)
        assert texts(state)[-3:] == [
            "saved after step 4",
            "evaluated after step 4: accuracy 0.7500, loss 0.2500 on 9 rows",
            "stays on placement 1 after step 4: no room",
        ]
        assert state.curves["eval_accuracy"].points() == [(4, 0.75)]


UNITS = ("_bytes", "_seconds", "_ratio")


def samples(page_data: PageData) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels) -> value of what is written."""
    page_data.tick(0.0)
    text = MetricsCollector(Streams(page_data)).text().decode()
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def heard(*events: control_pb2.RunEvent, members: dict[str, MemberStatus] | None = None) -> PageData:
    """A page that has heard events."""
    page_data = PageData(members=lambda: members or {})
    for event in events:
        page_data.hear(event)
    return page_data


def test_figures_of_a_run() -> None:
    """Steps, loss, seconds, traffic and shares as the run told them."""
    found = samples(
        heard(*trained(8), members={"a": MemberStatus("lost", 7, 9, "cpu"), "b": MemberStatus("idle", 8, 9, "cpu")})
    )
    assert found["ringtune_run_info", (("method", "ringada"), ("phase", "done"), ("run_id", RUN_ID))] == 1
    assert found["ringtune_steps_done", ()] == 8
    assert found["ringtune_train_loss", ()] == 1.125
    assert found["ringtune_step_seconds_total", ()] == 4.0
    assert found["ringtune_link_bytes_total", (("source", "a"), ("target", "b"))] == 8000
    assert found["ringtune_node_time_ratio", (("kind", "waiting"), ("node", "a"))] == 0.25
    assert found["ringtune_node_rss_bytes", (("node", "b"),)] == 8
    assert found["ringtune_node_up", (("node", "a"),)] == 0
    assert found["ringtune_nodes", (("state", "lost"),)] == 1
    # A coordinator that waits is watched, too
    found = samples(heard(members={"a": MemberStatus("idle", 7, 9, "cpu")}))
    assert found["ringtune_nodes", (("state", "idle"),)] == 1
    assert ("ringtune_steps_done", ()) not in found


def test_figures_begin_with_the_projects_name_and_end_with_a_unit() -> None:
    """As Prometheus wants it; numbers without a unit are counts, losses and states."""
    names = {name.removesuffix("_total") for name, _ in samples(heard(*trained(8)))}
    assert all(name.startswith("ringtune_") for name in names)
    counts = {name for name in names if not name.endswith(UNITS)}
    assert counts == {
        "ringtune_coordinator_info",
        "ringtune_learning_rate",
        "ringtune_nodes",
        "ringtune_page_browsers",
        "ringtune_page_skipped_frames",
        "ringtune_run_info",
        "ringtune_steps_done",
        "ringtune_steps_planned",
        "ringtune_train_loss",
        "ringtune_trained_blocks",
    }


def test_figures_have_a_bounded_number_of_labels() -> None:
    """Links beyond the largest are one figure together; of very many nodes not all are there."""
    links = {f"n{index}>n{index + 1}": 10_000 - index for index in range(3000)}
    members = {f"n{index}": MemberStatus("idle", 1, 1, "cpu") for index in range(3000)}
    found = samples(heard(*beginning(), metrics(step_line(1, bytes=links)), members=members))
    names = [name for name, _ in found]
    assert names.count("ringtune_link_bytes_total") == MAX_LINKS + 1
    assert names.count("ringtune_node_rss_bytes") == MAX_NODES


IDLE, LOST = MemberStatus("idle", 10, 20, "cpu"), MemberStatus("lost", 10, 20, "cpu")


def test_watching_takes_events_at_the_next_tick() -> None:
    """Who tells waits for nothing; a tick says whether there is anything new."""
    page_data = PageData()
    for event in beginning():
        page_data.hear(event)
    assert page_data.state.run_id == ""
    assert page_data.tick(0.0)
    assert page_data.state.run_id == RUN_ID
    assert not page_data.tick(0.1)
    # Results are megabytes, and the page shows none
    page_data = PageData()
    page_data.hear(control_pb2.RunEvent(file=control_pb2.FileChunk(path="x", chunk=b"y")))
    assert not page_data.tick(0.0)
    # If the page's thread stands still, the oldest events are dropped, and the run goes on
    page_data = PageData(max_waiting=10)
    for index in range(25):
        page_data.hear(control_pb2.RunEvent(note=str(index)))
    page_data.tick(0.0)
    assert [text for _, text, _ in page_data.state.section("events")] == [str(index) for index in range(15, 25)]
    # One damaged event is left out, with a line in the log
    page_data = PageData()
    for event in (*beginning(), control_pb2.RunEvent(metrics_json="{"), metrics(step_line(1))):
        page_data.hear(event)
    page_data.hear(control_pb2.RunEvent(metrics_json=json.dumps({"kind": "train"})))
    page_data.tick(0.0)
    assert page_data.state.curves["loss"].points() == [(1, 2.0)]


def test_watching_says_who_comes_and_goes() -> None:
    """Asked once a second: joined, lost, back, left; another figure is no line; who is lost when first seen has two."""
    members = {"a": IDLE, "b": LOST, "c": IDLE, "d": IDLE}
    page_data = PageData(members=lambda: members)
    page_data.tick(0.0)
    seen = len(page_data.state.section("events"))
    members = {"a": LOST, "b": IDLE, "c": MemberStatus("running", 99, 20, "cpu"), "e": IDLE, "f": LOST}
    assert not page_data.tick(0.5)
    assert page_data.tick(1.0)
    assert [text for _, text, _ in page_data.state.section("events")][seen:] == [
        "node a is lost: it is silent",
        "node b is back",
        "node d left",
        "node e joined",
        "node f joined",
        "node f is lost: it is silent",
    ]


class Browser:
    """Puts frames together as ``store.js`` does."""

    def __init__(self) -> None:
        self.seen = BrowserState()
        self.sections: dict[str, Any] = {}
        self.curves: dict[str, list[list[float]]] = {}
        self._settled: dict[str, list[list[float]]] = {}

    def take(self, framer: Framer) -> str:
        """Take one frame."""
        text = framer.frame(self.seen)
        frame = json.loads(text) if text else {}
        if "whole" in frame:
            self.sections, self.curves, self._settled = {}, {}, {name: [] for name in SHOWN_CURVES}
        for name, part in frame.pop("curves", {}).items():
            self._settled[name] = [*self._settled[name][: part["from"]], *part["points"]]
            self.curves[name] = [*self._settled[name], *part["open"]]
        self.sections |= frame
        return text


def whole(state: PageState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sections and curves of a state as a browser that comes now gets them."""
    new = Browser()
    new.take(Framer(state))
    return {name: new.sections[name] for name in SECTIONS}, new.curves


def test_frames_bring_only_what_changed() -> None:
    """A browser that has everything gets nothing."""
    framer, browser = Framer(state_of(trained())), Browser()
    assert browser.take(framer)
    assert browser.take(framer) == ""
    # A further step brings its figures and its point, not the plan and the curve so far
    state = state_of([*beginning(), *(metrics(step_line(step)) for step in (1, 2, 3))])
    framer, browser = Framer(state), Browser()
    browser.take(framer)
    state.take(metrics(step_line(4)), None)
    frame = json.loads(browser.take(framer))
    assert set(frame) == {"run", "links", "curves"}
    assert frame["curves"]["loss"] == {"from": 2, "points": [[3, 1.0 + 1.0 / 3]], "open": [[4, 1.25]]}
    # They are drawn at once, as the owner told them
    state = state_of([*beginning(), metrics(step_line(1)), progress(step_line(2)), progress(step_line(3))])
    browser = Browser()
    browser.take(Framer(state))
    assert browser.curves["loss"] == [[1, 2.0], [2, 1.5], [3, 1.0 + 1.0 / 3]]


@settings(max_examples=15)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=12))
def test_frames_missed_by_a_slow_browser_change_nothing(pauses: list[int]) -> None:
    """Whenever a browser takes a frame, it ends with the very state of one that comes at the end."""
    state, browser = PageState(), Browser()
    framer = Framer(state)
    events = [*beginning(), *trained(6), metrics(step_line(7))]
    for pause in pauses:
        for event in events[:pause]:
            state.take(event, None)
        del events[:pause]
        browser.take(framer)
    assert ({name: browser.sections[name] for name in SECTIONS}, browser.curves) == whole(state)


def test_frames_have_the_members_without_any_run() -> None:
    """And again when they have changed, or another run begins."""
    state, members = PageState(), {"a": ["idle", 1, 2, "cpu"]}
    state.show_members(members)
    framer, browser = Framer(state), Browser()
    browser.take(framer)
    assert browser.sections["members"] == members
    state.show_members({**members, "b": ["lost", 0, 2, "cpu"]})
    browser.take(framer)
    assert browser.sections["members"]["b"][0] == "lost"
    state.take(control_pb2.RunEvent(run_id="r2"), None)
    browser.take(framer)
    assert set(browser.sections["members"]) == {"a", "b"}


WAIT_S = 30.0


class Link:
    """A browser's end of a stream, which takes a message only when it is let."""

    def __init__(self) -> None:
        self.took: asyncio.Queue[str] = asyncio.Queue()
        self.may_take = asyncio.Event()
        self.may_take.set()
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        """Say that the browser leaves, once it does."""
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Take a message when the network has room."""
        await self.may_take.wait()
        if message["type"] == "http.response.body":
            self.took.put_nowait(message["body"].decode())

    async def frame(self) -> dict[str, Any]:
        """The next frame."""
        text = await asyncio.wait_for(self.took.get(), WAIT_S)
        assert text.startswith("data: ")
        found: dict[str, Any] = json.loads(text.removeprefix("data: "))
        return found


def running(
    test: Callable[[PageData, Streams, Link, asyncio.Task[None]], Awaitable[None]], *, run_id: str = "", **options: Any
) -> None:
    """Carry a test out with one open stream of a run that has begun."""

    async def run() -> None:
        page_data = PageData()
        for event in beginning():
            page_data.hear(event)
        page_data.tick(0.0)
        streams, link = Streams(page_data, **options), Link()
        task = asyncio.create_task(streams.serve(run_id, "here", link.receive, link.send))
        try:
            await test(page_data, streams, link, task)
        finally:
            task.cancel()
            await asyncio.wait({task})

    asyncio.run(run())


def add(page_data: PageData, streams: Streams, step: int) -> None:
    """A further step, and a tick."""
    page_data.hear(metrics(step_line(step)))
    assert page_data.tick(0.0)
    streams.wake()


def test_streams_send_the_whole_state_and_then_what_changes() -> None:
    """The first frame has everything; the next one a step."""

    async def test(page_data: PageData, streams: Streams, link: Link, _: asyncio.Task[None]) -> None:
        assert (await link.frame())["whole"] == RUN_ID
        add(page_data, streams, 1)
        frame = await link.frame()
        assert frame["run"]["last"]["step"] == 1
        assert "plan" not in frame

    running(test)


def test_streams_leave_out_frames_of_a_slow_browser() -> None:
    """While it takes nothing, nothing is queued; then one frame has the newest state, and the number of the skipped."""

    async def test(page_data: PageData, streams: Streams, link: Link, _: asyncio.Task[None]) -> None:
        await link.frame()
        link.may_take.clear()
        for step in range(1, 51):
            add(page_data, streams, step)
            await asyncio.sleep(0)
        link.may_take.set()
        on_its_way, frame = await link.frame(), await link.frame()
        assert frame["run"]["last"]["step"] == 50
        assert on_its_way.get("skipped", 0) + frame["skipped"] == streams.skipped
        assert frame["skipped"] > 40
        assert link.took.empty()

    running(test)


def test_streams_let_a_browser_go_that_takes_nothing() -> None:
    """After some seconds its stream is closed; the others go on."""

    async def test(page_data: PageData, streams: Streams, link: Link, task: asyncio.Task[None]) -> None:
        await link.frame()
        link.may_take.clear()
        add(page_data, streams, 1)
        await asyncio.wait_for(task, WAIT_S)
        assert (streams.open, streams.closed) == (0, 1)

    running(test, send_s=0.01)


def test_streams_end_when_a_browser_leaves() -> None:
    """Nothing is left of it."""

    async def test(_: PageData, streams: Streams, link: Link, task: asyncio.Task[None]) -> None:
        await link.frame()
        assert (streams.open, streams.open_of) == (1, {"here": 1})
        link.left.set()
        await asyncio.wait_for(task, WAIT_S)
        assert (streams.open, streams.open_of) == (0, {})

    running(test)


def test_streams_say_goodbye_only_after_the_state_that_came_meanwhile() -> None:
    """The end may come while a frame is on its way; what happened since is sent before the goodbye, too."""

    async def test(page_data: PageData, streams: Streams, link: Link, task: asyncio.Task[None]) -> None:
        await link.frame()
        link.may_take.clear()
        add(page_data, streams, 1)
        await asyncio.sleep(0)
        page_data.hear(metrics(step_line(2)))
        page_data.tick(0.0)
        streams.end()
        link.may_take.set()
        await asyncio.wait_for(task, WAIT_S)
        texts = [link.took.get_nowait() for _ in range(link.took.qsize())]
        assert '"step":2' in texts[-2]
        assert texts[-1].startswith("event: bye")

    running(test)


def test_streams_of_a_run_end_when_another_begins() -> None:
    """Who asked for one run is told that it is gone; who asked for the newest gets the new one."""
    other = RUN_ID.replace("0a", "0b")

    async def test(page_data: PageData, streams: Streams, link: Link, task: asyncio.Task[None]) -> None:
        await link.frame()
        for event in beginning(run_id=other):
            page_data.hear(event)
        page_data.tick(0.0)
        streams.wake()
        assert await asyncio.wait_for(link.took.get(), WAIT_S) == f"event: gone\ndata: {other}\n\n"
        await asyncio.wait_for(task, WAIT_S)

    running(test, run_id=RUN_ID)


def folder_state(folder: Path) -> PageState:
    """The state that a folder makes."""
    state = PageState()
    for event in FolderFeed(folder)():
        state.take(event, None)
    return state


def begun(folder: Path, steps: int) -> Path:
    """The folder of a run that has done some steps."""
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(PLAN.to_json()))
    (folder / "profile.json").write_text(json.dumps(profile().to_json()))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step_line(step)) + "\n" for step in range(1, steps + 1)))
    return folder


def test_folder_feed_of_a_finished_run_shows_it_as_it_was(tmp_path: Path) -> None:
    """The losses are those of metrics.jsonl, the slices those of the plan, and the run is done."""
    with FakeCluster("a", "b") as cluster:
        done = run(cluster, tmp_path / "run")
    state = folder_state(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]
    assert steps
    assert state.curves["loss"].points() == steps
    assert state.plan == done.plan
    assert state.section("run")["phase"] == "done"


def test_folder_feed_goes_on_with_a_run(tmp_path: Path) -> None:
    """Lines that are added are shown at the next look, without a damaged one; one that is written in part waits."""
    folder = begun(tmp_path / "run", 2)
    page_data = PageData(feed=FolderFeed(folder))
    page_data.tick(0.0)
    assert page_data.state.steps_done == 2
    text = json.dumps(step_line(3)) + "\n"
    with (folder / "metrics.jsonl").open("a") as file:
        for wrong in ('""', '{"a>b": "x"}', '{"a>b": 1e400}', '{"a>b": -1}', f'{{"a>b": {10**400}}}'):
            file.write(f'{{"kind": "train", "step": 3, "bytes": {wrong}}}\n')
        file.write(text[:20])
    page_data.tick(2.0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text[20:])
    page_data.tick(4.0)
    assert page_data.state.curves["loss"].points()[-1] == (3, 1.0 + 1.0 / 3)
    assert page_data.state.section("run")["phase"] == "not finished"
    assert all(0 <= link[3] < 1 << 62 for link in page_data.state.section("links"))


def test_folder_feed_of_a_resumed_run_goes_back(tmp_path: Path) -> None:
    """Steps after the checkpoint are done again, and are there once."""
    folder = begun(tmp_path / "run", 6)
    page_data = PageData(feed=FolderFeed(folder))
    page_data.tick(0.0)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step_line(step)) + "\n" for step in (1, 2)))
    page_data.tick(2.0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step_line(3, loss=7.0)) + "\n")
    page_data.tick(4.0)
    state = page_data.state
    assert state.curves["loss"].points() == [(1, 2.0), (2, 1.5), (3, 7.0)]
    assert state.curves["seconds"].last == (3, 3 * step_line(1)["seconds"])
    assert state.plan is not None


def write_trace(folder: Path) -> None:
    """A trace of two items; of the last one each node has an action."""
    text = TraceText(["a", "b"], num_blocks=4, started_unix_s=100.0)
    spans = {
        "a": [Span(Action(Op.FORWARD, 0, 0, 0, 2), 100.0, 101.0), Span(Action(Op.BACKWARD, 1, 0, 0, 2), 103.0, 104.0)],
        "b": [
            Span(Action(Op.SEND, 1, 0, 2, 0, "a", "h"), 101.0, 102.0),
            Span(Action(Op.UPDATE, 1, -1, 2, 4), 102.0, 104.0),
        ],
    }
    pieces = [text.begin(), *(text.spans(node, found) for node, found in spans.items()), text.end()]
    (folder / "trace.json").write_text("".join(pieces))


def test_folder_feed_reads_the_last_step_of_a_trace(tmp_path: Path) -> None:
    """Its actions and the shares of the nodes over what the trace has."""
    folder = begun(tmp_path / "run", 8)
    write_trace(folder)
    (folder / "report.json").write_text("{}")
    state = folder_state(folder)
    gantt = state.section("gantt")
    assert [span[:2] for span in gantt["spans"]] == [["b", "U"], ["a", "B"]]
    assert gantt["step"] == 8
    assert state.shares["b"] == [0.5, 0.0, 0.5]


def test_trace_tail_reads_the_end_of_a_long_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands before is left out, and the first line that is cut, too."""
    folder = begun(tmp_path / "run", 1)
    write_trace(folder)
    assert len(list(trace_tail(folder / "trace.json", 4))) == 4
    monkeypatch.setattr("coordinator.web.feeds.MAX_TRACE_BYTES", 300)
    assert [span.action.op for _, span in trace_tail(folder / "trace.json", 4)] == [Op.UPDATE]


def test_folder_feed_refuses_what_is_no_run(tmp_path: Path) -> None:
    """A folder that is gone, and one without a plan, each with a sentence of its own."""
    with pytest.raises(UsageError, match="is no folder: the run is gone"):
        FolderFeed(tmp_path / "gone")
    with pytest.raises(UsageError, match=r"has no plan\.json"):
        FolderFeed(tmp_path)


def test_folder_feed_says_once_that_its_folder_is_gone(tmp_path: Path) -> None:
    """The page stays as it was, and nothing is told again and again."""
    folder = begun(tmp_path / "run", 2)
    feed = FolderFeed(folder)
    assert len(list(feed())) > 2
    shutil.rmtree(folder)
    (told,) = feed()
    assert told.note == f"no further updates: {folder} can't be read any more (No such file or directory)"
    assert list(feed()) == []


@cases("name", ["job.toml", "plan.json", "run.json", "profile.json"])
def test_folder_feed_says_once_that_a_file_is_damaged(tmp_path: Path, name: str) -> None:
    """The log of the page had a traceback each second; a folder that is being copied is shown once it is whole."""
    folder = begun(tmp_path / "run", 2)
    whole = (folder / name).read_bytes() if (folder / name).exists() else None
    (folder / name).write_bytes(b"\xff")
    page_data = PageData(feed=FolderFeed(folder))
    for now_s in (0.0, 2.0, 4.0):
        page_data.tick(now_s)
    assert sum(name in text for _, text, _ in page_data.state.section("events")) == 1
    if whole is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(whole)
    page_data.tick(6.0)
    assert page_data.state.steps_done == 2


def test_trace_with_nodes_of_no_name_is_passed_over(tmp_path: Path) -> None:
    """The page has no chart of the last step then."""
    (tmp_path / "trace.json").write_text('{"traceEvents": [\n{"ph": "M", "name": "process_name", "pid": "x"}\n')
    with pytest.raises(IntegrityError, match="a node without a name"):
        list(trace_tail(tmp_path / "trace.json", 4))


GONE = "r20260101-000000-00000000"


def followed(client: Client, run_id: str) -> RunFeed:
    """The feed of a kept run, as the command makes it."""
    return RunFeed(lambda: client.events(run_id, wait=True, whole=True, with_files=False))


def until(page_data: PageData, is_shown: Callable[[PageState], bool]) -> None:
    """Look until something is shown."""
    deadline_s, now_s = time.monotonic() + CALL_S, 0.0
    while not is_shown(page_data.state):
        assert time.monotonic() < deadline_s
        now_s += 1.0
        page_data.tick(now_s)
        time.sleep(0.01)


def test_page_of_a_kept_run_shows_what_it_did_and_what_comes(tmp_path: Path) -> None:
    """One that goes on is followed, and left when the page ends; a finished one is all there."""
    gate = Gate()
    with keeping(tmp_path / "kept", gate) as cluster, Client(cluster.server.address) as client:
        run_id = start(client, job())
        assert gate.reached.wait(CALL_S)
        with followed(client, run_id) as feed:
            page_data = PageData(feed=feed)
            until(page_data, lambda state: state.plan is not None)
            assert page_data.state.steps_done == 0
            gate.open.set()
            until(page_data, lambda state: state.steps_done == 8)
        feed._thread.join(CALL_S)  # until the next event
        assert not feed._thread.is_alive()
        ended(client, run_id)
        with followed(client, run_id) as feed:
            until(PageData(feed=feed), lambda state: state.section("run")["phase"] == "done" and state.steps_done == 8)


def test_page_says_why_nothing_more_comes(tmp_path: Path) -> None:
    """As a note on the page, which stays as it was."""
    with (
        keeping(tmp_path / "kept") as cluster,
        Client(cluster.server.address) as client,
        followed(client, GONE) as feed,
    ):
        feed._thread.join(CALL_S)
        (told,) = feed()
    assert told.note.startswith(f"no further updates: run {GONE} is not stored")


def test_page_of_a_run_that_is_gone_is_refused(tmp_path: Path) -> None:
    """One sentence, with the command that lists what is there; nothing is served."""
    with keeping(tmp_path / "kept") as cluster:
        found = CliRunner().invoke(cli.app, ["page", GONE, "--coordinator", cluster.server.address])
    assert found.exit_code == 2
    told = " ".join(found.output.split())
    assert f"run {GONE} is not stored there; 'ringtune runs' lists the stored runs" in told
