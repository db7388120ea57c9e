"""Load the auxiliary models of a run into a plain model, or add them to its matrices.

Example, with the folder ``adapter`` of a run::

    from edge.model.auxiliary.loading import load_auxiliary
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("models/gpt2")
    load_auxiliary(model, "run/adapter")

Adapters of the library beside them are loaded too, by the library.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from edge.model.auxiliary.build import places_by_module
from edge.model.auxiliary.modules import FUSED_PARTS, Delta, FusedDelta, LinearDelta, MlpDelta, put_beside
from edge.model.families.plugged import plug_in
from edge.model.layouts import LAYOUTS
from ringtune.errors import IntegrityError, UsageError
from ringtune.files.strict import parse_json
from ringtune.models.adapters.auxiliary_config import LINEAR, PLACES, AuxiliaryConfig, in_block
from ringtune.models.adapters.auxiliary_file import Described, described, is_of_library
from ringtune.models.families import FAMILIES
from ringtune.models.result_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE, AUXILIARY_CONFIG_FILE

Tensors = Mapping[str, torch.Tensor]

_NAMES: Final = {True: {"weight"}, False: {"down.weight", "down.bias", "up.weight", "up.bias"}}
"""The tensors of a g: of a linear one, or of an MLP."""


class _Beside(NamedTuple):
    """A matrix of a model, and what stands beside it.

    Attributes:
        path: of the matrix.
        matrix: the matrix.
        tensors: of what stands beside it, by the ends of their names.
        configs: the same by place; of one matrix for query, key and value up to three.
        is_fused: whether it is such a matrix.
    """

    path: str
    matrix: nn.Module
    tensors: dict[str, torch.Tensor]
    configs: dict[str, AuxiliaryConfig]
    is_fused: bool

    @property
    def config(self) -> AuxiliaryConfig:
        """The one of the first place."""
        return next(iter(self.configs.values()))

    def of_place(self, place: str) -> dict[str, torch.Tensor]:
        """The tensors of one place, by the ends of their names."""
        start = f"{place}." if self.is_fused else ""
        found = {name: tensor for name, tensor in self.tensors.items() if name.startswith(start)}
        return {name.removeprefix(start): tensor for name, tensor in found.items()}


def load_auxiliary(model: nn.Module, folder: str | Path) -> nn.Module:
    """Let a model compute with the auxiliary models of a run, and its adapters of the library; they do not train.

    Args:
        model: of transformers, or an ``AutoAdapterModel``, with or without a head.
        folder: with ``adapter.json`` and ``adapter.safetensors``.

    Returns:
        The same model.

    Raises:
        IntegrityError: a file is damaged, or belongs to another model.
        UsageError: the model has auxiliary models of that name already.
    """
    facts = _facts(Path(folder))
    tensors = _tensors(Path(folder) / ADAPTER_FILE)
    for beside in _matrices(model, Path(folder), facts, tensors):
        if hasattr(beside.matrix, facts.name):
            raise UsageError(f"{beside.path} has an adapter {facts.name!r} already; load into a fresh model")
    if facts.library is not None:
        _load_library(model, facts, tensors)
    for beside in _matrices(model, Path(folder), facts, tensors):  # the library has put its own in their places
        delta, weight = _delta(beside), beside.matrix.get_parameter("weight")
        delta.to(device=weight.device, dtype=weight.dtype).requires_grad_(False)
        put_beside(beside.matrix, delta, name=facts.name, alpha=beside.config.alpha)
    return model


def merge_auxiliary(model: nn.Module, folder: str | Path) -> nn.Module:
    """Add the auxiliary models of a run to the matrices of a model, which then computes the same without them.

    Args:
        model: as for ``load_auxiliary``.
        folder: as for ``load_auxiliary``; all of the kind ``linear``, without adapters of the library.

    Returns:
        The same model, which ``save_pretrained`` writes as a normal one.

    Raises:
        IntegrityError: a file is damaged, or belongs to another model.
        UsageError: a part of it is an ``mlp``, which is no matrix, or an adapter of the library.
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
    inputs_first = LAYOUTS[facts.model_type].inputs_first
    for beside in _matrices(model, Path(folder), facts, _tensors(Path(folder) / ADAPTER_FILE)):
        weight, change = beside.matrix.get_parameter("weight"), matrix_of(beside.tensors)
        with torch.no_grad():
            change = (change.t() if inputs_first else change).to(device=weight.device, dtype=weight.dtype)
            weight.add_(change, alpha=beside.config.alpha)
    return model


def _facts(folder: Path) -> Described:
    path = folder / AUXILIARY_CONFIG_FILE
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
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


