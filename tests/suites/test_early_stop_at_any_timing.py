"""A run that ends early: at the step that its evaluations say, whatever the timing, and also when it was resumed."""

from __future__ import annotations

from functools import cache

import pytest

from ringtune.run_control import events as rd
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import NONE_DONE, StartPoint
from sim.ring import RingResult
from tests.support.resumed import holder_of, rebuilt, run, same_bits
from tests.support.torch_ring import Case, TorchCarrier, make_carrier, write_inputs

SLICES = (("a", 0, 2), ("b", 2, 3), ("c", 3, 4))
PATIENCE = 2


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Two owners, so fast a rate that the held-out loss soon gets worse, an evaluation every two steps."""
    folder = write_inputs(tmp_path_factory.mktemp("early"))
    more = {"local_iterations": 2, "num_steps": 20, "every_steps": 1, "eval_every": 2, "checkpoint_every": 2}
    return Case(folder=folder, owners=("b", "a"), microbatches=2, **more)  # type: ignore[arg-type]


def of(kind: type, result: RingResult) -> list[object]:
    """What was logged of a kind."""
    return [entry for entry in result.logged if isinstance(entry, kind)]


@cache
def whole_run(case: Case) -> tuple[Plan, TorchCarrier, RingResult, int]:
    """The run without patience, and the step with which two evaluations in a row were not better, by hand."""
    plan = case.plan(SLICES)
    carrier = make_carrier(case, plan)
    result = run(plan, carrier, 0)
    losses: list[float] = []
    for entry in of(rd.LogEvaluation, result):
        sums = dict(entry.values)  # type: ignore[attr-defined]
        losses.append(sums["loss_sum"] / sums["count"])
        if len(losses) > PATIENCE and min(losses[:-PATIENCE]) <= min(losses[-PATIENCE:]):
            return plan, carrier, result, entry.step  # type: ignore[attr-defined]
    raise AssertionError(f"the loss gets better to the end, so that nothing is tested: {losses}")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(1)
def test_early_stop_ends_at_the_step_of_the_evaluations(case: Case, seed: int) -> None:
    """No step is trained beyond it; evaluations and result are those of the longer run up to there."""
    plan, before, whole, step = whole_run(case)
    carrier = make_carrier(case, plan)
    result = run(plan, carrier, seed, patience_evals=PATIENCE)
    assert result.finish == rd.Finish("", "")
    (stop,) = of(rd.LogStop, result)
    assert (stop.step, stop.evaluations.waited) == (step, PATIENCE)  # type: ignore[attr-defined]
    assert 2 < step < plan.course.num_steps
    assert max(entry.step for entry in of(rd.LogStep, result)) == step  # type: ignore[attr-defined]
    evaluations = of(rd.LogEvaluation, result)
    assert evaluations == of(rd.LogEvaluation, whole)[: len(evaluations)]
    assert carrier.shards[step] == before.shards[step]


def test_early_stop_of_a_resumed_run_is_that_of_the_whole(case: Case) -> None:
    """From any checkpoint: the manifest has what is known of the evaluations before it."""
    plan, _, _, step = whole_run(case)
    carrier = make_carrier(case, plan)
    result = run(plan, carrier, 5, patience_evals=PATIENCE)
    wanted = carrier.collected(plan, holder_of(plan, result))
    saved = of(rd.LogCheckpoint, result)
    assert saved[0].evaluations == NONE_DONE and saved[-1].evaluations.waited == PATIENCE - 1  # type: ignore[attr-defined]
    for checkpoint in (saved[0], saved[-1]):
        assert isinstance(checkpoint, rd.LogCheckpoint)
        start = StartPoint.of(
            plan.course, step=checkpoint.step, holder=checkpoint.holder, evaluations=checkpoint.evaluations
        )
        again = rebuilt(case, plan, carrier.shards[checkpoint.step], checkpoint)
        rest = run(plan, again, 6, start=start, patience_evals=PATIENCE)
        assert [entry.step for entry in of(rd.LogStop, rest)] == [step]  # type: ignore[attr-defined]
        assert same_bits(again.collected(plan, holder_of(plan, rest)), wanted)


def test_early_stop_leaves_a_run_without_patience_alone(case: Case) -> None:
    """Nothing waits for an evaluation, and nothing is known of them."""
    plan, _, whole, _ = whole_run(case)
    assert of(rd.LogStop, whole) == []
    assert {entry.evaluations for entry in of(rd.LogCheckpoint, whole)} == {NONE_DONE}  # type: ignore[attr-defined]
    assert max(entry.step for entry in of(rd.LogEvaluation, whole)) == plan.course.num_steps  # type: ignore[attr-defined]
