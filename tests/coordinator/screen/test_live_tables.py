"""``ringtune nodes --watch``: the members again and again, until Ctrl-C."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from coordinator.screen.live_tables import INTERVAL_S, watch_nodes
from ringtune.errors import InterruptedRunError
from ringtune.v1 import control_pb2


def entry(state: str) -> control_pb2.NodeEntry:
    """A member."""
    return control_pb2.NodeEntry(joined=control_pb2.JoinRequest(node="pi"), state=state)


def test_node_watch_draws_the_table_again(capsys: pytest.CaptureFixture[str]) -> None:
    """The newest state stands there in the end, and between two looks it sleeps."""
    slept: list[float] = []
    states = iter(["idle", "running"])
    text = io.StringIO()
    console = Console(file=text, width=200, force_terminal=False)
    watch_nodes(
        lambda: [entry(next(states))], "c:1", as_json=False, console=console, sleep=slept.append, times=range(2)
    )
    assert "running" in text.getvalue().splitlines()[-1]
    assert slept == [INTERVAL_S, INTERVAL_S]
    assert capsys.readouterr().out == ""


def test_node_watch_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each member each time."""
    states = iter(["idle", "lost"])
    watch_nodes(lambda: [entry(next(states))], "c:1", as_json=True, sleep=lambda _: None, times=range(2))
    assert [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()] == ["idle", "lost"]


def test_node_watch_ends_with_ctrl_c() -> None:
    """As every command does, with exit code 130."""

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError):
        watch_nodes(lambda: [entry("idle")], "c:1", as_json=True, sleep=interrupt)
