"""Reports: batched, ordered, delivered again after a failure; recordings and the shared clock."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import grpc
import pytest

from coordinator.run.report import RunLedger
from edge.runtime import reporter as rp
from edge.runtime.reporter import SharedClock, header_line, record_line
from ringtune.engine import events as ev
from ringtune.engine.events import Handled, Span
from ringtune.engine.node_engine import NodeEngine
from ringtune.errors import IntegrityError
from ringtune.run_control.events import LogStep
from ringtune.schedule.actions import Action, Op
from ringtune.schedule.turns import Item, StartPoint, Turn, items, turn_sequence
from ringtune.v1 import control_pb2
from tests.support.failpoints import DroppedCallError
from tests.support.fake_agents import job
from tests.support.plans import changed, make_plan
from tests.support.replay import replay

WAIT_S = 60.0
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


def test_seconds_of_steps_do_not_depend_on_an_owners_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owner b's wall clock is wrong by seconds and by hours: each step takes the second that it took."""
    plan, wall_clock = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"]), time.time
    for wrong_s in (5.0, -5.0, 3 * 3600.0):
        books = RunLedger(plan, job())
        books.begin(COORDINATOR_LEADS_S)
        seconds = []
        for turn in list(turn_sequence(plan.course))[:2]:
            with monkeypatch.context() as patch:
                if turn.owner == "b":
                    patch.setattr(time, "time", lambda: wall_clock() + wrong_s)  # noqa: B023
                for step in _reported(turn, list(items(plan.course, turn))):
                    books.step_done(LogStep(turn, step.seq, step.step, 1, (("count", 1.0),)), step.at_unix_s)
            seconds += [line["seconds"] for line in books.turn_done(turn)]
        assert seconds == pytest.approx([1.0] * len(seconds), abs=1e-3), wrong_s
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


PLAN = make_plan([("a", 0, 4)], ["a"], num_steps=2)


def recording() -> list[str]:
    """A complete recording of one node that does everything itself."""
    engine = NodeEngine(PLAN, "a", wait_s=9.0)
    lines = [header_line(PLAN, "a", 9.0)]
    waiting: list[ev.Event] = [ev.TurnGranted(turn) for turn in turn_sequence(PLAN.course)]
    now_s = 0.25
    while waiting:
        event = waiting.pop(0)
        commands = engine.handle(event, now_s)
        lines.append(record_line(now_s, event, commands))
        actions = [command.action for command in commands if isinstance(command, ev.RunAction)]
        waiting += [ev.ActionDone(action, (("loss_sum", 0.1),)) for action in actions]
        now_s += 0.1
    return lines


@pytest.mark.parametrize("key", ["placement_number", "epoch"])
def test_recorder_replays_a_recording_that_begins_after_a_move(key: str) -> None:
    """Recordings of version 0.2.0 call the placement number ``epoch``."""
    moved = changed(PLAN, placement_number=1, first_turn=1)
    start = StartPoint(step=1, holder="a", first_turn=1, placement_number=1)
    header = json.loads(header_line(moved, "a", 9.0, start))
    header["start"][key] = header["start"].pop("placement_number")
    assert replay([json.dumps(header)], moved, "a") == 0


def test_recorder_replay_notices_whatever_differs() -> None:
    """A lost event, a command that differs in one number, another plan: the line is named; damage is not skipped."""
    lost, other = recording(), recording()
    del lost[5]
    other[3] = other[3].replace('"RunAction",["', '"RunAction",["?')
    damaged = [recording() for _ in range(4)]
    bad = ("{", "[]", '{"now_s": 1}', '{"now_s": 1, "event": ["Nothing"], "commands": []}')
    for lines, line in zip(damaged, bad, strict=True):
        lines[2] = line
    longer = make_plan([("a", 0, 4)], ["a"], num_steps=3)
    for lines, plan, message in (
        (lost, PLAN, "line 6"),
        (other, PLAN, "line 4: the engine gave"),
        (recording(), longer, "is of node a"),
        *((lines, PLAN, None) for lines in damaged),
    ):
        with pytest.raises(IntegrityError, match=message):
            replay(lines, plan, "a")


class CallError(DroppedCallError):
    """A failed call with a status."""

    def __init__(self, status: grpc.StatusCode) -> None:
        super().__init__("Concurrent RPC limit exceeded!" if status is grpc.StatusCode.RESOURCE_EXHAUSTED else "")
        self._status = status

    def code(self) -> grpc.StatusCode:
        """The status."""
        return self._status


