"""GGUF files: header, metadata and places of tensors, read without trust, torch and the package ``gguf``.

A file is a magic number, a version, two counts, metadata (key, type, value), one entry a tensor (name, sides, type,
offset), and the data at multiples of an alignment. Counts and lengths are compared with the bytes that are left before
anything is read or allocated; tensors that overlap, or end beyond the file, are refused. Numbers are little-endian.

The type of a tensor here is a text that says how its bytes become the tensor of a model of transformers, so that a
tensor can be kept and sent without its file::

    gguf:Q4_K       rows of blocks of 256 numbers in 144 bytes
    gguf:Q4_K:8     the same, and the two halves of each of 8 heads are interleaved
    gguf:F32:+1     1 was added to each number

Source: the GGUF specification (ggml, ``docs/gguf.md``), versions 2 and 3; block sizes of ``ggml-common.h``.
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, NamedTuple

from ringtune.errors import IntegrityError, ModelError
from ringtune.storage.strict import is_lfs_pointer, pointer_advice, regular
from ringtune.texts import shown

SUFFIX: Final = ".gguf"


class BlockType(NamedTuple):
    """Numbers and bytes of a block."""

    numbers: int
    nbytes: int


BLOCK_TYPES: Final = {
    "F32": BlockType(1, 4),
    "F16": BlockType(1, 2),
    "BF16": BlockType(1, 2),
    "Q4_0": BlockType(32, 18),
    "Q4_1": BlockType(32, 20),
    "Q5_0": BlockType(32, 22),
    "Q5_1": BlockType(32, 24),
    "Q8_0": BlockType(32, 34),
    "Q4_K": BlockType(256, 144),
    "Q5_K": BlockType(256, 176),
    "Q6_K": BlockType(256, 210),
}
"""Types that can be read."""

_NAMES: Final = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(enumerate(("Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K"), start=6)),
    **dict(enumerate(("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS"), start=16)),
    **dict(enumerate(("I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16"), start=24)),
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""Types by their numbers in a file; others were removed from the format."""
_TEXT: Final = re.compile(r"gguf:(?P<name>[A-Z0-9_]{2,8})(?::(?P<heads>[1-9][0-9]{0,5}))?(?P<added>:\+1)?")


