"""Checkpoints and stops on a virtual clock: one version on every node, and no step is saved twice.

That a run goes on with the steps that were left is a law of any plan: ``test_any_plan_on_virtual_clock``.
"""

from __future__ import annotations

import random

import pytest

from ringtune.errors import PlanError
from ringtune.run_control import events as rd
from ringtune.run_control.state_machine import RunStateMachine
from ringtune.schedule.actions import Op
from ringtune.schedule.turns import StartPoint, items, turn_sequence
from tests.features.plans import run
from tests.support.plans import make_plan
from tests.support.recorded_ring import RecordedResult

THREE = [("a", 0, 2), ("b", 2, 3), ("c", 3, 4)]


def logged(result: RecordedResult) -> list[rd.LogCheckpoint]:
    """The checkpoints that became complete, in order."""
    return [entry for entry in result.logged if isinstance(entry, rd.LogCheckpoint)]


@pytest.mark.parametrize("step", [0, 4])
@pytest.mark.sampled(1)
def test_drain_does_not_save_a_step_twice(step: int) -> None:
    """While owners evaluate a step that has a checkpoint, saving again would break it: another node has the head."""
    plan = make_plan(
        THREE, ["b", "a"], num_steps=12, local_iterations=2, eval_rows=24, checkpoint_every=2, eval_every=2
    )
    start = StartPoint.of(plan.course, step=step, holder="b") if step else None
    for drain_at_s in range(10, 250, 11):
        steps = [entry.step for entry in logged(run(plan, random.Random(0), start=start, drain_at_s=float(drain_at_s)))]
        assert steps == list(range(step + 2, step + 2 + 2 * len(steps), 2))


def test_drain_before_training_stops_at_once() -> None:
    """While nothing is trained there is nothing to save."""
    rounds = RunStateMachine(lambda facts: make_plan(THREE, ["a"]))
    rounds.handle(rd.Started(("a", "b", "c")), 0.0)
    assert rounds.handle(rd.DrainRequested("Ctrl-C"), 0.0)[-1] == rd.Finish("InterruptedRunError", "Ctrl-C")


def test_drain_twice_stops_at_once() -> None:
    """Whoever asks again does not want to wait."""
    plan = make_plan(THREE, ["a"])
    rounds = RunStateMachine(lambda facts: plan)
    rounds.handle(rd.Started(plan.nodes), 0.0)
    for node in plan.nodes:
        rounds.handle(rd.Inspected(node, None), 0.0)
    for node in plan.nodes:
        rounds.handle(rd.Prepared(node), 0.0)
    answer = rounds.handle(rd.DrainRequested("Ctrl-C"), 0.0)
    assert [type(command).__name__ for command in answer] == ["Grant"]
    assert rounds.handle(rd.DrainRequested("Ctrl-C"), 0.0)[-1] == rd.Finish("InterruptedRunError", "Ctrl-C")


@pytest.mark.parametrize(
    ("step", "holder", "message"), [(3, "a", "turn boundary"), (99, "a", "turn boundary"), (2, "z", "no owner")]
)
def test_start_point_that_does_not_fit_the_plan_is_refused(step: int, holder: str, message: str) -> None:
    """A checkpoint of another plan can't be continued."""
    with pytest.raises(PlanError, match=message):
        StartPoint.of(make_plan(THREE, ["a", "b"]).course, step=step, holder=holder)


def test_checkpoint_saves_one_version_on_every_node() -> None:
    """Every node saves exactly once a checkpoint, between the updates of the steps before and after."""
    plan = make_plan(THREE, ["b", "d"], num_steps=12, every_steps=2, checkpoint_every=4, eval_every=3)
    steps = {item.seq: item.step for turn in turn_sequence(plan.course) for item in items(plan.course, turn)}
    for seed in range(5):
        result = run(plan, random.Random(seed))
        assert [(entry.step, entry.holder) for entry in logged(result)] == [(4, "d"), (8, "d"), (12, "d")]
        for order in result.order.values():
            changes = [action for action in order if action.op in (Op.UPDATE, Op.SAVE) and action.seq in steps]
            saves = [at for at, action in enumerate(changes) if action.op is Op.SAVE]
            assert [steps[changes[at].seq] for at in saves] == [4, 8, 12], seed
            for at in saves:
                assert all(steps[action.seq] < steps[changes[at].seq] for action in changes[:at]), seed
