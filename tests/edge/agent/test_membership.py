"""Membership: join, heartbeats and their answers, without a network and without waiting."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from edge.agent import process as ms
from ringtune.errors import BusyError, ConnectionFailedError, RingTuneError, TrustError
from ringtune.transport.codecs import removal_to_proto
from ringtune.transport.credentials import Removal, using_credentials
from ringtune.transport.parties import node_party
from ringtune.v1 import control_pb2
from tests.edge.runtime.test_reporter import CallError
from tests.support.trust_parts import credentials_of

WAIT_S = 20.0


class FakeCoordinator:
    """Answers as scripted: a status fails the call, otherwise the reply is given."""

    def __init__(self, *, lease_s: float = 1000.0) -> None:
        self.lease_s = lease_s
        self.joins: list[grpc.StatusCode] = []
        self.beats: list[grpc.StatusCode | control_pb2.HeartbeatReply] = []
        self.calls: list[str] = []
        self.versions: list[str] = []
        self.join_timeouts_s: list[float] = []
        self.beaten = threading.Event()

    def Join(self, request: control_pb2.JoinRequest, *, timeout: float) -> control_pb2.JoinReply:
        """Join."""
        self.calls.append("join")
        self.join_timeouts_s.append(timeout)
        if self.joins:
            raise CallError(self.joins.pop(0))
        return control_pb2.JoinReply(lease_s=self.lease_s)

    def Heartbeat(self, request: control_pb2.HeartbeatRequest, *, timeout: float) -> control_pb2.HeartbeatReply:
        """Heartbeat."""
        self.calls.append("beat")
        self.versions.append(request.authorities_version)
        self.beaten.set()
        answer = self.beats.pop(0) if self.beats else control_pb2.HeartbeatReply(known=True, run_id=request.run_id)
        if isinstance(answer, grpc.StatusCode):
            raise CallError(answer)
        return answer

    def Leave(self, request: control_pb2.LeaveRequest, *, timeout: float) -> control_pb2.Empty:
        """Leave."""
        self.calls.append("leave")
        return control_pb2.Empty()


class Told:
    """What a membership told its agent."""

    def __init__(self) -> None:
        self.run_over: list[tuple[str, str]] = []
        self.gone: list[RingTuneError] = []
        self.run_id = "r1"
        self.ended = threading.Event()

    def on_gone(self, error: RingTuneError) -> None:
        """The coordinator is gone for good."""
        self.gone.append(error)
        self.ended.set()


def make(coordinator: FakeCoordinator, told: Told, **options: Any) -> ms.Membership:
    """A membership of node a."""
    stub: Any = coordinator
    return ms.Membership(
        stub=stub,
        where="host:1",
        identity=control_pb2.JoinRequest(node="a", instance="i"),
        current_run=lambda: told.run_id,
        on_run_over=lambda run_id, reason: told.run_over.append((run_id, reason)),
        on_gone=told.on_gone,
        rss_bytes=lambda: 5,
        **options,
    )


def test_membership_waits_for_a_dead_namesake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The own name is taken until its lease ends, or an answer is late: join tries again, then renews the lease."""
    monkeypatch.setattr(ms, "_JOIN_RETRY_S", 0.0)
    coordinator = FakeCoordinator(lease_s=0.003)
    codes = grpc.StatusCode
    coordinator.joins = [codes.ALREADY_EXISTS, codes.UNAVAILABLE, codes.DEADLINE_EXCEEDED]
    member = make(coordinator, Told())
    member.join(timeout_s=WAIT_S)
    assert coordinator.beaten.wait(WAIT_S)
    member.leave()
    assert coordinator.calls[:4] == ["join"] * 4
    assert set(coordinator.calls[4:]) == {"beat", "leave"}  # a beat may be under way while the node leaves


