"""Files of hidden states that are kept for a later visit, one for each micro-batch.

::

    magic  rows tokens width  dtype  crc32    0 ...    hidden state, row by row    mask, a byte a token
    8 B    4 B each           4 B    4 B      to 64 B

A file is read by mapping it into memory, so nothing is copied; its checksum is that of all that follows the header.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from pathlib import Path
from typing import Any, Final

import torch

from ringtune.errors import IntegrityError

_MAGIC: Final = b"RTHIDDEN"
_HEADER: Final = struct.Struct("<8sIIIII")
_HEADER_BYTES: Final = 64  # what follows is aligned as tensors are
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float64)
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def write_hidden(path: Path, hidden: torch.Tensor, mask: torch.Tensor) -> int:
    """Write a hidden state (B, T, D) and its mask (B, T), both on the CPU; return the bytes of the file.

    Raises:
        OSError: no room, or no folder; nothing is left there then.
    """
    parts = [_bytes_of(hidden), _bytes_of(mask.to(torch.uint8))]
    checksum = zlib.crc32(parts[1], zlib.crc32(parts[0]))
    header = _HEADER.pack(_MAGIC, *hidden.shape, _DTYPES.index(hidden.dtype), checksum)
    try:
        with path.open("wb") as file:
            file.write(header.ljust(_HEADER_BYTES, b"\0"))
            for part in parts:
                file.write(part)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return _HEADER_BYTES + sum(map(len, parts))


def read_hidden(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Map a file into memory; return hidden state (B, T, D) as it was written, and mask (B, T) of bytes.

    Raises:
        IntegrityError: the file is missing, short or damaged.
    """
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants what it could write to
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    if len(content) < _HEADER_BYTES:
        raise IntegrityError(f"{path} has {len(content)} bytes, it was longer")
    magic, rows, tokens, width, dtype, checksum = _HEADER.unpack_from(content)
    if magic != _MAGIC or dtype >= len(_DTYPES):
        raise IntegrityError(f"{path} is no hidden state")
    kind, count = _DTYPES[dtype], rows * tokens
    whole_bytes = _HEADER_BYTES + count * width * kind.itemsize + count
    with memoryview(content) as view, view[_HEADER_BYTES:] as payload:
        if len(content) != whole_bytes or not count or zlib.crc32(payload) != checksum:
            raise IntegrityError(f"{path} is damaged: it has another checksum or length than when it was written")
    hidden = torch.frombuffer(content, dtype=kind, count=count * width, offset=_HEADER_BYTES)
    mask = torch.frombuffer(content, dtype=torch.uint8, count=count, offset=whole_bytes - count)
    return hidden.view(rows, tokens, width), mask.view(rows, tokens)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    content: Any = tensor.contiguous().view(torch.uint8).numpy()
    return memoryview(content).cast("B")
