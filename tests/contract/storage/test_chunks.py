"""Files in pieces on the wire."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringtune.errors import IntegrityError, StorageError
from ringtune.storage.chunks import CHUNK_BYTES, FileCutter, cut_pieces, in_time, write_any_files, write_files
from ringtune.storage.pieces import FilePieces
from ringtune.v1.control_pb2 import FileChunk
from tests.support.cases import cases

NAMES = ("a", "b")
CONTENT = {"a": bytes(range(256)) * (CHUNK_BYTES // 128), "b": b""}
LIMIT = 1 << 22
EMPTY_SHA = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def chunks() -> list[FileChunk]:
    """Both files in pieces: one of exactly two chunks, one that is empty."""
    return [chunk for name in NAMES for chunk in cut_pieces(name, [CONTENT[name]])]


def write(pieces: list[FileChunk], folder: Path, *, max_bytes: int = LIMIT) -> None:
    """Put pieces together."""
    write_files(pieces, folder, names=NAMES, max_bytes=max_bytes, source="node x")


def test_file_chunks_round_trip(tmp_path: Path) -> None:
    """What was cut is put together again, and cut from there just the same."""
    pieces = chunks()
    assert [(piece.path, len(piece.chunk), piece.last) for piece in pieces] == [
        ("a", CHUNK_BYTES, False),
        ("a", CHUNK_BYTES, True),
        ("b", 0, True),
    ]
    write(pieces, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == CONTENT
    again = [piece for name in NAMES for piece in cut_pieces(name, FilePieces(tmp_path / name))]
    assert again == pieces


def _damage(pieces: list[FileChunk]) -> None:
    pieces[0].chunk = b"x" + pieces[0].chunk[1:]


def _leave(pieces: list[FileChunk]) -> None:
    for piece in pieces[:2]:
        piece.path = "../a"


@cases(
    ("change", "message"),
    [
        (_damage, "a from node x arrived damaged"),
        (_leave, r"node x sent a file '\.\./a' that was not expected"),
        (lambda pieces: pieces.insert(0, FileChunk(chunk=b"1")), "node x sent a file '' that was not expected"),
        (lambda pieces: pieces.pop(), "node x did not send b"),
        (lambda pieces: pieces.pop(1), "node x began 'b' before 'a' was complete"),
        (lambda pieces: pieces.__delitem__(slice(1, 3)), "a from node x is not complete"),
        (lambda pieces: pieces.extend(chunks()), "not expected"),
    ],
)
def test_file_chunks_refuses_what_is_not_whole(
    change: Callable[[list[FileChunk]], object], message: str, tmp_path: Path
) -> None:
    """Damaged, missing, foreign and repeated pieces are refused, with what is wrong; nothing leaves the folder."""
    folder = tmp_path / "inside"
    folder.mkdir()
    pieces = chunks()
    change(pieces)
    with pytest.raises(IntegrityError, match=message):
        write(pieces, folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_file_chunks_refuses_more_than_the_limit(tmp_path: Path) -> None:
    """A sender can't fill the disk."""
    with pytest.raises(IntegrityError, match=r"node x sent more than 1,048,576 bytes"):
        write(chunks(), tmp_path, max_bytes=CHUNK_BYTES)


def test_file_chunks_leave_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's upload would fill the disk on which runs of others are stored; a small disk has a smaller rest.

    What nodes send as the result of a run, of planned size, is written as long as there is any room.
    """
    for total, free, is_taken in ((1 << 40, 1 << 28, True), (1 << 40, (1 << 28) - 1, False), (1 << 20, 1 << 16, True)):
        disk = SimpleNamespace(total=total, free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, disk=disk: disk)
        (folder := tmp_path / str(free)).mkdir()
        with (
            nullcontext() if is_taken else pytest.raises(StorageError, match="MiB left, which are for runs; make room")
        ):
            write(chunks(), folder)
        (folder := tmp_path / f"{free} of a run").mkdir()
        assert write_any_files(chunks(), folder, names=NAMES, max_bytes=LIMIT, source="node x").keys() == {*NAMES}


def test_file_cutter_gives_the_same_pieces_however_the_content_comes() -> None:
    """A file that grows is cut as a file that is whole."""
    cutter, content = FileCutter("a"), CONTENT["a"]
    steps = range(0, len(content), 70_001)
    grown = [chunk for start in steps for chunk in cutter.add(content[start : start + 70_001])]
    assert [*grown, cutter.end()] == chunks()[:-1]


def test_write_any_files_takes_some_of_the_names(tmp_path: Path) -> None:
    """Files follow one another, not all that may come have to; the digest comes with the last piece."""
    came = write_any_files(chunks(), tmp_path, names=(*NAMES, "c"), max_bytes=LIMIT, source="node pi")
    assert {name: path.read_bytes() for name, path in came.items()} == CONTENT


def test_write_any_files_makes_the_folders_of_the_names_that_may_come(tmp_path: Path) -> None:
    """And of no other: a path that leaves the folder is not among them."""
    pieces = [FileChunk(path=path, last=True, sha256=EMPTY_SHA) for path in ("users/a/x", "users/../../x")]
    with pytest.raises(IntegrityError, match=r"node pi sent a file 'users/\.\./\.\./x' that was not expected"):
        write_any_files(pieces, tmp_path, names=("users/a/x", "users/b/x"), max_bytes=LIMIT, source="node pi")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["users", "users/a", "users/a/x"]


def test_write_any_files_names_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    """What can't be written here is an error of the disk, with its exit code."""
    with pytest.raises(StorageError, match="can't write the files that node pi sent: No such file"):
        write_any_files(chunks(), tmp_path / "none", names=NAMES, max_bytes=LIMIT, source="node pi")


def test_chunks_have_to_come_at_the_slowest_rate() -> None:
    """After 10 s there are 2 s for 16 KiB: at 12 s that is in time, at 12.1 s it is late; empty ones are none."""
    half, empty = FileChunk(chunk=bytes(8 << 10)), FileChunk()

    def came(*chunks: tuple[FileChunk, float]) -> list[FileChunk]:
        times = iter([chunks[0][1], *(at_s for _, at_s in chunks)])
        return list(in_time([chunk for chunk, _ in chunks], 10.0, source="node pi", now_s=times.__next__))

    assert came((half, 100.0), (half, 112.0)) == [half, half]
    assert came((empty, 100.0), (empty, 110.0)) == [empty, empty]
    with pytest.raises(IntegrityError, match="node pi has sent 16,384 bytes in 12 s, less than 8,192 a second after"):
        came((half, 100.0), (half, 112.1))
    with pytest.raises(IntegrityError, match="has sent 0 bytes in 10 s"):
        came((empty, 100.0), (empty, 110.1))
    few = [*[(empty, 100.0)] * 1024, *[(FileChunk(last=True), 100.0)] * 2000, (FileChunk(chunk=bytes(1 << 16)), 100.0)]
    assert len(came(*few)) == 3025
    with pytest.raises(IntegrityError, match="node pi has sent 65,536 bytes in 1,026 chunks, most of them far too sm"):
        came(*few, (empty, 100.0))