def test_membership_asks_less_and_less_often() -> None:
    """The waits double up to five seconds."""
    waits_s: list[float] = []

    class GiveUp(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits_s.append(timeout or 0.0)
            return False

    coordinator = FakeCoordinator()
    coordinator.joins = [grpc.StatusCode.UNAVAILABLE] * 6
    member = make(coordinator, Told())
    member.join(timeout_s=1000.0, give_up=GiveUp())
    member.leave()
    assert waits_s == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_membership_leaves_though_its_heartbeats_have_ended_at_once() -> None:
    """Their thread ends as the node begins to leave, maybe before it does anything else."""

    class Ending(threading.Event):
        def set(self) -> None:
            super().set()
            member._thread.join(WAIT_S)

    coordinator = FakeCoordinator()
    member = make(coordinator, Told())
    member._leaving = Ending()
    member.join(timeout_s=WAIT_S)
    member.leave()
    assert coordinator.calls == ["join", "leave"]


def test_membership_join_gives_up_with_the_reason() -> None:
    """Nobody there, or the name stays taken: the error says which, with its exit code.

    With little time to try there is one attempt, whose answer may take as long as any other. A refusal, such as of a
    version that does not fit, is told at once.
    """
    for status, error in (
        (grpc.StatusCode.UNAVAILABLE, ConnectionFailedError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ConnectionFailedError),
        (grpc.StatusCode.ALREADY_EXISTS, BusyError),
    ):
        coordinator = FakeCoordinator()
        coordinator.joins = [status] * 100
        with pytest.raises(error, match="host:1"):
            make(coordinator, Told()).join(timeout_s=0.0)
        assert coordinator.join_timeouts_s == [ms._JOIN_CALL_S]
    coordinator = FakeCoordinator()
    coordinator.joins = [grpc.StatusCode.INVALID_ARGUMENT]
    with pytest.raises(RingTuneError):
        make(coordinator, Told()).join(timeout_s=WAIT_S)
    assert coordinator.calls == ["join"]


@pytest.mark.parametrize(
    ("answer", "run_over"),
    [
        (control_pb2.HeartbeatReply(known=False), [("", "coordinator host:1 no longer knows node a")]),
        (control_pb2.HeartbeatReply(known=True, run_id="r2"), [("r1", "coordinator host:1 no longer drives run r1")]),
        (control_pb2.HeartbeatReply(known=True, run_id="r1"), []),
        (grpc.StatusCode.UNAVAILABLE, []),
    ],
    ids=["forgotten", "another run", "driven", "missed"],
)
def test_membership_run_ends_with_who_drives_it(answer: Any, run_over: list[tuple[str, str]]) -> None:
    """A restarted coordinator does not know the node, which joins again; within the lease silence means nothing."""
    coordinator, told = FakeCoordinator(), Told()
    coordinator.beats = [answer]
    make(coordinator, told).send_heartbeat()
    assert told.run_over == run_over
    assert coordinator.calls == (["beat", "join"] if run_over and not run_over[0][0] else ["beat"])
    told.run_id, told.run_over = "", []
    coordinator.beats = [control_pb2.HeartbeatReply(known=True, run_id="r9")]
    make(coordinator, told).send_heartbeat()
    assert told.run_over == [], "an idle node is not told to stop what it doesn't do"


def test_membership_run_is_kept_for_a_coordinator_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven leases of silence harm no run: the coordinator finds it as it was."""
    now_s = 0.0
    monkeypatch.setattr(ms, "time", SimpleNamespace(monotonic=lambda: now_s, time=lambda: now_s))
    coordinator, told = FakeCoordinator(), Told()
    coordinator.beats = [grpc.StatusCode.UNAVAILABLE] * 33
    member = make(coordinator, told, rejoin=False)
    member._lease_s = 1000.0
    for _ in range(34):
        now_s += 333.0
        member.send_heartbeat()
    assert (told.run_over, told.gone, coordinator.calls) == ([], [], ["beat"] * 34)


def test_membership_node_that_was_frozen_asks_again_before_it_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a lease without a heartbeat, and the first one meets a broken connection: only two count."""
    now_s = 0.0
    monkeypatch.setattr(ms, "time", SimpleNamespace(monotonic=lambda: now_s, time=lambda: now_s))
    coordinator, told = FakeCoordinator(), Told()
    coordinator.beats = [grpc.StatusCode.UNAVAILABLE, control_pb2.HeartbeatReply(known=False)]
    coordinator.beats += [grpc.StatusCode.UNAVAILABLE] * 2
    member = make(coordinator, told, rejoin=False)
    now_s = 5000.0
    member.send_heartbeat()
    assert told.run_over == []
    member.send_heartbeat()
    assert coordinator.calls == ["beat", "beat", "join"]
    assert told.run_over == [("", "coordinator host:1 no longer knows node a")]
    now_s = 20_000.0
    member.send_heartbeat()
    assert len(told.run_over) == 1
    member.send_heartbeat()
    assert "has not answered for 12000 s" in told.run_over[1][1]


def test_membership_silence_for_12_leases_stops_the_run_once_and_the_node_comes_back() -> None:
    """The run stops then; when the coordinator is back, heartbeats go on."""
    coordinator, told = FakeCoordinator(lease_s=0.003), Told()
    coordinator.beats = [grpc.StatusCode.UNAVAILABLE] * 300
    member = make(coordinator, told)
    member.join(timeout_s=WAIT_S)
    while coordinator.beats and threading.main_thread().is_alive():
        assert coordinator.beaten.wait(WAIT_S)
        coordinator.beaten.clear()
    member.leave()
    assert told.run_over == [("", "coordinator host:1 has not answered for 0.036 s; check that it runs")]
    assert told.gone == []


def test_membership_child_of_a_local_run_ends_with_its_coordinator() -> None:
    """With rejoin off, silence for 12 leases is the end, with the exit code of a failed connection."""
    coordinator, told = FakeCoordinator(lease_s=0.003), Told()
    coordinator.beats = [grpc.StatusCode.UNAVAILABLE] * 1000
    member = make(coordinator, told, rejoin=False)
    member.join(timeout_s=WAIT_S)
    assert told.ended.wait(WAIT_S)
    member.leave()
    assert [type(error) for error in told.gone] == [ConnectionFailedError]


def refused(reason: str) -> grpc.RpcError:
    """A call that the coordinator refused for a reason of ours."""
    error = CallError(grpc.StatusCode.PERMISSION_DENIED)
    error.details = lambda: f"ringtune.TrustError: {reason}"  # type: ignore[method-assign]
    return error


def test_membership_ends_where_a_certificate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking again would not help: the run is over and the process is told why, with exit code 3."""
    coordinator, told = FakeCoordinator(lease_s=0.003), Told()
    member = make(coordinator, told)

    def heartbeat(*_: object, **__: object) -> control_pb2.HeartbeatReply:
        raise refused("node a was removed: stolen")

    monkeypatch.setattr(coordinator, "Heartbeat", heartbeat)
    member.join(timeout_s=WAIT_S)
    assert told.ended.wait(WAIT_S)
    member.leave()
    assert [(type(error), str(error), error.exit_code) for error in told.gone] == [
        (TrustError, "node a was removed: stolen", 3)
    ]
    assert told.run_over == [("", "node a was removed: stolen")]


def test_membership_does_not_try_to_join_without_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with certificates is said at the first try, not after half a minute of them."""
    coordinator = FakeCoordinator()
    coordinator.joins = [grpc.StatusCode.UNAVAILABLE] * 100
    monkeypatch.setattr(CallError, "details", lambda _: "SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER")
    with (
        using_credentials(credentials_of("a")),
        pytest.raises(TrustError, match="a can't join: who answers at host:1 speaks pl"),
    ):
        make(coordinator, Told()).join(timeout_s=WAIT_S)
    assert coordinator.calls == ["join"]


def test_membership_passes_on_who_was_removed_and_whom_to_trust() -> None:
    """With every answer, so that nodes refuse it too; a list comes when it has changed.

    A heartbeat names the authorities that the node trusts by then.
    """
    heard: list[tuple[tuple[Removal, ...], list[bytes]]] = []
    coordinator = FakeCoordinator()
    of_b = Removal("node b was removed", node_party("b"), 2)
    coordinator.beats = [
        control_pb2.HeartbeatReply(known=True, removals_version="v1", removed=[removal_to_proto(of_b)]),
        control_pb2.HeartbeatReply(known=True, removals_version="v1", authorities_pem=[b"new", b"old"]),
        control_pb2.HeartbeatReply(known=True, removals_version="v0"),
    ]
    member = make(coordinator, Told(), on_answer=lambda found, given: heard.append((found.entries, list(given))))
    with using_credentials(who := credentials_of("a")):
        for _ in range(3):
            member.send_heartbeat()
    assert heard == [((of_b,), []), ((of_b,), [b"new", b"old"]), ((), [])]
    assert coordinator.versions == [who.identity.authorities_version] * 3
