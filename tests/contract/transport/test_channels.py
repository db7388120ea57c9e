"""Tests of ``ringtune.transport.channels``: connections, their windows, workers, and strangers who say nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from ringtune.errors import ConnectionFailedError, DataError, DeadlineError, RingTuneError, UsageError
from ringtune.transport.channels import Server, Workers, open_channel
from ringtune.transport.credentials import Credentials, using_credentials
from ringtune.transport.endpoints import MAX_STREAMS, WINDOW_BYTES, require_private, target_of
from ringtune.transport.parties import COORDINATOR
from ringtune.transport.status import abort, error_of_call
from ringtune.transport.tls import certificate_at
from ringtune.v1 import control_pb2, control_pb2_grpc
from tests.support.cases import cases
from tests.support.processes import RUN_S, source_environment
from tests.support.trust_parts import credentials_of

WAIT_S = 30.0
COORDINATOR_ITSELF = credentials_of("coordinator", "coordinator")


class FailingAgent(control_pb2_grpc.AgentServicer):
    """An agent whose every call fails with ``error``, or waits for ``release``."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error
        self.release = threading.Event()
        self.entered = threading.Semaphore(0)

    def Release(self, request: control_pb2.ReleaseRequest, context: grpc.ServicerContext) -> control_pb2.Empty:
        """Fail, or wait."""
        if self._error is not None:
            abort(context, self._error)
        self.entered.release()
        self.release.wait(WAIT_S)
        return control_pb2.Empty()


def serve(agent: control_pb2_grpc.AgentServicer, address: str = "127.0.0.1:0", **options: Any) -> Server:
    """A server of an agent."""
    return Server(address, lambda made: control_pb2_grpc.add_AgentServicer_to_server(agent, made), **options)


def _failure(agent: FailingAgent, timeout_s: float = WAIT_S) -> RingTuneError:
    """How a call of this agent fails at the caller."""
    server = serve(agent, max_workers=1)
    channel = open_channel(server.address)
    try:
        with pytest.raises(grpc.RpcError) as caught:
            control_pb2_grpc.AgentStub(channel).Release(control_pb2.ReleaseRequest(), timeout=timeout_s)
        return error_of_call(caught.value, peer="node b")
    finally:
        agent.release.set()
        channel.close()
        server.stop(grace_s=0.1)


def test_connections_errors_cross_a_call() -> None:
    """One of ours as it is (every class: ``test_status``); a bug by its type, as its text may have what a row says."""
    error = _failure(FailingAgent(DataError("node pi-4: größer\nthan it is")))
    assert (type(error), str(error)) == (DataError, "node pi-4: größer\nthan it is")
    error = _failure(FailingAgent(KeyError("lost")))
    assert type(error) is RingTuneError
    assert "internal error, KeyError" in str(error)
    assert "lost" not in str(error)


@pytest.mark.promise("6 every wait ends")
def test_connections_a_call_that_takes_too_long_is_a_deadline() -> None:
    """A peer that does not answer in time is named."""
    error = _failure(FailingAgent(), timeout_s=0.2)
    assert type(error) is DeadlineError
    assert str(error).startswith("node b: DEADLINE_EXCEEDED")


def test_connections_a_closed_port_is_a_failed_connection() -> None:
    """Nobody at the address: said at once, not after a back-off."""
    server = Server("127.0.0.1:0", lambda server: None)
    server.stop(grace_s=0.0)
    channel = open_channel(server.address)
    with pytest.raises(grpc.RpcError) as caught:
        control_pb2_grpc.AgentStub(channel).Release(control_pb2.ReleaseRequest(), timeout=WAIT_S)
    channel.close()
    assert type(error_of_call(caught.value, peer="node b")) is ConnectionFailedError


def test_connections_a_server_that_ends_under_a_call_is_a_failed_connection() -> None:
    """The caller did not stop anything, so it is told that the other one ended."""
    agent = FailingAgent()
    server = serve(agent)
    channel = open_channel(server.address)
    call: Any = control_pb2_grpc.AgentStub(channel).Release.future(control_pb2.ReleaseRequest(), timeout=WAIT_S)
    assert agent.entered.acquire(timeout=WAIT_S)
    try:
        server.stop(grace_s=0.0, wait=False)
        error = error_of_call(call.exception(timeout=WAIT_S), peer="node b")
        assert type(error) is ConnectionFailedError
        assert str(error).startswith("node b: ")
    finally:
        agent.release.set()
        channel.close()
        server.stop(grace_s=0.1)


