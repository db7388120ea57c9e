"""Durable files, which survive a crash, and folders with a marker, a lock and private permissions.

A file has either the old content or the new one: the new one is written beside it and forced to disk, then renamed, and
the rename is forced to disk too. Without the second force, a power cut may restore the old name; without the first, a
file may be full of zeros.

Files of others in a folder of RingTune are never removed::

    DIR/.ringtune-run     the marker: this folder was empty or absent when ringtune began to use it
    DIR/.ringtune-lock    held by the process that writes there, with its process id
    DIR.replaced-<time>/  earlier content of DIR that was replaced; FILE.replaced-<time> of a file

Source: rename(2), fsync(2); "All File Systems Are Not Created Equal", Pillai and others, OSDI 2014; flock(2): a lock is
of the open file, so the kernel releases it when the process ends, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import filecmp
import itertools
import json
import logging
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, Final

from ringtune import __version__
from ringtune.errors import BusyError, StorageError, UsageError
from ringtune.storage.strict import parse_json
from ringtune.texts import listed

PARTIAL_SUFFIX = ".tmp"
_REMOVE_S = 5.0
_RETRY_S = 0.1


def failpoint(place: str) -> object:
    """Do nothing; tests replace it to fail at ``write NAME``, ``rename NAME`` and ``written NAME``."""
    return None


def write_durably(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace a file's content in one step: after a crash it is the old content or the new one.

    The folder is made if it is missing. ``mode``: permissions of the file from its creation on, before the umask.

    Raises ``StorageError``: it can't be written; the old content is still there.
    """
    write_pieces_durably(path, [content], mode=mode)


def write_pieces_durably(path: Path, content: Iterable[bytes | memoryview], *, mode: int = 0o666) -> None:
    """Replace a file's content as ``write_durably``, with content in pieces."""
    with storage_errors(path), replacing(path, mode=mode) as file:
        for piece in content:
            file.write(piece)


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a file that replaces ``path`` if the context ends without an error; else it is removed.

    Its folder is made if it is missing.

    Raises ``OSError``: it can't be written; the old content is still there.
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
    """Refuse a path that can't be written, before its content is computed, with ``StorageError``; changes no file."""
    with storage_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        make_folder(path.parent)
        probe = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
        probe.touch()
        probe.unlink()


def itself(path: str, flags: int) -> int:
    """Open a file that is no link, as ``opener`` of ``open``: a link in a folder of others may lead anywhere."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "it is a symbolic link, which is not followed; remove it"
        raise


def is_plain_file(path: Path) -> bool:
    """Whether a path is a regular file itself: no link, folder, pipe or device."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def move_folder_aside(path: Path) -> None:
    """Rename a folder at the path of a file to be written, to keep its content; raises ``StorageError``."""
    if path.is_dir() and not path.is_symlink():
        with storage_errors(path):
            path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}.folder"))


def drop_file(path: Path) -> None:
    """Remove a file, or a link but not its target; a folder stays."""
    if path.is_symlink() or is_plain_file(path):
        path.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder if it exists, with retries for 5 s, because a killed process may still write in it.

    Raises ``StorageError`` after that.
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
    """Rename a complete folder to the place of another one, which is removed after that; raises ``StorageError``."""
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
    """Rename a complete file, or a folder of such files, in one step on one file system; raises ``StorageError``.

    Example: ``adapter.safetensors.part`` becomes ``adapter.safetensors``; after a power cut that name is absent or
    complete.
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


def temporary_file(folder: Path | None) -> BinaryIO:
    """Open a new file without a name, which is gone when it is closed, in a folder if there is that folder."""
    place = folder if folder is not None and folder.is_dir() else Path(tempfile.gettempdir())
    with storage_errors(place):
        return tempfile.TemporaryFile(dir=place)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, and force their names to disk."""
    missing = [folder, *folder.parents]
    missing = [entry for entry in missing if not entry.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for entry in reversed(missing):
        sync_folder(entry.parent)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial_files(folder: Path) -> None:
    """Remove partial files of a crash; no other process may write there."""
    for path in folder.glob(f"*{PARTIAL_SUFFIX}"):
        path.unlink(missing_ok=True)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Convert an ``OSError`` inside into a ``StorageError`` that names the path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"can't write {path}: {reason}; make room or choose another folder") from error


