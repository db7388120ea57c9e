"""Sweeps: axes, their grid, and cells that are the same however many workers there are."""

from __future__ import annotations

import functools
import os
import socket
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ringtune.errors import ConnectionFailedError, UsageError
from sim.sweep import Axis, each_cell, grid, parse_axis
from tests.support.cases import cases


@cases(
    ("text", "values"),
    [
        ("a.compute=0.25,0.5,1", ("0.25", "0.5", "1")),
        ("a.compute=0.25:2:8", ("0.25", "0.5", "0.75", "1", "1.25", "1.5", "1.75", "2")),
        ("microbatches=1:4:4", ("1", "2", "3", "4")),
        ("a.compute=0.1,1:2:2,5", ("0.1", "1", "2", "5")),
        ("link.a.b.rate=1e6:3e6:3", ("1000000", "2000000", "3000000")),
        ("wire_dtype=float32, int8", ("float32", "int8")),
        ("a.memory=512MiB", ("512MiB",)),
        ("a.compute=2:1:3", ("2", "1.5", "1")),
    ],
)
def test_parse_axis_reads_lists_and_ranges(text: str, values: tuple[str, ...]) -> None:
    """Values are kept as they will stand in the table."""
    assert parse_axis(text) == Axis(key=text.partition("=")[0], values=values)


@cases(
    ("text", "message"),
    [
        ("a.compute", "is not KEY=VALUE"),
        ("a.compute=1,,2", "has an empty value"),
        ("a.compute=1,2,1", "has a value twice"),
        ("a.compute=1:2", "is not FROM:TO:COUNT"),
        ("a.compute=1:2:1", "is not FROM:TO:COUNT"),
        ("a.compute=1:2:3:4", "is not FROM:TO:COUNT"),
        ("a.compute=1:nan:3", "is not FROM:TO:COUNT"),
        ("a.compute=1:x:3", "is not FROM:TO:COUNT"),
    ],
)
def test_parse_axis_refuses_what_it_can_not_read(text: str, message: str) -> None:
    """With the form that it wants."""
    with pytest.raises(UsageError) as caught:
        parse_axis(text)
    assert message in str(caught.value)


def test_grid_has_every_combination_once() -> None:
    """The last axis runs fastest."""
    axes = [parse_axis("a.compute=1,2"), parse_axis("microbatches=1,2,4")]
    assert grid(axes) == [
        ("a.compute=1", "microbatches=1"),
        ("a.compute=1", "microbatches=2"),
        ("a.compute=1", "microbatches=4"),
        ("a.compute=2", "microbatches=1"),
        ("a.compute=2", "microbatches=2"),
        ("a.compute=2", "microbatches=4"),
    ]


def test_grid_refuses_a_key_twice() -> None:
    """Two axes of one key would change the same figure twice."""
    with pytest.raises(UsageError, match=r"--sweep a\.compute stands twice"):
        grid([parse_axis("a.compute=1"), parse_axis("a.compute=2")])


@cases(
    "axes",
    [("a.compute=1:2:10000000000",), ("a.compute=1:2:9000,3:4:9000",), ("a.compute=1:2:100", "b.compute=1:2:101")],
)
def test_sweep_of_too_many_cells_is_refused_before_it_is_listed(axes: tuple[str, ...]) -> None:
    """With its size, the limit and what to do: ten thousand million values would fill the memory."""
    with pytest.raises(
        UsageError, match=r"the sweep has [0-9,]+ cells, at most 10,000 are computed; give fewer"
    ) as caught:
        grid([parse_axis(text) for text in axes])
    if len(axes) == 1 and ":10000000000" in axes[0]:
        assert "has 10,000,000,000 cells" in str(caught.value)


def wait_for_ever(pipe: str, cell: tuple[str, ...]) -> str:
    """A task whose first cell ends at once; the others wait until somebody writes to a pipe."""
    if cell == CELLS[0]:
        return join(cell)
    return Path(pipe).read_text(encoding="utf-8")


