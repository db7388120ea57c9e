"""Runs that choose their operation tables, on a virtual clock: the scores decide, and given tables repeat a run.

That no timing, stop or checkpoint changes a table is a law of any plan: ``test_any_plan_on_virtual_clock``.
"""

from __future__ import annotations

import gc
import random

from ringtune.run_control import events as rd
from ringtune.schedule.actions import Op
from ringtune.schedule.course import TABLES_AT_ONCE
from ringtune.schedule.operation_tables import Choice, Operations, ScheduledTable
from ringtune.schedule.turns import StepKind, items, table_is_due
from tests.features.plans import KINDS, AnyRun, run
from tests.suites.test_any_plan_on_virtual_clock import train_actions
from tests.support.choosing import DrawnTables, make_choice
from tests.support.moves import granted
from tests.support.plans import changed, make_plan
from tests.support.recorded_ring import RecordedResult, RecordedRing

THREE = [("a", 0, 2), ("b", 2, 3), ("c", 3, 4)]
CHOICE = next(kind for kind in KINDS if kind.name == "choice")
SCORING = make_choice(refresh_steps=4)


def decisions(result: RecordedResult) -> list[rd.LogOperations]:
    """The tables that were chosen, in order."""
    return [entry for entry in result.logged if isinstance(entry, rd.LogOperations)]


def test_choice_of_a_run_that_is_drained_while_it_scores_first_saves_nothing() -> None:
    """Nothing is trained yet, so there is nothing to save, nor to wait for."""
    plan = changed(make_plan(THREE, ["b", "a"]), choice=SCORING)
    stopped = RecordedRing(plan, drain_at_s=5.0).run()
    assert stopped.finish == rd.Finish("InterruptedRunError", "stopped by the user")
    assert not granted(stopped) and not [entry for entry in stopped.logged if isinstance(entry, rd.LogCheckpoint)]


def test_score_turns_have_every_batch_of_every_owner_once() -> None:
    """One turn of each owner, all its batch ids, forward and backward, no update."""
    plan = changed(make_plan(THREE, ["b", "a"], train_rows=23), choice=SCORING)
    result = run(plan, random.Random(0), chooser=DrawnTables(plan))
    score = [turn for turn in granted(result) if turn.kind is StepKind.SCORE and turn.first_step == 0]
    assert [turn.owner for turn in score] == ["b", "a"]
    for turn in score:
        ids = [plan.course.batch_id(item.owner, item.batch) for item in items(plan.course, turn)]
        assert sorted(ids) == list(range(6))
    seqs = {turn.first_seq for turn in granted(result) if turn.kind is StepKind.SCORE}
    assert not [
        action for order in result.order.values() for action in order if action.op is Op.UPDATE and action.seq in seqs
    ]


def test_choices_of_a_long_run_leave_no_pile_of_tables() -> None:
    """Caches keep the views of a few tables, not of every one that the run has ever chosen."""
    plan = changed(make_plan(THREE, ["a"], num_steps=120), choice=make_choice("random", refresh_steps=2))

    def num_alive() -> int:
        gc.collect()
        return sum(isinstance(value, Operations) for value in gc.get_objects())

    before = num_alive()
    result = RecordedRing(plan, chooser=DrawnTables(plan, "pile")).run()
    assert result.finish == rd.Finish("", "")
    del result
    assert num_alive() - before <= 3 * TABLES_AT_ONCE


def test_choice_is_made_where_it_is_due_and_depends_on_every_score() -> None:
    """With other scores the tables are others."""
    for seed in range(3):
        one = AnyRun(CHOICE, seed)
        due = [step for step in range(one.plan.course.num_steps) if table_is_due(one.plan.course, step)]
        boundaries = [turn.first_step for turn in one.turns if turn.kind is StepKind.TRAIN]
        chosen = decisions(one.result)
        assert [entry.step for entry in chosen] == [step for step in boundaries if step in due], seed
        assert decisions(one.again(seed, chooser=DrawnTables(one.plan, seed + 1))) != chosen, seed


def test_choice_is_repeated_by_its_tables_without_scores() -> None:
    """The tables that a run has chosen, given to another one, make it do the same work."""
    for seed in range(3):
        one = AnyRun(CHOICE, seed)
        tables = [ScheduledTable(step=entry.step, operations=entry.operations) for entry in decisions(one.result)]
        repeated = run(changed(one.plan, choice=Choice.given(tables)), random.Random(seed + 7))
        assert repeated.finish == rd.Finish("", ""), seed
        assert StepKind.SCORE not in {turn.kind for turn in granted(repeated)}, seed
        assert decisions(repeated) == decisions(one.result), seed
        assert train_actions(repeated) == train_actions(one.result), seed
