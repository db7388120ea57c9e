"""Encrypted connections on loopback: who gets through, who is refused, and what a renewal changes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from coordinator.server.certificate_authority import Authority
from ringtune.errors import ConnectionFailedError, RingTuneError, TrustError
from ringtune.transport.channels import Server, caller_of, open_channel
from ringtune.transport.endpoints import PROXY_VARIABLES
from ringtune.transport.parties import COORDINATOR, Party, node_party
from ringtune.transport.speaker import Speaker, is_encrypted, speaking_as
from ringtune.transport.status import error_of_call
from ringtune.v1 import control_pb2, control_pb2_grpc
from tests.support.trust_parts import AUTHORITY, DAY_S, speaker_of

WAIT_S = 10.0
A_NODE = speaker_of("a")
COORDINATOR_ITSELF = speaker_of("coordinator", "coordinator")


class Hears(control_pb2_grpc.CoordinatorServicer, control_pb2_grpc.AgentServicer):
    """Notes who has called what."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def _hear(self, what: str, context: Any) -> None:
        caller = caller_of(context)
        self.heard.append((what, str(caller.party) if caller else "somebody"))

    def Heartbeat(self, request: control_pb2.HeartbeatRequest, context: Any) -> control_pb2.HeartbeatReply:
        """Heartbeat."""
        self._hear("heartbeat", context)
        return control_pb2.HeartbeatReply(known=True)

    def Follow(self, request: control_pb2.FollowRequest, context: Any) -> Iterator[control_pb2.RunEvent]:
        """Follow."""
        self._hear("follow", context)
        yield control_pb2.RunEvent(done=True)

    def Load(self, request_iterator: Iterator[Any], context: Any) -> control_pb2.Empty:
        """Load."""
        self._hear(f"load {len(list(request_iterator))}", context)
        return control_pb2.Empty()


@contextlib.contextmanager
def serving(speaker: Speaker | None = COORDINATOR_ITSELF) -> Iterator[tuple[str, Hears]]:
    """A server of both services, as ``speaker``."""
    hears = Hears()

    def add(server: grpc.Server) -> None:
        control_pb2_grpc.add_CoordinatorServicer_to_server(hears, server)
        control_pb2_grpc.add_AgentServicer_to_server(hears, server)

    with speaking_as(speaker):
        server = Server("127.0.0.1:0", add)
    try:
        yield server.address, hears
    finally:
        server.stop(0.0)


@contextlib.contextmanager
def connected(address: str, speaker: Speaker | None, peer: Party | None = COORDINATOR) -> Iterator[grpc.Channel]:
    """A channel of ``speaker``."""
    with speaking_as(speaker):
        channel = open_channel(address, peer=peer)
    with channel:
        yield channel


def beat(channel: grpc.Channel, node: str) -> RingTuneError | None:
    """Send a heartbeat in the name of a node; the error that comes back, if one does."""
    try:
        control_pb2_grpc.CoordinatorStub(channel).Heartbeat(control_pb2.HeartbeatRequest(node=node), timeout=WAIT_S)
    except grpc.RpcError as error:
        return error_of_call(error, peer="coordinator")
    return None


def test_encryption_lets_a_node_speak_as_itself_only() -> None:
    """The certificate's name has to be the one in the message; nothing reaches the servicer otherwise."""
    with serving() as (address, hears), connected(address, A_NODE) as channel:
        assert beat(channel, "a") is None
        refused = beat(channel, "b")
    assert hears.heard == [("heartbeat", "node a")]
    assert type(refused) is TrustError
    assert "node a speaks as node 'b'" in str(refused)


def test_encryption_lets_each_role_make_its_calls_only() -> None:
    """Streams either way are guarded like single messages."""
    with serving() as (address, hears):
        for speaker in (A_NODE, speaker_of("alice", "submitter"), COORDINATOR_ITSELF):
            with connected(address, speaker) as channel:
                user, agent = control_pb2_grpc.CoordinatorStub(channel), control_pb2_grpc.AgentStub(channel)
                with contextlib.suppress(grpc.RpcError):
                    list(user.Follow(control_pb2.FollowRequest(), timeout=WAIT_S))
                with contextlib.suppress(grpc.RpcError):
                    agent.Load(iter([control_pb2.LoadChunk()] * 3), timeout=WAIT_S)
    assert hears.heard == [("follow", "submitter alice"), ("load 3", "the coordinator")]


STRANGERS: dict[str, Callable[[], Speaker | None]] = {
    "of another authority": lambda: speaker_of("a", authority=Authority.make(time.time())),
    "expired": lambda: speaker_of("a", later_s=-31 * DAY_S),
    "not valid yet": lambda: speaker_of("a", later_s=3 * DAY_S),
    "in plain text": lambda: None,
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_encryption_refuses_strangers_before_any_call(stranger: str) -> None:
    """No servicer, no worker and no guard hears of them."""
    with serving() as (address, hears), connected(address, STRANGERS[stranger]()) as channel:
        assert type(beat(channel, "a")) is ConnectionFailedError
        with connected(address, A_NODE) as good:
            assert beat(good, "a") is None
    assert hears.heard == [("heartbeat", "node a")]


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (speaker_of("b"), node_party("a")),  # somebody else at the address
        (speaker_of("a"), COORDINATOR),
        (speaker_of("a", "submitter"), None),  # a user's certificate serves nobody
        (speaker_of("a", authority=Authority.make(time.time())), node_party("a")),
        (None, node_party("a")),
    ],
)
def test_encryption_connects_to_whom_is_meant_only(server: Speaker | None, expected: Party | None) -> None:
    """Addresses change and are in no certificate: who answers is known by name, and nothing is sent to another."""
    with serving(server) as (address, hears), connected(address, A_NODE, expected) as channel:
        assert type(beat(channel, "a")) is ConnectionFailedError
    assert hears.heard == []


