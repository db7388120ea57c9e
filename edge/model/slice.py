"""The slice of a model that one node hosts: reads its weights, drops all else, and runs its blocks.

Only the tensors of hosted blocks (and, at an owner, of the embedding) are read from the file; every other module is
replaced by an empty one, so its use by mistake fails. Blocks keep their absolute index.

B batch rows, T tokens, D model width.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from edge.model.adapters.reft import rows_of
from edge.model.auxiliary import start_auxiliary
from edge.model.frozen_weights import FrozenMatrix
from edge.model.head_groups import HeadGroups
from edge.model.key_values import KeyValueCache
from edge.model.skeleton import ADAPTER, Skeleton, base_modules, block_unit, owner_modules, seed_unit
from edge.model.tensor_files import SafetensorsFiles
from ringtune.errors import ModelError
from ringtune.models.adapter_config import INVERTIBLE
from ringtune.schedule.course import AS_COMPUTED, BFLOAT16
from ringtune.schedule.units import Units

DTYPES = {"float32": torch.float32, "float64": torch.float64}
BlockContext = Callable[[int], AbstractContextManager[None]]


class Empty(nn.Module):
    """Replaces a module that this node does not host.

    It keeps names and numbers of the module and of those right inside it, such as a block's kind of attention, by which
    an architecture's forward makes the arguments of all blocks.
    """

    def __init__(self, replaced: nn.Module | None = None, *, with_children: bool = True) -> None:
        super().__init__()
        if replaced is None:
            return
        self.__dict__.update((name, value) for name, value in vars(replaced).items() if isinstance(value, str | int))
        for name, child in replaced.named_children() if with_children else ():
            setattr(self, name, Empty(child, with_children=False))


def materialise(
    skeleton: Skeleton,
    weights: SafetensorsFiles,
    *,
    blocks: Iterable[int],
    with_embedding: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Make the hosted modules real in place, and drop all others; raises ``ModelError``.

    ``blocks`` are absolute indices; ``with_embedding`` adds an owner's parts.
    """
    base, layout = skeleton.base, skeleton.layout
    kept = set(blocks)
    for index in range(len(skeleton.blocks)):
        if index not in kept:
            skeleton.blocks[index] = Empty(skeleton.blocks[index])
    if skeleton.auxiliary:
        for index in kept:
            start_auxiliary(skeleton.blocks[index], seed=skeleton.seed, index=index)
    paths = [f"{layout.blocks_path}.{index}" for index in sorted(kept)]
    paths += [path for path, _ in base_modules(skeleton, layout.shared_paths)]
    if with_embedding:
        paths += [path for path, _ in owner_modules(skeleton)]
    for path in paths:
        whole = skeleton.full_parameters or path not in layout.owner_paths
        _read_module(skeleton, weights, path, dtype, whole=whole, device=device)
        _start_magnitudes(base.get_submodule(path))
        base.get_submodule(path).to(device=device, dtype=dtype)
    if skeleton.invertible is not None and with_embedding:
        skeleton.invertible.to(device=device, dtype=dtype)
    elif skeleton.invertible is not None:
        setattr(base, INVERTIBLE, Empty())
    inner, steps = base, layout.blocks_path.split(".")
    for step in steps:
        for name, child in list(inner.named_children()):
            if name == step:
                continue
            if any(_is_unread(parameter) for parameter in child.parameters()):
                setattr(inner, name, Empty())
            elif not any(True for _ in child.parameters()):
                child.to(device)  # buffers that the architecture computes, such as rotary frequencies
        inner = getattr(inner, step)


def _read_module(
    skeleton: Skeleton, weights: SafetensorsFiles, path: str, dtype: torch.dtype, *, whole: bool, device: torch.device
) -> None:
    """Read the tensors of the base model under ``path``.

    ``whole``: all numbers are used at each step, not only some rows of a table. ``device`` is that of frozen tensors;
    the caller moves the others. What blocks share is read as it is computed with.
    """
    module = skeleton.base.get_submodule(path)
    state: dict[str, torch.Tensor] = {}
    for name, target in module.state_dict().items():
        if f".{ADAPTER}." in f".{name}":
            continue
        full = f"{path}.{name}"
        stored = weights.find(full, skeleton.layout)
        if stored is None and not isinstance(_attribute(module, name), nn.Parameter):
            continue  # a buffer that the architecture computes
        if stored is None:
            raise ModelError(f"{weights.folder}: tensor {full} is missing; fetch the model again")
        if _attribute(module, name).requires_grad or path in skeleton.layout.shared_paths:
            tensor = weights.read(stored, dtype, private=whole)
        else:
            tensor = weights.read_frozen(stored, dtype, whole=whole, device=device)
        if tensor.shape != target.shape:
            raise ModelError(
                f"{weights.folder}: tensor {stored} has shape {list(tensor.shape)}, config.json asks for "
                f"{list(target.shape)}; fetch the model again"
            )
        state[name] = tensor
    module.load_state_dict(state, strict=False, assign=True)


