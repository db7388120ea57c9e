"""Hold a matrix in few bytes, and multiply with it.

Two ways, which the course of a run names:

* *widened*: the matrix becomes float32, a part of at most ``MOST_WIDENED_BYTES`` at a time, in room that all matrices
  of a node share. What is multiplied then is what a process would multiply that had rounded its weights once.
* *native*: the product is one of bfloat16, with sums in float32; only its result is rounded. What is multiplied with
  the matrix is rounded to bfloat16 before. Integers of int8 are exact in bfloat16, and the scales stay outside of it.

Measured on one core with AVX512-BF16 (1,024 tokens, 2,048 x 5,632 numbers): 53 ms native, 222 ms widened, of which 2 ms
are the widening; 220 ms in float32.

N rows, R rows of the matrix, C columns of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ringtune.costs.memory.tensors.frozen import MOST_WIDENED_BYTES

_MOST_INT8 = 127


class Room:
    """Memory in which matrices are widened, one after the other; it grows to what the largest one takes."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes that the room takes now."""
        return 0 if self._buffer is None else self._buffer.numel()

    def take(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a matrix; what was there before is lost."""
        size = shape[0] * shape[1] * dtype.itemsize
        if self._buffer is None or self._buffer.device != device or self._buffer.numel() < size:
            self._buffer = None  # before there is another one
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        return self._buffer[:size].view(dtype).view(shape)


class Held:
    """A matrix in bfloat16, or in int8 with a scale for each row.

    Args:
        numbers_RC: bfloat16 or int8.
        scales_R1: float32, for int8; None for bfloat16.
        native: whether to multiply in bfloat16.
        room: where matrices are widened.
    """

    def __init__(self, numbers_RC: torch.Tensor, scales_R1: torch.Tensor | None, *, native: bool, room: Room) -> None:
        self.numbers = numbers_RC
        self.scales = scales_R1
        self.native = native
        self._room = room

    @property
    def held_bytes(self) -> int:
        """Bytes of numbers and scales."""
        return self.numbers.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def part(self, rows: slice, columns: slice) -> Held:
        """Return some rows and columns, on the same memory."""
        scales = None if self.scales is None else self.scales[rows]
        return Held(self.numbers[rows, columns], scales, native=self.native, room=self._room)

    def to(self, device: torch.device) -> Held:
        """Return the matrix on a device; itself if it is there."""
        if device == self.numbers.device:
            return self
        scales = None if self.scales is None else self.scales.to(device)
        return Held(self.numbers.to(device), scales, native=self.native, room=self._room)

    def wide(self) -> torch.Tensor:
        """Return the matrix in float32, in memory of its own."""
        return self._scaled(self.numbers.to(torch.float32), slice(None))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows with these numbers in float32; no other row is read."""
        found = torch.embedding(self.numbers, ids).to(torch.float32)
        return found if self.scales is None else found.mul_(torch.embedding(self.scales, ids))

    def times_rows(self, x_NC: torch.Tensor, bias_R: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply with every row: (N, R) = x times the transposed matrix, plus the bias."""
        parts = list(self._parts())
        if len(parts) == 1 and not self.native:
            wide_CR = self._widened(parts[0]).t()
            return torch.mm(x_NC, wide_CR) if bias_R is None else torch.addmm(bias_R, x_NC, wide_CR)
        x_NC = x_NC.to(torch.bfloat16) if self.native else x_NC
        y_NR = torch.empty(x_NC.shape[0], self.numbers.shape[0], dtype=torch.float32, device=x_NC.device)
        for part in parts:
            y_NR[:, part] = torch.mm(x_NC, self._widened(part).t())
        if self.native and self.scales is not None:
            y_NR *= self.scales.view(1, -1)
        return y_NR if bias_R is None else y_NR.add_(bias_R)

    def times_columns(self, x_NR: torch.Tensor, bias_C: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply with every column: (N, C) = x times the matrix, plus the bias."""
        if self.native:
            x_NR = (x_NR if self.scales is None else x_NR * self.scales.view(1, -1)).to(torch.bfloat16)
        first, *others = self._parts()
        y_NC = self._begun(x_NR[:, first], self._widened(first), bias_C)
        for part in others:
            if self.native:
                y_NC += torch.mm(x_NR[:, part], self._widened(part))
            else:
                y_NC.addmm_(x_NR[:, part], self._widened(part))
        return y_NC

    def _begun(self, x: torch.Tensor, wide: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply the first part, in float32 at last, and add the bias."""
        if not self.native:
            return torch.mm(x, wide) if bias is None else torch.addmm(bias, x, wide)
        found = torch.mm(x, wide).to(torch.float32)
        return found if bias is None else found.add_(bias)

    def _parts(self) -> Iterator[slice]:
        """Cut the rows so that each part fits the room; bfloat16 that is multiplied natively needs none."""
        num_rows, columns = self.numbers.shape
        each = max(1, MOST_WIDENED_BYTES // (columns * self._wide_dtype.itemsize))
        if self.native and self.scales is None:
            each = num_rows
        for start in range(0, num_rows, each):
            yield slice(start, min(start + each, num_rows))

    @property
    def _wide_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.native else torch.float32

    def _widened(self, rows: slice) -> torch.Tensor:
        """Return some rows as they are multiplied; the next call may overwrite them."""
        numbers = self.numbers[rows]
        if numbers.dtype is self._wide_dtype:
            return numbers
        wide = self._room.take((numbers.shape[0], numbers.shape[1]), self._wide_dtype, numbers.device)
        wide.copy_(numbers)  # two passes take a fifth of a product of two types
        return wide if self.native else self._scaled(wide, rows)

    def _scaled(self, wide: torch.Tensor, rows: slice) -> torch.Tensor:
        return wide if self.scales is None else wide.mul_(self.scales[rows])


def rounded_to_int8(matrix_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to 255 numbers, evenly spaced, the largest of which is its largest magnitude.

    Example: the row -1.27, 0.5, 0.004 has the scale 0.01 and the numbers -127, 50, 0.

    Args:
        matrix_RC: any float type.

    Returns:
        Numbers (R, C) in int8, and scales (R, 1) in float32, 0 for a row of zeros.
    """
    numbers_RC, scales_R1 = torch.empty_like(matrix_RC, dtype=torch.int8), torch.empty(len(matrix_RC), 1)
    round_to_int8(matrix_RC.to(torch.float32, copy=True), numbers_RC, scales_R1)
    return numbers_RC, scales_R1


def round_to_int8(rows_RC: torch.Tensor, numbers_RC: torch.Tensor, scales_R1: torch.Tensor) -> None:
    """Do the same into tensors that are there; the rows, in float32, are overwritten."""
    largest_R1 = torch.maximum(rows_RC.amax(dim=1, keepdim=True), -rows_RC.amin(dim=1, keepdim=True))
    torch.div(largest_R1, _MOST_INT8, out=scales_R1)
    rows_RC.div_(scales_R1.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(-_MOST_INT8, _MOST_INT8)
    numbers_RC.copy_(rows_RC)
