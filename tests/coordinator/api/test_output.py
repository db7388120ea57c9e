"""Progress in a notebook, and tables without pandas: columns, rows, slices, text."""

from __future__ import annotations

import io
import sys
import types
from typing import Any

import pytest

from coordinator.api.output import Metrics, NotebookProgress, Table, choose_progress, is_notebook
from coordinator.screen.progress import PlainProgress, Progress
from ringtune.errors import RingTuneError, UsageError


def step(number: int, **more: object) -> dict[str, Any]:
    """The numbers of a step."""
    line = {"kind": "train", "step": number, "num_steps": 20, "round": 1, "initiator": "a", "depth": 1, "loss": 0.5}
    return {**line, **more}


def test_notebook_shows_steps_on_one_line() -> None:
    """Each is written over the one before, however short; a note stands above, on a line of its own."""
    stream = io.StringIO()
    progress = NotebookProgress(stream)
    progress.note("training ...")
    progress.step(step(9, initiator="a-long-name"))
    progress.step(step(10))
    progress.note("saved")
    progress.step(step(8))
    long, short = (
        "step 9/20: round 1, a-long-name, depth 1, loss 0.5000",
        "step 10/20: round 1, a, depth 1, loss 0.5000",
    )
    wiped = "\r" + " " * len(long) + "\r"
    assert stream.getvalue() == f"training ...\n\r{long}\r{short.ljust(len(long))}{wiped}saved\n"


def test_notebook_is_known_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython on a terminal has none, and where it is not loaded it is not asked."""
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert not is_notebook()
    for shell, found in ((None, False), (types.SimpleNamespace(), False), (types.SimpleNamespace(kernel=1), True)):
        fake: Any = types.ModuleType("IPython")
        fake.get_ipython = lambda shell=shell: shell
        monkeypatch.setitem(sys.modules, "IPython", fake)
        assert is_notebook() is found
    assert isinstance(choose_progress(True), NotebookProgress)


def test_progress_that_is_not_wanted_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise plain lines where there is no terminal."""
    monkeypatch.setitem(sys.modules, "IPython", None)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert type(choose_progress(False)) is Progress
    assert type(choose_progress(True)) is PlainProgress


ROWS: list[dict[str, Any]] = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None, "note": "x"}]


def test_table_gives_rows_columns_and_slices() -> None:
    """A value that a row lacks is None; columns keep the order in which they come."""
    table = Table(ROWS)
    assert table.columns == ("step", "loss", "note")
    assert (table["loss"], table["note"]) == ([0.5, None], [None, "x"])
    assert table[0] == ROWS[0] and table[-1:] == Table(ROWS[1:]) and list(table) == ROWS
    assert len(Table([])) == 0 and Table([]).columns == ()


def test_table_refuses_a_column_that_there_is_not() -> None:
    """The message lists those that there are."""
    with pytest.raises(UsageError, match="no column 'los'; there are step, loss, note"):
        Table(ROWS)["los"]
    with pytest.raises(IndexError):
        Table(ROWS)[2]


def test_table_prints_itself_without_its_middle() -> None:
    """Twenty rows are shown whole, of more the first and the last ten."""
    assert repr(Table(ROWS)).splitlines() == ["step  loss  note", "1      0.5     -", "2        -     x", "(2 rows)"]
    lines = repr(Table([{"n": number} for number in range(100)])).splitlines()
    assert [line.strip() for line in lines] == [
        "n",
        *map(str, range(10)),
        "...",
        *map(str, range(90, 100)),
        "(100 rows)",
    ]
    assert repr(Table([])) == "(no rows)"


def test_table_becomes_a_frame_where_pandas_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded only then, and its lack is said."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RingTuneError, match="needs the package 'pandas'"):
        Table(ROWS).to_pandas()
    fake: Any = types.ModuleType("pandas")
    fake.DataFrame = lambda rows, columns: (rows, columns)
    monkeypatch.setitem(sys.modules, "pandas", fake)
    assert Table(ROWS).to_pandas() == (ROWS, ["step", "loss", "note"])


def test_metrics_are_the_steps_and_know_the_rest() -> None:
    """A kind that the run has not noted gives no rows."""
    metrics = Metrics(ROWS, [{"kind": "evaluation", "loss": 0.4}, {"kind": "unfreeze", "depth": 2}])
    assert metrics.kinds == ("evaluation", "unfreeze")
    assert metrics["step"] == [1, 2]
    assert metrics.of("evaluation")["loss"] == [0.4]
    assert len(metrics.of("replan")) == 0
