"""Merge the tensors that the nodes hand in into one safetensors file, by bytes and without torch.

No number is ever interpreted. Every part is checked before anything is taken from it: it comes from another machine.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ringtune.errors import IntegrityError
from ringtune.files.chunks import ADAPTER_FILES
from ringtune.files.safetensors_header import DTYPE_BYTES, header_bytes, header_of


class TensorBytes(NamedTuple):
    """One tensor as its bytes in a file, with type and shape."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def read_tensors(content: bytes, *, source: str) -> dict[str, TensorBytes]:
    """Take a safetensors file apart without copying the tensors.

    Args:
        content: the whole file.
        source: the node that it came from, for the error.

    Raises:
        IntegrityError: the file is truncated, its header is not readable, or a range is not what the shape says.
    """
    whole = memoryview(content)
    header = header_of(io.BytesIO(content), len(content), where=f"the result of node {source}")
    return {
        name: TensorBytes(info.dtype, info.shape, whole[info.offset : info.offset + info.nbytes])
        for name, info in header.items()
    }


def merge(parts: Mapping[str, bytes]) -> bytes:
    """Put the tensors of several files into one.

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
    """Write a safetensors file, sorted by dtype, widest first so that each tensor is aligned, then by name."""
    names = sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name].dtype], name))
    entries = {name: (tensors[name].dtype, tensors[name].shape) for name in names}
    return b"".join([header_bytes(entries, metadata={"format": "pt"}), *(tensors[name].data for name in names)])


def same_everywhere(files: Iterable[tuple[str, bytes]], *, name: str) -> bytes:
    """Return the content of a file that several nodes sent, which has to be the same from each.

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
    """Merge the files that the nodes handed in to the AdapterHub folder of a run.

    Args:
        files: content by file name, by node.

    Returns:
        Content by file name.

    Raises:
        IntegrityError: a file is missing, broken, or not the same everywhere.
    """
    sent = {name: {node: own[name] for node, own in files.items() if name in own} for name in ADAPTER_FILES}
    folder = {}
    for name, by_node in sent.items():
        if not by_node:
            raise IntegrityError(f"no node sent {name}; use one version on all machines")
        folder[name] = merge(by_node) if name.endswith(".safetensors") else same_everywhere(by_node.items(), name=name)
    return folder
