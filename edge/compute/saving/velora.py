"""Let chosen linear layers of blocks keep projections of their input for the backward, whatever module they are in.

While a block runs, every call of a linear layer is looked at. If its weight is a chosen one that trains, and a graph
is kept, the call goes the projected way; all else is done as it is. So the library's modules stay what they are: base
layers, LoRA and bottlenecks, with weights that an update may have put in their layers since.

Layers that read one tensor share its projection, if their vectors are equal. Where only some of them would be
projected, the others would keep the tensor, and nothing would be saved: they are chosen together.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from edge.compute.saving.projected import Linear, project, projected_linear
from edge.compute.saving.vectors import Vectors
from edge.model.auxiliary.modules import LinearDelta, MlpDelta
from edge.model.layouts import LAYOUTS
from edge.model.skeleton import ADAPTER, Skeleton
from ringtune.errors import JobError
from ringtune.schedule.saving import Velora, subtoken_size

Used = dict[str, torch.Tensor]
"""Layer -> vector that a forward of one micro-batch was projected on."""

_MATMUL: Final = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class ChosenLayer(NamedTuple):
    """Where the weight of a chosen layer is.

    Attributes:
        name: of the layer, by block and parameter: ``3.output.dense.weight``.
        module: that has the weight.
        attribute: of the module.
        inputs: values D that enter the layer.
    """

    name: str
    module: nn.Module
    attribute: str
    inputs: int


class Projections:
    """The chosen layers of a node's blocks with their vectors.

    Args:
        velora: from the course.
        skeleton: whose blocks ``[start, stop)`` are real.
        start: first hosted block.
        stop: first block that is not hosted.
        seed: of the run.

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
        sizes = {
            layer.name: subtoken_size(layer.inputs, velora.parts) for found in self.layers.values() for layer in found
        }
        self.vectors = Vectors(sizes, init=velora.init, seed=seed)

    @contextlib.contextmanager
    def block(self, index: int, used: Used) -> Iterator[None]:
        """Let the chosen layers of a block go the projected way while the context is open.

        Args:
            index: of the block.
            used: vectors of this micro-batch; those that are not in it are made, and put in.
        """
        layers = {id(getattr(layer.module, layer.attribute)): layer.name for layer in self.layers.get(index, ())}
        if not layers:
            yield
            return
        with _Watch(layers, self.vectors, used):
            yield


def chosen_layers(velora: Velora, skeleton: Skeleton, index: int) -> list[ChosenLayer]:
    """Find the layers of one block that are named and train.

    Raises:
        JobError: see ``Projections``.
    """
    found: list[ChosenLayer] = []
    if not any(parameter.requires_grad for parameter in skeleton.blocks[index].parameters()):
        return found
    for word in velora.layers:
        layers = list(_layers(skeleton, index, word))
        if not layers:
            raise JobError(
                f"velora.layers has {word!r}, but nothing of that kind trains in block {index}: a frozen layer keeps "
                "no input anyway; leave it out"
            )
        found += [layer for layer in layers if all(layer.name != other.name for other in found)]
    for layer in found:
        if layer.inputs < velora.parts:
            raise JobError(
                f"velora.parts is {velora.parts}, but {layer.name} has {layer.inputs} inputs; set it to at most "
                f"{layer.inputs}"
            )
    _check_gate(velora, skeleton)
    _check_activation(velora, skeleton, index)
    return found


def _check_gate(velora: Velora, skeleton: Skeleton) -> None:
    if LAYOUTS[skeleton.layout.model_type].gate and "up" in velora.layers and "gate" not in velora.layers:
        raise JobError(
            f"velora.layers has up without gate: in a {skeleton.layout.model_type} both read one tensor, which is kept "
            "as long as one of them keeps it; name both, or none"
        )


def _check_activation(velora: Velora, skeleton: Skeleton, index: int) -> None:
    if "down" in velora.layers and _keeps_down_input(skeleton, index):
        raise JobError(
            f"velora.layers has 'down', but the activation function of this {skeleton.layout.model_type} keeps the "
            "input of that layer anyway; leave it out"
        )


def _keeps_down_input(skeleton: Skeleton, index: int) -> bool:
    """Whether the activation function of a block needs its result in backward, which is what enters ``down``."""
    layout = LAYOUTS[skeleton.layout.model_type]
    activation = skeleton.blocks[index].get_submodule(layout.activation)
    return not layout.gate and isinstance(activation, (nn.ReLU, nn.Tanh))


