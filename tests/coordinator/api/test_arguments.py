"""A job for the Python API: a file, a mapping, keywords, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.api.arguments import python_words, read_job
from ringtune.errors import DataError, JobError, UsageError
from ringtune.job.job import load_job


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder has a job below it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/job.toml").write_text('[model]\npath = "tiny"\n[train]\nrounds = 3\n')
    return tmp_path


def test_job_of_a_file_is_that_of_the_command_line() -> None:
    """Its relative paths are relative to its folder."""
    assert read_job("jobs/job.toml", {}) == read_job(Path("jobs/job.toml"), {}) == load_job("jobs/job.toml")


def test_job_of_a_mapping_has_the_keys_of_a_file(here: Path) -> None:
    """Paths may be paths and lists tuples; they are relative to the current folder."""
    (here / "jobs/tiny").mkdir()
    made = read_job({"model": {"path": Path("jobs/tiny")}, "data": {"labels": ("a", "b")}, "train": {"rounds": 3}}, {})
    assert made.model.path == str(here / "jobs/tiny")
    assert (made.data.labels, made.train.rounds) == (("a", "b"), 3)


def test_job_of_keywords_needs_no_file(here: Path) -> None:
    """Two underscores stand for the dot of a key."""
    made = read_job(None, {"model__path": "m", "train__learning_rate": 0.5})
    assert (made.model.path, made.train.learning_rate) == (str(here / "m"), 0.5)


def test_job_keywords_win_over_file_and_mapping(here: Path) -> None:
    """As ``--set`` does, with a dot: the number of steps clears the number of rounds, paths are of this folder."""
    assert read_job("jobs/job.toml", {"data.train": "rows.csv"}).data.train == str(here / "rows.csv")
    for job in ("jobs/job.toml", {"model": {"path": "m"}, "train": {"rounds": 3}}, load_job("jobs/job.toml")):
        made = read_job(job, {"train__max_steps": 7, "data__train": "rows.csv"})
        assert (made.train.max_steps, made.train.rounds) == (7, None)
        assert made.data.train == str(here / "rows.csv")


@pytest.mark.parametrize(
    ("job", "keys", "error", "text"),
    [
        ("jobs/job.toml", {"train__round": 2}, JobError, "unknown key 'train.round'; did you mean 'rounds'?"),
        ("jobs/job.toml", {"rounds": 2}, UsageError, "no option 'rounds'; .* e.g. train__rounds"),
        ("jobs/job.toml", {"learning_rat": 2}, UsageError, "e.g. train__learning_rate"),
        ("jobs/job.toml", {"xyzzy": 2}, UsageError, "e.g. train__rounds"),
        ("jobs/job.toml", {"trian__rounds": 2}, JobError, "did you mean 'train'"),
        ("jobs/none.toml", {}, JobError, "none.toml"),
        ({"model": "tiny"}, {}, JobError, "model has to be a section"),
        ({"model": {"path": 3}}, {}, JobError, "model.path"),
        ({}, {}, JobError, "model"),
        (None, {}, UsageError, "give a job"),
        (None, {"train__rounds": 2}, JobError, "model"),
    ],
)
def test_job_that_is_wrong_is_refused_by_name(
    job: object, keys: dict[str, object], error: type[Exception], text: str
) -> None:
    """Errors are those of the tree, and name the key or the nearest one."""
    with pytest.raises(error, match=text):
        read_job(job, keys)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("x.csv is not there; give --data FILE", "x.csv is not there; give data=FILE"),
        ("give --replace, or another --out", "give replace=, or another out="),
        ("in predict --column text=NAME", "in predict columns={'text': 'NAME'}"),
        ("leave out --detach", "leave out wait=False"),
        ("--local 2 is less; give --local 3", "local=2 is less; give local=3"),
        ("raise --join-s; see ringtune nodes --coordinator X", "raise join_s=; see ringtune nodes --coordinator X"),
        ("a--b is -- no option", "a--b is -- no option"),
    ],
)
def test_errors_of_functions_name_arguments_and_no_options(said: str, told: str) -> None:
    """Nobody types options in a notebook; a command that is to be typed keeps its own."""
    with pytest.raises(DataError) as raised, python_words():
        raise DataError(said)
    assert str(raised.value) == told
