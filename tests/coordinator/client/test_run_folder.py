"""The folder of a run: complete files only, checked paths, no earlier run lost by accident."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.api import train as training
from coordinator.client.detached_runs import fetched_folder
from coordinator.client.run_folder import RunFolder, locked_for_resume, require_inputs_elsewhere
from coordinator.run.requests import RunRequest
from coordinator.screen.progress import Progress
from ringtune.errors import BusyError, IntegrityError, JobError, PlanError, StorageError, UsageError
from ringtune.job.job import load_job
from ringtune.storage.durable import is_claimed
from ringtune.v1.control_pb2 import FileChunk
from tests.contract.run_control.test_checkpoint import manifest
from tests.support.disk import log_of_syncs
from tests.support.fake_agents import job
from tests.support.saved_runs import write_run


def digest(content: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(content).hexdigest()


def chunk(path: str, content: bytes, *, sha256: str = "") -> FileChunk:
    """A piece of a file; with a digest it is the last one."""
    return FileChunk(path=path, chunk=content, last=bool(sha256), sha256=sha256)


def test_folder_gives_a_file_its_name_when_it_is_complete(tmp_path: Path) -> None:
    """Until the last chunk the file is called .part; then the digest is checked and it gets its name."""
    with RunFolder(tmp_path) as folder:
        assert folder.add_chunk(chunk("adapter/a.safetensors", b"one")) is None
        assert not (tmp_path / "adapter/a.safetensors").exists()
        path = folder.add_chunk(chunk("adapter/a.safetensors", b"two", sha256=digest(b"onetwo")))
    assert path == tmp_path / "adapter/a.safetensors"
    assert path.read_bytes() == b"onetwo"


def test_folder_forces_a_file_to_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut there is no adapter under its name that is empty or half."""
    with RunFolder(tmp_path) as folder:
        folder.add_chunk(chunk("adapter/a.safetensors", b"one"))
        log = log_of_syncs(monkeypatch)
        folder.add_chunk(chunk("adapter/a.safetensors", b"two", sha256=digest(b"onetwo")))
        assert log == ["a.safetensors.part", "a.safetensors.part -> a.safetensors", "adapter"]


def test_folder_of_a_user_is_on_the_disk_before_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut a run with a report has the folders of all its users."""
    with RunFolder(tmp_path) as folder:
        log = log_of_syncs(monkeypatch)
        for user in ("anna", "ben"):
            folder.add_chunk(chunk(f"users/{user}/a.safetensors", b"one", sha256=digest(b"one")))
        file = ["a.safetensors.part", "a.safetensors.part -> a.safetensors"]
        assert log == [tmp_path.name, "users", *file, "anna", "users", *file, "ben"]


def test_folder_keeps_files_apart_that_grow_together(tmp_path: Path) -> None:
    """Chunks of several files may come mixed."""
    with RunFolder(tmp_path) as folder:
        folder.add_chunk(chunk("trace.json", b"a"))
        folder.add_chunk(chunk("recordings/a.jsonl", b"x"))
        folder.add_chunk(chunk("trace.json", b"b", sha256=digest(b"ab")))
        folder.add_chunk(chunk("recordings/a.jsonl", b"y", sha256=digest(b"xy")))
    assert (tmp_path / "trace.json").read_bytes() == b"ab"
    assert (tmp_path / "recordings/a.jsonl").read_bytes() == b"xy"


def test_folder_refuses_a_damaged_file(tmp_path: Path) -> None:
    """A file with another digest never gets its name."""
    with RunFolder(tmp_path) as folder, pytest.raises(IntegrityError, match="arrived damaged"):
        folder.add_chunk(chunk("adapter/a.safetensors", b"one", sha256=digest(b"two")))
    assert not (tmp_path / "adapter/a.safetensors").exists()


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../../x", "", "a//b", "a/b/c/d/e", "users/../x", "users/.x/y", ".x", "x.part", "a\n"]
)
def test_folder_refuses_paths_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    """The coordinator can't write outside of the folder."""
    with RunFolder(tmp_path / "run") as folder, pytest.raises(IntegrityError, match="not allowed"):
        folder.add_chunk(chunk(name, b"", sha256=digest(b"")))