class ReportCalls:
    """Keeps requests; fails first as often as told."""

    def __init__(self, *failures: grpc.StatusCode) -> None:
        self.requests: list[control_pb2.ReportRequest] = []
        self.tries: list[control_pb2.ReportRequest] = []
        self._failures = list(failures)

    def __call__(self, request: control_pb2.ReportRequest) -> None:
        """Take a report."""
        self.tries.append(request)
        if self._failures:
            raise CallError(self._failures.pop(0))
        self.requests.append(request)


def make_reporter(sender: ReportCalls, refused: list[str] | None = None, **options: Any) -> rp.Reporter:
    """A reporter of node a."""
    take = (refused if refused is not None else []).append
    return rp.Reporter(run_id="r", node="a", num_blocks=4, send=sender, on_refused=take, **options)


def test_reporter_batches_what_gathers() -> None:
    """Steps, spans and bytes wait for the interval; a turn's end sends everything at once in one report."""
    sender = ReportCalls()
    reporter = make_reporter(sender, interval_s=1000.0)
    reporter.put(rp.StepDone(ev.ReportStep(3, 2, "train", (("count", 4.0), ("loss_sum", 0.5))), 1.0))
    reporter.put(Span(Action(Op.BACKWARD, 3, 0, 2, 4), 1.0, 1.5))
    reporter.put(rp.Sent(3, "b", "h", 100))
    reporter.put(rp.Sent(3, "b", "h", 20))
    reporter.put(rp.TurnDone(1))
    assert reporter.flush(WAIT_S)
    reporter.close()
    first = sender.requests[0]
    assert len(sender.requests) <= 2
    assert (first.run_id, first.node, list(first.turns_done)) == ("r", "a", [1])
    assert [(step.seq, step.step, step.kind) for step in first.steps] == [(3, 2, "train")]
    assert [(number.name, number.value) for number in first.steps[0].values] == [("count", 4.0), ("loss_sum", 0.5)]
    assert [(entry.target, entry.bytes) for entry in first.traffic] == [("b", 120)]
    assert first.spans[0].action == "B3.0[2,4)"
    assert first.spans[0].end_unix_s - first.spans[0].start_unix_s == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(
    "failures",
    [
        (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED),
        (grpc.StatusCode.CANCELLED, grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=["silence", "crowded"],
)
def test_reporter_sends_the_same_again(failures: tuple[grpc.StatusCode, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that did not get through, or that others' calls crowded out, is repeated before any later one."""
    monkeypatch.setattr(rp, "_RETRY_S", 0.0)
    sender = ReportCalls(*failures)
    reporter = make_reporter(sender)
    reporter.put(rp.TurnDone(1))
    assert reporter.flush(WAIT_S)
    reporter.put(rp.TurnDone(2))
    assert reporter.flush(WAIT_S)
    reporter.close()
    assert [request.number for request in sender.requests] == list(range(1, len(sender.requests) + 1))
    assert len({request.number for request in sender.tries[: len(failures) + 1]}) == 1
    assert [turn for request in sender.requests for turn in request.turns_done] == [1, 2]


def test_reporter_stops_when_nobody_wants_the_run() -> None:
    """A refusal that is no silence ends the reports, and the run hears of it with its reason."""
    refused: list[str] = []
    reporter = make_reporter(ReportCalls(grpc.StatusCode.FAILED_PRECONDITION), refused)
    reporter.put(rp.TurnDone(1))
    assert not reporter.flush(0.2)
    reporter.close(WAIT_S)
    (reason,) = refused
    assert reason.startswith("the coordinator refused a report: the coordinator: FAILED_PRECONDITION: ")


def test_long_trail_has_a_report_without_other_long_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take most of a message; a short one goes with all else."""
    sender = ReportCalls()
    monkeypatch.setattr(rp.Reporter, "_work", lambda reporter: None)
    reporter = make_reporter(sender)
    long = "x" * (1 << 20) + "y"
    for entry in (rp.Note("n"), rp.AuditTrail(1, "{}"), rp.AuditTrail(2, long), rp.AuditTrail(3, long), rp.TurnDone(3)):
        reporter.put(entry)
    assert reporter._deliver()
    said = [([trail.turn for trail in one.trails], list(one.notes), list(one.turns_done)) for one in sender.requests]
    assert said == [([1], ["n"], []), ([2], [], []), ([3], [], []), ([], [], [3])]


def test_reporter_tells_why_a_report_is_refused_as_too_long() -> None:
    """The error is the node's own, so that the coordinator does not learn of its end by the links of others."""
    refused: list[str] = []
    calls = ReportCalls(grpc.StatusCode.OUT_OF_RANGE)
    reporter = make_reporter(calls, refused)
    reporter.put(rp.AuditTrail(1, "{}"))
    reporter.put(rp.TurnDone(1))
    reporter._thread.join(WAIT_S)
    assert len(refused) == 1 and "OUT_OF_RANGE" in refused[0]
    (told,) = calls.requests
    assert told.number == calls.tries[0].number + 1 and told.error == "IntegrityError" and not told.lost_peer
    assert told.message.startswith("a report can't be sent: the coordinator: OUT_OF_RANGE")
    assert told.message.endswith("lower train.local_iterations, as [audit] tells all of a turn at once")


def test_reporter_ends_the_run_when_reports_fail_by_a_bug() -> None:
    """An error that is none of a call does not end in silence."""
    refused: list[str] = []

    def send(request: control_pb2.ReportRequest) -> None:
        raise ValueError("closed")

    reporter = rp.Reporter(run_id="r", node="a", num_blocks=4, send=send, on_refused=refused.append)
    reporter.put(rp.TurnDone(1))
    reporter._thread.join(WAIT_S)
    assert refused[0].startswith("reports can't be sent: internal error, ValueError at edge.runtime.reporter:")


def test_reporters_of_one_run_give_no_number_twice() -> None:
    """The one of the former placement still sends when the next one begins: neither report is held for the other."""
    calls, numbers = ReportCalls(), itertools.count(1)
    former, following = (make_reporter(calls, numbers=numbers) for _ in range(2))
    for turn, each in enumerate((former, following, former, following)):
        each.put(rp.TurnDone(turn))
        assert each.flush(WAIT_S)
    former.close()
    following.close()
    numbers_sent = [request.number for request in calls.requests]
    assert len(numbers_sent) >= 4  # a turn and what flushes it are one report or two
    assert numbers_sent == list(range(1, len(numbers_sent) + 1))


def test_reporter_tells_failures_recordings_and_transfers_in_order() -> None:
    """What failed first is what is told; a recording has a line for each event; a message names source and seconds."""
    sender = ReportCalls()
    reporter = make_reporter(sender)
    reporter.put(rp.HeaderLine('{"recording": 1}'))
    reporter.put(rp.Failed("PeerLostError", "node a lost its link with node b", "b"))
    reporter.put(rp.Failed("RingTuneError", "later", ""))
    reporter.put(rp.Arrived("b", 1000, 0.25, 7.5))
    reporter.put(Handled(1.0, ev.TimerFired("wait"), ()))
    assert reporter.flush(WAIT_S)
    reporter.close()
    told = [(request.error, request.lost_peer) for request in sender.requests if request.error]
    assert told[0] == ("PeerLostError", "b")
    text = "".join(request.recording for request in sender.requests)
    assert text == '{"recording": 1}\n{"now_s":1.0,"event":["TimerFired","wait"],"commands":[]}\n'
    found = [each for request in sender.requests for each in request.transfers]
    assert [(each.source, each.bytes, each.seconds, each.at_unix_s) for each in found] == [("b", 1000, 0.25, 7.5)]


def test_reporter_ends_while_the_coordinator_is_silent() -> None:
    """Closing does not wait for a coordinator that never answers."""
    sender = ReportCalls(*[grpc.StatusCode.UNAVAILABLE] * 1000)
    reporter = make_reporter(sender)
    reporter.put(rp.TurnDone(1))
    reporter.close(timeout_s=WAIT_S)
    assert not reporter._thread.is_alive()


def test_reporter_that_closes_sends_what_was_queued_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is queued, and closed, just after the thread has sent all that there was."""
    sender, deliver = ReportCalls(), rp.Reporter._deliver

    def then_closed(reporter: rp.Reporter) -> bool:
        is_wanted = deliver(reporter)
        if not reporter._closing.is_set():
            reporter.put(rp.TurnDone(2))
            reporter.close()
        return is_wanted

    monkeypatch.setattr(rp.Reporter, "_deliver", then_closed)
    reporter = make_reporter(sender)
    reporter.put(rp.TurnDone(1))
    reporter._thread.join(WAIT_S)
    assert [turn for request in sender.requests for turn in request.turns_done] == [1, 2]


def test_reporter_splits_scores_and_keeps_their_order() -> None:
    """Scores of many batches are several reports below the limit of a message; the end of the turn comes last."""
    calls = ReportCalls()
    reporter = make_reporter(calls)
    for batch in range(40):
        reporter.put(rp.Scored(control_pb2.SubnetScores(turn=3, batch_id=batch, values=bytes(200_000))))
    reporter.put(rp.TurnDone(3))
    assert reporter.flush(WAIT_S)
    reporter.close()
    requests = calls.requests
    assert [message.batch_id for request in requests for message in request.scores] == list(range(40))
    assert max(request.ByteSize() for request in requests) < 2 << 20 < sum(request.ByteSize() for request in requests)
    assert [list(request.turns_done) for request in requests if request.turns_done] == [[3]]
    assert [request for request in requests if request.scores or request.turns_done][-1].turns_done
