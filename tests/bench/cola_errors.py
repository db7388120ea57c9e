"""Part ``errors`` of ``make bench-cola``: what it changes that pairs travel rounded to 16 bits, or projected.

Rings of an owner, which hosts all blocks, and a helper train the demo's model on its sentences in float32: 50 steps of
AdamW on batches of 8, an update after every step, for each kind of adapter. Two errors, relative, of all adapters as
one vector::

    gradient   |g' - g| / |g|            g: gradient of one update from pairs as they were computed
                                         g': from the same pairs as the wire gives them back; the worst of 50 updates
    weight     |w' - w| / |w - start|    w: after 50 updates from exact pairs; w': after 50 from those of the wire

So the weight error is in parts of how far the adapters moved, not of what they are: LoRA and bottlenecks begin with
numbers that are larger than their change. Bounds for 16 bits: 1e-2 and 5e-2. What projected pairs (VeLoRA) give is
told without a bound.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from edge.runtime.executor import NodeExecutor
from edge.techniques.offload.helper import AuxiliaryModels
from edge.techniques.offload.pairs import PairWire
from ringtune.costs.offload_costs import BFLOAT16, VELORA
from ringtune.schedule.actions import Action, Op
from ringtune.techniques.offload import RowsOfUser
from tests.bench.cola_ring import HELPER, HOST, LINEAR, LORA, MLP, Inputs, Ring, Training, distance_of_changes
from tests.bench.kept_results import say
from tests.bench.memory_accuracy import sentences
from tests.support.torch_ring import TorchCarrier

ADAPTERS: Final = {"lora 8": LORA, "linear": LINEAR, "mlp": MLP, "seq_bn": "seq_bn"}
RATES: Final = {"lora 8": 1e-3, "linear": 1e-4, "mlp": 3e-4, "seq_bn": 1e-3}
STEPS: Final = 50
WIRES: Final = (BFLOAT16, VELORA)
BOUNDS: Final = {f"{BFLOAT16}_gradient_error": 1e-2, f"{BFLOAT16}_weight_error": 5e-2}


class Shadow:
    """Adapters that follow a helper's, and take the same pairs from another wire.

    Args:
        models: the helper's.
        wire: how pairs come to the shadow.
        own: adapters for the shadow.
    """

    def __init__(self, models: AuxiliaryModels, wire: str, own: AuxiliaryModels) -> None:
        self._models, self._own = models, own
        self._sender, self._reader = PairWire(wire, models.inputs()), PairWire(wire, models.inputs())
        self.errors: list[float] = []

    def fit(self, pairs: Mapping[str, torch.Tensor]) -> None:
        """Add up gradients from what the wire makes of these pairs; the weights are first those of the helper."""
        with torch.no_grad():
            for ours, theirs in zip(self._all(self._own), self._all(self._models), strict=True):
                ours.copy_(theirs)
        self._own.fit(self._reader.decode(self._sender.encode(pairs), torch.float32))

    def compare(self) -> None:
        """Note the error of this update's gradients, and drop the shadow's."""
        ours, theirs = (torch.cat([p.grad.flatten() for p in self._all(one)]) for one in (self._own, self._models))
        self.errors.append(float((ours - theirs).norm() / theirs.norm()))
        for parameter in self._all(self._own):
            parameter.grad = None

    @staticmethod
    def _all(models: AuxiliaryModels) -> list[Any]:
        return list(models.parameters(models.units.start, models.units.stop).values())


class Watched(TorchCarrier):
    """A carrier that shows the helper's pairs and updates to shadows."""

    def __init__(self, executors: Mapping[str, NodeExecutor]) -> None:
        super().__init__(executors)
        self.shadows: dict[str, Shadow] = {}

    def watch(self, own: Callable[[], AuxiliaryModels]) -> None:
        """Let a shadow for each wire follow the helper; ``own`` makes its adapters.

        The host says which units of a ReLU are on, as it does for a wire that rounds.
        """
        (models,) = self.executors[HELPER]._hosted.helped
        self.executors[HOST]._hosted.captures.with_signs = True
        self.shadows = {wire: Shadow(models, wire, own()) for wire in WIRES}
        fit = models.fit

        def fit_all(
            pairs: Mapping[str, torch.Tensor], rows: Sequence[RowsOfUser] = (), blocks: Collection[int] | None = None
        ) -> None:
            fit(pairs, rows, blocks)
            for shadow in self.shadows.values():
                shadow.fit(pairs)

        models.fit = fit_all  # type: ignore[method-assign, assignment]

    def run(self, node: str, action: Action) -> tuple[tuple[str, float], ...]:
        """Compare before the helper's update."""
        if node == HELPER and action.op is Op.UPDATE:
            for shadow in self.shadows.values():
                shadow.compare()
        return super().run(node, action)


def measure(folder: Path) -> dict[str, Any]:
    """All adapters and wires."""
    torch.set_num_threads(1)
    model, rows, _ = sentences()
    cases = {name: case_errors(name, Inputs(model=model, train=rows)) for name in ADAPTERS}
    return {"cases": cases, "figures": figures_of(cases)}


def case_errors(name: str, inputs: Inputs, steps: int = STEPS) -> dict[str, float]:
    """The errors of one kind of adapter."""
    watched, wanted = list[Watched](), Training(adapter=ADAPTERS[name], rate=RATES[name], steps=steps)

    def carrier(executors: Mapping[str, NodeExecutor]) -> TorchCarrier:
        watched.append(Watched(executors))
        return watched[0]

    ring = Ring(wanted, inputs, carrier)
    blocks = range(ring.plan.course.num_blocks)
    watched[0].watch(lambda: AuxiliaryModels(inputs.model, ring.job, blocks, torch.float32, torch.device("cpu")))
    start, found = ring.adapters(), dict[str, float]()
    ring.run()
    for wire, shadow in watched[0].shadows.items():
        other = Ring(dataclasses.replace(wanted, pairs=wire), inputs)
        other.run()
        found[f"{wire}_gradient_error"] = max(shadow.errors)
        found[f"{wire}_mean_gradient_error"] = statistics.mean(shadow.errors)
        found[f"{wire}_weight_error"] = distance_of_changes(other.adapters(), ring.adapters(), start)
    say(f"{name}: {found}")
    return found


def figures_of(cases: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Each error with a bound, of the kind of adapter where it is largest."""
    return {figure: max(case[figure] for case in cases.values()) for figure in BOUNDS}


def missed(figures: dict[str, Any]) -> list[str]:
    """The errors above their bound, by kind of adapter."""
    return [
        f"{figure} of {name} is {case[figure]:.2e}, at most {bound:g}"
        for name, case in figures["cases"].items()
        for figure, bound in BOUNDS.items()
        if case[figure] > bound
    ]