def test_folder_refuses_to_follow_a_link(tmp_path: Path) -> None:
    """A link inside the folder that leads out of it is not written through."""
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    with RunFolder(tmp_path / "run") as folder:
        (tmp_path / "run/adapter").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(IntegrityError, match="not allowed"):
            folder.add_chunk(chunk("adapter/x", b"", sha256=digest(b"")))


def test_folder_of_an_earlier_run_is_kept(tmp_path: Path) -> None:
    """Without --replace a second run into the same folder is refused, and nothing changes."""
    with RunFolder(tmp_path) as folder:
        folder.write_text("job.toml", "first")
        folder.write_text("plan.json", "{}")
    with pytest.raises(UsageError, match="already holds a run"), RunFolder(tmp_path):
        pass
    assert (tmp_path / "job.toml").read_text() == "first"


def test_folder_that_was_made_for_a_run_that_never_began_goes(tmp_path: Path) -> None:
    """Of the refused run only the job was written."""

    def refuse(folder: RunFolder) -> None:
        folder.write_text("job.toml", "")
        raise PlanError("no")

    with pytest.raises(PlanError), RunFolder(tmp_path / "run") as folder:
        refuse(folder)
    assert not list(tmp_path.iterdir())


def test_folder_of_a_run_that_never_had_a_plan_is_used_again(tmp_path: Path) -> None:
    """A run that was refused early does not stand in the way of the next try."""
    with RunFolder(tmp_path) as folder:
        folder.write_text("job.toml", "first")
    with RunFolder(tmp_path) as folder:
        folder.write_text("job.toml", "second")
    assert folder.replaced is None and (tmp_path / "job.toml").read_text() == "second"


def test_job_file_of_the_user_is_never_written_over(tmp_path: Path) -> None:
    """One that says the same stays with its comments; another is put aside and named; the run's own is replaced."""
    out, wanted, said = tmp_path / "run", job(), list[str]()
    file, longer = out / "job.toml", job(train__rounds=7)
    commented = "# which I have tuned\n" + wanted.to_toml()
    with RunFolder(out) as folder:
        folder.write_job(wanted.to_toml())
    with RunFolder(out, resume=True, say=said.append) as folder:
        folder.write_job(longer.to_toml())
        folder.write_job(wanted.to_toml())
    assert said == [] and file.read_text() == wanted.to_toml()
    for _ in range(2):
        file.write_text(commented)
        with RunFolder(out, resume=True, say=said.append) as folder:
            folder.write_job(wanted.to_toml())
            assert said == [] and file.read_text() == commented
    with RunFolder(out, resume=True, say=said.append) as folder:
        folder.write_job(longer.to_toml())
    (aside,) = tmp_path.glob("run.replaced-*")
    assert said == [f"what was changed after the run wrote it is in {aside}: job.toml"]
    assert (aside / "job.toml").read_text() == commented and file.read_text() == longer.to_toml()


def test_file_of_the_user_in_the_place_of_a_result_is_put_aside(tmp_path: Path) -> None:
    """It came while the run trained; one beside it stays, and the run's own is written over."""
    out, said = tmp_path / "run", list[str]()
    with RunFolder(out, say=said.append) as folder:
        (out / "adapter").mkdir()
        for name in ("README.md", "notes.txt"):
            (out / "adapter" / name).write_text("mine")
        for content in (b"one", b"two"):
            folder.add_chunk(chunk("adapter/README.md", content, sha256=digest(content)))
    (aside,) = tmp_path.glob("run.replaced-*")
    assert said == [f"what was changed after the run wrote it is in {aside}: adapter/README.md"]
    assert (aside / "adapter/README.md").read_text() == (out / "adapter/notes.txt").read_text() == "mine"
    assert (out / "adapter/README.md").read_text() == "two"


def test_job_file_that_is_no_job_is_put_aside(tmp_path: Path) -> None:
    """That of a refused run, broken by an edit; where checkpoints need it it is named instead."""
    out, said = tmp_path / "run", list[str]()
    with RunFolder(out) as folder:
        folder.write_job(job().to_toml())
    (out / "job.toml").write_text("[train")
    with RunFolder(out, say=said.append) as folder:
        folder.write_job(job().to_toml())
    (aside,) = tmp_path.glob("run.replaced-*")
    assert len(said) == 1 and (aside / "job.toml").read_text() == "[train"
    (out / "job.toml").write_text("[train")
    with RunFolder(out, resume=True) as folder:
        folder.add_checkpoint(manifest(4))
    with RunFolder(out, resume=True) as folder, pytest.raises(JobError, match=r"run/job\.toml"):
        folder.write_job(job().to_toml())
    assert (out / "job.toml").read_text() == "[train"


