"""A run that keeps its best result ends with what one process has after that many steps, whatever happens meanwhile."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from ringtune.run_control import events as rd
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint
from tests.suites.test_recovery_on_virtual_clock import recoveries, ring_of
from tests.support.moves import moving, slices_of
from tests.support.plans import changed
from tests.support.recorded_ring import RecordedResult
from tests.support.recovering_ring import RecoveringRing
from tests.support.tiny import write_rows
from tests.support.torch_ring import (
    Case,
    TorchCarrier,
    distance,
    make_carrier,
    rebuilt,
    reference_of,
    same_bits,
    write_inputs,
)

RING = (("c", 0, 1), ("e", 1, 3), ("a", 3, 4))
OTHER = (("e", 0, 2), ("b", 2, 4))
KEEPS = {"keeps_best": True}
NUM_STEPS = 10
CASES: dict[str, dict[str, Any]] = {
    "ringada": {},
    "private-blocks": {"private_blocks": 1},
    "whole-blocks": {"adapter": "full", "method": "all"},
    "helpers": {"method": "all"},
}
HELPERS = (Helper(node="z", start=0, stop=1), Helper(node="c", start=2, stop=3), Helper(node="z", start=3, stop=4))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Two owners, so fast a rate that the held-out loss soon gets worse, an evaluation every two steps."""
    folder = write_inputs(tmp_path_factory.mktemp("best"))
    write_rows(folder / "eval.csv", 9, seed=2)
    more: dict[str, Any] = {"local_iterations": 2, "num_steps": NUM_STEPS, "every_steps": 1, "eval_every": 2}
    return Case(folder=folder, owners=("b", "a"), microbatches=2, lr_schedule="constant", checkpoint_every=4, **more)


def of(kind: type, result: RecordedResult) -> list[Any]:
    """What was logged of a kind."""
    return [entry for entry in result.logged if isinstance(entry, kind)]


def best_by_hand(result: RecordedResult) -> int:
    """The step with the lowest loss, the first one of equals."""
    losses: dict[int, float] = {}
    for entry in of(rd.LogEvaluation, result):
        sums = dict(entry.values)
        losses[entry.step] = sums["loss_sum"] / sums["count"]
    return min(losses, key=lambda step: (losses[step], step))


def require_best(case: Case, ring: RecoveringRing) -> None:
    """What was sent of the best step is what one process has that ends there."""
    assert ring.result.finish == rd.Finish("", "")
    step, sent = ring.best
    assert step == best_by_hand(ring.result) < case.num_steps, "the best step is not the last one"
    assert [entry.is_best for entry in of(rd.LogEvaluation, ring.result)][-1] is False
    trained = reference_of(dataclasses.replace(case, num_steps=step))
    assert distance(sent, trained.adapter() | trained.head()) < 1e-9


def begun(case: Case, plan: Plan, seed: str, **values: Any) -> tuple[RecoveringRing, TorchCarrier]:
    """A ring that keeps its best result, not yet run."""
    carrier = make_carrier(case, plan)
    rounds = KEEPS | values.pop("rounds", {})
    return ring_of(plan, random.Random(seed), carrier=carrier, keeper=carrier, rounds=rounds, **values), carrier


def plan_of(case: Case) -> Plan:
    """The run on three hosts."""
    first = case.private_blocks
    begins = (("c", first, 2), ("e", 2, 3), ("a", 3, 4)) if first else RING
    return changed(case.plan((("a", first, 4),)), slices=slices_of(begins))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(1)
def test_best_result_is_that_of_a_run_which_ends_there(case: Case, name: str) -> None:
    """At any timing; a run that keeps none trains and evaluates alike."""
    case = dataclasses.replace(case, **CASES[name])
    plan = changed(plan_of(case), helpers=HELPERS if name == "helpers" else ())
    ring, _ = begun(case, plan, name)
    ring.run()
    require_best(case, ring)
    plain, _ = begun(case, plan, "another timing", rounds={"keeps_best": False})
    told = [entry._replace(is_best=None) for entry in of(rd.LogEvaluation, ring.result)]
    assert of(rd.LogEvaluation, plain.run()) == told


