"""Whatever units a method trains at whatever step, and whatever operations a table has: the engines keep all rules.

The methods here are drawn: at each step any units train, so the head pauses, gradients pass blocks that do not train,
and what trains jumps up and down. Half of the plans have random operations too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from ringtune.costs.memory_estimate import node_memory
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Graph
from ringtune.schedule.methods import Method
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Extent
from ringtune.schedule.table import build_table
from ringtune.schedule.turns import turn_sequence
from ringtune.schedule.units import Units
from sim.ring import RingResult, VirtualRing
from tests.suites.test_memory_on_virtual_clock import peak_waiting
from tests.support import reference
from tests.support.model_facts import WEIGHTLESS
from tests.support.plans import changed, random_plan
from tests.support.torch_ring import Case, distance, make_carrier, write_inputs
from tests.support.validate import validate_table


@dataclass(frozen=True)
class Scattered(Method):
    """Each unit that may train does at two of five steps, at least one at every step."""

    name = "scattered"

    seed: int

    def trained(self, extent: Extent, step: int) -> Units:
        """Drawn anew for each step."""
        rng = random.Random(1000 * self.seed + step)
        chosen = [unit for unit in extent.trainable if rng.random() < 0.4]
        return Units.of(extent.num_blocks, chosen or [rng.choice(list(extent.trainable))])


def scattered_plan(seed: int) -> Plan:
    """Any ring and any method; every second one with operations."""
    plan = random_plan(random.Random(seed), with_operations=seed % 2 == 1)
    return changed(plan, method=Scattered(seed))


def run(plan: Plan, seed: int) -> RingResult:
    """With nodes and links of very different speeds."""
    rng = random.Random(seed)
    speeds = {node: rng.choice([0.01, 1.0, 10.0]) for node in plan.nodes}
    return VirtualRing(
        plan,
        action_s=lambda node, action: speeds[node] * rng.random(),
        message_s=lambda source, target, payload: rng.choice([0.0, 0.1, 5.0]) * rng.random(),
    ).run()


@pytest.mark.promise("2 right version")
@pytest.mark.parametrize("first", range(0, 200, 25))
@pytest.mark.sampled(1)
def test_any_method_finishes_in_a_valid_order(first: int) -> None:
    """No deadlock, every forward sees its version, no update overtakes a backward, whatever trains."""
    for seed in range(first, first + 25):
        plan = scattered_plan(seed)
        result = run(plan, seed)
        assert result.finish == rd.Finish("", ""), (seed, result.finish)
        validate_table(plan, turn_sequence(plan.course), result.order)


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_any_method_has_a_valid_table(first: int) -> None:
    """What is printed of a plan is an order that could be carried out."""
    for seed in range(first, first + 25):
        plan = scattered_plan(seed)
        turns = tuple(turn_sequence(plan.course))
        validate_table(plan, turns, build_table(plan, turns))


@pytest.mark.promise("7 bounded memory")
@pytest.mark.parametrize("first", range(0, 100, 25))
@pytest.mark.sampled(1)
def test_any_method_stays_within_its_memory_estimate(first: int) -> None:
    """No node holds more tensors or graphs than the planner counted."""
    for seed in range(first, first + 25):
        plan = scattered_plan(seed)
        result = run(plan, seed)
        tokens = plan.course.microbatch_sizes()[0] * plan.course.max_length
        for node in plan.nodes:
            estimate = node_memory(plan, node, WEIGHTLESS, optimizer="sgd", activation_token_bytes=1)
            waiting = peak_waiting(plan, node, result.handled[node])
            assert waiting * tokens * plan.course.hidden_size * 4 <= estimate.parts()["buffers"], (seed, node)
            assert peak_graphs(result, node) * tokens <= estimate.parts()["activations"], (seed, node)


def peak_graphs(result: RingResult, node: str) -> int:
    """Most graphs of a block and a micro-batch that a node kept at once; at the end it keeps none."""
    kept = peak = 0
    for action in result.order[node]:
        if action.op.graph is not Graph.NONE:
            kept += (action.stop - action.start) * (1 if action.op.graph is Graph.KEEPS else -1)
        peak = max(peak, kept)
    assert kept == 0
    return peak


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(1)
def test_any_method_trains_as_one_process_does(tmp_path: Path, seed: int) -> None:
    """With tensors in float64: 1e-9 from a reference that sets ``requires_grad`` by the same drawn units."""
    case = Case(folder=write_inputs(tmp_path), num_steps=12, microbatches=2, owners=("a", "b"), dropout=0.1)
    plan = changed(case.plan((("b", 0, 1), ("c", 1, 3), ("a", 3, 4))), method=Scattered(seed))
    carrier = make_carrier(case, plan)
    rng = random.Random(seed)
    result = VirtualRing(plan, action_s=lambda node, action: rng.random(), carrier=carrier).run()
    assert result.finish == rd.Finish("", "")
    alone = reference.train(case.job, plan, case.folder / "model", case.datasets())
    found = carrier.collected(plan, list(turn_sequence(plan.course))[-1].owner)
    assert distance(found, alone.adapter() | alone.head()) < 1e-9