def test_encryption_connects_to_any_member_where_nobody_is_named() -> None:
    """Weights are fetched from whoever has them; what comes is checked by its digests."""
    for server in (COORDINATOR_ITSELF, speaker_of("b")):
        with serving(server) as (address, _), connected(address, A_NODE, None) as channel:
            assert beat(channel, "a") is None


def test_encryption_of_a_removed_certificate_ends_with_the_next_call() -> None:
    """An open connection does not help; a later certificate of the same node is another one."""
    server = speaker_of("coordinator", "coordinator")
    with serving(server) as (address, _), connected(address, A_NODE) as channel:
        assert beat(channel, "a") is None
        server.removed = {A_NODE.identity.facts.serial: "node a was removed: it was stolen"}
        refused = beat(channel, "a")
        assert type(refused) is TrustError
        assert "refused: node a was removed: it was stolen" in str(refused)
        with connected(address, speaker_of("a")) as later:
            assert beat(later, "a") is None


def test_encryption_of_an_expired_certificate_ends_with_the_next_call() -> None:
    """A connection outlives its certificate, the right to call does not."""
    short = Speaker(AUTHORITY.identity(node_party("a"), time.time(), days=1.5 / DAY_S))
    with serving() as (address, _), connected(address, short) as channel:
        assert beat(channel, "a") is None
        deadline_s = time.monotonic() + WAIT_S
        while (refused := beat(channel, "a")) is None:
            assert time.monotonic() < deadline_s
        assert type(refused) is TrustError
        assert "has expired" in str(refused)


def test_encryption_goes_on_with_a_renewed_certificate() -> None:
    """A channel that was opened before takes the new one for its next call, without being opened again."""
    node = Speaker(AUTHORITY.identity(node_party("a"), time.time(), days=1.5 / DAY_S))
    with serving() as (address, _), connected(address, node) as channel:
        stub = control_pb2_grpc.CoordinatorStub(channel)
        assert stub.Heartbeat(control_pb2.HeartbeatRequest(node="a"), timeout=WAIT_S).known
        node.renew(speaker_of("a").identity)
        while time.time() < node.identity.facts.begins_unix_s + 2 * DAY_S + 2:
            assert stub.Heartbeat(control_pb2.HeartbeatRequest(node="a"), timeout=WAIT_S).known


def test_encryption_of_a_server_takes_a_renewed_certificate() -> None:
    """Without a restart: who connects from now on sees the new certificate."""
    server = Speaker(speaker_of("coordinator", "coordinator").identity)
    other = Authority.make(time.time())
    with serving(server) as (address, _):
        with connected(address, speaker_of("a", authority=other)) as channel:
            assert type(beat(channel, "a")) is ConnectionFailedError
        server.renew(other.identity(COORDINATOR, time.time()))
        with connected(address, speaker_of("a", authority=other)) as channel:
            assert beat(channel, "a") is None


@pytest.mark.parametrize("variable", sorted({name for known in PROXY_VARIABLES for name in (known, known.upper())}))
def test_encryption_or_none_no_variable_sends_a_call_to_a_proxy(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable that names a proxy, in plain text and encrypted: the call goes to the address that was given."""
    monkeypatch.setenv(variable, "127.0.0.1:1" if variable.startswith("GRPC_ADDRESS") else "http://127.0.0.1:1")
    monkeypatch.setenv("GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES", "127.0.0.1")
    for server, caller in ((None, None), (COORDINATOR_ITSELF, A_NODE)):
        with serving(server) as (address, _), connected(address, caller) as channel:
            assert beat(channel, "a") is None


def test_encryption_is_not_there_without_an_identity() -> None:
    """As before: plain text on loopback, and nobody is asked who they are."""
    assert not is_encrypted()
    with serving(None) as (address, hears), connected(address, None) as channel:
        assert beat(channel, "a") is None
        assert beat(channel, "b") is None
    assert hears.heard == [("heartbeat", "somebody")] * 2


def test_encryption_refuses_a_thousand_calls_in_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """A member that is refused again and again does not fill a log; what it says of itself is shown in bounds."""
    with serving() as (address, _), connected(address, A_NODE) as channel:
        for _ in range(1000):
            assert type(beat(channel, "\x1b[2J" * 500)) is TrustError
    lines = [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]
    assert 1 < len(lines) < 6
    assert "1,000 times by now" in lines[-1]
    assert max(map(len, lines)) < 600
    assert "\x1b" not in "".join(lines)
