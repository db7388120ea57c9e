"""Files as messages: cut into chunks with a digest at the end, and joined again.

Both sides hold one chunk at a time, whatever the size of the file. The receiver sets the allowed names and the total
size; nothing from a sender becomes a path or an allocation unchecked.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from ringtune.errors import IntegrityError, StorageError
from ringtune.v1 import control_pb2

CHUNK_BYTES: Final = 1 << 20
_ONE_VERSION: Final = "use one version on all machines"


class FileCutter:
    """Cuts one file into messages as its content arrives; the last message has the digest."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._pending = bytearray()

    def add(self, content: bytes | memoryview) -> Iterator[control_pb2.FileChunk]:
        """Yield the full messages; the rest is kept for more content or the end."""
        rest = memoryview(content)
        while rest:
            if len(self._pending) == CHUNK_BYTES:
                yield self._message(last=False)
            room = CHUNK_BYTES - len(self._pending)
            self._pending += rest[:room]
            rest = rest[room:]

    def flush(self) -> Iterator[control_pb2.FileChunk]:
        """Yield a message with what is kept, if anything is."""
        if self._pending:
            yield self._message(last=False)

    def end(self) -> control_pb2.FileChunk:
        """Make the last message, with the digest of the whole file."""
        return self._message(last=True)

    def _message(self, *, last: bool) -> control_pb2.FileChunk:
        chunk = bytes(self._pending)
        self._pending.clear()
        self._digest.update(chunk)
        digest = self._digest.hexdigest() if last else ""
        return control_pb2.FileChunk(path=self._path, chunk=chunk, last=last, sha256=digest)


def cut_pieces(path: str, content: Iterable[bytes | memoryview]) -> Iterator[control_pb2.FileChunk]:
    """Cut one file into messages, from an iterable of its content."""
    cutter = FileCutter(path)
    for piece in content:
        yield from cutter.add(piece)
    yield cutter.end()


class FileJoiner:
    """Joins the messages of one file into ``file``, which the caller closes; ``source`` is the sender, for errors."""

    def __init__(self, path: str, file: BinaryIO, *, source: str) -> None:
        self.path = path
        self.file = file
        self._source = source
        self._digest = hashlib.sha256()

    def add(self, chunk: control_pb2.FileChunk) -> bool:
        """Write a chunk; return whether it was the last one; raises ``IntegrityError``."""
        self._digest.update(chunk.chunk)
        self.file.write(chunk.chunk)
        if chunk.last and chunk.sha256 != self._digest.hexdigest():
            raise IntegrityError(f"{self.path} from {self._source} arrived damaged (its digest differs); try again")
        return chunk.last


SLOWEST_BYTES_PER_S: Final = 8 << 10
_MAX_SMALL: Final = 1024
_USUAL_BYTES: Final = 1 << 16


def in_time(
    chunks: Iterable[control_pb2.FileChunk],
    patience_s: float,
    *,
    source: str,
    now_s: Callable[[], float] = time.monotonic,
) -> Iterator[control_pb2.FileChunk]:
    """Pass chunks on that arrive within ``patience_s`` of the first one, and a second more for each 8 KiB.

    A sender of a byte now and then would hold its receiver as long as that waits for more, and one of empty chunks
    would keep it at work: besides the last ones of files, 1,024 may have less than 64 KiB. Raises ``IntegrityError``.
    """
    began_s, num_bytes, num_open = None, 0, 0
    for chunk in chunks:
        began_s = now_s() if began_s is None else began_s
        num_bytes += len(chunk.chunk)
        num_open += not chunk.last
        taken_s = now_s() - began_s
        if num_open > _MAX_SMALL + num_bytes // _USUAL_BYTES:
            raise IntegrityError(
                f"{source} has sent {num_bytes:,} bytes in {num_open:,} chunks, most of them far too small; use one "
                "version on all machines, or go on without it"
            )
        if taken_s > patience_s + num_bytes / SLOWEST_BYTES_PER_S:
            raise IntegrityError(
                f"{source} has sent {num_bytes:,} bytes in {taken_s:.0f} s, less than {SLOWEST_BYTES_PER_S:,} a second "
                f"after the first {patience_s:g} s; check its link, or go on without it"
            )
        yield chunk


def write_files(
    chunks: Iterable[control_pb2.FileChunk], folder: Path, *, names: Collection[str], max_bytes: int, source: str
) -> None:
    """Write a user's files, exactly those with these names; leave room on the disk. Else as ``write_any_files``."""

    def with_room() -> Iterator[control_pb2.FileChunk]:
        for chunk in chunks:
            _require_room(folder)
            yield chunk

    written = write_any_files(with_room(), folder, names=names, max_bytes=max_bytes, source=source)
    missing = sorted(set(names) - written.keys())
    if missing:
        raise IntegrityError(f"{source} did not send {', '.join(missing)}; {_ONE_VERSION}")


_FREE_BYTES: Final = 1 << 28
_FREE_SHARE: Final = 0.05
"""What is left free of the disk, whichever is less: runs of others are stored there too."""


def _require_room(folder: Path) -> None:
    disk = shutil.disk_usage(folder)
    if disk.free < min(_FREE_BYTES, _FREE_SHARE * disk.total):
        raise OSError(errno.ENOSPC, f"the disk of {folder} has {disk.free >> 20:,} MiB left, which are for runs")


def write_any_files(
    chunks: Iterable[control_pb2.FileChunk], folder: Path, *, names: Collection[str], max_bytes: int, source: str
) -> dict[str, Path]:
    """Write files to an empty folder; raises ``IntegrityError`` or ``StorageError``."""
    written: dict[str, Path] = {}
    pending, left_bytes = iter(chunks), max_bytes
    try:
        for first in pending:
            path = first.path
            if path not in names or path in written:
                raise IntegrityError(f"{source} sent a file {path!r} that was not expected; {_ONE_VERSION}")
            written[path] = folder / path
            if "/" in path:
                written[path].parent.mkdir(parents=True, exist_ok=True)
            with written[path].open("xb") as file:
                joiner = FileJoiner(path, file, source=source)
                for chunk in itertools.chain([first], pending):
                    if chunk.path != path:
                        began = f"{source} began {chunk.path!r} before {path!r} was complete"
                        raise IntegrityError(f"{began}; {_ONE_VERSION}")
                    left_bytes -= len(chunk.chunk)
                    if left_bytes < 0:
                        raise IntegrityError(f"{source} sent more than {max_bytes:,} bytes of files; {_ONE_VERSION}")
                    if joiner.add(chunk):
                        break
                else:
                    raise IntegrityError(f"{path} from {source} is not complete; try again")
    except OSError as error:
        raise StorageError(f"can't write the files that {source} sent: {error.strerror}; make room") from error
    return written
