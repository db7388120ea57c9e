"""Atomic files: whatever fails, the old content stays and nothing half written is left."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from ringtune.errors import StorageError
from ringtune.files.durable import remove_partial_files, rename_durably, write_durably
from tests.support.disk import log_of_syncs


def test_write_durably_replaces_the_content_and_makes_folders(tmp_path: Path) -> None:
    """The new content is there under the name, and nothing else."""
    path = tmp_path / "a/b/c.json"
    write_durably(path, b"one")
    write_durably(path, b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in path.parent.iterdir()] == ["c.json"]


def test_write_durably_forces_file_and_folder_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that survives a power cut: content, rename, folder."""
    log = log_of_syncs(monkeypatch)
    write_durably(tmp_path / "x", b"content")
    partial = log[0]
    assert log == [partial, f"{partial} -> x", tmp_path.name]


def test_rename_durably_forces_file_and_folder_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was written elsewhere gets its name in the same order."""
    (tmp_path / "x.part").write_bytes(b"content")
    log = log_of_syncs(monkeypatch)
    rename_durably(tmp_path / "x.part", tmp_path / "x")
    assert log == ["x.part", "x.part -> x", tmp_path.name]
    assert (tmp_path / "x").read_bytes() == b"content"


def test_rename_durably_of_what_is_missing_is_an_error_of_storage(tmp_path: Path) -> None:
    """The error names the target and leaves nothing."""
    with pytest.raises(StorageError, match="can't write"):
        rename_durably(tmp_path / "x.part", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", ["fsync", "rename"])
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


def test_write_durably_into_a_file_is_refused(tmp_path: Path) -> None:
    """A folder that is none is an error of storage too."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="make room or choose another folder"):
        write_durably(tmp_path / "file/x", b"")


def test_remove_partial_files_removes_only_those(tmp_path: Path) -> None:
    """What a crash left goes, the rest stays."""
    (tmp_path / "x.0a.tmp").write_text("")
    (tmp_path / "x").write_text("")
    remove_partial_files(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
