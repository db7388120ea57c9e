"""Figures of a node for Prometheus, over real connections."""

from __future__ import annotations

import importlib.util
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge.agent.node_metrics import MetricsServer, NodeMetrics, figures_text, require_metrics
from ringtune.errors import ConnectionFailedError, UsageError

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


def test_figures_server_goes_on_after_one_who_hangs_up() -> None:
    """A connection that says nothing does not stop the next one."""
    with MetricsServer("127.0.0.1:0", lambda: FIGURES) as server:
        host, _, port = server.address.rpartition(":")
        socket.create_connection((host, int(port))).close()
        assert get(server.address)[0] == 200


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
