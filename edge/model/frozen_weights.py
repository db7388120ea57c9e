"""Frozen matrices in bfloat16, in int8 with a scale for each row, in 4 bits or GGUF's blocks, and products with them.

The course of a run chooses how to multiply:

* *widened*: the matrix becomes float32, at most ``MAX_WIDENED_BYTES`` at a time, in a buffer that all matrices of a
  node share. The result equals that of weights rounded once.
* *native*: a product in bfloat16, with sums in float32 and a rounded result. The other factor is rounded to bfloat16
  before. Integers of int8 are exact in bfloat16, and the scales are applied outside; 4-bit numbers are rounded once
  more.

Measured on one core with AVX512-BF16 (1,024 tokens, 2,048 x 5,632 numbers): 53 ms native, 222 ms widened, of which 2 ms
are the widening; 220 ms in float32.

N rows, R rows of the matrix, C columns of it.

``FrozenMatrix`` is a tensor of the small dtype and full shape in the place of a module's weight. ``CompactMatrix`` does
its products and row lookups, and a backward keeps the small matrix alone. Any other function of torch gets a float32
copy, such as the norms of DoRA, and for any code the matrix is one of float32; functions that would change the matrix
are refused.

A matrix stored in bfloat16, in 4 bits or in a GGUF file stays mapped. Any other matrix is rounded once, a piece at a
time. With ``nf4`` the matrices of blocks have 4 bits,
those outside of blocks (tables, a decoder) int8: a row of a table is looked up alone.

Source: torch's documentation, "Extending PyTorch", subclassing with ``__torch_function__``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional

from edge.model.four_bit import FourBit, WideningBuffer, round_to_nf4
from edge.model.gguf_blocks import GgufBlocks
from edge.model.tensor_files import SafetensorsFiles
from ringtune.errors import ModelError
from ringtune.models.four_bit import BLOCK
from ringtune.schedule.course import BFLOAT16, GGUF, NF4, FrozenWeights
from ringtune.storage.tensor_files import ALIGNMENT
from ringtune.techniques.frozen_weights import MAX_WIDENED_BYTES

_MAX_INT8 = 127
_SUMMED_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RowScaled:
    """A matrix in bfloat16, or in int8 with a scale for each row.

    Attributes:
        numbers: bfloat16 or int8, (R, C).
        scales: float32, (R, 1), for int8; None for bfloat16.
    """

    numbers: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.numbers.shape[0], self.numbers.shape[1]

    @property
    def width(self) -> int:
        """Numbers that are widened for a row."""
        return self.numbers.shape[1]

    @property
    def held_bytes(self) -> int:
        """Bytes of numbers and scales."""
        return self.numbers.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def device(self) -> torch.device:
        """Device of the numbers."""
        return self.numbers.device

    def view(self) -> torch.Tensor:
        """Return the numbers."""
        return self.numbers

    def part(self, rows: slice, columns: slice) -> RowScaled:
        """Return some rows and columns without a copy."""
        return RowScaled(numbers=self.numbers[rows, columns], scales=None if self.scales is None else self.scales[rows])

    def to(self, device: torch.device) -> RowScaled:
        """Copy the matrix to a device."""
        scales = None if self.scales is None else self.scales.to(device)
        return RowScaled(numbers=self.numbers.to(device), scales=scales)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows by index in float32; no other row is read."""
        rows = torch.embedding(self.numbers, ids).to(torch.float32)
        return rows if self.scales is None else rows.mul_(torch.embedding(self.scales, ids))

    def widen(self, rows: slice, dtype: torch.dtype, room: WideningBuffer) -> torch.Tensor:
        """Return some rows in float32, or in bfloat16 without their scales; the next call may overwrite them."""
        numbers = self.numbers[rows]
        if numbers.dtype is dtype:
            return numbers
        wide = room.take(numbers.numel(), dtype, numbers.device).view(numbers.shape)
        wide.copy_(numbers)  # two passes take a fifth of a product of two types
        return wide if self.scales is None or dtype is torch.bfloat16 else wide.mul_(self.scales[rows])


