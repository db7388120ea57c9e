"""Write a node's part of a run's result: of the AdapterHub folder, with the names and configs of the library itself.

Every node saves the adapters of its blocks under their names in the whole model; the coordinator merges these files
by bytes. The result loads with ``load_adapter(folder, use_safetensors=True, set_active=True)``, into an
``AutoAdapterModel`` where a head was trained, otherwise into the pretrained model with its own head.

Where the blocks' own weights trained, ``blocks.safetensors`` takes the place of the adapter: those weights by their
names in the whole model. It loads with ``load_state_dict(tensors, strict=False)``, and the head with ``load_head``.

Auxiliary models are saved the same way, and ``adapter.json`` says what they are
(``ringtune.models.adapters.auxiliary_file``). Adapters of the library beside them are in the same two files.

The library's own writer is not used for the tensors: it refuses adapters that have one tensor under two names
(``ln_before``), writes a pretrained head out, and makes copies of everything.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from edge.model.auxiliary.build import deltas_of
from edge.model.families.plugged import adapter_interface
from edge.model.heads import HEAD
from edge.model.result.own_heads import own_head
from edge.model.result.static_head import as_static
from edge.model.result.whole_model import model_files, model_tensors
from edge.model.skeleton import ADAPTER, Skeleton
from edge.model.tensor_bytes import is_finite, pieces_of
from ringtune.engine.diverged import LOWER_THE_RATE
from ringtune.errors import DivergedError
from ringtune.files.pieces import Pieces
from ringtune.files.safetensors_stream import write_tensors
from ringtune.models.adapters.auxiliary_file import describe
from ringtune.models.family import CLASSIFICATION
from ringtune.models.result_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    AUXILIARY_CONFIG_FILE,
    BLOCKS_FILE,
    HEAD_CONFIG_FILE,
    HEAD_FILE,
    INTERFACE_FILE,
    of_user,
)

Tensors = dict[str, torch.Tensor]


def result_files(
    skeleton: Skeleton,
    task: str,
    folder: Path,
    *,
    without_blocks: Collection[int],
    with_head: bool,
    merged: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, Pieces]:
    """Make this node's part of a run's result: of a whole model where all parameters train, else of an adapter folder.

    Args:
        skeleton: of which only hosted blocks are left.
        task: of the job.
        folder: of the base model.
        without_blocks: hosted blocks to leave out.
        with_head: also the head and the configs; with full parameters the embedding too.
        merged: adapters of hosted blocks that are inside their matrices, by block and name in it.

    Raises:
        DivergedError: a weight of a whole model is not finite.
    """
    if not skeleton.full_parameters:
        return adapter_files(skeleton, without_blocks=without_blocks, with_head=with_head, merged=merged)
    own = model_tensors(skeleton, task, without_blocks=without_blocks, with_owner=with_head)
    require_finite(own)
    return model_files(skeleton, task, folder, own, with_owner=with_head)


def require_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse what diverged in the last update, a piece at a time.

    Raises:
        DivergedError: names the first tensor with numbers that are not finite.
    """
    for name, tensor in tensors.items():
        if not is_finite(pieces_of(tensor)):
            what = f"{name} is not finite after the last step"
            raise DivergedError(f"the training diverged: {what}; {LOWER_THE_RATE}")


def adapter_files(
    skeleton: Skeleton,
    *,
    without_blocks: Collection[int],
    with_head: bool,
    merged: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, Pieces]:
    """Make the files of what trains in the hosted blocks; tensors are read when a file is gone through.

    Args:
        skeleton: of which only hosted blocks are left.
        without_blocks: hosted blocks to leave out.
        with_head: also the configs, and the head if it trains.
        merged: see ``result_files``.

    Returns:
        Name to content; no file without a tensor in it, and nothing of a head that is frozen.
    """
    found = saved_tensors(skeleton, without_blocks=without_blocks, with_head=with_head)
    if merged:
        prefix = _blocks_prefix(skeleton)
        found.setdefault(ADAPTER_FILE, {}).update({f"{prefix}{name}": value for name, value in merged.items()})
    return _with_configs(skeleton, found, with_head=with_head)


