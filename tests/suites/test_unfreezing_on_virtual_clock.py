"""Automatic unfreezing on a virtual clock: the losses decide, and nothing else does."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from ringtune.errors import PlanError
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Action, Op, TensorKey
from ringtune.schedule.methods import RingAda
from ringtune.schedule.methods.base import Patience
from ringtune.schedule.plan import Plan
from ringtune.schedule.table import build_table, format_table
from ringtune.schedule.turns import StartPoint, StepKind, Turn, items, turn_sequence
from ringtune.schedule.versions import depth, unfreezing_steps
from sim.ring import RingResult, VirtualRing
from tests.support.plans import changed, make_plan, random_plan
from tests.support.tables import parse_table
from tests.support.unfreezing import unfreezing_after
from tests.support.validate import validate_table

THREE = [("a", 0, 2), ("b", 2, 3), ("c", 3, 4)]


def loss_at(step: int, seed: int) -> float:
    """A loss that falls in stairs, with some noise: any function of the step does."""
    rng = random.Random(f"{seed}/{step}")
    return float(0.9 ** (step // (8 + seed % 5)) + 0.02 * rng.random())


class Losses:
    """Gives the head of every train item its loss; messages carry nothing."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self._plan, self._seed = plan, seed
        self._steps: dict[int, int] = {}

    def granted(self, node: str, turn: Turn) -> None:
        """Learn the steps."""
        self._steps |= {item.seq: item.step for item in items(self._plan.course, turn)}

    def run(self, node: str, action: Action) -> tuple[tuple[str, float], ...]:
        """A head gives the loss of its step."""
        if action.op is not Op.HEAD:
            return ()
        return (("count", 2.0), ("loss_sum", 2 * loss_at(self._steps[action.seq], self._seed)))

    def ended(self, node: str, turn: int) -> str:
        """Nothing."""
        return ""

    def take(self, node: str, key: TensorKey) -> Any:
        """Nothing."""

    def put(self, node: str, key: TensorKey, content: Any) -> None:
        """Nothing."""

    def take_head(self, node: str) -> Any:
        """Nothing."""

    def put_head(self, node: str, content: Any) -> None:
        """Nothing."""

    def take_parcel(self, node: str, key: TensorKey) -> Any:
        """Nothing."""

    def put_parcel(self, node: str, key: TensorKey, content: Any) -> None:
        """Nothing."""

    def rest(self, node: str) -> None:
        """Nothing."""

    def move(self, command: rd.Move) -> None:
        """Nothing."""


