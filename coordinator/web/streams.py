"""Streams of the page: a run's events update its state, and each browser gets frames of the changes.

``BrowserState`` has the version of each section in a browser, and of each curve a generation with a number of points. A
frame has the changed sections and the new points of each curve. It is made from the present state when the one before
has been sent, so nothing is queued: a slow browser gets fewer frames, each complete, and the next one says how many
changes were skipped. A browser that takes nothing for ``SEND_S`` is disconnected; it reconnects and gets a whole state.

The run's thread only queues events. All else happens on the page's own thread, which calls ``tick`` a few times a
second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from coordinator.web.page_state import CURVES, SECTIONS, EventLine, PageState, Point
from ringtune.errors import RingTuneError
from ringtune.texts import printable
from ringtune.v1 import control_pb2

if TYPE_CHECKING:
    from starlette.types import Receive, Send

SHOWN_CURVES: Final = tuple(name for name in CURVES if name != "seconds")
_MAX_AHEAD: Final = 512


@dataclass(slots=True)
class BrowserState:
    """Versions of the state in one browser.

    Attributes:
        curves: generation and number of settled points of each curve, and its unsettled points.
    """

    run_id: str | None = None
    versions: dict[str, int] = field(default_factory=dict)
    curves: dict[str, tuple[int, int, str]] = field(default_factory=dict)


class Framer:
    """Makes frames of a state; each section is serialized once for all browsers.

    Args:
        state: of the page; only one thread at a time may change or frame it.
    """

    def __init__(self, state: PageState) -> None:
        self._state = state
        self._written: dict[str, tuple[int, str]] = {}

    def frame(self, seen: BrowserState) -> str:
        """Write the missing changes of a browser as a JSON object, and note that it has them; empty without changes."""
        state, parts = self._state, []
        if seen.run_id != state.run_id:
            seen.run_id, seen.versions, seen.curves = state.run_id, {}, {}
            parts.append(f'"whole":{json.dumps(state.run_id)}')
        for name in SECTIONS:
            version = state.versions[name]
            if seen.versions.get(name) != version:
                seen.versions[name] = version
                parts.append(f'"{name}":{self._text(name, version)}')
        curves = [text for name in SHOWN_CURVES if (text := self._curve(name, seen))]
        if curves:
            parts.append(f'"curves":{{{",".join(curves)}}}')
        return f"{{{','.join(parts)}}}" if parts else ""

    def _text(self, name: str, version: int) -> str:
        written = self._written.get(name)
        if written is None or written[0] != version:
            text = json.dumps(self._state.section(name), separators=(",", ":"))
            written = self._written[name] = (version, text)
        return written[1]

    def _curve(self, name: str, seen: BrowserState) -> str:
        curve = self._state.curves[name]
        generation, count, had = seen.curves.get(name, (-1, 0, ""))
        start = count if generation == curve.generation else 0
        settled, unsettled = curve.settled(start), curve.unsettled()
        if name in ("loss", "accuracy"):
            unsettled = [*unsettled, *self._ahead(("loss", "accuracy").index(name))]
        open_text = json.dumps(unsettled, separators=(",", ":"))
        if generation == curve.generation and not settled and open_text == had:
            return ""
        seen.curves[name] = (curve.generation, start + len(settled), open_text)
        return f'"{name}":{{"from":{start},"points":{json.dumps(settled, separators=(",", ":"))},"open":{open_text}}}'

    def _ahead(self, place: int) -> list[Point]:
        """Points of steps of an open turn; a subset for very long turns."""
        last = self._state.curves["seconds"].last
        done = last.step if last else 0
        ahead = [
            Point(step, value)
            for step, values in sorted(self._state.ahead.items())
            if step > done and (value := values[place]) is not None
        ]
        return ahead[:: len(ahead) // _MAX_AHEAD + 1]


_LOG = logging.getLogger(__name__)
_KINDS: Final = frozenset(
    (
        *("run_id", "state", "job_toml", "profile_json", "plan_json", "metrics_json", "step_json", "report_json"),
        *("failure", "done", "checkpoint_json", "note", "resumed_json", "activity_json"),
    )
)
MAX_WAITING: Final = 50_000
"""Limit of queued events for the page's thread, which takes them four times a second."""
_MIN_BETWEEN_S: Final = 1.0


class MemberStatus(NamedTuple):
    """The present state of a member.

    Attributes:
        state: idle, running, drained, draining or lost.
        rss_bytes: resident memory at its last sign of life.
        memory_bytes: budget of a run.
    """

    state: str
    rss_bytes: int
    memory_bytes: int
    device: str


Feed = Callable[[], Iterable[control_pb2.RunEvent]]


