"""A call that is made several times over a real connection is carried out once; and how often it is made."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from ringtune.errors import DataError, PeerLostError
from ringtune.transport import retry as once_module
from ringtune.transport.channels import Server, open_channel
from ringtune.transport.retry import AT_WORK, RETRY_S, AttemptTerms, RetriedCall, RetryState
from ringtune.transport.status import abort, error_of_call
from ringtune.v1 import control_pb2, control_pb2_grpc
from tests.support.cases import cases
from tests.support.failpoints import DroppedCallError

WAIT_S = 30.0
LEASE_S = 60.0


class Node(control_pb2_grpc.AgentServicer):
    """Prepares when it is let, and counts."""

    def __init__(self) -> None:
        self.begun: queue.SimpleQueue[control_pb2.PrepareRequest] = queue.SimpleQueue()
        self.left_s: list[float] = []
        self.may_end = threading.Event()
        self.error: Exception | None = None

    def Prepare(self, request: control_pb2.PrepareRequest, context: grpc.ServicerContext) -> control_pb2.PrepareReply:
        """Prepare."""
        self.left_s.append(context.time_remaining() or 0.0)
        self.begun.put(request)
        self.may_end.wait(WAIT_S)
        if self.error is not None:
            abort(context, self.error)
        return control_pb2.PrepareReply(hosted_bytes=7)


@contextmanager
def serving(node: Node) -> Iterator[Any]:
    """A stub of a node."""
    server = Server("127.0.0.1:0", lambda made: control_pb2_grpc.add_AgentServicer_to_server(node, made))
    try:
        with open_channel(server.address) as channel:
            yield control_pb2_grpc.AgentStub(channel)
    finally:
        node.may_end.set()
        server.stop(0.0)


class Lossy:
    """A method of which some attempts bring no answer, before or after they arrive."""

    def __init__(self, method: Any, losses: list[str]) -> None:
        self._method, self._losses = method, losses
        self.requests: list[control_pb2.PrepareRequest] = []
        self._changed = threading.Condition()

    def wait_for(self, count: int) -> None:
        """Wait until so many attempts were begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.requests) >= count, WAIT_S)

    def become(self, method: Any) -> None:
        """Ask somebody else from the next attempt on, which is lost."""
        with self._changed:
            self._method, self._losses = method, ["request"]

    def future(self, request: Any, *, timeout: float, metadata: Any) -> Any:
        """Make an attempt; ``reply`` loses its answer, ``request`` loses it altogether."""
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
            method, loss = self._method, self._losses.pop(0) if self._losses else ""
        call = None if loss == "request" else method.future(request, timeout=timeout, metadata=metadata)
        return _Outcome(call, loss)


class _Outcome:
    def __init__(self, call: Any, loss: str) -> None:
        self._call, self._loss = call, loss

    def result(self) -> Any:
        if self._loss == "reply":
            self._call.exception()
        if self._loss:
            raise DroppedCallError("Socket closed")
        return self._call.result()

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()


def asked(method: Any) -> RetriedCall:
    """A call under a lease that is longer than a test."""
    request = control_pb2.PrepareRequest(run_id="r", plan_json="{}")
    return RetriedCall(method, request, peer="node pi", lease_s=LEASE_S, timeout_s=WAIT_S)


