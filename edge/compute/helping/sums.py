"""Gradients that a helper has added up and not used yet, as a checkpoint keeps them.

With an interval of several steps (``schedule.offload``) a checkpoint may come between; the steps before it count on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from edge.compute.capturing.install import check_like


class Sums:
    """The gradients of some weights, as far as they are there.

    Args:
        parameters: the weights by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the gradients that are there, by name."""
        return {name: value.grad for name, value in self._parameters.items() if value.grad is not None}

    def check(self, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
        """Refuse tensors that are no gradients of these weights.

        Raises:
            IntegrityError: other names, shapes or types.
            DivergedError: numbers that are not finite.
        """
        check_like(tensors, {name: self._parameters.get(name, torch.empty(0)) for name in tensors}, where=where)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all of them."""
        for name, parameter in self._parameters.items():
            parameter.grad = tensors.get(name)