@pytest.mark.parametrize("who", [None, COORDINATOR_ITSELF], ids=["plain", "encrypted"])
def test_connections_to_several_places_reach_the_one_that_answers(who: Credentials | None) -> None:
    """The next call after the end of one of two coordinators reaches the other, over the same channel."""
    agent = FailingAgent()
    agent.release.set()
    waits: dict[str, Any] = {"timeout": WAIT_S, "wait_for_ready": True}

    with using_credentials(who):
        first, second = serve(agent), serve(agent)
        places = f"{first.address.replace('127.0.0.1', 'localhost')},{second.address}"
        with open_channel(places, peer=COORDINATOR) as channel:
            stub = control_pb2_grpc.AgentStub(channel)
            second.stop(grace_s=0.0)
            stub.Release(control_pb2.ReleaseRequest(), **waits)
            first.stop(grace_s=0.0)
            second = serve(agent, second.address)
            stub.Release(control_pb2.ReleaseRequest(), **waits)
            assert who is None or certificate_at(places) == who.identity.certificate_pem
        second.stop(grace_s=0.0)


def test_connections_to_several_places_refuse_what_is_no_list_of_addresses() -> None:
    """Each address of a list is read, and each is to be on this machine in plain text."""
    refused = {"127.0.0.1:7070,": "HOST:PORT", "127.0.0.1:7070,[::1]:7070": "one kind", "a:1, b:2": "HOST:PORT"}
    for places, why in refused.items():
        with pytest.raises(UsageError, match=why):
            target_of(places)
    with pytest.raises(ConnectionFailedError, match="no host of"):
        target_of("a.invalid:1,b.invalid:1")
    with pytest.raises(UsageError, match="beyond this machine"):
        require_private("127.0.0.1:7070,192.0.2.1:7070", option="--coordinator", insecure=False)
    require_private("127.0.0.1:7070,localhost:7071", option="--coordinator", insecure=False)


def test_connections_a_host_of_another_machine_can_not_be_bound() -> None:
    """Listening on an address that is not ours fails with the address in the message."""
    with pytest.raises(ConnectionFailedError, match=r"can't listen on 192\.0\.2\.1:0"):
        Server("192.0.2.1:0", lambda server: None)


def test_connections_stop_ends_a_running_call_and_every_thread() -> None:
    """A call that does not end is cancelled after the grace, and no worker is left."""
    before = set(threading.enumerate())
    agent = FailingAgent()
    server = serve(agent)
    channel = open_channel(server.address)
    call: Any = control_pb2_grpc.AgentStub(channel).Release.future(control_pb2.ReleaseRequest(), timeout=WAIT_S)
    assert agent.entered.acquire(timeout=WAIT_S)
    stopping = threading.Thread(target=server.stop, kwargs={"grace_s": 0.05})
    stopping.start()
    assert call.exception(timeout=WAIT_S) is not None
    agent.release.set()
    stopping.join(WAIT_S)
    channel.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive(), thread.name


@pytest.mark.promise("6 every wait ends")
def test_connections_process_without_threads_ends(tmp_path: Path) -> None:
    """No thread can be started any more and a handler waits for ever: the process still ends, and answers till then."""
    script = tmp_path / "process.py"
    script.write_text(_WITHOUT_THREADS)
    done = subprocess.run(  # noqa: S603 - our own lines
        [sys.executable, script], env=source_environment(), capture_output=True, text=True, timeout=RUN_S
    )
    assert done.stdout.splitlines() == ["third DEADLINE_EXCEEDED", "fourth OK", "stopped"], done.stderr
    assert done.returncode == 0


