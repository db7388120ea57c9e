"""Load the auxiliary models of a run into a plain model, or add them to its matrices.

Example, with the folder ``adapter`` of a run::

    from edge.model.auxiliary.loading import load_auxiliary
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("models/gpt2")
    load_auxiliary(model, "run/adapter")
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from edge.model.auxiliary.modules import FUSED_PARTS, FusedDelta, LinearDelta, MlpDelta, put_beside
from edge.model.layouts import LAYOUTS
from ringtune.errors import IntegrityError, UsageError
from ringtune.models.auxiliary_config import LINEAR
from ringtune.models.auxiliary_file import Described, described
from ringtune.models.result_files import ADAPTER_FILE, AUXILIARY_CONFIG_FILE

Tensors = Mapping[str, torch.Tensor]


class _Beside(NamedTuple):
    """A matrix of a model, and the tensors of what stands beside it, by the ends of their names."""

    path: str
    matrix: nn.Module
    tensors: dict[str, torch.Tensor]


def load_auxiliary(model: nn.Module, folder: str | Path) -> nn.Module:
    """Let a model compute with the auxiliary models of a run; they do not train.

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
    found = list(_matrices(model, Path(folder), facts))
    for path, matrix, _ in found:
        if hasattr(matrix, facts.name):
            raise UsageError(f"{path} has an adapter {facts.name!r} already; load into a fresh model")
    for _, matrix, tensors in found:
        delta = _delta(facts, tensors)
        weight = matrix.get_parameter("weight")
        delta.to(device=weight.device, dtype=weight.dtype).requires_grad_(False)
        put_beside(matrix, delta, name=facts.name, alpha=facts.config.alpha)
    return model


def merge_auxiliary(model: nn.Module, folder: str | Path) -> nn.Module:
    """Add the auxiliary models of a run to the matrices of a model, which then computes the same without them.

    Args:
        model: as for ``load_auxiliary``.
        folder: as for ``load_auxiliary``; of the kind ``linear``.

    Returns:
        The same model, which ``save_pretrained`` writes as a normal one.

    Raises:
        IntegrityError: a file is damaged, or belongs to another model.
        UsageError: it is an ``mlp``, which is no matrix.
    """
    facts = _facts(Path(folder))
    if facts.config.kind != LINEAR:
        raise UsageError(
            f"{folder} has auxiliary models of the kind {facts.config.kind!r}, and only {LINEAR!r} is a matrix; load "
            "them with load_auxiliary"
        )
    inputs_first = LAYOUTS[facts.model_type].inputs_first
    for _, matrix, tensors in list(_matrices(model, Path(folder), facts)):
        weight, change = matrix.get_parameter("weight"), matrix_of(tensors)
        with torch.no_grad():
            change = (change.t() if inputs_first else change).to(device=weight.device, dtype=weight.dtype)
            weight.add_(change, alpha=facts.config.alpha)
    return model


def _facts(folder: Path) -> Described:
    path = folder / AUXILIARY_CONFIG_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} can't be read ({error}); copy the run's folder again") from error
    if not isinstance(content, dict):
        raise IntegrityError(f"{path} is no table; copy the run's folder again")
    return described(content, where=str(path))


def _matrices(model: nn.Module, folder: Path, facts: Described) -> Iterator[_Beside]:
    """Yield every matrix that something stands beside, and check that it fits."""
    for path, tensors in sorted(_tensors(folder / ADAPTER_FILE, facts.name).items()):
        matrix = _module(model, path)
        if matrix is None or not _fits(matrix, facts, tensors):
            raise IntegrityError(
                f"{folder / ADAPTER_FILE} has tensors beside {path}, which this model does not have in that shape; "
                f"take the base model, a {facts.model_type}"
            )
        yield _Beside(path, matrix, tensors)


def _tensors(path: Path, name: str) -> dict[str, dict[str, torch.Tensor]]:
    """Read all tensors: path of a matrix -> what follows the adapter's name -> tensor."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise IntegrityError(f"{path} can't be read ({error}); copy the run's folder again") from error
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        matrix, _, part = key.partition(f".{name}.")
        found.setdefault(matrix, {})[part] = tensor
    return found


def _module(model: nn.Module, path: str) -> nn.Module | None:
    """Find a module by its path in a model with a head; a base model has no such prefix."""
    for candidate in (path, path.partition(".")[2]):
        try:
            return model.get_submodule(candidate)
        except AttributeError:
            continue
    return None


def _fits(matrix: nn.Module, facts: Described, tensors: Tensors) -> bool:
    """Whether a matrix has the inputs and outputs of what stands beside it."""
    weight = getattr(matrix, "weight", None)
    if weight is None or weight.dim() != 2:
        return False
    shape = tuple(reversed(weight.shape)) if LAYOUTS[facts.model_type].inputs_first else tuple(weight.shape)
    first, last = ("weight", "weight") if facts.config.kind == LINEAR else ("down.weight", "up.weight")
    parts = [found for part in FUSED_PARTS if (found := _part(tensors, part))] or [dict(tensors)]
    width = shape[0] // len(FUSED_PARTS) if _is_fused(tensors) else shape[0]
    wanted = {first, last} if facts.config.kind == LINEAR else {first, last, "down.bias", "up.bias"}
    return all(
        part.keys() == wanted and part[last].shape[0] == width and part[first].shape[1] == shape[1] for part in parts
    )


def _is_fused(tensors: Tensors) -> bool:
    return any(name.startswith(FUSED_PARTS) for name in tensors)


def _part(tensors: Tensors, part: str) -> dict[str, torch.Tensor]:
    start = f"{part}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _delta(facts: Described, tensors: Tensors) -> nn.Module:
    """Make the module that has these tensors."""
    if _is_fused(tensors):
        parts = {part: _delta(facts, found) for part in FUSED_PARTS if (found := _part(tensors, part))}
        return FusedDelta(parts, _outputs(next(_part(tensors, part) for part in parts)))
    made: LinearDelta | MlpDelta
    if facts.config.kind == LINEAR:
        outputs, inputs = tensors["weight"].shape
        made = LinearDelta(inputs, outputs)
    else:
        hidden, inputs = tensors["down.weight"].shape
        made = MlpDelta(inputs, _outputs(tensors), hidden)
    made.load_state_dict(dict(tensors), assign=True)
    return made


def _outputs(tensors: Tensors) -> int:
    """Outputs of the last matrix of a g."""
    return next(tensor for name, tensor in tensors.items() if name in ("weight", "up.weight")).shape[0]


def matrix_of(tensors: Tensors) -> torch.Tensor:
    """Return W with a row for each output of the matrix; zeros where query, key or value have none."""
    if not _is_fused(tensors):
        return tensors["weight"]
    parts = {part: found["weight"] for part in FUSED_PARTS if (found := _part(tensors, part))}
    zeros = torch.zeros_like(next(iter(parts.values())))
    return torch.cat([parts.get(part, zeros) for part in FUSED_PARTS])
