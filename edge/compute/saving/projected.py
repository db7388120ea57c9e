"""A linear layer that keeps projections of its input for the gradient of its weight, and the input itself no more.

A token of D values is P sub-tokens of M values; ``z`` is what each of them gives on the unit vector ``v``. In backward
the reconstruction of a sub-token is ``z v``, so the gradient of a weight row with output gradient g is::

    sum over tokens  g * (z_1 v, z_2 v, ..., z_P v)  =  (g z_1, g z_2, ..., g z_P) times v

The sums over tokens on the right are P products for each output, not D, and the reconstruction is never made. The
gradients of the input and of the bias need no input, and are exact.

Source: VeLoRA, section 3.1 (equations 1 and 2), Algorithm 1.

N tokens, D inputs, O outputs, P sub-tokens of a token, M values of a sub-token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Multiplies an input by a matrix with a row for each output, and adds a bias if there is one."""


def subtokens(x: torch.Tensor, size: int) -> torch.Tensor:
    """Cut the last dimension into sub-tokens (N * P, M) of ``size`` values, with zeros behind the last value."""
    missing = -x.shape[-1] % size
    return (functional.pad(x, (0, missing)) if missing else x).reshape(-1, size)


def project(x: torch.Tensor, vector_M: torch.Tensor) -> torch.Tensor:
    """Return what each sub-token of each token gives on a vector: (N, P)."""
    count = -(-x.shape[-1] // len(vector_M))
    return torch.mv(subtokens(x, len(vector_M)), vector_M).view(-1, count)


def projected_linear(
    linear: Linear,
    x: torch.Tensor,
    weight_OD: torch.Tensor,
    bias_O: torch.Tensor | None,
    z_NP: torch.Tensor,
    vector_M: torch.Tensor,
) -> torch.Tensor:
    """Compute a linear layer whose backward has projections of the input instead of the input.

    Args:
        linear: computes it, so that its value has the bits that it would have anyway.
        x: input with any number of leading dimensions.
        weight_OD: has a gradient; may be a view of the parameter.
        bias_O: None without one.
        z_NP: from ``project``.
        vector_M: that it was projected on; never written to.
    """
    found: torch.Tensor = _Projected.apply(x, weight_OD, bias_O, z_NP, vector_M, linear)  # type: ignore[no-untyped-call]
    return found


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        z: torch.Tensor,
        vector: torch.Tensor,
        linear: Linear,
    ) -> Any:
        ctx.save_for_backward(weight, z, vector)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        weight, z, vector = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        x_grad = weight_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = (grad @ weight).view(*grads[0].shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            sums_OP = grad.t() @ z
            rebuilt = (sums_OP[:, :, None] * vector).flatten(1)
            weight_grad = rebuilt[:, : weight.shape[1]]
        if ctx.needs_input_grad[2]:
            bias_grad = grad.sum(0)
        return x_grad, weight_grad, bias_grad, None, None, None
