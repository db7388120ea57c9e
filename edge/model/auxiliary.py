"""Auxiliary models, our adapters ``linear`` and ``mlp``: modules beside a matrix of a block or of a plain model.

An auxiliary model is a child of the matrix's module, under the adapter's name; a forward hook of that module adds its
output. So the modules of transformers are unchanged::

    query (Linear)           h + alpha * g(x)
      |- weight, bias          h
      `- ringtune (LinearDelta)    g

B batch rows, T tokens, I inputs, O outputs.

The skeleton holds no values of them, because a ``linear`` is as large as its matrix. A hosted block draws its initial
values from a generator seeded by run, block and tensor, so they are equal on every node.

A result is loaded from the folder ``adapter`` of a run, with AdapterHub's adapters beside it::

    from edge.model.auxiliary import load_auxiliary
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("models/gpt2")
    load_auxiliary(model, "run/adapter")
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from edge.model.adapters import add_adapters
from edge.model.adapters.reft import read_mask
from ringtune.errors import IntegrityError, JobError, UsageError
from ringtune.models.adapter_config import INVERTIBLE, config_of_library
from ringtune.models.auxiliary_models import (
    INTERMEDIATE,
    KEY,
    LINEAR,
    OUTPUT,
    PLACES,
    QUERY,
    VALUE,
    AdapterDescription,
    AuxiliaryConfig,
    check_alphas,
    described,
    in_block,
    is_of_library,
)
from ringtune.models.families import FAMILIES, LAYOUTS
from ringtune.models.family import BlockLayout, Family
from ringtune.models.result_files import ADAPTER_FILE, AUXILIARY_CONFIG_FILE
from ringtune.storage.strict import read_json

FUSED_PARTS = (QUERY, KEY, VALUE)
"""Parts of a fused matrix, in order."""


class LinearDelta(nn.Linear):
    """``g(x) = x W^T``, of the size of its matrix."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, device="meta")
        _hold_nothing(self)

    def start(self, seeded: Callable[[str], torch.Generator]) -> None:
        """Allocate the weights as zeros, whatever the seed."""
        _make_zero(self)


class MlpDelta(nn.Module):
    """``g(x) = relu(x V^T + b) U^T + c``.

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
        """Compute g(x)."""
        y_BTO: torch.Tensor = self.up(functional.relu(self.down(x_BTI)))
        return y_BTO

    def start(self, seeded: Callable[[str], torch.Generator]) -> None:
        """Allocate the weights: V and b as torch draws them, U and c zero.

        ``seeded`` makes the generator of a tensor of this module by name.

        Source: ``torch.nn.Linear.reset_parameters``.
        """
        _make_zero(self)
        bound = 1 / math.sqrt(self.down.in_features)
        with torch.no_grad():
            for name, tensor in self.down.named_parameters():
                tensor.uniform_(-bound, bound, generator=seeded(f"down.{name}"))


class FusedDelta(nn.ModuleDict):
    """Auxiliary models of one matrix for query, key and value: a g for some of the three, zero for the others.

    Args:
        parts: ``query``, ``key`` or ``value`` -> its g.
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
    """Make a g without memory for its weights, until ``start``."""
    return LinearDelta(inputs, outputs) if config.kind == LINEAR else MlpDelta(inputs, outputs, config.hidden)


def attach_delta(matrix: nn.Module, delta: nn.Module, *, name: str, alpha: float) -> None:
    """Let the module of a matrix, called with its input first, add ``alpha * delta(x)``; ``delta`` is its child."""
    matrix.add_module(name, delta)
    matrix.register_forward_hook(_Addition(name, alpha), prepend=True)  # before the hook of a plugged-in bottleneck


def alpha_beside(matrix: nn.Module, name: str) -> float:
    """The factor alpha of a matrix's auxiliary model of this name."""
    return next(addition.alpha for addition in _additions(matrix, name).values())


def detach_delta(matrix: nn.Module, *, name: str) -> None:
    """Undo ``attach_delta``: remove hook and child."""
    for key in _additions(matrix, name):
        del matrix._forward_hooks[key]
    del matrix._modules[name]


def _additions(matrix: nn.Module, name: str) -> dict[int, _Addition]:
    """Return the hook that adds the output of the child ``name``, by its key."""
    return {
        key: hook for key, hook in matrix._forward_hooks.items() if isinstance(hook, _Addition) and hook.name == name
    }


