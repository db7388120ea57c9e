"""What HiFT on a ring has to equal: one process, plain transformers and AutoAdapterModel, one torch optimizer a group.

Written after the paper and shared with nothing of the slice code. From the course come the batches of each step, and
for the random order the permutation; groups, sweeps and what belongs to a unit are written out here once more.

Source: HiFT, Algorithm 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from edge.data.dataset import OwnerDataset
from ringtune.config.sections import learning_rate
from ringtune.job.job import Job
from ringtune.models.families import FAMILIES
from ringtune.schedule.methods.hift import Hift
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, Turn, items, turn_sequence
from tests.support import reference
from tests.support.tiny_families import ENCODERS, GENERIC, PLUGGED

TOP = {"gpt2": ("ln_f.",), "llama": ("norm.",), "mistral": ("norm.",), "vit": ("layernorm.",)}
TOP |= dict.fromkeys(PLUGGED, ("norm.",))
"""How the tensors of the base model that follow the last block begin."""

Tensors = dict[str, torch.nn.Parameter]


def units_of(model: Any) -> list[Tensors]:
    """Embedding, blocks and head of a model, each with its tensors; a tensor with two names is in the lowest unit."""
    blocks = [dict(block.named_parameters()) for _, block in model.iter_layers()]
    seen = {id(value) for block in blocks for value in block.values()}
    top: tuple[str, ...] = TOP.get(model.config.model_type, ())
    frozen: tuple[str, ...] = ("pooler.",)
    if model.config.model_type in (*GENERIC, *ENCODERS):
        known = FAMILIES[model.config.model_type]
        top, frozen = known.head_paths, (*frozen, *known.shared_paths)
    embedding: Tensors = {}
    head: Tensors = {}
    for name, value in model.base_model.named_parameters():
        if id(value) not in seen and not name.startswith(frozen):
            (head if name.startswith(top) and top else embedding)[f"{model.base_model_prefix}.{name}"] = value
            seen.add(id(value))
    for name, value in model.heads[model.active_head].named_parameters():
        if id(value) not in seen:
            prefix = getattr(model, "head_prefix", f"heads.{reference.NAME}.")
            head[f"lm_head.{name.rpartition('.')[2]}" if model.active_head == "default" else f"{prefix}{name}"] = value
    named = [
        {f"{path}.{name}": value for name, value in block.items()}
        for path, block in zip(_block_paths(model), blocks, strict=True)
    ]
    return [embedding, *named, head]


def groups_of(method: Hift, num_units: int, frozen: int = 0) -> list[list[int]]:
    """The groups of units in the order of a sweep; unit 0 is the embedding here, the last one the head.

    With frozen blocks the embedding is frozen too.
    """
    always = always_of(method, num_units)
    others = [unit for unit in range(frozen + 1 if frozen else 0, num_units) if unit not in always]
    groups = [others[first : first + method.group_size] for first in range(0, len(others), method.group_size)]
    if method.order == "top2down":
        return groups[::-1]
    if method.order == "random":
        shuffled = [[unit + 1 for unit in group] for group in method.groups(num_units - 2, frozen)]
        assert sorted(shuffled) == groups
        return shuffled
    return groups


def always_of(method: Hift, num_units: int) -> set[int]:
    """The units that train at every step."""
    return {{"embedding": 0, "head": num_units - 1}[name] for name in method.always_active}


def train_hift(
    job: Job,
    plan: Plan,
    folder: Path,
    datasets: Mapping[str, OwnerDataset],
    *,
    prepare: Callable[[Any], None] = lambda model: None,
    turns: Iterable[tuple[Plan, Turn]] | None = None,
) -> reference.Trained:
    """Train one group at a step on the very items of the plan's turns; ``prepare`` changes the model before.

    ``turns`` are other ones, each with the plan that holds then.
    """
    state = torch.get_rng_state()
    method = plan.course.method
    assert isinstance(method, Hift)
    model = reference.whole_model(job, plan, folder)
    prepare(model)
    units = units_of(model)
    groups, always = groups_of(method, len(units), plan.course.frozen_blocks), always_of(method, len(units))
    make = functools.partial(reference.plain_optimizer, job)
    optimizers = [make([value for unit in group for value in units[unit].values()]) for group in groups]
    if always:
        always_optimizer = make([value for unit in sorted(always) for value in units[unit].values()])
    result, at = reference.Trained(model=model), reference.seed_units(model, job)
    for dataset in datasets.values():
        dataset.set_labels(plan.course.labels)
    for holding, turn in turns or ((plan, turn) for turn in turn_sequence(plan.course)):
        sweeps = -(-holding.course.num_steps // len(groups))
        for item in items(holding.course, turn) if turn.kind is not StepKind.CHECKPOINT else ():
            dataset = datasets[item.owner]
            if item.kind is StepKind.EVALUATE:
                reference.evaluate(model, job, plan, item, dataset, result)
                continue
            place = item.step % len(groups)
            active = always | set(groups[place])
            _activate(model, units, active)
            result.losses.append(reference.backward(model, job, plan, item, dataset, at))
            for optimizer in (optimizers[place], always_optimizer) if always else (optimizers[place],):
                reference.update(optimizer, learning_rate(job.train, item.step // len(groups), sweeps))
            if method.drops_state:
                optimizers[place].state.clear()
    model.eval()
    torch.set_rng_state(state)
    return result


def _activate(model: Any, units: list[Tensors], active: set[int]) -> None:
    """Let the active units have gradients; below the lowest of them there is no dropout."""
    for number, unit in enumerate(units):
        for value in unit.values():
            value.requires_grad_(number in active)
    model.train(min(active) == 0)
    for index, (_, block) in enumerate(model.iter_layers()):
        block.train(index + 1 >= min(active))
    model.heads[model.active_head].train()


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """Every tensor that trains, by name."""
    return {name: value.detach() for unit in units_of(model) for name, value in unit.items()}


def _block_paths(model: Any) -> list[str]:
    """The path of every block in the whole model."""
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(block)] for _, block in model.iter_layers()]
