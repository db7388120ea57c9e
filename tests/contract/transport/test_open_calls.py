"""Limits for each caller: nobody's calls starve those of others, whatever they do not say."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from ringtune.errors import BusyError, ConnectionFailedError, TrustError
from ringtune.transport.channels import _MAX_OPEN, _MAX_PARTY_CONNECTIONS, Server, open_channel
from ringtune.transport.credentials import Credentials, Removal, Removals, using_credentials
from ringtune.transport.endpoints import MAX_STREAMS
from ringtune.transport.open_calls import OpenCall, OpenCalls, TokenBucket, address_of
from ringtune.transport.parties import PERMISSIONS, Party, Permission, find_permission, node_party
from ringtune.transport.status import error_of_call
from ringtune.v1 import control_pb2, control_pb2_grpc
from tests.support.trust_parts import credentials_of

WAIT_S = 30.0
COORDINATOR = credentials_of("coordinator", "coordinator")


class Context:
    """A call's context that remembers its end."""

    is_cancelled = False

    def cancel(self) -> None:
        """End the call."""
        self.is_cancelled = True


def call_of(caller: str, *, first_s: float = 60.0, refused: list[str] | None = None) -> OpenCall:
    """An open call of somebody; ``refused`` names callers who are removed."""
    gone = refused if refused is not None else []
    return OpenCall(caller, Context(), first_s, lambda: caller in gone)


def are_ended(*calls: OpenCall) -> list[bool]:
    """Which calls were ended."""
    return [call.context.is_cancelled for call in calls]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:41234", "10.0.0.7"),
        ("ipv6:%5B2001:db8::7%5D:41234", "2001:db8::/64"),
        ("ipv6:%5B2001:db8::9:7%5D:1", "2001:db8::/64"),
        ("ipv6:[::ffff:10.0.0.7]:1", "10.0.0.7"),
        ("unix:/tmp/x", ""),
    ],
)
def test_address_of_a_peer(peer: str, address: str) -> None:
    """Without its port; of IPv6 the network, as a machine has all of its addresses."""
    assert address_of(peer) == address


def test_open_calls_end_the_oldest_silent_one_of_a_caller() -> None:
    """Not one that has sent something, nor one of others; if all of a caller's have, the next one is refused."""
    calls = OpenCalls(most=10)
    speaking, old, late, other = call_of("a"), call_of("a"), call_of("a"), call_of("b")
    for each in (other, speaking, old):
        calls.admit(each, 2)
    assert list(calls.noted(speaking, ["hello", "again"])) == ["hello", "again"]
    calls.admit(late, 2)
    assert are_ended(speaking, old, late, other) == [False, True, False, False]
    with pytest.raises(BusyError, match="ended before its first message"):  # it came too late: no handler may go on
        list(calls.noted(old, ["hello"]))
    list(calls.noted(late, ["hello"]))
    with pytest.raises(BusyError, match="a has 2 calls open here"):
        calls.admit(call_of("a"), 2)
    calls.leave(old)  # its handler ends later
    calls.leave(speaking)
    calls.admit(call_of("a"), 2)


def test_open_calls_of_many_callers_leave_room() -> None:
    """Many certificates with few calls each fill the threads: the oldest silent call of all makes room."""
    calls = OpenCalls(most=8)
    crowd = [call_of(f"evil-{number % 4}") for number in range(8)]
    for each in crowd:
        calls.admit(each, 2)
    calls.admit(call_of("a"), 2)
    assert are_ended(*crowd) == [True, *[False] * 7]


@pytest.mark.promise("6 every wait ends")
def test_open_calls_end_what_is_overdue_or_of_the_removed() -> None:
    """A call without a first message at its deadline, and each call of a caller who was removed since."""
    removed: list[str] = []
    calls = OpenCalls(most=8)
    silent, patient, speaking = call_of("a", first_s=10), call_of("a"), call_of("a", first_s=10)
    link = call_of("b", refused=removed)
    for each in (silent, patient, speaking, link):
        calls.admit(each, 8)
    for each in (speaking, link):
        list(calls.noted(each, ["hello"]))
    calls.end_silent(time.monotonic() + 20)
    assert are_ended(silent, patient, speaking, link) == [True, False, False, False]
    removed.append("b")
    calls.end_silent(time.monotonic())
    assert are_ended(link) == [True]


