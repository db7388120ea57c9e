"""Tables: classes with what was taken for what, and the members that ``ringtune nodes --watch`` draws again."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from coordinator.screen.live_tables import INTERVAL_S, watch_nodes
from coordinator.screen.tables import class_lines
from ringtune.errors import InterruptedRunError
from ringtune.run_control.evaluation import class_figures
from ringtune.v1 import control_pb2


def test_class_text_shows_figures_and_counts() -> None:
    """Titles name the predicted classes; a class that nobody has is no line."""
    found = {**class_figures(((3, 1, 0), (0, 4, 0), (0, 0, 0)), ("neg", "pos", "odd")), "count": 8}
    assert class_lines({**found, "count": 10})[-1].startswith("classes are counted on 8 of 10 rows")
    assert class_lines(found) == [
        "  class  rows  precision  recall      F1  as neg  as pos  as odd",
        "  neg       4     1.0000  0.7500  0.8571       3       1       0",
        "  pos       4     0.8000  1.0000  0.8889       0       4       0",
        "Matthews correlation of true and predicted classes: 0.7746",
    ]
    assert class_lines({"accuracy": 0.5}) == []


def test_class_text_shows_the_worst_of_many_classes() -> None:
    """Thirty lines at most, without counts, and a word about the others."""
    labels = [f"c{index}" for index in range(40)]
    table = tuple(tuple(index if index == other else 1 for other in range(40)) for index in range(40))
    lines = class_lines({**class_figures(table, labels), "count": sum(map(sum, table))})
    assert len(lines) == 33 and lines[0].endswith("F1") and lines[1].split()[0] == "c0"
    assert lines[-2] == "and 10 classes with a higher F1; report.json has them"


def entry(state: str) -> control_pb2.NodeEntry:
    """A member."""
    return control_pb2.NodeEntry(joined=control_pb2.JoinRequest(node="pi"), state=state)


def _sleeps(monkeypatch: pytest.MonkeyPatch, times: int) -> list[float]:
    """Let the watch sleep without waiting, and Ctrl-C come in the last sleep; return the seconds."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == times:
            raise KeyboardInterrupt

    monkeypatch.setattr("coordinator.screen.live_tables.time.sleep", sleep)
    return slept


def test_node_watch_draws_the_table_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest state stands there in the end, and between two looks it sleeps."""
    states, text, slept = iter(["idle", "running"]), io.StringIO(), _sleeps(monkeypatch, 2)
    console = Console(file=text, width=200, force_terminal=False)
    with pytest.raises(InterruptedRunError):
        watch_nodes(lambda: [entry(next(states))], "c:1", as_json=False, console=console)
    assert "running" in text.getvalue().splitlines()[-1]
    assert slept == [INTERVAL_S, INTERVAL_S]
    assert capsys.readouterr().out == ""


def test_node_watch_prints_json_until_ctrl_c(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each member each time."""
    states = iter(["idle", "lost"])
    _sleeps(monkeypatch, 2)
    with pytest.raises(InterruptedRunError):
        watch_nodes(lambda: [entry(next(states))], "c:1", as_json=True)
    assert [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()] == ["idle", "lost"]
