"""A job for the Python API: a file, a mapping, keywords, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

import ringtune
from coordinator.api import train
from coordinator.api.arguments import in_python, job_here, read_job, reworded, typed
from coordinator.client.run_folder import RunFolder
from coordinator.client.saved_run import RunLocation
from coordinator.screen.progress import Progress
from ringtune.errors import DataError, JobError, UsageError
from ringtune.job.job import load_job
from ringtune.run_control.continuation import job_digest
from tests.support.fake_agents import Notes
from tests.support.model_folder import write_model


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder has a job below it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/job.toml").write_text('[model]\npath = "tiny"\n[train]\nrounds = 3\n')
    return tmp_path


def test_job_is_read_from_a_file_a_mapping_and_keywords(here: Path) -> None:
    """Relative paths of a file are relative to its folder, as on the command line."""
    assert read_job("jobs/job.toml", {}) == read_job(Path("jobs/job.toml"), {}) == load_job("jobs/job.toml")
    # Paths may be paths and lists tuples; they are relative to the current folder
    (here / "jobs/tiny").mkdir()
    made = read_job({"model": {"path": Path("jobs/tiny")}, "data": {"labels": ("a", "b")}, "train": {"rounds": 3}}, {})
    assert made.model.path == str(here / "jobs/tiny")
    assert (made.data.labels, made.train.rounds) == (("a", "b"), 3)
    # Two underscores stand for the dot of a key
    made = read_job(None, {"model__path": "m", "train__learning_rate": 0.5})
    assert (made.model.path, made.train.learning_rate) == (str(here / "m"), 0.5)
    # As ``--set`` does, with a dot: the number of steps clears the number of rounds, paths are of this folder
    assert read_job("jobs/job.toml", {"data.train": "rows.csv"}).data.train == str(here / "rows.csv")
    for job in ("jobs/job.toml", {"model": {"path": "m"}, "train": {"rounds": 3}}, load_job("jobs/job.toml")):
        made = read_job(job, {"train__max_steps": 7, "data__train": "rows.csv"})
        assert (made.train.max_steps, made.train.rounds) == (7, None)
        assert made.data.train == str(here / "rows.csv")


def test_settings_that_a_change_drops_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Those of another method are; a number of steps takes the place of one of rounds without a word."""
    job = {"model": {"path": "m"}, "train": {"rounds": 3, "optimizer": "sgd"}, "unfreeze": {"every_steps": 2}}
    assert read_job(job, {"train.max_steps": 7, "unfreeze.at": [3]}).unfreeze is not None
    assert not caplog.records
    assert read_job(job, {"train.method": "all"}).unfreeze is None
    told = "with train.method = 'all' these settings of the job are dropped: unfreeze.every_steps"
    assert [record.getMessage() for record in caplog.records] == [told]


def test_rows_of_a_run_end_as_they_did_when_it_began(here: Path) -> None:
    """A new run of causal-lm ends its rows; one of before the key goes on without, and one that said no with no."""
    (here / "tiny").mkdir()
    job = {"model": {"path": "tiny", "task": "causal-lm"}}
    new = job_here(job, {})
    assert new.data.append_eos is True
    assert job_here({"model": {"path": "tiny"}}, {}).data.append_eos is None
    assert job_here(job, {"data.append_eos": False}).data.append_eos is False
    with pytest.raises(JobError, match=r"generation\.loss = false is what 'ringtune predict' sets.*; remove it"):
        job_here(job, {"generation.loss": False})
    (here / "run").mkdir()
    assert job_here(job, {}, here / "run") == new
    for ends in (None, False, True):
        began = dataclasses.replace(new, data=dataclasses.replace(new.data, append_eos=ends))
        (here / "run/job.toml").write_text(began.to_toml())
        assert ("append_eos" in began.to_toml()) is (ends is not None)
        assert job_digest(job_here(job, {}, here / "run")) == job_digest(began)


def test_job_is_checked_once_its_values_are_replaced(here: Path) -> None:
    """A refused key of the file is repaired by another value; what is left names the file, what is given does not."""
    file = here / "jobs/job.toml"
    file.write_text('[model]\npath = "m"\n[train]\nmethod = "all"\nrounds = 0\n[unfreeze]\nevery_steps = 4\n')
    with pytest.raises(JobError, match=r"job\.toml: train\.rounds is 0"):
        read_job(file, {"train.seed": 1})
    with pytest.raises(JobError, match=r"job\.toml: \[unfreeze\] has settings of"):
        read_job(file, {"train.rounds": 2})
    with pytest.raises(JobError, match=r"^train\.seed is -1"):
        read_job(file, {"train.seed": -1, "train.rounds": 2, "train.method": "ringada"})
    repaired = read_job(file, {"train.method": "ringada", "train.max_steps": 7, "data.train": "rows.csv"})
    assert repaired.unfreeze is not None and (repaired.unfreeze.every_steps, repaired.train.max_steps) == (4, 7)
    assert repaired.model.path == str(here / "jobs/m") and repaired.data.train == str(here / "rows.csv")
    with pytest.raises(JobError, match="train has to be a section"):
        read_job({"model": {"path": "m"}, "train": 3}, {"train.rounds": 2})


