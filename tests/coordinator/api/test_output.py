"""What a notebook shows: progress, tables without pandas, and the picture of a run."""

from __future__ import annotations

import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.output import Metrics, NotebookProgress, Table, choose_progress, is_notebook
from coordinator.api.run import draw_losses, smoothed, unfreezings
from coordinator.screen.progress import PlainProgress, Progress
from ringtune.errors import RingTuneError, UsageError
from ringtune.storage.durable import mark


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
    # Otherwise plain lines where there is no terminal
    monkeypatch.setitem(sys.modules, "IPython", None)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert type(choose_progress(False)) is Progress
    assert type(choose_progress(True)) is PlainProgress


ROWS: list[dict[str, Any]] = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None, "note": "x"}]


def test_table_gives_rows_columns_slices_and_a_text() -> None:
    """A value that a row lacks is None; columns keep the order in which they come."""
    table = Table(ROWS)
    assert table.columns == ("step", "loss", "note")
    assert (table["loss"], table["note"]) == ([0.5, None], [None, "x"])
    assert table[0] == ROWS[0] and table[-1:] == Table(ROWS[1:]) and list(table) == ROWS
    assert len(Table([])) == 0 and Table([]).columns == ()
    # The message lists those that there are
    with pytest.raises(UsageError, match="no column 'los'; there are step, loss, note"):
        Table(ROWS)["los"]
    with pytest.raises(IndexError):
        Table(ROWS)[2]
    # Twenty rows are shown whole, of more the first and the last ten
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


STEPS = [{"step": number, "loss": 1.0 / number, "depth": 1 + number // 3} for number in range(1, 8)]
EVALUATIONS = [{"step": 7, "loss": 0.2}]


def test_plot_reads_as_a_summary_and_has_whole_steps() -> None:
    """Printed it says what is seen: first, last and mean loss, the lowest evaluation, the depths; ticks are steps."""
    plot = draw_losses(STEPS, [{"step": 3, "loss": 0.1}, *EVALUATIONS], title="run-1")
    assert repr(plot).splitlines()[:3] == [
        "run-1: loss 1.0000 at step 1, 0.1429 at step 7, mean of the last 7 steps 0.3704",
        "evaluation: loss 0.2000 at step 7, the lowest 0.1000 at step 3",
        "more blocks train: depth 2 from step 3, depth 3 from step 6",
    ]
    (axes,) = plot.figure.axes
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    # The depth of the first step is no change; a step that came late counts once
    assert unfreezings(STEPS) == [(3, 2), (6, 3)]
    assert unfreezings([*STEPS, STEPS[0]]) == [(3, 2), (6, 3)]
    assert unfreezings([]) == []
    # At the beginning over as many as there are
    assert smoothed([1.0, 3.0]) == [1.0, 2.0]
    assert smoothed([float(value) for value in range(20)])[-1] == sum(range(10, 20)) / 10


def test_plot_has_losses_evaluations_and_depths(tmp_path: Path) -> None:
    """Three lines with data, two that mark depths; the same run gives the same file."""
    plot = draw_losses(STEPS, EVALUATIONS, title="run-1")
    (axes,) = plot.figure.axes
    drawn = [line.get_xydata().tolist() for line in axes.lines]
    assert drawn[0] == [[row["step"], row["loss"]] for row in STEPS]
    assert drawn[2] == [[7.0, 0.2]]
    assert [line[0][0] for line in drawn[3:]] == [3.0, 6.0]
    assert [text.get_text() for text in axes.texts] == ["depth 2", "depth 3"]
    again = draw_losses(STEPS, EVALUATIONS, title="run-1").save(tmp_path / "b.svg")
    assert plot.save(tmp_path / "a.svg").read_bytes() == again.read_bytes()
    assert b"depth 2" in again.read_bytes()
    assert plot._repr_png_().startswith(b"\x89PNG")


def test_plot_refuses_what_it_can_not_draw(tmp_path: Path) -> None:
    """A run without steps, and a picture of another kind."""
    with pytest.raises(UsageError, match="nothing to plot"):
        draw_losses([{**STEPS[0], "loss": None}], [], title="x")
    with pytest.raises(UsageError, match=r"has to end in \.png or \.svg"):
        draw_losses(STEPS, [], title="x").save(tmp_path / "a.pdf")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot_is_saved_over_an_earlier_one_only(ending: str, tmp_path: Path) -> None:
    """Also over one that had other losses, in a run's folder too; a picture of the user's stays as it is."""
    loss, mine = tmp_path / f"loss.{ending}", tmp_path / f"mine.{ending}"
    mark(tmp_path, "run")
    draw_losses(STEPS[:3], [], title="run-1").save(loss)
    before = loss.read_bytes()
    plot = draw_losses(STEPS, EVALUATIONS, title="run-1")
    assert plot.save(loss).read_bytes() != before
    plot.figure.savefig(mine)
    before = mine.read_bytes()
    with pytest.raises(UsageError, match=rf"mine\.{ending} is there already and is no picture drawn by ringtune; give"):
        plot.save(mine)
    assert mine.read_bytes() == before
