"""Tables without pandas: columns, rows, slices, text."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from coordinator.api.table import Metrics, Table
from ringtune.errors import RingTuneError, UsageError

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