def test_best_result_of_all_parameters_is_collected_once(case: Case) -> None:
    """Nodes keep it on their disks, and the last request is for its step; it is that of a run which ends there."""
    hift = dataclasses.replace(case, method="hift", adapter="full", hift="group_size = 2")
    ring, _ = begun(hift, plan_of(hift), "hift", rounds={"patience_evals": 1}, copies=False)
    assert ring.run().finish == rd.Finish("", "")
    step, kept = ring.best
    assert step == best_by_hand(ring.result) < hift.num_steps
    assert ring.collected_best == {step}
    short = dataclasses.replace(hift, num_steps=step)
    ends, carrier = begun(short, plan_of(short), "ends there", rounds={"keeps_best": False}, copies=False)
    ends.run()
    assert same_bits(kept, carrier.collected(plan_of(short), short.owners[0]))
    assert [entry.step for entry in of(rd.LogStop, ring.result)] == [step + 2]


@pytest.mark.parametrize("moment", ["collect best", "head", "embedding", "copy", "hand-over"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(1)
def test_best_result_of_a_run_that_loses_a_host(case: Case, moment: str, seed: int) -> None:
    """Whatever is under way: what is repeated gives the same result, and what never came leaves none."""
    ring, _ = begun(case, plan_of(case), f"{moment} {seed}")
    after = random.Random(f"{moment} {seed}").randint(0, 120)

    def when(what: str, node: str) -> str | None:
        return "e" if what == moment and len(ring.moments) > after and not ring.lost else None

    ring.when = when
    ring.run()
    if ring.lost:
        assert len(recoveries(ring.result)) == 1
    require_best(case, ring)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.thorough
def test_best_result_of_a_run_that_moves(case: Case, seed: int) -> None:
    """The best result is that of nodes of a placement which may hold no more at the end."""
    best, _ = begun(case, plan_of(case), "find")
    step = best_by_hand(best.run())
    for turn in {max(1, step // 2), step // 2 + 1}:
        ring, _ = begun(case, moving(plan_of(case), (turn, OTHER)), f"moves {seed}")
        ring.run()
        assert [entry.problem for entry in of(rd.LogMove, ring.result)] == [""]
        require_best(case, ring)


@pytest.mark.parametrize("turn", [1, 4])
@pytest.mark.sampled(1)
def test_best_result_of_a_run_that_ends_early(case: Case, turn: int) -> None:
    """With patience, in the placement that it moved to, or before the move that was planned: it never comes then."""
    ring, _ = begun(case, moving(plan_of(case), (turn, OTHER)), "early", rounds={"patience_evals": 2})
    ring.run()
    (stop,) = of(rd.LogStop, ring.result)
    assert stop.step == ring.best[0] + 4 < NUM_STEPS
    assert [entry.step for entry in of(rd.LogMove, ring.result)] == ([2 * turn] if 2 * turn < stop.step else [])
    require_best(case, ring)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("drains", [False, True])
def test_best_result_of_a_resumed_run(case: Case, drains: bool) -> None:
    """What a checkpoint knows of the best evaluation was sent before; what it does not know is evaluated again."""
    whole, carrier = begun(case, plan_of(case), "whole")
    if drains:
        whole._drain_at_s = 100.0
    result = whole.run()
    saved = of(rd.LogCheckpoint, result)
    sent = {entry.step for entry in of(rd.LogBest, result)}
    assert {entry.evaluations.best_step for entry in saved} - {0} <= sent
    undisturbed, _ = begun(case, plan_of(case), "undisturbed")
    wanted = best_by_hand(undisturbed.run() if drains else result)
    for checkpoint in dict.fromkeys((saved[0], saved[-1])):
        start = StartPoint.of(
            plan_of(case).course, step=checkpoint.step, holder=checkpoint.holder, evaluations=checkpoint.evaluations
        )
        again = rebuilt(case, plan_of(case), carrier.shards[checkpoint.step], checkpoint)
        rest = ring_of(plan_of(case), random.Random(1), carrier=again, keeper=again, start=start, rounds=KEEPS)
        rest.run()
        assert rest.result.finish == rd.Finish("", "")
        step, tensors = rest.best
        if step < 0:  # nothing better came
            assert checkpoint.evaluations.best_step == wanted
            continue
        assert step == wanted
        trained = reference_of(dataclasses.replace(case, num_steps=step))
        assert distance(tensors, trained.adapter() | trained.head()) < 1e-9
