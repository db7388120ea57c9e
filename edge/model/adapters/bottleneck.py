"""Bottleneck adapters, sequential and parallel, and the invertible adapter at the embedding.

Modules compute, name and draw their weights as AdapterHub's. A *seat* is the place of a bottleneck: after the attention
or the feed-forward part of a block. Hooks on modules of the block keep the residual and change the output of the part::

    norm before (GPT-2, Llama, ViT)       norm after (BERT, DistilBERT)
    x -> norm -> part -> h                x -> part -> h
    x + h'                                norm(x + h')

with h' in place of h. So the block itself adds the residual. With ``original_ln_after = False`` h' is the result, and
the block's sum and norm are passed over.

B batch rows, T tokens, D model width.

Source: adapters 1.3.0, ``Adapter``, ``ParallelAdapter``, ``BottleneckLayer`` and ``NICECouplingBlock``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Activation(nn.Module):
    """An activation function of transformers by its name; None = none."""

    def __init__(self, name: str | None) -> None:
        super().__init__()
        from transformers.activations import get_activation

        if name is None:
            self.f: Any = nn.Identity()
        else:
            self.f = functional.leaky_relu if name.lower() == "leakyrelu" else get_activation(name.lower())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the function."""
        y: torch.Tensor = self.f(x)
        return y


def seed_weights(seed: int | None) -> None:
    """Seed torch's generators for the initial values of one module, if ``init_weights_seed`` is set and not 0."""
    if seed:
        torch.manual_seed(seed)


