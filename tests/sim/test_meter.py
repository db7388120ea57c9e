"""What a virtual run is measured by."""

from __future__ import annotations

from typing import NamedTuple

from ringtune.costs.action_costs import CourseCosts
from ringtune.costs.memory_sizes import MemorySettings
from ringtune.run_control.events import LogStep, LogTurn
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.turns import StepKind, turn_sequence
from ringtune.schedule.units import EMBEDDING
from sim.ledger import Items, MemoryLedger
from sim.meter import Meter, ProfileTimes
from tests.support.plans import make_plan
from tests.support.profiles import profile_of

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=4, every_steps=2, eval_rows=3)
TURNS = list(turn_sequence(PLAN.course))
TENSOR = 2 * PLAN.course.max_length * PLAN.course.hidden_size * 4
EMBED = Action(Op.EMBED, 0, 0, EMBEDDING, EMBEDDING + 1)
HIDDEN = TensorKey(Payload.HIDDEN, 0, 1, 2)
HEAD = TensorKey(Payload.HEAD, 1, -1, 0)
"""A hand-over: its ``seq`` is the turn."""


class Parts(NamedTuple):
    """A meter with what it is made of."""

    meter: Meter
    times: ProfileTimes
    ledger: MemoryLedger
    items: Items

    def ran(self, node: str, action: Action, start_s: float, end_s: float) -> None:
        """A node carries an action out: it is asked for its time when it begins, and measured when it ends."""
        self.times(node, action)
        self.meter.ran(node, action, start_s, end_s)


def meter(*, keep_spans: bool = False) -> Parts:
    """A meter to which every turn was granted, with its parts."""
    profile = profile_of(PLAN)
    costs = CourseCosts(PLAN.course, profile)
    items = Items(costs)
    ledger = MemoryLedger(PLAN, profile.by_name, items, MemorySettings("sgd"))
    times = ProfileTimes(costs, items, ledger.effect)
    found = Meter(PLAN.nodes, items, times, ledger, keep_spans=keep_spans)
    for turn in TURNS:
        found.granted(turn)
    return Parts(found, times, ledger, items)


def test_meter_adds_up_seconds_by_node_and_operation() -> None:
    """Each node has its own account."""
    parts = meter()
    parts.ran("a", EMBED, 1.0, 1.5)
    parts.ran("a", EMBED._replace(micro=1), 2.0, 2.25)
    parts.ran("b", Action(Op.FORWARD_FREE, 0, 0, 2, 3), 2.0, 5.0)
    found = parts.meter
    assert (found.nodes["a"].busy_s, found.nodes["a"].actions) == ({Op.EMBED: 0.75}, 2)
    assert (found.nodes["b"].busy_s, found.nodes["b"].actions) == ({Op.FORWARD_FREE: 3.0}, 1)
    assert found.spans == []


def test_meter_keeps_spans_if_asked() -> None:
    """Actions and messages; a hand-over has its turn where the printed action has it."""
    parts = meter(keep_spans=True)
    parts.ran("a", EMBED, 1.0, 1.5)
    parts.meter.sent(HIDDEN, "a", "b", 1.5, 2.0)
    parts.meter.sent(HEAD, "a", "b", 3.0, 4.0)
    assert parts.meter.spans == [
        ("a", EMBED, 1.0, 1.5),
        ("a", Action(Op.SEND, 0, 1, 2, 0, "b", Payload.HIDDEN), 1.5, 2.0),
        ("a", Action(Op.SEND, 0, -1, 1, 0, "b", Payload.HEAD), 3.0, 4.0),
    ]


def test_meter_moves_tensors_from_their_sender_to_their_receiver() -> None:
    """From its making to its arrival it lies at the one, from then on at the other, taken out of the inbox or not."""
    found, _, ledger, _ = meter()
    start = ledger.now_bytes
    keys = [HIDDEN._replace(micro=micro) for micro in (0, 1)]
    for key in keys:
        found.sent(key, "a", "b", 0.0, 1.0)
        found.arrived(key, "a", "b", 1.0)
        found.accepted("b", key)
    assert ledger.now_bytes == {"a": start["a"] - 2 * TENSOR, "b": start["b"] + 2 * TENSOR}


def test_meter_leaves_heads_out_of_the_buffers() -> None:
    """A head is counted with its owner already."""
    found, _, ledger, _ = meter()
    start = ledger.peak_bytes
    found.sent(HEAD, "a", "b", 0.0, 1.0)
    found.arrived(HEAD, "a", "b", 1.0)
    assert ledger.peak_bytes == start


def test_meter_times_steps_from_the_end_of_the_item_before() -> None:
    """Depth by depth; an evaluation between two steps is in neither."""
    found = meter().meter
    train = [turn for turn in TURNS if turn.kind is StepKind.TRAIN]
    evaluation = next(turn for turn in TURNS if turn.kind is StepKind.EVALUATE)
    found.logged(LogStep(train[0], 0, 0, 1, ()), 3.0)
    found.logged(LogStep(train[0], 1, 1, 1, ()), 4.0)
    found.logged(LogStep(evaluation, 4, 2, 2, ()), 10.0)
    found.logged(LogStep(train[1], 2, 2, 2, ()), 12.0)
    assert [(step.depth, step.seconds) for step in found.steps] == [(1, 3.0), (1, 1.0), (2, 2.0)]


def test_meter_forgets_the_items_of_turns_that_are_done() -> None:
    """A long run needs no memory for its past."""
    found, _, _, items = meter()
    found.logged(LogTurn(TURNS[0]), 5.0)
    kept = [seq for seq in range(TURNS[-1].end_seq) if seq in items.by_seq]
    assert kept == list(range(TURNS[0].end_seq, TURNS[-1].end_seq))
