"""Merge the tensors that the nodes hand in into one safetensors file, by bytes and without torch.

No number is ever interpreted, and nothing is held: the files lie on the disk, and the merged one is read from them as
it is sent. Every part is checked before anything is taken from it: it comes from another machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ringtune.errors import IntegrityError
from ringtune.files.pieces import Pieces
from ringtune.files.safetensors_stream import TensorFile, TensorPieces, write_tensors


def read_tensors(content: Pieces, *, source: str) -> dict[str, TensorPieces]:
    """Take a safetensors file apart without reading the tensors.

    Args:
        content: the whole file.
        source: the node that it came from, for the error.

    Raises:
        IntegrityError: the file is truncated, its header is not readable, or a range is not what the shape says.
    """
    file = TensorFile(content, where=f"the result of node {source}")
    return {name: file.tensor(name) for name in file.infos}


def merge(parts: Mapping[str, Pieces]) -> Pieces:
    """Put the tensors of several files into one.

    Args:
        parts: content of each file by where it came from (the node's name).

    Raises:
        IntegrityError: a part is broken, or two parts have the same tensor.
    """
    tensors: dict[str, TensorPieces] = {}
    origin: dict[str, str] = {}
    for source, content in sorted(parts.items()):
        for name, tensor in read_tensors(content, source=source).items():
            if name in tensors:
                raise IntegrityError(f"nodes {origin[name]} and {source} both sent tensor {name}; one has to own it")
            tensors[name], origin[name] = tensor, source
    return write_tensors(tensors, metadata={"format": "pt"})


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


def adapter_folder(files: Mapping[str, Mapping[str, Pieces]], names: Iterable[str]) -> dict[str, Pieces]:
    """Merge the files that the nodes handed in to the AdapterHub folder of a run.

    Args:
        files: content by file name, by node.
        names: of the files of the folder.

    Returns:
        Content by file name.

    Raises:
        IntegrityError: a file is missing, broken, or not the same everywhere.
    """
    folder: dict[str, Pieces] = {}
    for name in names:
        by_node = {node: own[name] for node, own in files.items() if name in own}
        if not by_node:
            raise IntegrityError(f"no node sent {name}; use one version on all machines")
        if name.endswith(".safetensors"):
            folder[name] = merge(by_node)
        else:
            small = [(node, bytes(content)) for node, content in by_node.items()]
            folder[name] = Pieces.of(same_everywhere(small, name=name))
    return folder