@pytest.mark.parametrize("replace", [True, False])
def test_job_file_is_there_before_a_run_in_the_background_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: bool
) -> None:
    """Also where it is read from the folder and an earlier run is put aside; a user's file is named."""
    out, said = tmp_path / "run", list[str]()
    with RunFolder(out) as folder:
        folder.write_job(job().to_toml())
        if replace:
            folder.write_text("plan.json", "{}")
    (out / "job.toml").write_text("# mine\n" + job().to_toml())
    request = RunRequest(job=job(train__rounds=7))

    def started(folder: Path, words: list[str]) -> tuple[None, None]:
        assert load_job(folder / "job.toml").train.rounds == 7
        return None, None

    monkeypatch.setattr(training, "start_in_background", started)
    face = training.Face(show=Progress, resume_hint=str, say=said.append)
    training._in_background(request, RunFolder(out, replace=replace, say=said.append), face, {})
    assert load_job(out / "job.toml").train.rounds == 7
    (aside,) = tmp_path.glob("run.replaced-*")
    assert (aside / "job.toml").read_text().startswith("# mine")
    assert len(said) == 1 and str(aside) in said[0]
    with RunFolder(out, say=said.append) as folder:
        folder.write_job(request.job.to_toml())
    assert len(said) == 1


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content, by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


OF_RUNS = ("job.toml", "plan.json", "run.log", "metrics.jsonl.part", "model/config.json", "users/u.txt", "best/b.txt")
OTHERS = ("rows.csv", "logs.txt", "models/config.json", ".git/config", "job.toml.bak")


@settings(max_examples=20)
@given(
    names=st.sets(st.sampled_from((*OF_RUNS, *OTHERS, "adapter/a.txt", "logs/mine.txt", "parts/p.txt")), min_size=1),
    replace=st.booleans(),
    resume=st.booleans(),
)
def test_folder_that_held_no_run_is_refused_and_stays_as_it_is(names: set[str], replace: bool, resume: bool) -> None:
    """Whatever a user has in a folder, and whatever is asked: one error, and every file has its content."""
    with TemporaryDirectory() as name:
        for path in names:
            (Path(name) / path).parent.mkdir(exist_ok=True)
            (Path(name) / path).write_text("precious")
        before = tree(Path(name))
        with (
            pytest.raises(UsageError, match="is not the folder of a run"),
            RunFolder(Path(name), replace=replace, resume=resume),
        ):
            pass
        assert tree(Path(name)) == before


@settings(max_examples=20)
@given(own=st.sets(st.sampled_from(OF_RUNS)), others=st.sets(st.sampled_from(OTHERS)), beside=st.booleans())
def test_folder_that_is_replaced_keeps_every_file(own: set[str], others: set[str], beside: bool) -> None:
    """What a run wrote is in the folder beside it, all else where it was; every content is there once."""
    with TemporaryDirectory() as name:
        out = Path(name) / "run"
        with RunFolder(out):
            for path in own | others:
                (out / path).parent.mkdir(exist_ok=True)
                (out / path).write_text(path)
        if beside:
            (Path(name) / "run.replaced").mkdir()
        with RunFolder(out, replace=True) as folder:
            left = {path for path in tree(out) if not path.startswith(".ringtune-")}
        assert left == others
        found = tree(folder.replaced) if folder.replaced else {}
        assert found.pop(".ringtune-run", b"") or not own
        assert found == {path: path.encode() for path in own}