def users_files(
    skeleton: Skeleton,
    sets: Mapping[str, Tensors],
    *,
    without_blocks: Collection[int],
    with_head: bool,
    others: Mapping[str, Skeleton] = MappingProxyType({}),
) -> dict[str, Pieces]:
    """Make the files of a run in which each user has adapters of their own; tensors are read as in ``adapter_files``.

    Args:
        skeleton: of which only hosted blocks are left; its modules may have any of the sets, or be taken away.
        sets: by user, also of those without a tensor here: the tensors of hosted blocks, by block and name in it. What
            else the hosted blocks have, such as the adapters of private blocks, every user gets as it is.
        without_blocks: hosted blocks to leave out.
        with_head: see ``adapter_files``.
        others: by user whose adapters are of another kind: the hosted blocks with that kind.

    Returns:
        Name to content: ``users/NAME/adapter.safetensors`` of each user, and once what is the same for all. Who has
        another kind also has the file that describes it.

    Raises:
        DivergedError: a weight of a user is not finite.
        PlanError: a user's name is not allowed.
    """
    own = saved_tensors(skeleton, without_blocks=without_blocks, with_head=with_head)
    common = own.pop(ADAPTER_FILE, {})
    files = _with_configs(skeleton, own, with_head=with_head)
    of_kind: dict[int, Tensors] = {id(skeleton): common}
    for user, tensors in sets.items():
        require_finite({f"{name} of user {user}": value for name, value in tensors.items()})
        kind = others.get(user, skeleton)
        if id(kind) not in of_kind:
            saved = saved_tensors(kind, without_blocks=without_blocks, with_head=False)
            of_kind[id(kind)] = saved.get(ADAPTER_FILE, {})
        if found := _set_by_name(kind, of_kind[id(kind)], tensors, without_blocks):
            files[of_user(user, ADAPTER_FILE)] = _written(found)
        if with_head and user in others:
            files |= {of_user(user, name): content for name, content in _descriptions(kind).items()}
    return files


def _set_by_name(
    skeleton: Skeleton, common: Mapping[str, torch.Tensor], tensors: Tensors, without_blocks: Collection[int]
) -> Tensors:
    """Return a user's set, and what all users have besides, by name in the whole model."""
    prefix, names = _blocks_prefix(skeleton), _names_of_parameters(skeleton)
    unwanted = tuple(f"{block}." for block in without_blocks)
    found = {name: tensors.get(names.get(value.data_ptr(), ""), value) for name, value in common.items()}
    return found | {f"{prefix}{name}": value for name, value in tensors.items() if not name.startswith(unwanted)}


def _names_of_parameters(skeleton: Skeleton) -> dict[int, str]:
    """Name each parameter of a block by its place in memory: a file may have it under a second name."""
    return {
        parameter.data_ptr(): f"{index}.{name}"
        for index, block in enumerate(skeleton.blocks)
        for name, parameter in block.named_parameters()
    }


def _blocks_prefix(skeleton: Skeleton) -> str:
    return f"{skeleton.model.base_model_prefix}.{skeleton.layout.blocks_path}."


def _with_configs(skeleton: Skeleton, found: Mapping[str, Tensors], *, with_head: bool) -> dict[str, Pieces]:
    """Write these tensors to files, and with the head the configs."""
    files = {name: _written(tensors) for name, tensors in found.items()}
    if with_head:
        files |= _descriptions(skeleton) | _interface(skeleton)
    if HEAD_FILE in files:
        files[HEAD_CONFIG_FILE] = Pieces.of(_head(skeleton)[1])
    return files


def _written(tensors: Mapping[str, torch.Tensor]) -> Pieces:
    return write_tensors({key: pieces_of(value) for key, value in tensors.items()}, metadata={"format": "pt"})


def _descriptions(skeleton: Skeleton) -> dict[str, Pieces]:
    """Write the file that describes the adapter; none where the blocks' own weights train."""
    if skeleton.auxiliary:
        return {AUXILIARY_CONFIG_FILE: Pieces.of(_description(skeleton))}
    return {} if skeleton.own_weights else {ADAPTER_CONFIG_FILE: Pieces.of(_adapter(skeleton)[1])}


