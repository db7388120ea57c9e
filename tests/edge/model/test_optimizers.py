"""Optimizer state travels as plain tensors and starts when a parameter first trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from edge.model.optimizers import StateStore, UnitOptimizers, make_optimizer
from ringtune.config.optimizers import OPTIMIZERS, STEP, state_shapes
from ringtune.job.job import Train

RATE = 0.1
SHAPES = {"w": (4, 3), "b": (3,), "s": (), "t": (2, 3, 4), "row": (1, 5)}

Parameters = dict[str, torch.nn.Parameter]


def _parameters(*names: str, dtype: torch.dtype = torch.float32) -> Parameters:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(SHAPES[name], generator=generator).to(dtype)) for name in names or SHAPES
    }


def _optimizers(name: str, parameters: Parameters) -> UnitOptimizers:
    return UnitOptimizers(Train(optimizer=name, weight_decay=0.01), {0: parameters})


def _step(optimizers: UnitOptimizers, parameters: Parameters, scale: float) -> None:
    for parameter in parameters.values():
        parameter.grad = scale * parameter.detach().clone().sin()
    optimizers.update([0], RATE)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_keeps_the_state_that_the_rule_names(name: str) -> None:
    """The table that memory, disks and shards are planned by says what torch really keeps, for any dimensions.

    A gradient may still be on its way to other owners, so it is left as it is.
    """
    parameters = _parameters()
    optimizers = _optimizers(name, parameters)
    assert optimizers.tensors() == {}
    assert optimizers.held_bytes == 0
    gradients = {key: torch.ones_like(value) for key, value in parameters.items()}
    for key, value in parameters.items():
        value.grad = gradients[key]
    optimizers.update([0], RATE)
    assert all(bool((gradient == 1).all()) for gradient in gradients.values())
    assert all(value.grad is None for value in parameters.values())
    found = {full: tensor.shape for full, tensor in optimizers.tensors().items()}
    assert found == {
        f"{key}/{part}": shape
        for key, value in parameters.items()
        for part, shape in state_shapes(name, tuple(value.shape)).items()
    }


PLAIN: dict[str, Callable[[list[torch.nn.Parameter]], Any]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.01, foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=RATE, weight_decay=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=RATE, weight_decay=0.01, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=RATE, weight_decay=0.01),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=RATE, weight_decay=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_by_units_is_the_plain_one_over_all(name: str) -> None:
    """Units that are updated at different steps get what one optimizer over all of them would give them."""
    own, plain = (_parameters(dtype=torch.float64) for _ in range(2))
    optimizers = UnitOptimizers(Train(optimizer=name, weight_decay=0.01), {0: {"w": own["w"]}, 3: {"b": own["b"]}})
    reference = PLAIN[name]([plain["w"], plain["b"]])
    for step in range(7):
        unit, key = (0, "w") if step % 3 else (3, "b")
        for parameters in (own, plain):
            parameters[key].grad = parameters[key].detach().cos()
        optimizers.update([unit], RATE)
        reference.step()
        reference.zero_grad(set_to_none=True)
    assert max(float((own[key] - plain[key]).detach().abs().max()) for key in own) < 1e-12
    steps = {full: tensor for full, tensor in optimizers.tensors().items() if full.endswith(STEP)}
    counts = [float(torch.frombuffer(bytearray(bytes(tensor.data)), dtype=torch.float32)) for tensor in steps.values()]
    assert counts == ([4.0, 3.0] if counts else [])


def test_optimizer_skips_what_has_no_gradient() -> None:
    """A frozen parameter gets no weight decay, no moments and no step count."""
    parameters = _parameters("w", "b")
    optimizers = UnitOptimizers(Train(weight_decay=0.5), {0: parameters, 1: {}})
    before = parameters["b"].detach().clone()
    parameters["w"].grad = torch.ones(4, 3)
    optimizers.update([0, 1, 2], RATE)
    assert torch.equal(parameters["b"], before)
    assert {key.split("/")[0] for key in optimizers.tensors()} == {"w"}
    assert parameters["w"].grad is None


def test_optimizer_state_that_is_dropped_begins_anew() -> None:
    """A unit that was inactive has its first update again, with a count of 1; one that stays active goes on."""
    own, plain = (_parameters("w", dtype=torch.float64) for _ in range(2))
    optimizers = UnitOptimizers(Train(), {0: own})
    optimizers.keep_in(StateStore())
    reference = torch.optim.AdamW([plain["w"]], lr=RATE, weight_decay=0.0)
    for step in range(5):
        if step == 2:
            optimizers.evict_state([0])
            assert optimizers.tensors() == {}
            reference.state.clear()
        for parameters in (own, plain):
            parameters["w"].grad = (1 + step) * parameters["w"].detach().cos()
        optimizers.update([0], RATE)
        reference.step()
    assert float((own["w"] - plain["w"]).detach().abs().max()) < 1e-12


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_reads_gradients_and_parameters_of_any_layout(name: str) -> None:
    """A transposed gradient or parameter: torch's kernels would read its memory in the wrong order."""
    for order in ("gradient", "parameter"):
        own, plain = (_parameters("w", dtype=torch.float64) for _ in range(2))
        if order == "parameter":
            own["w"] = torch.nn.Parameter(own["w"].detach().t().contiguous().t())
        for optimizers, parameters in ((_optimizers(name, own), own), (_optimizers(name, plain), plain)):
            gradient = parameters["w"].detach().cos()
            is_odd = parameters is own and order == "gradient"
            parameters["w"].grad = gradient.t().contiguous().t() if is_odd else gradient
            optimizers.update([0], RATE)
        assert float((own["w"] - plain["w"]).detach().abs().max()) < 1e-12


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_gives_the_same_bits_with_any_number_of_threads(name: str) -> None:
    """Copies of a unit at several owners stay equal, whatever their cores."""
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            parameters = {"w": torch.nn.Parameter(torch.linspace(-3, 3, 100_003).cos())}
            optimizers = _optimizers(name, parameters)
            for _ in range(2):
                _step(optimizers, parameters, 1.0)
            found.append(parameters["w"].detach())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_no_optimizer_asks_for_a_kernel_that_its_device_lacks() -> None:
    """Adagrad has one kernel for all tensors on processors only; torch refuses it elsewhere, at the first update."""
    for name, device in itertools.product(OPTIMIZERS, ("cpu", "meta")):
        parameter = torch.nn.Parameter(torch.ones(3, device=device))
        fused = make_optimizer(Train(optimizer=name), [parameter]).defaults.get("fused") is True
        assert fused == (name != "adafactor" and (name != "adagrad" or device == "cpu")), (name, device)
