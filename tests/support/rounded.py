"""What frozen weights that are held small have to equal: weights that were rounded once, in a folder of their own.

Nothing of the code that holds them is used here; which tensors are frozen matrices is said by the model's shapes.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ringtune.schedule.course import FROZEN_DTYPES, FrozenWeights

LORA = "lora[r=4, attn_matrices=['q','k','v'], intermediate_lora=True, output_lora=True, init_weights='bert']"
"""LoRA on all matrices."""

WAYS = [FrozenWeights(dtype=dtype, native=native) for dtype in FROZEN_DTYPES for native in (False, True)]
"""All ways to hold frozen weights small."""


NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The codebook of QLoRA, appendix E."""

LEVELS = (
    *(0.0, 1.0),
    *(
        sign * 10.0 ** (power - 6) * (0.1 + 0.9 * (2 * at + 1) / 2 ** (power + 1))
        for power in range(7)
        for at in range(2**power)
        for sign in (1, -1)
    ),
)
"""The values of the 8 bits of a scale: seven powers of ten, each cut into twice as many parts as the one below."""


def nearest(numbers: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    """Each number as the nearest of some values."""
    known = torch.tensor(sorted(values))
    return known[(numbers.unsqueeze(-1) - known).abs().argmin(dim=-1)]


def in_nf4(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix with 4 bits a number and 8 bits for the scale of each 64, as QLoRA says it, a block after the other."""
    blocks = torch.split(matrix.flatten(), 64)
    largest = torch.stack([block.abs().max() for block in blocks])
    mean = torch.tensor(math.fsum(largest.tolist()) / len(largest))
    scales = []
    for group in torch.split(largest - mean, 256):
        most = group.abs().max()
        scales += (nearest(group / most, LEVELS) * most + mean if most else group + mean).tolist()
    found = [nearest(block / block.abs().max().clamp_min(1e-38), NF4_VALUES) for block in blocks]
    return torch.cat([block * scale for block, scale in zip(found, scales, strict=True)]).view(matrix.shape)


def rounded(matrix: torch.Tensor, dtype: str) -> torch.Tensor:
    """A matrix as float32, each number rounded to bfloat16, to 1/127 of the largest in its row, or to 4 bits."""
    if dtype == "bfloat16":
        return matrix.bfloat16().float()
    if dtype == "nf4":
        return in_nf4(matrix)
    found = matrix.clone()
    for row in found:
        step = row.abs().max() / 127
        if step > 0:
            row.copy_(torch.round(row / step) * step)
    return found


def write_rounded(folder: Path, target: Path, dtype: str, *, trained: tuple[str, ...] = ()) -> Path:
    """Copy a model folder with its matrices rounded."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and not name.endswith(trained or "\0"):
            is_in_block = any(part.isdigit() for part in name.split("."))
            tensors[name] = rounded(tensor, dtype if dtype != "nf4" or is_in_block else "int8")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