def outcome_of(call: RetriedCall) -> queue.SimpleQueue[Any]:
    """Make a call on another thread; its answer or its error comes in the queue."""
    outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def wait() -> None:
        try:
            outcomes.put(call.result().hosted_bytes)
        except BaseException as error:
            outcomes.put(error)

    threading.Thread(target=wait, daemon=True).start()
    return outcomes


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attempts be held for a moment, and fail no earlier on a busy machine."""
    monkeypatch.setattr(RetryState, "attempt", lambda self: (0.01, WAIT_S))


@cases("losses", [["request"], ["reply"], ["request", "reply", "reply"]])
def test_lost_call_is_made_again_and_carried_out_once(losses: list[str]) -> None:
    """Whether it was the request that was lost or the reply."""
    node = Node()
    node.may_end.set()
    with serving(node) as stub:
        assert asked(Lossy(stub.Prepare, losses)).result().hosted_bytes == 7
    assert node.begun.qsize() == 1


def test_lost_error_is_told_again() -> None:
    """What the node found wrong is found once, too."""
    node = Node()
    node.may_end.set()
    node.error = DataError("train.csv has no rows")
    with serving(node) as stub, pytest.raises(grpc.RpcError) as raised:
        asked(Lossy(stub.Prepare, ["reply"])).result()
    assert type(error_of_call(raised.value, peer="node pi")) is DataError
    assert node.begun.qsize() == 1


def test_call_without_any_time_left_ends_at_once() -> None:
    """Zero seconds are a time limit, and not the longest one."""
    node = Node()
    with serving(node) as stub, pytest.raises(grpc.RpcError) as raised:
        RetriedCall(
            stub.Prepare, control_pb2.PrepareRequest(run_id="r"), peer="node pi", lease_s=LEASE_S, timeout_s=0.0
        ).result()
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.usefixtures("briefly")
def test_work_outlasts_its_attempts_and_is_asked_for_without_its_request() -> None:
    """Each attempt hears that the work goes on; the request travels once, the work has the time of the whole call."""
    node = Node()
    with serving(node) as stub:
        method = Lossy(stub.Prepare, [])
        outcomes = outcome_of(asked(method))
        node.begun.get(timeout=WAIT_S)
        method.wait_for(4)
        node.may_end.set()
        assert outcomes.get(timeout=WAIT_S) == 7
    assert node.begun.empty() and node.left_s[0] > WAIT_S / 2
    assert [request.plan_json for request in method.requests[:4]] == ["{}", "", "", ""]


def test_call_that_is_given_up_ends_at_once() -> None:
    """In the midst of an attempt; the node's work is the node's to end."""
    node = Node()
    with serving(node) as stub:
        asking = asked(stub.Prepare)
        outcomes = outcome_of(asking)
        node.begun.get(timeout=WAIT_S)
        asking.cancel()
        assert isinstance(outcomes.get(timeout=WAIT_S), grpc.FutureCancelledError)


@pytest.mark.usefixtures("briefly")
def test_process_that_was_started_again_is_a_lost_node() -> None:
    """It answers, but it was never asked; that is no error of the run's."""
    node = Node()
    with serving(node) as stub:
        method = Lossy(stub.Prepare, [])
        with serving(Node()) as other:
            outcomes = outcome_of(asked(method))
            node.begun.get(timeout=WAIT_S)
            method.wait_for(2)
            method.become(other.Prepare)
            error = outcomes.get(timeout=WAIT_S)
    assert type(error) is PeerLostError and "started again" in str(error)


def attempt(stub: Any, key: str, *, is_again: bool = False) -> str:
    """Make one attempt that is not held; return what it is told."""
    terms = AttemptTerms(key, 0.0, WAIT_S, is_again).metadata()
    call = stub.Prepare.future(control_pb2.PrepareRequest(), timeout=WAIT_S, metadata=terms)
    error = call.exception()
    return "done" if error is None else str(error.details())


def test_calls_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger can begin no more than so many, and those that are under way are still answered."""
    monkeypatch.setattr(once_module, "MAX_AT_WORK", 2)
    node = Node()
    with serving(node) as stub:
        told = [attempt(stub, key) for key in ("a", "b", "c", "a")]
    assert [told[0], told[1], told[3]] == [AT_WORK] * 3
    assert "BusyError" in told[2]


def test_results_of_old_calls_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest ones are kept."""
    monkeypatch.setattr(once_module, "KEPT_RESULTS", 2)
    node = Node()
    node.may_end.set()
    with serving(node) as stub:
        for key in ("a", "b", "c"):
            while attempt(stub, key) != "done":
                pass
        assert [attempt(stub, key, is_again=True) for key in ("b", "c")] == ["done", "done"]
        assert "FrameError" in attempt(stub, "a", is_again=True)


@cases(
    "metadata",
    [
        None,
        [],
        [("ringtune-call", "k")],
        [("ringtune-call", "k" * 65), ("ringtune-hold", "1"), ("ringtune-for", "1")],
        [("ringtune-call", "k"), ("ringtune-hold", "x"), ("ringtune-for", "1")],
        [("ringtune-call", "k"), ("ringtune-hold", "inf"), ("ringtune-for", "1")],
        [("ringtune-call", "k"), ("ringtune-hold", "nan"), ("ringtune-for", "1")],
    ],
)
def test_terms_that_are_none_are_none(metadata: Any) -> None:
    """They come from the network; a call with them is carried out as one without."""
    assert AttemptTerms.read(metadata) is None


def test_terms_are_read_as_they_were_written_within_bounds() -> None:
    """Nobody holds a worker for longer than ten minutes at a time."""
    held = AttemptTerms("k", 2.5, 60.0, is_again=True)
    assert AttemptTerms.read(held.metadata()) == held
    assert AttemptTerms.read(AttemptTerms("k", 1e9, -1.0).metadata()) == AttemptTerms("k", 600.0, 0.0)


