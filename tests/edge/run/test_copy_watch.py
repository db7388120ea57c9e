"""Digests of an owner's copies are taken right after the update that the rule names."""

from __future__ import annotations

from edge.run.copy_watch import CopyWatch
from edge.run.reporter import CopyCompared
from ringtune.rounds.copy_digests import compared_copies
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.lowering import item_updates
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StepKind, Turn, items, turn_sequence
from tests.contract.rounds.test_copy_digests import hift_plan

PLAN = hift_plan()
TURNS = [turn for turn in turn_sequence(PLAN.course) if turn.kind is StepKind.TRAIN]


def updates(plan: Plan, turn: Turn, node: str) -> list[Action]:
    """The updates of a turn at a node, in order."""
    return [action for item in items(plan.course, turn) for action in item_updates(plan, item, node)]


def test_copy_watch_takes_a_digest_for_each_unit_after_its_last_update() -> None:
    """Of two updates of the embedding in a turn the second counts; updates of the next turn change nothing of it."""
    version = {"value": ""}
    watch = CopyWatch(PLAN, "c", lambda unit, _: f"{unit} {version['value']}")
    for turn in TURNS[:2]:
        watch.expect(turn)
    for action in [*updates(PLAN, TURNS[0], "c"), *updates(PLAN, TURNS[1], "c")]:
        version["value"] = f"after item {action.seq}"
        watch.after(action)
    for turn in TURNS[:2]:
        wanted = compared_copies(PLAN.course, turn)
        assert sorted(watch.take(turn.index)) == sorted(
            CopyCompared(turn.index, unit, f"{unit} after item {seq}") for unit, seq in wanted.items()
        )
        assert list(watch.take(turn.index)) == []


def test_copy_watch_of_a_node_without_data_takes_none() -> None:
    """A host has no copies; other actions of the same item are not taken for updates."""
    watch = CopyWatch(PLAN, "b", lambda *_: "x")
    owner = CopyWatch(PLAN, "a", lambda *_: "x")
    for each in (watch, owner):
        each.expect(TURNS[0])
    for action in updates(PLAN, TURNS[0], "b"):
        watch.after(action)
    for unit, seq in compared_copies(PLAN.course, TURNS[0]).items():
        owner.after(Action(Op.BACKWARD, seq, 0, unit, unit + 1))
    assert list(watch.take(0)) == list(owner.take(0)) == []
