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


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Replace the optimizer's state by the tensors that ``optimizer_tensors`` gave."""
    for name, parameter in parameters.items():
        prefix = f"{name}/"
        state = {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
        optimizer.state.pop(parameter, None)
        if state:
            optimizer.state[parameter] = {
                key: value.clone() if key == "step" else value.to(parameter.device, copy=True)
                for key, value in state.items()
            }
