"""The page as an ASGI application: files, state, frames, what-ifs, metrics, and limits of connections.

::

    GET  /              the page, and /static/... its parts: without data of a run, so without a token
    GET  /api/login     Authorization: Bearer TOKEN -> a cookie; only beyond this machine
    GET  /api/state     ?run=ID: the whole state
    GET  /api/stream    ?run=ID: the state and its changes as server-sent events
    POST /api/what-if   {"speeds": {node: factor}, "rates": {"a>b": factor}, "microbatches": n}
    GET  /metrics       metrics for Prometheus

Everything is read-only. A what-if has to be ``application/json``, which a foreign page can't send without a CORS
preflight.

Each connection must make a request within ``REQUEST_S``, and no address may have more than half of the connections:
otherwise idle connections would take all, and others would get 503. The server itself closes connections that are idle
after an answer (``timeout_keep_alive``), but none before its first request. Who does not read an answer within
``UNREAD_S`` is cut off: also a connection that is being closed lasts until its last byte is taken.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.web.metrics import CONTENT_TYPE, MetricsCollector
from coordinator.web.streams import MAX_STREAMS, BrowserState, Streams
from coordinator.web.what_if import SimulatorProcess
from ringtune.errors import BusyError, DeadlineError, RingTuneError, UsageError
from ringtune.texts import shown
from ringtune.transport.open_calls import address_of
from ringtune.transport.page_access import Guard

MAX_CONNECTIONS: Final = 256
MAX_OF_AN_ADDRESS: Final = 128
"""Half of all: an address may be a tunnel for several browsers, each with some connections."""
REQUEST_S: Final = 10.0
"""Time limit for line and headers of a request, from the connection or from their first byte."""
GOODBYE_S: Final = 1
"""Time limit of the last frames and answers, in whole seconds, when the server ends."""
UNREAD_S: Final = 30.0
"""Time limit of a reader for what was written; longer than that for a frame of a stream, which says why it ends."""


def http_server(app: ASGIApp) -> uvicorn.Server:
    """Make the server of an application, with limits of connections; ``serve`` runs it on a bound socket.

    It logs none of the answers that its end cuts off.
    """

    class Counted(_Connection):
        of_address: ClassVar[Counter[str]] = Counter()

    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=Counted,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=GOODBYE_S,
        )
    )


class _Connection(H11Protocol):
    of_address: ClassVar[Counter[str]]
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _address = ""

    def connection_made(self, transport: Any) -> None:
        """Accept a connection, unless its address has ``MAX_OF_AN_ADDRESS`` already."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that writing is paused until everything was taken
        self._address = address_of(f"ip:{(transport.get_extra_info('peername') or ('',))[0]}:0")
        self.of_address[self._address] += 1
        if self.of_address[self._address] > MAX_OF_AN_ADDRESS:
            transport.close()
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the count."""
        self._answer_begins()
        self._cancel_unread()
        self.of_address[self._address] -= 1
        if not self.of_address[self._address]:
            del self.of_address[self._address]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; a request has to be complete within ``REQUEST_S``."""
        super().data_received(data)
        if self._is_answering():
            self._answer_begins()
        else:
            self._await_request()

    def pause_writing(self) -> None:
        """Note that something was written that is not read yet."""
        super().pause_writing()
        self._cancel_unread()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Note that everything was read."""
        super().resume_writing()
        self._cancel_unread()

    def _cancel_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self._too_late)

    def _answer_begins(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._deadline = None
        if not self._is_answering():
            self.transport.close()


STATIC: Final = Path(__file__).parent / "static"
MAX_QUESTION_BYTES: Final = 8192
_STATUS: Final = ((UsageError, 400), (BusyError, 429), (DeadlineError, 504))
_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".txt": "text/plain"}
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def make_app(streams: Streams, asking: SimulatorProcess, guard: Guard) -> ASGIApp:
    """Make the application."""
    pages = _Pages(streams, asking, guard)
    files = {f"/static/{path.name}": path for path in sorted(STATIC.iterdir()) if path.suffix in _TYPES}
    files["/"] = STATIC / "index.html"
    routes = [
        *(Route(at, _file(path), methods=["GET"]) for at, path in files.items()),
        Route("/api/login", pages.guarded(pages.login), methods=["GET"]),
        Route("/api/state", pages.guarded(pages.state), methods=["GET"]),
        Route("/api/stream", pages.guarded(pages.stream), methods=["GET"]),
        Route("/api/what-if", pages.guarded(pages.what_if), methods=["POST"]),
        Route("/metrics", pages.guarded(pages.metrics), methods=["GET"]),
    ]
    return _Outside(Starlette(routes=routes), guard)


class _Outside:
    """Middleware that checks the host of each request and adds headers to every answer."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                ours = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *ours]}
            await send(message)

        refusal = self._guard.refuse_host(Request(scope).headers.get("host"))
        app = self._app if refusal is None else _problem(refusal.status, refusal.message)
        await app(scope, receive, send_with_headers)


