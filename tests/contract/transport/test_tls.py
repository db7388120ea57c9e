"""Encrypted connections on loopback: who gets through, who is refused, and what a renewal changes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from coordinator.server.certificate_authority import DAYS, Authority
from ringtune.errors import ConnectionFailedError, RingTuneError, TrustError
from ringtune.transport.channels import Server, caller_of, open_channel
from ringtune.transport.credentials import Credentials, Removal, Removals, is_encrypted, using_credentials
from ringtune.transport.endpoints import PROXY_VARIABLES
from ringtune.transport.identity import Identity, facts_of
from ringtune.transport.parties import COORDINATOR, Party, Role, node_party
from ringtune.transport.status import error_of_call
from ringtune.transport.tls import handshake_problem
from ringtune.v1 import control_pb2, control_pb2_grpc
from tests.support.cases import cases
from tests.support.trust_parts import AUTHORITY, DAY_S, credentials_of

WAIT_S = 30.0
A_NODE = credentials_of("a")
COORDINATOR_ITSELF = credentials_of("coordinator", "coordinator")


class Hears(control_pb2_grpc.CoordinatorServicer, control_pb2_grpc.AgentServicer):
    """Notes who has called what."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        self.server: Any = None

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
def serving(
    credentials: Credentials | None = COORDINATOR_ITSELF, *, is_public: bool = False
) -> Iterator[tuple[str, Hears]]:
    """A server of both services, as ``credentials``."""
    hears = Hears()

    def add(server: grpc.Server) -> None:
        control_pb2_grpc.add_CoordinatorServicer_to_server(hears, server)
        control_pb2_grpc.add_AgentServicer_to_server(hears, server)

    with using_credentials(credentials):
        server = Server("127.0.0.1:0", add, is_public=is_public)
    hears.server = server
    try:
        yield server.address, hears
    finally:
        server.stop(0.0)


def handshake(address: str) -> ssl.SSLSocket:
    """Connect as a member that says nothing after it."""
    identity = A_NODE.identity
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with tempfile.NamedTemporaryFile() as file:
        file.write(identity.certificate_pem + identity.key_pem)
        file.flush()
        context.load_cert_chain(file.name)
    host, _, port = address.rpartition(":")
    found = context.wrap_socket(socket.create_connection((host, int(port)), WAIT_S))
    found.recv(1)  # the server has taken it
    return found


def is_closed(connection: ssl.SSLSocket, wait_s: float = WAIT_S) -> bool:
    """Whether the other end closes a connection within so many seconds."""
    connection.settimeout(wait_s)
    with contextlib.suppress(TimeoutError):
        while connection.recv(1 << 12):
            pass
        return True
    return False


@contextlib.contextmanager
def connected(
    address: str, credentials: Credentials | None, peer: Party | None = COORDINATOR
) -> Iterator[grpc.Channel]:
    """A channel of ``credentials``."""
    with using_credentials(credentials):
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
        for credentials in (A_NODE, credentials_of("alice", "submitter"), COORDINATOR_ITSELF):
            with connected(address, credentials) as channel:
                user, agent = control_pb2_grpc.CoordinatorStub(channel), control_pb2_grpc.AgentStub(channel)
                with contextlib.suppress(grpc.RpcError):
                    list(user.Follow(control_pb2.FollowRequest(), timeout=WAIT_S))
                with contextlib.suppress(grpc.RpcError):
                    agent.Load(iter([control_pb2.LoadChunk()] * 3), timeout=WAIT_S)
    assert hears.heard == [("follow", "submitter alice"), ("load 3", "the coordinator")]


OTHER = Authority.make(time.time())
BOTH = (OTHER.certificate_pem, AUTHORITY.certificate_pem)


def later(name: str, role: Role, days: float) -> Credentials:
    """Somebody with a certificate that was issued ``days`` from now."""
    return credentials_of(name, role, later_s=days * DAY_S)


FOREIGN = credentials_of("a", authority=OTHER)
OLD, EARLY = later("a", "node", -DAYS - 1), later("a", "node", 3)
OLD_ONE, EARLY_ONE = (later("coordinator", "coordinator", days) for days in (-DAYS - 1, 3))
UNLIKE: dict[str, tuple[Credentials | None, Credentials | None, Party, str]] = {
    "expired here": (OLD, COORDINATOR_ITSELF, COORDINATOR, "this process has expired on .* set the clock"),
    "early here": (EARLY, COORDINATOR_ITSELF, COORDINATOR, "this process is not valid before .* set the clock"),
    "expired there": (A_NODE, OLD_ONE, COORDINATOR, "has a certificate that has expired; set the clocks"),
    "early there": (A_NODE, EARLY_ONE, COORDINATOR, "has a certificate that is not valid yet; set the clocks"),
    "foreign": (FOREIGN, COORDINATOR_ITSELF, COORDINATOR, "has a certificate of another authority; join with a token"),
    "another node": (A_NODE, credentials_of("b"), node_party("a"), "is another party than node a; correct the address"),
    "another role": (
        A_NODE,
        credentials_of("a"),
        COORDINATOR,
        "is another party than the coordinator; correct the addr",
    ),
    "plain here": (None, COORDINATOR_ITSELF, COORDINATOR, "takes certificates only, .* has none; join with a token"),
    "plain there": (A_NODE, None, COORDINATOR, "speaks plain text, and this process encrypts; start it with a trust"),
}


