"""A move changes nothing: a run that moves between placements ends with the very bits of one that stays."""

from __future__ import annotations

import random

import pytest

from ringtune.run_control import events as rd
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import no_replicas
from tests.features.feature import Feature, carry_out, each_technique, run_of
from tests.features.memory import VELORA
from tests.features.methods import PLAIN
from tests.features.models import INVERTIBLE, OWN_WEIGHTS
from tests.features.offload import WITH_HELPERS
from tests.features.operations import CHOICES, TABLES
from tests.support.moves import moving, random_slices
from tests.support.torch_ring import distance, same_bits

NODES = ("a", "b", "c", "d", "e")
HELPED = [one for one in WITH_HELPERS if one.changes.get("local_iterations", 2) < one.changes.get("num_steps", 4)]
MOVES = [*PLAIN, *OWN_WEIGHTS[:1], *VELORA, *TABLES[:-1], *CHOICES, *INVERTIBLE, *HELPED]
SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))])


def moved(feature: Feature, rng: random.Random) -> Plan:
    """A plan on up to four random placements, each from a random turn on."""
    case = feature.case
    num_turns = -(-case.num_steps // case.local_iterations)
    turns = sorted(rng.sample(range(1, num_turns), rng.randint(1, min(3, num_turns - 1))))
    own = feature.plan_on(feature.split)
    several = not (no_replicas(own.course) or own.placement.helpers)
    begins, *later = (
        random_slices(rng, NODES, case.private_blocks, 4, with_replicas=several) for _ in range(len(turns) + 1)
    )
    first = own if own.placement.helpers else feature.plan(case, begins)
    return moving(first, *zip(turns, later, strict=True))


@pytest.mark.promise("1 partition invariance")
@SEEDS
@each_technique(MOVES)
def test_moving_run_equals_one_that_stays(feature: Feature, seed: int) -> None:
    """Random placements from random turns on; sums of several hosts' sums, and gradients of pairs, round otherwise."""
    plan = moved(feature, random.Random(f"{feature.name} {seed}"))
    run, still = carry_out(feature, plan, seed), run_of(feature, feature.split)
    assert len(run.logged(rd.LogMove)) == len(plan.placements) - 1
    assert distance(run.tensors, still.tensors) < 1e-9
    if not any(one.has_replicas or one.helpers for one in plan.placements):
        assert same_bits(run.tensors, still.tensors)
    assert run.evaluations.keys() == still.evaluations.keys()


@SEEDS
@each_technique(MOVES[:8])
def test_run_whose_moves_fail_equals_one_that_stays(feature: Feature, seed: int) -> None:
    """Nothing that was trained is lost where all go back to the placement that they had."""
    rng = random.Random(f"fails {feature.name} {seed}")
    plan = moved(feature, rng)
    bad = {one.placement_number: rng.choice(plan.at(one.placement_number).nodes) for one in plan.placements[1:]}
    run = carry_out(
        feature,
        plan,
        seed,
        fails_to_move=lambda move: "it is full" if bad.get(move.part.placement.placement_number) == move.node else "",
    )
    assert {entry.placement_number for entry in run.logged(rd.LogMove) if entry.problem} == set(bad)
    assert distance(run.tensors, run_of(feature, feature.split).tensors) < 1e-9
