"""Operation codes as short text: five codes in a byte, as base64.

A table of 600 batches with 4 micro-batches, 12 blocks and 6 subnets has 172,800 codes; packed they are 46 kB.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

from ringtune.errors import PlanError
from ringtune.schedule.operations.codes import CODES

_PER_BYTE: Final = 5
_BASE: Final = 3
_FIRST: Final = ord(min(CODES))


def pack(codes: str) -> str:
    """Pack operation codes; equal codes give equal text."""
    found = bytearray()
    for at in range(0, len(codes), _PER_BYTE):
        value = 0
        for code in reversed(codes[at : at + _PER_BYTE]):
            value = value * _BASE + ord(code) - _FIRST
        found.append(value)
    return base64.b64encode(bytes(found)).decode("ascii")


def packed_length(count: int) -> int:
    """How many characters ``pack`` makes of so many codes."""
    num_bytes = -(-count // _PER_BYTE)
    return 4 * -(-num_bytes // 3)


def unpack(text: str, count: int) -> str:
    """Unpack ``count`` codes.

    Raises:
        PlanError: the text is not what ``pack`` makes of so many codes.
    """
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise PlanError(f"packed operations are not readable: {error}; plan anew") from error
    if len(data) != -(-count // _PER_BYTE) or (data and max(data) >= _BASE**_PER_BYTE):
        raise PlanError(f"packed operations are {len(data)} bytes, which are not {count} codes; plan anew")
    codes = "".join(_FIVE[value] for value in data)
    if codes[count:].strip(min(CODES)):
        raise PlanError(f"packed operations have more than {count} codes; plan anew")
    return codes[:count]


def _five(value: int) -> str:
    codes = []
    for _ in range(_PER_BYTE):
        value, code = divmod(value, _BASE)
        codes.append(chr(code + _FIRST))
    return "".join(codes)


_FIVE: Final = tuple(_five(value) for value in range(_BASE**_PER_BYTE))
