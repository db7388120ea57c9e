"""Cache of fetched base weights on a device's disk.

::

    CACHE/models/<digest of the manifest>/
        lock                          one process at a time
        outline/                      config, tokenizer, and model.safetensors as a sparse file: all headers, from which
                                      a model is planned and a block is timed
        weights/<name>/               a model folder with the fetched tensors, one file each

Names below ``CACHE`` are digests, a fixed list of file names, and a model name of harmless characters.

Each tensor is a safetensors file of its own, which the loader reads like any other weights file. A partial file is the
header and the bytes so far; its size says where to resume. A complete file has the digest of the manifest.

Nothing is synced to the disk: a file torn by a power cut fails its digest at the next use and is fetched again, and a
torn outline is written again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from ringtune.errors import BusyError, CapacityError, DeadlineError, IntegrityError, InterruptedRunError, UsageError
from ringtune.models.folder import INDEX_FILE, WEIGHTS_FILE
from ringtune.models.weights_by_digest import FileEntry, ModelManifest, TensorEntry
from ringtune.quantities import format_bytes
from ringtune.storage.durable import FileLock
from ringtune.storage.pieces import note_sha256
from ringtune.storage.tensor_files import header_bytes

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_SPARE_BYTES = 1 << 24


class ModelCache:
    """The cached files of one model; use it inside ``locked``.

    Args:
        name: model name; the folder that the loader reads, and hence the result, has it.

    Raises:
        UsageError: the folder can't be written.
        IntegrityError: a link leads out of the cache.
    """

    def __init__(self, root: Path, manifest: ModelManifest, name: str) -> None:
        self.manifest, self._root = manifest, root
        self._folder = self._inside(root / "models" / manifest.sha256)
        self.outline = self._inside(self._folder / "outline")
        self.weights = self._inside(self._folder / "weights" / (name if _SAFE_NAME.fullmatch(name) else "model"))
        with writing(root):
            for folder in (self.outline, self.weights):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextlib.contextmanager
    def locked(self, *, deadline_s: float, stop: threading.Event) -> Iterator[None]:
        """Lock the model's folder against other processes of this device; the end of the process releases the lock.

        ``stop`` is set when the run is released. Raises ``DeadlineError`` or ``InterruptedRunError``.
        """
        lock = FileLock(
            self._folder / "lock", busy=f"{{holder}} has been fetching into {self._folder}; give --cache DIR"
        )
        try:
            lock.acquire(wait_s=deadline_s - time.monotonic(), stop=stop)
        except BusyError as error:
            if stop.is_set():
                raise InterruptedRunError("the run was released while its weights were fetched") from error
            raise DeadlineError(str(error)) from error
        try:
            yield
        finally:
            lock.release()

    # ---- files --------------------------------------------------------------------------------------

    def file(self, entry: FileEntry) -> CheckedFile:
        """Return the cached copy, complete or not, of a file that is no weights, such as the tokenizer."""
        path = self._inside(self.outline / entry.name)
        with writing(self._root):
            path.parent.mkdir(exist_ok=True, mode=0o700)
        return CheckedFile(path, what=f"file {entry.name}", sha256=entry.sha256, nbytes=entry.nbytes)

    def tensor(self, entry: TensorEntry) -> CheckedFile:
        """Return the cached file of one tensor, complete or not."""
        path = self._inside(self.weights / _file_name(entry))
        what, header = f"tensor {entry.name!r}", file_header(entry)
        return CheckedFile(path, what=what, sha256=entry.sha256, nbytes=entry.nbytes, header=header)

    def require_room(self, files: Sequence[CheckedFile]) -> None:
        """Refuse to fetch files for which the disk has no room; raises ``CapacityError``."""
        needed_bytes = sum(file.nbytes - file.offset for file in files)
        free_bytes = shutil.disk_usage(self._folder).free
        if needed_bytes + _SPARE_BYTES > free_bytes:
            raise CapacityError(
                f"the weights of this node need {format_bytes(needed_bytes)} in {self._root}, "
                f"{format_bytes(free_bytes)} are free; make room, or give --cache DIR on another disk"
            )

    # ---- model folders ------------------------------------------------------------------------------

    def write_outline(self) -> Path:
        """Write ``model.safetensors`` of the outline if it is missing or torn: all headers, and no bytes of tensors."""
        path = self.outline / WEIGHTS_FILE
        header = header_bytes({entry.name: (entry.dtype, entry.shape) for entry in self.manifest.tensors})
        at, total_bytes = len(header), len(header) + sum(entry.nbytes for entry in self.manifest.tensors)
        if not CheckedFile(path, what="outline", sha256="", nbytes=total_bytes - at, header=header).is_whole():
            partial = path.with_name(path.name + PARTIAL)
            with writing(self._root):
                with partial.open("wb") as file:
                    file.write(header)
                    file.truncate(total_bytes)
                partial.replace(path)
        for entry in self.manifest.tensors:
            note_sha256(path, at, entry.nbytes, entry.sha256)
            at += entry.nbytes
        return self.outline

    def publish(self, files: Sequence[FileEntry]) -> Path:
        """Write the index of the tensors with a whole file, and copy the small files beside; return this model folder.

        A torn file of an earlier run, which this one may not need, would make the folder unreadable.
        """
        whole = {
            entry.name: path.name
            for entry in self.manifest.tensors
            if (path := self.weights / _file_name(entry)).is_file() and self.tensor(entry).is_whole()
        }
        with writing(self._root):
            for entry in files:
                (self.weights / entry.name).parent.mkdir(exist_ok=True, mode=0o700)
                write_whole(self.weights / entry.name, (self.outline / entry.name).read_bytes())
        write_whole(self.weights / INDEX_FILE, json.dumps({"weight_map": whole}, indent=1).encode())
        return self.weights

    def _inside(self, path: Path) -> Path:
        if not path.resolve().is_relative_to(self._root.resolve()):
            raise IntegrityError(f"{path} leads out of the cache; remove it")
        return path


def _file_name(entry: TensorEntry) -> str:
    """Name a tensor's file: 40 hex digits of a digest of name, dtype, shape and content digest."""
    key = json.dumps([entry.name, entry.dtype, entry.shape, entry.sha256])
    return f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.safetensors"


