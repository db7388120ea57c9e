"""Files that survive a crash: either the old content or the new one is there, never half of it.

A file is written beside its place, forced to the disk, then renamed, and the rename is forced to the disk too.
Without the second, a power cut may bring the old name back; without the first, a file full of zeros.

Source: rename(2), fsync(2); "All File Systems Are Not Created Equal", Pillai and others, OSDI 2014.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ringtune.errors import StorageError

PARTIAL_SUFFIX = ".tmp"
_REMOVE_S = 5.0
_RETRY_S = 0.1


def failpoint(place: str) -> object:
    """Do nothing; a test puts a failure in its place, for ``write NAME``, ``rename NAME`` and ``written NAME``."""
    return None


def write_durably(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace a file's content in one step: after a crash it is the old content or the new one.

    Args:
        path: of the file; its folder is made if it is missing.
        content: the new content.
        mode: permissions of the file, from the moment when it is made; the user's mask takes some away.

    Raises:
        StorageError: it can't be written; the old content is still there.
    """
    write_pieces_durably(path, [content], mode=mode)


def write_pieces_durably(path: Path, content: Iterable[bytes | memoryview], *, mode: int = 0o666) -> None:
    """Do what ``write_durably`` does with content that comes a piece at a time.

    Args:
        path: of the file; its folder is made if it is missing.
        content: the new content.
        mode: permissions of the file.

    Raises:
        StorageError: it can't be written; the old content is still there.
    """
    with storage_errors(path), replacing(path, mode=mode) as file:
        for piece in content:
            file.write(piece)


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a file beside ``path`` that takes its place when the context ends without an error; else it goes.

    Args:
        path: of the file; its folder is made if it is missing.
        mode: permissions of the file.

    Raises:
        OSError: it can't be written; the old content is still there.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
    make_folder(path.parent)
    try:
        failpoint(f"write {path.name}")
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        failpoint(f"rename {path.name}")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    failpoint(f"written {path.name}")


def check_writable(path: Path) -> None:
    """Refuse a path that can't be written, before work is done whose result shall go there; changes no file.

    Raises:
        StorageError: it is a folder, or no file can be made beside it.
    """
    with storage_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        make_folder(path.parent)
        probe = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
        probe.touch()
        probe.unlink()


def is_plain_file(path: Path) -> bool:
    """Whether a file itself is there: no link to one, no folder, and nothing that one would wait for, as a pipe."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def make_way(path: Path) -> None:
    """Give a folder that stands where a file has to be written another name, so that nothing of it is lost.

    Raises:
        StorageError: it can't be renamed.
    """
    if path.is_dir() and not path.is_symlink():
        with storage_errors(path):
            path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}.folder"))


def drop_file(path: Path) -> None:
    """Remove a file, or a link in its place but not what it leads to; a folder there stays."""
    if path.is_symlink() or is_plain_file(path):
        path.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder of ours, if it is there; for 5 s, because a process that was killed may still write in it.

    Raises:
        StorageError: it can't be removed.
    """
    deadline_s = time.monotonic() + _REMOVE_S
    while True:
        try:
            shutil.rmtree(folder)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() >= deadline_s:
                raise StorageError(f"can't remove {folder}: {error.strerror}; remove it, or choose another") from error
        time.sleep(_RETRY_S)


def replace_folder(new: Path, target: Path) -> None:
    """Give a complete folder the place of another one, which goes only when the new one has its name.

    Raises:
        StorageError: it can't be done; the old folder is under its name or, after a crash, beside it as ``*.old``.
    """
    old = target.with_name(f"{target.name}.{secrets.token_hex(4)}.old")
    with storage_errors(target):
        had_one = os.path.lexists(target)
        if had_one:
            target.rename(old)
        try:
            rename_durably(new, target)
        except BaseException:
            if had_one:
                old.rename(target)
            raise
        if old.is_dir() and not old.is_symlink():
            remove_folder(old)
        elif had_one:
            old.unlink()


def rename_durably(path: Path, target: Path) -> None:
    """Give a complete file, or a folder of such files, its name in one step; both lie on one file system.

    Example: ``adapter.safetensors.part`` becomes ``adapter.safetensors``; after a power cut that name is absent, or
    the whole content is under it.

    Raises:
        StorageError: it can't be done; ``path`` is as before.
    """
    with storage_errors(target):
        _force_to_disk(path)
        path.replace(target)
        sync_folder(target.parent)


def _force_to_disk(path: Path) -> None:
    if path.is_dir():
        sync_folder(path)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, and force their names to the disk."""
    missing = [folder, *folder.parents]
    missing = [entry for entry in missing if not entry.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for entry in reversed(missing):
        sync_folder(entry.parent)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial_files(folder: Path) -> None:
    """Remove what a crash left half written; nobody else may be writing there."""
    for path in folder.glob(f"*{PARTIAL_SUFFIX}"):
        path.unlink(missing_ok=True)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` inside into a ``StorageError`` that says what can't be written.

    Raises:
        StorageError: an ``OSError`` was raised inside.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"can't write {path}: {reason}; make room or choose another folder, then resume") from error
