"""The state of a page, folded from events: what it says, and that it and its curves stay small."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from coordinator.web.metrics import MAX_LINKS, MAX_NODES, MetricsCollector
from coordinator.web.page_state import MAX_EVENTS, MAX_MARKS, PageState, Point, ThinCurve
from coordinator.web.streams import BrowserState, Framer, MemberStatus, PageData, Streams
from ringtune.v1 import control_pb2
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