def test_token_bucket_is_of_each_key() -> None:
    """So many at once, then so many a second; refused ones cost nothing, full buckets are forgotten."""
    now_s = [0.0]
    bucket = TokenBucket(3, 2.0, now_s=lambda: now_s[0])
    assert [bucket.take("a") for _ in range(5)] == [True, True, True, False, False]
    assert not bucket.allows("a") and bucket.allows("b") and bucket.take("b")
    now_s[0] = 0.5
    assert [bucket.take("a") for _ in range(2)] == [True, False]
    now_s[0] = 100.0
    assert [bucket.take("a") for _ in range(4)] == [True, True, True, False]
    now_s[0] = 50.0  # a clock that is set back refuses nobody
    assert [bucket.take("a") for _ in range(4)] == [True, True, True, False]
    for number in range(10_000):
        now_s[0] += 1.0
        bucket.take(number)
    assert len(bucket._levels) <= 4096


# ---- at a server -------------------------------------------------------------------------------------


class Node(control_pb2_grpc.CoordinatorServicer):
    """Answers heartbeats, and holds what others ask until the end."""

    def __init__(self) -> None:
        self.over, self.begun = threading.Event(), threading.Semaphore(0)

    def Heartbeat(
        self, request: control_pb2.HeartbeatRequest, context: grpc.ServicerContext
    ) -> control_pb2.HeartbeatReply:
        """Answer."""
        return control_pb2.HeartbeatReply(known=True)

    def Nodes(self, request: control_pb2.Empty, context: grpc.ServicerContext) -> control_pb2.NodesReply:
        """Hold the call."""
        self.begun.release()
        self.over.wait(WAIT_S)
        return control_pb2.NodesReply()


@contextlib.contextmanager
def serving(max_workers: int = 1024, max_calls: int | None = None) -> Iterator[tuple[Server, Credentials, Node]]:
    """An encrypted server, the credentials that refuse who was removed, and what it serves."""
    node, who = Node(), Credentials(COORDINATOR.identity)

    def add(server: grpc.Server) -> None:
        control_pb2_grpc.add_CoordinatorServicer_to_server(node, server)

    with using_credentials(who):
        server = Server("127.0.0.1:0", add, max_workers=max_workers, max_calls=max_calls)
    try:
        yield server, who, node
    finally:
        node.over.set()
        server.stop(0.0)


def channel_of(name: str, server: Server) -> grpc.Channel:
    """A connection of a node of its own; its certificate is of generation 0."""
    with using_credentials(credentials_of(name)):
        options = (("grpc.use_local_subchannel_pool", 1),)
        return open_channel(server.address, options, peer=COORDINATOR.identity.party)


