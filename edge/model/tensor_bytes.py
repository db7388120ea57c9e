"""Go through a tensor's bytes a piece at a time, and fill a tensor from such pieces, without a second copy of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from ringtune.errors import IntegrityError
from ringtune.files.pieces import PIECE_BYTES, Pieces
from ringtune.files.safetensors_stream import TensorPieces

TORCH_DTYPES: Final = {
    "F32": torch.float32,
    "F64": torch.float64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type for a type of a safetensors file, such as ``F32``.

    Raises:
        IntegrityError: no tensor of a run or a model may have such a type.
    """
    if name not in TORCH_DTYPES:
        raise IntegrityError(f"a tensor has the type {name}, which is not supported; save it as float32 or bfloat16")
    return TORCH_DTYPES[name]


def pieces_of(tensor: torch.Tensor) -> TensorPieces:
    """Return a tensor's type, shape and bytes; they are read when they are gone through, so it must not change before.

    A tensor on another device is copied a piece at a time, one that is not contiguous as a whole.
    """
    held = tensor.detach()

    def make() -> Iterator[memoryview]:
        flat = held.contiguous().reshape(-1)
        step = PIECE_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            yield _bytes_of(flat[start : start + step].cpu())

    return TensorPieces(DTYPE_NAMES[held.dtype], tuple(held.shape), Pieces(held.numel() * held.element_size(), make))


def fill(target: torch.Tensor, source: TensorPieces) -> None:
    """Replace the values of a tensor by those of ``source``, converted to its type, a piece at a time.

    Raises:
        IntegrityError: the source has fewer or more bytes than its shape says.
    """
    num_came = source.data.size_bytes / torch_dtype(source.dtype).itemsize
    if num_came != target.numel():
        raise IntegrityError(f"a tensor of {target.numel():,} numbers came with {num_came:,g}; copy it again")
    with torch.no_grad():
        # a target that is not contiguous is small, such as a row of a larger tensor
        flat = target.detach().view(-1) if target.is_contiguous() else torch.empty_like(target).contiguous().view(-1)
        is_as_it_came = flat.dtype is torch_dtype(source.dtype) and flat.device.type == "cpu"
        at = _fill_bytes(flat, source.data) if is_as_it_came else _fill_values(flat, source)
        if at != flat.numel():
            raise IntegrityError(
                f"a tensor of {flat.numel():,} numbers came with {at:,}: its file was cut off; copy it again"
            )
        if not target.is_contiguous():
            target.detach().copy_(flat.view(target.shape))


def _fill_bytes(flat: torch.Tensor, data: Pieces) -> int:
    """Copy the pieces where they belong, once; return how many whole numbers came."""
    room, at = _bytes_of(flat), 0
    for piece in data:
        room[at : at + len(piece)] = piece
        at += len(piece)
    return at // flat.element_size()


def _fill_values(flat: torch.Tensor, source: TensorPieces) -> int:
    """Convert the numbers some at a time; return how many came."""
    at = 0
    for values in _values(source):
        flat[at : at + values.numel()].copy_(values)
        at += values.numel()
    return at


def is_finite(source: TensorPieces) -> bool:
    """Whether all numbers of a tensor are finite; whole numbers always are."""
    return all(not values.is_floating_point() or bool(torch.isfinite(values).all()) for values in _values(source))


def _values(source: TensorPieces) -> Iterator[torch.Tensor]:
    """Yield the numbers in order, some at a time; each time in the same memory."""
    dtype, size_bytes = torch_dtype(source.dtype), source.data.size_bytes
    buffer = torch.empty(min(PIECE_BYTES, size_bytes), dtype=torch.uint8)
    room, filled = _bytes_of(buffer), 0
    for piece in source.data:
        rest = memoryview(piece)
        while rest:
            count = min(len(rest), len(room) - filled)
            room[filled : filled + count] = rest[:count]
            rest, filled = rest[count:], filled + count
            if filled == len(room):
                yield buffer.view(dtype)
                filled = 0
    if filled:
        yield buffer[: filled - filled % dtype.itemsize].view(dtype)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat: Any = tensor.view(torch.uint8).numpy()
    return memoryview(flat)


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256, hex, of tensors with their names, in the order of the names; nothing is copied."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(name.encode())
        for piece in pieces_of(value).data:
            digest.update(piece)
    return digest.hexdigest()
