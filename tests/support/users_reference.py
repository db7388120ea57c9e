"""What runs with several users have to equal: plain loops over whole models with autograd, a set of adapters each.

Shared with the code under test are only the batches, the pure functions of the plan, and whose row is which.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from edge.data.tokens import Batch
from ringtune.config.sections import learning_rate
from ringtune.job.job import Job, parse_job
from ringtune.models.adapter_config import parse_adapter_config
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, Turn, items
from ringtune.techniques.offload import RowsOfUser, rows_of_users
from tests.support import reference
from tests.support.plans import train_items
from tests.support.torch_ring import Case

Sets = dict[str, torch.Tensor]
"""Tensors as ``USER/BLOCK.NAME``."""


class LayerByUser(nn.Module):
    """A copy of a layer for each user; each row goes through that of its user."""

    def __init__(self, copies: Mapping[str, nn.Module], rows: list[RowsOfUser]) -> None:
        super().__init__()
        self.of_user = nn.ModuleDict(copies)
        self._rows = rows

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run each user's rows through the user's own layer."""
        size, parts, order = len(hidden), list[Any](), list[int]()
        for user, positions in self._rows:
            at = torch.tensor(positions)

            def own(value: Any, at: torch.Tensor = at) -> Any:
                is_batched = torch.is_tensor(value) and value.dim() and len(value) == size
                return value[at] if is_batched else value

            given = {key: own(value) for key, value in kwargs.items()}
            parts.append(self.of_user[user](own(hidden), *(own(value) for value in args), **given))
            order += positions
        back = torch.tensor(order).argsort()
        if torch.is_tensor(parts[0]):
            return torch.cat(parts)[back]
        return (torch.cat([part[0] for part in parts])[back], *parts[0][1:])


Turns = Sequence[tuple[Plan, Turn]]
"""Train turns, each with the plan that holds for it."""


def _items(plan: Plan, turns: Turns) -> list[tuple[Plan, Item]]:
    """The train items of a plan, or of these turns, with the plan that holds for each."""
    if not turns:
        return [(plan, item) for item in train_items(plan)]
    return [(holding, item) for holding, turn in turns for item in items(holding.course, turn)]


