"""Automatic unfreezing on a virtual clock: the losses decide, and the steps that they gave repeat a run.

That no timing, stop or checkpoint changes a decision is a law of any plan: ``test_any_plan_on_virtual_clock``.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from ringtune.errors import PlanError
from ringtune.run_control import events as rd
from ringtune.schedule.methods import RingAda
from ringtune.schedule.plan import Plan
from ringtune.schedule.table import build_table, format_table
from ringtune.schedule.turns import StartPoint, StepKind, turn_sequence
from ringtune.schedule.versions import depth, unfreezing_steps
from tests.features.plans import KINDS, AnyRun, Losses, loss_at, run
from tests.suites.test_any_plan_on_virtual_clock import weight_changes
from tests.support.moves import granted
from tests.support.plans import changed, make_plan, unfreezing_after
from tests.support.recorded_ring import RecordedResult, RecordedRing
from tests.support.validate import parse_table, validate_table

UNFREEZING = next(kind for kind in KINDS if kind.name == "unfreezing")
THREE = [("a", 0, 2), ("b", 2, 3), ("c", 3, 4)]


def depths(result: RecordedResult) -> dict[int, int]:
    """The depth of every train step."""
    return {
        entry.step: entry.depth
        for entry in result.logged
        if isinstance(entry, rd.LogStep) and entry.turn.kind is StepKind.TRAIN
    }


def final_plan(plan: Plan, result: RecordedResult) -> Plan:
    """The plan with the decisions of its last train turn."""
    steps = [turn.unfreeze_at for turn in granted(result) if turn.kind is StepKind.TRAIN]
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


def test_unfreezing_without_what_the_checkpoint_knew_is_refused() -> None:
    """Going on with forgotten losses would give another run."""
    plan = make_plan(THREE, ["b", "a"], num_steps=40, unfreeze="auto", patience_steps=3)
    result = run(plan, random.Random(0), start=StartPoint.of(plan.course, step=8, holder="b"))
    assert result.finish is not None and result.finish.error == PlanError.__name__
    assert "is of 0 turns, step 8 comes after 4" in result.finish.message


def test_unfreezing_leaves_frozen_blocks_one_turn_ahead() -> None:
    """Frozen hosts work on the next initiator's first batch while the current one still trains, but no further."""
    plan = make_plan(THREE, ["a", "c"], num_steps=16, local_iterations=4, unfreeze="auto", eval_rows=0)
    result = RecordedRing(plan, items_ahead=100).run()
    spans = result.spans["b"]
    turns = granted(result)
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
    result = RecordedRing(plan).run()
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


def test_unfreezing_follows_the_losses_and_can_be_repeated_with_its_steps() -> None:
    """Decisions and depths are those of the pure rule; a run that is given the steps does the same to every weight."""
    for seed in range(3):
        one = AnyRun(UNFREEZING, seed)
        plan, steps = one.plan, expected_steps(one.plan, seed)
        assert [(entry.step, entry.depth) for entry in one.result.logged if isinstance(entry, rd.LogUnfreeze)] == list(
            zip(steps, range(2, 2 + len(steps)), strict=True)
        ), seed
        settled = plan.decided(steps)
        assert depths(one.result) == {step: depth(settled.course, step) for step in range(plan.course.num_steps)}
        given = changed(plan, method=RingAda(every_steps=0, at=unfreezing_steps(final_plan(plan, one.result).course)))
        repeated = run(given, random.Random(seed + 1), carrier=Losses(plan, seed + 7))
        assert weight_changes(repeated) == weight_changes(one.result), seed
        assert depths(repeated) == depths(one.result), seed
