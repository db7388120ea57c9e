"""Optimizer state travels as plain tensors and starts when a parameter first trains."""

from __future__ import annotations

import pytest
import torch

from edge.model.optimizers import apply_update, make_optimizer, optimizer_tensors, room_for_state
from ringtune.jobs.job import Train


def _parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(3, generator=generator)) for name in ("w", "b")}


def _step(optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter], scale: float) -> None:
    for parameter in parameters.values():
        parameter.grad = scale * parameter.detach().clone()
    apply_update(optimizer, 0.1)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_optimizer_state_moves_to_another_owner(name: str) -> None:
    """Two updates here and two elsewhere equal four in one place."""
    train = Train(optimizer=name, weight_decay=0.01)
    whole = _parameters()
    optimizer = make_optimizer(train, list(whole.values()))
    assert optimizer is not None
    for scale in (1.0, -0.5, 2.0, 0.3):
        _step(optimizer, whole, scale)
    first, second = _parameters(), _parameters()
    before = make_optimizer(train, list(first.values()))
    after = make_optimizer(train, list(second.values()))
    assert before is not None
    assert after is not None
    for scale in (1.0, -0.5):
        _step(before, first, scale)
    _step(after, second, 9.0)
    state = {key: value.clone() for key, value in optimizer_tensors(before, first).items()}
    assert len(state) == (6 if name == "adamw" else 0)
    for key, parameter in second.items():
        parameter.data.copy_(first[key].data)
    room = room_for_state(after, second, {key: (value.dtype, tuple(value.shape)) for key, value in state.items()})
    for key, value in state.items():
        room[key].copy_(value)
    for scale in (2.0, 0.3):
        _step(after, second, scale)
    assert all(torch.equal(second[key], whole[key]) for key in whole)


def test_optimizer_skips_what_has_no_gradient() -> None:
    """A frozen parameter gets no weight decay, no moments and no step count."""
    parameters = _parameters()
    optimizer = make_optimizer(Train(weight_decay=0.5), list(parameters.values()))
    assert optimizer is not None
    before = parameters["b"].detach().clone()
    parameters["w"].grad = torch.ones(3)
    apply_update(optimizer, 0.1)
    assert torch.equal(parameters["b"], before)
    assert {key.split("/")[0] for key in optimizer_tensors(optimizer, parameters)} == {"w"}
    assert parameters["w"].grad is None


def test_optimizer_of_nothing_is_none() -> None:
    """A node without trainable parameters has no optimizer."""
    assert make_optimizer(Train(), []) is None
