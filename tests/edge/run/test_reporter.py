"""Reports: batched, ordered, delivered again after a failure."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import pytest

from edge.run import reporter as rp
from edge.run.totals import ReportNumbers
from ringtune.engine import events as ev
from ringtune.engine.handled import Handled
from ringtune.engine.spans import Span
from ringtune.schedule.actions import Action, Op
from ringtune.v1 import control_pb2

WAIT_S = 20.0


class CallError(grpc.RpcError, grpc.Call):
    """A failed call with a status."""

    def __init__(self, status: grpc.StatusCode) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        """The status."""
        return self._status

    def details(self) -> str:
        """Nothing."""
        return ""

    def initial_metadata(self) -> Any:
        """Nothing."""

    def trailing_metadata(self) -> Any:
        """Nothing."""

    def is_active(self) -> bool:
        """It is over."""
        return False

    def time_remaining(self) -> float:
        """None is left."""
        return 0.0

    def cancel(self) -> bool:
        """It is over."""
        return False

    def add_callback(self, callback: Any) -> bool:
        """It is over."""
        return False


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


def test_reporter_sends_the_same_again_after_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that did not get through is repeated before any later one, under its old number."""
    monkeypatch.setattr(rp, "_RETRY_S", 0.0)
    sender = ReportCalls(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    reporter = make_reporter(sender)
    reporter.put(rp.TurnDone(1))
    assert reporter.flush(WAIT_S)
    reporter.put(rp.TurnDone(2))
    assert reporter.flush(WAIT_S)
    reporter.close()
    assert [request.number for request in sender.requests] == list(range(1, len(sender.requests) + 1))
    assert len({request.number for request in sender.tries[:3]}) == 1
    assert [turn for request in sender.requests for turn in request.turns_done] == [1, 2]


def test_reporter_stops_when_nobody_wants_the_run() -> None:
    """A refusal that is no silence ends the reports, and the run hears of it."""
    refused: list[str] = []
    reporter = make_reporter(ReportCalls(grpc.StatusCode.FAILED_PRECONDITION), refused)
    reporter.put(rp.TurnDone(1))
    assert not reporter.flush(0.2)
    reporter.close()
    assert refused == ["the coordinator refused a report: FAILED_PRECONDITION"]


def test_reporter_ends_the_run_when_reports_fail_by_a_bug() -> None:
    """An error that is none of a call does not end in silence."""
    refused: list[str] = []

    def send(request: control_pb2.ReportRequest) -> None:
        raise ValueError("closed")

    reporter = rp.Reporter(run_id="r", node="a", num_blocks=4, send=send, on_refused=refused.append)
    reporter.put(rp.TurnDone(1))
    reporter._thread.join(WAIT_S)
    assert refused[0].startswith("reports can't be sent: internal error, ValueError at edge.run.reporter:")


def test_reporters_of_one_run_give_no_number_twice() -> None:
    """The one of the former placement still sends when the next one begins: neither report is held for the other."""
    calls, numbers = ReportCalls(), ReportNumbers()
    former, following = (make_reporter(calls, numbers=numbers) for _ in range(2))
    for turn, each in enumerate((former, following, former, following)):
        each.put(rp.TurnDone(turn))
        assert each.flush(WAIT_S)
    former.close()
    following.close()
    assert [request.number for request in calls.requests] == [1, 2, 3, 4]


def test_reporter_first_failure_counts() -> None:
    """What failed first is what is told."""
    sender = ReportCalls()
    reporter = make_reporter(sender, interval_s=1000.0)
    reporter.put(rp.Failed("PeerLostError", "node a lost its link with node b", "b"))
    reporter.put(rp.Failed("RingTuneError", "later", ""))
    assert reporter.flush(WAIT_S)
    reporter.close()
    told = [(request.error, request.lost_peer) for request in sender.requests if request.error]
    assert told[0] == ("PeerLostError", "b")


def test_reporter_recording_has_a_line_for_each_event() -> None:
    """Lines keep their order and end with a newline."""
    sender = ReportCalls()
    reporter = make_reporter(sender)
    reporter.put(rp.HeaderLine('{"recording": 1}'))
    reporter.put(Handled(1.0, ev.TimerFired("wait"), ()))
    assert reporter.flush(WAIT_S)
    reporter.close()
    text = "".join(request.recording for request in sender.requests)
    assert text == '{"recording": 1}\n{"now_s":1.0,"event":["TimerFired","wait"],"commands":[]}\n'


def test_reporter_ends_while_the_coordinator_is_silent() -> None:
    """Closing does not wait for a coordinator that never answers."""
    sender = ReportCalls(*[grpc.StatusCode.UNAVAILABLE] * 1000)
    reporter = make_reporter(sender)
    reporter.put(rp.TurnDone(1))
    reporter.close(timeout_s=WAIT_S)
    assert not any(thread.name == "reporter" for thread in threading.enumerate())


def test_reporter_says_how_long_messages_took() -> None:
    """A message that arrived is a transfer of its source, with its bytes and seconds."""
    sender = ReportCalls()
    reporter = make_reporter(sender)
    reporter.put(rp.Arrived("b", 1000, 0.25, 7.5))
    assert reporter.flush(WAIT_S)
    reporter.close()
    found = [each for request in sender.requests for each in request.transfers]
    assert [(each.source, each.bytes, each.seconds, each.at_unix_s) for each in found] == [("b", 1000, 0.25, 7.5)]


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
    assert requests[-1].turns_done
