"""Checkpoints and resumption on a virtual clock: the same steps, whatever the timing and the stop."""

from __future__ import annotations

import random

import pytest

from ringtune.errors import PlanError
from ringtune.run_control import events as rd
from ringtune.run_control.state_machine import RunStateMachine
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, items, turn_sequence
from sim.ring import RingResult, VirtualRing
from tests.support.plans import make_plan, random_plan
from tests.support.validate import validate_table

THREE = [("a", 0, 2), ("b", 2, 3), ("c", 3, 4)]


def run(plan: Plan, seed: int, *, start: StartPoint | None = None, drain_at_s: float | None = None) -> RingResult:
    """Run with random delays."""
    rng = random.Random(seed)
    return VirtualRing(
        plan,
        action_s=lambda node, action: rng.random(),
        message_s=lambda source, target, payload: rng.choice([0.0, 2.0]) * rng.random(),
        control_s=lambda node: rng.random(),
        start=start,
        drain_at_s=drain_at_s,
        items_ahead=rng.choice([1, 16]),
    ).run()


def train_actions(
    plan: Plan, result: RingResult, start: StartPoint | None = None
) -> dict[str, list[tuple[int, Action]]]:
    """Per node the actions that change weights, with the train step instead of ``seq``."""
    steps = {
        item.seq: item.step
        for turn in turn_sequence(plan.course, start=start)
        if turn.kind is StepKind.TRAIN
        for item in items(plan.course, turn)
    }
    changing = (Op.FORWARD, Op.BACKWARD, Op.HEAD, Op.UPDATE)
    return {
        node: sorted(
            (steps[action.seq], action._replace(seq=0))
            for action in order
            if action.op in changing and action.seq in steps
        )
        for node, order in result.order.items()
    }


def logged(result: RingResult) -> list[rd.LogCheckpoint]:
    """The checkpoints that became complete, in order."""
    return [entry for entry in result.logged if isinstance(entry, rd.LogCheckpoint)]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.sampled(8)
def test_checkpoint_resumed_run_does_the_rest_of_the_steps(seed: int) -> None:
    """From any complete checkpoint the run goes on with exactly the steps that were left, all valid."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    whole = run(plan, seed)
    assert whole.finish == rd.Finish("", "")
    all_actions = train_actions(plan, whole)
    for checkpoint in logged(whole)[:3]:
        start = StartPoint.of(plan.course, step=checkpoint.step, holder=checkpoint.holder)
        rest = run(plan, seed + 1, start=start)
        assert rest.finish == rd.Finish("", ""), (seed, checkpoint)
        turns = list(turn_sequence(plan.course, start=start))
        if turns:
            validate_table(plan, turns, rest.order, start=start)
        left = {
            node: [entry for entry in actions if entry[0] >= checkpoint.step] for node, actions in all_actions.items()
        }
        assert train_actions(plan, rest, start) == left


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.sampled(8)
def test_checkpoint_saves_one_version_on_every_node(seed: int) -> None:
    """Every node saves exactly once a checkpoint, between the updates of the steps before and after."""
    plan = make_plan(THREE, ["b", "d"], num_steps=12, every_steps=2, checkpoint_every=4, eval_every=3)
    result = run(plan, seed)
    assert [(entry.step, entry.holder) for entry in logged(result)] == [(4, "d"), (8, "d"), (12, "d")]
    steps = {item.seq: item.step for turn in turn_sequence(plan.course) for item in items(plan.course, turn)}
    for order in result.order.values():
        last_update = -1
        saves = []
        for action in order:
            if action.op is Op.UPDATE:
                assert action.seq in steps
                last_update = max(last_update, steps[action.seq])
            elif action.op is Op.SAVE:
                saves.append(steps[action.seq])
                assert last_update < steps[action.seq]
        assert saves == [4, 8, 12]


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.sampled(3)
def test_drain_ends_with_a_checkpoint_from_which_the_run_goes_on(seed: int) -> None:
    """A run that is stopped anywhere saves at the next boundary; together both parts do every step once."""
    plan = make_plan(THREE, ["b", "a"], num_steps=24, every_steps=3, eval_every=6, checkpoint_every=0)
    whole = train_actions(plan, run(plan, 0))
    stopped = run(plan, seed, drain_at_s=10.0 + 5 * seed)
    assert stopped.finish is not None
    assert stopped.finish.error in ("InterruptedRunError", "")
    if not stopped.finish.error:
        return
    (checkpoint,) = logged(stopped)
    start = StartPoint.of(plan.course, step=checkpoint.step, holder=checkpoint.holder)
    first, second = train_actions(plan, stopped), train_actions(plan, run(plan, seed, start=start), start)
    assert {node: first[node] + second[node] for node in whole} == whole


@pytest.mark.parametrize("step", [0, 4])
@pytest.mark.sampled(1)
def test_drain_does_not_save_a_step_twice(step: int) -> None:
    """While owners evaluate a step that has a checkpoint, saving again would break it: another node has the head."""
    plan = make_plan(
        THREE, ["b", "a"], num_steps=12, local_iterations=2, eval_rows=24, checkpoint_every=2, eval_every=2
    )
    start = StartPoint.of(plan.course, step=step, holder="b") if step else None
    for drain_at_s in range(10, 250, 7):
        steps = [entry.step for entry in logged(run(plan, 0, start=start, drain_at_s=float(drain_at_s)))]
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