_WITHOUT_THREADS = """
import threading
from ringtune.transport import channels
from ringtune.transport.channels import Server, open_channel
from ringtune.v1 import control_pb2, control_pb2_grpc

channels._STOP_S = 0.5  # how long the end waits for threads
begun, go_on, never = threading.Semaphore(0), threading.Event(), threading.Event()


class Waits(control_pb2_grpc.AgentServicer):
    def Release(self, request, context):
        begun.release()
        never.wait() if request.reason == "for ever" else go_on.wait(30.0)
        return control_pb2.Empty()


def refuse(self):
    raise RuntimeError("can't start new thread")


server = Server("127.0.0.1:0", lambda made: control_pb2_grpc.add_AgentServicer_to_server(Waits(), made))
channel = open_channel(server.address)
stub = control_pb2_grpc.AgentStub(channel)
first = stub.Release.future(control_pb2.ReleaseRequest(reason="for ever"), timeout=60.0)
second = stub.Release.future(control_pb2.ReleaseRequest(), timeout=60.0)
begun.acquire(), begun.acquire()
start, threading.Thread.start = threading.Thread.start, refuse
third = stub.Release.future(control_pb2.ReleaseRequest(), timeout=0.5)
third.exception(30.0)
print("third", third.code().name)
go_on.set()
second.result(30.0)
fourth = stub.Release.future(control_pb2.ReleaseRequest(), timeout=30.0)
fourth.exception(30.0)
print("fourth", "OK" if fourth.exception(0) is None else fourth.code().name, flush=True)
server.stop(0.1)
print("stopped", flush=True)
threading.Thread.start = start
channel.close()
"""


def test_connections_that_open_many_calls_keep_no_other_connection_waiting() -> None:
    """Of 3,000 calls of one connection 200 are carried out at a time; another connection's is answered at once."""
    agent = FailingAgent()
    server = serve(agent)
    greedy = grpc.insecure_channel(server.address, options=(("grpc.use_local_subchannel_pool", 1),))
    flood: Any = greedy.unary_unary("/ringtune.v1.Agent/Release")
    calls = [flood.future(b"", timeout=WAIT_S) for _ in range(3 * MAX_STREAMS)]
    assert all(agent.entered.acquire(timeout=WAIT_S) for _ in range(MAX_STREAMS))
    channel = open_channel(server.address, (("grpc.use_local_subchannel_pool", 1),))
    other = control_pb2_grpc.AgentStub(channel).Release.future(control_pb2.ReleaseRequest(), timeout=WAIT_S)
    assert agent.entered.acquire(timeout=WAIT_S)
    assert not agent.entered.acquire(timeout=0.1)  # nothing beyond those of a connection and the one
    agent.release.set()
    assert other.exception(timeout=WAIT_S) is None
    for call in calls:
        call.cancel()
    for each in (greedy, channel):
        each.close()
    server.stop(grace_s=0.1)


