"""Figures of a node for Prometheus, over real connections."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge.agent import node_metrics
from edge.agent.node_metrics import MetricsServer, NodeMetrics, figures_text, require_metrics
from ringtune.errors import ConnectionFailedError, UsageError
from ringtune.transport.endpoints import split_address

FIGURES = NodeMetrics("pi", "r1", 7, 9, 3, 1.5, {"b": 100})


def get(address: str, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    """Status and text of an answer."""
    request = urllib.request.Request(f"http://{address}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_figures_text_has_the_nodes_figures() -> None:
    """Names with units, and the node as a label."""
    found = {
        (one.name, one.labels.get("target", "")): one.value
        for family in text_string_to_metric_families(figures_text(FIGURES).decode())
        for one in family.samples
    }
    assert found["ringtune_node_rss_bytes", ""] == 7
    assert found["ringtune_node_running", ""] == 1
    assert found["ringtune_node_busy_seconds_total", ""] == 1.5
    assert found["ringtune_node_sent_bytes_total", "b"] == 100


def test_figures_server_answers_on_loopback() -> None:
    """With the figures at this moment, and with nothing else."""
    with MetricsServer("127.0.0.1:0", lambda: FIGURES) as server:
        status, text = get(server.address)
        assert (status, "ringtune_node_rss_bytes" in text) == (200, True)
        assert get(server.address, "/etc/passwd")[0] == 404
        assert get(server.address, Host="evil.example")[0] == 421
        assert "token" not in server.line()


def test_figures_server_elsewhere_asks_for_the_token(tmp_path: Path) -> None:
    """It stands in the file that Prometheus can be given, too."""
    with MetricsServer("0.0.0.0:0", lambda: FIGURES, token_file=tmp_path / "token") as server:
        at = server.address.replace("0.0.0.0", "127.0.0.1")  # noqa: S104
        assert get(at)[0] == 401
        assert get(at, Authorization="Bearer wrong")[0] == 401
        assert get(at, Authorization=f"Bearer {(tmp_path / 'token').read_text()}")[0] == 200


def connected(server: MetricsServer, first: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    """A connection to the server that has sent some bytes."""
    made = socket.create_connection(split_address(server.address, option=""), timeout=30, source_address=(source, 0))
    made.sendall(first)
    return made


@pytest.mark.promise("6 every wait ends")
def test_figures_server_waits_for_nobody_who_sends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who hangs up, is silent or sends a part delays no other one and not the end, and is cut off after its time."""
    with MetricsServer("127.0.0.1:0", lambda: FIGURES) as server:
        connected(server).close()
        with connected(server) as silent, connected(server, b"GET /metrics HT") as slow:
            assert get(server.address)[0] == 200
            for waiting in (silent, slow):
                waiting.setblocking(False)
                with pytest.raises(BlockingIOError):  # its time is not over
                    waiting.recv(1)
        monkeypatch.setattr(node_metrics, "REQUEST_S", 0.05)
        with connected(server) as silent, connected(server, b"GET /metrics HT") as slow:
            assert (silent.recv(1), slow.recv(1)) == (b"", b"")
        monkeypatch.setattr(node_metrics, "REQUEST_S", 30.0)
        with connected(server, b"x" * 50_000) as long, contextlib.suppress(ConnectionResetError):
            assert long.recv(1) == b""
        open_at_the_end = connected(server, b"GET /metrics HT")
        assert get(server.address)[0] == 200  # so that the one before is accepted
    with open_at_the_end:
        assert open_at_the_end.recv(1) == b""


def test_figures_server_gives_no_address_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection beyond an address's share is closed unanswered; another address is served."""
    monkeypatch.setattr(node_metrics, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(node_metrics, "REQUEST_S", 30.0)
    with MetricsServer("127.0.0.1:0", lambda: FIGURES) as server:
        request = f"GET /metrics HTTP/1.1\r\nhost: {server.address}\r\n\r\n".encode()
        with connected(server), connected(server) as beyond, connected(server, request, "127.0.0.2") as other:
            assert beyond.recv(1) == b""
            assert other.recv(12) == b"HTTP/1.0 200"


def test_figures_server_at_a_taken_address_says_so() -> None:
    """With the option to change."""
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConnectionFailedError, match="take another --metrics"),
    ):
        MetricsServer(f"127.0.0.1:{taken.getsockname()[1]}", lambda: FIGURES)


def test_figures_without_the_library_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that shows none needs none."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"\[web\]"):
        require_metrics()
