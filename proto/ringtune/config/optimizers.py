"""The state of each optimizer of ``train.optimizer``: names and shapes for each parameter, bytes, and work bytes.

============ ==================================================== =============================================
adamw        ``exp_avg``, ``exp_avg_sq``, ``step``                two moments
momentum     ``momentum_buffer``                                  one moment
adagrad      ``sum``, ``step``                                    one moment
adafactor    ``row_var``, ``col_var``, ``step``                   a number for each row and for each column
sgd          nothing
============ ==================================================== =============================================

Of a parameter with fewer than two dimensions Adafactor keeps a ``variance`` of its shape instead. The shapes of a
model's own tensors and of a head are known; for an adapter, which has narrow matrices, the bytes of Adafactor are taken
as those of its weights, which is never too little.

Source: torch 2.13, ``torch/optim``; Adafactor: arXiv 1804.04235.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

OPTIMIZERS: Final = ("adamw", "sgd", "momentum", "adagrad", "adafactor")
MOMENTUM: Final = 0.9
"""The momentum where a job has none."""

STEP: Final = "step"
"""The key of a parameter's own count of updates, a number without dimensions."""

_LIKE_THE_PARAMETER: Final = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adagrad": ("sum",),
}
_COUNTS: Final = ("adamw", "adagrad", "adafactor")

Shape = tuple[int, ...]


def state_shapes(optimizer: str, shape: Shape) -> dict[str, Shape]:
    """The shape of each tensor that an optimizer keeps of an updated parameter, by its key.

    Example: Adafactor keeps of a matrix of 30 rows and 7 columns ``row_var`` of (30, 1) and ``col_var`` of (1, 7).

    Args:
        optimizer: one of ``OPTIMIZERS``.
        shape: of the parameter.
    """
    if optimizer != "adafactor":
        found = dict.fromkeys(_LIKE_THE_PARAMETER[optimizer], shape)
    elif len(shape) > 1:
        found = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
    else:
        found = {"variance": shape}
    return {**found, STEP: ()} if optimizer in _COUNTS else found


def state_numbers(optimizer: str, shape: Shape) -> int:
    """How many numbers an optimizer keeps of a parameter, without its step count."""
    return sum(math.prod(kept) for key, kept in state_shapes(optimizer, shape).items() if key != STEP)


STATE_GIVEN_BACK_BYTES: Final = 64 << 20
"""From how much mapped state on a node gives freed memory back before an update; that costs page faults.

For less it does not, so that what the graphs of the step took is still resident.
"""

TABLE_GIVEN_BACK_BYTES: Final = 32 << 20
"""The same of a table with a gradient that becomes whole: a smaller one has room where the graphs were."""

_MOMENTS: Final = {"adamw": 2, "sgd": 0, "momentum": 1, "adagrad": 1}


def state_bytes(optimizer: str, weight_bytes: int, factor_bytes: int = 0) -> int:
    """Bytes of the state of something with so many bytes of weights, without step counts.

    Example: AdamW keeps 200 bytes of a matrix of 100, Adafactor the 20 of its rows and columns.

    Args:
        optimizer: of the job.
        weight_bytes: of what trains.
        factor_bytes: of its rows and columns, see ``factor_numbers``; 0 = not known.
    """
    if optimizer == "adafactor":
        return factor_bytes or weight_bytes
    return _MOMENTS[optimizer] * weight_bytes


def factor_numbers(shapes: Iterable[Shape]) -> int:
    """How many numbers Adafactor keeps of parameters of these shapes."""
    return sum(state_numbers("adafactor", shape) for shape in shapes)


def update_work_bytes(largest_bytes: int, optimizer: str) -> int:
    """Bytes that an optimizer's step holds besides gradients and state: one copy of the largest tensor for Adafactor.

    That is the product of rows and columns. The others go over their tensors once and hold nothing.

    Args:
        largest_bytes: of the largest tensor.
        optimizer: of the job.

    Source: torch 2.13, ``_single_tensor_adafactor`` in ``torch/optim``, and the kernels ``fused``.
    """
    return largest_bytes if optimizer == "adafactor" else 0
