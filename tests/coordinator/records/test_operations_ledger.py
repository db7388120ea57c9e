"""What operations left to be done in a run: shares by node, compute and bytes, measured, predicted, by the paper."""

from __future__ import annotations

import dataclasses

import pytest

from coordinator.records.operations_ledger import OperationsLedger
from coordinator.screen.planned.operations_text import saved_lines
from ringtune.engine.spans import Span
from ringtune.quantities import format_seconds
from ringtune.schedule.actions import Action, Op, Payload
from ringtune.schedule.operations.table import BatchOperations, Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StepKind, Turn, turn_sequence
from tests.support.plans import make_plan
from tests.support.profiles import TIMES, profile_of

SLICES = [("a", 0, 2), ("b", 2, 4)]


def planned(*rows: str) -> tuple[Plan, list[Turn]]:
    """A plan whose batches all have these operations, and its train turns."""
    operations = None
    if rows:
        batches = tuple(BatchOperations(owner="a", batch_id=at, rows=rows) for at in range(3))
        operations = Operations(batches=batches)
    plan = make_plan(SLICES, ["a"], method="all", train_rows=12, microbatches=2, operations=operations)
    return plan, [turn for turn in turn_sequence(plan.course) if turn.kind.has_update]


def span(op: Op, seq: int, seconds: float) -> Span:
    """An action on blocks 0 and 1."""
    return Span(Action(op, seq, 0, 0, 2), 5.0, 5.0 + seconds)


def test_report_has_shares_of_each_node_and_what_was_saved() -> None:
    """Node b is passed by for one of two micro-batches: it is half full, and half of its messages travel."""
    plan, turns = planned("1111", "1133")
    profile = profile_of(plan)
    ledger = OperationsLedger(plan, profile)
    for turn in turns:
        for seq in range(turn.first_seq, turn.end_seq):
            ledger.add_spans("a", [span(Op.FORWARD, seq, 0.25), span(Op.BACKWARD, seq, 0.5), span(Op.EMBED, seq, 9.0)])
            ledger.add_traffic("a", seq, Payload.HIDDEN, 100)
            ledger.add_traffic("a", seq, Payload.HEAD, 1_000_000)
        ledger.turn_done(turn)
    found = ledger.report(profile)
    assert found is not None
    steps = plan.course.num_steps
    assert found["steps"] == steps
    assert found["nodes"]["a"] == {"full": 1.0, "forward_only": 0.0, "skipped": 0.0}
    assert found["nodes"]["b"] == {"full": 0.5, "forward_only": 0.0, "skipped": 0.5}
    compute, sent = found["compute"], found["bytes"]
    assert compute["busy_s"] == pytest.approx(0.75 * steps)
    assert compute["measured"] == pytest.approx(compute["busy_s"] / compute["all_full_s"])
    assert compute["predicted"] == pytest.approx(0.75, rel=0.1)
    assert compute["paper"] == pytest.approx(0.75)
    assert sent["sent_bytes"] == 100 * steps
    assert sent["measured"] == pytest.approx(100 * steps / sent["all_full_bytes"])
    assert sent["predicted"] == pytest.approx(0.5, rel=0.02)
    assert sent["paper"] == pytest.approx(0.75)


def test_what_scores_took_stands_beside_what_steps_saved() -> None:
    """Seconds and bytes of blocks, counted apart from those of steps; without scores no line tells of any."""
    plan, turns = planned("1111", "1133")
    ledger = OperationsLedger(plan, profile_of(plan))
    score, train = dataclasses.replace(turns[0], kind=StepKind.SCORE), turns[1]
    for turn, seconds in ((score, 2.0), (train, 0.25)):
        for seq in range(turn.first_seq, turn.end_seq):
            ledger.add_spans("a", [span(Op.BACKWARD, seq, seconds), span(Op.EMBED, seq, 9.0)])
            ledger.add_traffic("a", seq, Payload.GRAD, 100)
    ledger.turn_done(train)
    before = ledger.report(profile_of(plan))
    assert before is not None
    assert not [line for line in saved_lines(before) if "scores" in line]
    ledger.turn_done(score)
    found = ledger.report(profile_of(plan))
    assert found is not None
    count = score.num_items
    assert found["scores"] == {"batches": count, "busy_s": 2.0 * count, "sent_bytes": 100 * count}
    assert {**found, "scores": before["scores"]} == before
    assert f"{format_seconds(2.0 * count)} and {100 * count} B on top, measured" in saved_lines(found)[-1]


def test_measured_seconds_are_compared_with_recorded_ones() -> None:
    """A run on boards that turned out half as fast has not done more."""
    plan, turns = planned("1111", "1133")
    ledger = OperationsLedger(plan, profile_of(plan))
    for turn in turns:
        ledger.turn_done(turn)
    slow = profile_of(plan, times={work: 2 * seconds for work, seconds in TIMES.items()})
    first, second = (ledger.report(recorded) for recorded in (profile_of(plan), slow))
    assert first is not None
    assert second is not None
    assert second["compute"]["all_full_s"] == pytest.approx(2 * first["compute"]["all_full_s"])
    assert second["compute"]["predicted"] == first["compute"]["predicted"]


@pytest.mark.parametrize("rows", [("2222", "3333"), ("1122", "1133")], ids=["nowhere", "not at node b"])
def test_seconds_of_all_full_are_not_measured_where_nothing_was_full(rows: tuple[str, str]) -> None:
    """Such a run never saw how long a full operation takes."""
    plan, turns = planned(*rows)
    ledger = OperationsLedger(plan, profile_of(plan))
    for turn in turns:
        ledger.turn_done(turn)
    found = ledger.report(profile_of(plan))
    assert found is not None
    assert (found["compute"]["all_full_s"], found["compute"]["measured"]) == (None, None)
    (line,) = [line for line in saved_lines(found) if line.startswith("  compute")]
    assert line.split(maxsplit=1)[1].startswith("not measured, ")


def test_run_in_which_everything_is_full_has_no_such_report() -> None:
    """Nothing is counted for it either."""
    plan, turns = planned()
    ledger = OperationsLedger(plan, profile_of(plan))
    ledger.turn_done(turns[0])
    assert ledger.report(profile_of(plan)) is None
