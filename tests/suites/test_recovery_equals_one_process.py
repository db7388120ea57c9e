"""A run that loses hosts ends with what one process trains on the whole model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ringtune.rounds import rounds as rd
from tests.suites.test_recovery_on_virtual_clock import lose_at, recoveries, ring_of
from tests.support.moves import slices_of
from tests.support.plans import changed
from tests.support.resumed import holder_of
from tests.support.torch_ring import Case, distance, make_carrier, reference_of, write_inputs

CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": "sgd", "microbatches": 4},
    "dropout": {"dropout": 0.2, "microbatches": 2},
    "several-owners": {"owners": ("b", "d", "a"), "microbatches": 2, "eval_every": 5},
    "turns-by-rows": {"owners": ("b", "d", "a"), "split": "dirichlet:0.4", "turns": "rows"},
    "checkpoints": {"owners": ("a", "d"), "checkpoint_every": 3, "eval_every": 4},
}
RINGS = (
    (("c", 0, 1), ("e", 1, 3), ("a", 3, 4)),
    (("e", 0, 2), ("c", 2, 4)),
    (("a", 0, 1), ("e", 1, 3, 1), ("f", 1, 3, 1), ("c", 3, 4)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("recovery"))


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_run_that_loses_a_host_equals_one_process(folder: Path, name: str, seed: int) -> None:
    """Any host at any moment, with random times: in float64 adapters and head are those of one process."""
    rng = random.Random(f"{name} {seed}")
    case = Case(folder=folder, **{"local_iterations": 2, "num_steps": 16, "every_steps": 3, **CASES[name]})
    plan = changed(case.plan((("a", 0, 4),)), slices=slices_of(RINGS[seed]))
    carrier = make_carrier(case, plan)
    ring = ring_of(plan, rng, carrier=carrier, keeper=carrier)
    lose_at(ring, rng, [rng.randint(20, 150)])
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    last = recoveries(result)[-1]
    trained = reference_of(case)
    got = carrier.collected(last.part, ring.holder)
    if not case.dropout:
        assert distance(got, trained.adapter() | trained.head()) < 1e-9
    else:  # masks are drawn by step, micro-batch and unit, whoever draws them
        still = make_carrier(case, plan)
        whole = ring_of(plan, rng, carrier=still, keeper=still).run()
        assert distance(got, still.collected(plan, holder_of(plan, whole))) < 1e-9


@pytest.mark.parametrize("name", ["several-owners", "checkpoints"])
def test_run_that_loses_a_host_while_it_collects_equals_one_process(folder: Path, name: str) -> None:
    """All go back to the end of the last turn, where another owner may have the head, and send again."""
    case = Case(folder=folder, **{"local_iterations": 2, "num_steps": 8, "every_steps": 3, **CASES[name]})
    plan = changed(case.plan((("a", 0, 4),)), slices=slices_of(RINGS[0]))
    carrier = make_carrier(case, plan)
    ring = ring_of(plan, random.Random(name), carrier=carrier, keeper=carrier)
    ring.when = lambda what, node: "e" if what == "collect" else None
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    (recovery,) = recoveries(result)
    assert recovery.step == 8
    trained = reference_of(case)
    assert distance(carrier.collected(recovery.part, ring.holder), trained.adapter() | trained.head()) < 1e-9
