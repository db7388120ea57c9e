"""Tests of ``ringtune.storage.durable``: owned, durable."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from ringtune.errors import BusyError, StorageError
from ringtune.storage.durable import (
    FileLock,
    keep_files_private,
    make_private_folder,
    remove_partial_files,
    rename_durably,
    write_durably,
)
from tests.support.cases import cases
from tests.support.disk import log_of_syncs

HOLD = """
import sys
from pathlib import Path
from ringtune.storage.durable import FileLock
FileLock(Path(sys.argv[1]), busy="").acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    """A second process is refused with the first one's id; once that is killed the lock is free."""
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(  # noqa: S603 - our own interpreter
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match=f"^process {holder.pid} is in {{a}}$"):
            FileLock(path, busy="{holder} is in {a}").acquire()
        assert path.read_text() == f"{holder.pid}\n", "who was refused has not written"
        holder.kill()
        FileLock(path, busy="").acquire(wait_s=30.0)


def test_lock_is_released_as_often_as_it_was_taken(tmp_path: Path) -> None:
    """One that may be taken again is free after the last release; another is refused to everybody."""
    again = [FileLock(tmp_path / "lock", busy="busy", is_reentrant=True) for _ in range(2)]
    with again[0]:
        with again[1], pytest.raises(BusyError):
            FileLock(tmp_path / "lock", busy="busy").acquire()
        with pytest.raises(BusyError):
            FileLock(tmp_path / "lock", busy="busy").acquire()
    FileLock(tmp_path / "lock", busy="busy").acquire()


@cases("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_locks_is_told_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """The command goes on, and the log says what is not noticed."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(code, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), FileLock(tmp_path / "lock", busy=""):
        assert "a second process that writes there is not noticed" in caplog.text


def test_lock_on_a_full_disk_is_held_and_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder's id has no room; the lock excludes others all the same, and once there is room it is free again."""

    def full(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with FileLock(tmp_path / "lock", busy=""), pytest.raises(BusyError):
            FileLock(tmp_path / "lock", busy="").acquire()
    with FileLock(tmp_path / "lock", busy=""):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_lock_does_not_follow_a_link(tmp_path: Path) -> None:
    """A link in the lock's place leads into a file of somebody else, which stays as it is."""
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "mine")
    with pytest.raises(StorageError, match="lock"):
        FileLock(tmp_path / "lock", busy="").acquire()
    assert (tmp_path / "mine").read_text() == "precious"


@cases("mode", [None, 0o700, 0o755, 0o770, 0o707])
def test_private_folder_is_shut_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int | None
) -> None:
    """Made or found, others have no rights there; if they had some, the log names them."""
    folder = tmp_path / "state"
    if mode is not None:
        folder.mkdir()
        folder.chmod(mode)
    make_private_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (f"(mode {mode:04o})" if mode not in (None, 0o700) else "") in caplog.text
    assert bool(caplog.records) == (mode not in (None, 0o700))


@cases(("name", "is_shut"), [("lock", True), ("notes.txt", False)])
def test_private_folder_with_files_of_others_keeps_its_rights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, is_shut: bool
) -> None:
    """A state folder that is somebody's working folder is not closed under their hands; the log says so."""
    tmp_path.chmod(0o755)
    (tmp_path / name).touch()
    make_private_folder(tmp_path, is_ours={"lock"}.__contains__)
    assert (stat.S_IMODE(tmp_path.stat().st_mode) == 0o700) == is_shut
    assert ("only this user can read it" if is_shut else "has files of others") in caplog.text


def test_files_of_agents_and_coordinators_are_private(tmp_path: Path) -> None:
    """Whatever they write, with whatever helper: files 0600, folders 0700."""
    before = os.umask(0o022)
    try:
        keep_files_private()
        write_durably(tmp_path / "run/shard", b"rows")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run", tmp_path / "run/shard")]
    assert modes == [0o700, 0o600]


def test_write_durably_replaces_the_content_and_makes_folders(tmp_path: Path) -> None:
    """The new content is there under the name, and nothing else."""
    path = tmp_path / "a/b/c.json"
    write_durably(path, b"one")
    write_durably(path, b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in path.parent.iterdir()] == ["c.json"]


def test_file_and_folder_are_forced_before_and_after_a_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that survives a power cut: content, rename, folder; also of a file that was written elsewhere."""
    log = log_of_syncs(monkeypatch)
    write_durably(tmp_path / "x", b"content")
    partial = log[0]
    assert log == [partial, f"{partial} -> x", tmp_path.name]
    (tmp_path / "y.part").write_bytes(b"content")
    log.clear()
    rename_durably(tmp_path / "y.part", tmp_path / "y")
    assert log == ["y.part", "y.part -> y", tmp_path.name]
    assert (tmp_path / "y").read_bytes() == b"content"


@cases("failing", ["fsync", "rename"])
def test_write_durably_keeps_the_old_content_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The error has its own class and exit code, names the file, and leaves no part behind."""
    path = tmp_path / "x"
    write_durably(path, b"old")

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((os, "fsync", full) if failing == "fsync" else (Path, "replace", full)))
    with pytest.raises(StorageError, match="No space left on device") as caught:
        write_durably(path, b"new")
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 9
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_remove_partial_files_removes_only_those(tmp_path: Path) -> None:
    """What a crash left goes, the rest stays."""
    (tmp_path / "x.0a.tmp").write_text("")
    (tmp_path / "x").write_text("")
    remove_partial_files(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
