"""The folder of a run: complete files only, checked paths, no earlier run lost by accident."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from coordinator.run_folder.folder import RunFolder
from ringtune.errors import IntegrityError, StorageError, UsageError
from ringtune.v1.control_pb2 import FileChunk
from tests.support.disk import log_of_syncs


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
    with pytest.raises(UsageError, match="already holds a run"):
        RunFolder(tmp_path)
    assert (tmp_path / "job.toml").read_text() == "first"


def test_folder_of_a_run_that_never_had_a_plan_is_used_again(tmp_path: Path) -> None:
    """A run that was refused early does not stand in the way of the next try."""
    (tmp_path / "notes.txt").write_text("mine")
    with RunFolder(tmp_path) as folder:
        folder.write_text("job.toml", "first")
    RunFolder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_folder_replaces_only_files_of_runs(tmp_path: Path) -> None:
    """--replace removes what a run wrote, complete or not, and nothing else."""
    (tmp_path / "notes.txt").write_text("mine")
    with RunFolder(tmp_path) as folder:
        folder.write_text("job.toml", "first")
        folder.add_chunk(chunk("trace.json", b"x"))
        folder.add_chunk(chunk("adapter/a", b"x", sha256=digest(b"x")))
    RunFolder(tmp_path, replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """A file where the folder should be is named."""
    (tmp_path / "out").write_text("")
    with pytest.raises(StorageError, match="can't use"):
        RunFolder(tmp_path / "out")


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
        folder.go_back_to(2)
        folder.add_chunk(chunk("trace.json", b"second", sha256=digest(b"second")))
    assert (tmp_path / "trace.json").read_bytes() == b"second"


def test_run_that_begins_anew_leaves_only_what_the_command_wrote(tmp_path: Path) -> None:
    """Where it is driven and what was printed stay; steps, plan and half files go, and other people's files stay."""
    for name in ("run.json", "run.log", "notes.txt"):
        (tmp_path / name).write_text(name)
    with RunFolder(tmp_path, replace=True, resume=True) as folder:
        folder.write_text("plan.json", "{}")
        folder.add_metrics("{}")
        folder.add_chunk(chunk("trace.json", b"half"))
        folder.begin_anew()
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes.txt", "run.json", "run.log"]
        folder.add_chunk(chunk("trace.json", b"new", sha256=digest(b"new")))
    assert (tmp_path / "trace.json").read_bytes() == b"new"
