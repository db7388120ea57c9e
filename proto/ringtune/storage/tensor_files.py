"""Safetensors files: header, tensors in pieces, and a test for finite numbers.

A file is eight bytes of length, a JSON object of names with type, shape and offsets, then the data. The header is read
without trust and without tensors: a truncated file, holes, overlaps and inconsistent sizes are refused before anything
is allocated. A file is written header first, from shapes, then each tensor's bytes; the format's Python library builds
it in memory, in two copies. Bytes are tested for finite numbers without numpy.

``python -m ringtune.storage.tensor_files FILE COPY`` aligns the tensors of a file that another program wrote.

Source: the safetensors format, README (the layout) and ``tensor.rs`` (checks of the metadata).
"""

from __future__ import annotations

import array
import hashlib
import io
import json
import math
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from ringtune.errors import IntegrityError, ModelError, RingTuneError, StorageError
from ringtune.storage.gguf import GgufType
from ringtune.storage.pieces import JoinedPieces, Piece, Pieces
from ringtune.storage.strict import is_lfs_pointer, pointer_advice, regular
from ringtune.texts import printable, shown

DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
MAX_HEADER_BYTES = 10_000_000
"""Longest header that is read: some 100,000 tensors of a file; as JSON it takes at most 25 times as much memory."""

ALIGNMENT: Final = 64
"""Bytes: tensors begin at a multiple of this in memory, and the data do in files that are written here."""

MAX_NAME: Final = 1024
"""Most characters of a tensor's name: names are searched by expressions, in a time that grows with their square."""

_MAX_AXES: Final = 32
_MAX_NUMBER: Final = 1 << 62
_MAX_TOLD: Final = 300


class TensorInfo(NamedTuple):
    """One tensor: type (``F32``), shape, size in bytes, and offset in the file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int


def stored_bytes(dtype: str, shape: Sequence[int]) -> int | None:
    """Bytes of a tensor; None if the type is not known, or has no tensor of this shape."""
    if dtype in DTYPE_BYTES:
        return DTYPE_BYTES[dtype] * math.prod(shape)
    kind = GgufType.of(dtype)
    return None if kind is None else kind.nbytes(tuple(shape))


def read_safetensors_header(path: str | Path) -> dict[str, TensorInfo]:
    """Read the header of a safetensors file: name -> tensor, in the order of the data."""
    path = Path(path)
    if is_lfs_pointer(path):
        raise ModelError(pointer_advice(path))
    try:
        with open(path, "rb", opener=regular) as file:
            return header_of(file, path.stat().st_size, where=str(path))
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}; give a folder with model.safetensors") from error


def header_of(
    file: BinaryIO, size: int, *, where: str, max_header_bytes: int = MAX_HEADER_BYTES
) -> dict[str, TensorInfo]:
    """Read the header of an open safetensors file of ``size`` bytes: name -> tensor, in the order of the data.

    ``where`` names the file in errors; a header above ``max_header_bytes`` is not read.
    """
    return _header_and_metadata(file, size, where, max_header_bytes)[0]


def _header_and_metadata(
    file: BinaryIO, size: int, where: str, max_header_bytes: int
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 2 <= length <= size - 8:
        raise _damaged(where, f"its header claims {length:,} bytes of {size:,}")
    if length > max_header_bytes:
        limit = f"at most {max_header_bytes:,} are read (more tensors go into several files)"
        raise _damaged(where, f"its header has {length:,} bytes, {limit}")
    text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, f"its header is not readable ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(where, "its header is not a table")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(where, "its metadata are no texts")
    start = 8 + length
    infos = {name: _tensor(where, name, entry, start) for name, entry in header.items()}
    ordered = sorted(infos.items(), key=lambda pair: (pair[1].offset, pair[1].nbytes))
    at = start
    for name, info in ordered:
        if info.offset != at:
            raise _damaged(where, f"tensor {shown(name)} begins at byte {info.offset:,}, expected {at:,}")
        at += info.nbytes
    if at != size:
        raise _damaged(where, f"it has {size:,} bytes, its tensors need {at:,}")
    return dict(ordered), metadata


def header_bytes(
    tensors: Mapping[str, tuple[str, Sequence[int]]], *, metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return length and header of a file with these tensors in order: name -> (type, shape).

    Raises ``StorageError`` where the header would be longer than any that is read.
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + (stored_bytes(dtype, shape) or 0)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = _aligned(json.dumps(header, separators=(",", ":")).encode())
    if len(text) - 8 > MAX_HEADER_BYTES:
        raise StorageError(
            f"a file of {len(tensors):,} tensors would have a header of {len(text):,} bytes, and at most "
            f"{MAX_HEADER_BYTES:,} are read; give a node fewer blocks, or the run fewer users"
        )
    return text


def _aligned(text: bytes) -> bytes:
    """Return the length of a header and its text, with spaces at its end so that the data are aligned."""
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_aligned(path: Path, copy: Path) -> None:
    """Copy a safetensors file with the same tensors, data aligned; ``copy`` must not exist.

    Raises:
        ModelError, IntegrityError: ``path`` can't be read, or is no safetensors file.
        StorageError: ``copy`` exists, or can't be written; then there is none.
    """
    read_safetensors_header(path)
    made = False
    try:
        with open(path, "rb", opener=regular) as file, copy.open("xb") as target:
            made = True
            target.write(_aligned(file.read(int.from_bytes(file.read(8), "little"))))
            shutil.copyfileobj(file, target, 1 << 20)
    except OSError as error:
        if made:
            copy.unlink()
        raise StorageError(
            f"can't write {copy}: {error.strerror}; name a file that does not exist, in a folder with room for it"
        ) from error


def _main(arguments: Sequence[str]) -> None:
    if len(arguments) != 2:
        sys.exit("usage: python -m ringtune.storage.tensor_files FILE COPY")
    try:
        write_aligned(*map(Path, arguments))
    except RingTuneError as error:
        sys.exit(f"error: {error}")


def _tensor(where: str, name: str, entry: Any, start: int) -> TensorInfo:
    if len(name) > MAX_NAME:
        raise _damaged(
            where, f"the name {shown(name)} has {len(name):,} characters, a tensor's has {MAX_NAME:,} at most"
        )
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
        valid = isinstance(shape, list) and len(shape) <= _MAX_AXES
        valid = valid and all(type(number) is int and 0 <= number <= _MAX_NUMBER for number in numbers)
        valid = valid and math.prod(max(1, axis) for axis in shape) <= _MAX_NUMBER >> 3  # also of an empty tensor
        size = stored_bytes(dtype, shape) if valid else None
        valid, nbytes = size is not None, -1 if size is None else size
        told = printable(f"of type {dtype} and shape {shape} can't take bytes [{begin}, {end})", most=_MAX_TOLD)
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise _damaged(where, f"the entry of tensor {shown(name)} is malformed") from error
    if not valid or end - begin != nbytes:
        raise _damaged(where, f"tensor {shown(name)} {told}")
    return TensorInfo(dtype, tuple(shape), nbytes, start + begin)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _damaged(where: str, reason: str) -> IntegrityError:
    return IntegrityError(f"{where} is damaged or no safetensors file: {reason}; copy it again from its source")


class TensorPieces(NamedTuple):
    """One tensor: type (``F32``), shape, and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: Pieces


