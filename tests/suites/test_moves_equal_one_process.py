"""A run that moves between placements ends with what one process trains on the whole model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ringtune.run_control import events as rd
from ringtune.schedule.plan import Plan
from sim.ring import RingResult, VirtualRing
from tests.support.moves import moving, random_slices, slices_of
from tests.support.plans import changed
from tests.support.resumed import holder_of, same_bits
from tests.support.torch_ring import Case, TorchCarrier, distance, make_carrier, reference_of, write_inputs

NODES = ("a", "b", "c", "d", "e")
CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": "sgd", "microbatches": 4},
    "dropout": {"dropout": 0.2, "microbatches": 2},
    "several-owners": {"owners": ("b", "d", "a"), "microbatches": 2, "eval_every": 5},
    "turns-by-rows": {"owners": ("b", "d", "a"), "split": "dirichlet:0.4", "turns": "rows"},
    "private-blocks": {"private_blocks": 1, "owners": ("a", "b")},
    "all": {"method": "all", "owners": ("d",)},
    "checkpoints": {"owners": ("a", "c"), "checkpoint_every": 3, "eval_every": 4},
    "whole-blocks": {"adapter": "full", "owners": ("a", "b")},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("moves"))


def moved(case: Case, rng: random.Random) -> Plan:
    """A plan of the case on up to four random placements."""
    first = case.private_blocks
    num_turns = -(-case.num_steps // case.local_iterations)
    turns = sorted(rng.sample(range(1, num_turns), rng.randint(1, 3)))
    (begins, *later) = (random_slices(rng, NODES, first, 4) for _ in range(len(turns) + 1))
    plan = changed(case.plan((("a", first, 4),)), slices=slices_of(begins))
    return moving(plan, *zip(turns, later, strict=True))


def run(plan: Plan, carrier: TorchCarrier, rng: random.Random, **values: Any) -> RingResult:
    """With random times, that of moves included."""
    return VirtualRing(
        plan,
        carrier=carrier,
        action_s=lambda node, action: rng.random(),
        message_s=lambda source, target, payload: rng.random(),
        control_s=lambda node: rng.random(),
        move_s=lambda move: rng.random(),
        **values,
    ).run()


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(2)
def test_moving_run_equals_one_process(folder: Path, name: str, seed: int) -> None:
    """Random placements from random turns on: in float64 adapters and head are those of one process."""
    rng = random.Random(f"{name} {seed}")
    case = Case(folder=folder, **{"local_iterations": 2, "num_steps": 12, "every_steps": 3, **CASES[name]})
    plan = moved(case, rng)
    carrier = make_carrier(case, plan)
    result = run(plan, carrier, rng)
    assert result.finish == rd.Finish("", "")
    trained = reference_of(case)
    wanted = trained.adapter() | trained.head()
    still = make_carrier(case, plan.at(0))
    assert run(plan.at(0), still, rng).finish == rd.Finish("", "")
    got = carrier.collected(plan.at(len(plan.placements) - 1), holder_of(plan, result))
    if not any(one.has_replicas for one in plan.placements):  # sums of sums round otherwise
        assert same_bits(got, still.collected(plan.at(0), holder_of(plan, result)))
    if not case.dropout:
        assert distance(got, wanted) < 1e-9


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(1)
def test_run_whose_moves_fail_equals_one_process(folder: Path, seed: int) -> None:
    """Nothing that was trained is lost where all go back to the placement that they had."""
    rng = random.Random(seed)
    case = Case(folder=folder, owners=("a", "c"), local_iterations=2, num_steps=12, every_steps=3, microbatches=2)
    plan = moved(case, rng)
    bad = {
        one.placement_number: rng.choice(plan.at(one.placement_number).nodes)
        for one in plan.placements[1:]
        if rng.random() < 0.8
    }
    carrier = make_carrier(case, plan)
    result = run(
        plan,
        carrier,
        rng,
        fails_to_move=lambda move: "it is full" if bad.get(move.part.placement.placement_number) == move.node else "",
    )
    assert result.finish == rd.Finish("", "")
    told = [entry for entry in result.logged if isinstance(entry, rd.LogMove)]
    assert {entry.placement_number for entry in told if entry.problem} == set(bad)
    last = told[-1].part
    trained = reference_of(case)
    assert distance(carrier.collected(last, holder_of(plan, result)), trained.adapter() | trained.head()) < 1e-9
