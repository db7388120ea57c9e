"""Copies of embedding and head are compared once a sweep, after the right update, and a difference is named."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ringtune.errors import IntegrityError
from ringtune.run_control import events as rd
from ringtune.run_control.state_machine import RunStateMachine
from ringtune.schedule.methods import Hift
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, Turn, items, turn_sequence
from ringtune.schedule.units import EMBEDDING
from ringtune.techniques.replicas import CopyComparison, CopyDigest, compared_copies
from tests.support.cases import cases
from tests.support.plans import make_plan

HEAD = 4


def hift_plan(*, owners: tuple[str, ...] = ("a", "c"), **changes: Any) -> Plan:
    """Four blocks on two hosts, three groups of two units, turns of four steps."""
    method = Hift(group_size=changes.pop("group_size", 2), **changes.pop("hift", {}))
    values = {"num_steps": 12, "local_iterations": 4, **changes}
    return make_plan([("a", 0, 2), ("b", 2, 4)], list(owners), method=method, **values)


def compared_steps(plan: Plan) -> list[dict[int, int]]:
    """For every train turn the step after which each unit is compared."""
    found = []
    for turn in turn_sequence(plan.course):
        if turn.kind is StepKind.TRAIN:
            step_of = {item.seq: item.step for item in items(plan.course, turn)}
            found.append({unit: step_of[seq] for unit, seq in compared_copies(plan.course, turn).items()})
    return found


@cases(
    ("changes", "wanted"),
    [
        # groups (-1, 0) (1, 2) (3, 4): the embedding trains at 0 3 6 9, the head at 2 5 8 11
        ({}, [{EMBEDDING: 3, HEAD: 2}, {EMBEDDING: 6, HEAD: 5}, {EMBEDDING: 9, HEAD: 11}]),
        # six groups of one, turns shorter than a sweep: a turn without an update compares nothing
        ({"group_size": 1, "local_iterations": 2}, [{EMBEDDING: 0}, {}, {HEAD: 5}, {EMBEDDING: 6}, {}, {HEAD: 11}]),
        # always active: compared at the end of each sweep of five, not after each step
        (
            {"group_size": 1, "hift": {"always_active": ("head",)}, "num_steps": 10, "local_iterations": 2},
            [{EMBEDDING: 0}, {}, {EMBEDDING: 5, HEAD: 4}, {}, {HEAD: 9}],
        ),
        # a sweep that the run cuts short ends with the run
        (
            {"group_size": 1, "hift": {"always_active": ("head",)}, "num_steps": 7, "local_iterations": 7},
            [{EMBEDDING: 5, HEAD: 6}],
        ),
        ({"owners": ("a",)}, [{}, {}, {}]),
    ],
)
def test_copies_are_compared_after_their_last_update_of_a_sweep(
    changes: dict[str, Any], wanted: list[dict[int, int]]
) -> None:
    """Once a sweep for each unit, at the end of the turn in which that update is; never for an only copy."""
    assert compared_steps(hift_plan(**changes)) == wanted


def test_copies_of_a_method_with_adapters_are_none() -> None:
    """The head is handed over, so there is nothing to compare."""
    assert not any(compared_steps(make_plan([("a", 0, 4)], ["a", "c"])))


def first_turn(plan: Plan) -> Turn:
    """The turn whose digests are reported."""
    return next(turn_sequence(plan.course))


def digests(turn: Turn, plan: Plan, **other: str) -> tuple[CopyDigest, ...]:
    """What an owner reports; ``embedding`` or ``head`` replaces that unit's digest."""
    names = {EMBEDDING: "embedding", HEAD: "head"}
    return tuple(
        CopyDigest(unit, other.get(names[unit], f"{unit:02}" * 32)) for unit in compared_copies(plan.course, turn)
    )


def test_equal_copies_pass_and_are_forgotten() -> None:
    """In whatever order they come; a node without data owes nothing."""
    plan = hift_plan()
    comparison, turn = CopyComparison(plan), first_turn(plan)
    for node, copies in (("c", digests(turn, plan)[::-1]), ("b", ()), ("a", digests(turn, plan))):
        comparison.note(node, turn, copies)
    assert not comparison._found


def test_digests_that_are_not_owed_are_refused() -> None:
    """None from some owner, one of a unit too much, or any from a node without data."""
    plan = hift_plan()
    turn = first_turn(plan)
    for node, copies in (("c", ()), ("c", digests(turn, plan)[:1]), ("b", digests(turn, plan))):
        comparison = CopyComparison(plan)
        comparison.note("a", turn, digests(turn, plan))
        with pytest.raises(IntegrityError, match=f"node {node} reports digests of units"):
            (comparison.check if copies else comparison.note)(node, turn, copies)


def test_a_simulator_reports_no_digests() -> None:
    """Nobody has copies there, so there is nothing to compare."""
    plan = hift_plan()
    comparison, turn = CopyComparison(plan), first_turn(plan)
    for node in ("a", "b", "c"):
        comparison.note(node, turn, ())
    assert not comparison._found


def test_different_copies_end_the_run() -> None:
    """With one error that says who stands alone; no turn is granted after it."""
    plan = hift_plan(owners=("a", "b", "c"))
    rounds, turn = RunStateMachine(lambda facts: plan), first_turn(plan)
    rounds.handle(rd.Started(plan.nodes), 0.0)
    for node in plan.nodes:
        rounds.handle(rd.Inspected(node, None), 0.0)
    for node in plan.nodes:
        rounds.handle(rd.Prepared(node), 0.0)
    for node in ("a", "c"):
        rounds.handle(rd.TurnReported(node, turn.index, (), digests(turn, plan)), 1.0)
    commands = rounds.handle(rd.TurnReported("b", turn.index, (), digests(turn, plan, embedding="f" * 64)), 1.0)
    (finish,) = [command for command in commands if isinstance(command, rd.Finish)]
    assert finish.error == "IntegrityError"
    assert re.search(r"of the embedding differ after step 4 \(a, c: [-1]{12}; b: f{12}\)", finish.message)
    assert not [command for command in commands if isinstance(command, rd.Grant)]
