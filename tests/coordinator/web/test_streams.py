"""Streams of frames: a slow browser loses frames and no state, one that takes nothing is let go, all end in order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from coordinator.web.streams import Streams
from coordinator.web.watching import Watching
from tests.support.page_runs import RUN_ID, beginning, metrics, step_line

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
    test: Callable[[Watching, Streams, Link, asyncio.Task[None]], Awaitable[None]], *, run_id: str = "", **options: Any
) -> None:
    """Carry a test out with one open stream of a run that has begun."""

    async def run() -> None:
        watching = Watching()
        for event in beginning():
            watching.hear(event)
        watching.tick(0.0)
        streams, link = Streams(watching, **options), Link()
        task = asyncio.create_task(streams.serve(run_id, {}, link.receive, link.send))
        try:
            await test(watching, streams, link, task)
        finally:
            task.cancel()
            await asyncio.wait({task})

    asyncio.run(run())


def add(watching: Watching, streams: Streams, step: int) -> None:
    """A further step, and a tick."""
    watching.hear(metrics(step_line(step)))
    assert watching.tick(0.0)
    streams.wake()


def test_streams_send_the_whole_state_and_then_what_changes() -> None:
    """The first frame has everything; the next one a step."""

    async def test(watching: Watching, streams: Streams, link: Link, _: asyncio.Task[None]) -> None:
        assert (await link.frame())["whole"] == RUN_ID
        add(watching, streams, 1)
        frame = await link.frame()
        assert frame["run"]["last"]["step"] == 1
        assert "plan" not in frame

    running(test)


def test_streams_leave_out_frames_of_a_slow_browser() -> None:
    """While it takes nothing, nothing is queued; then one frame has the newest state, and the number of the skipped."""

    async def test(watching: Watching, streams: Streams, link: Link, _: asyncio.Task[None]) -> None:
        await link.frame()
        link.may_take.clear()
        for step in range(1, 51):
            add(watching, streams, step)
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

    async def test(watching: Watching, streams: Streams, link: Link, task: asyncio.Task[None]) -> None:
        await link.frame()
        link.may_take.clear()
        add(watching, streams, 1)
        await asyncio.wait_for(task, WAIT_S)
        assert (streams.open, streams.closed) == (0, 1)

    running(test, send_s=0.01)


def test_streams_end_when_a_browser_leaves() -> None:
    """Nothing is left of it."""

    async def test(_: Watching, streams: Streams, link: Link, task: asyncio.Task[None]) -> None:
        await link.frame()
        assert streams.open == 1
        link.left.set()
        await asyncio.wait_for(task, WAIT_S)
        assert streams.open == 0

    running(test)


def test_streams_say_goodbye_with_the_last_state() -> None:
    """What happened last is sent before."""

    async def test(watching: Watching, streams: Streams, link: Link, task: asyncio.Task[None]) -> None:
        await link.frame()
        watching.hear(metrics(step_line(1)))
        watching.tick(0.0)
        streams.end()
        assert (await link.frame())["run"]["last"]["step"] == 1
        assert await asyncio.wait_for(link.took.get(), WAIT_S) == "event: bye\ndata: over\n\n"
        await asyncio.wait_for(task, WAIT_S)

    running(test)


def test_streams_say_goodbye_only_after_the_state_that_came_meanwhile() -> None:
    """The end may come while a frame is on its way; what happened since is sent before the goodbye, too."""

    async def test(watching: Watching, streams: Streams, link: Link, task: asyncio.Task[None]) -> None:
        await link.frame()
        link.may_take.clear()
        add(watching, streams, 1)
        await asyncio.sleep(0)
        watching.hear(metrics(step_line(2)))
        watching.tick(0.0)
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

    async def test(watching: Watching, streams: Streams, link: Link, task: asyncio.Task[None]) -> None:
        await link.frame()
        for event in beginning(run_id=other):
            watching.hear(event)
        watching.tick(0.0)
        streams.wake()
        assert await asyncio.wait_for(link.took.get(), WAIT_S) == f"event: gone\ndata: {other}\n\n"
        await asyncio.wait_for(task, WAIT_S)

    running(test, run_id=RUN_ID)
