"""Server of the page, on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from coordinator.web.streams import PageData, Streams
from coordinator.web.what_if import SimulatorProcess
from ringtune.errors import ConnectionFailedError, UsageError
from ringtune.hints import hint_to_install
from ringtune.transport.endpoints import is_loopback, is_wildcard, join_address, machine_address, split_address
from ringtune.transport.page_access import Guard, token_of

if TYPE_CHECKING:
    import uvicorn

_LOG = logging.getLogger(__name__)
TICK_S: Final = 0.25
_START_S: Final = 60.0
_END_S: Final = 5.0
_MODULES: Final = ("starlette", "uvicorn", "prometheus_client")


def require_web(what: str = "the page") -> None:
    """Refuse to serve without the web libraries; raises ``UsageError``."""
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{what} needs {', '.join(missing)}, not installed here; {hint_to_install('web')}")


class PageServer:
    """The page, served in the context.

    Args:
        bind: ``host:port``; port 0 = any free one.
        token_file: the token for other machines; None = a new one.

    Raises:
        UsageError: the libraries are missing, or ``bind`` is no address.
        ConnectionFailedError: the address can't be bound.
        StorageError: the token can't be read or written.
    """

    def __init__(self, page_data: PageData, bind: str, *, token_file: Path | None = None) -> None:
        require_web()
        self.page_data = page_data
        host, port = split_address(bind, option="--web", example="127.0.0.1:7080")
        self._socket = bound(host, port, bind, what="the page", option="--web")
        self.address = join_address(host, self._socket.getsockname()[1])
        is_local = is_loopback(self.address)
        try:
            token = "" if is_local else token_of(token_file)
        except BaseException:
            self._socket.close()
            raise
        self._guard = Guard(is_local, token, self._socket.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._server: uvicorn.Server | None = None
        self._streams: Streams | None = None
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)

    @property
    def url(self) -> str:
        """The URL of the page, with the token where one is needed."""
        at = self.address
        if is_wildcard(at):
            at = join_address(machine_address() or "localhost", self._guard.port)
        return f"http://{at}/" + (f"#token={self._guard.token}" if self._guard.token else "")

    def lines(self) -> list[str]:
        """Lines with the URL for the terminal."""
        lines = [f"page: {self.url}"]
        if self._guard.token:
            lines.append("the page is plain HTTP: who can listen on that network can read it; an SSH tunnel hides it")
        return lines

    def __enter__(self) -> PageServer:
        """Start to serve; raises ``ConnectionFailedError``."""
        self._thread.start()
        if not self._ready.wait(_START_S):
            raise ConnectionFailedError(f"the page did not begin to listen at {self.address} within {_START_S:g} s")
        return self

    def __exit__(self, *_: object) -> None:
        """Send the last events, end all streams, and close the socket."""
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(_END_S)
        self._socket.close()

    # ---- the page's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        from coordinator.web.app import http_server, make_app

        self._streams = Streams(self.page_data)
        asking = SimulatorProcess(self.page_data.state)
        self._server = http_server(make_app(self._streams, asking, self._guard))
        ticking = asyncio.ensure_future(self._tick(self._streams))
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
            await asking.close()

    async def _tick(self, streams: Streams) -> None:
        while True:
            if self._server is not None and self._server.started:
                self._ready.set()
            try:
                if self.page_data.tick(time.monotonic()):
                    streams.wake()
            except Exception:  # the page keeps its state
                _LOG.exception("the page could not be brought up to date")
            await asyncio.sleep(TICK_S if self._ready.is_set() else 0.01)

    def _end(self) -> None:
        self.page_data.tick(time.monotonic())
        if self._streams is not None:
            self._streams.end()
        if self._server is not None:
            self._server.should_exit = True


def bound(host: str, port: int, bind: str, *, what: str, option: str) -> socket.socket:
    """Listen on an address; raises ``ConnectionFailedError``, which says for what, and names the option."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(128)
    except OSError as error:
        made.close()
        reason = error.strerror or error
        raise ConnectionFailedError(f"can't listen on {bind} for {what}: {reason}; take another {option}") from error
    return made