# ---- how often, on a clock of the test's own ---------------------------------------------------------


class Clock:
    """Stands still until it is set, or goes on by so many seconds whenever it is read."""

    def __init__(self, now_s: float = 100.0, step_s: float = 0.0) -> None:
        self.now_s, self._step_s = now_s, step_s

    def __call__(self) -> float:
        """The time."""
        self.now_s += self._step_s
        return self.now_s


BRIEF_LEASE_S = 9.0


def patience(clock: Clock, *, timeout_s: float = 600.0, request_bytes: int = 0) -> RetryState:
    """Patience that begins at 100 s."""
    return RetryState(lease_s=BRIEF_LEASE_S, timeout_s=timeout_s, request_bytes=request_bytes, now_s=clock)


def missed(made: RetryState, clock: Clock, *times_s: float) -> list[bool]:
    """Whether another attempt follows one that has no answer at each of these times."""
    follows = []
    for clock.now_s in times_s:
        follows.append(made.miss())
    return follows


@cases(
    ("request_bytes", "times_s", "follows"),
    [
        (0, (100.1, 104.0, 108.7, 109.0), [True, True, True, False]),  # until a lease of silence
        (0, (145.0, 145.0 + RETRY_S), [True, False]),  # two attempts: who asks may have stood still in the first
        (1 << 20, (138.0, 140.0, 141.0), [True, True, False]),  # a megabyte at 32 KiB/s takes 32 s more
    ],
)
def test_attempts_follow_until_a_lease_of_silence(request_bytes: int, times_s: Any, follows: list[bool]) -> None:
    """A connection that is gone for less than the lease costs nothing but attempts."""
    clock = Clock()
    assert missed(patience(clock, request_bytes=request_bytes), clock, *times_s) == follows


def test_attempts_count_the_lease_from_the_last_sign_of_life() -> None:
    """Work of minutes is no silence, as the one who does it says so every third of a lease."""
    clock = Clock()
    made = patience(clock)
    for clock.now_s in range(103, 400, 3):
        made.hear()
    assert missed(made, clock, 400.0, 405.5, 406.0) == [True, True, False]


@pytest.mark.promise("6 every wait ends")
def test_attempts_end_with_the_call_whatever_is_heard() -> None:
    """Who says for ever that it is at work is not waited for for ever."""
    clock = Clock()
    made = patience(clock, timeout_s=20.0)
    clock.now_s = 119.95
    made.hear()
    assert missed(made, clock, 120.0) == [False]
    clock.now_s = 121.0
    assert made.attempt()[1] == pytest.approx(0.01)


def test_attempt_is_held_for_less_than_it_may_take() -> None:
    """So "at work" arrives before the attempt counts as silent; the last one is held beyond the end of the call."""
    clock = Clock()
    assert patience(clock).attempt() == (BRIEF_LEASE_S / 3, 2 * BRIEF_LEASE_S / 3)
    assert patience(clock, request_bytes=1 << 20).attempt()[1] == pytest.approx(32.0 + 6.0)
    made = patience(clock, timeout_s=20.0)
    clock.now_s = 115.0
    hold_s, timeout_s = made.attempt()
    assert timeout_s == pytest.approx(5.0) and hold_s > timeout_s


def test_repeated_call_goes_on_while_there_are_signs_of_life() -> None:
    """A file that breaks off again and again, a little later each time, comes in the end."""
    made, tries = patience(Clock(step_s=5.0), timeout_s=1e6), list[int]()

    def once() -> str:
        tries.append(len(tries))
        made.hear()
        if len(tries) < 5:
            raise DroppedCallError("Socket closed")
        return "file"

    assert made.repeat(once, peer="node pi") == "file"
    assert len(tries) == 5


@pytest.mark.promise("6 every wait ends")
def test_repeated_call_ends_after_a_lease_of_silence() -> None:
    """And at once where the other one answers, or nobody waits any more."""
    given_up, tries = threading.Event(), list[int]()

    def silent() -> None:
        tries.append(len(tries))
        raise DroppedCallError("Socket closed")

    with pytest.raises(DroppedCallError):
        patience(Clock(step_s=4.0)).repeat(silent, peer="node pi")
    assert len(tries) == 3
    given_up.set()
    with pytest.raises(DroppedCallError):
        patience(Clock()).repeat(silent, peer="node pi", given_up=given_up)
    assert len(tries) == 4
