"""How many bytes an optimizer keeps of what trains, and how many an update takes besides for a moment.

Adafactor keeps rows and columns, so that the shapes count. They are known of a model's own tensors and of a head; of an
adapter, whose matrices are narrow, Adafactor is taken to keep as much as it has weights, which is never too little.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ringtune.jobs.optimizers import Shape, state_numbers

_MOMENTS: Final = {"adamw": 2, "sgd": 0, "momentum": 1, "adagrad": 1}
_WORK_COPIES: Final = {"adamw": 2, "sgd": 1, "momentum": 1, "adagrad": 2, "adafactor": 1}


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
    """Bytes that an optimizer's step holds besides gradients and state: copies of the largest tensor that it updates.

    AdamW has two (the root of the second moment, and that over its correction), Adagrad too (the gradient with the
    decay, and a root), SGD and momentum one (the gradient with the decay), Adafactor one (rows times columns).

    Args:
        largest_bytes: of the largest tensor.
        optimizer: of the job.

    Source: torch 2.13, ``torch/optim``, the paths for one tensor at a time.
    """
    return _WORK_COPIES[optimizer] * largest_bytes
