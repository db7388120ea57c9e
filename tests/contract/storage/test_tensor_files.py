"""Tests of ``ringtune.storage.tensor_files``: safetensors header, safetensors stream."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from ringtune.errors import IntegrityError, RingTuneError, StorageError
from ringtune.storage.pieces import HeldPieces, Piece, Pieces
from ringtune.storage.tensor_files import (
    ALIGNMENT,
    MAX_HEADER_BYTES,
    TensorFile,
    TensorInfo,
    TensorPieces,
    _main,
    header_bytes,
    read_safetensors_header,
    write_aligned,
    write_tensors,
)
from tests.support.cases import cases
from tests.support.model_folder import safetensors_bytes, with_header

GOOD = safetensors_bytes({"a": (2, 3), "b": (), "c": (0, 5)})


def _read(tmp_path: Path, content: bytes) -> dict[str, TensorInfo]:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    return read_safetensors_header(path)


def test_header_of_a_good_file_is_read_as_it_is(tmp_path: Path) -> None:
    """Scalars and empty tensors included; offsets count from the start of the file."""
    infos = _read(tmp_path, GOOD)
    start = len(GOOD) - 28
    assert infos == {
        "a": TensorInfo("F32", (2, 3), 24, start),
        "b": TensorInfo("F32", (), 4, start + 24),
        "c": TensorInfo("F32", (0, 5), 0, start + 28),
    }


def _entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@cases(
    ("content", "reason"),
    [
        (b"", "its header claims 0 bytes of 0"),
        (b"\x10\x00", "its header claims 16 bytes of 2"),
        (b"\xff" * 8, "its header claims 18,446,744,073,709,551,615 bytes of 8"),
        (with_header(b"", b""), "its header claims 0 bytes"),
        (with_header(b"[]", b""), "its header is not a table"),
        (with_header(b"{]", b""), "its header is not readable"),
        (with_header(b"\xff\xfe", b""), "its header is not readable"),
        (with_header(b'{"a": {}, "a": {}}', b""), "a name occurs twice"),
        (with_header({"a": 3}, b""), "the entry of tensor 'a' is malformed"),
        (with_header({"a": {}}, b""), "the entry of tensor 'a' is malformed"),
        (with_header({"a": _entry(offsets=[0])}, b"0000"), "the entry of tensor 'a' is malformed"),
        (with_header({"a": _entry(dtype="F7")}, b"0000"), "tensor 'a' of type F7"),
        (with_header({"a": _entry(dtype=["F32"])}, b"0000"), "the entry of tensor 'a' is malformed"),
        (with_header({"a": _entry(shape=[-1])}, b"0000"), "shape [-1]"),
        (with_header({"a": _entry(shape=[1.0])}, b"0000"), "shape [1.0]"),
        (with_header({"a": _entry(shape=[True])}, b"0000"), "shape [True]"),
        (with_header({"a": _entry(shape={})}, b"0000"), "shape {}"),
        (with_header({"__metadata__": {"a": 1}}, b""), "its metadata are no texts"),
        (with_header({"__metadata__": ["a"]}, b""), "its metadata are no texts"),
        (with_header(b" " * (MAX_HEADER_BYTES + 1), b""), "its header has 10,000,001 bytes, at most 10,000,000 are"),
        (with_header({"a": _entry(shape=[2**62, 2**62])}, b"0000"), "can't take bytes [0, 4)"),
        (with_header({"a": _entry(shape=[0, 2**40, 2**40], offsets=[0, 0])}, b""), "can't take bytes [0, 0)"),
        (with_header({"a": _entry(offsets=[4, 0])}, b"0000"), "can't take bytes [4, 0)"),
        (with_header({"a": _entry(offsets=[4, 8])}, b"00000000"), "tensor 'a' begins at byte"),
        (with_header({"a": _entry(), "b": _entry()}, b"0000"), "tensor 'b' begins at byte"),
        (with_header({"a": _entry()}, b"000"), "its tensors need"),
        (with_header({"a": _entry()}, b"00000"), "its tensors need"),
        (with_header({"layer.1." * 200: _entry()}, b"0000"), "has 1,600 characters, a tensor's has 1,024 at most"),
    ],
)
def test_header_of_a_damaged_file_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    """Truncated, overlapping, with holes, with nonsense: an error that says what and what to do."""
    with pytest.raises(IntegrityError) as caught:
        _read(tmp_path, content)
    assert reason in str(caught.value)
    assert str(caught.value).endswith("copy it again from its source")


def test_aligned_copy_has_the_same_tensors_and_metadata(tmp_path: Path) -> None:
    """Whatever the length of the header; of a damaged file there is no copy."""
    starts = set()
    for length in range(1, 65, 8):
        path, copy = tmp_path / f"{length}.safetensors", tmp_path / f"{length}-copy.safetensors"
        path.write_bytes(save({"w" * length: numpy.arange(16.0), "x": numpy.ones(16)}, metadata={"format": "pt"}))
        write_aligned(path, copy)
        infos = read_safetensors_header(copy)
        starts.add(read_safetensors_header(path)["x"].offset % ALIGNMENT)
        assert {info.offset % ALIGNMENT for info in infos.values()} == {0}
        tensors, copied = load(path.read_bytes()), load(copy.read_bytes())
        assert tensors.keys() == copied.keys()
        assert all((tensors[name] == copied[name]).all() for name in tensors)
        content = HeldPieces([memoryview(copy.read_bytes())])
        assert TensorFile(content, where="copy").metadata == {"format": "pt"}
    assert len(starts) > 1
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError):
        write_aligned(path, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_aligned_copy_overwrites_nothing_and_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the copy and the remedy, on the command line too."""
    path, copy = tmp_path / "model.safetensors", tmp_path / "copy"
    path.write_bytes(save({"x": numpy.ones(16)}))
    copy.write_bytes(b"mine")
    with pytest.raises(StorageError, match=r"copy: File exists; name a file that does not exist"):
        write_aligned(path, copy)
    with pytest.raises(SystemExit, match="error: can't write"):
        _main([str(path), str(copy)])
    with pytest.raises(SystemExit, match="FILE COPY"):
        _main([str(path)])
    assert copy.read_bytes() == b"mine"
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("shutil.copyfileobj", Mock(side_effect=full))
    with pytest.raises(StorageError, match="No space left"):
        write_aligned(path, tmp_path / "part")
    assert not (tmp_path / "part").exists()


