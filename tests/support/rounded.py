"""What frozen weights that are held small have to equal: weights that were rounded once, in a folder of their own.

Nothing of the code that holds them is used here; which tensors are frozen matrices is said by the model's shapes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ringtune.schedule.course import FROZEN_DTYPES, FrozenWeights

LORA = "lora[r=4, attn_matrices=['q','k','v'], intermediate_lora=True, output_lora=True, init_weights='bert']"
"""LoRA on all matrices."""

WAYS = [FrozenWeights(dtype=dtype, native=native) for dtype in FROZEN_DTYPES for native in (False, True)]
"""All ways to hold frozen weights small."""


def rounded(matrix: torch.Tensor, dtype: str) -> torch.Tensor:
    """A matrix as float32, each number rounded to bfloat16, or to 1/127 of the largest in its row."""
    if dtype == "bfloat16":
        return matrix.bfloat16().float()
    found = matrix.clone()
    for row in found:
        step = row.abs().max() / 127
        if step > 0:
            row.copy_(torch.round(row / step) * step)
    return found


def write_rounded(folder: Path, target: Path, dtype: str, *, trained: tuple[str, ...] = ()) -> Path:
    """Copy a model folder with its matrices rounded.

    Args:
        folder: with ``model.safetensors`` in float32.
        target: to be made.
        dtype: ``bfloat16`` or ``int8``.
        trained: ends of the names of weights that train, and stay as they are.

    Returns:
        The new folder.
    """
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and not name.endswith(trained or "\0"):
            tensors[name] = rounded(tensor, dtype)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