def write_tensors(tensors: Mapping[str, TensorPieces], *, metadata: Mapping[str, str] | None = None) -> Pieces:
    """Make a safetensors file, sorted by dtype, widest first so that each tensor is aligned, then by name.

    Equal tensors give equal bytes, in any order.
    """
    names = sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name].dtype], name))
    entries = {name: (tensors[name].dtype, tensors[name].shape) for name in names}
    header = header_bytes(entries, metadata=metadata)
    return JoinedPieces([Pieces.of(header), *(tensors[name].data for name in names)])


def tensor_head(name: str, dtype: str, shape: Sequence[int]) -> bytes:
    """Return what is before the bytes of a tensor in ``tensors_digest``."""
    return json.dumps([name, dtype, shape]).encode()


def tensors_digest(tensors: Mapping[str, TensorPieces]) -> str:
    """Return the SHA-256, hex, over names, types, shapes and bytes of some tensors, in the order of names."""
    digest = hashlib.sha256()
    for name, (dtype, shape, data) in sorted(tensors.items()):
        digest.update(tensor_head(name, dtype, shape))
        for piece in data:
            digest.update(piece)
    return digest.hexdigest()


class TensorFile:
    """A safetensors file with a checked header; tensors are read on demand.

    Raises ``IntegrityError``: truncated, or the header is inconsistent with itself or the size of the file.
    """

    def __init__(self, content: Pieces, *, where: str, max_header_bytes: int = MAX_HEADER_BYTES) -> None:
        self._content = content
        length = int.from_bytes(bytes(content.part(0, 8)), "little")
        first = bytes(content.part(0, 8 + length)) if length <= max_header_bytes else bytes(content.part(0, 8))
        self.infos, self.metadata = _header_and_metadata(io.BytesIO(first), content.size_bytes, where, max_header_bytes)

    def tensor(self, name: str) -> TensorPieces:
        """Return a tensor of the file."""
        info = self.infos[name]
        return TensorPieces(info.dtype, info.shape, self._content.part(info.offset, info.nbytes))

    def release_pages(self, name: str) -> None:
        """Free the content up to the end of this tensor, if it is held in memory."""
        info = self.infos[name]
        self._content.let_go(info.offset + info.nbytes)


_HIGH: Final = {"F16": 0x7C, "BF16": 0x7F, "F32": 0x7F, "F64": 0x7F}
"""Bits of a number's highest byte, without the sign, that are all set if it is not finite."""
_CODES: Final = {"F32": "f", "F64": "d"}


def is_finite(pieces: Iterable[Piece], dtype: str) -> bool:
    """Whether no number is infinite or NaN; whole numbers never are, and 8-bit floats are not accepted.

    Only pieces with a highest byte of such a number are tested number by number. Bytes are little-endian; ``dtype`` is
    safetensors' name, such as ``F32``.
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


if __name__ == "__main__":
    _main(sys.argv[1:])
