"""The encoding of a tensor with its attention mask as bytes, and the decoding.

The payload is, in this order: the scales (``int8`` only: one float32 per row of the last axis), the elements, the mask
(one byte a position). Everything is little-endian and row-major.

``int8`` stores ``round(x / scale)`` with ``scale = max|row| / 127``, so the error of an element is at most half a
scale. ``float16`` has a small range: values below 6e-8 would become zero, as in gradients of a mean loss over many
tokens, and values above 65,504 would overflow. So a ``float16`` tensor is multiplied by a power of two that puts its
largest element between 2^14 and 2^15; the header has the exponent that undoes it. Normal numbers lose no precision by
this. Received data is never unpickled; NaN and infinities are refused.

Shapes: B rows of the micro-batch, T tokens, D model width.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from ringtune.errors import DivergedError, FrameError

if sys.byteorder != "little":  # pragma: no cover - no such machine is supported
    raise ImportError("tensors travel little-endian; big-endian machines are not supported")

WIRE_TYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "float64": torch.float64,
}
"""``wire_dtype`` of a plan -> element type."""

_INT8_MAX: Final = 127
_SCALE_BYTES: Final = 4
_PIECE: Final = 1 << 16
_HALF_EXPONENT: Final = 15
"""The largest element of a sent float16 tensor is below two to this power."""

MIN_EXPONENT: Final = -126
MAX_EXPONENT: Final = 112
"""Range of exponents: both powers of two, and 65,504 times the larger one, are float32 numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedTensor:
    """A tensor encoded as the bytes of the wire.

    Attributes:
        dtype: a key of ``WIRE_TYPES``.
        parts: flat byte views in the order of the wire; they keep their tensors alive.
        mask_bytes: bytes of the mask at the end; 0 = no mask.
        exponent: the receiver multiplies the elements by ``2 ** exponent``; float16 only, else 0.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[memoryview, ...]
    payload_bytes: int
    mask_bytes: int
    exponent: int = 0


def wire_bytes(shape: Sequence[int], dtype: str, mask_bytes: int = 0) -> int:
    """Payload bytes of a tensor of this shape: scales, elements, mask."""
    elements = math.prod(shape)
    scales = elements // shape[-1] * _SCALE_BYTES if dtype == "int8" else 0
    return elements * WIRE_TYPES[dtype].itemsize + scales + mask_bytes


def encode(tensor: torch.Tensor, mask: torch.Tensor | None, dtype: str) -> EncodedTensor:
    """Encode a tensor and its mask as the bytes of the wire.

    ``tensor`` is (B, T, D) or any other shape with at least one element, of any float type on any device; ``mask`` is
    (B, T) as ``Batch.mask``, or None; ``dtype`` a key of ``WIRE_TYPES``.

    Returns:
        Views on memory: of the tensor itself if type and layout already match, so it must not change before the bytes
            are sent.
    """
    on_cpu, exponent = tensor.detach().cpu(), 0
    if dtype == "int8":
        parts = [bytes_of(part) for part in _quantize(on_cpu)]
    elif dtype == "float16":
        half, exponent = _halve(on_cpu)
        parts = [bytes_of(half)]
    else:
        parts = [bytes_of(on_cpu.to(WIRE_TYPES[dtype]).contiguous())]
    mask_bytes = 0
    if mask is not None:
        parts.append(memoryview(mask.detach().cpu().numpy().astype(np.uint8).tobytes()))
        mask_bytes = parts[-1].nbytes
    return EncodedTensor(
        dtype=dtype,
        shape=tuple(tensor.shape),
        parts=tuple(parts),
        payload_bytes=sum(part.nbytes for part in parts),
        mask_bytes=mask_bytes,
        exponent=exponent,
    )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a flat, writable view of the bytes of a contiguous CPU tensor."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _quantize(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = tensor.to(torch.float32)
    scales = values.abs().amax(dim=-1, keepdim=True).div_(_INT8_MAX)
    steps = values.div(torch.where(scales == 0, torch.ones_like(scales), scales))
    return scales.contiguous(), steps.round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8)


def _halve(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Round a tensor to float16 with its largest element below ``2 ** 15``; return it and the undoing exponent.

    Example: with a largest element of 1e-8, which is 0.67 * 2^-26, all are multiplied by 2^41; the exponent is -41.
    """
    flat = tensor.reshape(-1)
    low, high = torch.aminmax(flat)
    largest = max(-low.item(), high.item())
    exponent = math.frexp(largest)[1] - _HALF_EXPONENT if 0.0 < largest < math.inf else 0
    exponent = min(MAX_EXPONENT, max(MIN_EXPONENT, exponent))
    half = torch.empty(tensor.shape, dtype=torch.float16)
    # in pieces, because the whole product would be a second tensor of full width
    for piece, out in zip(torch.split(flat, _PIECE), torch.split(half.view(-1), _PIECE), strict=True):
        out.copy_(piece * 2.0**-exponent)
    return half, exponent


