"""Merging safetensors by bytes; the real library reads what came out."""

from __future__ import annotations

import json
import struct

import pytest
from safetensors import deserialize

from coordinator.records import result_files
from coordinator.records.result_files import same_everywhere
from ringtune.errors import IntegrityError
from ringtune.files.pieces import Pieces
from ringtune.files.safetensors_stream import TensorPieces

numpy = pytest.importorskip("numpy")
safetensors_numpy = pytest.importorskip("safetensors.numpy")


def file_of(**tensors: bytes) -> bytes:
    """A safetensors file of float32 vectors, written by the real library."""
    arrays = {name: numpy.frombuffer(data, dtype=numpy.float32) for name, data in tensors.items()}
    return bytes(safetensors_numpy.save(arrays))


def merge(parts: dict[str, bytes]) -> bytes:
    """The merged file of some files."""
    return bytes(result_files.merge({source: Pieces.of(content) for source, content in parts.items()}))


def read_tensors(content: bytes, *, source: str) -> dict[str, TensorPieces]:
    """The tensors of a file."""
    return result_files.read_tensors(Pieces.of(content), source=source)


def test_merge_keeps_every_byte() -> None:
    """The merged file, read by the safetensors library, has each part's tensors unchanged."""
    low, high = struct.pack("<2f", 1.5, -2.0), struct.pack("<3f", 0.25, 1e-30, 7.0)
    merged = merge({"node-1": file_of(a=low), "node-2": file_of(b=high)})
    found = {name: (entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in deserialize(merged)}
    assert found == {"a": ("F32", [2], low), "b": ("F32", [3], high)}


def test_merge_does_not_depend_on_who_came_first() -> None:
    """The same tensors give the same file, whichever node sent which."""
    one, two = file_of(a=b"\0" * 4), file_of(b=b"\1" * 8)
    assert merge({"x": one, "y": two}) == merge({"x": two, "y": one})


def test_merge_aligns_wide_tensors_behind_odd_ones() -> None:
    """A float32 tensor never starts at an odd offset because a byte tensor lies before it."""
    odd = bytes(safetensors_numpy.save({"a": numpy.frombuffer(b"abc", dtype=numpy.uint8)}))
    merged = merge({"x": odd, "y": file_of(z=b"\0" * 8)})
    (length,) = struct.unpack("<Q", merged[:8])
    header = json.loads(merged[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert header["z"]["data_offsets"] == [0, 8]
    assert header["a"]["data_offsets"] == [8, 11]


def test_merge_of_empty_files_is_a_file() -> None:
    """A node that hosts nothing sends an empty file."""
    assert deserialize(merge({"x": file_of()})) == []


def test_merge_refuses_a_tensor_twice() -> None:
    """Two nodes that both claim a block are named."""
    with pytest.raises(IntegrityError, match="nodes x and y both sent tensor a"):
        merge({"x": file_of(a=b"\0" * 4), "y": file_of(a=b"\0" * 4)})


@pytest.mark.parametrize("keep", [0, 4, 7, 20, -1])
def test_read_refuses_a_truncated_file(keep: int) -> None:
    """Whatever is missing, the file is refused and its sender named."""
    content = file_of(a=b"\0" * 64)
    with pytest.raises(IntegrityError, match="node-3"):
        read_tensors(content[:keep], source="node-3")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": ["two"], "data_offsets": [0, 8]},
        [1, 2],
    ],
)
def test_read_refuses_a_header_that_lies(entry: object) -> None:
    """Shapes, ranges and dtypes of a foreign header are checked against the bytes that are there."""
    text = json.dumps({"a": entry}).encode()
    with pytest.raises(IntegrityError):
        read_tensors(struct.pack("<Q", len(text)) + text + b"\0" * 8, source="x")


def test_read_refuses_a_giant_header() -> None:
    """A header length beyond the file is not believed."""
    with pytest.raises(IntegrityError, match="claims"):
        read_tensors(struct.pack("<Q", 1 << 60) + b"{}", source="x")


def test_same_everywhere_names_who_differs() -> None:
    """Configurations of one run have to be equal."""
    assert same_everywhere([("a", b"1"), ("b", b"1")], name="adapter_config.json") == b"1"
    with pytest.raises(IntegrityError, match="nodes a and c"):
        same_everywhere([("a", b"1"), ("b", b"1"), ("c", b"2")], name="adapter_config.json")
    with pytest.raises(IntegrityError, match="no node sent"):
        same_everywhere([], name="adapter_config.json")
