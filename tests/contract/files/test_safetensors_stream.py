"""Safetensors files that are written and read a tensor at a time, against the library."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from safetensors.numpy import load, save

from ringtune.errors import IntegrityError
from ringtune.files.pieces import HeldPieces, Pieces
from ringtune.files.safetensors_stream import TensorFile, TensorPieces, write_tensors

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


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_file_of_the_library_is_read_however_it_is_cut(size: int) -> None:
    """Metadata and every tensor; what was read is let go of, up to the end of a tensor."""
    content = memoryview(save(ARRAYS, metadata={"of": "somebody"}))
    file = TensorFile(HeldPieces([content[at : at + size] for at in range(0, len(content), size)]), where="x")
    assert file.metadata == {"of": "somebody"}
    for name in file.infos:
        tensor = file.tensor(name)
        assert bytes(tensor.data) == ARRAYS[name].tobytes()
        assert tensor.shape == ARRAYS[name].shape
        file.let_go_of(name)


def _with_metadata(value: object) -> bytes:
    text = json.dumps({"__metadata__": value}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:20],
        lambda content: b"",
        lambda content: (1 << 60).to_bytes(8, "little") + content[8:],
        lambda content: _with_metadata({"of": 1}),
        lambda content: _with_metadata(["of"]),
    ],
)
def test_damaged_file_is_refused_by_name(damage: Callable[[bytes], bytes]) -> None:
    """Before any tensor is read, and nothing is allocated from what a header claims."""
    with pytest.raises(IntegrityError, match="the shard is damaged"):
        TensorFile(Pieces.of(damage(save(ARRAYS))), where="the shard")
