"""What a virtual run is measured by."""

from __future__ import annotations

from ringtune.costs.seconds import PlanCosts
from ringtune.rounds.rounds import LogStep, LogTurn
from ringtune.schedule.lowering import Action, Op, Payload
from ringtune.schedule.turns import StepKind, turn_sequence
from sim.action_times import Items
from sim.memory_ledger import MemoryLedger
from sim.meter import Meter
from sim.transport import Parcel
from tests.support.plans import make_plan
from tests.support.profiles import profile_of

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=4, every_steps=2, eval_rows=3)
TURNS = list(turn_sequence(PLAN))
TENSOR = 2 * PLAN.max_length * PLAN.hidden_size * 4


def meter(*, keep_spans: bool = False) -> tuple[Meter, MemoryLedger, Items]:
    """A meter to which every turn was granted, with its parts."""
    profile = profile_of(PLAN)
    items = Items(PlanCosts(PLAN, profile))
    ledger = MemoryLedger(PLAN, profile.by_name, optimizer="sgd", dtype="float32")
    found = Meter(PLAN.nodes, items, ledger, keep_spans=keep_spans)
    for turn in TURNS:
        found.granted(turn)
    return found, ledger, items


def test_meter_adds_up_seconds_by_node_and_operation() -> None:
    """Each node has its own account."""
    found, _, _ = meter()
    found.ran("a", Action(Op.EMBED, 0, 0), 1.0, 1.5)
    found.ran("a", Action(Op.EMBED, 0, 1), 2.0, 2.25)
    found.ran("b", Action(Op.FORWARD_FREE, 0, 0, 2, 3), 2.0, 5.0)
    assert (found.nodes["a"].busy_s, found.nodes["a"].actions) == ({Op.EMBED: 0.75}, 2)
    assert (found.nodes["b"].busy_s, found.nodes["b"].actions) == ({Op.FORWARD_FREE: 3.0}, 1)
    assert found.spans == []


def test_meter_keeps_spans_if_asked() -> None:
    """Actions and messages; a hand-over has its turn where the printed action has it."""
    found, _, _ = meter(keep_spans=True)
    action = Action(Op.EMBED, 0, 0)
    found.ran("a", action, 1.0, 1.5)
    found.sent(Parcel(Payload.HIDDEN, "a", "b", 0, 1, 2), 1.5, 2.0)
    found.sent(Parcel(Payload.HEAD, "a", "b", 1, 0, 0), 3.0, 4.0)
    assert found.spans == [
        ("a", action, 1.0, 1.5),
        ("a", Action(Op.SEND, 0, 1, 2, 0, "b", Payload.HIDDEN), 1.5, 2.0),
        ("a", Action(Op.SEND, 0, -1, 1, 0, "b", Payload.HEAD), 3.0, 4.0),
    ]


def test_meter_holds_a_tensor_at_its_sender_then_at_its_receiver() -> None:
    """From sending to arrival it lies at the one, from arrival to use at the other."""
    found, ledger, _ = meter()
    start = ledger.peak_bytes
    parcels = [Parcel(Payload.HIDDEN, "a", "b", 0, micro, 2) for micro in (0, 1)]
    for parcel in parcels:
        found.sent(parcel, 0.0, 1.0)
    assert ledger.peak_bytes == {"a": start["a"] + 2 * TENSOR, "b": start["b"]}
    for parcel in parcels:
        found.arrived(parcel, 1.0)
        found.accepted("b", Payload.HIDDEN, 0, parcel.micro, 2)
    assert ledger.peak_bytes == {"a": start["a"] + 2 * TENSOR, "b": start["b"] + TENSOR}


def test_meter_leaves_heads_out_of_the_buffers() -> None:
    """A head is counted with its owner already."""
    found, ledger, _ = meter()
    start = ledger.peak_bytes
    found.sent(Parcel(Payload.HEAD, "a", "b", 0, 0, 0), 0.0, 1.0)
    found.arrived(Parcel(Payload.HEAD, "a", "b", 0, 0, 0), 1.0)
    assert ledger.peak_bytes == start


def test_meter_times_steps_from_the_end_of_the_item_before() -> None:
    """Depth by depth; an evaluation between two steps is in neither."""
    found, _, _ = meter()
    train = [turn for turn in TURNS if turn.kind is StepKind.TRAIN]
    evaluation = next(turn for turn in TURNS if turn.kind is StepKind.EVALUATE)
    found.logged(LogStep(train[0], 0, 0, 1, ()), 3.0)
    found.logged(LogStep(train[0], 1, 1, 1, ()), 4.0)
    found.logged(LogStep(evaluation, 4, 2, 2, ()), 10.0)
    found.logged(LogStep(train[1], 2, 2, 2, ()), 12.0)
    assert found.depth_s == {1: 4.0, 2: 2.0}
    assert found.depth_steps == {1: 2, 2: 1}


def test_meter_forgets_the_items_of_turns_that_are_done() -> None:
    """A long run needs no memory for its past."""
    found, _, items = meter()
    found.logged(LogTurn(TURNS[0]), 5.0)
    kept = [seq for seq in range(TURNS[-1].end_seq) if seq in items.by_seq]
    assert kept == list(range(TURNS[0].end_seq, TURNS[-1].end_seq))
