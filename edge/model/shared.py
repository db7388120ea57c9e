"""A second model with other adapters on the frozen weights of a first one, which both hold once.

Users whose adapters are of another kind need modules that have this kind (``ringtune.jobs.user_adapters``). What is
frozen is the same for all, also where it is held in 16 or 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from edge.model.auxiliary.build import start_auxiliary
from edge.model.skeleton import ADAPTER, Skeleton, build_skeleton
from edge.model.slice import Empty
from ringtune.jobs.job import Job


def sharing(
    first: Skeleton, folder: Path, job: Job, *, blocks: Iterable[int], dtype: torch.dtype, device: torch.device
) -> Skeleton:
    """Build a model with the adapters of ``job`` on the frozen weights of another one.

    Args:
        first: after ``materialise``; embedding and head stay its own.
        folder: of the model; only its configuration is read.
        job: with another ``adapter.config`` than that of ``first``.
        blocks: that are real in ``first``.
        dtype: of the computation.
        device: of the computation.

    Raises:
        JobError: see ``build_skeleton``.
    """
    with torch.random.fork_rng(devices=[]):
        found = build_skeleton(folder, job)
    wanted = set(blocks)
    for index in range(len(found.blocks)):
        if index not in wanted:
            found.blocks[index] = Empty()
            continue
        if found.auxiliary:
            start_auxiliary(found.blocks[index], seed=found.seed, index=index)
        _share(found.blocks[index], first.blocks[index])
        for path, module in found.blocks[index].named_modules():
            if path.split(".")[-1] == ADAPTER:
                module.to(device=device, dtype=dtype)
    root = found.layout.blocks_path.split(".")[0]
    for name, module in first.base.named_children():
        if name != root:
            setattr(found.base, name, module)
    return found


def _share(block: nn.Module, first: nn.Module) -> None:
    """Point everything in a block but its adapters at the tensors of the same block of the first model."""
    theirs = dict(first.named_modules())
    for path, module in block.named_modules():
        if path in theirs and ADAPTER not in path.split("."):
            for own, others in (
                (module._parameters, theirs[path]._parameters),
                (module._buffers, theirs[path]._buffers),
            ):
                own.update({name: value for name, value in others.items() if name in own})