def _start_magnitudes(module: nn.Module) -> None:
    """Set DoRA's magnitudes to the row norms of the wrapped weight, which the skeleton does not have.

    Source: adapters 1.3.0, ``LoRA.__init__``; in float32 as there, so that the values are those of one process.
    """
    for wrapped in module.modules():
        loras: Any = getattr(wrapped, "loras", {})
        if ADAPTER in loras and getattr(loras[ADAPTER], "use_dora", False):
            weight: Any = wrapped.weight
            with torch.no_grad():
                loras[ADAPTER].m.weight.copy_(torch.linalg.norm(weight.float(), dim=1).unsqueeze(1))


def _attribute(module: nn.Module, name: str) -> Any:
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last)


def _is_unread(parameter: torch.Tensor) -> bool:
    return parameter.dim() > 0 and parameter.numel() > 1 and not any(parameter.stride())


def module_bytes(*modules: nn.Module) -> int:
    """Bytes of all distinct real parameters and buffers."""
    sizes: dict[int, int] = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if isinstance(tensor, FrozenMatrix):
                sizes[tensor.data_ptr()] = tensor.held.numbers.held_bytes
                continue
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = min(storage.nbytes(), tensor.numel() * tensor.element_size())
    return sum(sizes.values())


class BlockRunner:
    """Runs ranges of hosted blocks; torch's grad mode decides whether a graph is kept.

    Args:
        top_tokens: first tokens of each row that the model's last block computes; 0 = all.
        compute: number type of products, one of ``COMPUTE``.
    """

    def __init__(
        self, skeleton: Skeleton, *, dropout: float, seed: int, top_tokens: int = 0, compute: str = AS_COMPUTED
    ) -> None:
        self.skeleton, self._top_tokens = skeleton, top_tokens
        self._is_rounded = compute == BFLOAT16
        self.dropout, self._seed = dropout, seed
        # by name: an update may replace tensors, and a resting block needs no gradient for a while
        self._trainable = {
            index: [name for name, parameter in block.named_parameters() if parameter.requires_grad]
            for index, block in enumerate(skeleton.blocks)
        }
        self._resting: set[int] = set()
        self._head_groups = HeadGroups(skeleton, dropout)

    def parameters(self, start: int, stop: int) -> dict[str, nn.Parameter]:
        """Return the trainable parameters of the hosted blocks ``[start, stop)``, by name."""
        return {
            f"{index}.{name}": self.skeleton.blocks[index].get_parameter(name)
            for index in range(start, stop)
            for name in self._trainable[index]
        }

    def train_only(self, start: int, stop: int, units: Units) -> None:
        """Let only these units among the hosted blocks ``[start, stop)`` collect gradients in later forwards."""
        for index in range(start, stop):
            trains = index in units
            if trains is (index in self._resting):
                for parameter in self.parameters(index, index + 1).values():
                    parameter.requires_grad_(trains)
                (self._resting.discard if trains else self._resting.add)(index)

    def context(self, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor, cache: KeyValueCache | None = None) -> Any:
        """Build the other inputs of all blocks, once per micro-batch.

        A decoder's blocks add their keys and values to ``cache`` when they run; the tokens follow those in it.
        """
        family, base = self.skeleton.family, self.skeleton.base
        if cache is None:
            return family.context(base, hidden_BTD, mask_BT)
        return family.context(base, hidden_BTD, mask_BT, cache)

    def run(
        self,
        hidden_BTD: torch.Tensor,
        mask_BT: torch.Tensor,
        context: Any,
        start: int,
        stop: int,
        *,
        train_at: tuple[int, int] | None = None,
        patterns: Mapping[int, str] | None = None,
        around: BlockContext | None = None,
    ) -> torch.Tensor:
        """Run blocks ``[start, stop)`` with ``context``.

        ``train_at`` is (step, micro-batch) of a forward with dropout, None = without. ``patterns``: block -> operations
        of its subnets; a missing block is full. ``around`` makes a context around each block.
        """
        skeleton, given = self.skeleton, patterns or {}
        with rows_of(mask_BT):
            for index in range(start, stop):
                with contextlib.nullcontext() if around is None else around(index):
                    set_mode(skeleton.blocks[index], train=train_at is not None)
                    if train_at is not None and self.dropout > 0:
                        seed_unit(self._seed, *train_at, block_unit(index))
                    whole = functools.partial(self._whole, index, context)
                    with products(hidden_BTD.device, is_rounded=self._is_rounded):
                        if pattern := given.get(index, ""):
                            output = self._head_groups.run(index, hidden_BTD, context, pattern, whole)
                        else:
                            output = whole(hidden_BTD)
                    hidden_BTD = output.to(hidden_BTD.dtype)
        return hidden_BTD

    def _whole(self, index: int, context: Any, hidden_BTD: torch.Tensor) -> torch.Tensor:
        block, family = self.skeleton.blocks[index], self.skeleton.family
        if self._top_tokens and family.first_tokens and index == len(self.skeleton.blocks) - 1:
            return family.first_tokens(block, hidden_BTD, context, self._top_tokens)
        return family.block(block, hidden_BTD, context)


def products(device: torch.device, *, is_rounded: bool) -> torch.autocast:
    """Return the context of products in bfloat16, or as they are.

    Without a cache: it would share a rounded input only where a stretch of blocks begins, and add gradients up in
    another type there.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=is_rounded, cache_enabled=False)


def set_mode(module: nn.Module, *, train: bool) -> None:
    """Switch a module's dropout on or off, unless it is so already."""
    if module.training is not train:
        module.train(train)
