"""Streams of frames: events in a bounded box, what a browser lacks and nothing else, slow browsers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.web.page_state import SECTIONS, PageState
from coordinator.web.streams import SHOWN_CURVES, BrowserState, Framer, MemberStatus, PageData, Streams, member_lines
from ringtune.v1 import control_pb2
from tests.support.page_runs import RUN_ID, beginning, metrics, progress, state_of, step_line, trained

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


def test_watching_keeps_no_files() -> None:
    """Results are megabytes, and the page shows none."""
    page_data = PageData()
    page_data.hear(control_pb2.RunEvent(file=control_pb2.FileChunk(path="x", chunk=b"y")))
    assert not page_data.tick(0.0)


def test_watching_box_is_bounded() -> None:
    """If the page's thread stands still, the oldest events are dropped, and the run goes on."""
    page_data = PageData(max_waiting=10)
    for index in range(25):
        page_data.hear(control_pb2.RunEvent(note=str(index)))
    page_data.tick(0.0)
    assert [text for _, text, _ in page_data.state.section("events")] == [str(index) for index in range(15, 25)]


def test_watching_goes_on_after_an_event_that_it_can_not_read() -> None:
    """One damaged event is left out, with a line in the log."""
    page_data = PageData()
    for event in (*beginning(), control_pb2.RunEvent(metrics_json="{"), metrics(step_line(1))):
        page_data.hear(event)
    page_data.hear(control_pb2.RunEvent(metrics_json=json.dumps({"kind": "train"})))
    page_data.tick(0.0)
    assert page_data.state.curves["loss"].points() == [(1, 2.0)]


def test_watching_says_who_comes_and_goes() -> None:
    """Members are asked for once a second, and changes are lines of the list."""
    members = {"a": IDLE}
    page_data = PageData(members=lambda: dict(members))
    page_data.tick(0.0)
    members["a"] = LOST
    assert not page_data.tick(0.5)
    assert page_data.tick(1.0)
    texts = [text for _, text, _ in page_data.state.section("events")]
    assert texts == ["node a joined", "node a is lost: it is silent"]


def test_member_lines_of_all_changes() -> None:
    """Joined, lost, back, left; another figure alone is no line; who is lost when first seen has two."""
    before = {"a": IDLE, "b": LOST, "c": IDLE, "d": IDLE}
    now = {"a": LOST, "b": IDLE, "c": MemberStatus("running", 99, 20, "cpu"), "e": IDLE, "f": LOST}
    assert [line.text for line in member_lines(before, now)] == [
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
    new.take(framer_of(state))
    return {name: new.sections[name] for name in SECTIONS}, new.curves


def framer_of(state: PageState) -> Framer:
    """Frames of a state without members."""
    return Framer(state, lambda: (1, {}))


def test_frames_of_nothing_new_are_empty() -> None:
    """A browser that has everything gets nothing."""
    framer, browser = framer_of(state_of(trained())), Browser()
    assert browser.take(framer)
    assert browser.take(framer) == ""


def test_frames_bring_only_what_changed() -> None:
    """A further step brings its figures and its point, not the plan and the curve so far."""
    state = state_of([*beginning(), *(metrics(step_line(step)) for step in (1, 2, 3))])
    framer, browser = framer_of(state), Browser()
    browser.take(framer)
    state.take(metrics(step_line(4)), None)
    frame = json.loads(browser.take(framer))
    assert set(frame) == {"run", "links", "curves"}
    assert frame["curves"]["loss"] == {"from": 2, "points": [[3, 1.0 + 1.0 / 3]], "open": [[4, 1.25]]}


def test_frames_show_steps_whose_turn_is_not_done_at_the_end_of_the_curve() -> None:
    """They are drawn at once, as the owner told them."""
    state = state_of([*beginning(), metrics(step_line(1)), progress(step_line(2)), progress(step_line(3))])
    browser = Browser()
    browser.take(framer_of(state))
    assert browser.curves["loss"] == [[1, 2.0], [2, 1.5], [3, 1.0 + 1.0 / 3]]


@settings(max_examples=30)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=12))
def test_frames_missed_by_a_slow_browser_change_nothing(pauses: list[int]) -> None:
    """Whenever a browser takes a frame, it ends with the very state of one that comes at the end."""
    state, browser = PageState(), Browser()
    framer = framer_of(state)
    events = [*beginning(), *trained(6), metrics(step_line(7))]
    for pause in pauses:
        for event in events[:pause]:
            state.take(event, None)
        del events[:pause]
        browser.take(framer)
    assert ({name: browser.sections[name] for name in SECTIONS}, browser.curves) == whole(state)


def test_frames_of_members_come_with_their_version() -> None:
    """Who is there is known without any run."""
    members = {"a": ["idle", 1, 2, "cpu"]}
    version = [1]
    framer, browser = Framer(PageState(), lambda: (version[0], members)), Browser()
    browser.take(framer)
    assert browser.sections["members"] == members
    members["b"] = ["lost", 0, 2, "cpu"]
    assert browser.take(framer) == ""
    version[0] += 1
    browser.take(framer)
    assert browser.sections["members"]["b"][0] == "lost"


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


def test_streams_say_goodbye_with_the_last_state() -> None:
    """What happened last is sent before."""

    async def test(page_data: PageData, streams: Streams, link: Link, task: asyncio.Task[None]) -> None:
        await link.frame()
        page_data.hear(metrics(step_line(1)))
        page_data.tick(0.0)
        streams.end()
        assert (await link.frame())["run"]["last"]["step"] == 1
        assert await asyncio.wait_for(link.took.get(), WAIT_S) == "event: bye\ndata: over\n\n"
        await asyncio.wait_for(task, WAIT_S)

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
