"""State that each optimizer of ``train.optimizer`` keeps for a parameter: names, shapes and bytes.

============ ==================================================== =============================================
adamw        ``exp_avg``, ``exp_avg_sq``, ``step``                two tensors of the parameter's shape
momentum     ``momentum_buffer``                                  one
adagrad      ``sum``, ``step``                                    one
adafactor    ``row_var``, ``col_var``, ``step``                   a number for each row and for each column
sgd          nothing
============ ==================================================== =============================================

For a parameter with fewer than two dimensions Adafactor keeps a ``variance`` of its shape instead. For an adapter the
estimate takes the bytes of its weights as the bytes of Adafactor's state, which is an upper bound.

Source: torch 2.13, ``torch/optim``; Adafactor: arXiv 1804.04235.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

OPTIMIZERS: Final = ("adamw", "sgd", "momentum", "adagrad", "adafactor")
MOMENTUM: Final = 0.9
"""``train.momentum`` where the job does not set it."""

STEP: Final = "step"
"""Key of a parameter's count of updates, a scalar tensor."""

_LIKE_THE_PARAMETER: Final = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adagrad": ("sum",),
}
SIGNED_STATE: Final = frozenset({"exp_avg", "momentum_buffer"})
"""Keys of state whose numbers may be below 0: all others are counts, or sums and means of squares."""
_COUNTS: Final = ("adamw", "adagrad", "adafactor")

Shape = tuple[int, ...]


def state_shapes(optimizer: str, shape: Shape) -> dict[str, Shape]:
    """Shapes of the tensors that an optimizer keeps for one updated parameter, by key.

    Example: for a matrix of 30 rows and 7 columns Adafactor keeps ``row_var`` (30, 1), ``col_var`` (1, 7) and ``step``
    ().
    """
    if optimizer != "adafactor":
        shapes = dict.fromkeys(_LIKE_THE_PARAMETER[optimizer], shape)
    elif len(shape) > 1:
        shapes = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
    else:
        shapes = {"variance": shape}
    return {**shapes, STEP: ()} if optimizer in _COUNTS else shapes


STATE_GIVEN_BACK_BYTES: Final = 64 << 20
"""Bytes of state on disk from which a node returns freed memory to the system before an update.

Below it the memory of the step's graphs stays resident, which saves page faults.
"""

TABLE_GIVEN_BACK_BYTES: Final = 32 << 20
"""The same for an embedding table with a sparse gradient that becomes dense; a smaller one fits in freed graphs."""


def state_bytes(optimizer: str, weight_bytes: int, factor_bytes: int = 0) -> int:
    """Bytes of optimizer state, without step counts.

    Example: for a matrix of 100 bytes AdamW keeps 200 bytes, Adafactor only its rows and columns, say 20.

    Args:
        optimizer: one of ``OPTIMIZERS``.
        weight_bytes: of the trained weights.
        factor_bytes: of Adafactor's rows and columns, see ``factor_numbers``; 0 = unknown, then ``weight_bytes``.
    """
    if optimizer == "adafactor":
        return factor_bytes or weight_bytes
    return len(_LIKE_THE_PARAMETER[optimizer]) * weight_bytes


def factor_numbers(shapes: Iterable[Shape]) -> int:
    """Count the numbers that Adafactor keeps for parameters of these shapes."""
    return sum(
        sum(math.prod(kept) for key, kept in state_shapes("adafactor", shape).items() if key != STEP)
        for shape in shapes
    )


def update_work_bytes(largest_bytes: int, optimizer: str) -> int:
    """Bytes that an optimizer's step allocates besides gradients and state; ``largest_bytes`` is the size of a tensor.

    Adafactor builds the product of rows and columns, one copy of the largest tensor. The others update in place.

    Source: torch 2.13, ``_single_tensor_adafactor`` in ``torch/optim``, and the kernels ``fused``.
    """
    return largest_bytes if optimizer == "adafactor" else 0
