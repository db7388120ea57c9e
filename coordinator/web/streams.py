"""Server-sent events: a browser asks once, and gets a frame whenever something has changed and it can take one.

Nothing is queued for a browser. A frame is made when the one before has left for the network; meanwhile the state goes
on, and the next frame says how many changes were skipped. One that takes nothing for ``SEND_S`` is let go; it asks
again by itself and gets a whole state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

from coordinator.web.frames import Seen
from coordinator.web.watching import Watching

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_LOG = logging.getLogger(__name__)
MOST_STREAMS: Final = 64
SEND_S: Final = 20.0
"""How long a browser may take for one frame."""
KEEP_ALIVE_S: Final = 15.0
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class Streams:
    """Gives all browsers their frames.

    Args:
        watching: what is shown.
        send_s: how long a browser may take for one frame.

    Attributes:
        open: how many browsers there are.
        skipped: frames that browsers did not get because they were slow, all of them together.
        closed: browsers that were let go.
    """

    def __init__(self, watching: Watching, *, send_s: float = SEND_S) -> None:
        self.watching = watching
        self.open = self.skipped = self.closed = 0
        self._send_s = send_s
        self._changed = asyncio.Event()
        self._is_over = False

    def wake(self) -> None:
        """Let all streams look for what has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self) -> None:
        """Say goodbye to all browsers."""
        self._is_over = True
        self.wake()

    async def serve(self, run_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Send frames to one browser until it leaves, falls too far behind, or the page ends.

        Args:
            run_id: the run that it asked for; empty = the newest one.
            scope: of the request; unused.
            receive: says when the browser leaves.
            send: sends to it.
        """
        self.open += 1
        leaving = asyncio.ensure_future(_until_left(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._send_frames(run_id, send, leaving)
        except TimeoutError:
            self.closed += 1
            _LOG.info("a browser took no frame for %g s; its stream is closed, it may ask again", self._send_s)
        finally:
            self.open -= 1
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving

    async def _send_frames(self, run_id: str, send: Send, leaving: asyncio.Future[None]) -> None:
        seen, had = Seen(), self.watching.changes
        while not leaving.done():
            changed, is_over = self._changed, self._is_over
            if run_id and self.watching.state.run_id != run_id:
                await self._send(send, f"event: gone\ndata: {self.watching.state.run_id}\n\n", more=False)
                return
            missed, had = max(0, self.watching.changes - had - 1), self.watching.changes
            if frame := self.watching.framer.frame(seen):
                self.skipped += missed
                await self._send(send, f"data: {_with_skipped(frame, missed)}\n\n")
            if is_over:  # before this frame was made, so that it had everything
                await self._send(send, "event: bye\ndata: over\n\n", more=False)
                return
            if self.watching.changes != had or self._is_over:
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