SmallMatrix = RowScaled | FourBit | GgufBlocks
"""Forms in which a matrix is held; each can be cut, moved, widened by rows and looked up by row."""


class CompactMatrix:
    """A matrix in few bytes, and products with it. ``native``: whether to multiply in bfloat16."""

    def __init__(self, numbers: SmallMatrix, *, native: bool, room: WideningBuffer) -> None:
        self.numbers, self.native, self._room = numbers, native, room

    def part(self, rows: slice, columns: slice) -> CompactMatrix:
        """Return some rows and columns without a copy."""
        return CompactMatrix(self.numbers.part(rows, columns), native=self.native, room=self._room)

    def to(self, device: torch.device) -> CompactMatrix:
        """Return the matrix on ``device``; itself if it is there."""
        if device == self.numbers.device:
            return self
        return CompactMatrix(self.numbers.to(device), native=self.native, room=self._room)

    def wide(self) -> torch.Tensor:
        """Return a copy in float32."""
        return self.numbers.widen(slice(None), torch.float32, WideningBuffer())

    def total(self) -> torch.Tensor:
        """Return the sum of all numbers in float64; a few rows at a time are widened, always in the same memory.

        A copy of its own for each piece would make the heap grow: where a small result that stays is allocated beside
        it, the next copy does not fit into its place.
        """
        each, room = max(1, _SUMMED_BYTES // (4 * self.numbers.width)), WideningBuffer()
        starts = range(0, self.numbers.shape[0], each)
        sums = torch.empty(len(starts), dtype=torch.float64, device=self.numbers.device)
        for index, start in enumerate(starts):
            piece = self.numbers.widen(slice(start, start + each), torch.float32, room)
            exact = room.take(piece.numel(), torch.float64, piece.device, part="summed").view(piece.shape)
            sums[index] = exact.copy_(piece).sum()
        return sums.sum()

    def times_rows(
        self, x_NC: torch.Tensor, bias_R: torch.Tensor | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``x_NC @ matrix.T + bias``, (N, R); in ``out`` if it is given."""
        parts = list(self._parts())
        if len(parts) == 1 and not self.native:
            wide_CR = self._widened(parts[0]).t()
            return torch.mm(x_NC, wide_CR, out=out) if bias_R is None else torch.addmm(bias_R, x_NC, wide_CR, out=out)
        x_NC = x_NC.to(torch.bfloat16) if self.native else x_NC
        y_NR = x_NC.new_empty(x_NC.shape[0], self.numbers.shape[0], dtype=torch.float32) if out is None else out
        for part in parts:
            y_NR[:, part] = torch.mm(x_NC, self._widened(part).t())
        if (scales := self._row_scales) is not None:
            y_NR *= scales
        return y_NR if bias_R is None else y_NR.add_(bias_R)

    def times_columns(self, x_NR: torch.Tensor, bias_C: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x_NR @ matrix + bias``, (N, C)."""
        first, *others = self._parts()
        factor, wide = self._factor(x_NR, first), self._widened(first)
        if self.native:
            y_NC = torch.mm(factor, wide).to(torch.float32)
            y_NC = y_NC if bias_C is None else y_NC.add_(bias_C)
        else:
            y_NC = torch.mm(factor, wide) if bias_C is None else torch.addmm(bias_C, factor, wide)
        for part in others:
            if self.native:
                y_NC += torch.mm(self._factor(x_NR, part), self._widened(part))
            else:
                y_NC.addmm_(x_NR[:, part], self._widened(part))
        return y_NC

    def _factor(self, x_NR: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return what is multiplied with some rows; natively with their scales, in bfloat16."""
        x = x_NR[:, rows]
        if not self.native:
            return x
        return (x if (scales := self._row_scales) is None else x * scales[:, rows]).to(torch.bfloat16)

    def _parts(self) -> Iterator[slice]:
        """Cut the rows into parts that fit the buffer; native bfloat16 is one part."""
        num_rows = self.numbers.shape[0]
        each = max(1, MAX_WIDENED_BYTES // (self.numbers.width * self._wide_dtype.itemsize))
        if self.numbers.view().dtype is self._wide_dtype:
            each = num_rows
        for start in range(0, num_rows, each):
            yield slice(start, min(start + each, num_rows))

    @property
    def _row_scales(self) -> torch.Tensor | None:
        """Scales that a native product leaves to its other factor or its result, (1, R)."""
        scales = self.numbers.scales if self.native and isinstance(self.numbers, RowScaled) else None
        return None if scales is None else scales.view(1, -1)

    @property
    def _wide_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.native else torch.float32

    def _widened(self, rows: slice) -> torch.Tensor:
        """Return some rows in the dtype of the product; the next call may overwrite them."""
        return self.numbers.widen(rows, self._wide_dtype, self._room)


def round_to_int8(rows_RC: torch.Tensor, numbers_RC: torch.Tensor, scales_R1: torch.Tensor) -> None:
    """Round each row to multiples of its largest magnitude / 127, into existing tensors; the rows are overwritten.

    Example: the row -1.27, 0.5, 0.004 has the scale 0.01 and the numbers -127, 50, 0; a row of zeros has the scale 0.
    """
    largest_R1 = torch.maximum(rows_RC.amax(dim=1, keepdim=True), -rows_RC.amin(dim=1, keepdim=True))
    torch.div(largest_R1, _MAX_INT8, out=scales_R1)
    rows_RC.div_(scales_R1.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(-_MAX_INT8, _MAX_INT8)
    numbers_RC.copy_(rows_RC)


_READ_ONLY: Final = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "data_ptr", "storage_offset"),
        *("untyped_storage", "is_contiguous", "is_floating_point", "is_complex", "get_device", "requires_grad_"),
        *("__len__", "__repr__", "__hash__", "__get__", "__set__", "__delete__", "_has_compatible_shallow_copy_type"),
    }
)
"""Functions that neither read nor change a tensor's numbers."""


class FrozenMatrix(torch.Tensor):
    """A weight in the place of which a small matrix is held.

    Attributes:
        is_transposed: whether rows and columns of ``held`` are exchanged.
    """

    held: CompactMatrix
    is_transposed: bool

    @staticmethod
    def of(held: CompactMatrix, *, is_transposed: bool = False) -> FrozenMatrix:
        """Make the tensor for ``held``; it shares its memory."""
        view = held.numbers.view()
        view = view.t() if is_transposed else view
        made: FrozenMatrix = torch.Tensor._make_subclass(FrozenMatrix, view)
        made.held, made.is_transposed = held, is_transposed
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (handler := _HANDLERS.get(func)) is not None and (result := handler(*args, **kwargs)) is not None:
            return result
        name = getattr(func, "__name__", "")
        if name in _READ_ONLY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name.endswith("_") and not name.endswith("__") and isinstance(args[0], FrozenMatrix):
            raise TypeError(f"{name} would change a frozen matrix, which is held small")
        return func(*_wide(args), **{key: _wide_one(value) for key, value in kwargs.items()})

    def wide(self) -> torch.Tensor:
        """Return a copy in float32."""
        wide = self.held.wide()
        return wide.t() if self.is_transposed else wide

    def flipped(self) -> FrozenMatrix:
        """Return the transposed matrix without a copy."""
        return FrozenMatrix.of(self.held, is_transposed=not self.is_transposed)

    def part(self, rows: slice, columns: slice = slice(None)) -> FrozenMatrix:
        """Return some rows and columns without a copy."""
        held = self.held.part(columns, rows) if self.is_transposed else self.held.part(rows, columns)
        return FrozenMatrix.of(held, is_transposed=self.is_transposed)


def product(x: torch.Tensor, matrix: FrozenMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ matrix + bias``; x has any number of leading dimensions."""
    flat_NI = x.reshape(-1, x.shape[-1])
    output: torch.Tensor = _Product.apply(flat_NI, bias, matrix.held, matrix.is_transposed)  # type: ignore[no-untyped-call]
    return output.view(*x.shape[:-1], output.shape[-1])


def mm_into(
    out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, *, bias: torch.Tensor | None = None, add: bool = False
) -> None:
    """Write ``x @ matrix + bias`` into ``out``, or add ``x @ matrix`` to it; outside of any graph.

    Shapes: ``out`` (N, O), ``x`` (N, I), ``matrix`` (I, O), plain or ``FrozenMatrix``, ``bias`` (O,), not with
    ``add`` to ``out``.
    """
    if isinstance(matrix, FrozenMatrix):
        if matrix.is_transposed and not add:
            matrix.held.times_rows(x, bias, out=out)
            return
        result = _multiplied(x, matrix.held, bias, by_rows=matrix.is_transposed)
        (out.add_ if add else out.copy_)(result)
    elif add:
        out.addmm_(x, matrix)
    elif bias is not None:
        torch.addmm(bias, x, matrix, out=out)
    else:
        torch.mm(x, matrix, out=out)


class _Product(torch.autograd.Function):
    """Product of rows with a frozen matrix; the backward keeps only the matrix.

    The result is no view, so that a block may add to it in place, as Falcon's do.
    """

    @staticmethod
    def forward(
        ctx: Any, x_NI: torch.Tensor, bias: torch.Tensor | None, held: CompactMatrix, by_rows: bool
    ) -> torch.Tensor:
        ctx.held, ctx.by_rows = held, by_rows
        return _multiplied(x_NI, held, bias, by_rows=by_rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_NO,) = grads
        x_grad = _multiplied(grad_NO, ctx.held, None, by_rows=not ctx.by_rows) if ctx.needs_input_grad[0] else None
        return x_grad, grad_NO.sum(0) if ctx.needs_input_grad[1] else None, None, None


def _multiplied(x: torch.Tensor, held: CompactMatrix, bias: torch.Tensor | None, *, by_rows: bool) -> torch.Tensor:
    return held.times_rows(x, bias) if by_rows else held.times_columns(x, bias)


# ---- functions of torch --------------------------------------------------------------------------


def _linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    return product(x, weight.flipped(), bias) if isinstance(weight, FrozenMatrix) else None


def _addmm(bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> torch.Tensor | None:
    if not isinstance(weight, FrozenMatrix) or isinstance(x, FrozenMatrix) or (beta, alpha) != (1, 1):
        return None
    return product(x, weight, bias)


def _matmul(x: Any, weight: Any) -> torch.Tensor | None:
    if not isinstance(weight, FrozenMatrix) or isinstance(x, FrozenMatrix):
        return None
    return product(x, weight)


def _embedding(ids: torch.Tensor, weight: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    is_plain = isinstance(weight, FrozenMatrix) and not weight.is_transposed
    return weight.held.numbers.look_up(ids) if is_plain else None


def _transpose(matrix: Any, *dimensions: int) -> FrozenMatrix | None:
    return matrix.flipped() if sorted(at % 2 for at in dimensions) in ([], [0, 1]) else None


def _sum(matrix: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    return None if args or kwargs else matrix.held.total()


def _clamp(matrix: Any, low: float, high: float) -> Any:
    """Return the matrix where its numbers are within the bounds, as Gemma 3n's coefficients; else it would change."""
    wide = matrix.wide()
    return matrix if bool((wide >= low).all() and (wide <= high).all()) else None


def _getitem(matrix: Any, index: Any) -> FrozenMatrix | None:
    places = index if isinstance(index, tuple) else (index,)
    if len(places) > 2 or not all(isinstance(place, slice) and place.step in (None, 1) for place in places):
        return None
    return matrix.part(*places) if isinstance(matrix, FrozenMatrix) else None


def _to(matrix: Any, *args: Any, **kwargs: Any) -> FrozenMatrix:
    """Move the matrix to a device; its dtype does not change."""
    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    if device is None or device == matrix.device:
        return matrix  # type: ignore[no-any-return]
    return FrozenMatrix.of(matrix.held.to(device), is_transposed=matrix.is_transposed)


_Handler = Callable[..., Any]
_HANDLERS: Final[Mapping[Any, _Handler]] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
    **dict.fromkeys((torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.t, torch.transpose, torch.Tensor.t, torch.Tensor.transpose), _transpose),
    **dict.fromkeys((torch.Tensor.T.__get__, torch.Tensor.mT.__get__), _transpose),  # type: ignore[attr-defined]
    **dict.fromkeys(
        (torch.Tensor.detach, torch.Tensor.data.__get__),  # type: ignore[attr-defined]
        lambda matrix: FrozenMatrix.of(matrix.held, is_transposed=matrix.is_transposed),
    ),
    torch.Tensor.dtype.__get__: lambda matrix: torch.float32,  # type: ignore[attr-defined]
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.clamp_: _clamp,
    torch.Tensor.sum: _sum,
    torch.Tensor.to: _to,
}
"""Function of torch -> handler; a handler that returns None leaves the call to a float32 copy."""


def _wide_one(value: Any) -> Any:
    if isinstance(value, FrozenMatrix):
        return value.wide()
    return type(value)(_wide(value)) if type(value) in (list, tuple) else value


def _wide(values: Sequence[Any]) -> list[Any]:
    return [_wide_one(value) for value in values]


class FrozenFiles(SafetensorsFiles):
    """Tensors of a model folder with compact frozen matrices.

    Args:
        frozen: dtype and arithmetic; None = frozen matrices are read in the requested dtype.

    Attributes:
        room: buffer for widening, shared by all of them.
    """

    def __init__(self, folder: Path, frozen: FrozenWeights | None) -> None:
        super().__init__(folder)
        self.room = WideningBuffer()
        self._frozen = frozen
        self._wide = torch.empty(0)

    def read_frozen(
        self,
        name: str,
        dtype: torch.dtype,
        *,
        whole: bool = False,
        alignment: int = ALIGNMENT,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """Read a matrix as ``FrozenMatrix``; see ``SafetensorsFiles.read_frozen``.

        Raises ``ModelError`` also for numbers that are not finite, which would spoil whole rows of int8.
        """
        frozen = self._frozen
        if frozen is None or len(self.shape(name)) != 2:
            return super().read_frozen(name, dtype, whole=whole, alignment=alignment, device=device)
        if frozen.dtype == GGUF:
            numbers: SmallMatrix = self.read_gguf(name, whole=whole)
        elif frozen.dtype == BFLOAT16:
            alignment = alignment if frozen.native else 1  # numbers that are widened are multiplied elsewhere
            numbers = RowScaled(numbers=super().read_frozen(name, torch.bfloat16, whole=whole, alignment=alignment))
        else:
            numbers = self._rounded(name, frozen.dtype, whole=whole)
        held = CompactMatrix(numbers, native=frozen.native, room=self.room)
        return FrozenMatrix.of(held if device is None else held.to(device))

    def _rounded(self, name: str, dtype: str, *, whole: bool) -> RowScaled | FourBit:
        if dtype == NF4 and whole and self.is_four_bit(name):
            return self.read_four_bit(name)
        rows, columns = self.shape(name)
        if dtype == NF4 and whole:
            pieces = ((start, self._scratch(piece)) for start, piece in self.number_pieces(name, multiple=BLOCK))
            numbers: RowScaled | FourBit = round_to_nf4(pieces, (rows, columns))
        else:
            rounded, scales = torch.empty((rows, columns), dtype=torch.int8), torch.empty(rows, 1)
            for start, piece in self.row_pieces(name):
                part = slice(start, start + len(piece))
                round_to_int8(self._scratch(piece), rounded[part], scales[part])
            numbers = RowScaled(numbers=rounded, scales=scales)
        largest = numbers.groups if isinstance(numbers, FourBit) else numbers.scales
        if largest is None or not largest.isfinite().all():
            raise ModelError(
                f"{self.folder}: tensor {name} has numbers that are not finite, which {dtype} can't hold; fetch the "
                "model again, or remove runtime.frozen"
            )
        return numbers

    def _scratch(self, piece: torch.Tensor) -> torch.Tensor:
        """Copy a piece to memory for the rounding in float32, always the same."""
        if self._wide.numel() < piece.numel():
            self._wide = torch.empty(piece.numel())
        return self._wide[: piece.numel()].view(piece.shape).copy_(piece)