_LOG = logging.getLogger(__name__)
LOCK: Final = ".ringtune-lock"
_PRIVATE: Final = 0o700
_OTHERS: Final = 0o077
_MAX_MARKER_BYTES: Final = 4096
_MAX_NAMED: Final = 3
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})


# ---- marker -----------------------------------------------------------------------------------------


def marker(kind: str) -> str:
    """Return the marker's file name of a kind of folder, such as ``run``."""
    return f".ringtune-{kind}"


def is_claimed(folder: Path, kind: str) -> bool:
    """Whether a folder has a valid marker of its kind."""
    path = folder / marker(kind)
    try:
        if not is_plain_file(path) or path.stat().st_size > _MAX_MARKER_BYTES:
            return False
        content = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("ringtune") == kind


def require_free(folder: Path, kind: str) -> None:
    """Refuse a folder with entries but without the marker; writes nothing.

    A marker that was not written to its end counts as none.
    """
    with storage_errors(folder):
        names = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
    others = [name for name in names if name != LOCK and not name.startswith(f"{marker(kind)}.")]
    if not others or is_claimed(folder, kind):
        return
    raise UsageError(
        f"{folder} is not the folder of a {kind}: it holds {listed(others, _MAX_NAMED)}, which nothing may write over; "
        f"give a folder of its own, such as {folder / kind}, or copy {marker(kind)} too where it is a copy of one"
    )


def require_absent(path: Path) -> None:
    """Refuse an existing path, for files that are written once; raises ``UsageError``."""
    if os.path.lexists(path):
        raise UsageError(f"{path} is there already; give another name, or remove it")


def require_own(path: Path, what: str, is_own: Callable[[Path], bool]) -> None:
    """Refuse to overwrite a file that the same command has not written; raises ``UsageError``."""
    if not os.path.lexists(path) or path.is_dir():
        return
    try:
        is_known = is_plain_file(path) and is_own(path)
    except (OSError, ValueError):
        is_known = False
    if not is_known:
        raise UsageError(f"{path} is there already and is no {what}; give another name, or remove it")


def claim(folder: Path, kind: str) -> None:
    """Make a folder and write its marker, unless it has it; raises ``UsageError`` or ``StorageError``."""
    require_free(folder, kind)
    if not is_claimed(folder, kind):
        mark(folder, kind)


def mark(folder: Path, kind: str) -> None:
    """Write the marker, whatever the folder contains; raises ``StorageError`` if it can't be written."""
    text = json.dumps({"ringtune": kind, "format": 1, "version": __version__})
    write_durably(folder / marker(kind), f"{text}\n".encode())


def put_aside(folder: Path, names: Iterable[str], kind: str) -> Path | None:
    """Move entries of a folder, names or paths in it, into a new folder ``<folder>.replaced-<time>`` with a marker.

    An interrupted move leaves each entry in one of the two folders. Nothing is removed. Returns None if there was
    nothing to move. Raises ``StorageError``.
    """
    present = [name for name in names if os.path.lexists(folder / name)]
    if not present:
        return None
    real = folder.resolve()
    with storage_errors(real.with_name(f"{real.name}.replaced")):
        for target in _replaced(real):
            with suppress(FileExistsError):
                target.mkdir()
                break
        mark(target, kind)
        for name in present:
            make_folder((target / name).parent)
            (real / name).rename(target / name)
        sync_folder(target)
        sync_folder(real)
    return target


def put_other_aside(path: Path, new: BinaryIO) -> Path | None:
    """Rename a file that is to be replaced to ``<path>.replaced-<time>``, and return that; raises ``OSError``.

    Returns None if there is no file, or its content is that of the file ``new``.
    """
    new.flush()
    if not os.path.lexists(path) or (is_plain_file(path) and filecmp.cmp(path, new.name, shallow=False)):
        return None
    return path.rename(next(target for target in _replaced(path) if not os.path.lexists(target)))


