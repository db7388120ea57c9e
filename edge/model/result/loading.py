"""Load a saved result into what a node hosts: the way back of ``edge.model.result.saving``.

Every node gets the whole folder and takes only the tensors of its own blocks, and at an owner the head, by their names
in the whole model. It writes to what it would save itself and to nothing else, so a file can't reach a weight that does
not train.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from edge.model.result.saving import saved_tensors
from edge.model.result.whole_model import model_tensors
from edge.model.skeleton import Skeleton
from edge.model.tensor_bytes import fill
from ringtune.errors import IntegrityError
from ringtune.files.pieces import FilePieces
from ringtune.files.safetensors_stream import TensorFile
from ringtune.models.result_files import HEAD_FILE
from ringtune.models.tensors import WEIGHTS_FILE


def load_saved(skeleton: Skeleton, task: str, folder: Path, *, with_head: bool) -> None:
    """Replace the initial values of what trains in the hosted blocks, and of the head, by saved ones.

    Args:
        skeleton: of which only hosted blocks are left.
        task: of the job.
        folder: what ``saving`` wrote, merged. Of a whole model it may have this node's part alone.
        with_head: also the head, if it trains; for an owner. A frozen one that an old folder holds is not read.

    Raises:
        IntegrityError: a file is damaged, or a tensor is missing, unknown, or of another shape.
    """
    prefix = f"{skeleton.model.base_model_prefix}.{skeleton.layout.blocks_path}."
    hosted = tuple(f"{prefix}{index}." for index, block in enumerate(skeleton.blocks) if list(block.parameters()))
    if skeleton.full_parameters:
        _load_model(folder / WEIGHTS_FILE, model_tensors(skeleton, task, without_blocks=(), with_owner=with_head))
        return
    own = saved_tensors(skeleton, without_blocks=(), with_head=with_head)
    for name, targets in sorted(own.items()):
        _load(folder / name, targets, elsewhere="" if name == HEAD_FILE else prefix, hosted=hosted)


def _load_model(path: Path, targets: Mapping[str, torch.Tensor]) -> None:
    """Copy every target from the weights of a model, in which others may be, such as a pooler."""
    try:
        file = TensorFile(FilePieces(path), where=path.name)
        _check_names(path, file.infos.keys() & targets.keys(), targets)
        _fill_all(path, file, targets)
    except OSError as error:
        raise IntegrityError(f"{path.name} can't be read ({error}); copy the run's folder again") from error


def _load(path: Path, targets: Mapping[str, torch.Tensor], *, elsewhere: str, hosted: tuple[str, ...]) -> None:
    """Copy every target from a file.

    Args:
        path: of the file.
        targets: what this node would save itself, by name.
        elsewhere: how tensors of other nodes begin; empty if there are none.
        hosted: how those of this node begin.
    """
    try:
        file = TensorFile(FilePieces(path), where=path.name)
        others = {name for name in file.infos if elsewhere and name.startswith(elsewhere)}
        others -= {name for name in others if name.startswith(hosted)}
        _check_names(path, file.infos.keys() - others, targets)
        _fill_all(path, file, targets)
    except OSError as error:
        raise IntegrityError(f"{path.name} can't be read ({error}); copy the run's folder again") from error


def _fill_all(path: Path, file: TensorFile, targets: Mapping[str, torch.Tensor]) -> None:
    """Check all shapes before anything is written."""
    for name in sorted(targets):
        _check_shape(path, name, file.infos[name].shape, targets[name])
    for name in sorted(targets):
        fill(targets[name], file.tensor(name))


def _check_names(path: Path, names: set[str], targets: Mapping[str, torch.Tensor]) -> None:
    missing, unknown = sorted(targets.keys() - names), sorted(names - targets.keys())
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which this model has not"
        raise IntegrityError(f"{path.name} {what}; it belongs to another adapter.config, model or task")


def _check_shape(path: Path, name: str, shape: tuple[int, ...], target: torch.Tensor) -> None:
    if shape != tuple(target.shape):
        raise IntegrityError(
            f"{path.name} has {name} of shape {list(shape)}, this model needs {list(target.shape)}; it belongs "
            "to another adapter.config, model or number of classes"
        )