def test_job_that_is_wrong_is_refused_by_name() -> None:
    """Errors are those of the tree, and name the key or the nearest one."""
    rows: list[tuple[object, dict[str, object], type[Exception], str]] = [
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
    ]
    for job, keys, error, text in rows:
        with pytest.raises(error, match=text):
            read_job(job, keys)  # type: ignore[arg-type]


def test_errors_of_functions_name_arguments_and_no_options() -> None:
    """Nobody types options in a notebook; a command that is to be typed keeps its own."""
    for said, told in [
        ("x.csv is not there; give --data FILE", "x.csv is not there; give data=FILE"),
        ("give --replace, or another --out", "give replace=, or another out="),
        ("in predict --column text=NAME", "in predict columns={'text': 'NAME'}"),
        ("leave out --detach", "leave out wait=False"),
        ("--memory '1 x' is not a size", "memory='1 x' is not a size"),
        ("--local 2 is less; give --local 3", "local=2 is less; give local=3"),
        ("raise --join-s; see ringtune nodes --coordinator X", "raise join_s=; see ringtune nodes --coordinator X"),
        ("a--b is -- no option", "a--b is -- no option"),
    ]:
        with pytest.raises(DataError) as raised, reworded(in_python):
            raise DataError(said)
        assert str(raised.value) == told


CALL_S = 30.0


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The file of a job with a model and two rows."""
    write_model(tmp_path / "tiny")
    (tmp_path / "train.csv").write_text("text,label\na fine film,good\na bad one,bad\n")
    path = tmp_path / "job.toml"
    path.write_text('[model]\npath = "tiny"\n[data]\ntrain = "train.csv"\n[train]\nbatch_size = 4\nmax_length = 8\n')
    return path


def test_train_shows_a_local_run_on_a_page(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is there before nodes join, its address is told, and its token is in the file that was named."""
    pytest.importorskip("uvicorn")
    notes = Notes()

    def follow(request: Any, folder: RunFolder, ring: train.Ring, *_: object, **__: object) -> None:
        with folder, ring(notes):
            address = next(found[0] for text in notes.texts if (found := re.search(r"http://\S+", text)))
            with urlopen(address, timeout=CALL_S) as page:  # noqa: S310 - this very machine
                assert page.status == 200

    monkeypatch.setattr(train, "_follow", follow)
    monkeypatch.setattr(train, "LocalNodes", lambda *_, **__: contextlib.nullcontext())
    ringtune.train(job, local=2, out=tmp_path / "out", web="127.0.0.1:0", web_token=tmp_path / "token")
    assert notes.states[0] == "starting 2 local nodes"


def test_train_in_the_background_is_a_command_with_the_job_in_a_file(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python with every option that counts there; from the command line as it was typed, and no second time."""
    began: list[list[str]] = []

    def start(out: Path, words: Sequence[str]) -> tuple[RunLocation, subprocess.Popen[bytes]]:
        began.append(list(words))
        place = RunLocation(run_id="r", coordinator="127.0.0.1:1", is_local=True, pid=1)
        return place, subprocess.Popen([sys.executable, "-S", "-c", ""])

    monkeypatch.setattr(train, "start_in_background", start)
    options: dict[str, Any] = {"local": 2, "wait": False, "wire": "bfloat16", "train__rounds": 3}
    run = ringtune.train(job, out=tmp_path / "a", **options)
    assert run._process is not None and run._process.wait(CALL_S) == 0
    assert load_job(tmp_path / "a/job.toml").train.rounds == 3
    words = ["train", str(tmp_path / "a/job.toml"), "--local", "2", "--out", str(tmp_path / "a")]
    assert began == [[*words, "--wire", "bfloat16"]]
    face = train.RunDisplay(show=Progress, resume_hint=str, words=["train", "j", "--detach", "--replace"])
    run = typed(ringtune.train)(job, out=tmp_path / "b", progress=face, **options)
    assert run._process is not None and run._process.wait(CALL_S) == 0
    assert began[1:] == [["train", "j", "--detach"]]
    assert load_job(tmp_path / "b/job.toml").train.rounds == 3
