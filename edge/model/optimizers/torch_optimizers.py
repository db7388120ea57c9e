"""Make the job's optimizer over some parameters, and name the tensors of its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ringtune.jobs.job import Train
from ringtune.jobs.optimizers import MOMENTUM


def make_optimizer(train: Train, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make torch's optimizer of a job, which updates one tensor after the other.

    The paths for many tensors at once (``foreach``) hold copies of all of them; here it is one tensor's at a time.
    Parameters without a gradient are skipped by ``step``, so their state and counts start when they first train.
    """
    made = _made(train, parameters)
    made.state.clear()  # Adagrad makes its state at once
    return made


def _made(train: Train, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    rate, decay = train.learning_rate, train.weight_decay
    match train.optimizer:
        case "sgd":
            return torch.optim.SGD(parameters, lr=rate, weight_decay=decay, foreach=False)
        case "momentum":
            momentum = MOMENTUM if train.momentum is None else train.momentum
            return torch.optim.SGD(parameters, lr=rate, momentum=momentum, weight_decay=decay, foreach=False)
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr=rate, weight_decay=decay, foreach=False)
        case "adafactor":
            return torch.optim.Adafactor(parameters, lr=rate, weight_decay=decay, foreach=False)
        case _:
            return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, foreach=False)


def apply_update(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Do one optimizer step at this learning rate, and free the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def state_tensors(
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
