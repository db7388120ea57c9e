"""A node's part of the AdapterHub folder, written by the library itself.

Every node saves the adapters of its blocks under their names in the whole model; the coordinator merges these files
by bytes. A decoder that is the token table is not saved with a language model's head: loading ties it anew. The
result loads with ``AutoAdapterModel.load_adapter(folder, use_safetensors=True, set_active=True)``.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import nn

from edge.model.heads import HEAD
from edge.model.skeleton import ADAPTER, Skeleton

ADAPTER_FILE = "adapter.safetensors"
HEAD_FILES = ("head_config.json", "model_head.safetensors")
CONFIG_FILE = "adapter_config.json"


def adapter_folder(skeleton: Skeleton, *, without_blocks: Collection[int], with_head: bool) -> dict[str, bytes]:
    """The files of the hosted blocks' adapters.

    Args:
        skeleton: of which only hosted blocks are left.
        without_blocks: hosted blocks to leave out.
        with_head: also the head and both configs.

    Returns:
        Name to content; no ``adapter.safetensors`` if there is no tensor in it.
    """
    from safetensors.torch import load, save

    with tempfile.TemporaryDirectory(prefix="ringtune-") as name:
        folder = Path(name)
        skeleton.model.save_adapter(name, ADAPTER, with_head=False, use_safetensors=True)
        if with_head:
            with _without_tied(skeleton):
                skeleton.model.save_head(name, HEAD, use_safetensors=True)
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    prefix = f"{skeleton.model.base_model_prefix}.{skeleton.family.blocks_path}."
    unwanted = tuple(f"{prefix}{block}." for block in without_blocks)
    tensors = {key: value for key, value in load(files.pop(ADAPTER_FILE)).items() if not key.startswith(unwanted)}
    kept = {key: value for key, value in files.items() if with_head and key in (*HEAD_FILES, CONFIG_FILE)}
    if with_head:
        head = {key: value for key, value in load(kept[HEAD_FILES[1]]).items() if value.numel()}
        kept[HEAD_FILES[1]] = bytes(save(head))
    return kept | ({ADAPTER_FILE: bytes(save(tensors))} if tensors else {})


@contextlib.contextmanager
def _without_tied(skeleton: Skeleton) -> Iterator[None]:
    """While open, a head's tensor that is one of the base model is empty: loading ties it anew."""
    base = {id(parameter) for parameter in skeleton.base.parameters()}
    tied = [
        (module, name, parameter)
        for module in skeleton.model.heads[HEAD].modules()
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) in base
    ]
    for module, name, _ in tied:
        setattr(module, name, nn.Parameter(torch.empty(0), requires_grad=False))
    try:
        yield
    finally:
        for module, name, parameter in tied:
            setattr(module, name, parameter)
