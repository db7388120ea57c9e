"""Content of a file as an iterable of pieces, so that a file of any size is written or sent in little memory.

Large content (a head, an adapter, optimizer state) is in tensors, in a file, or in the messages of a link. ``Pieces``
reads it without a second copy, any number of times, whole or in part.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from ringtune.errors import IntegrityError
from ringtune.storage.strict import regular

PIECE_BYTES: Final = 1 << 20
"""Bytes of a piece that is read from a file."""

Piece = bytes | memoryview


class Pieces:
    """Content of known size in pieces, with a new iterator for each pass."""

    def __init__(self, size_bytes: int, make: Callable[[], Iterator[Piece]]) -> None:
        self.size_bytes = size_bytes
        self._make = make

    @staticmethod
    def of(content: bytes | memoryview) -> Pieces:
        """Return content in memory as pieces, without a copy."""
        return HeldPieces([memoryview(content)])

    def __iter__(self) -> Iterator[Piece]:
        return self._make()

    def __bytes__(self) -> bytes:
        return b"".join(self)

    def part(self, start: int, size_bytes: int) -> Pieces:
        """Return ``size_bytes`` of the content from ``start`` on, at most up to its end."""
        stop = min(start + size_bytes, self.size_bytes)
        return Pieces(max(0, stop - start), lambda: self._between(start, stop))

    def sha256(self) -> str:
        """Digest of the content, hex."""
        digest = hashlib.sha256()
        for piece in self:
            digest.update(piece)
        return digest.hexdigest()

    def let_go(self, before: int) -> None:
        """Free the first ``before`` bytes, if they are held in memory for this object."""

    def _between(self, start: int, stop: int) -> Iterator[Piece]:
        at = 0
        for piece in self:
            first, last = max(start - at, 0), min(stop - at, len(piece))
            if first < last:
                yield memoryview(piece)[first:last]
            at += len(piece)
            if at >= stop:
                return


class HeldPieces(Pieces):
    """Content in memory, in pieces that can be freed one by one."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        super().__init__(sum(piece.nbytes for piece in pieces), lambda: iter(self._held()))
        self._pieces: list[memoryview | None] = list(pieces)
        self._ends = tuple(itertools.accumulate(piece.nbytes for piece in pieces))

    def let_go(self, before: int) -> None:
        """Free the pieces within the first ``before`` bytes; they can't be read any more."""
        for index, end in enumerate(self._ends):
            if end > before:
                return
            self._pieces[index] = None

    def _held(self) -> Iterator[memoryview]:
        return (self._require(index) for index in range(len(self._pieces)))

    def _between(self, start: int, stop: int) -> Iterator[memoryview]:
        begin = 0
        for index, end in enumerate(self._ends):
            if start < end and begin < stop:
                yield self._require(index)[max(0, start - begin) : stop - begin]
            begin = end

    def _require(self, index: int) -> memoryview:
        piece = self._pieces[index]
        if piece is None:
            raise ValueError("a released piece is read again; please report this")
        return piece


class JoinedPieces(Pieces):
    """Several contents, one after the other; a part reads those alone that it has something of."""

    def __init__(self, contents: Sequence[Pieces]) -> None:
        super().__init__(sum(each.size_bytes for each in contents), lambda: itertools.chain.from_iterable(contents))
        self._contents = contents

    def _between(self, start: int, stop: int) -> Iterator[Piece]:
        begin = 0
        for content in self._contents:
            end = begin + content.size_bytes
            if start < end and begin < stop:
                first = max(start - begin, 0)
                yield from content.part(first, min(stop, end) - begin - first)
            begin = end


class FilePieces(Pieces):
    """Content of a file, or a range of it; raises ``IntegrityError`` where it can't be read, or becomes shorter."""

    def __init__(self, path: Path, start: int = 0, size_bytes: int | None = None) -> None:
        with _read_errors(path):
            in_file = max(0, path.stat().st_size - start)
        super().__init__(in_file if size_bytes is None else min(size_bytes, in_file), self._read)
        self._path = path
        self._start = start

    @property
    def name(self) -> str:
        """Name of the file, without its folder."""
        return self._path.name

    def part(self, start: int, size_bytes: int) -> Pieces:
        """Return a range of the range, which is read alone."""
        part = FilePieces(self._path, self._start + start)
        part.size_bytes = max(0, min(size_bytes, self.size_bytes - start))  # also where the file is shorter by now
        return part

    def _read(self) -> Iterator[bytes]:
        left = self.size_bytes
        with _read_errors(self._path), open(self._path, "rb", opener=regular) as file:
            file.seek(self._start)
            while left:
                if not (piece := file.read(min(PIECE_BYTES, left))):
                    raise IntegrityError(f"{self._path} has become shorter while it was read; copy it again")
                left -= len(piece)
                yield piece


_MAX_KNOWN: Final = 200_000
_SETTLED_NS: Final = 2_000_000_000
"""Of a file that was written more recently no digest is kept: a second write could leave size and time as they are."""
_known: dict[tuple[int, ...], str] = {}


def file_sha256(path: Path, start: int, size_bytes: int) -> str:
    """Digest of a range of a file, hex; it is read once in a process, as long as the file stays as it is.

    Raises ``IntegrityError``: it can't be read.
    """
    range_ = (*_state(path), start, size_bytes)
    if range_ in _known:
        return _known[range_]
    digest = FilePieces(path, start, size_bytes).sha256()
    if (state := _state(path)) == range_[: len(state)] and time.time_ns() - state[-1] > _SETTLED_NS:
        _remember(range_, digest)
    return digest


def note_sha256(path: Path, start: int, size_bytes: int, digest: str) -> None:
    """Let ``file_sha256`` return this digest, of what a sparse file stands for, as long as the file stays as it is."""
    _remember((*_state(path), start, size_bytes), digest)


def _remember(range_: tuple[int, ...], digest: str) -> None:
    if len(_known) >= _MAX_KNOWN:
        _known.pop(next(iter(_known)), None)  # the oldest: those of the present model have just been noted
    _known[range_] = digest


def _state(path: Path) -> tuple[int, ...]:
    with _read_errors(path):
        status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise IntegrityError(f"{path} can't be read: {error.strerror}; check the disk") from error


class OpenFilePieces(Pieces):
    """Content of an open file, perhaps without a name; the file is closed once nobody has this object or a part."""

    def __init__(self, file: BinaryIO) -> None:
        file.flush()
        size_bytes = os.fstat(file.fileno()).st_size
        super().__init__(size_bytes, lambda: _read(file, 0, size_bytes))
        self._file = file
        weakref.finalize(self, file.close)

    def _between(self, start: int, stop: int) -> Iterator[bytes]:
        return _read(self._file, start, stop)


def _read(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    while start < stop and (piece := os.pread(file.fileno(), min(PIECE_BYTES, stop - start), start)):
        start += len(piece)
        yield piece