def auto_plan(seed: int) -> Plan:
    """Any shape of run, with a patience that is soon over."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    auto = Patience(patience_steps=rng.randint(1, 4))
    return changed(plan, method=RingAda(every_steps=0, auto=auto), num_steps=rng.randint(15, 60))


def run(
    plan: Plan, timing: int, *, losses: int = 0, start: StartPoint | None = None, drain_at_s: float | None = None
) -> RingResult:
    """Run with random delays."""
    rng = random.Random(timing)
    speeds = {node: rng.choice([0.1, 1.0, 3.0]) for node in plan.nodes}
    return VirtualRing(
        plan,
        carrier=Losses(plan, losses),
        action_s=lambda node, action: speeds[node] * rng.random(),
        message_s=lambda source, target, payload: rng.choice([0.0, 2.0]) * rng.random(),
        control_s=lambda node: rng.choice([0.0, 0.0, 0.0, 20.0]) * rng.random(),
        items_ahead=rng.choice([1, 16]),
        start=start,
        drain_at_s=drain_at_s,
    ).run()


def turns_of(result: RingResult) -> list[Turn]:
    """The turns that were closed, with what they carried."""
    return [entry.turn for entry in result.logged if isinstance(entry, rd.LogTurn)]


def decisions(result: RingResult) -> list[tuple[int, int]]:
    """(step, depth) of every decision that was logged, in order."""
    return [(entry.step, entry.depth) for entry in result.logged if isinstance(entry, rd.LogUnfreeze)]


def depths(result: RingResult) -> dict[int, int]:
    """The depth of every train step."""
    return {
        entry.step: entry.depth
        for entry in result.logged
        if isinstance(entry, rd.LogStep) and entry.turn.kind is StepKind.TRAIN
    }


def changes(plan: Plan, result: RingResult) -> dict[tuple[str, bool], list[Action]]:
    """Per node and unit (head or slice) the actions that change it, in their order."""
    found: dict[tuple[str, bool], list[Action]] = {}
    for node, order in result.order.items():
        for action in order:
            if action.op in (Op.HEAD, Op.BACKWARD, Op.UPDATE):
                is_head = action.op is Op.HEAD or action.start == plan.course.num_blocks
                found.setdefault((node, is_head), []).append(action)
    return found


def final_plan(plan: Plan, result: RingResult) -> Plan:
    """The plan with the decisions of its last train turn."""
    steps = [turn.unfreeze_at for turn in turns_of(result) if turn.kind is StepKind.TRAIN]
    return plan.decided(steps[-1] if steps else ())


def expected_steps(plan: Plan, losses: int) -> tuple[int, ...]:
    """What the pure rule says of the losses, without any ring."""
    length = plan.course.local_iterations
    turns = [
        range(first, min(first + length, plan.course.num_steps)) for first in range(0, plan.course.num_steps, length)
    ]
    num_micro = len(plan.course.microbatch_sizes())
    means = [
        sum(2 * num_micro * loss_at(step, losses) for step in steps) / (2 * num_micro * len(steps)) for steps in turns
    ]
    return unfreezing_after(plan.course, means).unfreeze_at


@pytest.mark.parametrize("block", range(6))
@pytest.mark.sampled(1)
def test_unfreezing_follows_the_losses_for_any_plan_and_any_delays(block: int) -> None:
    """The run ends, its table is valid, and decisions, depths and order of updates are those of every other timing."""
    for seed in range(block * 10, block * 10 + 10):
        plan = auto_plan(seed)
        first = run(plan, seed, losses=seed)
        assert first.finish == rd.Finish("", ""), (seed, first.finish)
        validate_table(plan, turns_of(first), first.order)
        steps = expected_steps(plan, seed)
        assert [step for step, _ in decisions(first)] == list(steps), seed
        assert [at for _, at in decisions(first)] == list(range(2, 2 + len(steps)))
        settled = plan.decided(steps)
        assert depths(first) == {step: depth(settled.course, step) for step in range(plan.course.num_steps)}
        other = run(plan, seed + 1000, losses=seed)
        assert (turns_of(other), decisions(other), depths(other)) == (turns_of(first), decisions(first), depths(first))
        assert changes(plan, other) == changes(plan, first), seed


def test_unfreezing_plans_of_this_suite_do_unfreeze() -> None:
    """Negative control: most of the runs above have something to decide, and other losses decide otherwise."""
    plans = [auto_plan(seed) for seed in range(60)]
    assert sum(bool(expected_steps(plan, seed)) for seed, plan in enumerate(plans)) > 18
    assert sum(expected_steps(plan, 1) != expected_steps(plan, 2) for plan in plans) > 3


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(3)
def test_unfreezing_can_be_repeated_with_the_steps_of_the_report(seed: int) -> None:
    """A run that is given the steps that another one decided does the same to every weight."""
    plan = auto_plan(seed)
    auto = run(plan, seed, losses=seed)
    steps = unfreezing_steps(final_plan(plan, auto).course)
    repeated = run(changed(plan, method=RingAda(every_steps=0, at=steps)), seed + 1, losses=seed + 7)
    assert changes(plan, repeated) == changes(plan, auto)
    assert depths(repeated) == depths(auto)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.sampled(3)
def test_unfreezing_of_a_resumed_run_takes_the_very_same_decisions(seed: int) -> None:
    """From any checkpoint: the rest of the decisions, at the steps and with the depths of the whole run."""
    plan = changed(auto_plan(seed), checkpoint_every=3)
    whole = run(plan, seed, losses=seed)
    saved = [entry for entry in whole.logged if isinstance(entry, rd.LogCheckpoint)]
    for checkpoint in random.Random(seed).sample(saved, min(3, len(saved))):
        start = StartPoint.of(
            plan.course, step=checkpoint.step, holder=checkpoint.holder, unfreezing=checkpoint.unfreezing
        )
        rest = run(plan, seed + 1, losses=seed, start=start)
        assert rest.finish == rd.Finish("", ""), (seed, checkpoint)
        turns = turns_of(rest)
        if turns:
            validate_table(plan, turns, rest.order, start=start)
        assert decisions(rest) == [entry for entry in decisions(whole) if entry[0] >= checkpoint.step]
        assert depths(rest) == {step: at for step, at in depths(whole).items() if step >= checkpoint.step}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(3)
def test_unfreezing_of_a_drained_run_goes_on_as_if_nobody_had_stopped_it(seed: int) -> None:
    """Ctrl-C at any moment: the checkpoint knows the losses of exactly the turns before it."""
    plan = make_plan(THREE, ["b", "a"], num_steps=40, unfreeze="auto", patience_steps=3, eval_every=6)
    whole = run(plan, 0, losses=seed)
    stopped = run(plan, seed, losses=seed, drain_at_s=40.0 + 10 * seed)
    assert stopped.finish is not None
    (checkpoint,) = [entry for entry in stopped.logged if isinstance(entry, rd.LogCheckpoint)]
    start = StartPoint.of(plan.course, step=checkpoint.step, holder=checkpoint.holder, unfreezing=checkpoint.unfreezing)
    rest = run(plan, seed, losses=seed, start=start)
    assert depths(stopped) | depths(rest) == depths(whole)
    assert decisions(stopped) + decisions(rest) == decisions(whole)


def test_unfreezing_without_what_the_checkpoint_knew_is_refused() -> None:
    """Going on with forgotten losses would give another run."""
    plan = make_plan(THREE, ["b", "a"], num_steps=40, unfreeze="auto", patience_steps=3)
    result = run(plan, 0, start=StartPoint.of(plan.course, step=8, holder="b"))
    assert result.finish is not None and result.finish.error == PlanError.__name__
    assert "is of 0 turns, step 8 comes after 4" in result.finish.message


def test_unfreezing_leaves_frozen_blocks_one_turn_ahead() -> None:
    """Frozen hosts work on the next initiator's first batch while the current one still trains, but no further."""
    plan = make_plan(THREE, ["a", "c"], num_steps=16, local_iterations=4, unfreeze="auto", eval_rows=0)
    result = VirtualRing(plan, items_ahead=100).run()
    spans = result.spans["b"]
    turns = turns_of(result)
    for earlier, turn in itertools.pairwise(turns):
        end_of_earlier = max(span.end_s for span in result.spans["c"] if span.action.seq < turn.first_seq)
        start = min(span.start_s for span in spans if span.action.seq >= turn.first_seq)
        assert start < end_of_earlier, earlier
    for first, third in zip(turns, turns[2:], strict=False):
        closed = max(span.end_s for each in result.spans.values() for span in each if span.action.seq < first.end_seq)
        started = min(
            span.start_s for each in result.spans.values() for span in each if span.action.seq >= third.first_seq
        )
        assert started >= closed


