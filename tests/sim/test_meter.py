"""What a virtual run is measured by, besides what a whole prediction shows."""

from __future__ import annotations

from ringtune.costs.action_costs import CourseCosts
from ringtune.costs.memory_sizes import MemorySettings
from ringtune.run_control.events import LogStep, LogTurn
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.turns import StepKind, turn_sequence
from sim.ledger import Items, MemoryLedger
from sim.meter import Meter, ProfileTimes
from tests.support.plans import make_plan
from tests.support.profiles import profile_of

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=4, every_steps=2, eval_rows=3)
TURNS = list(turn_sequence(PLAN.course))


def meter() -> tuple[Meter, Items]:
    """A meter to which every turn was granted, and its items."""
    profile = profile_of(PLAN)
    costs = CourseCosts(PLAN.course, profile)
    items = Items(costs)
    ledger = MemoryLedger(PLAN, profile.by_name, items, MemorySettings("sgd"))
    found = Meter(PLAN.nodes, items, ProfileTimes(items, ledger.effect), ledger, keep_spans=True)
    for turn in TURNS:
        found.granted(turn)
    return found, items


def test_meter_keeps_the_spans_of_messages() -> None:
    """A hand-over, whose ``seq`` is the turn, has its turn where the printed action has it."""
    found, _ = meter()
    found.sent(TensorKey(Payload.HIDDEN, 0, 1, 2), "a", "b", 1.5, 2.0)
    found.sent(TensorKey(Payload.HEAD, 1, -1, 0), "a", "b", 3.0, 4.0)
    assert found.spans == [
        ("a", Action(Op.SEND, 0, 1, 2, 0, "b", Payload.HIDDEN), 1.5, 2.0),
        ("a", Action(Op.SEND, 0, -1, 1, 0, "b", Payload.HEAD), 3.0, 4.0),
    ]


def test_meter_times_steps_from_the_end_of_the_item_before_and_forgets_turns_that_are_done() -> None:
    """Depth by depth; an evaluation between two steps is in neither. A long run needs no memory for its past."""
    found, items = meter()
    train = [turn for turn in TURNS if turn.kind is StepKind.TRAIN]
    evaluation = next(turn for turn in TURNS if turn.kind is StepKind.EVALUATE)
    found.logged(LogStep(train[0], 0, 0, 1, ()), 3.0)
    found.logged(LogStep(train[0], 1, 1, 1, ()), 4.0)
    found.logged(LogTurn(train[0]), 5.0)
    found.logged(LogStep(evaluation, 4, 2, 2, ()), 10.0)
    found.logged(LogStep(train[1], 2, 2, 2, ()), 12.0)
    assert [(step.depth, step.seconds) for step in found.steps] == [(1, 3.0), (1, 1.0), (2, 2.0)]
    assert sorted(items.by_seq) == list(range(train[0].end_seq, TURNS[-1].end_seq))