class _Addition:
    """Hook that adds the output of the child ``name``; a class, so that the module can be copied and pickled."""

    def __init__(self, name: str, alpha: float) -> None:
        self.name, self.alpha = name, alpha

    def __call__(self, matrix: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return torch.add(output, matrix.get_submodule(self.name)(args[0]), alpha=self.alpha)


def _hold_nothing(module: nn.Module) -> None:
    """Replace all weights by zeros of stride 0, 4 bytes each."""
    _replace(module, lambda weight: torch.zeros(()).expand(weight.shape))


def _make_zero(module: nn.Module) -> None:
    """Replace all weights by zeros with memory of their own."""
    _replace(module, lambda weight: weight.new_zeros(weight.shape))


def _replace(module: nn.Module, new: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for owner in module.modules():
        for name, weight in owner._parameters.items():
            if weight is not None:
                owner._parameters[name] = nn.Parameter(new(weight.detach()), requires_grad=weight.requires_grad)


def add_auxiliary(
    blocks: nn.ModuleList, layout: BlockLayout, auxiliary: Collection[AuxiliaryConfig], *, name: str
) -> None:
    """Add auxiliary models to all blocks that are not left out; other modules keep training.

    Weights of ``blocks`` may be placeholders. ``auxiliary`` has at most one for each matrix (see
    ``ringtune.models.auxiliary_models.check_places``); ``name`` of the adapter is a part of its tensors' names. Raises
    ``JobError`` if parts of one fused matrix have different factors.
    """
    for index, block in enumerate(blocks):
        configs = {place: config for config in in_block(auxiliary, index) for place in config.places}
        for path, places in places_by_module(layout, configs).items():
            matrix = block.get_submodule(path)
            outputs, inputs = _shape_of(matrix, layout)
            if layout.is_merged and places[0] in FUSED_PARTS:
                fused = {place: configs[place] for place in places}
                check_alphas(fused.values())
                width = outputs // len(FUSED_PARTS)
                parts: dict[str, nn.Module] = {at: make_delta(config, inputs, width) for at, config in fused.items()}
                delta: nn.Module = FusedDelta(parts, width)
            else:
                delta = make_delta(configs[places[0]], inputs, outputs)
            attach_delta(matrix, delta, name=name, alpha=configs[places[0]].alpha)


def places_by_module(layout: BlockLayout, places: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the module of each matrix in a block -> its places; up to three for a fused matrix."""
    paths = {
        **{part: getattr(layout, part) for part in FUSED_PARTS},
        INTERMEDIATE: layout.lora_intermediate,
        OUTPUT: layout.lora_output,
    }
    chosen = [place for place in PLACES if place in places]
    modules = dict.fromkeys(paths[place] for place in chosen)
    return {path: tuple(place for place in chosen if paths[place] == path) for path in modules}


def start_auxiliary(block: nn.Module, *, seed: int, index: int) -> None:
    """Allocate the auxiliary models of one block with initial values by run ``seed`` and block ``index``."""
    for path, delta in deltas_of(block):

        def seeded(name: str, path: str = path) -> torch.Generator:
            digest = hashlib.sha256(f"{seed}/auxiliary/{index}/{path}.{name}".encode()).digest()
            return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))

        delta.start(seeded)


def deltas_of(block: nn.Module) -> Iterator[tuple[str, Delta]]:
    """Yield every auxiliary model of a block with its path; each part of a fused one."""
    for path, module in block.named_modules():
        if isinstance(module, Delta):
            yield path, module


def _shape_of(matrix: nn.Module, layout: BlockLayout) -> tuple[int, int]:
    first, second = matrix.get_parameter("weight").shape
    return (second, first) if layout.inputs_first else (first, second)


def load_auxiliary(model: nn.Module, folder: str | Path) -> nn.Module:
    """Load the auxiliary models of a run into a model, and AdapterHub's adapters beside them; they do not train.

    Args:
        model: of transformers, or an ``AutoAdapterModel``, with or without a head.
        folder: with ``adapter.json`` and ``adapter.safetensors``.

    Raises:
        IntegrityError: a file is damaged, or belongs to another model.
        UsageError: the model has auxiliary models of that name already.
    """
    facts, where = _facts(Path(folder)), Path(folder) / ADAPTER_FILE
    base, family, tensors = cast(Any, model).base_model, FAMILIES[facts.model_type], _tensors(where)
    if any(True for _ in _matrices(base, facts.name)):
        raise UsageError(f"the model has an adapter {facts.name!r} already; load into a fresh model")
    state = {name.removeprefix(family.prefix): value for name, value in tensors.items()}
    with _unchanged_on_error(model):
        try:
            if facts.library is not None:
                _add_library(model, family, facts)
            add_auxiliary(
                base.get_submodule(family.blocks_path), LAYOUTS[family.model_type], facts.parts, name=facts.name
            )
        except JobError as error:
            raise IntegrityError(f"{where.parent / AUXILIARY_CONFIG_FILE}: {error}") from error
        except (AttributeError, ValueError) as error:  # of a block that lacks a matrix
            raise IntegrityError(f"{where}: {error}; take the base model, a {facts.model_type}") from error
        targets = {name: value for name, value in base.state_dict().items() if f".{facts.name}." in f".{name}"}
        stored, needed = ({name: value.shape for name, value in some.items()} for some in (state, targets))
        if odd := sorted(dict(stored.items() ^ needed.items())):
            raise IntegrityError(
                f"{where} and this model differ in {odd[0]}; copy the run's folder again, and take the base model, a "
                f"{facts.model_type}"
            )
        base.load_state_dict(state, strict=False, assign=True)
    like = next(model.parameters())
    for path, module in base.named_modules():
        if is_of_library(f".{path}.", facts.name):
            module.to(device=like.device, dtype=like.dtype).eval().requires_grad_(False)
    for matrix, delta in _matrices(base, facts.name):
        weight = matrix.get_parameter("weight")
        delta.to(device=weight.device, dtype=weight.dtype).requires_grad_(False)
    return model


def merge_auxiliary(model: nn.Module, folder: str | Path) -> nn.Module:
    """Add the auxiliary models of a run to the matrices of a model, which then computes the same without them.

    Args:
        model: as for ``load_auxiliary``.
        folder: as for ``load_auxiliary``; only ``linear``, without adapters of the library.

    Returns:
        The same model; ``save_pretrained`` writes it as a normal one.

    Raises:
        IntegrityError: a file is damaged, or belongs to another model.
        UsageError: there is an ``mlp``, which is no matrix, or an adapter of the library.
    """
    facts = _facts(Path(folder))
    if other := next((part.kind for part in facts.parts if part.kind != LINEAR), ""):
        raise UsageError(
            f"{folder} has auxiliary models of the kind {other!r}, and only {LINEAR!r} is a matrix; load "
            "them with load_auxiliary"
        )
    if facts.library is not None:
        raise UsageError(
            f"{folder} has adapters of the library beside auxiliary models; load both with load_auxiliary, or merge "
            "the run with ringtune export --merge"
        )
    load_auxiliary(model, folder)
    merge_deltas(model, name=facts.name, inputs_first=LAYOUTS[facts.model_type].inputs_first)
    return model


@torch.no_grad()
def merge_deltas(module: nn.Module, *, name: str, inputs_first: bool) -> None:
    """Add every ``linear`` auxiliary model in a module to its matrix, and remove it."""
    for matrix, delta in list(_matrices(module, name)):
        weight, change = matrix.get_parameter("weight"), _matrix_of(dict(delta.named_parameters()))
        merged = torch.add(weight, change.t() if inputs_first else change, alpha=alpha_beside(matrix, name))
        matrix.register_parameter("weight", nn.Parameter(merged, requires_grad=weight.requires_grad))
        detach_delta(matrix, name=name)


def _matrices(module: nn.Module, name: str) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield every matrix with an auxiliary model of this name, and the auxiliary model."""
    for matrix in module.modules():
        delta = dict(matrix.named_children()).get(name)
        if isinstance(delta, Delta | FusedDelta):
            yield matrix, delta


def _facts(folder: Path) -> AdapterDescription:
    path = folder / AUXILIARY_CONFIG_FILE
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} can't be read ({error}); copy the run's folder again") from error
    if not isinstance(content, dict):
        raise IntegrityError(f"{path} is no table; copy the run's folder again")
    return described(content, where=str(path))


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise IntegrityError(f"{path} can't be read ({error}); copy the run's folder again") from error


@contextlib.contextmanager
def _unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Give every module its children and hooks back if an error ends the context."""
    fields = ("_modules", "_forward_hooks", "_forward_pre_hooks")
    before = [(module, {name: vars(module)[name].copy() for name in fields}) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, values in before:
            vars(module).update(values)
        raise


def _add_library(model: Any, family: Family, facts: AdapterDescription) -> None:
    """Add AdapterHub's adapters of a run, with any values; raises ``JobError``."""
    base, config = model.base_model, config_of_library((facts.library or {})["config"])
    with torch.random.fork_rng(devices=[]):
        add_adapters(base, family, config, dropout=0.0, name=facts.name)
    read_mask(base)
    invertible: Any = dict(getattr(base, INVERTIBLE, {})).get(facts.name)
    if invertible is not None and (decoder := model.get_output_embeddings()) is not None:
        decoder.register_forward_pre_hook(invertible.inverted)


def _matrix_of(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return W with a row for each output of the matrix; zeros for query, key or value without a g."""
    if "weight" in tensors:
        return tensors["weight"]
    parts = {part: tensors[f"{part}.weight"] for part in FUSED_PARTS if f"{part}.weight" in tensors}
    zeros = torch.zeros_like(next(iter(parts.values())))
    return torch.cat([parts.get(part, zeros) for part in FUSED_PARTS])
