"""VeLoRA: chosen linear layers keep projections of their inputs, not the inputs, for the gradients of their weights.

A token of D values is P sub-tokens of M values; ``z`` is the product of each of them with the unit vector ``v``. The
backward reconstructs a sub-token as ``z v``, so the gradient of a weight row with output gradient g is::

    sum over tokens  g * (z_1 v, z_2 v, ..., z_P v)  =  (g z_1, g z_2, ..., g z_P) times v

The sums over tokens on the right are P products for each output, not D, and no reconstruction is stored. The gradients
of the input and of the bias need no input, and are exact.

While a block runs, every call of a linear layer is checked. A call with a graph and a chosen weight that trains is
projected; all others run unchanged. So the library's modules (base layers, LoRA, bottlenecks) are unchanged, and
updates may replace their weights.

In a block of which only some subnets are full, a layer keeps the projection of its whole input, with zeros for the
inputs of the other subnets. Their columns have no gradient, as without projections.

Layers with the same input share its projection, if their vectors are equal. They have to be chosen together: otherwise
the others would keep the input, and nothing would be saved.

==========  ==================================================================================================
init        the vector v of a layer
==========  ==================================================================================================
average     mean sub-token of the first micro-batch, normalised; then fixed
running     for micro-batch n = 1, 2, ...: the mean over the means of the micro-batches 1 to n, normalised
svd         first right singular vector of the sub-tokens of the first micro-batch; then fixed
random      drawn from the seed of the run and the layer's name, normalised; fixed
==========  ==================================================================================================

Each layer counts the micro-batches in which it trains; one that a block applies several times (ALBERT) has the vector
of the first application for all of them. Micro-batches pass a unit in the order of (item, micro-batch), so that no
timing and no split of the blocks changes a vector. A returned vector is never written to: a graph keeps its own.

N tokens, D inputs, O outputs, P sub-tokens of a token, M values of a sub-token.

Source: VeLoRA, section 3.1 (equations 1 and 2), Algorithm 1, sections 3.2 and 5.3 (vectors). The paper does not define
its running average.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from edge.checkpoint.snapshots import COUNT, block_of
from edge.model.auxiliary import FUSED_PARTS, LinearDelta, MlpDelta
from edge.model.head_groups import Ranges, active_inputs, active_outputs, rebuilt_gradient, rounded, whole_inputs
from edge.model.skeleton import ADAPTER, Skeleton, unit_seed
from ringtune.errors import IntegrityError, JobError
from ringtune.models.families import LAYOUTS
from ringtune.models.family import BlockLayout
from ringtune.schedule.saved_activations import ADAPTER_DOWN, Velora, is_adapter

VectorsByLayer = dict[str, torch.Tensor]
"""Layer -> vector of its projection in one micro-batch."""

_MATMUL: Final = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class ChosenLayer(NamedTuple):
    """The weight of a chosen layer.

    Attributes:
        name: of the layer, by block and parameter: ``3.output.dense.weight``.
        attribute: of the module.
        inputs: number D of inputs.
    """

    name: str
    module: nn.Module
    attribute: str
    inputs: int


class Projections:
    """The chosen layers of a node's blocks with their vectors.

    Args:
        skeleton: with real blocks ``[start, stop)``.

    Raises:
        JobError: a named layer does not train in a block in which others do, or has fewer inputs than parts, or another
            layer keeps its input.

    Attributes:
        layers: block -> its chosen layers.
        vectors: of all of them.
    """

    def __init__(self, velora: Velora, skeleton: Skeleton, *, start: int, stop: int, seed: int) -> None:
        blocks = [index for index in range(start, stop) if velora.has_block(index)]
        self.layers = {index: chosen_layers(velora, skeleton, index) for index in blocks}
        sizes = {layer.name: velora.subtoken_size(layer.inputs) for chosen in self.layers.values() for layer in chosen}
        self.vectors = Vectors(sizes, init=velora.init, seed=seed)

    @contextlib.contextmanager
    def block(self, index: int, used: VectorsByLayer) -> Iterator[None]:
        """Let the chosen layers of block ``index`` keep projections inside the context.

        ``used`` has the vectors of this micro-batch; missing ones are made and added.
        """
        layers = {id(getattr(layer.module, layer.attribute)): layer.name for layer in self.layers.get(index, ())}
        if not layers:
            yield
            return
        with _Watch(layers, self.vectors, used):
            yield


def chosen_layers(velora: Velora, skeleton: Skeleton, index: int) -> list[ChosenLayer]:
    """List the layers of one block that are named and train; raises ``JobError``."""
    chosen: list[ChosenLayer] = []
    if not any(parameter.requires_grad for parameter in skeleton.blocks[index].parameters()):
        return chosen
    for word in velora.layers:
        layers = list(_layers(skeleton, index, word))
        if not layers and not skeleton.layout.layout.is_unlike:  # another block may have it
            raise JobError(
                f"velora.layers has {word!r}, but nothing of that kind trains in block {index}: a frozen layer keeps "
                "no input anyway; leave it out"
            )
        chosen += [layer for layer in layers if all(layer.name != other.name for other in chosen)]
    for layer in chosen:
        if problem := velora.misfit(layer.inputs, f"the input of {layer.name}"):
            raise JobError(problem)
    model_type = skeleton.layout.model_type
    if LAYOUTS[model_type].gate and "up" in velora.layers and "gate" not in velora.layers:
        raise JobError(
            f"velora.layers has up without gate: in a {model_type} both read one tensor, which is kept "
            "as long as one of them keeps it; name both, or none"
        )
    if "down" in velora.layers and _keeps_down_input(skeleton, index):
        raise JobError(
            f"velora.layers has 'down', but the activation function of this {model_type} keeps the "
            "input of that layer anyway; leave it out"
        )
    return chosen


def _keeps_down_input(skeleton: Skeleton, index: int) -> bool:
    """Whether the activation function of a block keeps its result, the input of ``down``, for its backward."""
    block, layout = skeleton.blocks[index], LAYOUTS[skeleton.layout.model_type]
    activations = block.modules() if skeleton.layout.generic else [block.get_submodule(layout.activation)]
    return not layout.gate and any(isinstance(activation, (nn.ReLU, nn.Tanh)) for activation in activations)


def _layers(skeleton: Skeleton, index: int, word: str) -> Iterator[ChosenLayer]:
    """Yield the trained layers of one kind in a block."""
    block = skeleton.blocks[index]
    layout = LAYOUTS[skeleton.layout.model_type]
    if is_adapter(word):
        for path, module in block.named_modules():
            if word != ADAPTER_DOWN and not _is_beside(path, module, layout, word.partition(":")[2]):
                continue
            if layout.down and path.startswith(f"{layout.down}.") and _keeps_down_input(skeleton, index):
                continue  # LoRA beside a matrix whose input stays anyway
            if any(path.startswith(f"{getattr(layout, role)}.") for role in skeleton.layout.twice):
                continue  # it reads what is no hidden state, too
            for layer in _adapter_layers(f"{index}.{path}", module):
                _check_alone(layer, word, module, norm_first=layout.norm_first)
                yield layer
        return
    modules, beside = dict(block.named_modules()), dict(layout.shared)
    for path in layout.matrices_of(word) or (layout.matrices_of("value") if word in FUSED_PARTS else ()):
        is_there = path in modules and beside.get(path) not in modules
        weight: Any = modules[path].weight if is_there else None
        if weight is not None and weight.requires_grad:
            inputs = weight.shape[0 if layout.inputs_first else 1]
            yield ChosenLayer(f"{index}.{path}.weight", modules[path], "weight", inputs)


def _is_beside(path: str, module: nn.Module, layout: BlockLayout, matrix: str) -> bool:
    """Whether a LoRA or auxiliary model is beside a matrix; a part of a fused one only beside its own."""
    if hasattr(module, "adapter_down") or not any(path.startswith(f"{owner}.") for owner in layout.matrices_of(matrix)):
        return False
    if enabled := getattr(module, "enable_lora", None):  # one LoRA beside some parts of a fused matrix
        return bool(enabled[FUSED_PARTS.index(matrix)])
    end = path.rpartition(".")[2]
    return not (layout.is_merged and end in FUSED_PARTS and end != matrix)


def _adapter_layers(path: str, module: Any) -> Iterator[ChosenLayer]:
    """Yield the first matrix of a trained bottleneck, LoRA or auxiliary model; nothing for another module."""
    if ADAPTER not in path.split("."):
        return
    first = None
    if isinstance(module, LinearDelta):
        first = ChosenLayer(f"{path}.weight", module, "weight", module.in_features)
    elif isinstance(module, MlpDelta):
        first = ChosenLayer(f"{path}.down.weight", module.down, "weight", module.down.in_features)
    elif isinstance(getattr(module, "lora_A", None), nn.Parameter) and module.lora_A.dim() == 2:
        first = ChosenLayer(f"{path}.lora_A", module, "lora_A", module.lora_A.shape[1])
    elif isinstance(getattr(module, "adapter_down", None), nn.Sequential):
        at, linear = next((at, layer) for at, layer in enumerate(module.adapter_down) if isinstance(layer, nn.Linear))
        first = ChosenLayer(f"{path}.adapter_down.{at}.weight", linear, "weight", linear.in_features)
    if first is not None and getattr(first.module, first.attribute).requires_grad:
        yield first


def _check_alone(layer: ChosenLayer, word: str, adapter: Any, *, norm_first: bool) -> None:
    """Refuse an adapter with an input that another layer keeps.

    Raises ``JobError``: it has a gate, or is a parallel bottleneck with the input of a norm.
    """
    keeper, remedy = "", ""
    if getattr(adapter, "use_gating", False):
        keeper, remedy = "its gate", "use an adapter without use_gating"
    elif norm_first and getattr(adapter, "is_parallel", False):
        keeper, remedy = "the norm before the feed-forward part", "use seq_bn"
    if keeper:
        raise JobError(
            f"velora.layers has {word!r}, but {keeper} keeps the input of {layer.name} anyway; leave it out, or "
            f"{remedy}"
        )


class _Call(NamedTuple):
    """A call of a linear layer: function, input, matrix with a row for each output, and bias."""

    linear: Linear
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


class _Watch(TorchFunctionMode):
    """Replaces calls of chosen linear layers by projected ones."""

    def __init__(self, names: dict[int, str], vectors: Vectors, used: VectorsByLayer) -> None:
        super().__init__()
        self._names, self._vectors, self._used = names, vectors, used
        self._last: tuple[weakref.ref[torch.Tensor], int, torch.Tensor, torch.Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (active_outputs, active_inputs):
            return self._of_subnets(func, *args)
        name, call = self._chosen(func, args, kwargs)
        if call is None or not torch.is_grad_enabled() or not call.weight.requires_grad:
            return func(*args, **kwargs)
        return projected_linear(*call, *self._projection(name, call.x))

    def _of_subnets(
        self, func: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ranges: Ranges
    ) -> torch.Tensor:
        """Run a layer of some subnets, which keeps the projection of its whole input; zeros are for the other ones."""
        output: torch.Tensor
        name = self._name(weight) or self._name(_base(weight))
        if not name or not torch.is_grad_enabled():
            output = func(x, weight, bias, ranges)
            return output
        whole = x if func is active_outputs else whole_inputs(x.detach(), ranges, weight.shape[1])
        output = func(x, weight, bias, ranges, self._projection(name, whole))
        return output

    def _chosen(self, func: Any, args: Any, kwargs: Any) -> tuple[str, _Call | None]:
        """Return name and parts of a call of a chosen layer; None for all other calls.

        LoRA multiplies by its transposed first matrix, and ``Conv1D`` adds a product to its bias. A product with the
        matrix itself on the right is no call of a layer (DoRA computes a norm with it).
        """
        if func is functional.linear:
            x, weight, *rest = args
            bias = rest[0] if rest else kwargs.get("bias")
            name = self._name(weight) or self._name(_base(weight))
            return name, _Call(functional.linear, x, weight, bias) if name else None
        if func in _MATMUL and (name := self._name(_base(args[1]))) and args[1].dim() == 2:
            return name, _Call(_added_to_bias, args[0], args[1].t(), None)
        if func is torch.addmm and not kwargs and (name := self._name(args[2])):
            return name, _Call(_added_to_bias, args[1], args[2].t(), args[0])
        return "", None

    def _name(self, weight: Any) -> str:
        return self._names.get(id(weight), "")

    @torch.no_grad()
    def _projection(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return projections and vector of a layer for its input; shared by layers with equal input and vector."""
        vector = self._used.get(name)
        if vector is None:
            with torch.autocast(x.device.type, enabled=False):
                wide = x.to(torch.promote_types(x.dtype, torch.float32))
                vector = self._used[name] = self._vectors.next(name, wide)
        if self._last is not None:
            known, version, last_z, last_vector = self._last
            if known() is x and version == x._version and torch.equal(last_vector, vector):
                return last_z, last_vector
        z = project(rounded(x), rounded(vector))
        self._last = (weakref.ref(x), x._version, z, vector)
        return z, vector


