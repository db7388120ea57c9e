"""Files of the cache: each is complete and checked by its digest, or partial and goes on later.

A tensor is a safetensors file of its own, so that the loader reads it like any other shard. Its header is known
before the first byte comes; the partial file is that header and the bytes so far, and its size says where to go on.

Nothing is synced to the disk: what a power cut tears is found by its digest at the next use, and fetched again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ringtune.errors import CapacityError, IntegrityError, UsageError
from ringtune.files.safetensors_header import header_bytes
from ringtune.weights.manifest import TensorEntry

_READ_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
PARTIAL = ".part"


def file_header(entry: TensorEntry) -> bytes:
    """Make the header of a tensor's own safetensors file."""
    return header_bytes({entry.name: (entry.dtype, entry.shape)})


class CheckedFile:
    """A file of known size and digest that is complete, partial or absent.

    Args:
        path: where it is when it is complete.
        what: in words, for messages: ``tensor 'x'``.
        sha256: of its content, hex.
        nbytes: of its content.
        header: in front of the content; not part of the digest.

    Attributes:
        offset: bytes of the content that are there, while it is partial.
        origins: who they came from.
    """

    def __init__(self, path: Path, *, what: str, sha256: str, nbytes: int, header: bytes = b"") -> None:
        self.path = path
        self.what = what
        self.sha256 = sha256
        self.nbytes = nbytes
        self.offset = 0
        self.origins: set[str] = set()
        self._header = header
        self._partial = path.with_name(path.name + PARTIAL)
        self._digest = hashlib.sha256()

    def is_complete(self) -> bool:
        """Whether the file is there with the right content; a damaged one is removed.

        Raises:
            UsageError: the folder can't be written.
        """
        with writing(self.path.parent):
            if not self.path.is_file():
                return False
            if self.path.stat().st_size == len(self._header) + self.nbytes and self._is_intact():
                return True
            self.path.unlink()
            return False

    def resume(self) -> None:
        """Read a partial file, if there is a usable one, so that ``write`` goes on at its end."""
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

        Args:
            data: the bytes.
            origin: who they come from.

        Raises:
            IntegrityError: the content would be longer than ``nbytes``.
            CapacityError: the disk is full; what is there stays.
        """
        if self.offset + len(data) > self.nbytes:
            raise IntegrityError(f"{self.what} has {self.nbytes:,} bytes, more came; fetch it from another source")
        with writing(self.path.parent), self._partial.open("ab" if self.offset else "wb", buffering=0) as file:
            if not self.offset:
                _write_all(file.fileno(), self._header)
            else:
                file.truncate(len(self._header) + self.offset)
            _write_all(file.fileno(), data)
        self._digest.update(data)
        self.offset += len(data)
        self.origins.add(origin)

    def finish(self) -> None:
        """Check the digest and put the file in its place.

        Raises:
            IntegrityError: another digest; the partial file is gone.
        """
        if self.nbytes == 0:
            with writing(self.path.parent):
                self._partial.write_bytes(self._header)
        if self._digest.hexdigest() != self.sha256:
            self.discard()
            raise IntegrityError(f"{self.what} came with another digest than the manifest says; it was dropped")
        with writing(self.path.parent):
            self._partial.replace(self.path)

    def discard(self) -> None:
        """Delete the partial file."""
        self._partial.unlink(missing_ok=True)
        self.offset, self._digest = 0, hashlib.sha256()
        self.origins = set()

    def content(self) -> Iterator[bytes]:
        """Yield the content of the complete file in pieces."""
        with self.path.open("rb") as file:
            file.seek(len(self._header))
            while data := file.read(_READ_BYTES):
                yield data

    def _is_intact(self) -> bool:
        with self.path.open("rb") as file:
            has_header = file.read(len(self._header)) == self._header
            return has_header and hashlib.file_digest(file, "sha256").hexdigest() == self.sha256

    def _count(self, file: BinaryIO) -> bool:
        while data := file.read(_READ_BYTES):
            self._digest.update(data)
            self.offset += len(data)
        return self.offset <= self.nbytes


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a failed access to the cache inside into an error that says what to do.

    Raises:
        CapacityError: the disk is full.
        UsageError: anything else, e.g. no permission.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise CapacityError(
                f"the disk of the cache is full ({folder}); make room, or give --cache DIR on another disk"
            ) from error
        raise UsageError(f"can't use the cache folder {folder}: {error.strerror}; give --cache DIR") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file so that it is there whole or not at all.

    Raises:
        CapacityError: the disk is full.
        UsageError: the folder can't be written.
    """
    with writing(path.parent):
        partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
        partial.write_bytes(content)
        partial.replace(path)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
