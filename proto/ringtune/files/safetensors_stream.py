"""Write and read safetensors files a piece at a time: the header first, from shapes, then each tensor's bytes in turn.

Source: the safetensors format, README (the layout); its Python library makes a file in memory, in two copies.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ringtune.errors import IntegrityError
from ringtune.files.pieces import Piece, Pieces
from ringtune.files.safetensors_header import DTYPE_BYTES, MAX_HEADER_BYTES, TensorInfo, header_bytes, header_of


class TensorPieces(NamedTuple):
    """One tensor with its type (``F32``), its shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: Pieces


def write_tensors(tensors: Mapping[str, TensorPieces], *, metadata: Mapping[str, str] | None = None) -> Pieces:
    """Make a safetensors file, sorted by dtype, widest first so that each tensor is aligned, then by name.

    Equal tensors give equal bytes, in whatever order they come.
    """
    names = sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name].dtype], name))
    entries = {name: (tensors[name].dtype, tensors[name].shape) for name in names}
    header = header_bytes(entries, metadata=metadata)

    def pieces() -> Iterator[Piece]:
        yield header
        for name in names:
            yield from tensors[name].data

    return Pieces(len(header) + sum(tensors[name].data.size_bytes for name in names), pieces)


class TensorFile:
    """A safetensors file whose header was read and checked; its tensors are read when they are asked for.

    Args:
        content: of the file.
        where: names the file in errors.
        max_header_bytes: longest header that is read.

    Attributes:
        infos: the tensors by name, in the order of the data.
        metadata: as the file has it.

    Raises:
        IntegrityError: truncated, or the header contradicts itself or the size of the file.
    """

    def __init__(self, content: Pieces, *, where: str, max_header_bytes: int = MAX_HEADER_BYTES) -> None:
        self._content = content
        length = int.from_bytes(bytes(content.part(0, 8)), "little")
        first = bytes(content.part(0, 8 + length)) if length <= max_header_bytes else bytes(content.part(0, 8))
        self.infos: dict[str, TensorInfo] = header_of(
            io.BytesIO(first), content.size_bytes, where=where, max_header_bytes=max_header_bytes
        )
        self.metadata = _metadata(first, where)

    def tensor(self, name: str) -> TensorPieces:
        """Return a tensor of the file."""
        info = self.infos[name]
        return TensorPieces(info.dtype, info.shape, self._content.part(info.offset, info.nbytes))

    def let_go_of(self, name: str) -> None:
        """Free what is held of the file up to the end of this tensor, if it is held in memory."""
        info = self.infos[name]
        self._content.let_go(info.offset + info.nbytes)


def _metadata(first: bytes, where: str) -> dict[str, str]:
    found = json.loads(first[8:]).get("__metadata__") or {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise IntegrityError(f"{where} is damaged: its metadata are no texts; copy it again from its source")
    return dict(found)