def _base(tensor: Any) -> Any:
    """Return the tensor of which a plain tensor is a view; not for a frozen matrix, which would be widened."""
    return tensor._base if type(tensor) is torch.Tensor else None


def _added_to_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.addmm(bias, x, weight.t()) if bias is not None else x @ weight.t()


class Vectors:
    """The vectors of some layers.

    Args:
        sizes: layer -> values M of a sub-token.
        init: one of ``ringtune.schedule.saved_activations.INITS``.
    """

    def __init__(self, sizes: Mapping[str, int], *, init: str, seed: int) -> None:
        self._sizes, self._init, self._seed = dict(sizes), init, seed
        self._found: dict[str, torch.Tensor] = {}  # the vector; with a running average the mean, not normalised
        self._counts: dict[str, int] = {}

    def next(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        """Return the vector (M) of a layer for its next micro-batch, with input ``x``."""
        if self._init == "running":
            return self._next_running(layer, x)
        if layer not in self._found:
            self._found[layer] = self._first(layer, x)
        return self._on_device(layer, x)

    def _next_running(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        mean, count = subtokens(x, self._sizes[layer]).mean(0), self._counts.get(layer, 0) + 1
        if layer in self._found:
            before = self._on_device(layer, x)
            mean = before + (mean - before) / count
        self._found[layer], self._counts[layer] = mean, count
        return _unit(mean)

    def _on_device(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        """Return the vector or mean of a layer as its input is; a checkpoint was read on the CPU, perhaps of others."""
        self._found[layer] = self._found[layer].to(x)
        return self._found[layer]

    def _first(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        size = self._sizes[layer]
        if self._init == "random":
            generator = torch.Generator().manual_seed(unit_seed(self._seed, 0, 0, f"velora/{layer}"))
            return _unit(torch.randn(size, generator=generator, dtype=torch.float64)).to(x)
        parts = subtokens(x, size)
        return _unit(parts.mean(0)) if self._init == "average" else _principal(parts)

    # ---- checkpoints ------------------------------------------------------------------------------

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the vector of every layer for a checkpoint, empty before the first micro-batch."""
        state = {layer: self._found.get(layer, torch.zeros(0)) for layer in sorted(self._sizes)}
        if self._init == "running":
            state |= {f"{layer}{COUNT}": torch.tensor(self._counts.get(layer, 0)) for layer in sorted(self._sizes)}
        return state

    def check(self, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
        """Refuse tensors of other layers or sizes than those of ``tensors()``, or of numbers that none of these has.

        Raises ``IntegrityError``.
        """
        if tensors.keys() != self.tensors().keys():
            names = sorted(tensors.keys() ^ self.tensors().keys())
            raise IntegrityError(f"{where} has VeLoRA's vectors of other layers than this node's: {names[0]}")
        for layer, size in self._sizes.items():
            if tuple(tensors[layer].shape) not in {(0,), (size,)}:
                shape = list(tensors[layer].shape)
                raise IntegrityError(f"{where} has VeLoRA's vector of {layer} as {shape}, expected [{size}]")
            count = tensors.get(f"{layer}{COUNT}", torch.tensor(0))
            is_count = count.dtype is torch.int64 and not count.shape and 0 <= int(count) <= _MAX_COUNT
            if not is_count or not is_finite_vector(tensors[layer]):
                raise IntegrityError(f"{where} has a count or VeLoRA's vector of {layer} with impossible numbers")

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all vectors by checked ones."""
        self._found = {layer: tensors[layer] for layer in self._sizes if tensors[layer].numel()}
        counts = {layer: tensors.get(f"{layer}{COUNT}") for layer in self._found}
        self._counts = {layer: int(count) for layer, count in counts.items() if count is not None}

    def load_blocks(self, tensors: Mapping[str, torch.Tensor], blocks: Collection[int], *, where: str) -> None:
        """Replace the vectors of some blocks by those of their former host; raises ``IntegrityError``."""
        others = {name: value for name, value in self.tensors().items() if block_of(name) not in blocks}
        self.check(others | dict(tensors), where=where)
        self.load(others | dict(tensors))


def is_finite_vector(value: torch.Tensor) -> bool:
    """Whether a vector of another node is finite in the type of this one's inputs, which may be bfloat16."""
    return value.is_floating_point() and bool(value.to(torch.bfloat16).isfinite().all())


_MAX_COUNT: Final = 1 << 53
"""Most micro-batches in a running mean: numbers up to it are exact in its arithmetic."""


def _unit(vector: torch.Tensor) -> torch.Tensor:
    """Scale a vector to length 1; a zero or non-finite one becomes a vector of equal values."""
    length = float(vector.norm())
    if not math.isfinite(length) or length == 0:
        return torch.full_like(vector, 1 / math.sqrt(len(vector)))
    return vector / length


def _principal(parts: torch.Tensor) -> torch.Tensor:
    """Return the first right singular vector of some rows, with a non-negative sum.

    Rows that are not finite give a vector of equal values: the loss ends the run with an error.
    """
    squares = (parts.t() @ parts).double()
    if not squares.isfinite().all():
        return _unit(torch.full_like(parts[0], math.nan))
    _, vectors = torch.linalg.eigh(squares)
    first = vectors[:, -1]
    return _unit(first if float(first.sum()) >= 0 else -first).to(parts)


Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Multiplies an input by a matrix with a row for each output, and adds a bias if there is one."""


def subtokens(x: torch.Tensor, size: int) -> torch.Tensor:
    """Cut the last dimension into sub-tokens (N * P, M) of ``size`` values, padded with zeros."""
    missing = -x.shape[-1] % size
    return (functional.pad(x, (0, missing)) if missing else x).reshape(-1, size)


def project(x: torch.Tensor, vector_M: torch.Tensor) -> torch.Tensor:
    """Return the product of each sub-token of each token with a vector: (N, P)."""
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
    """Compute a linear layer that keeps projections of its input for the backward.

    Args:
        linear: the layer's own function, so that the output has the same bits.
        x: input with any number of leading dimensions.
        weight_OD: has a gradient; may be a view of the parameter.
        bias_O: None without one.
        z_NP: of ``project``.
        vector_M: of the projection; never written to.
    """
    factors = rounded(x), rounded(weight_OD), None if bias_O is None else rounded(bias_O)
    output: torch.Tensor = _Projected.apply(*factors, z_NP, vector_M, linear)  # type: ignore[no-untyped-call]
    return output


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
            weight_grad = rebuilt_gradient(grad.t() @ z, vector, weight.shape[1])
        if ctx.needs_input_grad[2]:
            bias_grad = grad.sum(0)
        return x_grad, weight_grad, bias_grad, None, None, None