def test_unfreezing_by_a_loss_that_rests_is_the_soonest() -> None:
    """The virtual ring without losses is the deepest run that can come, for which memory is planned."""
    plan = make_plan(THREE, ["a", "c"], num_steps=30, unfreeze="auto", patience_steps=3)
    result = VirtualRing(plan).run()
    assert final_plan(plan, result) == plan.soonest()


@pytest.mark.parametrize("steps", [(), (3,), (1, 2, 5)])
def test_unfreezing_at_given_steps_prints_and_validates_as_a_table(steps: tuple[int, ...]) -> None:
    """The static table follows the steps, parses back, and one of another schedule is refused."""
    plan = make_plan(THREE, ["a", "d"], num_steps=8, unfreeze="at", unfreeze_at=steps)
    turns = list(turn_sequence(plan.course))
    table = build_table(plan, turns)
    validate_table(plan, turns, table)
    text = format_table(table, plan.course.num_blocks)
    assert parse_table(text, plan.course.num_blocks) == table
    assert ("B3.0[2,3)" in text) == (len(steps) >= 1)
    assert ("B5.0[0,2)" in text) == (len(steps) >= 3)
    with pytest.raises(PlanError, match="<-- here"):
        validate_table(changed(plan, method=RingAda(every_steps=0, at=(4,))), turns, table)


def test_unfreezing_of_a_turn_is_followed_by_the_static_table() -> None:
    """Turns that carry decisions give the table of the plan that has them."""
    plan = make_plan(THREE, ["a"], num_steps=8, unfreeze="auto")
    turns = [dataclasses.replace(turn, unfreeze_at=(4,)) for turn in turn_sequence(plan.course)]
    table = build_table(plan, turns)
    validate_table(plan, turns, table)
    assert table == build_table(plan.decided((4,)), turn_sequence(plan.course))
