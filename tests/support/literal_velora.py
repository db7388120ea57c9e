"""VeLoRA word by word: sub-tokens, projections and reconstructions are made as the paper writes them.

Nothing of the nodes' code is used here. Layers of a whole model are made to compute this way, each with a vector of its
own, which is made of the micro-batches in which the layer trains.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.nn import functional

from ringtune.models.families import FAMILIES, LAYOUTS
from ringtune.models.family import BlockLayout
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.units import Range
from tests.support.reference import PlainDelta


def every_layer(
    model_type: str, parts: int = 8, init: str = "average", blocks: tuple[Range, ...] = (Range(0, 4),)
) -> Velora:
    """All base layers that a family's blocks have."""
    gate = ("gate",) if LAYOUTS[model_type].gate else ()
    layers = ("query", "key", "value", "attention_out", "up", *gate, "down")
    return Velora(blocks=blocks, layers=layers, parts=parts, init=init)


class Literal(torch.autograd.Function):
    """A linear layer that keeps the projections of its sub-tokens, and rebuilds its input from them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: Layer) -> Any:
        """Group, project, and keep."""
        width = x.shape[-1]
        size = layer.values or -(-width // layer.parts)
        tokens = functional.pad(x.reshape(-1, width), (0, -width % size))
        sub = tokens.reshape(-1, size)
        v = layer.vector(sub)
        z = torch.stack([row @ v for row in sub])
        ctx.save_for_backward(z, v, weight)
        ctx.shape, ctx.has_bias = x.shape, bias is not None
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Rebuild the sub-tokens on the vector, and take the gradient of the weight from them."""
        z, v, weight = ctx.saved_tensors
        (grad,) = grads
        rebuilt_sub = torch.outer(z, v)
        count = grad.numel() // grad.shape[-1]
        rebuilt = rebuilt_sub.reshape(count, -1)[:, : ctx.shape[-1]]
        flat = grad.reshape(count, -1)
        return grad @ weight, flat.t() @ rebuilt, flat.sum(0) if ctx.has_bias else None, None


class Layer:
    """A layer's vector by the definitions of the four ways to begin."""

    def __init__(self, name: str, velora: Velora, seed: int) -> None:
        self.name, self.parts, self.values, self.init, self.seed = name, velora.parts, velora.values, velora.init, seed
        self.means: list[torch.Tensor] = []
        self.fixed: torch.Tensor | None = None

    def vector(self, sub: torch.Tensor) -> torch.Tensor:
        """The vector for the next micro-batch."""
        self.means.append(sub.sum(0) / len(sub))
        if self.init == "running":
            mean: torch.Tensor = torch.stack(self.means).mean(0)
            return mean.div(mean.norm())
        if self.fixed is None:
            first = self._first(sub)
            self.fixed = first.div(first.norm())
        return self.fixed

    def _first(self, sub: torch.Tensor) -> torch.Tensor:
        if self.init == "average":
            return self.means[0]
        if self.init == "svd":
            right: torch.Tensor = torch.linalg.svd(sub, full_matrices=False)[2]
            return right[0]
        first = hashlib.sha256(f"{self.seed}/0/0/velora/{self.name}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(first, "little") & (2**63 - 1))
        return torch.randn(sub.shape[1], generator=generator, dtype=torch.float64).to(sub)


def make_literal(model: Any, velora: Velora, seed: int) -> None:
    """Let the chosen layers of a whole model compute this way."""
    layout = LAYOUTS[model.config.model_type]
    for index, block in enumerate(model.base_model.get_submodule(FAMILIES[model.config.model_type].blocks_path)):
        if not velora.has_block(index):
            continue
        adapters = [layer.split(":") for layer in velora.layers if layer.startswith("adapter_down")]
        fused = {} if layout.query else dict.fromkeys(("query", "key"), layout.value)  # under three names
        own = [layer for layer in velora.layers if not layer.startswith("adapter_down")]
        paths = {path for layer in own for path in ([fused[layer]] if layer in fused else layout.matrices_of(layer))}
        there = {name for name, _ in block.named_modules()}
        kept = {path for path, other in layout.shared if other in there}  # the input, by a matrix without a name
        for path in sorted(paths & there - kept):
            _replace(block.get_submodule(path), f"{index}.{path}.weight", velora, seed, layout.inputs_first)
        for path, module in block.named_modules():
            if not any(len(words) == 1 or _is_at(path, words[1], layout) for words in adapters):
                continue
            if path.endswith(".ringtune") and hasattr(module, "lora_A"):
                wrapped = block.get_submodule(path.removesuffix(".loras.ringtune"))
                _replace_lora(wrapped, module, Layer(f"{index}.{path}.lora_A", velora, seed))
            elif path.endswith(".ringtune") and hasattr(module, "adapter_down"):
                linear = module.adapter_down[0]
                _replace(linear, f"{index}.{path}.adapter_down.0.weight", velora, seed, inputs_first=False)
            elif isinstance(module, PlainDelta):
                end, linear = (".down", module.down) if hasattr(module, "down") else ("", module)
                _replace(linear, f"{index}.{path}{end}.weight", velora, seed, inputs_first=False)


def _is_at(path: str, layer: str, layout: BlockLayout) -> bool:
    """Whether a module of an adapter is beside a linear layer; parts of a merged one end with the layer's name."""
    begins = any(path.startswith(f"{matrix}.") for matrix in layout.matrices_of(layer))
    return begins and not (layout.query == layout.key and path.endswith(tuple({"query", "key", "value"} - {layer})))


def _replace(module: Any, name: str, velora: Velora, seed: int, inputs_first: bool) -> None:
    layer, bias = Layer(name, velora, seed), getattr(module, "bias", None)

    def forward(x: torch.Tensor) -> Any:
        weight = module.weight.t() if inputs_first else module.weight
        if not (torch.is_grad_enabled() and module.weight.requires_grad):
            return functional.linear(x, weight, bias)
        return Literal.apply(x, weight, bias, layer)  # type: ignore[no-untyped-call]

    module.forward = forward


def _replace_lora(wrapped: Any, module: Any, layer: Layer) -> None:
    """Of our modules, which are called with x, and of the library's, which a fused matrix does not call."""

    def low_rank(x: torch.Tensor) -> Any:
        x = module.lora_dropout(x)
        if torch.is_grad_enabled() and module.lora_A.requires_grad:
            return Literal.apply(x, module.lora_A, None, layer)  # type: ignore[no-untyped-call]
        return functional.linear(x, module.lora_A)

    def change(x: torch.Tensor) -> Any:
        if not getattr(module, "enable_lora", None):
            return low_rank(x) @ module.lora_B.t() * module.scaling
        low, groups = low_rank(x).transpose(-2, -1), sum(module.enable_lora)
        found = functional.conv1d(low, module.lora_B.unsqueeze(-1), groups=groups).transpose(-2, -1)
        padded = x.new_zeros(*x.shape[:-1], len(module.lora_ind))
        padded[..., module.lora_ind] = found * module.scaling
        return padded

    if not hasattr(wrapped, "merged"):
        module.forward = change
    elif hasattr(module, "enable_lora"):
        wrapped.forward = lambda x: functional.linear(x, wrapped.weight.t(), wrapped.bias) + change(x)
    else:
        module.forward = lambda hidden, x: (change(x if hidden is None else hidden), None)
