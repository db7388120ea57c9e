"""Run one block for some of its subnets.

With a graph, full subnets are computed in one go, forward-only ones in a second without a graph, on the input cut off
from it; what is skipped is not computed. Both results are summed, with the output bias once, and go through the
library's own bottlenecks and norms::

    pattern 1132      x ---------> heads 0, 1 ---\
                      x.detach() -> head 3 --------+--> + bias --> bottleneck, residual, norm --> ...

Without a graph, full and forward-only subnets are the same.

B batch rows, T tokens, D model width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from edge.model.head_groups.attention import ATTEND
from edge.model.head_groups.linear import Ranges, active_inputs, active_outputs
from edge.model.head_groups.weights import Matrix, matrices
from edge.model.layouts import LAYOUTS
from ringtune.schedule.operations.codes import FORWARD_ONLY, SHORTCUT
from ringtune.schedule.operations.subnets import Subnets

Active = tuple[int, ...]
"""Subnets that are computed, in order."""
_ATTENTION: Final = ("query", "key", "value")


class PartialBlock:
    """Runs one block by its subnets; weights are read anew each time, as an update may put others in their place.

    Args:
        block: real, with adapters.
        model_type: its family.
        subnets: how it is divided.
        adapter: name of the adapter.
    """

    def __init__(self, block: nn.Module, model_type: str, subnets: Subnets, *, adapter: str) -> None:
        self._layout, self._attend = LAYOUTS[model_type], ATTEND[model_type]
        self._subnets, self._adapter = subnets, adapter
        self._matrices = matrices(block, model_type, subnets)
        self._modules: dict[str, Any] = {
            name: block.get_submodule(path)
            for name in self._layout.__dataclass_fields__
            if isinstance(path := getattr(self._layout, name), str) and path
        }

    def run(self, hidden_BTD: torch.Tensor, context: Any, pattern: str) -> torch.Tensor:
        """Run the block; whether a graph is kept is torch's grad mode.

        Args:
            hidden_BTD: enters the block.
            context: what the family's blocks need besides.
            pattern: a code for each subnet, not all of them shortcuts; with a graph, at least one is full.
        """
        free = _with_code(pattern, FORWARD_ONLY) if torch.is_grad_enabled() else ()
        full = tuple(at for at in range(len(pattern)) if at not in free and pattern[at] != SHORTCUT)

        def attend(x_BTD: torch.Tensor, active: Active, with_bias: bool) -> torch.Tensor:
            return self._attention(x_BTD, active, with_bias, context)

        between = self._sublayer("attention", hidden_BTD, attend, full, free)
        return self._sublayer("feed_forward", between, self._feed_forward, full, free)

    def _sublayer(
        self,
        name: str,
        hidden_BTD: torch.Tensor,
        compute: Callable[[torch.Tensor, Active, bool], torch.Tensor],
        full: Active,
        free: Active,
    ) -> torch.Tensor:
        """Sum what full and forward-only subnets compute, and let bottleneck and norm finish it."""
        norm, bottleneck = self._modules[f"{name}_norm"], self._modules[f"{name}_adapter"]
        x_BTD = norm(hidden_BTD) if self._layout.norm_first else hidden_BTD
        total = compute(x_BTD, full, True)
        if free:
            with torch.no_grad():
                rest = compute(x_BTD.detach(), free, False)
            total = total + rest
        after = None if self._layout.norm_first else norm
        found: torch.Tensor = bottleneck.bottleneck_layer_forward(total, hidden_BTD, after)
        if last := self._modules.get(f"{name}_last_norm"):
            found = last(found)
        return hidden_BTD + found if self._layout.adds_residual else found

    def _attention(self, x_BTD: torch.Tensor, active: Active, with_bias: bool, context: Any) -> torch.Tensor:
        q, k, v = self._merged(x_BTD, active) if self._layout.is_merged else self._separate(x_BTD, active)
        found = self._attend(self._modules["attention"], q, k, v, context)
        return self._inputs("attention_out", found.flatten(2), active, with_bias)

    def _separate(self, x_BTD: torch.Tensor, active: Active) -> list[torch.Tensor]:
        """Compute the active heads of queries, keys and values: (B, H, T, width of a head) each."""
        found = [self._heads(name, self._outputs(name, x_BTD, active)) for name in _ATTENTION]
        norms = [self._modules.get(f"{name}_norm") for name in _ATTENTION]
        return [x if norm is None else norm(x) for norm, x in zip(norms, found, strict=True)]

    def _merged(self, x_BTD: torch.Tensor, active: Active) -> list[torch.Tensor]:
        """Do the same where one matrix gives all three: one product, and LoRA has a part for each that it wraps."""
        module = self._modules["query"]
        ranges = [_ranges(self._matrices[name], self._subnets, active) for name in _ATTENTION]
        found = active_outputs(x_BTD, self._weight(module), module.bias, sum(ranges, ()))
        parts = list(found.chunk(3, -1))
        if (lora := self._lora(module)) is not None:
            wrapped = [at for at, enabled in enumerate(lora.enable_lora) if enabled]
            inners = torch.nn.functional.linear(x_BTD, lora.lora_A).chunk(len(wrapped), -1)
            for before, (at, inner) in enumerate(zip(wrapped, inners, strict=True)):
                rows = self._matrices[_ATTENTION[at]]._replace(offset=before * (module.out_features // 3))
                change = active_outputs(inner, lora.lora_B, None, _ranges(rows, self._subnets, active))
                parts[at] = torch.add(parts[at], change, alpha=lora.scaling)
            # so that no view keeps what was there before LoRA's change
            parts = [part if at in wrapped else part.contiguous() for at, part in enumerate(parts)]
        return [self._heads(name, part) for name, part in zip(_ATTENTION, parts, strict=True)]

    def _heads(self, name: str, outputs_BTa: torch.Tensor) -> torch.Tensor:
        return outputs_BTa.view(*outputs_BTa.shape[:-1], -1, self._matrices[name].width).transpose(1, 2)

    def _feed_forward(self, x_BTD: torch.Tensor, active: Active, with_bias: bool) -> torch.Tensor:
        activation, up = self._modules["activation"], self._outputs("up", x_BTD, active)
        inner = activation(self._outputs("gate", x_BTD, active)) * up if self._layout.gate else activation(up)
        return self._inputs("down", inner, active, with_bias)

    # ---- matrices, with LoRA where there is one ---------------------------------------------------

    def _outputs(self, name: str, x_BTD: torch.Tensor, active: Active) -> torch.Tensor:
        module, matrix = self._modules[name], self._matrices[name]
        found = active_outputs(x_BTD, self._weight(module), module.bias, _ranges(matrix, self._subnets, active))
        lora = self._lora(module)
        if lora is None:
            return found
        inner = torch.nn.functional.linear(x_BTD, lora.lora_A)
        change = active_outputs(inner, lora.lora_B, None, _ranges(matrix, self._subnets, active))
        return torch.add(found, change, alpha=lora.scaling)

    def _inputs(self, name: str, x_BTa: torch.Tensor, active: Active, with_bias: bool) -> torch.Tensor:
        module, ranges = self._modules[name], _ranges(self._matrices[name], self._subnets, active)
        found = active_inputs(x_BTa, self._weight(module), module.bias if with_bias else None, ranges)
        lora = self._lora(module)
        if lora is None:
            return found
        inner = active_inputs(x_BTa, lora.lora_A, None, ranges)
        return torch.add(found, torch.nn.functional.linear(inner, lora.lora_B), alpha=lora.scaling)

    def _weight(self, module: Any) -> torch.Tensor:
        """The matrix with a row for each output."""
        weight: torch.Tensor = module.weight
        return weight.t() if self._layout.inputs_first else weight

    def _lora(self, module: Any) -> Any:
        return dict(getattr(module, "loras", {})).get(self._adapter)


def _with_code(pattern: str, code: str) -> Active:
    return tuple(at for at, found in enumerate(pattern) if found == code)


@functools.lru_cache(maxsize=1024)
def _ranges(matrix: Matrix, subnets: Subnets, active: Active) -> Ranges:
    """The outputs, or inputs, of the active subnets; those of neighbours are one range."""
    found: list[tuple[int, int]] = []
    for subnet in active:
        start, stop = matrix.unit_range(subnets, subnet)
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return tuple(found)
