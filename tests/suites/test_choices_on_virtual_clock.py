"""Runs that choose their operation tables, on a virtual clock: the scores decide, and no timing does."""

from __future__ import annotations

import dataclasses
import functools
import gc
import random

import pytest

from ringtune.run_control import events as rd
from ringtune.schedule.actions import Action, Op, Payload
from ringtune.schedule.course import TABLES_AT_ONCE
from ringtune.schedule.lowering import links
from ringtune.schedule.methods import RingAda
from ringtune.schedule.methods.base import Patience
from ringtune.schedule.operation_tables import Choice, Operations, ScheduledTable
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, Turn, items, table_is_due, turn_sequence
from sim.ring import RingResult, VirtualRing
from tests.support.choosing import DrawnTables, make_choice, random_choice
from tests.support.plans import changed, make_plan, random_plan
from tests.support.validate import validate_table

THREE = [("a", 0, 2), ("b", 2, 3), ("c", 3, 4)]
SCORING = make_choice(refresh_steps=4)


def choosing_plan(seed: int) -> Plan:
    """Any shape of run that chooses its tables."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    if rng.random() < 0.3:
        plan = changed(plan, method=RingAda(every_steps=0, auto=Patience(patience_steps=rng.randint(1, 4))))
    return changed(plan, choice=random_choice(rng))


def run(
    plan: Plan, timing: int, *, seed: int = 0, start: StartPoint | None = None, drain_at_s: float | None = None
) -> RingResult:
    """Run with random delays."""
    rng = random.Random(timing)
    speeds = {node: rng.choice([0.1, 1.0, 3.0]) for node in plan.nodes}
    return VirtualRing(
        plan,
        action_s=lambda node, action: speeds[node] * rng.random(),
        message_s=lambda source, target, payload: rng.choice([0.0, 2.0]) * rng.random(),
        control_s=lambda node: rng.choice([0.0, 0.0, 0.0, 20.0]) * rng.random(),
        items_ahead=rng.choice([1, 16]),
        start=start,
        drain_at_s=drain_at_s,
        chooser=DrawnTables(plan, seed),
        choose_s=lambda: rng.choice([0.0, 30.0]) * rng.random(),
    ).run()


def turns_of(result: RingResult) -> list[Turn]:
    """The turns that were closed, with what they carried."""
    return [entry.turn for entry in result.logged if isinstance(entry, rd.LogTurn)]


def decisions(result: RingResult) -> list[rd.LogOperations]:
    """The tables that were chosen, in order."""
    return [entry for entry in result.logged if isinstance(entry, rd.LogOperations)]


def checkpoints(result: RingResult) -> list[rd.LogCheckpoint]:
    """The checkpoints that became complete, in order."""
    return [entry for entry in result.logged if isinstance(entry, rd.LogCheckpoint)]


def train_actions(result: RingResult) -> dict[str, list[tuple[int, Action]]]:
    """Per node what it computed for train items, with the step instead of ``seq``."""
    steps = {
        turn.first_seq + offset: turn.first_step + offset
        for turn in turns_of(result)
        if turn.kind is StepKind.TRAIN
        for offset in range(turn.num_items)
    }
    return {
        node: sorted(
            (steps[action.seq], action._replace(seq=0))
            for action in order
            if action.seq in steps and action.payload != Payload.HEAD
        )
        for node, order in result.order.items()
    }


@pytest.mark.parametrize("block", range(10))
@pytest.mark.sampled(1)
def test_choice_gives_the_same_tables_and_work_whatever_the_timing(block: int) -> None:
    """The run ends, its table is valid, and what turns carry is that of every other timing."""
    for seed in range(block * 8, block * 8 + 8):
        plan = choosing_plan(seed)
        first, other = run(plan, seed, seed=seed), run(plan, seed + 1000, seed=seed)
        assert first.finish == rd.Finish("", "") == other.finish, (seed, first.finish)
        validate_table(plan, turns_of(first), first.order)
        due = [step for step in range(plan.course.num_steps) if table_is_due(plan.course, step)]
        boundaries = [turn.first_step for turn in turns_of(first) if turn.kind is StepKind.TRAIN]
        assert [entry.step for entry in decisions(first)] == [step for step in boundaries if step in due]
        assert decisions(other) == decisions(first)
        assert turns_of(other) == turns_of(first)
        assert train_actions(other) == train_actions(first)


@pytest.mark.parametrize("seed", range(12))
def test_choice_depends_on_every_score(seed: int) -> None:
    """Negative control: with other scores the tables are others, where scores count."""
    plan = choosing_plan(seed)
    same = [entry.operations for entry in decisions(run(plan, 1, seed=1))]
    assert same != [entry.operations for entry in decisions(run(plan, 1, seed=2))]


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.sampled(3)
def test_choice_of_a_resumed_run_is_that_of_the_whole(seed: int) -> None:
    """From each checkpoint, also one where a table is due, the same tables come and the same work is done."""
    plan = choosing_plan(seed)
    rng = random.Random(seed)
    plan = changed(plan, method=make_plan(THREE, ["a"]).course.method, checkpoint_every=rng.choice([1, 2, 4]))
    whole = run(plan, seed, seed=seed)
    work = train_actions(whole)
    for saved in checkpoints(whole):
        start = StartPoint.of(plan.course, step=saved.step, holder=saved.holder, operations=saved.operations)
        rest = run(plan, seed + 1, seed=seed, start=start)
        assert rest.finish == rd.Finish("", ""), (seed, saved.step, rest.finish)
        assert decisions(rest) == [entry for entry in decisions(whole) if entry.step >= saved.step]
        left = {node: [entry for entry in actions if entry[0] >= saved.step] for node, actions in work.items()}
        assert train_actions(rest) == left
        if turns_of(rest):
            validate_table(plan, turns_of(rest), rest.order, start=start)


@functools.cache
def drained_plan(checkpoint_every: int) -> tuple[Plan, dict[str, list[tuple[int, Action]]]]:
    """A plan that scores, and what its nodes compute in a run that nobody stops."""
    plan = make_plan(THREE, ["b", "a"], num_steps=24, eval_every=6, checkpoint_every=checkpoint_every)
    plan = changed(plan, choice=SCORING)
    return plan, train_actions(run(plan, 0))


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.sampled(3)
def test_choice_of_a_drained_run_goes_on_where_it_stopped(seed: int) -> None:
    """A run that is stopped anywhere, also while it scores or chooses, does every step once in two parts."""
    plan, whole = drained_plan(4 * (seed % 2))
    stopped = run(plan, seed, drain_at_s=5.0 + 6 * seed)
    assert stopped.finish is not None
    if not stopped.finish.error:
        return
    assert stopped.finish == rd.Finish("InterruptedRunError", "stopped by the user")
    start = None
    if checkpoints(stopped):
        saved = checkpoints(stopped)[-1]
        start = StartPoint.of(plan.course, step=saved.step, holder=saved.holder, operations=saved.operations)
    first, second = train_actions(stopped), train_actions(run(plan, seed, start=start))
    assert {node: first[node] + second[node] for node in whole} == whole


def test_choice_of_a_run_that_is_drained_while_it_scores_first_saves_nothing() -> None:
    """Nothing is trained yet, so there is nothing to save, nor to wait for."""
    plan = changed(make_plan(THREE, ["b", "a"]), choice=SCORING)
    stopped = VirtualRing(plan, drain_at_s=5.0).run()
    assert stopped.finish == rd.Finish("InterruptedRunError", "stopped by the user")
    assert not turns_of(stopped) and not checkpoints(stopped)


@pytest.mark.parametrize("seed", range(10))
def test_choice_is_repeated_by_its_tables_without_scores(seed: int) -> None:
    """The tables that a run has chosen, given to another one, make it do the same work."""
    plan = choosing_plan(seed)
    whole = run(plan, seed, seed=seed)
    tables = [ScheduledTable(step=entry.step, operations=entry.operations) for entry in decisions(whole)]
    again = changed(plan, choice=Choice.given(tables))
    repeated = run(again, seed + 7)
    assert repeated.finish == rd.Finish("", "")
    assert StepKind.SCORE not in {turn.kind for turn in turns_of(repeated)}
    assert decisions(repeated) == decisions(whole)
    assert train_actions(repeated) == train_actions(whole)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.sampled(8)
def test_choice_needs_no_link_that_the_plan_does_not_have(seed: int) -> None:
    """Every tensor and every head travels on a link that the nodes have opened."""
    plan = choosing_plan(seed)
    whole = run(plan, seed, seed=seed)
    known = links(plan)
    assert {(message.source, message.target) for message in whole.messages} <= known
    for saved in checkpoints(whole)[:2]:
        start = StartPoint.of(
            plan.course,
            step=saved.step,
            holder=saved.holder,
            unfreezing=saved.unfreezing,
            operations=saved.operations,
        )
        rest = run(plan, seed, seed=seed, start=start)
        assert {(message.source, message.target) for message in rest.messages} <= links(plan, start)


def test_score_turns_have_every_batch_of_every_owner_once() -> None:
    """One turn of each owner, all its batch ids, forward and backward, no update."""
    plan = changed(make_plan(THREE, ["b", "a"], train_rows=23), choice=SCORING)
    result = run(plan, 0)
    score = [turn for turn in turns_of(result) if turn.kind is StepKind.SCORE and turn.first_step == 0]
    assert [turn.owner for turn in score] == ["b", "a"]
    for turn in score:
        ids = [plan.course.batch_id(item.owner, item.batch) for item in items(plan.course, turn)]
        assert sorted(ids) == list(range(6))
    seqs = {turn.first_seq for turn in turns_of(result) if turn.kind is StepKind.SCORE}
    assert not [
        action for order in result.order.values() for action in order if action.op is Op.UPDATE and action.seq in seqs
    ]


def test_expected_tables_run_without_any_scores() -> None:
    """Where nothing is scored, the run still ends: what-ifs ask for nothing more than times."""
    plan = changed(make_plan(THREE, ["b", "a"], eval_every=4), choice=SCORING)
    result = VirtualRing(plan).run()
    assert result.finish == rd.Finish("", "") and [entry.step for entry in decisions(result)] == [0, 4]
    assert list(turn_sequence(plan.course)) == [dataclasses.replace(turn, operations=None) for turn in turns_of(result)]


def test_choices_of_a_long_run_leave_no_pile_of_tables() -> None:
    """Caches keep the views of a few tables, not of every one that the run has ever chosen."""
    plan = changed(make_plan(THREE, ["a"], num_steps=120), choice=make_choice("random", refresh_steps=2))

    def num_alive() -> int:
        gc.collect()
        return sum(isinstance(value, Operations) for value in gc.get_objects())

    before = num_alive()
    result = VirtualRing(plan, chooser=DrawnTables(plan, "pile"), record=False).run()
    assert result.finish == rd.Finish("", "")
    del result
    assert num_alive() - before <= 3 * TABLES_AT_ONCE