@settings(max_examples=150)
@given(position=st.integers(0, len(GOOD) - 29), byte=st.integers(0, 255), cut=st.integers(0, len(GOOD)))
def test_header_survives_any_damage(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int, cut: int
) -> None:
    """One wrong header byte or a cut anywhere: a consistent answer or an error of the tree, never another."""
    damaged = GOOD[:position] + bytes([byte]) + GOOD[position + 1 :]
    for content in (damaged, GOOD[:cut]):
        path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
        path.write_bytes(content)
        try:
            infos = read_safetensors_header(path)
        except RingTuneError:
            continue
        assert sum(info.nbytes for info in infos.values()) <= len(content)


Array = numpy.ndarray[Any, Any]
ARRAYS: dict[str, Array] = {
    "b": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
    "a": numpy.arange(5, dtype=numpy.uint8),
    "c": numpy.array(7, dtype=numpy.int64),
    "none": numpy.zeros((0, 4), dtype=numpy.float32),
}
_NAMES = {"float32": "F32", "uint8": "U8", "int64": "I64"}


def pieces_of(array: Array) -> TensorPieces:
    """An array as a tensor of a file."""
    return TensorPieces(_NAMES[array.dtype.name], array.shape, Pieces.of(array.tobytes()))


def test_written_file_is_what_the_library_reads() -> None:
    """Types, shapes and numbers, and equal tensors give equal bytes in whatever order they come."""
    tensors = {name: pieces_of(array) for name, array in ARRAYS.items()}
    content = write_tensors(tensors, metadata={"format": "pt"})
    found = load(bytes(content))
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        assert numpy.array_equal(found[name], array)
    backwards = write_tensors(dict(reversed(tensors.items())), metadata={"format": "pt"})
    assert bytes(backwards) == bytes(content)
    assert content.size_bytes == len(bytes(content))


def test_file_that_nobody_would_read_is_not_written() -> None:
    """Of the longest headers one is read, and one more character is refused before there is a file."""
    longest = MAX_HEADER_BYTES - MAX_HEADER_BYTES % ALIGNMENT - ALIGNMENT
    text = "x" * (longest - len(header_bytes({"a": ("U8", (0,))}, metadata={"": ""})) - ALIGNMENT)
    header = header_bytes({"a": ("U8", (0,))}, metadata={"": text})
    assert len(header) > longest - 3 * ALIGNMENT
    assert list(TensorFile(HeldPieces([memoryview(header)]), where="long").infos) == ["a"]
    with pytest.raises(StorageError, match=r"a file of 1 tensors would have a header of .* give a node fewer blocks"):
        header_bytes({"a": ("U8", (0,))}, metadata={"": text + "x" * 5 * ALIGNMENT})


def test_tensor_of_a_written_file_is_read_without_the_others() -> None:
    """Of a file of a thousand tensors that lie on a disk, the last one would be read after all before it."""

    def unreadable() -> Iterator[Piece]:
        raise AssertionError("it is read")

    others = {name: TensorPieces("F32", (3,), Pieces(12, unreadable)) for name in "ac"}
    file = TensorFile(write_tensors({"b": pieces_of(ARRAYS["b"]), **others}), where="x")
    assert bytes(file.tensor("b").data) == ARRAYS["b"].tobytes()


@cases("size", [1, 7, 10_000])
def test_file_of_the_library_is_read_however_it_is_cut(size: int) -> None:
    """Metadata and every tensor; what was read is let go of, up to the end of a tensor."""
    content = memoryview(save(ARRAYS, metadata={"of": "somebody"}))
    file = TensorFile(HeldPieces([content[at : at + size] for at in range(0, len(content), size)]), where="x")
    assert file.metadata == {"of": "somebody"}
    for name in file.infos:
        tensor = file.tensor(name)
        assert bytes(tensor.data) == ARRAYS[name].tobytes()
        assert tensor.shape == ARRAYS[name].shape
        file.release_pages(name)


@cases(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:20],
        lambda content: b"",
        lambda content: (1 << 60).to_bytes(8, "little") + content[8:],
    ],
)
def test_damaged_file_is_refused_by_name(damage: Callable[[bytes], bytes]) -> None:
    """Before any tensor is read, and nothing is allocated from what a header claims."""
    with pytest.raises(IntegrityError, match="the shard is damaged"):
        TensorFile(Pieces.of(damage(save(ARRAYS))), where="the shard")