def alone(case: Case, plan: Plan, *, interval: int = 1, turns: Turns = ()) -> tuple[Sets, dict[str, torch.Tensor]]:
    """Train with a copy of every layer for each user; return all sets, and the head."""
    job, datasets, rows = case.job, case.datasets(), list[RowsOfUser]()
    model, users = reference.whole_model(job, plan, case.folder / "model"), plan.course.users
    at, num_blocks = [reference.seed_units(model, job)], plan.course.num_blocks
    theirs = dict.fromkeys(users, _layers_of(model, num_blocks))
    for user, config in job.offload.chosen_adapters.items():
        other = reference.whole_model(_with_adapter(job, config), plan, case.folder / "model")
        at.append(reference.seed_units(other, job))
        theirs[user] = _layers_of(other, num_blocks)
    layers = _layers_of(model, num_blocks)
    if job.train.compute == "bfloat16":
        for own_layers in theirs.values():
            reference.round_products(own_layers)
    for index in range(num_blocks):
        copies = {user: copy.deepcopy(own_layers[index]) for user, own_layers in theirs.items()}
        layers[index] = LayerByUser(copies, rows)
    adapters = [value for value in layers.parameters() if value.requires_grad]
    own_head = model.heads[model.active_head]
    head = [value for value in own_head.parameters() if value.requires_grad]
    model.eval()
    layers.train()
    own_head.train()
    every = _items(plan, turns)
    rare = reference.plain_optimizer(job, adapters)
    often = reference.plain_optimizer(job, head or [nn.Parameter(torch.zeros(()))])  # a decoder is frozen
    for holding, item in every:
        batch = datasets[item.owner].batch(holding.course, item)
        _, all_targets = reference.targets_of(job.model.task, batch)
        for micro, own in enumerate(reference.micro_batches(holding, item, batch)):
            rows[:] = rows_of_users(holding.course, item, micro)
            for one in at:
                one.update(step=item.step, micro=micro)
            _backward(model, job, own, all_targets)
        num_steps = holding.course.num_steps
        reference.update(often, learning_rate(job.train, item.step, num_steps))
        if (item.step + 1) % interval == 0 or item is every[-1][1]:
            reference.update(rare, learning_rate(job.train, item.step // interval, math.ceil(num_steps / interval)))
    found = {
        f"{user}/{index}.{name}": value.detach()
        for index, layer in enumerate(layers)
        for user in users
        for name, value in layer.get_submodule(f"of_user.{user}").named_parameters()
        if f".{reference.NAME}." in name
    }
    return found, reference.Trained(model=model).head()


def together(case: Case, plan: Plan, *, turns: Turns = ()) -> Sets:
    """Train ``lora`` or ``linear`` beside query and value where each forward has the sum of all users' changes.

    The sum is in a plain matrix beside each frozen one, and a user's set gets the gradient of the user's rows: of a
    product that of the matrix, times the other factor.
    """
    job, datasets, users = case.job, case.datasets(), plan.course.users
    slots = reference.whole_model(_with_adapter(job, "linear"), plan, case.folder / "model").eval()
    initial = reference.whole_model(job, plan, case.folder / "model")
    slots.heads.load_state_dict(initial.heads.state_dict())  # drawn after the adapters
    named = slots.named_parameters()
    sums = {name: value for name, value in named if f".{reference.NAME}." in name and ".layer." in name}
    models, scale = dict.fromkeys(users, initial), dict.fromkeys(users, _scale(initial, job.adapter.config))
    for user, config in job.offload.chosen_adapters.items():
        models[user] = reference.whole_model(_with_adapter(job, config), plan, case.folder / "model")
        scale[user] = _scale(models[user], config)
    sets = {user: _set_of(model, sums) for user, model in models.items()}
    sums = {name: value for name, value in sums.items() if name in sets[users[0]]}  # the others stay zero
    head = [value for value in slots.heads.parameters() if value.requires_grad]
    slots.heads.train()
    values = {user: [value for parts in own.values() for value in parts] for user, own in sets.items()}
    optimizers = [reference.plain_optimizer(job, own) for own in (*values.values(), head)]
    every = _items(plan, turns)
    for holding, item in every:
        batch = datasets[item.owner].batch(holding.course, item)
        _, all_targets = reference.targets_of(job.model.task, batch)
        with torch.no_grad():
            for name, value in sums.items():
                value.copy_(torch.stack([scale[user] * _product(own[name]) for user, own in sets.items()]).sum(0))
        for micro, own in enumerate(reference.micro_batches(holding, item, batch)):
            for user, positions in rows_of_users(holding.course, item, micro):
                _backward(slots, job, _picked(own, positions), all_targets)
                for name, value in sums.items():
                    assert value.grad is not None
                    _add_gradient(sets[user][name], scale[user] * value.grad)
                    value.grad = None
        for optimizer in optimizers:
            reference.update(optimizer, learning_rate(job.train, item.step, holding.course.num_steps))
    return {
        f"{user}/{name}": value.detach()
        for user, own in sets.items()
        for slot, parts in own.items()
        for name, value in zip(_names_of(slot, len(parts)), parts, strict=True)
    }


def _layers_of(model: Any, num_blocks: int) -> Any:
    """The list of all layers of a model."""
    return next(one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) == num_blocks)


def _set_of(model: Any, slots: Mapping[str, nn.Parameter]) -> dict[str, list[nn.Parameter]]:
    """A user's own tensors for each slot that has some: a matrix, or both factors, A and B."""
    state = model.state_dict()
    found: dict[str, list[nn.Parameter]] = {}
    for slot in slots:
        low = slot.replace(f".{reference.NAME}.weight", f".loras.{reference.NAME}.lora_")
        names = [low + "A", low + "B"] if low + "A" in state else [slot]
        if names[0] in state:
            found[slot] = [nn.Parameter(state[name].detach().clone()) for name in names]
    return found


def _names_of(slot: str, parts: int) -> list[str]:
    """The names, by block, of a user's own tensors for a slot."""
    name = slot.split(".layer.", 1)[1]
    low = name.replace(f".{reference.NAME}.weight", f".loras.{reference.NAME}.lora_")
    return [low + "A", low + "B"] if parts == 2 else [name]


def _scale(model: Any, config: str) -> float:
    """What the change of a matrix is multiplied by."""
    for name, module in model.named_modules():
        if name.endswith(f".loras.{reference.NAME}"):
            return float(module.scaling)
    return float(parse_adapter_config(config)[0].options.get("alpha", 1.0))


def _product(parts: list[nn.Parameter]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else parts[1] @ parts[0]


def _add_gradient(parts: list[nn.Parameter], grad: torch.Tensor) -> None:
    """Add what the gradient of a change says of its parts."""
    grads = [grad] if len(parts) == 1 else [parts[1].T @ grad, grad @ parts[0].T]
    for part, some in zip(parts, grads, strict=True):
        part.grad = some.detach().clone() if part.grad is None else part.grad + some.detach()


def _with_adapter(job: Job, adapter: str) -> Job:
    text = f'[model]\npath = "{job.model.path}"\ntask = "{job.model.task}"\ndtype = "{job.model.dtype}"\n'
    text += f'[adapter]\nconfig = "{adapter}"\n[train]\nseed = {job.train.seed}\ndropout = {job.train.dropout}\n'
    return parse_job(text, source="test")


def _picked(batch: Batch, positions: tuple[int, ...]) -> Batch:
    return Batch(*(None if tensor is None else tensor[list(positions)] for tensor in batch))  # type: ignore[arg-type]


def _backward(model: Any, job: Job, rows: Batch, all_targets: int) -> None:
    targets, count = reference.targets_of(job.model.task, rows)
    (model(**reference.inputs_of(model, rows), **targets).loss * (count / all_targets)).backward()