def test_run_of_an_earlier_version_is_known_by_files_that_can_be_read(tmp_path: Path) -> None:
    """It has no marker; one file less, or one that is no such file, and the folder is somebody's."""
    out = write_run(tmp_path / "run")
    (out / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    for name in ("job.toml", "plan.json", "metrics.jsonl"):
        (out / ".ringtune-run").unlink(missing_ok=True)
        content = (out / name).read_text()
        for damage in ("", "mine"):
            (out / name).write_text(damage)
            with pytest.raises(UsageError, match="is not the folder of a run"), RunFolder(out, resume=True):
                pass
        (out / name).write_text(content)
        with RunFolder(out, resume=True):
            assert is_claimed(out, "run")


@pytest.mark.parametrize("key", ["data__train", "data__eval", "model__path"])
def test_rows_and_model_do_not_lie_where_the_run_writes(tmp_path: Path, key: str) -> None:
    """A marked folder into which somebody has put a model: no run moves it, or writes its result into it."""
    for place in ("model", "model/rows.csv", "users/anna", "job.toml"):
        with pytest.raises(UsageError, match=re.escape(f"{key.replace('__', '.')} = ")):
            require_inputs_elsewhere(tmp_path, job(**{key: str(tmp_path / place)}))
    require_inputs_elsewhere(tmp_path, job(**{key: str(tmp_path / "models/tiny")}))


def test_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """A file where the folder should be is named."""
    (tmp_path / "out").write_text("")
    with pytest.raises(StorageError, match="can't write"), RunFolder(tmp_path / "out"):
        pass


WRITERS: dict[str, Callable[[Path], AbstractContextManager[object]]] = {
    "a new run": lambda out: RunFolder(out),
    "one that replaces": lambda out: RunFolder(out, replace=True),
    "one that goes on": lambda out: RunFolder(out, resume=True),
    "what reads before it goes on": locked_for_resume,
    "fetch": lambda out: fetched_folder(out, replace=True, goes_on=False),
}


@pytest.mark.parametrize("second", WRITERS)
@pytest.mark.parametrize("first", WRITERS)
def test_folder_has_one_writer(tmp_path: Path, first: str, second: str) -> None:
    """Whatever is at work there, another command is refused with the process that has the folder; nothing changes."""
    with RunFolder(tmp_path / "run") as folder:
        folder.write_text("job.toml", "first")
    with WRITERS[first](tmp_path / "run"), ThreadPoolExecutor(1) as other:
        before = tree(tmp_path)

        def enter() -> None:
            with WRITERS[second](tmp_path / "run"):
                pass

        with pytest.raises(BusyError, match=f"process {os.getpid()} .*writes into .*run"):
            other.submit(enter).result()
        assert tree(tmp_path) == before
    assert BusyError.exit_code == 8


def test_folder_appends_metrics_line_by_line(tmp_path: Path) -> None:
    """metrics.jsonl can be followed while the run goes on."""
    with RunFolder(tmp_path) as folder:
        folder.add_metrics('{"step": 0}')
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n'
        folder.add_metrics('{"step": 1}\n')
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n{"step": 1}\n'


def test_file_that_was_not_complete_is_begun_anew_by_the_run_that_goes_on(tmp_path: Path) -> None:
    """A coordinator that was killed leaves half a trace; the next part of the run has a trace of its own."""
    with RunFolder(tmp_path) as folder:
        folder.add_chunk(chunk("trace.json", b"half of the first"))
        folder.rewind_to(2)
        folder.add_chunk(chunk("trace.json", b"second", sha256=digest(b"second")))
    assert (tmp_path / "trace.json").read_bytes() == b"second"


def test_run_that_begins_anew_leaves_only_what_the_command_wrote(tmp_path: Path) -> None:
    """Where it is driven and what was printed stay; steps, plan and half files go, and other people's files stay."""
    out = tmp_path / "run"
    with RunFolder(out, resume=True) as folder:
        for name in ("run.json", "run.log", "notes.txt"):
            (out / name).write_text(name)
        folder.write_text("plan.json", "{}")
        folder.add_metrics("{}")
        folder.add_chunk(chunk("trace.json", b"half"))
        aside = folder.begin_anew()
        left = sorted(entry.name for entry in out.iterdir() if not entry.name.startswith(".ringtune-"))
        assert left == ["notes.txt", "run.json", "run.log"]
        folder.add_chunk(chunk("trace.json", b"new", sha256=digest(b"new")))
    assert (out / "trace.json").read_bytes() == b"new"
    assert aside is not None and tree(aside).keys() == {
        ".ringtune-run",
        "metrics.jsonl",
        "plan.json",
        "trace.json.part",
    }
