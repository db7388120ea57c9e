"""What a run has to equal: one process that trains the whole model with plain transformers, adapters and autograd.

Nothing of the slice code is used here; shared with it are only the batches (``OwnerDataset.batch``), the head's name
and the pure functions of the plan (turn sequence, what trains at which step, learning rate).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from edge.data.rows import OwnerDataset
from ringtune.job import Job
from ringtune.learning_rate import learning_rate
from ringtune.plan import Plan
from ringtune.schedule import lowest_trainable
from ringtune.turns import Item, StepKind, items, turn_sequence

NAME = "ringtune"


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
        state = self.model.state_dict().items()
        return {name: value for name, value in state if f".{NAME}." in name and not name.startswith("heads.")}

    def head(self) -> dict[str, torch.Tensor]:
        """Head tensors, named as in a saved ``model_head.safetensors``."""
        state = self.model.state_dict().items()
        return {name: value for name, value in state if name.startswith(f"heads.{NAME}.")}


def whole_model(job: Job, plan: Plan, model_folder: Path, *, attention: str = "sdpa") -> Any:
    """The untrained whole model with adapter and head, in the job's dtype and with its dropout."""
    from adapters import AdapterConfig, AutoAdapterModel

    rate = job.train.dropout
    model = AutoAdapterModel.from_pretrained(
        str(model_folder),
        hidden_dropout_prob=rate,
        attention_probs_dropout_prob=rate,
        attn_implementation=attention,
    )
    torch.manual_seed(job.train.seed)
    model.add_adapter(NAME, config=AdapterConfig.load(job.adapter.config).replace(dropout=rate))
    model.add_classification_head(NAME, num_labels=len(plan.labels), id2label=dict(enumerate(plan.labels)))
    model.train_adapter(NAME)
    return model.to(getattr(torch, job.model.dtype))


def train(
    job: Job, plan: Plan, model_folder: Path, datasets: Mapping[str, OwnerDataset], *, attention: str = "sdpa"
) -> Trained:
    """Train the whole model on the very items of the plan's turn sequence.

    Args:
        job: optimizer, learning rate, dropout, dtype.
        plan: owners, batches and unfreezing; its slices don't matter.
        model_folder: of the base model.
        datasets: per owner; ``set_labels`` is called here.
        attention: implementation of the attention.
    """
    generator_state = torch.get_rng_state()
    model = whole_model(job, plan, model_folder, attention=attention)
    for dataset in datasets.values():
        dataset.set_labels(plan.labels)
    result = Trained(model=model)
    at = _seed_units(model, job)
    blocks = model.base_model.encoder.layer
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adapters = [[parameter for parameter in block.parameters() if parameter.requires_grad] for block in blocks]
    kind = torch.optim.AdamW if job.train.optimizer == "adamw" else torch.optim.SGD
    optimizer = kind(trainable, lr=1.0, weight_decay=job.train.weight_decay)
    for turn in turn_sequence(plan):
        for item in items(plan, turn):
            if item.kind is StepKind.EVALUATE:
                _evaluate(model, plan, item, datasets[item.owner], result)
                continue
            lowest = lowest_trainable(plan, item.step)
            model.eval()
            model.heads[NAME].train()
            for index, parameters in enumerate(adapters):
                blocks[index].train(index >= lowest)
                for parameter in parameters:
                    parameter.requires_grad_(index >= lowest)
            loss = _backward(model, plan, item, datasets[item.owner], at)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(job.train, item.step, plan.num_steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            result.losses.append(loss)
    model.eval()
    torch.set_rng_state(generator_state)
    return result


def _backward(model: Any, plan: Plan, item: Item, dataset: OwnerDataset, at: dict[str, int]) -> float:
    """The library's own mean loss of each micro-batch, weighted by its share of the rows."""
    batch = dataset.batch(plan, item)
    total, first = 0.0, 0
    for micro, size in enumerate(plan.microbatch_sizes(item.rows)):
        rows = slice(first, first + size)
        first += size
        at.update(step=item.step, micro=micro)
        output = model(
            input_ids=batch.ids[rows],
            attention_mask=batch.mask[rows],
            token_type_ids=batch.token_type_ids[rows],
            labels=batch.labels[rows],
        )
        loss = output.loss * (size / item.rows)
        loss.backward()
        total += float(loss.detach())
    return total


def _evaluate(model: Any, plan: Plan, item: Item, dataset: OwnerDataset, result: Trained) -> None:
    batch = dataset.batch(plan, item)
    model.eval()
    loss_sum, count, correct = result.evaluations.get(item.step, (0.0, 0, 0))
    first = 0
    with torch.no_grad():
        for size in plan.microbatch_sizes(item.rows):
            rows = slice(first, first + size)
            first += size
            logits = model(
                input_ids=batch.ids[rows], attention_mask=batch.mask[rows], token_type_ids=batch.token_type_ids[rows]
            ).logits
            labels = batch.labels[rows]
            loss_sum += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
            correct += int((logits.argmax(-1) == labels).sum())
            count += size
    result.evaluations[item.step] = (loss_sum, count, correct)


def _seed_units(model: Any, job: Job) -> dict[str, int]:
    """Seed the generator before each block and the head; returns where (step, micro) are to be set."""
    at = {"step": 0, "micro": 0}

    def seeder(unit: str) -> Any:
        def seed(*_: Any) -> None:
            text = f"{job.train.seed}/{at['step']}/{at['micro']}/{unit}"
            first = hashlib.sha256(text.encode()).digest()[:8]
            torch.manual_seed(int.from_bytes(first, "little") & (2**63 - 1))

        return seed

    if job.train.dropout > 0:
        for index, block in enumerate(model.base_model.encoder.layer):
            block.register_forward_pre_hook(seeder(f"block.{index}"), prepend=True)
        model.heads[NAME].register_forward_pre_hook(seeder("head"), prepend=True)
    return at
