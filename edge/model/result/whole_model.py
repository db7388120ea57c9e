"""Write a node's part of a whole model: a normal folder of transformers with every parameter, for full-parameter runs.

Every node saves its blocks under the names that a model with a head gives them. The node with the newest head adds
embedding, head, what nobody trains (a pooler), the config, and the tokenizer's files. The coordinator merges the parts
by bytes; a tensor that is tied to the token table is in no part.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from edge.model.heads import HEAD
from edge.model.result.own_heads import own_head
from edge.model.skeleton import Skeleton
from edge.model.tensor_bytes import pieces_of
from ringtune.files.pieces import FilePieces, Pieces
from ringtune.files.safetensors_stream import TensorPieces, write_tensors
from ringtune.models.family import LM_HEAD
from ringtune.models.folder import with_old_rope
from ringtune.models.tensors import CONFIG_FILE, MODEL_SIDE_FILES, WEIGHTS_FILE, StoredTensor, base_name, read_headers

Tensors = dict[str, torch.Tensor]

_LOCAL_KEYS: Final = ("_name_or_path", "name_or_path", "special_tokens_map_file", "tokenizer_file", "auto_map")
_REPLACED_KEYS: Final = ("torch_dtype", "num_labels", "prediction_heads", "adapters", "id2label", "label2id")
_HEAD_PREFIX: Final = f"heads.{HEAD}."


def model_files(
    skeleton: Skeleton, task: str, folder: Path, own: Mapping[str, torch.Tensor], *, with_owner: bool
) -> dict[str, Pieces]:
    """Make this node's part of the folder of the trained model; tensors are read when a file is gone through.

    Args:
        skeleton: of which only hosted blocks are left.
        task: of the job.
        folder: of the base model.
        own: from ``model_tensors``.
        with_owner: also what nobody trains, the config and the tokenizer's files.

    Returns:
        Name to content; no file without a tensor in it.
    """
    tensors = {name: pieces_of(value) for name, value in own.items()}
    files = description_files(skeleton, task, folder) if with_owner else {}
    if with_owner:
        tensors |= untouched_tensors(skeleton, folder, without=own)
    return files | ({WEIGHTS_FILE: write_tensors(tensors, metadata={"format": "pt"})} if tensors else {})


def model_tensors(skeleton: Skeleton, task: str, *, without_blocks: Collection[int], with_owner: bool) -> Tensors:
    """Return every parameter that this node saves of the model, by its name in the file.

    Args:
        skeleton: of which only hosted blocks are left.
        task: of the job.
        without_blocks: hosted blocks to leave out.
        with_owner: also the embedding, what comes after the last block, and the head.
    """
    prefix = f"{skeleton.model.base_model_prefix}."
    found: Tensors = {}
    for index, block in enumerate(skeleton.blocks):
        if index not in without_blocks:
            where = f"{prefix}{skeleton.layout.blocks_path}.{index}."
            found |= {where + name: value.detach() for name, value in block.named_parameters()}
    if with_owner:
        found |= {prefix + name: value for name, value in _around_blocks(skeleton).items()}
        found |= _head_tensors(skeleton, task)
    return found


def _around_blocks(skeleton: Skeleton) -> Tensors:
    """Return the parameters of the base model outside the blocks, by name in it."""
    own = tuple(f"{path}." for path in skeleton.layout.owner_paths)
    return {name: value.detach() for name, value in skeleton.base.named_parameters() if name.startswith(own)}


def _head_tensors(skeleton: Skeleton, task: str) -> Tensors:
    """Return the head's parameters by their names in the file, without a decoder that is the token table."""
    form = own_head(skeleton.layout.model_type, task)
    head = skeleton.model.heads[HEAD]
    decoder = head.get_output_embeddings()
    if decoder is not None:
        tied = decoder.weight.data_ptr() == skeleton.model.get_input_embeddings().weight.data_ptr()
        return {} if tied else {LM_HEAD: decoder.weight.detach()}
    found: Tensors = {}
    for name, value in head.named_parameters():
        layer, _, rest = name.partition(".")
        found[f"{form.layers[layer]}.{rest}" if form else _HEAD_PREFIX + name] = value.detach()
    return found


def untouched_tensors(skeleton: Skeleton, folder: Path, *, without: Collection[str]) -> dict[str, TensorPieces]:
    """Return what the base folder has of the base model and no node hosts, such as a pooler, as it is there.

    Args:
        skeleton: of the model.
        folder: of the base model; it may lack such tensors.
        without: names in the result that something else has already.
    """
    layout, base = skeleton.layout, skeleton.base
    hosted = tuple(f"{path}." for path in (layout.blocks_path, *layout.owner_paths))
    children = tuple(f"{name}." for name, _ in base.named_children())
    found: dict[str, TensorPieces] = {}
    for stored_name, stored in read_headers(folder).items():
        inside = base_name(stored_name, layout)
        name = f"{skeleton.model.base_model_prefix}.{inside}"
        if inside.startswith(children) and not inside.startswith(hosted) and name not in without:
            found[name] = _as_stored(stored)
    return found


def _as_stored(stored: StoredTensor) -> TensorPieces:
    info = stored.info
    return TensorPieces(info.dtype, info.shape, FilePieces(stored.path, info.offset, info.nbytes))


def description_files(skeleton: Skeleton, task: str, folder: Path) -> dict[str, Pieces]:
    """Return ``config.json`` of the result, and the files beside the weights, without a path of this machine.

    Args:
        skeleton: with the head.
        task: of the job.
        folder: of the base model.
    """
    files = {CONFIG_FILE: _json(_config(skeleton, task, with_old_rope(_read(folder / CONFIG_FILE))))}
    for name in MODEL_SIDE_FILES:
        path = folder / name
        if path.is_file():
            files[name] = _json(_without_local(_read(path))) if name in _WITH_PATHS else FilePieces(path)
    return files


_WITH_PATHS: Final = ("generation_config.json", "preprocessor_config.json", "tokenizer_config.json")


def _config(skeleton: Skeleton, task: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base model's config with the head and the type of numbers that the result has."""
    config = {key: value for key, value in _without_local(base).items() if key not in _REPLACED_KEYS}
    form = own_head(skeleton.layout.model_type, task)
    head = dict(skeleton.model.heads[HEAD].config)
    labels = head.get("label2id")
    if labels:
        config |= {"id2label": {str(index): label for label, index in labels.items()}, "label2id": dict(labels)}
    config["architectures"] = [form.architecture if form else type(skeleton.base).__name__]
    if form is None:
        config["prediction_heads"] = {HEAD: head}
    parameter = next(skeleton.base.get_submodule(skeleton.layout.owner_paths[0]).parameters())
    return config | {"dtype": str(parameter.dtype).removeprefix("torch.")}


def _without_local(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in _LOCAL_KEYS}


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _json(values: Mapping[str, Any]) -> Pieces:
    return Pieces.of((json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode())