def _load_library(model: Any, facts: Described, tensors: Tensors) -> None:
    """Let the library load its adapters, from a folder as it writes one."""
    from adapters.model_mixin import ModelAdaptersMixin
    from safetensors.torch import save_file

    if not isinstance(model, ModelAdaptersMixin):
        plug_in(model, FAMILIES[facts.model_type])
    with tempfile.TemporaryDirectory(prefix="ringtune-") as folder:
        (Path(folder) / ADAPTER_CONFIG_FILE).write_text(json.dumps(facts.library), encoding="utf-8")
        own = {name: tensor for name, tensor in tensors.items() if is_of_library(name, facts.name)}
        save_file(own, Path(folder) / ADAPTER_FILE, metadata={"format": "pt"})
        loaded = model.load_adapter(folder, use_safetensors=True, set_active=True)
    like = next(model.parameters())
    model.adapter_to(loaded, device=like.device, dtype=like.dtype)
    for name, parameter in model.named_parameters():
        if is_of_library(name, loaded):
            parameter.requires_grad_(False)


def _matrices(model: nn.Module, folder: Path, facts: Described, tensors: Tensors) -> list[_Beside]:
    """List every matrix that something stands beside, and check that it fits."""
    by_path: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if facts.library is None or not is_of_library(key, facts.name):
            matrix, _, end = key.partition(f".{facts.name}.")
            by_path.setdefault(matrix, {})[end] = tensor
    return [_beside(model, folder, facts, path, found) for path, found in sorted(by_path.items())]


def _beside(model: nn.Module, folder: Path, facts: Described, path: str, tensors: dict[str, torch.Tensor]) -> _Beside:
    layout = LAYOUTS[facts.model_type]
    matrix = _module(model, path)
    places = next((places for end, places in places_by_module(layout, PLACES).items() if path.endswith(f".{end}")), ())
    blocks = [int(part) for part in path.split(".") if part.isdecimal()]
    by_place = {place: part for part in in_block(facts.parts, blocks[0] if blocks else 0) for place in part.places}
    configs = {place: by_place[place] for place in places if place in by_place}
    is_fused = layout.is_merged and set(places) == set(FUSED_PARTS)
    if matrix is not None and configs:
        found = _Beside(path, matrix, tensors, configs, is_fused)
        if _fits(found, inputs_first=layout.inputs_first):
            return found
    raise IntegrityError(
        f"{folder / ADAPTER_FILE} has tensors beside {path}, which this model does not have in that shape; "
        f"take the base model, a {facts.model_type}"
    )


def _module(model: nn.Module, path: str) -> nn.Module | None:
    """Find a module by its path in a model with a head; a base model has no such prefix."""
    for candidate in (path, path.partition(".")[2]):
        try:
            return model.get_submodule(candidate)
        except AttributeError:
            continue
    return None


def _fits(beside: _Beside, *, inputs_first: bool) -> bool:
    """Whether a matrix has the inputs and outputs of what stands beside it, which is of the described kinds."""
    weight = getattr(beside.matrix, "weight", None)
    if weight is None or weight.dim() != 2:
        return False
    outputs, inputs = tuple(reversed(weight.shape)) if inputs_first else tuple(weight.shape)
    if sum(len(beside.of_place(place)) for place in beside.configs) != len(beside.tensors):
        return False
    width = outputs // len(FUSED_PARTS) if beside.is_fused else outputs
    return all(_fits_at(beside.of_place(place), config, inputs, width) for place, config in beside.configs.items())


def _fits_at(tensors: Tensors, config: AuxiliaryConfig, inputs: int, outputs: int) -> bool:
    is_linear = config.kind == LINEAR
    first, last = ("weight", "weight") if is_linear else ("down.weight", "up.weight")
    if tensors.keys() != _NAMES[is_linear]:
        return False
    return tensors[last].shape[0] == outputs and tensors[first].shape[1] == inputs


def _delta(beside: _Beside) -> nn.Module:
    """Make the module that has these tensors."""
    parts = {place: _part(beside.of_place(place), config) for place, config in beside.configs.items()}
    if not beside.is_fused:
        return next(iter(parts.values()))
    last = beside.of_place(next(iter(parts)))
    return FusedDelta(dict(parts), last["weight" if "weight" in last else "up.weight"].shape[0])


def _part(tensors: Tensors, config: AuxiliaryConfig) -> Delta:
    made: Delta
    if config.kind == LINEAR:
        outputs, inputs = tensors["weight"].shape
        made = LinearDelta(inputs, outputs)
    else:
        hidden, inputs = tensors["down.weight"].shape
        made = MlpDelta(inputs, tensors["up.weight"].shape[0], hidden)
    made.load_state_dict(dict(tensors), assign=True)
    return made


def matrix_of(tensors: Tensors) -> torch.Tensor:
    """Return W with a row for each output of the matrix; zeros where query, key or value have none."""
    if "weight" in tensors:
        return tensors["weight"]
    parts = {part: tensors[f"{part}.weight"] for part in FUSED_PARTS if f"{part}.weight" in tensors}
    zeros = torch.zeros_like(next(iter(parts.values())))
    return torch.cat([parts.get(part, zeros) for part in FUSED_PARTS])
