"""Write a node's part of the AdapterHub folder, with the names and configs of the library itself.

Every node saves the adapters of its blocks under their names in the whole model; the coordinator merges these files
by bytes. The result loads with ``AutoAdapterModel.load_adapter(folder, use_safetensors=True, set_active=True)``.

The library's own writer is not used for the tensors: it refuses adapters that have one tensor under two names
(``ln_before``), and writes a language model's decoder out even where it is the token table, to which loading ties
it anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from edge.model.heads import HEAD
from edge.model.skeleton import ADAPTER, Skeleton

ADAPTER_FILE = "adapter.safetensors"
HEAD_FILES = ("head_config.json", "model_head.safetensors")
CONFIG_FILE = "adapter_config.json"


def adapter_files(skeleton: Skeleton, *, without_blocks: Collection[int], with_head: bool) -> dict[str, bytes]:
    """Write the files of the hosted blocks' adapters.

    Args:
        skeleton: of which only hosted blocks are left.
        without_blocks: hosted blocks to leave out.
        with_head: also the head and both configs.

    Returns:
        Name to content; no ``adapter.safetensors`` if there is no tensor in it.
    """
    from adapters.loading import AdapterLoader, PredictionHeadLoader

    model = skeleton.model
    tensors, config = _saved(AdapterLoader(model, use_safetensors=True), ADAPTER, CONFIG_FILE)
    prefix = f"{model.base_model_prefix}.{skeleton.layout.blocks_path}."
    unwanted = tuple(f"{prefix}{block}." for block in without_blocks)
    own = {name: value for name, value in tensors.items() if not name.startswith(unwanted)}
    files = {ADAPTER_FILE: _safetensors(own)} if own else {}
    if with_head:
        head, head_config = _saved(PredictionHeadLoader(model, use_safetensors=True), HEAD, HEAD_FILES[0])
        base = {parameter.data_ptr() for parameter in skeleton.base.parameters()}
        files[CONFIG_FILE] = config
        files[HEAD_FILES[0]] = head_config
        files[HEAD_FILES[1]] = _safetensors(
            {name: tensor for name, tensor in head.items() if tensor.data_ptr() not in base}
        )
    return files


def _saved(loader: Any, name: str, config_file: str) -> tuple[dict[str, torch.Tensor], bytes]:
    """Return the tensors that a loader of the library would save under ``name``, and the config as it is written."""
    tensors: dict[str, torch.Tensor] = {}

    def take(folder: str, wanted: Callable[[str], bool]) -> None:
        tensors.update(loader.weights_helper.state_dict(wanted))

    loader.weights_helper.save_weights = take
    with tempfile.TemporaryDirectory(prefix="ringtune-") as folder:
        loader.save(folder, name)
        return tensors, (Path(folder) / config_file).read_bytes()


def _safetensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save

    return bytes(save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}))
