"""LoRA, DoRA, MTL-LoRA and (IA)3 beside a matrix of a block.

A module here is ``loras.NAME`` inside the module of its matrix, of which a forward hook changes the output y. Modules
compute, name and draw their weights as AdapterHub's::

    LoRA        y + s * B A drop(x)                      s = alpha / r, or a gate
    DoRA        m / |W + B A| * (y + s * B A drop(x))    norm of each row
    MTL-LoRA    y + s * sum_i w_i B_i T A drop(x)
    (IA)3       y * alpha * b

A fused matrix for query, key and value has separate factors for some of the three, side by side.

B batch rows, T tokens, I inputs, O outputs, r rank.

Source: adapters 1.3.0, ``methods.lora``.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from edge.model.adapters.bottleneck import seed_weights


class MatrixAdapter(nn.Module, ABC):
    """An adapter beside one matrix.

    Args:
        options: all of ``edge.model.adapters.options_of``.
        enabled: of a fused matrix, which of query, key and value have one; empty for another matrix.

    Attributes:
        scaling: alpha / r; of (IA)3 alpha.
        lora_ind: a bool for each output of a fused matrix, true where it changes; empty for another matrix.
    """

    def __init__(self, outputs: int, options: Mapping[str, Any], enabled: tuple[bool, ...]) -> None:
        super().__init__()
        self.r, self.use_gating, self.use_dora = int(options["r"]), options["use_gating"], options["use_dora"]
        self.enable_lora = list(enabled)
        self.lora_ind = torch.tensor(enabled, dtype=torch.bool).repeat_interleave(outputs // 3)
        self._count, self._outputs = sum(enabled) or 1, outputs

    def _add_gate(self, inputs: int) -> None:
        if self.use_gating:
            self.gate = nn.Linear(inputs, self._count)
            nn.init.normal_(self.gate.weight, std=0.02)

    def _gate(self, x_BTI: torch.Tensor) -> torch.Tensor:
        """Compute the gate, (B, number of parts): a mean over tokens."""
        return torch.mean(torch.sigmoid(self.gate(x_BTI)), dim=1)

    def _fused_factor(self, x_BTI: torch.Tensor, default: float) -> Any:
        """Return the factor of each output of a fused matrix: that of its part's gate, 1 without an adapter."""
        if not self.use_gating:
            return default
        return self._padded(self._gate(x_BTI).repeat_interleave(self._outputs // 3, dim=-1), 1.0).unsqueeze(1)

    def _padded(self, values: torch.Tensor, other: float) -> torch.Tensor:
        """Put values of the enabled parts at their outputs, and ``other`` at all others."""
        padded = values.new_full((*values.shape[:-1], self._outputs), other)
        padded[..., self.lora_ind.to(values.device)] = values
        return padded

    @abstractmethod
    def changed(self, matrix: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """Change the output of the matrix; a forward hook."""


class LoRA(MatrixAdapter):
    """LoRA, and DoRA with ``use_dora``. ``weight``: the matrix, for the magnitudes of DoRA."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        options: Mapping[str, Any],
        enabled: tuple[bool, ...] = (),
        weight: torch.Tensor | None = None,
    ) -> None:
        super().__init__(outputs, options, enabled)
        rows = outputs // 3 * self._count if enabled else outputs
        self.lora_dropout = nn.Dropout(p=options["dropout"]) if options["dropout"] > 0 else nn.Identity()
        self.scaling: float = options["alpha"] / self.r
        self.lora_A = nn.Parameter(torch.zeros(self.r * self._count, inputs))
        self.lora_B = nn.Parameter(torch.zeros(rows, self.r))
        seed_weights(options["init_weights_seed"])
        _STARTS[options["init_weights"]](self.lora_A)
        _start_second(self.lora_B, options["init_weights"])
        if self.use_dora and weight is not None:
            self.m = nn.Linear(1, rows, bias=False)
            with torch.no_grad():
                self.m.weight.copy_(torch.linalg.norm(weight, dim=1).unsqueeze(1))
        self._add_gate(inputs)

    def forward(self, x_BTI: torch.Tensor) -> torch.Tensor:
        """Compute the change of a matrix's output, with its factor; for DoRA that before the norm."""
        if self.enable_lora:
            return torch.mul(self._padded(self._fused(x_BTI), 0.0), self._fused_factor(x_BTI, self.scaling))
        found_BTO = self._up(self.lora_dropout(x_BTI) @ torch.t(self.lora_A))
        return found_BTO * (self._gate(x_BTI).unsqueeze(-1) if self.use_gating else self.scaling)

    def _up(self, low_BTr: torch.Tensor) -> torch.Tensor:
        return low_BTr @ torch.t(self.lora_B)

    def _fused(self, x_BTI: torch.Tensor) -> torch.Tensor:
        low_BTr = functional.linear(self.lora_dropout(x_BTI), self.lora_A)
        ups = self.lora_B.unsqueeze(-1)
        return functional.conv1d(low_BTr.transpose(-2, -1), ups, groups=self._count).transpose(-2, -1)

    def changed(self, matrix: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """See ``MatrixAdapter.changed``."""
        output = output + self(args[0])
        if not self.use_dora:
            return output
        norm_O = torch.linalg.norm(matrix.get_parameter("weight") + self.lora_B @ self.lora_A, dim=1)
        return torch.mul(self.m.weight.view(-1) / norm_O, output)

    @torch.no_grad()
    def change_of_matrix(self) -> torch.Tensor:
        """Compute what LoRA adds to its matrix, (O, I), without factor."""
        if not self.enable_lora:
            return self.lora_B @ self.lora_A
        ups = self.lora_B.unsqueeze(-1)
        found_OI = functional.conv1d(self.lora_A.unsqueeze(0), ups, groups=self._count).squeeze(0)
        return self._padded(found_OI.t(), 0.0).t()


class MtlLoRA(LoRA):
    """MTL-LoRA: several second factors with weights, and a matrix T of rank r between the factors."""

    def __init__(self, inputs: int, outputs: int, options: Mapping[str, Any]) -> None:
        super().__init__(inputs, outputs, options)
        copies, rank = int(options["n_up_projection"]), self.r
        self.lora_B = nn.Parameter(torch.zeros(copies, outputs, rank))
        if options["init_weights"] == "bert":
            nn.init.normal_(self.lora_B, std=0.02)
        self.task_specific = _TaskMatrix(rank, is_diagonal=options["task_specific_matrix_type"] == "singular_values")
        self.weights = nn.Parameter(torch.ones(copies))
        self._sharpness = options["weights_sharpness"]

    def _up(self, low_BTr: torch.Tensor) -> torch.Tensor:
        ups = torch.transpose(self.lora_B.unsqueeze(1), -1, -2)
        weights = (self.weights / self._sharpness).exp()[:, None, None, None]
        each = low_BTr @ self.task_specific() @ ups
        return torch.sum((weights * each) / weights.sum(), 0)


class _TaskMatrix(nn.Module):
    """The matrix T of MTL-LoRA, diagonal or whole."""

    def __init__(self, rank: int, *, is_diagonal: bool) -> None:
        super().__init__()
        self._is_diagonal = is_diagonal
        self.values = nn.Parameter(torch.ones(rank) if is_diagonal else torch.ones(rank, rank))

    def forward(self) -> torch.Tensor:
        """Return T, (r, r)."""
        return torch.diag(self.values) if self._is_diagonal else self.values


class IA3(MatrixAdapter):
    """(IA)3: a factor for each output."""

    def __init__(self, inputs: int, outputs: int, options: Mapping[str, Any], enabled: tuple[bool, ...] = ()) -> None:
        super().__init__(outputs, options, enabled)
        self.scaling: float = options["alpha"]
        self.lora_B = nn.Parameter(torch.zeros(outputs // 3 * self._count if enabled else outputs, 1))
        seed_weights(options["init_weights_seed"])
        _start_second(self.lora_B, options["init_weights"])
        self._add_gate(inputs)

    def forward(self, x_BTI: torch.Tensor) -> torch.Tensor:
        """Compute the factor of each output of a matrix."""
        factors = self.lora_B.view(1, 1, -1)
        if self.enable_lora:
            return torch.mul(self._padded(factors, 1.0), self._fused_factor(x_BTI, self.scaling))
        factors = factors.repeat(x_BTI.shape[0], 1, 1)
        return factors * (self._gate(x_BTI).unsqueeze(-1) if self.use_gating else self.scaling)

    def changed(self, matrix: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """See ``MatrixAdapter.changed``."""
        return torch.mul(output, self(args[0]))


_STARTS: Final[Mapping[str, Callable[[torch.Tensor], object]]] = {
    "lora": functools.partial(nn.init.kaiming_uniform_, a=math.sqrt(5)),
    "vera": nn.init.kaiming_uniform_,
    "bert": functools.partial(nn.init.normal_, std=0.02),
    "ia3": nn.init.ones_,
}
"""``init_weights`` -> initial values of the first factor, and of the second one; the second one of LoRA is 0."""


def _start_second(factor: torch.Tensor, kind: str) -> None:
    (nn.init.zeros_ if kind == "lora" else _STARTS[kind])(factor)


def attach(matrix: nn.Module, adapter: MatrixAdapter, *, name: str) -> None:
    """Put an adapter beside a matrix, under ``loras.NAME``, before all other hooks on its output."""
    matrix.add_module("loras", nn.ModuleDict({name: adapter}))
    matrix.register_forward_hook(adapter.changed, prepend=True)


def beside(matrix: Any, name: str) -> Any:
    """Return the adapter of this name beside a matrix; None without one."""
    return dict(getattr(matrix, "loras", {})).get(name)


def detach(matrix: Any, *, name: str) -> None:
    """Undo ``attach``: remove hook and module."""
    adapter = matrix.loras[name]
    for key, hook in list(matrix._forward_hooks.items()):
        if getattr(hook, "__self__", None) is adapter:
            del matrix._forward_hooks[key]
    del matrix._modules["loras"]


@torch.no_grad()
def merge(blocks: nn.Module, *, name: str, inputs_first: bool) -> None:
    """Add every LoRA in some blocks to its matrix, and remove it."""
    for matrix in list(blocks.modules()):
        if isinstance(lora := beside(matrix, name), LoRA):
            change = lora.change_of_matrix()
            weight = matrix.get_parameter("weight")
            weight.data = weight.data + (change.t() if inputs_first else change) * lora.scaling
            detach(matrix, name=name)