def _interface(skeleton: Skeleton) -> dict[str, Pieces]:
    """Write the interface by which the library's adapters are plugged in, for a family without a class of its own."""
    if not skeleton.layout.plugged or skeleton.auxiliary or skeleton.own_weights:
        return {}
    with tempfile.TemporaryDirectory(prefix="ringtune-") as folder:
        adapter_interface(skeleton.layout)._save(folder, skeleton.model.config)
        return {INTERFACE_FILE: Pieces.of((Path(folder) / INTERFACE_FILE).read_bytes())}


def saved_tensors(skeleton: Skeleton, *, without_blocks: Collection[int], with_head: bool) -> dict[str, Tensors]:
    """Return the tensors of the model that belong in each file, by name; see ``adapter_files``."""
    prefix = _blocks_prefix(skeleton)
    unwanted = tuple(f"{prefix}{block}." for block in without_blocks)
    whole = _own_tensors(skeleton, prefix, _trained_names(skeleton))
    whole |= _adapter(skeleton)[0] if skeleton.has_library else {}
    own = {name: value for name, value in whole.items() if not name.startswith(unwanted)}
    files = {
        BLOCKS_FILE if skeleton.own_weights else ADAPTER_FILE: own,
        HEAD_FILE: _trained_head(skeleton) if with_head else {},
    }
    return {name: tensors for name, tensors in files.items() if tensors}


def _trained_names(skeleton: Skeleton) -> dict[int, tuple[str, ...]]:
    """Return the names of what trains in each hosted block: an auxiliary model, or the block's own weights."""
    hosted = {index: block for index, block in enumerate(skeleton.blocks) if list(block.parameters())}
    if skeleton.auxiliary:
        return {
            index: tuple(f"{path}.{name}" for path, delta in deltas_of(block) for name, _ in delta.named_parameters())
            for index, block in hosted.items()
        }
    return dict.fromkeys(hosted, skeleton.own_weights)


def _own_tensors(skeleton: Skeleton, prefix: str, names: Mapping[int, tuple[str, ...]]) -> Tensors:
    """Return these parameters of blocks, by name in the whole model."""
    return {
        f"{prefix}{index}.{name}": skeleton.blocks[index].get_parameter(name).detach()
        for index, found in names.items()
        for name in found
    }


def _description(skeleton: Skeleton) -> bytes:
    described = describe(
        skeleton.auxiliary,
        name=ADAPTER,
        model_type=skeleton.layout.model_type,
        model_name=skeleton.model.config.name_or_path,
        library=json.loads(_adapter(skeleton)[1]) if skeleton.has_library else None,
    )
    return (json.dumps(described, indent=2) + "\n").encode()


def _trained_head(skeleton: Skeleton) -> Tensors:
    """Return the tensors of the head without the frozen ones, which the pretrained model has."""
    frozen = {value.data_ptr() for value in skeleton.model.heads[HEAD].parameters() if not value.requires_grad}
    return {name: value for name, value in _head(skeleton)[0].items() if value.data_ptr() not in frozen}


def _adapter(skeleton: Skeleton) -> tuple[Tensors, bytes]:
    from adapters.loading import AdapterLoader

    return _saved(AdapterLoader(skeleton.model, use_safetensors=True), ADAPTER, ADAPTER_CONFIG_FILE)


def _head(skeleton: Skeleton) -> tuple[Tensors, bytes]:
    from adapters.loading import PredictionHeadLoader

    found = _saved(PredictionHeadLoader(skeleton.model, use_safetensors=True), HEAD, HEAD_CONFIG_FILE)
    form = own_head(skeleton.layout.model_type, CLASSIFICATION) if skeleton.layout.plugged else None
    return found if form is None else as_static(*found, form)


def _saved(loader: Any, name: str, config_file: str) -> tuple[Tensors, bytes]:
    """Return the tensors that a loader of the library would save under ``name``, and the config as it is written."""
    tensors: Tensors = {}

    def take(folder: str, wanted: Callable[[str], bool]) -> None:
        tensors.update(loader.weights_helper.state_dict(wanted))

    loader.weights_helper.save_weights = take
    with tempfile.TemporaryDirectory(prefix="ringtune-") as folder:
        loader.save(folder, name)
        return tensors, (Path(folder) / config_file).read_bytes()