class _Pages:
    def __init__(self, streams: Streams, asking: SimulatorProcess, guard: Guard) -> None:
        self._streams, self._asking, self._guard = streams, asking, guard
        self._figures = MetricsCollector(streams)

    def guarded(self, page: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler with the check of host and token."""

        async def answer(request: Request) -> Response:
            headers = request.headers
            refusal = self._guard.refuse(headers.get("host"), headers.get("authorization"), headers.get("cookie"))
            return await page(request) if refusal is None else _problem(refusal.status, refusal.message)

        return answer

    async def login(self, _: Request) -> Response:
        answer = Response(status_code=204)
        if not self._guard.is_local:
            name, value = self._guard.cookie_name, self._guard.cookie_value
            answer.set_cookie(name, value, httponly=True, samesite="strict", path="/")
        return answer

    async def state(self, request: Request) -> Response:
        if (gone := self._gone(request)) is not None:
            return gone
        frame = self._streams.page_data.framer.frame(BrowserState())
        return Response(frame, media_type="application/json", headers={"cache-control": "no-store"})

    async def stream(self, request: Request) -> Response:
        if (gone := self._gone(request)) is not None:
            return gone
        if not self._streams.has_place(address := _address(request)):
            most = f"{MAX_STREAMS} browsers, or {MAX_STREAMS // 2} of your address,"
            return _problem(503, f"{most} show this page already; close one of them")
        return _Stream(self._streams, request.query_params.get("run", ""), address)

    async def what_if(self, request: Request) -> Response:
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return _problem(403, "a what-if may be asked by this page only")
        try:
            question = await json_body(request, MAX_QUESTION_BYTES, "what-if")
        except HTTPException as error:
            return _problem(error.status_code, error.detail)
        try:
            return JSONResponse(
                await self._asking.ask(question, _address(request)), headers={"cache-control": "no-store"}
            )
        except RingTuneError as error:
            return _problem(next((status for kind, status in _STATUS if isinstance(error, kind)), 500), str(error))

    async def metrics(self, _: Request) -> Response:
        return Response(self._figures.text(), headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})

    def _gone(self, request: Request) -> Response | None:
        """Refuse a request for another run than the newest one."""
        run, has = request.query_params.get("run", ""), self._streams.page_data.state.run_id
        if not run or run == has:
            return None
        now = f"the page shows {has} now" if has else "there is no run yet"
        remedy = "if its files were written, 'ringtune page DIR' shows them"
        return _problem(404, f"run {shown(run)} is gone: {now}; {remedy}")


class _Stream(Response):
    def __init__(self, streams: Streams, run_id: str, address: str) -> None:
        self._streams, self._run_id, self._address = streams, run_id, address
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._streams.serve(self._run_id, self._address, receive, send)


async def json_body(request: Request, most_bytes: int, what: str) -> Any:
    """Read the JSON of a request, within ``REQUEST_S``; raises ``HTTPException`` for a wrong one, named ``what``."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, f"the {what} has to be sent as application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(REQUEST_S):
            async for piece in request.stream():
                body += piece
                if len(body) > most_bytes:
                    raise HTTPException(413, f"the {what} has at most {most_bytes:,} bytes; shorten it")
        return json.loads(body)
    except TimeoutError as error:
        raise HTTPException(408, f"the {what} was not here within {REQUEST_S:g} s") from error
    except ClientDisconnect as error:
        raise HTTPException(400, f"the {what} did not end") from error
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the {what} has to be JSON") from error


def _address(request: Request) -> str:
    return address_of(f"ip:{request.client.host if request.client else ''}:0")


def _problem(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status_code=status, headers={"cache-control": "no-store"})


def _file(path: Path) -> Callable[[Request], Awaitable[Response]]:
    media_type = _TYPES[path.suffix]

    async def answer(_: Request) -> Response:
        headers: dict[str, Any] = {"cache-control": "no-cache"}
        return FileResponse(path, media_type=media_type, headers=headers)

    return answer
