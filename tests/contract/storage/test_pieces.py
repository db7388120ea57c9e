"""Content that comes in pieces: gone through as often as one likes, cut into parts, and let go of."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtune.errors import IntegrityError
from ringtune.storage import pieces
from ringtune.storage.durable import temporary_file
from ringtune.storage.pieces import (
    PIECE_BYTES,
    FilePieces,
    HeldPieces,
    JoinedPieces,
    OpenFilePieces,
    Piece,
    Pieces,
    file_sha256,
    note_sha256,
)
from tests.support.cases import cases

CONTENT = bytes(range(100))


def cut(sizes: list[int]) -> list[memoryview]:
    """The content in pieces of these sizes; the rest is the last one."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(memoryview(CONTENT)[at : at + size])
        at += size
    return [*pieces, memoryview(CONTENT)[at:]]


def made(pieces: list[memoryview]) -> Pieces:
    """Content that is made anew each time."""

    def make() -> Iterator[Piece]:
        return iter(pieces)

    return Pieces(len(CONTENT), make)


def joined(pieces: list[memoryview]) -> Pieces:
    """Contents one after the other."""
    return JoinedPieces([HeldPieces([piece]) for piece in pieces])


@cases("kind", [made, HeldPieces, joined])
@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, 40), max_size=5), start=st.integers(0, 120), size=st.integers(0, 120))
def test_part_is_the_range_however_the_content_is_cut(
    kind: Callable[[list[memoryview]], Pieces], sizes: list[int], start: int, size: int
) -> None:
    """A part of a part too; a range beyond the end is cut off."""
    content = kind(cut(sizes))
    part = content.part(start, size)
    assert bytes(part) == CONTENT[start : start + size]
    assert part.size_bytes == len(bytes(part))
    assert bytes(part.part(3, 5)) == CONTENT[start : start + size][3:8]
    assert bytes(content) == CONTENT
    assert content.sha256() == hashlib.sha256(CONTENT).hexdigest()


@pytest.mark.parametrize("has_name", [True, False])
def test_file_is_read_in_pieces_and_parts(tmp_path: Path, has_name: bool) -> None:
    """No piece is larger than the limit; a part reads its own range only. An open file needs no name."""
    path = tmp_path / "x"
    path.write_bytes(CONTENT * (PIECE_BYTES // 50))
    content: Pieces = FilePieces(path)
    if not has_name:
        file = temporary_file(tmp_path)
        file.write(path.read_bytes())
        content = OpenFilePieces(file)
        assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
    assert [len(piece) for piece in content] == [PIECE_BYTES, content.size_bytes - PIECE_BYTES]
    assert bytes(content.part(150, 100).part(10, 500)) == (CONTENT * 3)[160:250]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (Path.unlink, "can't be read: No such file or directory; check the disk"),
        (lambda path: os.truncate(path, 150), "has become shorter while it was read; copy it again"),
    ],
)
def test_file_that_changes_before_it_is_read_is_refused_by_name(
    tmp_path: Path, change: Callable[[Path], object], why: str
) -> None:
    """Removed, or cut: nothing shorter than was said before is read of it."""
    path = tmp_path / "x"
    path.write_bytes(CONTENT * 4)
    content = FilePieces(path)
    change(path)
    for read in (content.sha256, lambda: bytes(content.part(100, 100))):
        with pytest.raises(IntegrityError, match=f"x {why}$"):
            read()


def test_held_pieces_are_freed_once_they_were_read() -> None:
    """What lies wholly before the place goes, the rest stays; what is gone is not given again."""
    content = HeldPieces(cut([10, 30]))
    part = content.part(35, 10)
    content.let_go(39)
    assert bytes(part) == CONTENT[35:45]
    content.let_go(40)
    assert bytes(content.part(40, 60)) == CONTENT[40:]
    with pytest.raises(ValueError, match="released piece"):
        bytes(part)


def test_other_content_is_not_held_and_so_not_let_go() -> None:
    """Tensors and files stay as they are."""
    content = made(cut([10]))
    content.let_go(100)
    assert bytes(content) == CONTENT


def test_range_of_a_file_is_read_once_as_long_as_the_file_stays_as_it_is(tmp_path: Path) -> None:
    """Of one that was written a moment ago nothing is kept: a second write could leave size and time as they are."""
    path = tmp_path / "x"

    def write(content: bytes, changed_at_s: float) -> None:
        path.write_bytes(content)
        os.utime(path, (changed_at_s, changed_at_s))

    def digests() -> list[bool]:
        return [file_sha256(path, 10, 50) == hashlib.sha256(each[10:60]).hexdigest() for each in (CONTENT, other)]

    other = bytes(reversed(CONTENT))
    write(CONTENT, time.time())
    assert digests() == [True, False]
    os.utime(path, (1.0, 1.0))
    assert digests() == [True, False]
    write(other, 1.0)
    assert digests() == [True, False], "not read again"
    write(other, 2.0)
    assert digests() == [False, True]
    write(CONTENT, now_s := time.time())
    assert digests() == [True, False]
    write(other, now_s)
    assert digests() == [False, True]
    note_sha256(path, 10, 50, hashlib.sha256(CONTENT[10:60]).hexdigest())
    assert digests() == [True, False], "as it was told"


def test_digests_that_were_noted_last_stay_where_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a node that plans from an outline would have digests of its holes, after many other models."""
    path = tmp_path / "outline"
    path.write_bytes(bytes(3))
    monkeypatch.setattr(pieces, "_known", {(number,): "" for number in range(3)})
    monkeypatch.setattr(pieces, "_MAX_KNOWN", 4)
    for start in range(3):
        note_sha256(path, start, 1, f"told {start}")
    assert [file_sha256(path, start, 1) for start in range(3)] == ["told 0", "told 1", "told 2"]