class Bottleneck(nn.Module):
    """Two projections with an activation between them.

    Args:
        inner: width between the projections.
        options: all of ``edge.model.adapters.options_of``.

    Attributes:
        is_parallel: whether it reads the residual in place of the output of the part.
    """

    def __init__(self, width: int, inner: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.input_size, self.is_parallel = width, bool(options["is_parallel"])
        self.use_gating = bool(options["use_gating"])
        self._options = {name: options[name] for name in _READ}
        layers: list[nn.Module] = []
        if options["ln_before"]:
            self.adapter_norm_before = nn.LayerNorm(width)
            layers.append(self.adapter_norm_before)
        layers.append(nn.Linear(width, inner))
        self.non_linearity = Activation(options["non_linearity"])
        self.adapter_down = nn.Sequential(*layers, self.non_linearity)
        self.adapter_up = nn.Linear(inner, width)
        self.scaling: Any = options["scaling"]
        if self.scaling in ("learned", "channel"):
            self.scaling = nn.Parameter(torch.ones(1 if self.scaling == "learned" else width))
        if options["ln_after"]:
            self.adapter_norm_after = nn.LayerNorm(width)
        if self.use_gating:
            self.gate = nn.Linear(width, 1)
        self.dropout = nn.Dropout(p=options["dropout"])
        seed_weights(options["init_weights_seed"])
        self._start(options["init_weights"])

    def _start(self, kind: str) -> None:
        if kind == "bert":
            self.adapter_down.apply(start_as_bert)
            self.adapter_up.apply(start_as_bert)
        else:
            down = next(layer for layer in self.adapter_down if isinstance(layer, nn.Linear))
            for layer in (down, self.adapter_up):
                if kind != "mam_adapter":
                    nn.init.trunc_normal_(layer.weight, mean=0, std=1e-2, a=-2e-2, b=2e-2)
                elif layer is down:
                    nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5))
                else:
                    nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)
        if self.use_gating and kind != "houlsby":
            self.gate.apply(start_as_bert)

    def forward(self, x_BTD: torch.Tensor, residual_BTD: torch.Tensor | float = 0.0) -> torch.Tensor:
        """Compute the bottleneck of x, and if it is not parallel add the residual, before or after its own norm."""
        out_BTD = self.dropout(self.adapter_up(self.adapter_down(x_BTD)) * self.scaling)
        if self.use_gating:
            out_BTD = out_BTD * torch.mean(torch.sigmoid(self.gate(x_BTD)), dim=1).unsqueeze(-1)
        adds_first = self._options["adapter_residual_before_ln"]
        if not self.is_parallel and adds_first:
            out_BTD = out_BTD + residual_BTD
        if hasattr(self, "adapter_norm_after"):
            out_BTD = self.adapter_norm_after(out_BTD)
        if not self.is_parallel and not adds_first:
            out_BTD = out_BTD + residual_BTD
        result: torch.Tensor = out_BTD
        return result

    def change(self, hidden_BTD: torch.Tensor, residual_BTD: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        """Compute h' from the output h of a part and its residual; ``norm`` is the block's norm after the sum."""
        if self.is_parallel:
            return torch.add(self(residual_BTD), hidden_BTD)
        x_BTD = around_BTD = hidden_BTD
        before_norm = self._options["residual_before_ln"]
        if self._options["original_ln_before"]:
            x_BTD = x_BTD + residual_BTD
            if before_norm == "post_add":
                around_BTD = x_BTD
            x_BTD = x_BTD if norm is None else norm(x_BTD)
        changed_BTD: torch.Tensor = self(x_BTD, around_BTD if before_norm else x_BTD)
        return changed_BTD

    def result(self, hidden_BTD: torch.Tensor, residual_BTD: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        """Compute h' with the block's sum and norm, as far as ``original_ln_after`` says."""
        changed_BTD = self.change(hidden_BTD, residual_BTD, norm)
        return joined(changed_BTD, residual_BTD, norm) if self.ends_with_sum else changed_BTD

    @property
    def ends_with_sum(self) -> bool:
        """Whether the block adds the residual to h'."""
        return bool(self._options["original_ln_after"])


_READ = ("adapter_residual_before_ln", "original_ln_after", "original_ln_before", "residual_before_ln")


def joined(hidden_BTD: torch.Tensor, residual_BTD: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
    """Add the residual to the output of a part, and normalise the sum where the block does so."""
    sum_BTD = hidden_BTD + residual_BTD
    return sum_BTD if norm is None else norm(sum_BTD)


@torch.no_grad()
def start_as_bert(module: nn.Module) -> None:
    """Draw a matrix with a deviation of 0.02; biases are 0, norms 1."""
    if isinstance(module, nn.Linear):
        module.weight.normal_(mean=0.0, std=0.02)
        module.bias.zero_()
    elif isinstance(module, nn.LayerNorm):
        module.weight.fill_(1.0)
        module.bias.zero_()


class _Whole(torch.Tensor):
    """The result of a part, to which the block adds a residual in vain; all else gives a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __add__(self, other: Any) -> Any:
        return self.as_subclass(torch.Tensor)

    __radd__ = __add__


class BottleneckHooks:
    """Hooks of one bottleneck. ``norm``: the block's norm after the sum; None where norms are before the parts."""

    _kept = threading.local()
    """Residuals of this thread, and results that a norm passes on, by identity of the seat."""

    def __init__(self, bottleneck: Bottleneck, norm: nn.Module | None) -> None:
        self._bottleneck, self._norm = bottleneck, norm

    def install(self, source: nn.Module, part: nn.Module) -> None:
        """Register the hooks: ``source`` has the residual as its first argument, ``part`` puts out h."""
        source.register_forward_pre_hook(self.keep, with_kwargs=True)
        part.register_forward_hook(self.change)
        if self._norm is not None and not self._bottleneck.ends_with_sum:
            self._norm.register_forward_hook(self.pass_on)

    def keep(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the residual, the first argument of a module."""
        vars(self._kept)[f"residual {id(self)}"] = args[0] if args else next(iter(kwargs.values()))

    def change(self, _: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """Return h' in place of the output of a module."""
        kept = vars(self._kept)
        changed = self._bottleneck.change(output, kept.pop(f"residual {id(self)}"), self._norm)
        if self._bottleneck.ends_with_sum:
            return changed
        if self._norm is not None:
            kept[f"result {id(self)}"] = changed
            return changed
        return changed.as_subclass(_Whole)

    def pass_on(self, _: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """Return the result of the part in place of the output of the norm."""
        result: torch.Tensor = vars(self._kept).pop(f"result {id(self)}", output)
        return result


class Invertible(nn.Module):
    """An invertible adapter of NICE's kind (``ringtune.models.adapter_config.Invertible``)."""

    def __init__(self, width: int, factor: float, non_linearity: str) -> None:
        super().__init__()
        self._first = width // 2
        second = width - self._first

        def bottleneck(inputs: int, outputs: int) -> nn.Sequential:
            inner = int(inputs // factor)
            return nn.Sequential(nn.Linear(inputs, inner), Activation(non_linearity), nn.Linear(inner, outputs))

        self.F, self.G = bottleneck(second, self._first), bottleneck(self._first, second)
        self.apply(start_as_bert)

    def forward(self, x_BTD: torch.Tensor, rev: bool = False) -> torch.Tensor:
        """Transform embeddings; ``rev`` computes the inverse."""
        first, second = x_BTD[:, :, : self._first], x_BTD[:, :, self._first :]
        if rev:
            second = second - self.G(first)
            return torch.cat((first - self.F(second), second), -1)
        first = first + self.F(second)
        return torch.cat((first, second + self.G(first)), -1)

    def changed(self, _: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """Transform the output of the embedding's module; a forward hook."""
        changed: torch.Tensor = self(output)
        return changed

    def inverted(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Compute the inverse of the input of a language model's decoder; a forward pre-hook."""
        return (self(args[0], rev=True), *args[1:])