@pytest.mark.promise("7 bounded memory")
@cases("window_bytes", [WINDOW_BYTES, 1 << 20])
def test_connections_hold_no_more_unread_than_their_window(window_bytes: int) -> None:
    """Of a stream that is fast and is read no more, and what is on its way; a caller's own window counts first."""
    sent: list[int] = []
    piece = bytes(1 << 18)

    def stream(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        for number in range(256):
            sent.append(number)
            yield piece

    def add(server: grpc.Server) -> None:
        handler: Any = grpc.unary_stream_rpc_method_handler(stream)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", {"Stream": handler}),))

    server = Server("127.0.0.1:0", add)
    more = () if window_bytes == WINDOW_BYTES else (("grpc.http2.lookahead_bytes", window_bytes),)
    with open_channel(server.address, more) as channel:
        method: Any = channel.unary_stream("/Test/Stream")
        call = method(b"")
        num_read = len([next(call) for _ in range(64)])
        pause, before = threading.Event(), -1
        while before != len(sent):
            before = len(sent)
            pause.wait(0.3)
        assert (len(sent) - num_read) * len(piece) < 2 * window_bytes + 8 * len(piece)
        call.cancel()
    server.stop(grace_s=0.1)


def test_connections_to_a_slow_board_are_waited_for() -> None:
    """Behind a router that queues for two seconds, or on a busy board, the first bytes of an answer take that long."""
    agent, over = FailingAgent(), threading.Event()
    agent.release.set()
    server = serve(agent)
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as pipes:
        listener.settimeout(WAIT_S)
        accepted: list[socket.socket] = []

        def pass_on(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    target.sendall(data)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    accepted.append(near)
                    over.wait(2.5)
                    far = socket.create_connection(("127.0.0.1", server.port))
                    for each in (near, far):
                        pipes.callback(each.close)
                    for pair in ((near, far), (far, near)):
                        threading.Thread(target=pass_on, args=pair, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        with open_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
            control_pb2_grpc.AgentStub(channel).Release(control_pb2.ReleaseRequest(), timeout=WAIT_S)
        over.set()
        assert len(accepted) == 1
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
    server.stop(grace_s=0.1)


def test_workers_start_a_thread_only_when_none_is_free() -> None:
    """Calls one after another share one thread; calls at a time have one each, up to the limit."""
    workers, names = Workers(3, "test"), set[str]()
    begun, go_on = threading.Semaphore(0), threading.Event()
    for _ in range(20):
        names.add(workers.submit(lambda: threading.current_thread().name).result(WAIT_S))
        assert any(workers._num_idle or go_on.wait(0.001) for _ in range(30_000))  # it is free behind the result
    assert len(names) == 1

    def call() -> bool:
        begun.release()
        return go_on.wait(WAIT_S)

    futures = [workers.submit(call) for _ in range(5)]
    assert all(begun.acquire(timeout=WAIT_S) for _ in range(3))
    assert not begun.acquire(blocking=False)
    go_on.set()
    assert all(future.result(WAIT_S) for future in futures)
    assert workers.close(WAIT_S)


@pytest.mark.promise("6 every wait ends")
def test_workers_close_in_time_and_take_nothing_afterwards() -> None:
    """What waits is cancelled, a call under way is waited for so long and no longer."""
    workers = Workers(1, "test")
    begun, go_on = threading.Event(), threading.Event()

    def call() -> bool:
        begun.set()
        return go_on.wait(WAIT_S)

    under_way, waiting = workers.submit(call), workers.submit(call)
    assert begun.wait(WAIT_S)
    assert not workers.close(0.0)
    assert waiting.cancelled() and workers.submit(call).cancelled()
    go_on.set()
    assert under_way.result(WAIT_S)
    assert workers.close(WAIT_S)


def test_workers_without_a_thread_left_let_calls_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """``submit`` does not raise, because gRPC's own thread would end with it; a free thread takes the call later."""
    workers = Workers(5, "test")
    begun, go_on = threading.Event(), threading.Event()

    def call() -> bool:
        begun.set()
        return go_on.wait(WAIT_S)

    first = workers.submit(call)
    assert begun.wait(WAIT_S)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        second = workers.submit(call)
    assert not second.done()
    go_on.set()
    assert first.result(WAIT_S) and second.result(WAIT_S)
    assert workers.close(WAIT_S)


# ---- strangers cost a server nothing until they say something --------------------------------------

COUNT = 50
deferring = pytest.mark.skipif(not hasattr(socket, "TCP_DEFER_ACCEPT"), reason="the system has no such thing")


class Node(control_pb2_grpc.AgentServicer):
    """Takes every grant."""

    def Grant(self, request: control_pb2.GrantRequest, context: grpc.ServicerContext) -> control_pb2.Empty:
        """Take it."""
        return control_pb2.Empty()


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that serves a node."""
    made = serve(Node())
    yield made
    made.stop(0.0)


def taken(port: int) -> int:
    """How many connections this process has taken on a port."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):  # else its copy would stay open
                with socket.socket(fileno=os.dup(int(entry.name))) as found:
                    is_taken = found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] == port
                    count += bool(is_taken and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return count


def call(server: Server) -> None:
    """Make a call on a connection of its own."""
    with open_channel(server.address) as channel:
        control_pb2_grpc.AgentStub(channel).Grant(control_pb2.GrantRequest(), timeout=WAIT_S)


def connections(server: Server, stack: contextlib.ExitStack) -> list[socket.socket]:
    """Connect as often as a stranger who says nothing."""
    return [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), WAIT_S)) for _ in range(COUNT)]


@deferring
def test_silent_connections_are_not_taken_and_others_come_past_them(server: Server) -> None:
    """They came first, and a call that came after them is answered."""
    with contextlib.ExitStack() as stack:
        connections(server, stack)
        call(server)
        assert taken(server.port) <= 1  # that of the call, if it is not closed yet
        with open_channel(server.address) as channel:
            control_pb2_grpc.AgentStub(channel).Grant(control_pb2.GrantRequest(), timeout=WAIT_S)
            assert taken(server.port) >= 1  # so they would be counted


@deferring
def test_connection_is_taken_with_its_first_byte(server: Server) -> None:
    """So that nobody who calls waits for anything: the server answers an HTTP/2 client who has said who it is."""
    with contextlib.ExitStack() as stack:
        (first, *_) = connections(server, stack)
        first.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"))
        assert first.recv(9)
        assert 1 <= taken(server.port) <= 2
