"""What a run has to equal: one process that trains the whole model with plain transformers, adapters and autograd.

Nothing of the slice code is used here; shared with it are only the batches (``OwnerDataset.batch``) and the pure
functions of the plan (turn sequence, what trains at which step, learning rate).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from edge.data.rows import OwnerDataset
from ringtune.job import Job
from ringtune.plan import Plan


@dataclass(kw_only=True, slots=True)
class Trained:
    """The result of a reference run.

    Attributes:
        model: the whole ``AutoAdapterModel``.
        losses: mean loss of each train item, by step.
        evaluations: (loss_sum, count, correct) summed over owners, by the step after which they were taken.
    """

    model: Any
    losses: list[float] = field(default_factory=list)
    evaluations: dict[int, tuple[float, int, int]] = field(default_factory=dict)

    def adapter(self) -> dict[str, torch.Tensor]:
        """Adapter tensors, named as in a saved ``adapter.safetensors``."""
        return {name: value for name, value in self.model.state_dict().items() if ".ringtune." in f".{name}"
                and not name.startswith("heads.")}

    def head(self) -> dict[str, torch.Tensor]:
        """Head tensors, named as in a saved ``model_head.safetensors``."""
        return {name: value for name, value in self.model.state_dict().items() if name.startswith("heads.ringtune.")}


def train(job: Job, plan: Plan, model_folder: Path, datasets: Mapping[str, OwnerDataset]) -> Trained:
    """Train the whole model on the very items of the plan's turn sequence.

    Args:
        job: optimizer, learning rate, dropout, dtype.
        plan: owners, batches and unfreezing; its slices don't matter.
        model_folder: of the base model.
        datasets: per owner; ``set_labels`` is called here.
    """
    raise NotImplementedError