def _replaced(path: Path) -> Iterator[Path]:
    """Yield ``<path>.replaced-<time>``, then that name with a number from 2 on."""
    name = f"{path.name}.replaced-{time.strftime('%Y%m%d-%H%M%S')}"
    yield path.with_name(name)
    yield from (path.with_name(f"{name}+{number}") for number in itertools.count(2))


# ---- lock -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Held:
    descriptor: int
    thread: int
    count: int = 1


class FileLock:
    """A lock between processes, and between threads of one process.

    On a file system without locks it excludes only threads, with a warning in the log.

    Args:
        path: of the lock file, which is never removed; its folder must exist.
        busy: message of the refusal; ``{holder}`` in it is replaced by the holding process.
        is_reentrant: whether the holding thread may acquire it again.
    """

    _all: ClassVar[dict[tuple[int, int], _Held]] = {}
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: Path, *, busy: str, is_reentrant: bool = False) -> None:
        self._path, self._busy, self._is_reentrant = path, busy, is_reentrant
        self._key: tuple[int, int] | None = None

    def acquire(self, *, wait_s: float = 0.0, stop: threading.Event | None = None) -> None:
        """Acquire the lock within ``wait_s`` seconds, or until ``stop`` is set.

        Raises ``BusyError`` or ``StorageError``.
        """
        end_s, stop = time.monotonic() + wait_s, stop or threading.Event()
        while True:
            try:
                return self._acquire()
            except BusyError:
                if time.monotonic() >= end_s or stop.wait(_RETRY_S):
                    raise

    def _acquire(self) -> None:
        with storage_errors(self._path), self._guard:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._path, flags, 0o600)
            status = os.fstat(descriptor)
            key, held = (status.st_dev, status.st_ino), self._all.get((status.st_dev, status.st_ino))
            if held is not None:
                os.close(descriptor)
                if not self._is_reentrant or held.thread != threading.get_ident():
                    raise self._refusal(f"process {os.getpid()} (this one)")
                held.count += 1
            else:
                self._lock(descriptor)
                self._all[key] = _Held(descriptor, threading.get_ident())
            self._key = key

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                _LOG.warning(
                    "%s: the file system has no locks (%s), so a second process that writes there is not noticed",
                    self._path,
                    error.strerror,
                )
                return
            pid = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            raise self._refusal(f"process {pid}" if pid.isdecimal() else "another process") from error
        with suppress(OSError):  # a full disk: it is locked all the same, by a process without a name
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def _refusal(self, holder: str) -> BusyError:
        return BusyError(self._busy.replace("{holder}", holder))  # a path in it may have braces

    def release(self) -> None:
        """Release the lock once; it is free after as many releases as acquisitions."""
        with self._guard:
            held = self._all.get(self._key) if self._key else None
            if held is None or self._key is None:
                return
            held.count -= 1
            if not held.count:
                os.close(self._all.pop(self._key).descriptor)
                self._key = None

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


# ---- rights -----------------------------------------------------------------------------------------


def make_private_folder(folder: Path, *, is_ours: Callable[[str], bool] = lambda name: True) -> None:
    """Make a folder with mode 0700, or change the mode of an existing one, with a warning in the log.

    ``is_ours``: whether an entry of this name is RingTune's; a folder with another one keeps its mode, with a
    warning. Raises ``StorageError``.
    """
    with storage_errors(folder):
        is_new = not folder.exists()
        make_folder(folder)
        mode = stat.S_IMODE(folder.stat().st_mode)
        if not mode & _OTHERS:
            return
        if not is_new and not all(is_ours(entry.name) for entry in folder.iterdir()):
            _LOG.warning("%s has files of others, so it stays open to other users (mode %04o)", folder, mode)
            return
        folder.chmod(_PRIVATE)
        if not is_new:
            _LOG.warning("%s was open to other users (mode %04o); now only this user can read it", folder, mode)


def keep_files_private() -> None:
    """Set the umask so that new files and folders are this user's alone: 0600 and 0700."""
    os.umask(_OTHERS)
