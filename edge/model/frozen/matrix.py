"""A frozen matrix in the place of a module's weight: the modules of the libraries stay as they are.

``FrozenMatrix`` is a tensor of the small type with the shape of the weight. Where torch is about to multiply with it or
to look rows of it up, :class:`~edge.model.frozen.held.Held` does so, and a backward keeps the small matrix alone. Any
other function gets a float32 copy of its own, such as the norms of DoRA; functions that would change the matrix are
refused.

Source: torch's documentation, "Extending PyTorch", subclassing with ``__torch_function__``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.nn import functional

from edge.model.frozen.held import Held

_READ_ONLY: Final = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "data_ptr", "storage_offset"),
        *("untyped_storage", "is_contiguous", "is_floating_point", "is_complex", "get_device", "requires_grad_"),
        *("__len__", "__repr__", "__hash__", "__get__", "__set__", "__delete__", "_has_compatible_shallow_copy_type"),
    }
)
"""Functions of a tensor that neither read nor change its numbers."""


class FrozenMatrix(torch.Tensor):
    """A weight that is held small.

    Attributes:
        held: the numbers.
        is_transposed: whether this is the matrix with rows and columns exchanged.
    """

    held: Held
    is_transposed: bool

    @staticmethod
    def of(held: Held, *, is_transposed: bool = False) -> FrozenMatrix:
        """Make the tensor that stands for ``held``; it shares its memory."""
        view = held.numbers.t() if is_transposed else held.numbers
        made: FrozenMatrix = torch.Tensor._make_subclass(FrozenMatrix, view)
        made.held, made.is_transposed = held, is_transposed
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Carry out a function of torch of which this is an argument."""
        kwargs = kwargs or {}
        if (handler := _HANDLERS.get(func)) is not None and (found := handler(*args, **kwargs)) is not None:
            return found
        name = getattr(func, "__name__", "")
        if name in _READ_ONLY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name.endswith("_") and not name.endswith("__") and isinstance(args[0], FrozenMatrix):
            raise TypeError(f"{name} would change a frozen matrix, which is held small")
        return func(*_wide(args), **{key: _wide_one(value) for key, value in kwargs.items()})

    def wide(self) -> torch.Tensor:
        """Return the matrix in float32, in memory of its own."""
        wide = self.held.wide()
        return wide.t() if self.is_transposed else wide

    def flipped(self) -> FrozenMatrix:
        """Return the matrix with rows and columns exchanged, on the same memory."""
        return FrozenMatrix.of(self.held, is_transposed=not self.is_transposed)

    def part(self, rows: slice, columns: slice = slice(None)) -> FrozenMatrix:
        """Return some rows and columns, on the same memory."""
        held = self.held.part(columns, rows) if self.is_transposed else self.held.part(rows, columns)
        return FrozenMatrix.of(held, is_transposed=self.is_transposed)


def product(x: torch.Tensor, matrix: FrozenMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply ``x @ matrix + bias``; x has any number of leading dimensions."""
    found: torch.Tensor = _Product.apply(x, bias, matrix.held, matrix.is_transposed)  # type: ignore[no-untyped-call]
    return found


def mm_into(
    out: torch.Tensor,
    x: torch.Tensor,
    matrix: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    add: bool = False,
) -> None:
    """Write ``x @ matrix + bias`` into ``out``, or add ``x @ matrix`` to what is there; outside of any graph.

    Args:
        out: (N, O).
        x: (N, I).
        matrix: (I, O), plain or held small.
        bias: (O,), or None; none where it is added.
        add: whether to add.
    """
    if isinstance(matrix, FrozenMatrix):
        found = _multiplied(x, matrix.held, bias, by_rows=matrix.is_transposed)
        (out.add_ if add else out.copy_)(found)
    elif add:
        out.addmm_(x, matrix)
    elif bias is not None:
        torch.addmm(bias, x, matrix, out=out)
    else:
        torch.mm(x, matrix, out=out)


class _Product(torch.autograd.Function):
    """Multiplies with a matrix that gets no gradient; keeps nothing else for the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, held: Held, by_rows: bool) -> torch.Tensor:
        ctx.held, ctx.by_rows = held, by_rows
        found = _multiplied(x.reshape(-1, x.shape[-1]), held, bias, by_rows=by_rows)
        return found.view(*x.shape[:-1], found.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        x_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            found = _multiplied(grad, ctx.held, None, by_rows=not ctx.by_rows)
            x_grad = found.view(*grads[0].shape[:-1], found.shape[-1])
        if ctx.needs_input_grad[1]:
            bias_grad = grad.sum(0)
        return x_grad, bias_grad, None, None


def _multiplied(x: torch.Tensor, held: Held, bias: torch.Tensor | None, *, by_rows: bool) -> torch.Tensor:
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
    return weight.held.rows(ids) if is_plain else None


def _transpose(matrix: Any, *dimensions: int) -> FrozenMatrix | None:
    return matrix.flipped() if sorted(at % 2 for at in dimensions) in ([], [0, 1]) else None


def _detach(matrix: Any) -> FrozenMatrix:
    return FrozenMatrix.of(matrix.held, is_transposed=matrix.is_transposed)


def _getitem(matrix: Any, index: Any) -> FrozenMatrix | None:
    places = index if isinstance(index, tuple) else (index,)
    if len(places) > 2 or not all(isinstance(place, slice) and place.step in (None, 1) for place in places):
        return None
    return matrix.part(*places) if isinstance(matrix, FrozenMatrix) else None


def _to(matrix: Any, *args: Any, **kwargs: Any) -> FrozenMatrix:
    """Move the matrix; it stays small, whatever type its module is converted to."""
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
    **dict.fromkeys((torch.Tensor.detach, torch.Tensor.data.__get__), _detach),  # type: ignore[attr-defined]
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.to: _to,
}
"""What a function does where it is not a mere float32 copy's; None = it is."""


def _wide_one(value: Any) -> Any:
    if isinstance(value, FrozenMatrix):
        return value.wide()
    return type(value)(_wide(value)) if type(value) in (list, tuple) else value


def _wide(values: Sequence[Any]) -> list[Any]:
    return [_wide_one(value) for value in values]
