"""``ringtune what-if --sweep``: a cell for each combination, files and pictures, the same for any number of workers."""

from __future__ import annotations

import csv
import io
import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.api import prediction_text
from coordinator.planner.what_if import CellResult, WhatIf
from coordinator.screen.progress import shown_cells
from ringtune.errors import StorageError
from ringtune.storage import durable
from sim.prediction import predict
from sim.sweep import parse_axis
from tests.support.predictions import PLAN, PROFILE, asked, ringtune, tiny_job
from tests.support.processes import source_environment

EXPECTED = predict(PLAN, PROFILE)
GRID = ("--sweep", "bob.compute=0.5:2:4", "--sweep", "microbatches=1,2", "--jobs", "1")


def test_sweep_has_a_cell_for_every_combination(pair: tuple[str, ...], tmp_path: Path) -> None:
    """Each is the answer to its own question, with the axes beside it; a file has the same, to the last digit."""
    value = asked(*pair, *GRID, "--csv", tmp_path / "sweep.csv")
    with (tmp_path / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [{**row, "wall_s": float(row["wall_s"])} for row in rows] == [
        {key: text if key == "wall_s" else str(text) for key, text in cell.items()} for cell in value["cells"]
    ]
    assert value["event"] == "sweep"
    assert value["axes"] == {"bob.compute": ["0.5", "1", "1.5", "2"], "microbatches": ["1", "2"]}
    assert [(cell["bob.compute"], cell["microbatches"]) for cell in value["cells"]] == [
        (speed, parts) for speed in ("0.5", "1", "1.5", "2") for parts in ("1", "2")
    ]
    alone = asked(*pair, "--change", "bob.compute=1.5", "--change", "microbatches=1")["after"]
    cell = value["cells"][4]
    assert (cell["wall_s"], cell["rows_per_s"]) == (alone["wall_s"], alone["rows_per_s"])
    assert (cell["fullest_node"], cell["fullest_share"]) == (alone["fullest_node"], alone["fullest_share"])
    same = value["cells"][3]
    assert (same["wall_s"], same["ratio"]) == (EXPECTED.wall_s, 1.0)


def test_sweep_of_keys_of_a_job_names_the_soonest_and_how_to_set_it(pair: tuple[str, ...]) -> None:
    """What the plan has already, and a speed that nobody chooses, are no advice."""
    swept = (*pair, "--jobs", "1")
    said = ringtune("what-if", *swept, "--sweep", "microbatches=1,2,4").stdout.splitlines()
    cells = asked(*swept, "--sweep", "microbatches=1,2,4")["cells"]
    best = min(cells, key=lambda cell: cell["wall_s"])
    assert best["ratio"] < 0.98
    setting = f"microbatches = {best['microbatches']}"
    assert said[-1] == f"soonest: {setting}, {best['ratio']:.3f} of the time; set train.{setting}"
    for other in (["microbatches=2,4"], ["bob.compute=1,2"], ["bob.compute=1,2", "microbatches=2,4"]):
        options = [word for axis in other for word in ("--sweep", axis)]
        assert "soonest" not in ringtune("what-if", *swept, *options).stdout


def test_sweep_that_is_stopped_shows_and_writes_what_is_done(
    pair: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C in the third cell: two lines in table and file, what is missing is said, and the exit code is 130."""
    done = WhatIf.__call__
    asked_for: list[object] = []

    def third_is_stopped(self: WhatIf, more: Sequence[str]) -> CellResult:
        asked_for.append(more)
        if len(asked_for) == 3:
            raise KeyboardInterrupt
        return done(self, more)

    monkeypatch.setattr(WhatIf, "__call__", third_is_stopped)
    result = ringtune("what-if", *pair, *GRID, "--csv", tmp_path / "sweep.csv")
    assert result.exit_code == 130
    assert result.stderr == "error: stopped; 2 of 8 cells are done, and they are above\n"
    assert [line.split()[:2] for line in result.stdout.splitlines()[3:]] == [["0.5", "1"], ["0.5", "2"]]
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 1 + 2


@pytest.mark.parametrize("option", ["--csv", "--plot"])
def test_sweep_finds_a_file_that_can_not_be_written_first(
    option: str, pair: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 9 before any cell is computed."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(WhatIf, "__call__", lambda *_: pytest.fail("a cell was computed"))
    (tmp_path / "taken.png").mkdir()
    result = ringtune("what-if", *pair, *GRID, option, tmp_path / "taken.png")
    assert result.exit_code == 9
    assert "it is a folder" in result.stderr


def test_sweep_prints_its_table_before_it_writes(
    pair: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full in the end costs the file, not the table."""

    def full(path: Path, content: bytes) -> None:
        raise StorageError(f"can't write {path}: No space left on device")

    monkeypatch.setattr(durable, "write_durably", full)
    result = ringtune("what-if", *pair, *GRID, "--csv", tmp_path / "sweep.csv")
    assert result.exit_code == 9
    assert len(result.stdout.splitlines()) == 3 + 8


def test_sweep_progress_is_for_terminals() -> None:
    """The number of cells and the time left on one line that is cleared in the end; a file gets nothing."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, file, seconds = Terminal(), io.StringIO(), itertools.count()
    assert list(shown_cells("abc", 3, terminal, now_s=lambda: float(next(seconds)))) == ["a", "b", "c"]
    shown = [text.strip() for text in terminal.getvalue().split("\r")]
    assert shown == [
        "",
        "0 of 3 cells",
        "1 of 3 cells, 4.0 s left",
        "2 of 3 cells, 2.0 s left",
        "3 of 3 cells, 0.00 ms left",
        "",
        "",
    ]
    assert list(shown_cells("abc", 3, file)) == ["a", "b", "c"]
    assert file.getvalue() == ""


def test_sweep_of_batch_sizes_has_no_ratio_where_the_work_differs(pair: tuple[str, ...]) -> None:
    """A cell of half the rows has none, that of the plan's has one."""
    cells = asked(*pair, "--sweep", "batch_size=2,4", "--jobs", "1")["cells"]
    assert [(cell["ratio"], cell["trained_rows"]) for cell in cells] == [(None, 16), (1.0, 32)]
    assert "no ratio where a cell" in ringtune("what-if", *pair, "--sweep", "batch_size=2,4", "--jobs", "1").stdout


def test_sweep_shows_what_does_not_fit_as_a_result(pair: tuple[str, ...]) -> None:
    """A budget that is too small is an answer of a sweep, with its reason, and does not end it."""
    cells = asked(*pair, "--sweep", "bob.memory=100KiB,1GiB", "--jobs", "1")["cells"]
    assert (cells[0]["wall_s"], cells[0]["ratio"]) == (None, None)
    assert cells[0]["error"].startswith("node bob needs ")
    assert (cells[1]["wall_s"], cells[1]["error"]) == (EXPECTED.wall_s, "")


def test_sweep_is_the_same_for_any_number_of_workers(pair: tuple[str, ...], tmp_path: Path) -> None:
    """One process or two: the very same CSV."""
    sweep = ("what-if", *pair, "--sweep", "bob.compute=1,2", "--csv")
    command = [sys.executable, "-m", "ringtune.cli", *sweep, str(tmp_path / "2.csv"), "--jobs", "2"]
    subprocess.run(command, check=True, env=source_environment(), capture_output=True, timeout=60)  # noqa: S603 - our own
    assert ringtune(*sweep, tmp_path / "1.csv", "--jobs", "1").exit_code == 0
    assert (tmp_path / "1.csv").read_text() == (tmp_path / "2.csv").read_text()


def test_sweep_plans_every_cell_anew(pair: tuple[str, ...], tmp_path: Path) -> None:
    """With a job, a faster node may get other blocks in each cell."""
    job = tmp_path / "job.toml"
    job.write_text(tiny_job())
    cells = asked(*pair, "--sweep", "bob.compute=0.1,1,10", "--replan", job, "--jobs", "1")["cells"]
    assert all(cell["error"] == "" for cell in cells)
    kept = asked(*pair, "--sweep", "bob.compute=0.1,1,10", "--change", "num_steps=8", "--jobs", "1")["cells"]
    assert cells[0]["wall_s"] < kept[0]["wall_s"]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_sweep_draws_a_picture(ending: str, pair: tuple[str, ...], tmp_path: Path) -> None:
    """In both formats, the same bytes each time; categories are no numbers."""
    pytest.importorskip("matplotlib")
    pictures = []
    for name in ("a", "b"):
        file = tmp_path / f"{name}.{ending}"
        asked(*pair, "--sweep", "wire_dtype=float32,int8", "--sweep", "bob.compute=1,2", "--jobs", "1", "--plot", file)
        pictures.append(file.read_bytes())
    assert pictures[0].startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert pictures[0] == pictures[1]
    if ending == "svg":
        text = pictures[0].decode()
        for word in ("wire_dtype", "float32", "int8", "bob.compute = 2", "as it is"):
            assert word in text
        for title in ("ringada, 4 blocks, 2 nodes: predicted training", "predicted training (seconds)"):
            assert title in text


@pytest.mark.parametrize(("option", "ending"), [("--csv", "csv"), ("--plot", "png"), ("--plot", "svg")])
def test_sweep_writes_over_an_earlier_one_only(
    option: str, ending: str, pair: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated it does; rows, a photo or a link stay as they are, and no cell is computed."""
    pytest.importorskip("matplotlib")
    own, link, mine = (tmp_path / f"{name}.{ending}" for name in ("own", "link", "mine"))
    sweep = (*pair, "--sweep", "bob.compute=1,2", "--jobs", "1", option)
    for _ in range(2):
        assert ringtune("what-if", *sweep, own).exit_code == 0
    link.symlink_to(own)
    monkeypatch.setattr(WhatIf, "__call__", lambda *_: pytest.fail("a cell was computed"))
    for content in (b"text,label\na,b\n", b"\x89PNG\r\n\x1a\n of a camera", b"<svg></svg>", b""):
        mine.write_bytes(content)
        refused = ringtune("what-if", *sweep, mine)
        assert refused.exit_code == 2 and f"{mine} is there already and is no " in refused.stderr
        assert mine.read_bytes() == content
    assert ringtune("what-if", *sweep, link).exit_code == 2 and link.is_symlink()


class Plot:
    """Notes what is drawn on it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **_: self.calls.append((name, arguments))

    def of(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of all calls of that name."""
        return [arguments for called, arguments in self.calls if called == name]


def test_sweep_draws_categories_as_bars_and_numbers_with_their_own_ticks() -> None:
    """Nothing lies between float32 and int8; between 1 and 4 micro-batches there is no 2.5; sizes are numbers."""
    plot = Plot()
    prediction_text._draw(plot, parse_axis("wire_dtype=float32,int8"), {"a": [2.0, 1.0], "b": [3.0, 1.5]})
    assert [bars[1] for bars in plot.of("bar")] == [[2.0, 1.0], [3.0, 1.5]] and not plot.of("plot")
    assert plot.of("bar")[0][0] == pytest.approx([-0.2, 0.8])
    assert plot.of("set_xticks") == [(range(2), ("float32", "int8"))]
    whole, sizes = Plot(), Plot()
    prediction_text._draw(whole, parse_axis("microbatches=1,2,4"), {"a": [3.0, 2.0, 1.0]})
    assert whole.of("plot") == [([1.0, 2.0, 4.0], [3.0, 2.0, 1.0])]
    assert whole.of("set_xticks") == [([1.0, 2.0, 4.0], ("1", "2", "4"))]
    prediction_text._draw(sizes, parse_axis("bob.memory=512MiB,1GiB"), {"a": [1.0, 1.0]})
    assert sizes.of("plot")[0][0] == [512 * 2**20, 2**30]
    assert prediction_text.axis_label("link.a.b.latency") == "link.a.b.latency (seconds)"
    assert prediction_text.axis_label("wire_dtype") == "wire_dtype"


def test_sweep_names_the_extra_for_pictures(
    pair: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is computed."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = ringtune("what-if", *pair, *GRID, "--plot", tmp_path / "a.png", "--csv", tmp_path / "a.csv")
    assert "--plot needs the package 'matplotlib'; pip install matplotlib" in result.stderr
    assert result.exit_code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
