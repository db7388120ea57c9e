"""What PipeAdapter in the ring has to equal: its rule written out in one process, slow and plain.

The whole model, and a list of past versions for each block. Host p of P, counted from below, keeps w = P - p items in
flight: the forward of item k of a turn sees ``max(0, k - w + 1)`` updates of that turn, its backward the same weights,
and its gradient goes to the newest ones. The head is never stale. The schedule's and the slices' code is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

from edge.data.dataset import OwnerDataset
from ringtune.config.sections import learning_rate
from ringtune.job.job import Job
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, StepKind, items, turn_sequence
from tests.support.reference import adapter_of, inputs_of, micro_batches, targets_of, update, whole_model

Tensors = dict[str, torch.Tensor]


@dataclass
class StaleProcess:
    """One process that trains with stale weights on purpose; without dropout."""

    job: Job
    plan: Plan
    model_folder: Path
    datasets: Mapping[str, OwnerDataset]
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Take the tensors out of the model; the modules are only called with others in their place."""
        self.bounds = [(piece.start, piece.stop) for piece in self.plan.placement.slices if piece.num_blocks]
        self.model: Any = whole_model(self.job, self.plan, self.model_folder).eval()
        for dataset in self.datasets.values():
            dataset.set_labels(self.plan.course.labels)
        trained = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        self.head = {name: value for name, value in trained.items() if name.startswith("heads.")}
        self.blocks: list[dict[str, torch.nn.Parameter]] = []
        for _, block in self.model.iter_layers():
            own = {id(value) for value in block.parameters()}
            self.blocks.append({name: value for name, value in trained.items() if id(value) in own})
        for block in self.blocks[: self.plan.placement.private_blocks]:
            block.clear()
        self.past = [[copied(block)] for block in self.blocks]
        newest = [value for part in (*self.blocks, self.head) for value in part.values()]
        kind = torch.optim.AdamW if self.job.train.optimizer == "adamw" else torch.optim.SGD
        self.optimizer = kind(newest, lr=1.0, weight_decay=self.job.train.weight_decay)

    def train(self) -> StaleProcess:
        """All turns."""
        for turn in turn_sequence(self.plan.course):
            if turn.kind is StepKind.TRAIN:
                for k, item in enumerate(items(self.plan.course, turn)):
                    self.step(item, turn.first_step, k)
        return self

    def seen(self, block: int, first_step: int, k: int) -> Tensors:
        """The version of a block that the forward of item ``k`` of a turn sees."""
        if not self.blocks[block]:
            return {}
        in_flight = len([stop for _, stop in self.bounds if stop > block])
        return self.past[block][first_step + max(0, k - in_flight + 1)]

    def step(self, item: Item, first_step: int, k: int) -> None:
        """One item: forward and backward with old versions, one update of the newest."""
        used = copied(self.head)
        for index in range(len(self.blocks)):
            used |= copied(self.seen(index, first_step, k))
        for value in used.values():
            value.requires_grad_()
        loss = self.loss(item, used)
        may_skip = self.plan.course.may_skip  # then a block may have no part in a batch
        found = torch.autograd.grad(loss, list(used.values()), allow_unused=may_skip)
        grads = dict(zip(used, found, strict=True))
        for part in (*self.blocks, self.head):
            for name, value in part.items():
                value.grad = grads[name]
        update(self.optimizer, learning_rate(self.job.train, item.step, self.plan.course.num_steps))
        for block, versions in zip(self.blocks, self.past, strict=True):
            versions.append(copied(block))
        self.losses.append(float(loss.detach()))

    def loss(self, item: Item, used: Tensors) -> torch.Tensor:
        """The library's own mean loss of each micro-batch, weighted by its share of the targets."""
        batch = self.datasets[item.owner].batch(self.plan.course, item)
        every = micro_batches(self.plan, item, batch)
        parts = {micro: every[micro] for micro in self.taking_part(item, len(every))}
        all_targets = sum(targets_of(self.job.model.task, rows)[1] for rows in parts.values())
        losses: list[torch.Tensor] = []
        for micro, rows in parts.items():
            self.begin(item, micro)
            targets, count = targets_of(self.job.model.task, rows)
            output = functional_call(self.model, used, kwargs={**inputs_of(self.model, rows), **targets})
            losses.append(output.loss * (count / all_targets))
        return torch.stack(losses).sum()

    def taking_part(self, item: Item, count: int) -> Sequence[int]:
        """The micro-batches of an item, of ``count``, that are trained on: all."""
        return range(count)

    def begin(self, item: Item, micro: int) -> None:
        """Do what is to be done before the forward of a micro-batch; nothing here."""

    def tensors(self) -> Tensors:
        """Adapters and head, named as the ring names them."""
        head = {name: value for name, value in self.model.state_dict().items() if name.startswith("heads.ringtune.")}
        return adapter_of(self.model) | head


def copied(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The values of this moment."""
    return {name: value.detach().clone() for name, value in tensors.items()}


def train_stale(
    job: Job, plan: Plan, model_folder: Path, datasets: Mapping[str, OwnerDataset]
) -> tuple[Tensors, list[float]]:
    """Adapters with head, and the losses of the steps, of a run of PipeAdapter on the slices of ``plan``."""
    generator_state = torch.get_rng_state()
    done = StaleProcess(job, plan, model_folder, datasets).train()
    torch.set_rng_state(generator_state)
    return done.tensors(), done.losses