def _layers(skeleton: Skeleton, index: int, word: str) -> Iterator[ChosenLayer]:
    """Yield the layers of one kind in a block that train."""
    block = skeleton.blocks[index]
    layout = LAYOUTS[skeleton.layout.model_type]
    if word == "adapter_down":
        for path, module in block.named_modules():
            if path.startswith(f"{layout.down}.") and _keeps_down_input(skeleton, index):
                continue  # LoRA beside a matrix whose input stays anyway
            for layer in _adapter_layers(f"{index}.{path}", module):
                _check_alone(layer, module, norm_first=layout.norm_first)
                yield layer
    elif path := str(getattr(layout, word)):
        module = block.get_submodule(path)
        weight: Any = module.weight
        if weight.requires_grad:
            inputs = weight.shape[0 if layout.inputs_first else 1]
            yield ChosenLayer(f"{index}.{path}.weight", module, "weight", inputs)


def _adapter_layers(path: str, module: Any) -> Iterator[ChosenLayer]:
    """Yield the first matrix of a bottleneck, LoRA or auxiliary model, if the module is one and trains."""
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
        at, linear = next((at, one) for at, one in enumerate(module.adapter_down) if isinstance(one, nn.Linear))
        first = ChosenLayer(f"{path}.adapter_down.{at}.weight", linear, "weight", linear.in_features)
    if first is not None and getattr(first.module, first.attribute).requires_grad:
        yield first


def _check_alone(layer: ChosenLayer, adapter: Any, *, norm_first: bool) -> None:
    """Refuse an adapter whose input something else keeps.

    Raises:
        JobError: it has a gate; or it is a parallel bottleneck that reads what a norm reads.
    """
    from adapters.methods.modeling import ParallelAdapter

    keeper, remedy = "", ""
    if getattr(adapter, "use_gating", False):
        keeper, remedy = "its gate", "use an adapter without use_gating"
    elif norm_first and isinstance(adapter, ParallelAdapter):
        keeper, remedy = "the norm before the feed-forward part", "use seq_bn"
    if keeper:
        raise JobError(
            f"velora.layers has 'adapter_down', but {keeper} keeps the input of {layer.name} anyway; leave it out, or "
            f"{remedy}"
        )


class _Call(NamedTuple):
    """A call of a linear layer: what computes it, its input, its matrix with a row for each output, and its bias."""

    linear: Linear
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


class _Watch(TorchFunctionMode):
    """Sends calls of chosen linear layers the projected way."""

    def __init__(self, names: dict[int, str], vectors: Vectors, used: Used) -> None:
        super().__init__()
        self._names, self._vectors, self._used = names, vectors, used
        self._last: tuple[weakref.ref[torch.Tensor], int, torch.Tensor, torch.Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, call = self._chosen(func, args, kwargs)
        if call is None or not torch.is_grad_enabled() or not call.weight.requires_grad:
            return func(*args, **kwargs)
        return projected_linear(*call, *self._projection(name, call.x))

    def _chosen(self, func: Any, args: Any, kwargs: Any) -> tuple[str, _Call | None]:
        """Return name and parts of a call that is of a chosen layer, and None for all other calls.

        LoRA multiplies by its transposed first matrix, and ``Conv1D`` adds a product to its bias. A product with the
        matrix itself on the right is none of a layer (DoRA makes a norm of it).
        """
        if func is functional.linear:
            x, weight, *rest = args
            bias = rest[0] if rest else kwargs.get("bias")
            name = self._name(weight) or self._name(_base(weight))
            return name, _Call(functional.linear, x, weight, bias) if name else None
        if func in _MATMUL and (name := self._name(_base(args[1]))) and args[1].dim() == 2:
            return name, _Call(_times_transposed, args[0], args[1].t(), None)
        if func is torch.addmm and not kwargs and (name := self._name(args[2])):
            return name, _Call(_added_to_bias, args[1], args[2].t(), args[0])
        return "", None

    def _name(self, weight: Any) -> str:
        return self._names.get(id(weight), "")

    @torch.no_grad()
    def _projection(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return projections and vector of a layer for its input; once for layers of one input and equal vectors."""
        vector = self._used.get(name)
        if vector is None:
            vector = self._used[name] = self._vectors.next(name, x)
        if self._last is not None:
            known, version, last_z, last_vector = self._last
            if known() is x and version == x._version and torch.equal(last_vector, vector):
                return last_z, last_vector
        z = project(x, vector)
        self._last = (weakref.ref(x), x._version, z, vector)
        return z, vector


def _base(tensor: Any) -> Any:
    """Return what a plain tensor is a view of; a frozen matrix, held small, is not asked: it would widen itself."""
    return tensor._base if type(tensor) is torch.Tensor else None


def _times_transposed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x @ weight.t()


def _added_to_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.addmm(bias, x, weight.t()) if bias is not None else x @ weight.t()