@pytest.mark.usefixtures("by_workers")
@pytest.mark.timeout(120)
def test_sweep_that_is_left_early_ends_its_workers(tmp_path: Path) -> None:
    """Results come as they are done, and workers in the middle of a cell do not hold the end up."""
    os.mkfifo(tmp_path / "pipe")
    running = each_cell(functools.partial(wait_for_ever, str(tmp_path / "pipe")), CELLS, jobs=2)
    assert next(running) == join(CELLS[0])
    running.close()
    assert list(running) == []


def join(cell: tuple[str, ...]) -> str:
    """A task for other processes."""
    return "+".join(cell)


CELLS = [(f"a={index}", f"b={index * index}") for index in range(7)]


@pytest.fixture(scope="module")
def by_workers() -> list[str]:
    """What two workers make; joblib's resource trackers, which stay as long as this process, are there then."""
    return list(each_cell(join, CELLS, jobs=2))


def test_cells_keep_the_order_for_any_number_of_workers(by_workers: list[str]) -> None:
    """Results stand where their cells stand."""
    of_one, of_all_cores = (list(each_cell(join, CELLS, jobs=jobs)) for jobs in (1, -1))
    assert by_workers == of_one == of_all_cores == [join(cell) for cell in CELLS]


@cases("jobs", [0, -2])
def test_cells_refuse_a_number_of_workers_that_is_none(jobs: int) -> None:
    """No worker would do nothing."""
    with pytest.raises(UsageError, match=f"--jobs {jobs} has to be at least 1, or -1"):
        list(each_cell(join, CELLS, jobs=jobs))


def test_cells_refuse_an_unknown_backend() -> None:
    """The known ones are named."""
    with pytest.raises(UsageError, match="--backend 'spark' is not one of loky, dask, ray"):
        list(each_cell(join, CELLS, backend="spark"))
    with pytest.raises(UsageError, match="--cluster is for --backend dask and ray"):
        list(each_cell(join, CELLS, cluster="10.0.0.1:8786"))


@cases(
    ("module", "options", "message"),
    [
        ("joblib", {"jobs": 2}, r"needs the package 'joblib'; pip install 'joblib'"),
        ("distributed", {"backend": "dask"}, r"needs the package 'dask\[distributed\]'; pip install"),
        ("ray", {"backend": "ray"}, "needs the package 'ray'; pip install 'ray'"),
    ],
)
def test_cells_name_the_package_that_is_missing(
    module: str, options: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed with another backend instead; what the message advises does without the package."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=message) as caught:
        list(each_cell(join, CELLS, **options))  # type: ignore[arg-type]
    assert "or give --backend loky --jobs 1" in str(caught.value)
    assert list(each_cell(join, CELLS, backend="loky", jobs=1)) == [join(cell) for cell in CELLS]


@cases(("backend", "module"), [("dask", "distributed"), ("ray", "ray")])
def test_cells_on_a_cluster_that_is_not_there_end_at_once(
    backend: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the package is asked, which may try for minutes."""
    stand_in = ModuleType(module)
    monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.setattr(stand_in, "shutdown", lambda: None, raising=False)
    adapter = ModuleType("ray.util.joblib")
    monkeypatch.setattr(adapter, "register_ray", lambda: None, raising=False)
    monkeypatch.setitem(sys.modules, "ray.util.joblib", adapter)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConnectionFailedError, match=f"can't use the {backend} cluster at {address}: .*refused"):
            list(each_cell(join, CELLS, backend=backend, cluster=address))


def test_cells_of_one_worker_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small sweep in this process works wherever the core is installed."""
    monkeypatch.setitem(sys.modules, "joblib", None)
    assert list(each_cell(join, CELLS, jobs=1)) == [join(cell) for cell in CELLS]
    assert list(each_cell(join, CELLS[:1])) == [join(CELLS[0])]
