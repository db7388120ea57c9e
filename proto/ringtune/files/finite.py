"""Whether all numbers of a tensor are finite, read from its bytes a piece at a time, without a library for numbers."""

from __future__ import annotations

import array
import math
from collections.abc import Iterable
from typing import Final

from ringtune.files.pieces import Piece
from ringtune.files.safetensors_header import DTYPE_BYTES

_HIGH: Final = {"F16": 0x7C, "BF16": 0x7F, "F32": 0x7F, "F64": 0x7F}
"""The bits of a number's highest byte that are all set where it is not finite; the sign is left out."""
_CODES: Final = {"F32": "f", "F64": "d"}


def is_finite(pieces: Iterable[Piece], dtype: str) -> bool:
    """Whether no number is infinite or NaN; whole numbers never are.

    Only pieces with a highest byte that a number of that kind would have are read number by number.

    Args:
        pieces: of the tensor, little-endian.
        dtype: as a safetensors file names it, ``F32``.
    """
    if dtype not in _HIGH:
        return not dtype.startswith("F8")
    size, rest = DTYPE_BYTES[dtype], b""
    for piece in pieces:
        content = rest + bytes(piece) if rest else bytes(piece)
        whole = len(content) - len(content) % size
        rest = content[whole:]
        if not _are_finite(content[:whole], dtype, size):
            return False
    return not rest


def _are_finite(content: bytes, dtype: str, size: int) -> bool:
    high, mask = content[size - 1 :: size], _HIGH[dtype]
    suspects = [byte for byte in range(256) if byte & mask == mask and byte in high]
    if not suspects:
        return True
    code = _CODES.get(dtype)
    if code:
        return all(map(math.isfinite, array.array(code, content)))
    if dtype == "F16":
        return False  # all bits of its exponent are in the highest byte
    return not any(byte in suspects and low >= 0x80 for byte, low in zip(high, content[0::2], strict=True))
