"""Make the job's optimizer over some parameters, and name the tensors of its state.

AdamW, SGD, momentum and Adagrad run as one kernel (``fused``), which goes over parameter, gradient and state once and
holds nothing besides; the other paths of torch hold copies, of one tensor or of all (``foreach``). Adafactor has no
such kernel: it is updated one tensor after the other. On a CPU the kernel takes all tensors for contiguous, whatever
they are, and says nothing: so gradients are made contiguous, and parameters that are not have the slow path. Nor does
it tell autograd that a tensor was changed, by which a graph of the values before is found out: that is done here.

Measured with two threads: AdamW takes a quarter of the processor's time of the path for one tensor at a time, and
differs from it by rounding; one and several threads give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ringtune.jobs.job import Train
from ringtune.jobs.optimizers import MOMENTUM, STEP, state_shapes


def make_optimizer(train: Train, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make torch's optimizer of a job; it has no state yet.

    Parameters without a gradient are skipped by ``step``, so their state and counts start when they first train.
    """
    made = _made(train, parameters)
    made.state.clear()  # Adagrad makes its state at once
    return made


def _made(train: Train, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    rate, decay = train.learning_rate, train.weight_decay
    is_plain = all(parameter.is_contiguous() for parameter in parameters)
    if train.optimizer == "adagrad":  # its kernel is written for processors alone
        is_plain = is_plain and all(parameter.device.type == "cpu" for parameter in parameters)
    path: dict[str, Any] = {"fused": True} if is_plain else {"foreach": False}
    match train.optimizer:
        case "sgd":
            return torch.optim.SGD(parameters, lr=rate, weight_decay=decay, **path)
        case "momentum":
            momentum = MOMENTUM if train.momentum is None else train.momentum
            return torch.optim.SGD(parameters, lr=rate, momentum=momentum, weight_decay=decay, **path)
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr=rate, weight_decay=decay, **path)
        case "adafactor":
            return torch.optim.Adafactor(parameters, lr=rate, weight_decay=decay, foreach=False)
        case _:
            return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, **path)


def apply_update(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Do one optimizer step at this learning rate, and free the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
        for parameter in group["params"]:
            if parameter.grad is not None and not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
    optimizer.step()
    updated = [value for group in optimizer.param_groups for value in group["params"] if value.grad is not None]
    torch.autograd.graph.increment_version(updated)
    optimizer.zero_grad(set_to_none=True)


@contextmanager
def only(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Let an optimizer know these of its parameters only; state and gradients of the others stay as they are."""
    wanted, before = {id(parameter) for parameter in parameters}, [group["params"] for group in optimizer.param_groups]
    for group, known in zip(optimizer.param_groups, before, strict=True):
        group["params"] = [parameter for parameter in known if id(parameter) in wanted]
    try:
        yield
    finally:
        for group, known in zip(optimizer.param_groups, before, strict=True):
            group["params"] = known


def begin_state(name: str, optimizer: torch.optim.Optimizer, updated: Iterable[torch.nn.Parameter]) -> None:
    """Give parameters that have none yet the state before their first update: zeros.

    Torch would make it too, but momentum's kernel takes a first update for the first one of all its parameters.
    """
    for parameter in updated:
        if not optimizer.state.get(parameter):
            shapes = state_shapes(name, tuple(parameter.shape)).items()
            state = {
                key: torch.zeros(shape, dtype=state_dtype(key, parameter), device=parameter.device)
                for key, shape in shapes
            }
            if state:
                optimizer.state[parameter] = state


def state_dtype(key: str, parameter: torch.nn.Parameter) -> torch.dtype:
    """Return the type of a tensor of a parameter's state: the parameter's, of a count float32."""
    return torch.float32 if key == STEP else parameter.dtype


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