@contextlib.contextmanager
def silent(server: Server, name: str, method: str, count: int) -> Iterator[list[Any]]:
    """Calls of a node that send nothing, on two connections."""
    with contextlib.ExitStack() as stack:
        calls: list[Any] = []
        over = queue.SimpleQueue[bytes]()
        for _ in range(2):
            channel = stack.enter_context(channel_of(name, server))
            stream: Any = channel.stream_unary(f"/ringtune.v1.Coordinator/{method}")
            calls += [stream.future(iter(over.get, b""), timeout=10 * WAIT_S) for _ in range(count // 2)]
        yield calls
        for call in calls:
            call.cancel()
            over.put(b"")  # else a thread would stay


def heartbeat(server: Server, name: str) -> Exception | None:
    """Make a heartbeat; return its error."""
    with channel_of(name, server) as channel:
        beat = control_pb2.HeartbeatRequest(node=name)
        try:
            control_pb2_grpc.CoordinatorStub(channel).Heartbeat(beat, timeout=WAIT_S)
        except grpc.RpcError as error:
            return error_of_call(error, peer="the coordinator")
    return None


def wait_for(number: int, calls: list[Any]) -> int:
    """Wait until at most so many calls are open; return how many are."""
    deadline_s = time.monotonic() + WAIT_S
    while (left := sum(not call.done() for call in calls)) > number and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return left


@pytest.mark.parametrize("method", ["Heartbeat", "Nodes"])
def test_silent_calls_of_a_certificate_are_few(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Of 300 at a server with 64 threads so many are left as a node may have; others are answered meanwhile."""
    monkeypatch.setattr("ringtune.transport.channels._LOOK_S", 3600.0)  # none of them ends as it is silent for long
    most = _MAX_OPEN["node"]
    with serving(max_workers=64) as (server, *_), silent(server, "evil", method, 300) as calls:
        assert heartbeat(server, "a") is None
        assert wait_for(most, calls) == most
        assert heartbeat(server, "a") is None
        assert heartbeat(server, "evil") is None  # its own process is not locked out by silent calls


def test_calls_without_end_leave_heartbeats_alone() -> None:
    """They take all threads of their kind; heartbeats have threads of their own."""
    with serving(max_workers=4) as (server, _, node), channel_of("evil", server) as channel:
        stub = control_pb2_grpc.CoordinatorStub(channel)
        calls: list[Any] = [stub.Nodes.future(control_pb2.Empty(), timeout=WAIT_S) for _ in range(20)]
        assert all(node.begun.acquire(timeout=WAIT_S) for _ in range(4))
        assert heartbeat(server, "a") is None
        assert not any(call.done() for call in calls[:4])


def test_calls_beyond_those_of_a_server_are_told_so() -> None:
    """GRPC refuses them with the status of a message that is too long."""
    with serving(max_calls=1) as (server, _, node), silent(server, "evil", "Nodes", 2) as calls:
        assert wait_for(1, calls) == 1
        refused = error_of_call(next(call for call in calls if call.done()).exception(), peer="the coordinator")
        assert (type(refused), str(refused)) == (
            BusyError,
            "the coordinator has more calls open than it takes; try again later",
        )
        node.over.set()


def test_silent_calls_of_a_removed_certificate_are_refused_at_once() -> None:
    """Before their first message: they hold no thread, and those that were open before the removal are ended."""
    with serving() as (server, who, _):
        with silent(server, "evil", "Nodes", 20) as before:
            assert heartbeat(server, "evil") is None
            who.removed = Removals([Removal("node evil was removed", party=node_party("evil"), generation=1)])
            assert wait_for(0, before) == 0
        with silent(server, "evil", "Heartbeat", 100) as calls:
            assert wait_for(0, calls) == 0
            assert {type(error_of_call(call.exception(), peer="it")) for call in calls} == {TrustError}
        assert heartbeat(server, "a") is None


def test_calls_of_a_certificate_have_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it they are refused, before they are read; another member's are not."""
    monkeypatch.setattr("ringtune.transport.channels._MAX_AT_ONCE", 2)
    monkeypatch.setattr("ringtune.transport.channels._MAX_PER_S", 1e-6)
    with serving() as (server, *_):
        assert [type(heartbeat(server, "evil")) for _ in range(3)] == [type(None), type(None), BusyError]
        assert heartbeat(server, "a") is None


@pytest.mark.parametrize("seen_s", [0.0, 3600.0])
def test_connections_of_a_certificate_are_few(monkeypatch: pytest.MonkeyPatch, seen_s: float) -> None:
    """One beyond them is closed, whatever else it has to say; those that were closed before do not count.

    Nor is there room for more between two looks at who is connected.
    """
    monkeypatch.setattr("ringtune.transport.channels._SEEN_S", seen_s)
    most = _MAX_PARTY_CONNECTIONS["node"]
    with serving() as (server, *_), contextlib.ExitStack() as stack:

        def connect() -> tuple[grpc.Channel, Any]:
            channel = stack.enter_context(channel_of("evil", server))
            stub = control_pb2_grpc.CoordinatorStub(channel)
            return channel, lambda: stub.Heartbeat(control_pb2.HeartbeatRequest(node="evil"), timeout=WAIT_S)

        made = [connect() for _ in range(most)]
        for _, beat in made:
            beat()
        _, beat = connect()
        told = set()
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as caught:
                beat()
            told.add(type(error_of_call(caught.value, peer="it")))
        assert told <= {BusyError, ConnectionFailedError}
        for _, each in made:
            each()
        assert heartbeat(server, "a") is None
        if seen_s:
            return
        for channel, _ in made[:3]:
            channel.close()
        for _ in range(2 * most):  # one after the other; the server may see the end of the last ones a little later
            deadline_s = time.monotonic() + WAIT_S
            while heartbeat(server, "evil") is not None:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)


def test_calls_far_beyond_the_rate_close_their_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """To refuse each of them would cost more than they do."""
    for name, value in (("_MAX_AT_ONCE", 2), ("_MAX_PER_S", 1e-6), ("_MAX_REFUSED", 1), ("_SEEN_S", 0.0)):
        monkeypatch.setattr(f"ringtune.transport.channels.{name}", value)
    states = queue.SimpleQueue[grpc.ChannelConnectivity]()
    with serving() as (server, *_), channel_of("evil", server) as channel:
        others = set(threading.enumerate())
        channel.subscribe(states.put)
        watchers = set(threading.enumerate()) - others
        stub, told = control_pb2_grpc.CoordinatorStub(channel), list[grpc.StatusCode]()
        for _ in range(3):
            call = stub.Heartbeat.future(control_pb2.HeartbeatRequest(node="evil"), timeout=WAIT_S)
            told.append(call.code())
        assert told == [*2 * [grpc.StatusCode.OK], grpc.StatusCode.ALREADY_EXISTS]  # as a BusyError
        while states.get(timeout=WAIT_S) is not grpc.ChannelConnectivity.READY:
            pass
        stub.Heartbeat.future(control_pb2.HeartbeatRequest(node="evil"), timeout=WAIT_S).code()
        assert states.get(timeout=WAIT_S) is not grpc.ChannelConnectivity.READY
        channel.unsubscribe(states.put)
        for watcher in watchers:  # gRPC's own thread raises if its channel closes between two of its looks
            watcher.join(WAIT_S)
            assert not watcher.is_alive()


def test_queue_of_calls_is_longer_than_a_member_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,088 heartbeats of one wait while no thread looks at callers; by its default gRPC cancels some beyond 1,000."""
    looked, find = threading.Event(), find_permission

    def found(method: str) -> Permission | None:
        assert looked.wait(4 * WAIT_S)
        return find(method)

    monkeypatch.setattr("ringtune.transport.channels.find_permission", found)
    for limit in (_MAX_OPEN, _MAX_PARTY_CONNECTIONS):
        monkeypatch.setitem(limit, "node", 4096)  # so that only gRPC can cancel one
    with serving(max_calls=4096) as (server, *_), contextlib.ExitStack() as stack:
        calls: list[Any] = []
        for name, count in (*[("evil", MAX_STREAMS)] * 17, ("a", 1)):
            stub = control_pb2_grpc.CoordinatorStub(stack.enter_context(channel_of(name, server)))
            beat = control_pb2.HeartbeatRequest(node=name)
            calls += [stub.Heartbeat.future(beat, timeout=4 * WAIT_S) for _ in range(count)]
        looked.set()
        assert calls[-1].result().known
        codes = {call.code() for call in calls}
        assert grpc.StatusCode.CANCELLED not in codes


def test_call_without_a_request_is_told() -> None:
    """A client of another version that ends its stream of requests before the first one."""
    with serving() as (server, *_), channel_of("a", server) as channel:
        stream: Any = channel.stream_unary("/ringtune.v1.Coordinator/Heartbeat")
        with pytest.raises(grpc.RpcError, match="the call has no request"):
            stream(iter(()), timeout=WAIT_S)


def test_each_call_of_a_run_has_threads_apart() -> None:
    """Heartbeats, reports and what a coordinator asks of its nodes do not wait behind others."""
    urgent = {call for service in PERMISSIONS.values() for call, allowed in service.items() if allowed.is_urgent}
    assert {"Join", "Heartbeat", "Leave", "Report", "Grant", "Release", "Prepare", "Rest", "Move"} <= urgent
    assert not urgent & {"Run", "Evaluate", "Keep", "Link", "Fetch", "Status", "Renew"}
    assert set(_MAX_OPEN) == {Party(role, "x").role for role in ("node", "submitter", "coordinator")}
