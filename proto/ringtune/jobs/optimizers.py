"""What each optimizer of ``train.optimizer`` keeps of a parameter: the names and shapes of its state.

Whoever needs to know asks here: the memory estimate, the check of a shard, the files of state that rests on a disk.

============ ==================================================== =============================================
adamw        ``exp_avg``, ``exp_avg_sq``, ``step``                two moments
momentum     ``momentum_buffer``                                  one moment
adagrad      ``sum``, ``step``                                    one moment
adafactor    ``row_var``, ``col_var``, ``step``                   a number for each row and for each column
sgd          nothing
============ ==================================================== =============================================

Of a parameter with fewer than two dimensions Adafactor keeps a ``variance`` of its shape instead.

Source: torch 2.13, ``torch/optim``; Adafactor: arXiv 1804.04235.
"""

from __future__ import annotations

import math
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
