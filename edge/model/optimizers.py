"""Make the job's optimizer over what a node hosts, and convert its state to plain tensors and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ringtune.jobs.job import Train


def make_optimizer(train: Train, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer | None:
    """Make torch's AdamW or SGD; None if there is no parameter.

    Parameters without a gradient are skipped by ``step``, so their moments and counts start when they first train.
    """
    if not parameters:
        return None
    if train.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=train.learning_rate, weight_decay=train.weight_decay)
    return torch.optim.AdamW(parameters, lr=train.learning_rate, weight_decay=train.weight_decay)


def apply_update(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Do one optimizer step at this learning rate, and free the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return moments and step counts as ``name/key``; a parameter that was never updated has none.

    Example: AdamW after a step gives ``w/step``, ``w/exp_avg`` and ``w/exp_avg_sq`` for the parameter ``w``.
    """
    found: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}/{key}"] = value
    return found


def room_for_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    wanted: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> dict[str, torch.Tensor]:
    """Give the optimizer the state tensors that ``optimizer_tensors`` would name so, to be filled.

    A tensor of the same type and shape stays; state that is not named is dropped.

    Args:
        optimizer: over the parameters.
        parameters: by name.
        wanted: type and shape of each state tensor, by name.
    """
    before = optimizer_tensors(optimizer, parameters)
    for parameter in parameters.values():
        optimizer.state.pop(parameter, None)
    found: dict[str, torch.Tensor] = {}
    for full, (dtype, shape) in wanted.items():
        name, _, key = full.rpartition("/")
        parameter, old = parameters[name], before.pop(full, None)
        if old is None or old.dtype != dtype or tuple(old.shape) != shape:
            old = torch.empty(shape, dtype=dtype, device="cpu" if key == "step" else parameter.device)
        found[full] = optimizer.state[parameter][key] = old
    return found


def drop_state(optimizer: torch.optim.Optimizer) -> None:
    """Free the moments and step counts of an optimizer."""
    optimizer.state.clear()
