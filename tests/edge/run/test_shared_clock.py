"""Times of nodes whose wall clocks are wrong end up on one clock, the coordinator's."""

from __future__ import annotations

import time

import pytest

from coordinator.records.report import RunLedger
from edge.run import reporter as rp
from edge.run.shared_clock import SharedClock
from ringtune.engine import events as ev
from ringtune.schedule.turns.turns import Item, Turn, items, turn_sequence
from ringtune.v1 import control_pb2
from tests.support.fake_agents import job
from tests.support.plans import make_plan

WAIT_S = 20.0
COORDINATOR_LEADS_S = 1.7e9


def test_clock_takes_half_the_round_trip() -> None:
    """Asked at 10 s and answered at 12 s with 1000 s: at 20 s it is 1009 s there."""
    clock = SharedClock(lambda: 20.0)
    clock.compare(10.0, 12.0, 1000.0)
    assert clock.now_unix_s() == pytest.approx(1009.0)


def test_clock_believes_the_quickest_answer_and_not_for_ever() -> None:
    """A slow answer says less than a quick one, until the quick one is so old that the clocks may have drifted more."""
    clock = SharedClock(lambda: 0.0)
    clock.compare(10.0, 10.002, 1010.0)
    clock.compare(20.0, 20.5, 1020.9)
    assert clock.unix_s(0.0) == pytest.approx(1010.0 - 10.001)
    clock.compare(20_000.0, 20_000.5, 21_000.9)
    assert clock.unix_s(0.0) == pytest.approx(21_000.9 - 20_000.25)


def test_clock_starts_anew_with_another_coordinator() -> None:
    """What an earlier coordinator's clock said is forgotten; an answer without a time changes nothing."""
    clock = SharedClock(lambda: 0.0)
    clock.compare(1.0, 1.0, 500.0)
    clock.forget()
    clock.compare(2.0, 2.4, 900.0)
    clock.compare(3.0, 3.0, 0.0)
    assert clock.unix_s(0.0) == pytest.approx(900.0 - 2.2)


@pytest.mark.parametrize("wrong_s", [5.0, -5.0, 3 * 3600.0])
def test_seconds_of_steps_do_not_depend_on_an_owners_wall_clock(
    wrong_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Owner b's wall clock is wrong by seconds and by hours: each step takes the second that it took."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"])
    books = RunLedger(plan, job())
    books.begin(COORDINATOR_LEADS_S)
    wall_clock = time.time
    seconds = []
    for turn in list(turn_sequence(plan.course))[:2]:
        if turn.owner == "b":
            monkeypatch.setattr(time, "time", lambda: wall_clock() + wrong_s)
        for step in _reported(turn, list(items(plan.course, turn))):
            books.step_done(turn, step.seq, step.step, 1, {"count": 1.0}, step.at_unix_s)
        seconds += [line["seconds"] for line in books.turn_done(turn)]
    assert seconds == pytest.approx([1.0] * len(seconds), abs=1e-3)
    assert len(seconds) > 2


def _reported(turn: Turn, granted: list[Item]) -> list[control_pb2.StepReport]:
    """What the owner's reporter says of a turn whose item n ended at n + 1 seconds of the owner's monotonic clock."""
    sent: list[control_pb2.ReportRequest] = []
    clock = SharedClock()
    clock.compare(0.0, 1e-4, COORDINATOR_LEADS_S)
    reporter = rp.Reporter(
        run_id="r", node=turn.owner, num_blocks=4, send=sent.append, on_refused=pytest.fail, clock=clock
    )
    for item in granted:
        reporter.put(rp.StepDone(ev.ReportStep(item.seq, item.step, "train", (("count", 1.0),)), item.seq + 1.0))
    assert reporter.flush(WAIT_S)
    reporter.close()
    return [step for request in sent for step in request.steps]
