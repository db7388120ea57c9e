"""A node's part of the AdapterHub folder, written by the library itself.

Every node saves the adapters of its blocks under their names in the whole model; the coordinator merges these files
by bytes. The result loads with ``AutoAdapterModel.load_adapter(folder, use_safetensors=True, set_active=True)``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path

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
            skeleton.model.save_head(name, HEAD, use_safetensors=True)
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    prefix = f"{skeleton.model.base_model_prefix}.{skeleton.family.blocks_path}."
    unwanted = tuple(f"{prefix}{block}." for block in without_blocks)
    tensors = {key: value for key, value in load(files.pop(ADAPTER_FILE)).items() if not key.startswith(unwanted)}
    kept = {key: value for key, value in files.items() if with_head and key in (*HEAD_FILES, CONFIG_FILE)}
    return kept | ({ADAPTER_FILE: bytes(save(tensors))} if tensors else {})
