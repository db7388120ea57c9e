"""Training with tensors that travel in a reduced type: as good as with as much noise that knows no direction.

Rounding to p binary digits changes an element by at most 2^-p of itself (float16 has 11 digits, bfloat16 has 8), and
int8 changes it by at most 1/254 of its row's largest element. What such changes do to the losses of a run depends on
the run, so it is measured: runs in float32 whose tensors get uniform noise of that size, for some seeds, say how far
the losses of a step may go. Rounding may take them twice as far as the farthest of those.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.transport import tensors
from ringtune.run_control.events import LogStep
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.turns import StepKind, turn_sequence
from tests.support.recorded_ring import RecordedRing
from tests.support.torch_ring import Case, TorchCarrier, distance, make_carrier, write_inputs

SLICES = (("a", 0, 1), ("b", 1, 2), ("c", 2, 3), ("d", 3, 4))
SEEDS = range(3)
Change = Callable[[TensorKey, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("wire"))


class ChangingCarrier(TorchCarrier):
    """Changes every tensor that travels."""

    change: Change

    def take(self, node: str, key: TensorKey) -> Any:
        """Tensor and mask, as the receiver gets them."""
        tensor, mask = super().take(node, key)
        return self.change(key, tensor), mask


def over_the_wire(dtype: str, key: TensorKey, tensor: torch.Tensor, *, gradient_factor: float = 1.0) -> torch.Tensor:
    """Encode and decode; gradients are ``gradient_factor`` times as large on their way."""
    factor = gradient_factor if key.payload == Payload.GRAD else 1.0
    encoded = tensors.encode(tensor * factor, None, dtype)
    payload = memoryview(bytearray(b"".join(encoded.parts)))
    came, _ = tensors.decode(payload, encoded.shape, dtype, 0, compute_dtype=tensor.dtype, exponent=encoded.exponent)
    return came / factor


def noise(dtype: str, seed: int) -> Change:
    """Uniform noise of the size of the rounding to ``dtype``."""
    generator = torch.Generator().manual_seed(seed)

    def change(_: TensorKey, tensor: torch.Tensor) -> torch.Tensor:
        size = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 1 / 254}[dtype]
        around = tensor.abs().amax(dim=-1, keepdim=True) if dtype == "int8" else tensor
        return tensor + around * size * (2 * torch.rand(tensor.shape, generator=generator) - 1)

    return change


class Trained:
    """What a run trained, and its loss at each step."""

    def __init__(self, case: Case, change: Change) -> None:
        plan = case.plan(SLICES)
        carrier = ChangingCarrier(make_carrier(case, plan).executors)
        carrier.change = change
        rng = random.Random(0)
        result = RecordedRing(
            plan, action_s=lambda *_: rng.random(), message_s=lambda *_: rng.random(), carrier=carrier
        ).run()
        assert result.finish is not None and result.finish.error == "", result.finish
        logged = [entry for entry in result.logged if isinstance(entry, LogStep) and entry.turn.kind is StepKind.TRAIN]
        sums = [dict(entry.values) for entry in sorted(logged, key=lambda entry: entry.step)]
        self.losses = torch.tensor([values["loss_sum"] / values["count"] for values in sums], dtype=torch.float64)
        self.tensors = carrier.collected(plan, list(turn_sequence(plan.course))[-1].owner)

    def deviation(self, other: Trained) -> float:
        """The largest difference of the losses of a step."""
        return float((self.losses - other.losses).abs().max())


def case_of(folder: Path, wire: str, num_steps: int = 40) -> Case:
    """Steps on four hosts that all train from the first one on, with two owners."""
    values: dict[str, Any] = {"method": "all", "microbatches": 2, "owners": ("a", "b"), "num_steps": num_steps}
    return Case(folder=folder, dtype="float32", wire=wire, **values)


@functools.lru_cache(maxsize=1)
def exact(folder: Path) -> Trained:
    """The run in float32."""
    return Trained(case_of(folder, "float32"), lambda key, tensor: tensor)


def rounded(case: Case) -> Trained:
    """The run whose tensors travel in the type of the case."""
    return Trained(case, functools.partial(over_the_wire, case.wire))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.thorough
def test_training_in_a_reduced_wire_type_follows_float32(folder: Path, dtype: str) -> None:
    """The losses stay within twice what undirected noise of that size does, and fall as in float32."""
    case = case_of(folder, dtype)
    found = rounded(case)
    bound = 2 * max(Trained(case, noise(dtype, seed)).deviation(exact(folder)) for seed in SEEDS)
    assert 0.0 < found.deviation(exact(folder)) <= bound
    assert exact(folder).losses[-10:].mean() < 0.8 * exact(folder).losses[:10].mean()
    assert found.losses[-10:].mean() < 0.8 * found.losses[:10].mean()


@pytest.mark.parametrize("power", [-30, 30])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.sampled(1)
def test_training_does_not_depend_on_the_size_of_gradients(folder: Path, dtype: str, power: int) -> None:
    """Gradients that travel 2^30 times smaller, most below 1e-8, or larger, train the very same tensors."""
    case = case_of(folder, dtype, num_steps=8)
    found = Trained(case, functools.partial(over_the_wire, dtype, gradient_factor=2.0**power))
    assert distance(found.tensors, rounded(case).tensors) == 0.0
