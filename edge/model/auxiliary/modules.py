"""The auxiliary models as modules, and how one comes to stand beside a matrix.

It is a child of the module that has the matrix, under the adapter's name, and a forward hook of that module adds what
it gives. So the library's modules stay what they are, and plain modules of transformers will do as well::

    query (Linear)           h + alpha * g(x)
      |- weight, bias          h
      `- ringtune (LinearDelta)    g

B batch rows, T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ringtune.models.adapters.auxiliary_config import KEY, LINEAR, QUERY, VALUE, AuxiliaryConfig

FUSED_PARTS = (QUERY, KEY, VALUE)
"""The parts of a matrix that gives query, key and value, in their order."""


class LinearDelta(nn.Linear):
    """``g(x) = x W^T``.

    Args:
        inputs: of the matrix.
        outputs: of the matrix.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, device="meta")
        _hold_nothing(self)

    def start(self, seeded: Callable[[str], torch.Generator]) -> None:
        """Give the weights real memory and their initial values: zeros, whatever the seed."""
        _make_zero(self)


class MlpDelta(nn.Module):
    """``g(x) = relu(x V^T + b) U^T + c``.

    Args:
        inputs: of the matrix.
        outputs: of the matrix.
        hidden: width between V and U.

    Attributes:
        down: V and b.
        up: U and c.
    """

    def __init__(self, inputs: int, outputs: int, hidden: int) -> None:
        super().__init__()
        self.down = nn.Linear(inputs, hidden, device="meta")
        self.up = nn.Linear(hidden, outputs, device="meta")
        _hold_nothing(self)

    def forward(self, x_BTI: torch.Tensor) -> torch.Tensor:
        """Compute g."""
        found: torch.Tensor = self.up(functional.relu(self.down(x_BTI)))
        return found

    def start(self, seeded: Callable[[str], torch.Generator]) -> None:
        """Give the weights real memory and their initial values: V and b as torch draws them, U and c zero.

        Args:
            seeded: makes the generator of a tensor of this module by name.

        Source: ``torch.nn.Linear.reset_parameters``.
        """
        _make_zero(self)
        bound = 1 / math.sqrt(self.down.in_features)
        with torch.no_grad():
            for name, tensor in self.down.named_parameters():
                tensor.uniform_(-bound, bound, generator=seeded(f"down.{name}"))


class FusedDelta(nn.ModuleDict):
    """What stands beside one matrix for query, key and value: a g for some of the three, zero for the others.

    Args:
        parts: ``query``, ``key`` or ``value`` -> its g.
        width: outputs of each.
    """

    def __init__(self, parts: dict[str, nn.Module], width: int) -> None:
        super().__init__(parts)
        self.width = width

    def forward(self, x_BTI: torch.Tensor) -> torch.Tensor:
        """Compute all parts, side by side."""
        zeros = x_BTI.new_zeros(()).expand(*x_BTI.shape[:-1], self.width)
        return torch.cat([self[part](x_BTI) if part in self else zeros for part in FUSED_PARTS], dim=-1)


Delta = LinearDelta | MlpDelta


def make_delta(config: AuxiliaryConfig, inputs: int, outputs: int) -> Delta:
    """Make a g without memory for its weights; ``start`` gives it some."""
    return LinearDelta(inputs, outputs) if config.kind == LINEAR else MlpDelta(inputs, outputs, config.hidden)


def make_fused_delta(configs: Mapping[str, AuxiliaryConfig], inputs: int, outputs: int) -> FusedDelta:
    """Make a g for each of some places of a matrix that gives query, key and value; ``outputs`` is of all three."""
    width = outputs // len(FUSED_PARTS)
    return FusedDelta({place: make_delta(config, inputs, width) for place, config in configs.items()}, width)


def put_beside(matrix: nn.Module, delta: nn.Module, *, name: str, alpha: float) -> None:
    """Let the module of a matrix add ``alpha`` times what ``delta`` gives for its input.

    Args:
        matrix: called with its input as the first argument.
        delta: becomes a child.
        name: of the child.
        alpha: factor.
    """
    matrix.add_module(name, delta)
    matrix.register_forward_hook(_Addition(name, alpha), prepend=True)  # before a bottleneck that is plugged in


def is_addition(hook: object) -> bool:
    """Whether a hook adds the output of an auxiliary model to that of its matrix."""
    return isinstance(hook, _Addition)


def alpha_beside(matrix: nn.Module) -> float:
    """The factor of what ``put_beside`` put beside a matrix."""
    return next(hook.alpha for hook in matrix._forward_hooks.values() if isinstance(hook, _Addition))


def take_away(matrix: nn.Module, *, name: str) -> None:
    """Undo ``put_beside``: the module of the matrix computes what it would without the child, which is dropped."""
    for key, hook in list(matrix._forward_hooks.items()):
        if isinstance(hook, _Addition):
            del matrix._forward_hooks[key]
    del matrix._modules[name]


class _Addition:
    """Adds what the child ``name`` gives; a class, so that a module with it can be copied and pickled."""

    def __init__(self, name: str, alpha: float) -> None:
        self._name, self.alpha = name, alpha

    def __call__(self, matrix: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return torch.add(output, matrix.get_submodule(self._name)(args[0]), alpha=self.alpha)


def _hold_nothing(module: nn.Module) -> None:
    """Put zeros of stride 0, 4 bytes each, in the place of all weights."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[name] = nn.Parameter(torch.zeros(()).expand(parameter.shape))


def _make_zero(module: nn.Module) -> None:
    """Put zeros with memory of their own in the place of all weights, which may be held small or anew."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                owner._parameters[name] = nn.Parameter(zeros, requires_grad=parameter.requires_grad)