def decode(
    payload: memoryview,
    shape: Sequence[int],
    dtype: str,
    mask_bytes: int,
    *,
    compute_dtype: torch.dtype,
    exponent: int = 0,
    packed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Decode the bytes of the wire to a tensor and its mask; raises ``FrameError`` or ``DivergedError``.

    Args:
        payload: flat bytes, which must not be shared, as the result may use their memory.
        shape: elements per axis, already checked against the plan.
        dtype: a key of ``WIRE_TYPES``.
        mask_bytes: bytes of the mask at the end; 0 or B * T.
        compute_dtype: element type of the result.
        exponent: of a float16 tensor, already checked to be in the range of ``encode``.
        packed: whether rows are packed into sequences, so that the mask may have the value 2.

    Returns:
        The tensor, and the mask (B, T) as int64 or None.
    """
    expected = wire_bytes(shape, dtype, mask_bytes)
    if payload.nbytes != expected:
        raise FrameError(f"{payload.nbytes} bytes arrived for shape {list(shape)} in {dtype}, {expected} were expected")
    elements = math.prod(shape)
    wire_type = WIRE_TYPES[dtype]
    if dtype == "int8":
        num_scales = elements // shape[-1]
        scales = _read(payload, 0, num_scales, torch.float32).view(*shape[:-1], 1)
        steps = _read(payload, num_scales * _SCALE_BYTES, elements, wire_type).view(*shape)
        tensor = steps.to(compute_dtype) * scales.to(compute_dtype)
    else:
        tensor = _read(payload, 0, elements, wire_type).view(*shape)
        if wire_type is not compute_dtype:
            tensor = tensor.to(compute_dtype)
        if exponent:
            tensor *= 2.0**exponent
    check_finite(tensor, shape)  # as it is computed with: a finite scale or wider type may give infinite elements
    return tensor, _mask(payload[expected - mask_bytes :], shape, packed) if mask_bytes else None


ROUNDS: Final = frozenset({"float16", "int8"})
"""Types of the wire whose elements are no numbers without a scale or an exponent."""


def as_received(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return a tensor (B, T, D) that is sent in ``dtype`` as its receiver has it, on the CPU.

    In the type of the wire; of those with scales or an exponent decoded, in the type of ``tensor``.
    """
    if dtype not in ROUNDS:
        return tensor.detach().to(device="cpu", dtype=WIRE_TYPES[dtype])
    sent = encode(tensor, None, dtype)
    payload = memoryview(bytearray().join(sent.parts))
    return decode(payload, sent.shape, dtype, 0, compute_dtype=tensor.dtype, exponent=sent.exponent)[0]


def _read(payload: memoryview, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Read bytes as elements; unaligned bytes are copied first."""
    tensor = torch.frombuffer(payload, dtype=dtype, count=count, offset=offset)
    if tensor.data_ptr() % dtype.itemsize:
        flat = torch.frombuffer(payload, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
        tensor = flat.clone().view(dtype)
    return tensor


def check_finite(tensor: torch.Tensor, shape: Sequence[int]) -> None:
    """Refuse a tensor with NaN or infinite values.

    A finite sum has only finite terms, so single terms are checked only if the sum is not finite (it may overflow).
    """
    if math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all()):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    raise DivergedError(f"{bad} values of a tensor of shape {list(shape)} are NaN or infinite")


def _mask(part: memoryview, shape: Sequence[int], packed: bool) -> torch.Tensor:
    if len(shape) < 2 or part.nbytes != shape[0] * shape[1]:
        raise FrameError(f"a mask of {part.nbytes} bytes does not fit shape {list(shape)}")
    mask = np.frombuffer(part, dtype=np.uint8)
    if mask.max() > 1 + packed:
        allowed = "0, 1 and 2" if packed else "0 and 1"
        raise FrameError(f"the mask of a tensor of shape {list(shape)} holds other values than {allowed}")
    return torch.from_numpy(mask.reshape(shape[0], shape[1]).astype(np.int64))
