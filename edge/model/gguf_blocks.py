"""Matrices in the blocks of a GGUF file: held as the file's bytes, widened for each product.

A row is blocks of 32 or 256 numbers, each with its scales. Widening computes what ``gguf.quants.dequantize`` does, in
the same order of operations, so the numbers are equal in every bit. Rows of query and key, of which llama.cpp has the
halves of each head interleaved, are put in the order of transformers when they are read; a row is never cut.

Formats, n blocks: ``Q4_0`` d (q - 8); ``Q4_1`` d q + m; ``Q5_0``, ``Q5_1`` the same with a fifth bit; ``Q8_0`` d q;
``Q4_K``, ``Q5_K`` eight times 32 numbers d s q - e m, with scales s and m of 6 bits; ``Q6_K`` sixteen times 16 numbers
d s (q - 32).

Source: ggml, ``ggml-common.h`` and ``ggml-quants.c``; the package gguf 0.19, ``gguf.quants``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from edge.model.four_bit import PackedMatrix, WideningBuffer, rows_inside
from ringtune.storage.gguf import BLOCK_TYPES
from ringtune.techniques.frozen_weights import CHUNK


class _Codec(NamedTuple):
    """How blocks become numbers.

    Attributes:
        scales: offsets in a block of the float16 numbers; empty for plain numbers.
        widen: fills float32 (n, numbers of a block) from bytes (n, bytes of a block).
    """

    scales: tuple[int, ...]
    widen: Callable[[torch.Tensor, torch.Tensor], None]


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 numbers at an offset of each block in float32, (n, 1)."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(bytes_: torch.Tensor, out: torch.Tensor) -> None:
    """Write the lower halves of bytes (n, k) into the first k columns of ``out``, the upper ones into the next."""
    count = bytes_.shape[1]
    out[:, :count].copy_(bytes_ & 15)
    out[:, count:].copy_(bytes_ >> 4)


def _fifth_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return 32 bits of each block as 0 or 16, uint8 (n, 32)."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[:, at : at + 4, None] >> shifts) & 1).mul_(16).view(-1, 32)


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 6:], out)
    out.add_(_fifth_bits(blocks, 2)).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 8:], out)
    out.add_(_fifth_bits(blocks, 4)).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _scales_of_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and offsets of the eight parts of each block, with those of the whole block in; (n, 8, 1)."""
    low, offset, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], dim=1)
    least = torch.cat([offset & 63, (high >> 4) | ((offset >> 2) & 48)], dim=1)
    return (_half(blocks, 0) * scale)[..., None], (_half(blocks, 2) * least)[..., None]


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    parts = out.view(-1, 4, 2, 32)
    numbers = blocks[:, 16:].reshape(-1, 4, 32)
    parts[:, :, 0].copy_(numbers & 15)
    parts[:, :, 1].copy_(numbers >> 4)
    scale, least = _scales_of_k(blocks)
    out.view(-1, 8, 32).mul_(scale).sub_(least)


def _q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    parts, numbers, bits = out.view(-1, 4, 2, 32), blocks[:, 48:].reshape(-1, 4, 32), blocks[:, 16:48]
    for part in range(4):
        parts[:, part, 0].copy_((numbers[:, part] & 15) | ((bits >> (2 * part)) & 1).mul_(16))
        parts[:, part, 1].copy_((numbers[:, part] >> 4) | ((bits >> (2 * part + 1)) & 1).mul_(16))
    scale, least = _scales_of_k(blocks)
    out.view(-1, 8, 32).mul_(scale).sub_(least)


def _q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    parts, low = out.view(-1, 2, 4, 32), blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    for quarter in range(4):
        numbers = low[:, :, quarter % 2]
        numbers = numbers & 15 if quarter < 2 else numbers >> 4
        parts[:, :, quarter].copy_(numbers | (((high >> (2 * quarter)) & 3) << 4))
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    out.view(-1, 16, 16).sub_(32).mul_(scales[..., None])


def _plain(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def widen(blocks: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(blocks.view(dtype))

    return widen


_CODECS: Final = {
    "F32": _Codec((), _plain(torch.float32)),
    "F16": _Codec((), _plain(torch.float16)),
    "BF16": _Codec((), _plain(torch.bfloat16)),
    "Q4_0": _Codec((0,), _q4_0),
    "Q4_1": _Codec((0, 2), _q4_1),
    "Q5_0": _Codec((0,), _q5_0),
    "Q5_1": _Codec((0, 2), _q5_1),
    "Q8_0": _Codec((0,), _q8_0),
    "Q4_K": _Codec((0, 2), _q4_k),
    "Q5_K": _Codec((0, 2), _q5_k),
    "Q6_K": _Codec((208,), _q6_k),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufBlocks(PackedMatrix):
    """A matrix in blocks; its kind is a key of ``BLOCK_TYPES``, and a row of ``packed`` is one of the matrix.

    Attributes:
        is_added: whether 1 was added to each number.
    """

    is_added: bool = False

    @property
    def held_bytes(self) -> int:
        """Bytes of the whole matrix."""
        return self.packed.nbytes

    def to(self, device: torch.device) -> GgufBlocks:
        """Copy the matrix to a device."""
        return dataclasses.replace(self, packed=self.packed.to(device))

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows by index in float32; no other row is widened."""
        taken = torch.embedding(self.packed, ids.reshape(-1) + self.rows[0])
        wide = torch.empty(len(taken), self.width, device=self.device)
        self._fill(taken, wide)
        return wide[:, self.columns[0] : self.columns[1]].reshape(*ids.shape, -1)

    def widen(self, rows: slice, dtype: torch.dtype, room: WideningBuffer) -> torch.Tensor:
        """Return some rows in float32 or bfloat16; the next call may overwrite them."""
        first, stop = rows_inside(self.rows, rows)
        out = room.take((stop - first) * self.width, dtype, self.device).view(-1, self.width)
        each = max(1, CHUNK // self.width)
        for at in range(first, stop, each):
            to = min(stop, at + each)
            wide = out[at - first : to - first]
            exact = wide
            if dtype is not torch.float32:
                exact = room.take(wide.numel(), torch.float32, self.device, part="exact").view(wide.shape)
            self._fill(self.packed[at:to], exact)
            if exact is not wide:
                wide.copy_(exact)
        return out[:, self.columns[0] : self.columns[1]]

    def is_finite(self) -> bool:
        """Whether the scales of all blocks are finite, or the numbers where there are no scales."""
        blocks = self.packed.view(-1, BLOCK_TYPES[self.kind].nbytes)
        if scales := _CODECS[self.kind].scales:
            return all(bool(_half(blocks, at).isfinite().all()) for at in scales)
        each = max(1, CHUNK // self.width)
        room = WideningBuffer()
        return all(
            bool(self.widen(slice(at, at + each), torch.float32, room).isfinite().all())
            for at in range(0, self.shape[0], each)
        )

    def _fill(self, data: torch.Tensor, out: torch.Tensor) -> None:
        block = BLOCK_TYPES[self.kind]
        _CODECS[self.kind].widen(data.view(-1, block.nbytes), out.view(-1, block.numbers))
        if self.is_added:
            out.sub_(1)


def in_order(heads: int, rows: int) -> torch.Tensor:
    """Return for each row of a model the row of the file, where the halves of each head are interleaved.

    Example: one head of 6 rows: 0, 2, 4, 1, 3, 5.
    """
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