@cases("case", UNLIKE)
def test_encryption_refuses_who_does_not_belong_and_says_why(case: str) -> None:
    """At either end, by dates, chain, name and plain text: no servicer hears of it, and the caller has the remedy."""
    here, there, peer, text = UNLIKE[case]
    with serving(there) as (address, hears), connected(address, here, peer) as channel:
        refused = beat(channel, "a")
        assert type(refused) is ConnectionFailedError
        with using_credentials(here):
            why = handshake_problem(str(refused), address, peer)
        assert re.search(f"^(who answers at {address}|the certificate of) {text}", why)
        assert hears.heard == []
        if there is COORDINATOR_ITSELF:
            with connected(address, A_NODE) as good:
                assert beat(good, "a") is None


def test_encryption_says_nothing_of_certificates_where_nobody_is() -> None:
    """A closed port is no question of certificates."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    for who in (None, A_NODE):
        with connected(address, who) as channel, using_credentials(who):
            assert handshake_problem(str(beat(channel, "a")), address, COORDINATOR) == ""


def test_encryption_with_a_clock_that_is_two_hours_off() -> None:
    """Either clock; a user's certificate, which serves nobody, is no server's."""
    for here, there in ((2 / 24, 0), (0, 2 / 24)):
        coordinator, node = later("coordinator", "coordinator", there), later("a", "node", here)
        with serving(coordinator) as (address, _), connected(address, node) as channel:
            assert beat(channel, "a") is None
    with serving(credentials_of("a", "submitter")) as (address, _), connected(address, A_NODE, None) as channel:
        assert type(beat(channel, "a")) is ConnectionFailedError


def test_encryption_connects_to_any_member_where_nobody_is_named() -> None:
    """Weights are fetched from whoever has them; what comes is checked by its digests."""
    for server in (COORDINATOR_ITSELF, credentials_of("b")):
        with serving(server) as (address, _), connected(address, A_NODE, None) as channel:
            assert beat(channel, "a") is None


def has_connections(server: Server, count: int) -> bool:
    """Whether a server has so many connections; gRPC ends those that were closed a moment later."""
    deadline_s = time.monotonic() + WAIT_S
    while (found := len(server.guard.connections.places()[0])) != count and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return found == count


@pytest.fixture
def looks_of_the_test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a server look for silent connections when the test says so, and not by itself."""
    monkeypatch.setattr("ringtune.transport.channels._LOOK_S", 3600.0)


@pytest.mark.usefixtures("looks_of_the_test_alone")
def test_encryption_connections_of_a_member_that_calls_nothing_are_closed() -> None:
    """Those beyond what an address may have at once, and all in time; one with a call stays, whatever it says later."""
    with serving(credentials_of("b")) as (address, hears), connected(address, A_NODE, node_party("b")) as called:
        assert beat(called, "a") is None
        server = hears.server
        with contextlib.ExitStack() as stack:
            silent = list[ssl.SSLSocket]()
            for count in (6, 64):
                silent += [stack.enter_context(handshake(address)) for _ in range(count)]
                server.guard.connections._looked_s = -math.inf
                server.guard.connections.places()  # who came last, it knows from its looks
            now_s = time.monotonic()
            for later_s, count in ((0.0, 6), (29.0, 6), (31.0, 70)):
                server.guard.end_uncalled(now_s + later_s)
                assert all(map(is_closed, silent[:count]))
                assert not any(is_closed(one, wait_s=0.02) for one in silent[count::21])
                assert has_connections(server, 1 + len(silent) - count)
            assert beat(called, "a") is None


@pytest.mark.usefixtures("looks_of_the_test_alone")
def test_encryption_connections_end_in_time_where_nobody_is_known() -> None:
    """Calls are short where no certificate is needed, so a stranger's call does not keep its connection."""
    with serving(is_public=True) as (address, hears), connected(address, A_NODE) as called:
        assert beat(called, "a") is None
        guard, now_s = hears.server.guard, time.monotonic()
        assert has_connections(hears.server, 1)
        for later_s in (0.0, 31.0):
            guard.end_uncalled(now_s + later_s)
        assert has_connections(hears.server, 0)


