"""Streams of frames, and their feeds: events in a bounded box, a run's folder, a run that a coordinator keeps."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from coordinator.client.submit import Client
from coordinator.run.trace import TraceText
from coordinator.web.feeds import FolderFeed, RunFeed, trace_tail
from coordinator.web.page_state import SECTIONS, PageState
from coordinator.web.streams import SHOWN_CURVES, BrowserState, Framer, MemberStatus, PageData, Streams
from ringtune import cli
from ringtune.engine.events import Span
from ringtune.errors import IntegrityError, UsageError
from ringtune.schedule.actions import Action, Op
from ringtune.v1 import control_pb2
from tests.support.cases import cases
from tests.support.fake_agents import CALL_S, FakeCluster, job, run
from tests.support.kept_runs import Gate, ended, keeping, start
from tests.support.page_runs import PLAN, RUN_ID, beginning, metrics, profile, progress, state_of, step_line, trained

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
        task = asyncio.create_task(streams.serve(run_id, {}, link.receive, link.send))
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
        assert streams.open == 1
        link.left.set()
        await asyncio.wait_for(task, WAIT_S)
        assert streams.open == 0

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
