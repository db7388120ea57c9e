"""Write a whole model with the adapter of a run merged into its weights: a normal folder of transformers.

The adapter is loaded as an evaluation loads it, added to the matrices that it stands beside, and then left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from edge.model.auxiliary.loading import matrix_of
from edge.model.auxiliary.modules import FusedDelta, LinearDelta, alpha_beside
from edge.model.heads import task_of
from edge.model.layouts import LAYOUTS
from edge.model.result.loading import load_saved
from edge.model.result.whole_model import model_files, model_tensors
from edge.model.safetensors_files import SafetensorsFiles
from edge.model.skeleton import ADAPTER, Skeleton, build_skeleton
from edge.model.slice import DTYPES, materialise
from ringtune.errors import UsageError
from ringtune.files.pieces import Pieces
from ringtune.jobs.job import Job
from ringtune.models.adapters.merge_support import merge_refusal


def merged_files(job: Job, model: Path, adapter: Path, labels: Sequence[str]) -> dict[str, Pieces]:
    """Make the folder of a model with an adapter merged into it; tensors are read when a file is gone through.

    Args:
        job: of the run.
        model: folder of the base model.
        adapter: folder of the run's result.
        labels: names of the classes; empty without.

    Returns:
        Name to content.

    Raises:
        UsageError: the adapter is no change of matrices.
        ModelError: the base model is not there, or is another one.
        IntegrityError: the adapter is damaged, or of another model.
    """
    if problem := merge_refusal(job.adapter.config):
        raise UsageError(f"adapter.config = {job.adapter.config!r} can't be merged: {problem}")
    task, dtype = task_of(job.model.task), DTYPES[job.model.dtype]
    with torch.random.fork_rng(devices=[]):
        skeleton = build_skeleton(model, job)
        head = task.add(skeleton.model, tuple(labels))
    blocks = range(len(skeleton.blocks))
    with SafetensorsFiles(model) as weights:
        materialise(skeleton, weights, blocks=blocks, with_embedding=True, dtype=dtype, device=torch.device("cpu"))
        task.connect(skeleton, head, weights)
    head.to(dtype)
    load_saved(skeleton, job.model.task, adapter, with_head=True)
    merge(skeleton)
    tensors = model_tensors(skeleton, job.model.task, without_blocks=(), with_owner=True)
    own = {name: value for name, value in tensors.items() if name.startswith("heads.") or f".{ADAPTER}." not in name}
    return model_files(skeleton, job.model.task, model, own, with_owner=True)


def merge(skeleton: Skeleton) -> None:
    """Add the adapter of every hosted block to the matrices; the modules of the adapter stay and are done with."""
    if skeleton.has_library:
        skeleton.model.merge_adapter(ADAPTER)
    inputs_first = LAYOUTS[skeleton.layout.model_type].inputs_first
    for matrix in list(skeleton.blocks.modules()):
        delta = dict(matrix.named_children()).get(ADAPTER)
        if isinstance(delta, LinearDelta | FusedDelta):
            _add(matrix, delta, inputs_first=inputs_first, alpha=alpha_beside(matrix))


@torch.no_grad()
def _add(matrix: nn.Module, delta: nn.Module, *, inputs_first: bool, alpha: float) -> None:
    change = matrix_of(dict(delta.named_parameters()))
    weight = matrix.get_parameter("weight")
    changed = torch.add(weight, change.t() if inputs_first else change, alpha=alpha)
    matrix.register_parameter("weight", nn.Parameter(changed, requires_grad=False))
