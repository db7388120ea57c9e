"""Prometheus exporter of one node, at an address of its own: ``ringtune node --metrics HOST:PORT``.

Each connection has one request, which has to be read and answered within ``REQUEST_S``. On loopback no token is needed;
elsewhere one is, as ``Authorization: Bearer TOKEN``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from ringtune import __version__
from ringtune.errors import ConnectionFailedError, UsageError
from ringtune.hints import hint_to_install
from ringtune.transport.endpoints import is_loopback, join_address, split_address
from ringtune.transport.open_calls import address_of
from ringtune.transport.page_access import Guard, token_of

_LOG = logging.getLogger(__name__)
_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_S: Final = 5.0
"""Time limit of a connection, for its request and for taking the answer."""
MAX_CONNECTIONS: Final = 64
"""Half of them of one address."""
_MAX_REQUEST_BYTES: Final = 8192


class NodeMetrics(NamedTuple):
    """Current figures of a node.

    Attributes:
        budget_bytes: memory that a run may use.
        sent_bytes: payload bytes of the run by receiver.
    """

    node: str
    run_id: str
    rss_bytes: int
    budget_bytes: int
    actions: int
    busy_s: float
    sent_bytes: dict[str, int]


def require_metrics() -> None:
    """Refuse to serve metrics without the Prometheus library; raises ``UsageError``."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError(f"--metrics needs prometheus_client, not installed here; {hint_to_install('web')}")


def figures_text(figures: NodeMetrics) -> bytes:
    """Return figures in the text format of Prometheus."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
    from prometheus_client.registry import Collector

    class _Now(Collector):
        def collect(self) -> Iterator[Metric]:
            labels = {"node": figures.node, "run_id": figures.run_id, "version": __version__}
            yield InfoMetricFamily("ringtune_node", "This node.", value=labels)
            of_node: dict[str, Any] = {"labels": ["node"]}
            for name, text, value in (
                ("ringtune_node_rss_bytes", "Resident memory of the node.", figures.rss_bytes),
                ("ringtune_node_budget_bytes", "Memory that a run may use.", figures.budget_bytes),
                ("ringtune_node_running", "1 = it works on a run, 0 = it does not.", int(bool(figures.run_id))),
            ):
                gauge = GaugeMetricFamily(name, text, **of_node)
                gauge.add_metric([figures.node], value)
                yield gauge
            for name, text, count in (
                ("ringtune_node_actions", "Compute actions of the run.", float(figures.actions)),
                ("ringtune_node_busy_seconds", "Seconds of the run's compute actions.", figures.busy_s),
                ("ringtune_node_cpu_seconds", "Processor seconds of the process.", time.process_time()),
            ):
                counter = CounterMetricFamily(name, text, **of_node)
                counter.add_metric([figures.node], count)
                yield counter
            sent = CounterMetricFamily("ringtune_node_sent_bytes", "Payload bytes.", labels=["node", "target"])
            for target, num_bytes in sorted(figures.sent_bytes.items()):
                sent.add_metric([figures.node, target], num_bytes)
            yield sent

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Now())
    return generate_latest(registry)


class MetricsServer:
    """Serves the figures of a node inside its context.

    Args:
        token_file: has the token for other machines; None = a new one.

    Raises:
        UsageError: the library is missing, or ``bind`` is no address.
        ConnectionFailedError: the address can't be bound.
    """

    def __init__(self, bind: str, figures: Callable[[], NodeMetrics], *, token_file: Path | None = None) -> None:
        require_metrics()
        host, port = split_address(bind, option="--metrics", example="127.0.0.1:9100")
        is_local = is_loopback(bind)
        token = "" if is_local else token_of(token_file)
        is_six = ":" in host
        try:
            self._socket = socket.create_server(
                (host, port),
                family=socket.AF_INET6 if is_six else socket.AF_INET,
                dualstack_ipv6=is_six and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            reason = error.strerror or error
            raise ConnectionFailedError(f"can't listen on {bind}: {reason}; take another --metrics") from error
        port = self._socket.getsockname()[1]
        self.address, self.guard = join_address(host, port), Guard(is_local, token, port)
        self._connections: set[_Connection] = set()
        self._figures = figures
        self._loop, self._over = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="node-figures", daemon=True)

    def line(self) -> str:
        """Text with the address of the figures, and the token."""
        token = f", with the token {self.guard.token}" if self.guard.token else ""
        return f"figures for Prometheus: http://{self.address}/metrics{token}"

    def __enter__(self) -> MetricsServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(REQUEST_S)
        self._socket.close()

    # ---- the server's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await self._loop.create_server(lambda: _Connection(self), sock=self._socket)
        await self._over.wait()
        server.close()
        for connection in self._connections:
            connection.transport.abort()

    def admit(self, connection: _Connection) -> bool:
        """Count a connection until ``forget``, if there is a place for it; return whether there is one."""
        of_address = sum(other.address == connection.address for other in self._connections)
        has_place = len(self._connections) < MAX_CONNECTIONS and of_address < MAX_CONNECTIONS // 2
        if has_place:
            self._connections.add(connection)
        return has_place

    def forget(self, connection: _Connection) -> None:
        """Count a connection no more."""
        self._connections.discard(connection)

    def answer(self, request: bytes) -> bytes:
        """Return the answer to a request."""
        return _Answer(request, self.guard, self._figures).content


class _Connection(asyncio.Protocol):
    """A connection with one request."""

    transport: asyncio.Transport
    _deadline: asyncio.TimerHandle

    def __init__(self, server: MetricsServer) -> None:
        self._server = server
        self._request, self.address = b"", ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.address = address_of(f"ip:{(transport.get_extra_info('peername') or ('',))[0]}:0")
        self._deadline = asyncio.get_running_loop().call_later(REQUEST_S, self.transport.abort)
        if not self._server.admit(self):
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self._server.forget(self)

    def data_received(self, data: bytes) -> None:
        self._request += data
        if b"\r\n\r\n" in self._request:
            try:
                self.transport.write(self._server.answer(self._request))
            except Exception:
                _LOG.info("a request for figures from %s was not answered", self.address, exc_info=True)
            self.transport.close()  # once all is taken
        elif len(self._request) > _MAX_REQUEST_BYTES:
            self.transport.abort()


class _Answer(BaseHTTPRequestHandler):
    """The answer to one request that was read.

    Attributes:
        content: bytes of the answer.
    """

    server_version, sys_version = "ringtune", ""

    def __init__(self, request: bytes, guard: Guard, figures: Callable[[], NodeMetrics]) -> None:
        self._guard, self._figures = guard, figures
        self.rfile, self.wfile = BytesIO(request), BytesIO()
        self.handle_one_request()
        self.content = self.wfile.getvalue()

    def do_GET(self) -> None:
        headers = self.headers
        refusal = self._guard.refuse(headers.get("host"), headers.get("authorization"), None)
        if refusal is not None:
            self._answer(refusal.status, f"{refusal.message}\n".encode())
        elif self.path.partition("?")[0] == "/metrics":
            self._answer(200, figures_text(self._figures()))
        else:
            self._answer(404, b"there is /metrics here\n")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", _CONTENT_TYPE)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-content-type-options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the library calls it
        """Log no requests."""
