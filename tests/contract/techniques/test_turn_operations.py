"""Choosing tables, event by event: nothing is granted too early, and what comes twice or late changes nothing."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from ringtune.engine.events import SetTimer, TimerFired
from ringtune.errors import DivergedError, IntegrityError, PlanError, RingTuneError
from ringtune.run_control import events as rd
from ringtune.run_control.state_machine import RunStateMachine
from ringtune.schedule.operation_tables import BlockScores, Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, Turn, turn_sequence
from ringtune.techniques.operations import TurnOperations, check_scores
from tests.support.cases import cases
from tests.support.choosing import DrawnTables, make_choice, table_of
from tests.support.plans import changed, make_plan

PLAN = changed(make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=8), choice=make_choice(refresh_steps=4))
RANDOM = changed(PLAN, choice=make_choice("random", refresh_steps=4))
SCORE = next(turn_sequence(PLAN.course))
TABLE = table_of(PLAN.course, 1)
TOOLS = DrawnTables(PLAN)


def begun(plan: Plan = PLAN, **options: Any) -> tuple[RunStateMachine, list[rd.Command]]:
    """Rounds that have just begun to train, and their last answer."""
    rounds = RunStateMachine(lambda facts: plan, **options)
    rounds.handle(rd.Started(plan.nodes), 0.0)
    answer: list[rd.Command] = []
    for node in plan.nodes:
        rounds.handle(rd.Inspected(node, None), 0.0)
    for node in plan.nodes:
        answer = rounds.handle(rd.Prepared(node), 0.0)
    return rounds, answer


def granted(commands: list[rd.Command]) -> list[Turn]:
    """The turns of the grants."""
    return [turn for command in commands if isinstance(command, rd.Grant) for turn in command.turns]


def of(kind: type[Any], commands: list[rd.Command]) -> list[Any]:
    """The commands of one kind."""
    return [command for command in commands if isinstance(command, kind)]


def done(rounds: RunStateMachine, turn: Turn, node: str) -> list[rd.Command]:
    """A node ends a turn."""
    return rounds.handle(rd.TurnReported(node, turn.index, TOOLS.scores(PLAN, node, turn)), 1.0)


def scored() -> tuple[RunStateMachine, rd.ChooseOperations]:
    """Rounds that wait for the first table."""
    rounds, answer = begun()
    for turn in granted(answer):
        for node in PLAN.nodes:
            answer = done(rounds, turn, node)
    (asked,) = of(rd.ChooseOperations, answer)
    return rounds, asked


def test_choice_is_asked_for_when_every_score_is_there() -> None:
    """Two score turns are granted and nothing else; the last report of the last node asks, with all scores in order."""
    rounds, answer = begun()
    turns = granted(answer)
    assert [turn.kind for turn in turns] == [StepKind.SCORE, StepKind.SCORE] and turns[0].operations is None
    log = done(rounds, turns[1], "b") + done(rounds, turns[1], "a") + done(rounds, turns[0], "b")
    assert not of(rd.ChooseOperations, log) and not granted(log)
    (asked,) = of(rd.ChooseOperations, done(rounds, turns[0], "a"))
    assert asked.step == 0
    expected = [entry for turn in turns for node in PLAN.nodes for entry in TOOLS.scores(PLAN, node, turn)]
    assert list(asked.scores) == sorted(expected, key=lambda entry: entry[:4])


def test_choice_grants_with_the_table_once_it_is_there() -> None:
    """The decision is logged before its first turn is granted; a second answer changes nothing."""
    rounds, asked = scored()
    answer = rounds.handle(rd.OperationsChosen(asked.step, TABLE), 2.0)
    assert of(rd.LogOperations, answer) == [rd.LogOperations(0, TABLE)]
    assert [(turn.kind, turn.first_step) for turn in granted(answer)] == [
        (StepKind.TRAIN, 0),
        (StepKind.TRAIN, 2),
        (StepKind.SCORE, 4),
        (StepKind.SCORE, 4),
    ]
    assert {turn.operations for turn in granted(answer)} == {TABLE}
    assert rounds.handle(rd.OperationsChosen(asked.step, table_of(PLAN.course, 2)), 3.0) == []


def test_choice_for_another_step_changes_nothing() -> None:
    """An answer that nobody waits for, be it a failure."""
    rounds, _ = scored()
    for step in (2, -1):
        assert rounds.handle(rd.OperationsChosen(step, TABLE), 2.0) == []
        assert rounds.handle(rd.OperationsFailed(step, "PlanError", "no"), 2.0) == []
    assert granted(rounds.handle(rd.OperationsChosen(0, TABLE), 2.0))


def test_choice_that_fails_or_does_not_fit_ends_the_run() -> None:
    """With the class and the words of the error; a table of another model is not granted to anyone."""
    rounds, _ = scored()
    answer = rounds.handle(rd.OperationsFailed(0, "PlanError", "a score of owner a is no number"), 2.0)
    assert answer[-1] == rd.Finish("PlanError", "a score of owner a is no number")
    rounds, _ = scored()
    answer = rounds.handle(rd.OperationsChosen(0, Operations(subnets=3)), 2.0)
    assert isinstance(answer[-1], rd.Finish) and "3 subnets a block" in answer[-1].message and not granted(answer)


def test_choice_without_scores_is_asked_for_at_once() -> None:
    """A random table needs nothing; it is asked for when its turn would be granted, once."""
    rounds, answer = begun(RANDOM)
    assert of(rd.ChooseOperations, answer) == [rd.ChooseOperations(0, ())] and not granted(answer)
    answer = rounds.handle(rd.OperationsChosen(0, TABLE), 1.0)
    assert [turn.first_step for turn in granted(answer)] == [0, 2]
    assert of(rd.ChooseOperations, answer) == [rd.ChooseOperations(4, ())]
    other = table_of(PLAN.course, 2)
    answer = rounds.handle(rd.OperationsChosen(4, other), 1.0)
    assert [(turn.first_step, turn.operations) for turn in granted(answer)][:2] == [(4, other), (6, other)]


def test_choice_that_takes_too_long_is_said() -> None:
    """The deadline counts from the question and has the planning time on top."""
    rounds, answer = begun(RANDOM, wait_s=10.0, plan_s=7.0)
    assert of(SetTimer, answer)[-1].at_s == 22.0
    answer = rounds.handle(TimerFired("phase"), 22.0)
    assert answer[-1] == rd.Finish(
        "DeadlineError", "choosing operations for step 0 took more than 22 s; raise runtime.plan_s"
    )


def test_choice_is_not_waited_for_by_a_run_that_is_drained() -> None:
    """No turn is open, so the run ends at once; a table that still comes is not logged."""
    rounds, asked = scored()
    assert rounds.handle(rd.DrainRequested("Ctrl-C"), 2.0)[-1] == rd.Finish("InterruptedRunError", "Ctrl-C")
    assert rounds.handle(rd.OperationsChosen(asked.step, TABLE), 3.0) == []


def test_scores_are_not_waited_for_by_a_run_that_is_drained() -> None:
    """They may take minutes, and leave nothing that could be saved."""
    rounds, answer = begun()
    assert {turn.kind for turn in granted(answer)} == {StepKind.SCORE}
    assert rounds.handle(rd.DrainRequested("Ctrl-C"), 2.0)[-1] == rd.Finish("InterruptedRunError", "Ctrl-C")


def test_choice_that_fails_while_a_run_is_drained_is_not_waited_for_either() -> None:
    """The granted turns end and are saved as in any run that is stopped."""
    rounds, _ = begun(RANDOM)
    turns = granted(rounds.handle(rd.OperationsChosen(0, TABLE), 1.0))
    turns += granted(rounds.handle(rd.DrainRequested("Ctrl-C"), 2.0))
    assert [turn.kind for turn in turns] == [StepKind.TRAIN, StepKind.TRAIN, StepKind.CHECKPOINT]
    assert rounds.handle(rd.OperationsFailed(4, "PlanError", "no"), 3.0) == []
    log = [command for turn in turns for node in RANDOM.nodes for command in done(rounds, turn, node)]
    (saved,) = of(rd.LogCheckpoint, log)
    assert (saved.step, saved.operations) == (4, TABLE)
    assert log[-1] == rd.Finish("InterruptedRunError", "Ctrl-C")


def test_scores_that_come_twice_count_once() -> None:
    """A node that did not hear that its report had arrived sends it again."""
    rounds, answer = begun()
    turns = granted(answer)
    log = [command for turn in turns for node in "aab" for command in done(rounds, turn, node)]
    (asked,) = of(rd.ChooseOperations, log)
    assert len({entry[:4] for entry in asked.scores}) == len(asked.scores) == 2 * 3 * 2 * 4


def _entries(node: str = "a") -> list[BlockScores]:
    return list(DrawnTables(PLAN).scores(PLAN, node, SCORE))


@cases(
    ("entries", "message"),
    [
        ([], "without some that it owes: 12, the first is of batch 0, micro-batch 0, block 0"),
        (_entries()[1:], "without some that it owes: 1"),
        ([*_entries(), _entries()[0]], "twice: 1"),
        (_entries("b"), "that it does not owe: 12, the first is of batch 0, micro-batch 0, block 2"),
        ([*_entries(), _entries()[0]._replace(batch_id=3)], "that it does not owe: 1, the first is of batch 3"),
        ([*_entries(), _entries()[0]._replace(micro=2)], "that it does not owe"),
        ([entry._replace(owner="b") for entry in _entries()], "that are of node b"),
        ([entry._replace(values=entry.values[:1]) for entry in _entries()], r"with \[2\] numbers for block"),
        ([entry._replace(values=((1.0,), (1.0, 2.0))) for entry in _entries()], r"with \[1, 2\] numbers"),
    ],
)
def test_scores_that_a_node_does_not_owe_are_refused(entries: list[BlockScores], message: str) -> None:
    """The error names node, turn and entry, and the run ends."""
    with pytest.raises(IntegrityError, match=f"node a reports scores at the end of turn 0 of node a {message}"):
        check_scores(PLAN, SCORE, "a", entries)
    rounds, _ = begun()
    answer = rounds.handle(rd.TurnReported("a", SCORE.index, tuple(entries)), 1.0)
    assert isinstance(answer[-1], rd.Finish) and answer[-1].error == "IntegrityError"


@cases(
    ("values", "error", "message"),
    [
        (((1.0, math.nan), (1.0, 1.0)), DivergedError, "weight-magnitude of {}, subnet 1 is nan"),
        (((1.0, 1.0), (math.inf, 1.0)), DivergedError, "fisher of {}, subnet 0 is inf"),
        (((1.0, 1.0), (-1.0, 1.0)), IntegrityError, "fisher of {}, subnet 0 is -1.0, not from 0 to 1e\\+200"),
        (((1.0, 1.0), (1e201, 1.0)), IntegrityError, "fisher of {}, subnet 0 is 1e\\+201, not from 0 to 1e\\+200"),
    ],
)
def test_senseless_scores_are_refused(
    values: tuple[tuple[float, ...], ...], error: type[RingTuneError], message: str
) -> None:
    """A score that is no number, or that no weights give, is named by node, batch, micro-batch, block and subnet."""
    entries = _entries()
    entries[5] = entries[5]._replace(values=values)
    where = "batch {}, micro-batch {}, block {}".format(*entries[5][1:4])
    with pytest.raises(
        error, match=f"node a reports scores at the end of turn 0 of node a, and {message.format(where)}"
    ):
        check_scores(PLAN, SCORE, "a", entries)


def test_scores_of_a_turn_that_scores_nothing_are_refused() -> None:
    """A train turn ends without scores."""
    train = dataclasses.replace(SCORE, kind=StepKind.TRAIN)
    check_scores(PLAN, train, "a", [])
    with pytest.raises(IntegrityError, match="that it does not owe"):
        check_scores(PLAN, train, "a", _entries())


@cases(
    ("plan", "step", "operations", "message"),
    [
        (PLAN, 4, None, "the checkpoint of step 4 has no table of operations"),
        (changed(PLAN, choice=None), 4, TABLE, "chooses none"),
        (PLAN, 4, Operations(subnets=3), "3 subnets a block"),
    ],
)
def test_start_point_with_another_table_is_refused(
    plan: Plan, step: int, operations: Operations | None, message: str
) -> None:
    """A checkpoint of another run."""
    start = StartPoint.of(plan.course, step=step, operations=operations)
    with pytest.raises(PlanError, match=message):
        TurnOperations(plan, start)