_READ_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
PARTIAL = ".part"


def file_header(entry: TensorEntry) -> bytes:
    """Make the header of a tensor's own safetensors file."""
    return header_bytes({entry.name: (entry.dtype, entry.shape)})


class CheckedFile:
    """A file of known size and digest: complete, partial or absent.

    Args:
        header: before the content; not part of the digest.

    Attributes:
        offset: bytes of the content in the partial file.
    """

    def __init__(self, path: Path, *, what: str, sha256: str, nbytes: int, header: bytes = b"") -> None:
        self.path, self.what, self.sha256 = path, what, sha256
        self.nbytes = nbytes
        self.offset = 0
        self.origins: set[str] = set()
        self._header = header
        self._partial = path.with_name(path.name + PARTIAL)
        self._digest = hashlib.sha256()

    def is_whole(self) -> bool:
        """Whether the complete file has the right size and header, whatever its content; raises ``UsageError``."""
        with writing(self.path.parent):
            if not self.path.is_file() or self.path.stat().st_size != len(self._header) + self.nbytes:
                return False
            with self.path.open("rb") as file:
                return file.read(len(self._header)) == self._header

    def is_complete(self) -> bool:
        """Whether the complete file is whole, with the right digest; a wrong one is removed; raises ``UsageError``."""
        if self.is_whole() and self._is_intact():
            return True
        with writing(self.path.parent):
            if self.path.is_file():
                self.path.unlink()
        return False

    def resume(self) -> None:
        """Read the partial file, so that ``write`` appends to it; discard one with another header or too many bytes."""
        with writing(self.path.parent):
            self.offset, self._digest = 0, hashlib.sha256()
            if not self._partial.is_file():
                return
            with self._partial.open("rb") as file:
                if file.read(len(self._header)) != self._header or not self._count(file):
                    self.discard()
            self.origins = {"an earlier fetch"} if self.offset else set()

    def write(self, data: bytes, origin: str) -> None:
        """Append the next bytes of the content to the partial file, which outlives this process.

        Raises ``IntegrityError`` if the content would be longer than ``nbytes``, ``CapacityError`` if the disk is full;
        the bytes already written stay.
        """
        if self.offset + len(data) > self.nbytes:
            raise IntegrityError(f"{self.what} has {self.nbytes:,} bytes, more arrived; fetch it from another source")
        with writing(self.path.parent), self._partial.open("ab" if self.offset else "wb") as file:
            if not self.offset:
                file.write(self._header)
            else:
                file.truncate(len(self._header) + self.offset)
            file.write(data)
        self._digest.update(data)
        self.offset += len(data)
        self.origins.add(origin)

    def finish(self) -> None:
        """Check the digest of the received bytes and rename the partial file to ``path``; raises ``IntegrityError``."""
        if self.nbytes == 0:
            with writing(self.path.parent):
                self._partial.write_bytes(self._header)
        if self._digest.hexdigest() != self.sha256:
            self.discard()
            raise IntegrityError(f"{self.what} arrived with another digest than the manifest has; it was dropped")
        with writing(self.path.parent):
            self._partial.replace(self.path)

    def discard(self) -> None:
        """Delete the partial file."""
        self._partial.unlink(missing_ok=True)
        self.offset, self._digest = 0, hashlib.sha256()
        self.origins = set()

    def content(self) -> Iterator[bytes]:
        """Yield the content of the complete file, without header, in pieces of 1 MiB."""
        with self.path.open("rb") as file:
            file.seek(len(self._header))
            while data := file.read(_READ_BYTES):
                yield data

    def _is_intact(self) -> bool:
        with writing(self.path.parent), self.path.open("rb") as file:
            file.seek(len(self._header))
            return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256

    def _count(self, file: BinaryIO) -> bool:
        while data := file.read(_READ_BYTES):
            self._digest.update(data)
            self.offset += len(data)
        return self.offset <= self.nbytes


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an ``OSError`` into ``CapacityError`` of a full disk, or ``UsageError``, with ``folder`` and a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise CapacityError(
                f"the disk of the cache is full ({folder}); make room, or give --cache DIR on another disk"
            ) from error
        raise UsageError(f"can't use the cache folder {folder}: {error.strerror}; give --cache DIR") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file under a temporary name, then rename it; raises ``CapacityError`` or ``UsageError``."""
    with writing(path.parent):
        partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
        partial.write_bytes(content)
        partial.replace(path)
