"""Whether what is trained, and what it is trained with, are finite numbers: looked at before every update.

A sum of finite numbers may overflow, but one with NaN or infinity in it is never finite. So one sum a tensor tells it
nearly always, and each number is looked at only where a sum is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ringtune.engine.diverged import LOWER_THE_RATE
from ringtune.errors import DivergedError


def require_finite_grads(parameters: Mapping[str, torch.nn.Parameter], unit: str) -> None:
    """Refuse gradients of a unit that are not finite; nothing was updated then.

    Args:
        parameters: of the unit, by name; those without a gradient are left alone.
        unit: names it, as ``block 2``.

    Raises:
        DivergedError: names the first gradient that is not finite.
    """
    grads = {name: _values(value.grad) for name, value in parameters.items() if value.grad is not None}
    name = first_not_finite(grads)
    if name:
        raise DivergedError(f"the gradient of {unit} is not finite, first that of {name}")


def require_finite_values(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Refuse weights that the last update left without finite numbers, before anyone keeps them.

    Args:
        tensors: by name.
        where: names what they are of.

    Raises:
        DivergedError: names the first one that is not finite.
    """
    name = first_not_finite(tensors)
    if name:
        raise DivergedError(f"the training diverged: {where} has {name}, which is not finite; {LOWER_THE_RATE}")


def first_not_finite(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the name of the first tensor with a number that is NaN or infinite; empty if there is none."""
    if not tensors:
        return ""
    sums = torch.stack([tensor.sum().to(torch.float64) for tensor in tensors.values()])
    if math.isfinite(sums.sum().item()):
        return ""
    return next((name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), "")


def _values(grad: torch.Tensor) -> torch.Tensor:
    return grad._values() if grad.is_sparse else grad
