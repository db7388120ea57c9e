"""Prometheus exporter of one node, at an address of its own: ``ringtune node --metrics HOST:PORT``.

One thread answers requests one after another, each within a few seconds. On loopback no token is needed; elsewhere one
is, as ``Authorization: Bearer TOKEN``.
"""

from __future__ import annotations

import importlib.util
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple

from ringtune import __version__
from ringtune.errors import ConnectionFailedError, UsageError
from ringtune.hints import hint_to_install
from ringtune.transport.endpoints import is_loopback, join_address, split_address
from ringtune.transport.page_access import Guard, token_of

_LOG = logging.getLogger(__name__)
_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_REQUEST_S: Final = 5.0
_POLL_S: Final = 0.2


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
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            reason = error.strerror or error
            raise ConnectionFailedError(f"can't listen on {bind}: {reason}; take another --metrics") from error
        self.address = join_address(host, self._server.server_address[1])
        self.guard = self._server.guard = Guard(is_local, token, self._server.server_address[1])
        self._server.figures = figures
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="node-figures", daemon=True
        )

    def line(self) -> str:
        """Text with the address of the figures, and the token."""
        token = f", with the token {self.guard.token}" if self.guard.token else ""
        return f"figures for Prometheus: http://{self.address}/metrics{token}"

    def __enter__(self) -> MetricsServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(_REQUEST_S)
        self._server.server_close()


class _Server(HTTPServer):
    guard: Guard
    figures: Callable[[], NodeMetrics]

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log clients that disconnect, and continue."""
        _LOG.info("a request for figures from %s was not answered", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_S
    server_version, sys_version = "ringtune", ""

    def do_GET(self) -> None:
        headers = self.headers
        refusal = self.server.guard.refuse(headers.get("host"), headers.get("authorization"), None)
        if refusal is not None:
            self._answer(refusal.status, f"{refusal.message}\n".encode())
        elif self.path.partition("?")[0] == "/metrics":
            self._answer(200, figures_text(self.server.figures()))
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
