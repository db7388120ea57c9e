"""Merge the tensors that the nodes hand in into one safetensors file, by bytes and without torch.

A safetensors file is an 8-byte little-endian length, a JSON header that gives each tensor's dtype, shape and
byte range, and the bytes. Merging moves the ranges; no number is ever interpreted. Every part is checked
before anything is taken from it: a part comes from another machine.

Source: the safetensors format, https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ringtune.errors import IntegrityError

RESULT_NAMES = ("adapter_config.json", "adapter.safetensors", "head_config.json", "model_head.safetensors")
_MAX_HEADER_BYTES = 100_000_000
_ITEM_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}


class TensorBytes(NamedTuple):
    """One tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def read_tensors(content: bytes, *, source: str) -> dict[str, TensorBytes]:
    """Take a safetensors file apart without copying the tensors.

    Args:
        content: the whole file.
        source: where it came from, for the error.

    Raises:
        IntegrityError: the file is truncated, its header is not readable, or a range is not what the shape says.
    """
    if len(content) < 8:
        raise IntegrityError(f"{source}: {len(content)} bytes are too few for a safetensors file; collect it again")
    (header_bytes,) = struct.unpack("<Q", content[:8])
    if header_bytes > min(_MAX_HEADER_BYTES, len(content) - 8):
        raise IntegrityError(f"{source}: the header claims {header_bytes} bytes, the file has {len(content)}")
    try:
        header = json.loads(content[8 : 8 + header_bytes])
        entries = {str(name): entry for name, entry in header.items() if name != "__metadata__"}
        body = memoryview(content)[8 + header_bytes :]
        return {name: _tensor(name, entry, body, source) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{source}: the safetensors header is not readable ({error}); collect it again") from error


def _tensor(name: str, entry: Mapping[str, Any], body: memoryview, source: str) -> TensorBytes:
    dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    if dtype not in _ITEM_BITS:
        raise IntegrityError(f"{source}: tensor {name} has the unknown dtype {dtype}")
    expected = math.prod(shape) * _ITEM_BITS[dtype] // 8
    if min(shape, default=0) < 0 or not 0 <= begin <= end <= len(body) or end - begin != expected:
        raise IntegrityError(
            f"{source}: tensor {name} of shape {list(shape)} needs {expected} bytes, the file gives the range "
            f"[{begin}, {end}) of {len(body)}"
        )
    return TensorBytes(dtype, shape, body[begin:end])


def merge(parts: Mapping[str, bytes]) -> bytes:
    """Put the tensors of several files into one, sorted by name.

    Args:
        parts: content of each file by where it came from (the node's name).

    Raises:
        IntegrityError: a part is broken, or two parts have the same tensor.
    """
    tensors: dict[str, TensorBytes] = {}
    origin: dict[str, str] = {}
    for source, content in sorted(parts.items()):
        for name, tensor in read_tensors(content, source=source).items():
            if name in tensors:
                raise IntegrityError(f"nodes {origin[name]} and {source} both sent tensor {name}; one has to own it")
            tensors[name], origin[name] = tensor, source
    return write_tensors(tensors)


def write_tensors(tensors: Mapping[str, TensorBytes]) -> bytes:
    """The file that holds ``tensors``, widest dtype first (so that each is aligned), then by name."""
    names = sorted(tensors, key=lambda name: (-_ITEM_BITS[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        tensor = tensors[name]
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(tensor.data)],
        }
        at += len(tensor.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(tensors[name].data for name in names)])


def same_everywhere(files: Iterable[tuple[str, bytes]], *, name: str) -> bytes:
    """The content of a file that several nodes sent, which has to be equal.

    Raises:
        IntegrityError: nobody sent it, or two nodes sent different ones.
    """
    sent = sorted(files)
    if not sent:
        raise IntegrityError(f"no node sent {name}")
    first_node, first = sent[0]
    for node, content in sent[1:]:
        if content != first:
            raise IntegrityError(f"nodes {first_node} and {node} sent different {name}; their versions may differ")
    return first


def adapter_folder(files: Mapping[str, Mapping[str, bytes]]) -> dict[str, bytes]:
    """The AdapterHub folder of a run, from what the nodes handed in.

    Args:
        files: content by file name, by node.

    Returns:
        Content by file name.

    Raises:
        IntegrityError: a file is missing, broken, or not the same everywhere.
    """
    sent = {name: {node: own[name] for node, own in files.items() if name in own} for name in RESULT_NAMES}
    folder = {}
    for name, by_node in sent.items():
        if not by_node:
            raise IntegrityError(f"no node sent {name}; use one version on all machines")
        folder[name] = merge(by_node) if name.endswith(".safetensors") else same_everywhere(by_node.items(), name=name)
    return folder