class GgufType(NamedTuple):
    """Form of a tensor of a GGUF file.

    Attributes:
        name: key of ``BLOCK_TYPES``.
        heads: heads with interleaved halves; 0 = the rows are in order.
        is_added: whether 1 was added to each number.
    """

    name: str
    heads: int = 0
    is_added: bool = False

    def __str__(self) -> str:
        """Write the text that ``of`` reads."""
        heads = f":{self.heads}" if self.heads else ""
        return f"gguf:{self.name}{heads}{':+1' if self.is_added else ''}"

    @staticmethod
    @functools.cache
    def of(dtype: str) -> GgufType | None:
        """Read the type of a stored tensor; None if it is none of a GGUF file."""
        match = _TEXT.fullmatch(dtype)
        if match is None or match["name"] not in BLOCK_TYPES:
            return None
        return GgufType(match["name"], int(match["heads"] or 0), match["added"] is not None)

    def nbytes(self, shape: tuple[int, ...]) -> int | None:
        """Bytes of a tensor of this shape; None if its rows are no whole blocks, or its heads are not equal."""
        block, rows = BLOCK_TYPES[self.name], math.prod(shape[:-1])
        if not 1 <= len(shape) <= 2 or shape[-1] % block.numbers or (self.heads and shape[0] % (2 * self.heads)):
            return None
        return rows * (shape[-1] // block.numbers) * block.nbytes


class GgufTensor(NamedTuple):
    """Place of a tensor: type of ``BLOCK_TYPES``, shape (outputs first), bytes, and offset in the file."""

    kind: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int


class GgufHeader(NamedTuple):
    """Metadata by key, and tensors by name, in the order of the data. A list that was not asked for is None."""

    values: dict[str, Any]
    tensors: dict[str, GgufTensor]


_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_ALIGNMENT: Final = "general.alignment"
_MAX_HEADER_BYTES: Final = 1 << 26
_MAX_TENSORS: Final = 100_000
_MAX_KEYS: Final = 10_000
_MAX_VALUES: Final = 1 << 21
_MAX_KEY_BYTES: Final = 1 << 16
_MAX_NAME_BYTES: Final = 256
_MAX_ALIGNMENT: Final = 1 << 16
_MAX_SIDE: Final = 1 << 40
_STRING, _LIST, _BOOL = 8, 9, 7
_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file, whatever its name; False if it can't be read."""
    try:
        with open(path, "rb", opener=regular) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_gguf_header(path: Path, *, lists: Collection[str] = ()) -> GgufHeader:
    """Read metadata and places of tensors; raises ``ModelError`` or ``IntegrityError``.

    Args:
        path: of the file.
        lists: keys of lists to read; others take no memory.
    """
    if is_lfs_pointer(path):
        raise ModelError(pointer_advice(path))
    try:
        with open(path, "rb", opener=regular) as file:
            size = path.stat().st_size
            if size < len(_MAGIC) + 4 + 16:
                raise _damaged(path, f"it has {size:,} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, size, frozenset(lists)).header()
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}; give a GGUF file of this machine") from error


class _Reader:
    """Reads a header from its first byte to its last."""

    def __init__(self, path: Path, data: mmap.mmap, size: int, lists: frozenset[str]) -> None:
        self._path, self._data, self._size, self._lists = path, data, size, lists
        self._end = min(size, _MAX_HEADER_BYTES)
        self._at, self._num_values = 0, 0

    def header(self) -> GgufHeader:
        if self._take(4) != _MAGIC:
            raise _damaged(self._path, "it does not begin with GGUF")
        if (version := self._number("I")) not in _VERSIONS:
            raise _damaged(self._path, f"it is of version {version}, known are 2 and 3")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        if not 1 <= num_tensors <= _MAX_TENSORS or num_keys > _MAX_KEYS:
            raise _damaged(self._path, f"it claims {num_tensors:,} tensors and {num_keys:,} keys")
        values: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text(_MAX_KEY_BYTES)
            if key in values:
                raise _damaged(self._path, f"the key {shown(key)} occurs twice")
            values[key] = self._value(self._number("I"), key)
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = values.get(_ALIGNMENT, 32)
        is_power = type(alignment) is int and 1 <= alignment <= _MAX_ALIGNMENT and not alignment & (alignment - 1)
        if not is_power:
            raise _damaged(self._path, f"its alignment is {shown(str(alignment))}")
        return GgufHeader(values, self._places(entries, -(-self._at // alignment) * alignment, alignment))

    def _places(
        self, entries: list[tuple[str, str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        at = start
        for name, kind, shape, nbytes, offset in sorted(entries, key=lambda entry: (entry[4], entry[3])):
            begin = start + offset
            if name in tensors:
                raise _damaged(self._path, f"tensor {shown(name)} occurs twice")
            if begin < at or offset % alignment or begin + nbytes > self._size:
                raise _damaged(
                    self._path,
                    f"tensor {shown(name)} has bytes [{begin:,}, {begin + nbytes:,}) of {self._size:,}, "
                    f"where those before end at {at:,}",
                )
            tensors[name] = GgufTensor(kind, shape, nbytes, begin)
            at = begin + nbytes
        return tensors

    def _entry(self) -> tuple[str, str, tuple[int, ...], int, int]:
        name, axes = self._text(_MAX_NAME_BYTES), self._number("I")
        if not 1 <= axes <= 4:
            raise _damaged(self._path, f"tensor {shown(name)} has {axes} sides")
        sides = [self._number("Q") for _ in range(axes)]
        number, offset = self._number("I"), self._number("Q")
        while len(sides) > 2 and sides[-1] == 1:
            sides.pop()
        kind = _NAMES.get(number, f"number {number}")
        if kind not in BLOCK_TYPES:
            raise ModelError(
                f"{self._path}: tensor {shown(name)} is of type {kind}; known are {', '.join(BLOCK_TYPES)}; take "
                "another file, such as one of Q4_K_M"
            )
        shape = tuple(reversed(sides))
        nbytes = GgufType(kind).nbytes(shape) if all(1 <= side < _MAX_SIDE for side in sides) else None
        if nbytes is None:
            raise _damaged(self._path, f"tensor {shown(name)} of type {kind} has the shape {shape}")
        return name, kind, shape, nbytes, offset

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(self._end)
        if kind in _NUMBERS:
            value = self._number(_NUMBERS[kind])
            return bool(value) if kind == _BOOL else value
        if kind != _LIST:
            raise _damaged(self._path, f"the key {shown(key)} is of type {kind}")
        kind, count = self._number("I"), self._number("Q")
        self._num_values += count
        if self._num_values > _MAX_VALUES or not (kind == _STRING or kind in _NUMBERS):
            raise _damaged(self._path, f"the key {shown(key)} has {count:,} values of type {kind}")
        if kind in _NUMBERS:
            content = self._take(count * struct.calcsize(_NUMBERS[kind]))
            return list(struct.unpack(f"<{count}{_NUMBERS[kind]}", content)) if key in self._lists else None
        if key in self._lists:
            return [self._text(self._end) for _ in range(count)]
        for _ in range(count):
            self._skip(self._number("Q"))
        return None

    def _text(self, most: int) -> str:
        length = self._number("Q")
        if length > most:
            raise _damaged(self._path, f"a text has {length:,} bytes")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _damaged(self._path, f"a text is not UTF-8 ({error.reason})") from error

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _take(self, count: int) -> bytes:
        start = self._at
        self._skip(count)
        return self._data[start : start + count]

    def _skip(self, count: int) -> None:
        if count > self._end - self._at:
            raise _damaged(self._path, f"its header ends within {count:,} bytes at {self._at:,} of {self._end:,}")
        self._at += count


def _damaged(path: Path, reason: str) -> IntegrityError:
    return IntegrityError(f"{path} is damaged or no GGUF file: {reason}; copy it again from its source")