class PageData:
    """State of the newest run and of the members, for the page.

    Args:
        members: lists the members by name; must not wait long.
        feed: returns further events, where they are pulled.
        max_waiting: limit of queued events; beyond it the oldest are dropped.
    """

    def __init__(
        self,
        *,
        members: Callable[[], Mapping[str, MemberStatus]] = dict,
        feed: Feed = tuple,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.state = PageState()
        self.framer = Framer(self.state)
        self.changes = 0
        self.members: Mapping[str, MemberStatus] = {}
        self._ask_members, self._feed = members, feed
        self._box: deque[tuple[float | None, control_pb2.RunEvent]] = deque(maxlen=max_waiting)
        self._asked_at_s = -_MIN_BETWEEN_S

    def hear(self, event: control_pb2.RunEvent) -> None:
        """Queue an event from any thread, without waiting; kinds that the page does not show are dropped."""
        if event.WhichOneof("event") in _KINDS:
            self._box.append((time.time(), event))

    def tick(self, now_s: float) -> bool:
        """Update the state at ``now_s`` (monotonic); return whether anything changed."""
        changed = False
        while self._box:
            at_unix_s, event = self._box.popleft()
            self._take(event, at_unix_s)
            changed = True
        if now_s - self._asked_at_s >= _MIN_BETWEEN_S:
            self._asked_at_s = now_s
            for event in self._feed():
                self._take(event, None)
                changed = True
            changed |= self._note_members(self._ask_members())
        self.changes += changed
        return changed

    def _take(self, event: control_pb2.RunEvent, at_unix_s: float | None) -> None:
        try:
            self.state.take(event, at_unix_s)
        except Exception as error:  # of a damaged file, or another version: the others are shown
            told = str(error) if isinstance(error, RingTuneError) else f"{type(error).__name__} {error}"
            _LOG.warning("the page can't show an event of the run: %s", printable(told, most=300))

    def _note_members(self, members: Mapping[str, MemberStatus]) -> bool:
        if members == self.members:
            return False
        at_unix_s = time.time()
        for line in member_lines(self.members, members):
            self.state.tell(line._replace(at_unix_s=at_unix_s))
        self.members = dict(members)  # the one that is asked may go on changing its own
        self.state.show_members({node: list(facts) for node, facts in members.items()})
        return True


def member_lines(before: Mapping[str, MemberStatus], now: Mapping[str, MemberStatus]) -> list[EventLine]:
    """Describe nodes that joined, were lost, joined again or left."""
    lines = []
    for node in sorted(before.keys() | now.keys()):
        was, has = before.get(node), now.get(node)
        if has is None:
            lines.append(EventLine("left", f"node {node} left"))
            continue
        is_lost, was_lost = has.state == "lost", was is not None and was.state == "lost"
        if was is None:
            lines.append(EventLine("joined", f"node {node} joined"))
        if is_lost and not was_lost:  # one that is seen for the first time may be, too
            lines.append(EventLine("lost", f"node {node} is lost: it is silent"))
        elif was_lost and not is_lost:
            lines.append(EventLine("joined", f"node {node} is back"))
    return lines


MAX_STREAMS: Final = 64
"""Half of them of one address."""
SEND_S: Final = 20.0
"""Time limit of a browser for one frame."""
KEEP_ALIVE_S: Final = 15.0
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class Streams:
    """The open streams of all browsers.

    Args:
        send_s: time limit of a browser for one frame.

    Attributes:
        skipped: frames that slow browsers did not get, in total.
        closed: number of streams closed because the browser was too slow.
        open_of: open streams by address.
    """

    def __init__(self, page_data: PageData, *, send_s: float = SEND_S) -> None:
        self.page_data = page_data
        self.open = self.skipped = self.closed = 0
        self.open_of = Counter[str]()
        self._send_s = send_s
        self._changed = asyncio.Event()
        self._is_over = False

    def wake(self) -> None:
        """Make all streams check for changes."""
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self) -> None:
        """End all streams."""
        self._is_over = True
        self.wake()

    def has_place(self, address: str) -> bool:
        """Return whether one more stream may be opened by an address."""
        return self.open < MAX_STREAMS and self.open_of[address] < MAX_STREAMS // 2

    async def serve(self, run_id: str, address: str, receive: Receive, send: Send) -> None:
        """Send frames to one browser until it disconnects, is too slow, or the page ends.

        Args:
            run_id: the requested run; empty = the newest one.
            address: of the browser.
            receive: tells of the disconnection.
            send: sends to the browser.
        """
        self.open += 1
        self.open_of[address] += 1
        leaving = asyncio.ensure_future(_until_left(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._send_frames(run_id, send, leaving)
        except TimeoutError:
            self.closed += 1
            _LOG.info("a browser took no frame for %g s; its stream is closed, it may ask again", self._send_s)
        finally:
            self.open -= 1
            self.open_of[address] -= 1
            self.open_of += Counter()  # drops addresses without streams
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving

    async def _send_frames(self, run_id: str, send: Send, leaving: asyncio.Future[None]) -> None:
        seen, had = BrowserState(), self.page_data.changes
        while not leaving.done():
            changed, is_over = self._changed, self._is_over
            if run_id and self.page_data.state.run_id != run_id:
                await self._send(send, f"event: gone\ndata: {self.page_data.state.run_id}\n\n", more=False)
                return
            missed, had = max(0, self.page_data.changes - had - 1), self.page_data.changes
            if frame := self.page_data.framer.frame(seen):
                self.skipped += missed
                await self._send(send, f"data: {_with_skipped(frame, missed)}\n\n")
            if is_over:  # before this frame was made, so that it had everything
                await self._send(send, "event: bye\ndata: over\n\n", more=False)
                return
            if self.page_data.changes != had or self._is_over:
                continue
            waiting: asyncio.Future[Any] = asyncio.ensure_future(changed.wait())
            both: set[asyncio.Future[Any]] = {waiting, leaving}
            done, _ = await asyncio.wait(both, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not done:
                await self._send(send, ": still here\n\n")

    async def _send(self, send: Send, text: str, *, more: bool = True) -> None:
        message = {"type": "http.response.body", "body": text.encode(), "more_body": more}
        await asyncio.wait_for(send(message), self._send_s)


def _with_skipped(frame: str, missed: int) -> str:
    return f'{{"skipped":{missed},{frame[1:]}' if missed else frame


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
