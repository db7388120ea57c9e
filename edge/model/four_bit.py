"""Matrices of 4-bit numbers with a scale for each block of 64 numbers, in the layout of bitsandbytes.

A matrix is a row of numbers in the order of its rows, cut into blocks of 64, whatever its width; the last block may be
shorter and is padded with zeros. A number is an entry of a codebook of 16 values times the scale of its block, which is
the block's largest magnitude. Two numbers are a byte, the first one in the upper half. With *double quantisation* a
scale is a byte too: an entry of 256 levels, times the largest magnitude of 256 scales less their mean, plus that mean.

Example: 2,048 x 5,632 numbers have 5,767,168 bytes of numbers, 180,224 of scales and 2,816 of scales of scales: 0.129
of their bytes in float32.

Rounding is a function of the numbers alone: divisions and comparisons of single numbers, and a mean that is rounded
once. So all nodes have equal bits, whatever their threads. Widening looks up two numbers at once by their byte.

Source: QLoRA (Dettmers et al. 2023), section 3 and appendix E, codebook of ``nf4``; bitsandbytes 0.50.2, files and
levels (``create_dynamic_map``), codebook of ``fp4``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch

from ringtune.models.four_bit import BLOCK, FP4, GROUP
from ringtune.schedule.course import NF4
from ringtune.techniques.frozen_weights import CHUNK

CODEBOOKS: Final = {
    NF4: (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    FP4: (
        *(0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12),
        *(-0.0, -0.0625 / 12, -8 / 12, -1.0, -4 / 12, -6 / 12, -2 / 12, -3 / 12),
    ),
}
"""Values of the 16 codes by type; those of ``fp4`` have a sign, two bits of exponent and one of fraction."""


class WideningBuffer:
    """Memory in which matrices are widened one after the other; each part grows to the largest size that it had."""

    def __init__(self) -> None:
        self._parts: dict[str, torch.Tensor] = {}

    @property
    def held_bytes(self) -> int:
        """Current bytes of all parts."""
        return sum(part.numel() for part in self._parts.values())

    def take(self, count: int, dtype: torch.dtype, device: torch.device, *, part: str = "matrix") -> torch.Tensor:
        """Return memory for so many numbers; the content of an earlier call for the part is lost."""
        size = count * dtype.itemsize
        memory = self._parts.get(part)
        if memory is None or memory.device != device or memory.numel() < size:
            del memory
            self._parts.pop(part, None)  # freed before the next allocation
            memory = self._parts[part] = torch.empty(size, dtype=torch.uint8, device=device)
        return memory[:size].view(dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMatrix:
    """A matrix with numbers packed in blocks, or some of its rows and columns.

    Attributes:
        kind: of the blocks.
        packed: uint8, the blocks.
        width: columns of the whole matrix.
        rows: first row, and the row after the last.
        columns: first column, and the column after the last.
    """

    kind: str
    packed: torch.Tensor
    width: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def device(self) -> torch.device:
        """Device of the numbers."""
        return self.packed.device

    def view(self) -> torch.Tensor:
        """Return a tensor of this shape on the memory of the numbers; its values mean nothing."""
        rows, columns = self.shape
        return self.packed.as_strided((rows, columns), (1, 0) if rows <= columns else (0, 1))

    def part(self, rows: slice, columns: slice) -> Self:
        """Return some rows and columns without a copy."""
        return dataclasses.replace(self, rows=rows_inside(self.rows, rows), columns=rows_inside(self.columns, columns))


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBit(PackedMatrix):
    """A matrix of 4-bit numbers; its kind is a key of ``CODEBOOKS``, and a block has 32 bytes.

    Attributes:
        scales: of blocks, uint8 with double quantisation, else float32.
        groups: float32, largest magnitudes of 256 scales each; None without double quantisation.
        levels: float32, values of the 256 codes of scales.
        offset: mean of the scales.
    """

    scales: torch.Tensor
    groups: torch.Tensor | None
    levels: torch.Tensor
    offset: float

    @property
    def held_bytes(self) -> int:
        """Bytes of the whole matrix."""
        return self.packed.nbytes + self.scales.nbytes + (0 if self.groups is None else self.groups.nbytes)

    def to(self, device: torch.device) -> FourBit:
        """Copy the matrix to a device."""
        return dataclasses.replace(
            self,
            packed=self.packed.to(device),
            scales=self.scales.to(device),
            groups=None if self.groups is None else self.groups.to(device),
            levels=self.levels.to(device),
        )

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows by index in float32, of the whole matrix in float32."""
        return torch.embedding(self.widen(slice(None), torch.float32, WideningBuffer()), ids)

    def widen(self, rows: slice, dtype: torch.dtype, room: WideningBuffer) -> torch.Tensor:
        """Return some rows in float32 or bfloat16; the next call may overwrite them."""
        first, stop = rows_inside(self.rows, rows)
        begin, end = first * self.width // BLOCK, -(-stop * self.width // BLOCK)
        out = room.take((end - begin) * BLOCK, dtype, self.device)
        chunk = min(CHUNK, len(out))
        index = room.take(chunk // 2, torch.int32, self.device, part="index")
        exact = out if dtype is torch.float32 else room.take(chunk, torch.float32, self.device, part="exact")
        pairs = _pairs(self.kind, self.device)
        for at in range(begin, end, CHUNK // BLOCK):
            to = min(end, at + CHUNK // BLOCK)
            wide = out[(at - begin) * BLOCK : (to - begin) * BLOCK]
            numbers = wide if exact is out else exact[: len(wide)]
            codes = index[: len(wide) // 2].copy_(self.packed[at * BLOCK // 2 : to * BLOCK // 2])
            torch.index_select(pairs, 0, codes, out=numbers.view(torch.int64))
            numbers.view(-1, BLOCK).mul_(self.block_scales(at, to).view(-1, 1))
            if numbers is not wide:
                wide.copy_(numbers)
        whole = out[first * self.width - begin * BLOCK :][: (stop - first) * self.width].view(-1, self.width)
        return whole[:, self.columns[0] : self.columns[1]]

    def block_scales(self, start: int, stop: int) -> torch.Tensor:
        """Return the scales of some blocks in float32."""
        scales = self.scales[start:stop]
        if self.groups is None:
            return scales
        first = start // GROUP
        factors = self.groups[first : -(-stop // GROUP)].repeat_interleave(GROUP)[start - first * GROUP :]
        return self.levels.index_select(0, scales.to(torch.int32)).mul_(factors[: stop - start]).add_(self.offset)


def rows_inside(outer: tuple[int, int], inner: slice) -> tuple[int, int]:
    """Return first index and index after the last of a part of a range."""
    start, stop, _ = inner.indices(outer[1] - outer[0])
    return outer[0] + start, outer[0] + max(start, stop)


def num_blocks(shape: tuple[int, int]) -> int:
    """Number of blocks of a matrix."""
    return -(-shape[0] * shape[1] // BLOCK)


def round_to_nf4(pieces: Iterable[tuple[int, torch.Tensor]], shape: tuple[int, int]) -> FourBit:
    """Round a matrix to NF4 with double quantisation.

    A number takes the nearest value, the lower one of two.

    Args:
        pieces: index of its first number and numbers of each piece in float32, which are overwritten; a piece is a
            multiple of 64 long unless it is the last.
        shape: of the matrix.

    Returns:
        The matrix; a number of ``groups`` is not finite if one of the matrix is not.
    """
    blocks = num_blocks(shape)
    packed, largest = torch.zeros(blocks * BLOCK // 2, dtype=torch.uint8), torch.empty(blocks)
    for start, piece in pieces:
        if len(piece) % BLOCK:
            piece = torch.cat([piece, piece.new_zeros(-len(piece) % BLOCK)])
        first, count = start // BLOCK, len(piece) // BLOCK
        numbers = piece.view(count, BLOCK)
        magnitudes = largest[first : first + count]
        torch.maximum(numbers.amax(dim=1), -numbers.amin(dim=1), out=magnitudes)
        numbers.div_(magnitudes.clamp_min(torch.finfo(torch.float32).tiny).view(-1, 1))
        pairs = _codes(piece, _between(NF4)).view(-1, 2)
        packed[start // 2 : start // 2 + len(pairs)] = pairs[:, 0].mul_(16).add_(pairs[:, 1])
    scales, groups, offset = _rounded_scales(largest)
    rows, width = shape
    return FourBit(
        kind=NF4,
        packed=packed,
        scales=scales,
        groups=groups,
        levels=dynamic_levels(),
        offset=offset,
        width=width,
        rows=(0, rows),
        columns=(0, width),
    )


def _codes(numbers: torch.Tensor, edges: Sequence[float]) -> torch.Tensor:
    """Count for each number the edges below it, as uint8; a few edges take a quarter of a binary search's time."""
    codes, is_above = torch.zeros(len(numbers), dtype=torch.uint8), torch.empty(len(numbers), dtype=torch.bool)
    for edge in edges:
        codes.add_(torch.gt(numbers, edge, out=is_above).view(torch.uint8))
    return codes


def _rounded_scales(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Round scales to levels; return codes, largest magnitudes of groups, and the mean."""
    count = len(largest)
    numbers: Any = largest.numpy().data  # a sum by threads would depend on their number
    offset = torch.tensor(math.fsum(numbers) / count).item()
    rest = torch.zeros(-(-count // GROUP) * GROUP)
    torch.sub(largest, offset, out=rest[:count])
    rest = rest.view(-1, GROUP)
    groups = rest.abs().amax(dim=1)
    rest.div_(groups.clamp_min(torch.finfo(torch.float32).tiny).view(-1, 1))
    levels = dynamic_levels()
    codes = torch.bucketize(rest.flatten()[:count], (levels[1:] + levels[:-1]) / 2, out_int32=True)
    return codes.to(torch.uint8), groups, offset


@functools.cache
def dynamic_levels() -> torch.Tensor:
    """Return the 256 levels of scales: 0, 1, and both signs of 127 magnitudes, half of them above 0.1.

    Each of seven powers of ten has twice as many levels as the one below.
    """
    levels = [0.0, 1.0]
    for power in range(7):
        steps = 2 ** (power + 1)
        middles = [10 ** (power - 6) * (0.1 + 0.9 * at / steps) for at in range(1, steps, 2)]
        levels += [*middles, *(-middle for middle in middles)]
    return torch.tensor(sorted(levels))


@functools.cache
def _between(kind: str) -> tuple[float, ...]:
    """Return the middles between neighbours of a sorted codebook."""
    values = torch.tensor(CODEBOOKS[kind])
    return tuple(((values[1:] + values[:-1]) / 2).tolist())


@functools.cache
def _pairs(kind: str, device: torch.device) -> torch.Tensor:
    """Return for each byte its two float32 values, as one number of 8 bytes."""
    values = torch.tensor(CODEBOOKS[kind])
    codes = torch.arange(256)
    return torch.stack([values[codes // 16], values[codes % 16]], dim=1).view(torch.int64).flatten().to(device)