def test_encryption_connections_that_are_called_first_during_a_look_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link makes one call for a whole run, so what is forgotten of it would close it."""
    monkeypatch.setattr("ringtune.transport.channels._SEEN_S", 3600.0)  # one look, however late the second one is

    class Called(dict[tuple[str, int], float]):
        def copy(self) -> dict[tuple[str, int], float]:
            found = dict(self)
            self[place] = time.monotonic()
            return found

    with serving() as (_, hears), socket.create_connection(hears.server.address.rsplit(":", 1), WAIT_S) as caller:
        guard, place, now_s = hears.server.guard, caller.getsockname(), time.monotonic()
        guard._called = Called()
        for _ in range(2):
            guard.end_uncalled(now_s)
        assert place in guard._called


def test_encryption_of_a_removed_certificate_ends_with_the_next_call() -> None:
    """An open connection does not help; a later certificate of the same node is another one."""
    server = credentials_of("coordinator", "coordinator")
    with serving(server) as (address, _), connected(address, A_NODE) as channel:
        assert beat(channel, "a") is None
        stolen = "node a was removed: it was stolen"
        server.removed = Removals([Removal(stolen, node_party("a"), 1)])
        refused = beat(channel, "a")
        assert type(refused) is TrustError
        assert f"refused: {stolen}; join with a new token" in str(refused)
        with connected(address, Credentials(AUTHORITY.identity(node_party("a"), time.time(), generation=1))) as later:
            assert beat(later, "a") is None


def test_encryption_of_an_expired_certificate_ends_with_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection outlives its certificate, the right to call does not."""
    with serving() as (address, _), connected(address, A_NODE) as channel:
        assert beat(channel, "a") is None
        later = SimpleNamespace(time=lambda: A_NODE.identity.facts.ends_unix_s + 1.0, monotonic=time.monotonic)
        monkeypatch.setattr("ringtune.transport.channels.time", later)
        refused = beat(channel, "a")
        assert type(refused) is TrustError
        assert "has expired" in str(refused)


def test_encryption_of_a_server_takes_a_renewed_certificate() -> None:
    """Without a restart: who connects from now on sees the new certificate.

    Open connections stay while the authority of their certificates is trusted, and are refused from then on.
    """
    server = Credentials(credentials_of("coordinator", "coordinator").identity)
    with serving(server) as (address, _), connected(address, A_NODE) as before:
        assert beat(before, "a") is None
        with connected(address, credentials_of("a", authority=OTHER)) as channel:
            assert type(beat(channel, "a")) is ConnectionFailedError
        new = OTHER.identity(COORDINATOR, time.time())
        server.identity = Identity.of(new.key_pem, new.certificate_pem, *BOTH)
        with connected(address, credentials_of("a", authority=OTHER)) as channel:
            assert beat(channel, "a") is None
        assert beat(before, "a") is None
        server.identity = new
        assert "of an authority that was replaced" in str(beat(before, "a"))


def test_encryption_of_a_channel_takes_a_renewed_certificate() -> None:
    """The next call is made with it, on the same stub; a closed channel makes none, and does not end the process."""
    node = Credentials(A_NODE.identity)
    with serving() as (address, _):
        with connected(address, node) as channel:
            stub = control_pb2_grpc.CoordinatorStub(channel)
            assert stub.Heartbeat(control_pb2.HeartbeatRequest(node="a"), timeout=WAIT_S).known
            node.identity = credentials_of("b").identity
            assert stub.Heartbeat(control_pb2.HeartbeatRequest(node="b"), timeout=WAIT_S).known
        node.identity = A_NODE.identity
        for call in (lambda: stub.Heartbeat(control_pb2.HeartbeatRequest(node="b")), lambda: beat(channel, "a")):
            with pytest.raises(ValueError, match="closed"):
                call()


def test_encryption_holds_against_who_has_the_key_of_an_old_authority() -> None:
    """A certificate of it that names the key of the new one is none, also where both are trusted."""
    own = x509.load_pem_x509_certificate(A_NODE.identity.certificate_pem)
    builder = x509.CertificateBuilder(own.issuer, own.subject, own.public_key(), own.serial_number)
    builder = builder.not_valid_before(own.not_valid_before_utc).not_valid_after(own.not_valid_after_utc)
    claim = x509.AuthorityKeyIdentifier.from_issuer_public_key(OTHER.key.public_key())
    for extension in own.extensions:
        is_claim = isinstance(extension.value, x509.AuthorityKeyIdentifier)
        builder = builder.add_extension(claim if is_claim else extension.value, extension.critical)
    pem = builder.sign(AUTHORITY.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    assert facts_of(pem).authority == OTHER.own_identity(time.time()).facts.authority
    trusted = OTHER.identity(COORDINATOR, time.time())
    server = Credentials(Identity.of(trusted.key_pem, trusted.certificate_pem, *BOTH))
    who = Credentials(dataclasses.replace(A_NODE.identity, certificate_pem=pem, authorities=BOTH))
    with serving(server) as (address, _), connected(address, who) as channel:
        assert type(beat(channel, "a")) is ConnectionFailedError
    with serving(server) as (address, _), connected(address, credentials_of("a", authority=OTHER)) as channel:
        assert beat(channel, "a") is None


@cases("variable", sorted({name for known in PROXY_VARIABLES for name in (known, known.upper())}))
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


def test_encryption_refuses_many_calls_in_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """A member that is refused again and again does not fill a log; what it says of itself is shown in bounds."""
    with serving() as (address, _), connected(address, A_NODE) as channel:
        for _ in range(100):
            assert type(beat(channel, "\x1b[2J" * 500)) is TrustError
    lines = [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]
    assert 1 < len(lines) < 5
    assert "100 times by now" in lines[-1]
    assert max(map(len, lines)) < 600
    assert "\x1b" not in "".join(lines)
