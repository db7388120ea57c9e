"""What must hold for a run with bad steps, which are not finite somewhere at some node, whatever the moment."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Callable

import pytest

from ringtune.run_control import events as rd
from ringtune.run_control.recovery import BadSteps, RecoveryPolicy
from ringtune.run_control.state_machine import RunStateMachine
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.lowering import neighbours
from ringtune.schedule.operation_tables import BlockScores
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, Turn
from tests.suites.test_recovery_on_virtual_clock import (
    drawn_runs,
    ends_for_lack,
    lose_at,
    own_errors,
    recoveries,
    ring_of,
    story,
)
from tests.support.choosing import DrawnTables, make_choice
from tests.support.plans import changed, make_plan

WORK = (Op.FORWARD, Op.FORWARD_FREE, Op.HEAD, Op.BACKWARD, Op.UPDATE)


def bad_at(rng: random.Random, due: list[int]) -> Callable[[str, Action], bool]:
    """Some actions are bad, counted over all nodes, each once."""
    done = 0

    def is_bad(node: str, action: Action) -> bool:
        nonlocal done
        done += action.op in WORK
        if due and action.op in WORK and done >= due[0]:
            due.pop(0)
            return True
        return False

    return is_bad


def small_plan(**course: int) -> Plan:
    """Three hosts; turns of two steps, and a checkpoint and an evaluation after every second turn."""
    values = {"num_blocks": 6, "num_steps": 12, "local_iterations": 2, "eval_every": 4, "checkpoint_every": 4, **course}
    return make_plan([("a", 0, 2), ("b", 2, 4), ("c", 4, 6)], ["a", "d"], **values)  # type: ignore[arg-type]


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("block", range(10))
@pytest.mark.sampled(1)
def test_runs_with_one_bad_step_log_what_undisturbed_ones_do(block: int) -> None:
    """No step is lost and none is logged twice, wherever a number is once not finite, in plans that move too."""
    note_rewind = 0
    for seed, rng, plan, wanted in drawn_runs(block):
        ring = ring_of(plan, rng)
        ring.is_bad = bad_at(rng, [rng.randint(1, 300)])
        result = ring.run()
        assert result.finish == rd.Finish("", ""), (seed, result.finish)
        assert story(result) == story(wanted), seed
        assert ring.surprises == [], seed
        note_rewind += any(one.bad_step and not one.lost for one in recoveries(result))
    assert note_rewind >= 6


@pytest.mark.parametrize("block", range(6))
@pytest.mark.sampled(1)
def test_runs_with_a_bad_step_that_lose_a_host_too_go_on(block: int) -> None:
    """The host may be lost before the bad step, after it, or while all go back."""
    both = 0
    for seed, rng, plan, wanted in drawn_runs(block):
        ring = ring_of(plan, rng)
        ring.is_bad = bad_at(rng, [rng.randint(1, 200)])
        lose_at(ring, rng, [rng.randint(1, 300)])
        result = ring.run()
        if ends_for_lack(result, seed):
            continue
        assert story(result) == story(wanted), seed
        both += bool(ring.lost) and any(one.bad_step for one in recoveries(result))
    assert both >= 1


@pytest.mark.parametrize("op", WORK)
def test_step_that_is_bad_again_ends_the_run(op: Op) -> None:
    """Its turn is done twice, not three times; nothing from it on is logged, and no checkpoint is."""
    plan = small_plan(every_steps=4)
    ring = ring_of(plan, random.Random(3))
    times: list[str] = []

    def is_bad(node: str, action: Action) -> bool:
        turn = ring.turn_of(action)
        is_due = turn.kind is StepKind.TRAIN and turn.first_step == 6 and action.op is op
        times.extend([node] if is_due else [])
        return is_due

    ring.is_bad = is_bad
    result = ring.run()
    assert result.finish is not None
    assert result.finish.error == "DivergedError"
    end = re.search(r"the steps after step (\d) were repeated because of it", result.finish.message)
    assert end is not None, result.finish  # the turn before may have been open too
    assert f"node {times[-1]}: " in result.finish.message
    assert sum(bool(one.bad_step) for one in recoveries(result)) == 1
    steps = [one.step for one in result.logged if isinstance(one, rd.LogStep) and one.turn.kind is StepKind.TRAIN]
    assert int(end[1]) in (4, 6)
    assert steps == list(range(int(end[1])))
    assert [one.step for one in result.logged if isinstance(one, rd.LogCheckpoint)] == [4]


@pytest.mark.parametrize(("node", "goes_on"), [("b", True), ("c", True), ("a", False)])
def test_step_that_is_bad_again_at_a_node_without_rows_is_its_own(node: str, goes_on: bool) -> None:
    """The run does what it would have done, without the node; the losses of an owner are those of the job."""
    plan = small_plan(every_steps=1)
    wanted, ring = ring_of(plan, random.Random(2)).run(), ring_of(plan, random.Random(2))

    def is_bad(name: str, action: Action) -> bool:
        turn = ring.turn_of(action)
        return name == node and turn.kind is StepKind.TRAIN and turn.first_step >= 6 and action.op is Op.BACKWARD

    ring.is_bad = is_bad
    result = ring.run()
    assert result.finish is not None and result.finish.error == ("" if goes_on else "DivergedError")
    assert [one[:2] for one in own_errors(result)] == [(node, "DivergedError")] * goes_on
    assert [bool(one.bad_step) for one in recoveries(result)] == [True, *[False] * goes_on]
    if goes_on:
        assert story(result) == story(wanted)


class SpoiledScores(DrawnTables):
    """Scores of which those of one node have a wrong number."""

    def __init__(self, plan: Plan, node: str, value: float) -> None:
        super().__init__(plan)
        self._node, self._value = node, value

    def scores(self, part: Plan, node: str, turn: Turn) -> tuple[BlockScores, ...]:
        """The first number of the node is the wrong one."""
        first, *others = super().scores(part, node, turn) or (None,)
        if first is None or node != self._node:
            return () if first is None else (first, *others)
        return (first._replace(values=((self._value, 1.0), *first.values[1:])), *others)


@pytest.mark.parametrize(("value", "error"), [(math.nan, "DivergedError"), (-1.0, "IntegrityError")])
@pytest.mark.parametrize("node", ["c", "a"])
def test_node_without_rows_whose_scores_make_no_sense_leaves(node: str, value: float, error: str) -> None:
    """One that is not finite may be of any node, so that it is gathered once more; the run ended for either."""
    plan = changed(small_plan(), choice=make_choice(refresh_steps=4))
    result = ring_of(plan, random.Random(2), chooser=SpoiledScores(plan, node, value)).run()
    goes_on = node == "c"
    assert result.finish is not None and result.finish.error == ("" if goes_on else error)
    assert goes_on or result.finish.message.startswith("node a reports scores at the end of turn ")
    assert [one[:2] for one in own_errors(result)] == [(node, error)] * goes_on
    assert [bool(one.bad_step) for one in recoveries(result)] == [True] * math.isnan(value) + [False] * goes_on


def test_host_whose_neighbours_find_bad_steps_one_after_another_leaves() -> None:
    """Its finite numbers overflow at the next node: one honest host leaves, and then the one beside both."""
    names = ("a", "b", "c", "e", "f", "g")
    plan = make_plan(list(zip(names, range(6), range(1, 7), strict=True)), ["a"], method="all", num_blocks=6)
    plan = changed(plan, num_steps=40, local_iterations=1)

    def place(asked: rd.FindPlacement) -> Placement:
        living = [name for name in names if name not in asked.lost]
        stops = [*range(1, len(living)), plan.course.num_blocks]
        slices = (Slice(node=name, start=at, stop=stops[at]) for at, name in enumerate(living))
        return dataclasses.replace(asked.part.placement, slices=tuple(slices))

    wanted, ring = ring_of(plan, random.Random(2)).run(), ring_of(plan, random.Random(2), place=place)

    def is_bad(name: str, action: Action) -> bool:
        part = ring._rounds._required_migration.part
        is_next = "e" in part.nodes and name == min(neighbours(part, "e"))
        return is_next and action.op is Op.BACKWARD and ring.turn_of(action).first_step >= {"c": 6, "b": 20}[name]

    ring.is_bad = is_bad
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    assert [error.node for error in own_errors(result)] == ["c", "e"]
    assert story(result) == story(wanted)
    bad = BadSteps()  # a node is believed once
    assert [bad.leaving(*each) for each in (("c", "be"), ("d", "ef"), ("d", "f"))] == ["c", "e", "d"]


def test_evaluation_that_is_bad_again_ends_the_run() -> None:
    """It is of a committed turn, so only the evaluation comes again, once."""
    ring = ring_of(small_plan(), random.Random(5))

    def is_bad(node: str, action: Action) -> bool:
        turn = ring.turn_of(action)
        return turn.kind is StepKind.EVALUATE and turn.first_step == 4 and action.op is Op.HEAD

    ring.is_bad = is_bad
    result = ring.run()
    assert result.finish is not None
    assert result.finish.error == "DivergedError"
    assert "happened again" in result.finish.message
    assert len(recoveries(result)) == 1


def test_each_turn_has_a_second_try_of_its_own() -> None:
    """Bad steps that come once each, in turns that are far apart, end nothing."""
    plan = small_plan(num_steps=24)
    wanted = ring_of(plan, random.Random(7)).run()
    ring = ring_of(plan, random.Random(7))
    seen: set[int] = set()

    def is_bad(node: str, action: Action) -> bool:
        turn = ring.turn_of(action)
        is_due = turn.kind is StepKind.TRAIN and turn.first_step in (2, 10, 18) and turn.first_step not in seen
        seen.update([turn.first_step] if is_due else [])
        return is_due

    ring.is_bad = is_bad
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    assert len(recoveries(result)) == 3
    assert story(result) == story(wanted)


@pytest.mark.parametrize(("node", "repeated"), [("c", 5), ("a", 6)])
def test_host_with_ever_more_bad_steps_is_left_out(node: str, repeated: int) -> None:
    """One that reports them whenever that is no repetition would double the time; an owner's rows are needed."""
    plan = make_plan([("a", 0, 1), ("c", 1, 2)], ["a"], num_blocks=2, num_steps=18, local_iterations=1, eval_rows=0)
    wanted, ring, seen = ring_of(plan, random.Random(7)).run(), ring_of(plan, random.Random(7)), set[int]()

    def is_bad(name: str, action: Action) -> bool:
        turn = ring.turn_of(action)
        is_due = name == node and turn.first_step % 3 == 2 and turn.first_step not in seen
        seen.update([turn.first_step] if is_due else [])
        return is_due

    ring.is_bad = is_bad
    result = ring.run()
    assert result.finish == rd.Finish("", "")
    assert sum(bool(one.bad_step) for one in recoveries(result)) == repeated
    assert [one.node for one in own_errors(result)] == ["c"] * (node == "c")
    assert story(result) == story(wanted)


def test_resumed_run_ends_at_a_bad_step_before_a_turn_was_committed() -> None:
    """What it began with is on disks, and nowhere in memory."""
    plan = small_plan()
    ring = ring_of(plan, random.Random(9), start=StartPoint.of(plan.course, step=2 * plan.course.local_iterations))
    ring.is_bad = bad_at(random.Random(9), [1])
    result = ring.run()
    assert result.finish is not None
    assert "no turn has ended since the run was resumed or loaded" in result.finish.message


def test_run_without_copies_ends_at_its_first_bad_step() -> None:
    """There is nothing to go back to; the error says which setting would have kept it."""
    plan = small_plan()
    ring = ring_of(plan, random.Random(9))
    ring._rounds = RunStateMachine(lambda facts: plan, recovery=RecoveryPolicy())
    assert not plan.placement.copies
    ring.is_bad = bad_at(random.Random(9), [30])
    result = ring.run()
    assert result.finish is not None
    assert result.finish.error == "DivergedError"
    assert "it was not repeated, because the plan keeps no copies of turns (recovery.copies)" in result.finish.message
    assert not recoveries(result)
