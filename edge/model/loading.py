"""Load a saved adapter and head into what a node hosts: the way back of ``edge.model.saving``.

Every node gets the whole AdapterHub folder and takes only the tensors of its own blocks, and at an owner the
head, by their names in the whole model. It writes to what it would save itself and to nothing else, so a file
can't reach a base weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from edge.model.saving import ADAPTER_FILE, adapter_files
from edge.model.skeleton import Skeleton
from ringtune.errors import IntegrityError


def load_saved(skeleton: Skeleton, folder: Path, *, with_head: bool) -> None:
    """Replace the initial values of the hosted adapters, and of the head, by saved ones.

    Args:
        skeleton: of which only hosted blocks are left.
        folder: what ``saving`` wrote, merged.
        with_head: also the head; for an owner.

    Raises:
        IntegrityError: a file is damaged, or a tensor is missing, unknown, or of another shape.
    """
    from safetensors.torch import load

    prefix = f"{skeleton.model.base_model_prefix}.{skeleton.layout.blocks_path}."
    hosted = tuple(f"{prefix}{index}." for index, block in enumerate(skeleton.blocks) if list(block.parameters()))
    own = adapter_files(skeleton, without_blocks=(), with_head=with_head)
    present = skeleton.model.state_dict()
    for name, content in sorted(own.items()):
        if name.endswith(".safetensors"):
            targets = {tensor: present[tensor] for tensor in load(content)}
            _load(folder / name, targets, elsewhere=prefix if name == ADAPTER_FILE else "", hosted=hosted)


def _load(path: Path, targets: Mapping[str, torch.Tensor], *, elsewhere: str, hosted: tuple[str, ...]) -> None:
    """Copy every target from a file.

    Args:
        path: of the file.
        targets: what this node would save itself, by name.
        elsewhere: how tensors of other nodes begin; empty if there are none.
        hosted: how those of this node begin.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = set(file.keys())
            others = {name for name in names if elsewhere and name.startswith(elsewhere)}
            others -= {name for name in others if name.startswith(hosted)}
            _check_names(path, names - others, targets)
            for name in sorted(targets):
                _copy(path, name, file.get_tensor(name), targets[name])
    except (SafetensorError, OSError) as error:
        raise IntegrityError(f"{path.name} is damaged ({error}); copy the run's folder again") from error


def _check_names(path: Path, names: set[str], targets: Mapping[str, torch.Tensor]) -> None:
    missing, unknown = sorted(targets.keys() - names), sorted(names - targets.keys())
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which this model has not"
        raise IntegrityError(f"{path.name} {what}; it belongs to another adapter.config, model or task")


def _copy(path: Path, name: str, value: torch.Tensor, target: torch.Tensor) -> None:
    if value.shape != target.shape:
        raise IntegrityError(
            f"{path.name} has {name} of shape {list(value.shape)}, this model needs {list(target.shape)}; it belongs "
            "to another adapter.config, model or number of classes"
        )
    with torch.no_grad():
        target.copy_(value)
