"""Certificates and their register: what they say, how long they hold, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import queue
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from coordinator.run.members import Member
from coordinator.server import server as servicer
from coordinator.server.certificate_authority import (
    DAYS,
    FILE,
    Authority,
    Register,
    TrustKeeper,
    init_trust,
    make_token,
)
from coordinator.server.coordinator import Coordinator
from coordinator.server.server import CoordinatorServer
from ringtune import __version__
from ringtune.errors import BusyError, ConnectionFailedError, StorageError, TokenError, TrustError, UsageError
from ringtune.transport import enrollment
from ringtune.transport.channels import Server, open_channel
from ringtune.transport.codecs import removals_from_proto
from ringtune.transport.credentials import Credentials, Removal, using_credentials
from ringtune.transport.endpoints import CLIENT_OPTIONS, WIRE
from ringtune.transport.enrollment import join, renew, renew_if_due
from ringtune.transport.identity import (
    BACKDATED_S,
    Identity,
    facts_of,
    fingerprint,
    is_issued_by,
    make_key,
    make_request,
    read_certificate,
    read_identity,
    requested_key,
    write_identity,
)
from ringtune.transport.open_calls import TokenBucket
from ringtune.transport.parties import (
    ANY_MEMBER,
    COORDINATOR,
    IDENTITY,
    INVALID,
    Party,
    Token,
    node_party,
    parse_token,
    secret_hash,
)
from ringtune.transport.status import error_of_call
from ringtune.transport.tls import certificate_at, pinned_channel
from ringtune.v1 import control_pb2, control_pb2_grpc, trust_pb2, trust_pb2_grpc
from tests.support.cases import cases
from tests.support.failpoints import DroppedCallError

NOW_S = 1_800_000_000.0
DAY_S = 86400.0
PI = node_party("pi-4")
AUTHORITY = Authority.make(NOW_S)


def server_names(pem: bytes) -> list[str]:
    """The DNS names of a certificate."""
    found = read_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return found.get_values_for_type(x509.DNSName)


def uses(pem: bytes) -> set[x509.ObjectIdentifier]:
    """What a certificate may be used for."""
    return set(read_certificate(pem).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def test_certificates_name_their_bearer_and_hold_for_a_year() -> None:
    """The certificate of a node says who it is, from two days before it was issued."""
    facts = AUTHORITY.identity(PI, NOW_S).facts
    assert facts.party == PI
    assert facts.begins_unix_s == NOW_S - BACKDATED_S
    assert facts.ends_unix_s == NOW_S + DAYS * DAY_S
    assert facts.renew_at_unix_s == NOW_S + (DAYS - 90) * DAY_S
    # One of them can be removed without the other
    first, second = (facts_of(AUTHORITY.identity(PI, NOW_S).certificate_pem) for _ in range(2))
    assert first.serial != second.serial
    # A request is signed with the key that it is for; one that was changed on its way is refused
    key = make_key()
    request = make_request(key)
    assert requested_key(request) == key.public_key()
    for damaged in (b"", b"hello", request[:80], request.replace(request[100:104], b"AAAA")):
        with pytest.raises(TrustError):
            requested_key(damaged)


def test_certificates_hold_with_a_clock_that_is_two_hours_off() -> None:
    """Backdating covers boards without a battery; what goes beyond names the clock."""
    for days_later, problem in [
        (-3.0, "not valid before"),
        (-2.0, ""),
        (-2 / 24, ""),
        (0.0, ""),
        (DAYS, ""),
        (DAYS + 0.1, "has expired"),
        (800.0, "has expired"),
    ]:
        found = AUTHORITY.identity(PI, NOW_S).facts.problem_at(NOW_S + days_later * DAY_S)
        assert problem in found
        assert bool(found) == bool(problem)
        assert "clock" in found or not found


def test_certificates_of_users_and_of_other_authorities() -> None:
    """Nodes and coordinator may be connected to by the name of any member, a user's certificate is a client's only."""
    user = AUTHORITY.identity(Party("submitter", "alice"), NOW_S).certificate_pem
    assert server_names(user) == ["alice.submitter.ringtune"]
    assert uses(user) == {ExtendedKeyUsageOID.CLIENT_AUTH}
    for party in (COORDINATOR, PI):
        pem = AUTHORITY.identity(party, NOW_S).certificate_pem
        assert server_names(pem) == [party.server_name, ANY_MEMBER]
        assert uses(pem) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    # Whatever is asked for; then nothing is issued any more, and the clock and the remedy are named
    last = read_certificate(AUTHORITY.certificate_pem).not_valid_after_utc.timestamp()
    assert AUTHORITY.identity(PI, last - DAY_S).facts.ends_unix_s == last
    with pytest.raises(TrustError, match=r"authority has expired on .* clock says .* 'ringtune coordinator init"):
        AUTHORITY.identity(PI, last + 1)
    # The name of an authority proves nothing, its signature does
    other = Authority.make(NOW_S)
    pem = other.identity(PI, NOW_S).certificate_pem
    assert is_issued_by(pem, other.certificate_pem)
    assert not is_issued_by(pem, AUTHORITY.certificate_pem)
    mine = AUTHORITY.identity(PI, NOW_S)
    with pytest.raises(TrustError, match="another authority"):
        Identity.of(mine.key_pem, mine.certificate_pem, other.certificate_pem)


# ---- on a disk -------------------------------------------------------------------------------------


def test_identity_comes_back_from_its_folder(tmp_path: Path) -> None:
    """One file, for this user only, in a folder that nobody else can enter."""
    folder = tmp_path / "trust"
    identity = AUTHORITY.identity(PI, NOW_S)
    write_identity(folder, identity)
    assert read_identity(folder, NOW_S) == identity
    assert (folder.stat().st_mode & 0o777, (folder / IDENTITY).stat().st_mode & 0o777) == (0o700, 0o600)
    # What a log or a traceback shows of an identity has no key in it
    identity = AUTHORITY.identity(PI, NOW_S)
    assert "PRIVATE" not in f"{identity!r}"
    assert "key" not in repr(AUTHORITY)
    # Either the clock is wrong or the certificate is old: the message has both dates
    write_identity(tmp_path, AUTHORITY.identity(PI, NOW_S))
    with pytest.raises(TrustError, match=r"of node pi-4 has expired on 2028-01-15 08:00 UTC, and .*clock says 2028"):
        read_identity(tmp_path, NOW_S + 400 * DAY_S)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_identity_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    """It says which file, and what to do."""
    write_identity(tmp_path, AUTHORITY.identity(PI, NOW_S))
    (tmp_path / IDENTITY).chmod(mode)
    with pytest.raises(TrustError, match=r"identity\.pem can be read by other users.*chmod 600"):
        read_identity(tmp_path, NOW_S)


def test_identity_that_is_missing_or_damaged_is_refused(tmp_path: Path) -> None:
    """Each in one line that names the file."""
    with pytest.raises(TrustError, match=r"can't read the certificate .*identity\.pem: No such file"):
        read_identity(tmp_path, NOW_S)
    identity = AUTHORITY.identity(PI, NOW_S)
    write_identity(tmp_path, identity)
    whole = (tmp_path / IDENTITY).read_bytes()
    other = AUTHORITY.identity(PI, NOW_S)
    for damaged in (b"", whole[:200], whole[300:], whole * 2, whole.replace(identity.key_pem, other.key_pem)):
        (tmp_path / IDENTITY).write_bytes(damaged)
        with pytest.raises(TrustError, match="join with a new token"):
            read_identity(tmp_path, NOW_S)


def test_authority_comes_back_from_its_folder(tmp_path: Path) -> None:
    """What it issues afterwards is of the same authority; a key that others can read is refused."""
    AUTHORITY.write(tmp_path)
    again = Authority.read(tmp_path)
    assert is_issued_by(again.identity(PI, NOW_S).certificate_pem, AUTHORITY.certificate_pem)
    (tmp_path / "authority.pem").chmod(0o644)
    with pytest.raises(TrustError, match="can be read by other users"):
        Authority.read(tmp_path)
    (tmp_path / "authority.pem").chmod(0o600)
    (tmp_path / "authority.pem").write_bytes((tmp_path / "authority.pem").read_bytes()[:300])
    with pytest.raises(TrustError, match=r"authority\.pem is damaged.*restore a copy"):
        Authority.read(tmp_path)


HOUR_S = 3600.0
PI_NODE = node_party("pi")


def issue(party: Party, generation: int, is_administrator: bool = False) -> bytes:
    """A certificate for somebody."""
    return AUTHORITY.issue(party, make_key().public_key(), NOW_S, generation=generation)


def never(party: Party, generation: int, is_administrator: bool = False) -> bytes:
    """Nobody may get a certificate here."""
    raise AssertionError(f"a certificate for {party}")


@pytest.fixture
def register(tmp_path: Path) -> Register:
    """A register with a token ``t`` for the node ``pi``, which ends in an hour."""
    made = Register(tmp_path)
    made.add_token("t", PI_NODE, NOW_S + HOUR_S)
    return made


def test_register_that_can_not_issue_keeps_the_token(register: Register) -> None:
    """A token is consumed with its certificate or not at all."""

    def fail(party: Party, generation: int, is_administrator: bool) -> bytes:
        raise TrustError("no")

    with pytest.raises(TrustError):
        register.redeem("t", "key", NOW_S, fail)
    assert facts_of(register.redeem("t", "other", NOW_S, issue)).party == PI_NODE


def test_register_gives_a_token_to_one_of_many_at_once(register: Register) -> None:
    """Eight keys show one token at the same moment: one gets a certificate."""

    def redeem(number: int) -> bool:
        try:
            return bool(register.redeem("t", f"key {number}", NOW_S, issue))
        except TokenError:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(redeem, range(8))) == 1


def test_register_removes_every_certificate_and_open_token_of_a_party(register: Register, tmp_path: Path) -> None:
    """Also for a process that opens the register later; what has expired is not listed."""
    facts = facts_of(register.redeem("t", "key", NOW_S, issue))
    register.add_token("open", PI_NODE, NOW_S + HOUR_S)
    register.add_token("of another", node_party("jetson"), NOW_S + HOUR_S)
    for _ in range(20):  # however often it renews, the list that nodes get has one entry
        register.renew(facts, NOW_S, lambda: issue(PI_NODE, facts.generation))
    assert register.remove(PI_NODE, "it was stolen") == 21
    found = Register(tmp_path).removed(NOW_S)
    assert found.entries == (Removal("it was stolen", PI_NODE, 1),)
    assert found.refusal(facts) == "it was stolen"
    assert register.removed(NOW_S + (DAYS + 1) * DAY_S).entries == ()
    with pytest.raises(TokenError):
        register.redeem("open", "key", NOW_S, never)
    assert register.redeem("of another", "key", NOW_S, issue)


def test_register_removes_nobody_whom_it_does_not_know(register: Register) -> None:
    """A misspelt name is told; a second removal is none."""
    with pytest.raises(TrustError, match="node p1 has no certificate"):
        register.remove(node_party("p1"), "gone")
    register.redeem("t", "key", NOW_S, issue)
    assert [register.remove(PI_NODE, "gone"), register.remove(PI_NODE, "gone")] == [1, 0]


def test_register_removes_a_user_with_the_guests(tmp_path: Path) -> None:
    """Those that have joined and those that have not, of this user only."""
    register = Register(tmp_path)
    for name, user in (("eval-00000000", "alice"), ("eval-00000001", "alice"), ("eval-00000002", "bob")):
        register.add_token(name, node_party(name), NOW_S + HOUR_S, invited_by=user)
    register.add_token("alice", ALICE, NOW_S + HOUR_S)
    mine, own = (facts_of(register.redeem(token, token, NOW_S, issue)) for token in ("eval-00000000", "alice"))
    assert register.remove(ALICE, "user alice was removed") == 1
    removed = register.removed(NOW_S)
    assert removed.refusal(own) == "user alice was removed"
    assert removed.refusal(mine) == "user alice was removed, who invited it"
    with pytest.raises(TokenError):
        register.redeem("eval-00000001", "key", NOW_S, never)
    assert not removed.refusal(facts_of(register.redeem("eval-00000002", "key", NOW_S, issue)))


def test_register_ends_older_certificates_of_a_name_that_joins_anew(register: Register) -> None:
    """A board that lost its disk joins with a new token, and what was on the disk is worth nothing."""
    old = facts_of(register.redeem("t", "key", NOW_S, issue))
    register.add_token("second", PI_NODE, NOW_S + HOUR_S)
    new = facts_of(register.redeem("second", "new key", NOW_S, issue))
    removed = register.removed(NOW_S)
    assert "later token" in removed.refusal(old) and not removed.refusal(new)


@pytest.mark.parametrize("generation", [0, 3])
def test_register_that_removes_during_a_renewal_refuses_what_it_gave(register: Register, generation: int) -> None:
    """In either order: what came before the removal is of its generation, what comes after it is given nothing."""
    for number in range(generation):
        register.add_token(f"t{number}", PI_NODE, NOW_S + HOUR_S)
        register.redeem(f"t{number}", "key", NOW_S, issue)
        register.remove(PI_NODE, "again")
    register.add_token("last", PI_NODE, NOW_S + HOUR_S)
    caller = facts_of(register.redeem("last", "key", NOW_S, issue))
    assert caller.generation == generation
    inside, removed = threading.Event(), threading.Event()

    def slow() -> bytes:
        inside.set()
        assert not removed.wait(0.05)  # the removal has begun and waits
        return issue(PI_NODE, caller.generation)

    with ThreadPoolExecutor(1) as pool:
        renewed = pool.submit(register.renew, caller, NOW_S, slow)
        assert inside.wait(30)
        register.remove(PI_NODE, "stolen")
        removed.set()
        given = facts_of(renewed.result(30))
    assert [register.removed(NOW_S).refusal(each) for each in (caller, given)] == ["stolen", "stolen"]
    for each in (caller, given):
        with pytest.raises(TrustError, match="node pi is refused: stolen; join with a new token"):
            register.renew(each, NOW_S, lambda: never(PI_NODE, 0))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"not a database" * 99),
        lambda path: _execute(path, "PRAGMA user_version = 99"),
        lambda path: _execute(path, "DELETE FROM generations"),
        lambda path: _execute(path, "DROP TABLE generations"),
        lambda path: _execute(path, "ALTER TABLE certificates DROP COLUMN sha256"),
        lambda path: _execute(path, "UPDATE tokens SET name = x'00ff'"),
        lambda path: _execute(path, "UPDATE generations SET generation = 'x'"),
    ],
)
def test_register_that_is_damaged_or_of_another_build_is_refused(
    register: Register, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    """It names the file; nothing is made anew over it. Without generations what was removed would be accepted again."""
    register.redeem("t", "key", NOW_S, issue)
    register.remove(PI_NODE, "stolen")
    Register(tmp_path)
    damage(tmp_path / FILE)
    content = (tmp_path / FILE).read_bytes()
    with pytest.raises(StorageError, match=r"register\.sqlite"):
        Register(tmp_path)
    assert (tmp_path / FILE).read_bytes() == content


@cases("content", [None, b"", b"S"])
def test_register_that_is_lost_is_not_made_anew(tmp_path: Path, content: bytes | None) -> None:
    """Beside an authority an empty one would accept again what was removed, such as a stolen certificate."""
    init_trust(tmp_path, time.time())
    TrustKeeper(tmp_path)
    (tmp_path / FILE).unlink()
    if content is not None:
        (tmp_path / FILE).write_bytes(content)
    for use in (TrustKeeper, lambda folder: make_token(folder, PI_NODE, time.time() + HOUR_S)):
        with pytest.raises(StorageError, match=r"register\.sqlite is missing or empty.*restore a copy"):
            use(tmp_path)


def test_register_of_another_authority_is_told(tmp_path: Path) -> None:
    """As the folder begins to be used: what was removed there is not known here."""
    for name in ("here", "other"):
        init_trust(tmp_path / name, time.time())
    assert TrustKeeper(tmp_path / "here").begin_to_act() == ""
    shutil.copy(tmp_path / "other" / FILE, tmp_path / "here" / FILE)
    assert "is not that of the coordinator that acted before" in TrustKeeper(tmp_path / "here").begin_to_act()


def _execute(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as database:
        database.execute(statement)
    database.close()


# ---- the folder ------------------------------------------------------------------------------------


def test_trust_folder_has_coordinator_and_admin_and_is_private(tmp_path: Path) -> None:
    """Everything in it is for this user only; a token from it carries the hash of its authority."""
    folder = tmp_path / "trust"
    authority = init_trust(folder, NOW_S)
    assert read_identity(folder, NOW_S).party == COORDINATOR
    assert read_identity(folder / "admin", NOW_S).party == Party("submitter", "admin")
    token = make_token(folder, PI_NODE, NOW_S + HOUR_S)
    assert token.authority_sha256 == fingerprint(authority.certificate_pem)
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
        assert path.is_dir() or token.secret.encode() not in path.read_bytes()
    Register(folder).redeem(secret_hash(parse_token(str(token)).secret), "key", NOW_S, issue)


def test_trust_folder_is_made_once(tmp_path: Path) -> None:
    """A second authority would lock out who has joined; one that was made by half is made anew."""
    init_trust(tmp_path, NOW_S)
    with pytest.raises(UsageError, match="has an authority already"):
        init_trust(tmp_path, NOW_S)
    (tmp_path / "authority.pem").unlink()
    with pytest.raises(TrustError, match="has no authority"):
        make_token(tmp_path, PI_NODE, NOW_S)
    init_trust(tmp_path, NOW_S)
    assert read_identity(tmp_path, NOW_S).party == COORDINATOR


ALICE = Party("submitter", "alice")


@contextlib.contextmanager
def running(folder: Path, clock: Callable[[], float] = time.time) -> Iterator[tuple[TrustKeeper, str]]:
    """A coordinator with a trust folder, which is made unless it exists, and its address."""
    if not folder.exists():
        init_trust(folder, time.time())
    keeper = TrustKeeper(folder, clock=clock)
    with using_credentials(keeper.credentials):
        server = CoordinatorServer("127.0.0.1:0", lease_s=10.0, keeper=keeper)
    with server:
        yield keeper, server.address


def invited(folder: Path, party: Party = PI_NODE, ttl_s: float = HOUR_S, *, is_administrator: bool = False) -> Token:
    """A token of a running coordinator."""
    return make_token(folder, party, time.time() + ttl_s, is_administrator=is_administrator)


def joined(address: str, trust: Path, party: Party = PI_NODE, *, is_administrator: bool = False) -> Credentials:
    """Who has joined with a token, in the folder of the own name beside that of the trust."""
    token = invited(trust, party, is_administrator=is_administrator)
    return Credentials(join(address, token, trust.parent / party.name))


@contextlib.contextmanager
def calls(address: str, credentials: Credentials | None, stub: Callable[[Any], Any]) -> Iterator[Any]:
    """The calls of somebody who has joined, or of anybody in plain text."""
    with using_credentials(credentials), open_channel(address, peer=COORDINATOR) as channel:
        yield stub(channel)


membership = functools.partial(calls, stub=trust_pb2_grpc.MembershipStub)
coordinator_calls = functools.partial(calls, stub=control_pb2_grpc.CoordinatorStub)


def test_joining_gives_an_identity_of_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on the disk, is the token's party, and holds; a proxy of this machine has no say in it."""
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    with running(tmp_path / "trust") as (_, address):
        identity = join(address, invited(tmp_path / "trust"), tmp_path / "node")
    assert read_identity(tmp_path / "node", time.time()) == identity
    assert identity.party == PI_NODE


@pytest.mark.parametrize(("kind", "reason"), [("wrong", "no known token"), ("used", "used"), ("expired", "expired")])
def test_joining_with_a_bad_token_has_one_answer(
    tmp_path: Path, kind: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong, used and expired read alike; nothing is written. The log says which it is, and shows no token."""
    trust = tmp_path / "trust"
    with running(trust) as (_, address):
        token = invited(trust, ttl_s=-1.0 if kind == "expired" else HOUR_S)
        if kind == "wrong":
            token = Token(token.party, token.port, token.authority_sha256, "x" * 43)
        if kind == "used":
            join(address, token, tmp_path / "first")
        with caplog.at_level(logging.DEBUG), pytest.raises(TokenError) as refused:
            join(address, token, tmp_path / "node")
    assert str(refused.value) == INVALID
    assert reason in caplog.text and token.secret not in caplog.text
    assert not (tmp_path / "node").exists()


def test_joining_shows_its_token_to_nobody_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another authority answers in the coordinator's name: it hears of no secret."""
    shown: list[str] = []
    claimed: list[bytes] = []

    class Imposter(trust_pb2_grpc.JoiningServicer):
        def Authority(
            self, request: trust_pb2.AuthorityRequest, context: grpc.ServicerContext
        ) -> trust_pb2.AuthorityReply:
            return trust_pb2.AuthorityReply(authority_pem=claimed[-1])

        def Certify(self, request: trust_pb2.CertifyRequest, context: grpc.ServicerContext) -> trust_pb2.CertifyReply:
            shown.append(request.secret)
            return trust_pb2.CertifyReply()

    mine = Authority.make(time.time())
    init_trust(tmp_path / "trust", time.time())
    token = invited(tmp_path / "trust")
    with using_credentials(Credentials(mine.identity(COORDINATOR, time.time()))):
        server = Server(
            "127.0.0.1:0", lambda made: trust_pb2_grpc.add_JoiningServicer_to_server(Imposter(), made), is_public=True
        )
    real = Authority.read(tmp_path / "trust").certificate_pem
    try:
        for claim in (mine.certificate_pem, real, b"", b"not a certificate"):
            claimed.append(claim)
            there = dataclasses.replace(token, port=server.port)
            with caplog.at_level(logging.DEBUG), pytest.raises(TrustError, match="is not the coordinator that made"):
                join(server.address, there, tmp_path / "node")
    finally:
        server.stop(0.0)
    assert shown == []
    assert token.secret not in caplog.text


def test_joining_where_nobody_gives_certificates(tmp_path: Path) -> None:
    """Nobody, plain text, or a port that wants certificates: each in a line that says what to look at."""
    trust = tmp_path / "trust"
    with running(trust) as (_, address):
        token = invited(trust)
        main_port = int(address.rpartition(":")[2])
        with pytest.raises(ConnectionFailedError, match="no coordinator gives certificates"):
            join(address, dataclasses.replace(token, port=main_port), tmp_path / "node")
    with pytest.raises(ConnectionFailedError, match="nobody answers at"):
        join(address, token, tmp_path / "node")
    plain = Server("127.0.0.1:0", lambda server: None)
    try:
        with pytest.raises(ConnectionFailedError, match="shows no certificate"):
            join(plain.address, dataclasses.replace(token, port=plain.port), tmp_path / "node")
    finally:
        plain.stop(0.0)


def test_joining_again_after_a_lost_answer_gives_the_same_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer gets lost on its way once: the second try with the same key does not need a second token."""
    trust = tmp_path / "trust"
    with running(trust) as (keeper, address):
        token, real, issued = invited(trust), keeper.certify, []

        def certify(secret: str, request_pem: bytes, **named: bool) -> bytes:
            issued.append(real(secret, request_pem))
            if len(issued) == 1:
                raise ConnectionFailedError("the answer is lost")
            return issued[-1]

        monkeypatch.setattr(keeper, "certify", certify)
        identity = join(address, token, tmp_path / "node")
    assert issued == [identity.certificate_pem] * 2


def test_joining_of_boards_behind_one_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight that start at the same time are all asked for their tokens before the first one has its certificate."""
    trust, together = tmp_path / "trust", threading.Barrier(8)
    with running(trust) as (keeper, address), ThreadPoolExecutor(8) as boards:
        parties, real = [node_party(f"pi-{number}") for number in range(8)], keeper.certify

        def certify(secret: str, request_pem: bytes, **named: bool) -> bytes:
            together.wait(30)
            return real(secret, request_pem)

        monkeypatch.setattr(keeper, "certify", certify)
        joined = [boards.submit(join, address, invited(trust, each), tmp_path / each.name) for each in parties]
        assert [each.result(60).party for each in joined] == parties


def test_joining_past_silent_strangers_and_wrong_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers hold 60 calls that say nothing: a token is taken at once. After 20 wrong tokens their address waits."""
    trust = tmp_path / "trust"
    monkeypatch.setattr(enrollment, "_BUSY_S", 0.0)
    monkeypatch.setattr(servicer, "TokenBucket", functools.partial(TokenBucket, now_s=lambda: 0.0))  # no minute passes
    with running(trust) as (_, address), contextlib.ExitStack() as stack:
        token = invited(trust)
        there = f"127.0.0.1:{token.port}"
        credentials = grpc.ssl_channel_credentials(certificate_at(there))
        channel = stack.enter_context(pinned_channel(there, credentials, COORDINATOR.server_name, CLIENT_OPTIONS))
        certify: Any = channel.stream_unary("/ringtune.v1.Joining/Certify")
        over = queue.SimpleQueue[bytes]()
        for _ in range(60):
            certify.future(iter(over.get, b""), timeout=30)
            stack.callback(over.put, b"")  # else a thread would stay
        assert join(address, token, tmp_path / "node").party == PI_NODE
        options = (*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1))  # that of the silent ones is closed
        other = stack.enter_context(pinned_channel(there, credentials, COORDINATOR.server_name, options))
        stub = trust_pb2_grpc.JoiningStub(other)
        wrong = trust_pb2.CertifyRequest(secret="x" * 43, request_pem=make_request(make_key()))
        answers = set[str]()
        for _ in range(22):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Certify(wrong, timeout=30)
            answers.add(str(error_of_call(caught.value, peer="it")))
        assert answers == {INVALID, "20 wrong tokens came from 127.0.0.1 within a minute; try in a minute"}
        with pytest.raises(BusyError):
            join(address, invited(trust), tmp_path / "node")


def test_joining_with_a_clock_of_another_year_names_the_clock(tmp_path: Path) -> None:
    """Two hours do not matter; a year does, and it is said before anything else fails."""
    trust = tmp_path / "trust"
    with running(trust) as (_, address):
        now = time.time()
        with pytest.raises(TrustError, match=r"is not valid before .* clock says"):
            join(address, invited(trust), tmp_path / "node", clock=lambda: now - 400 * DAY_S)
        join(address, invited(trust), tmp_path / "node", clock=lambda: now - 2 * HOUR_S)


# ---- later -----------------------------------------------------------------------------------------


def test_joining_renews_what_ends_within_90_days(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not before; then with a new key, in the folder and in the process. A coordinator that is away ends nothing."""
    trust, folder = tmp_path / "trust", tmp_path / "node"
    with running(trust) as (_, address):
        first = join(address, invited(trust), folder)
        credentials, due_unix_s = Credentials(first), first.facts.ends_unix_s - 90 * DAY_S
        with membership(address, credentials) as stub:
            assert not renew_if_due(stub, credentials, folder, due_unix_s - 1)
            assert read_identity(folder, time.time()) == credentials.identity == first
            assert renew_if_due(stub, credentials, folder, due_unix_s + 1)
    second = read_identity(folder, time.time())
    assert second == credentials.identity
    assert (second.party, second.key_pem != first.key_pem) == (PI_NODE, True)
    credentials = Credentials(first)
    with membership(address, credentials) as stub:
        for at_unix_s in (due_unix_s + 1, due_unix_s + 2):  # the second one asks nobody: it would not be answered soon
            assert not renew_if_due(stub, credentials, folder, at_unix_s)
    assert caplog.text.count("can't be renewed yet") == 1
    assert (read_identity(folder, time.time()), credentials.identity) == (second, first)


def test_joining_holds_for_a_run_of_years(tmp_path: Path) -> None:
    """On a made-up clock, a node that is never restarted, and does not reach its coordinator for two months a year.

    No certificate of either ends: connections are opened and answered with 30 days left at least.
    """
    now_unix_s = time.time()
    init_trust(tmp_path, now_unix_s)
    keeper = TrustKeeper(tmp_path, clock=lambda: now_unix_s)
    credentials = Credentials(Authority.read(tmp_path).identity(PI_NODE, now_unix_s))
    serials, least_s, is_away = set[str](), math.inf, False

    def renew(request: trust_pb2.RenewRequest, *, timeout: float) -> trust_pb2.CertifyReply:
        if is_away:
            raise DroppedCallError("Socket closed")
        pem = keeper.renew(credentials.identity.facts, request.request_pem)
        return trust_pb2.CertifyReply(certificate_pem=pem, authorities_pem=keeper.authorities)

    stub: Any = SimpleNamespace(Renew=renew)
    for day in range(3 * 365):
        is_away = 270 <= day % 365 < 331
        renew_if_due(stub, credentials, tmp_path / "node", now_unix_s)
        for identity in (credentials.identity, keeper.credentials.identity):
            assert not identity.facts.problem_at(now_unix_s)
            least_s = min(least_s, identity.facts.ends_unix_s - now_unix_s)
        serials.add(credentials.identity.facts.serial)
        now_unix_s += DAY_S
    assert least_s > 30 * DAY_S
    assert len(serials) == 4
    assert TrustKeeper(tmp_path, clock=lambda: now_unix_s).credentials.identity == keeper.credentials.identity


def test_joining_holds_at_a_coordinator_that_is_restored_from_a_backup(tmp_path: Path) -> None:
    """Authority and register are enough: nodes, tokens and removals go on, in another folder."""
    trust, restored = tmp_path / "trust", tmp_path / "restored"
    with running(trust) as (keeper, address):
        pi, thief = joined(address, trust), joined(address, trust, node_party("thief"))
        keeper.remove(thief.identity.party, "stolen")
        token = invited(trust, ALICE)
    restored.mkdir(mode=0o700)
    for name in ("authority.pem", FILE):
        shutil.copy2(trust / name, restored)
    shutil.rmtree(trust)
    with running(restored) as (_, address):
        with membership(address, pi) as stub:
            renew(stub, pi, tmp_path / "pi")
        with membership(address, thief) as stub, pytest.raises(TrustError, match="stolen"):
            renew(stub, thief, tmp_path / "thief")
        token = dataclasses.replace(token, port=invited(restored).port)  # the test's ports are any free ones
        assert join(address, token, tmp_path / "alice").party == ALICE


def test_users_have_the_own_runs_or_all_and_the_membership(tmp_path: Path) -> None:
    """By their token; also after a renewal. A user of an earlier version, whose certificate says nothing, has all."""
    trust = tmp_path / "trust"
    bob, carol = (Party("submitter", name) for name in ("bob", "carol"))
    with running(trust) as (keeper, address):
        users = {
            "alice": joined(address, trust, ALICE),
            "bob": joined(address, trust, bob, is_administrator=True),
            "carol": Credentials(Authority.read(trust).identity(carol, time.time())),
        }
        invited(trust)
        for name, user in users.items():
            with membership(address, user) as stub:
                renew(stub, user, tmp_path / name)
                assert user.identity.facts.has_own_runs_only is (name == "alice")
                with pytest.raises(grpc.RpcError) as caught:
                    stub.Remove(trust_pb2.RemoveRequest(node="nobody"), timeout=30)
                refused = "submitter alice is no administrator" in str(error_of_call(caught.value, peer="it"))
                assert refused is (name == "alice")
                guest = f"eval-{name.encode().hex()[:6]:>08}"
                parse_token(stub.Invite(trust_pb2.InviteRequest(node=guest), timeout=30).token)
        keeper.remove(bob, "left")
        open_token = invited(trust, bob, is_administrator=True)
        keeper.remove(bob, "left")
        with pytest.raises(TokenError):
            join(address, open_token, tmp_path / "bob")


def test_joining_node_that_is_removed_meanwhile_is_no_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call was let in before the removal, and makes it a member after it: it is refused and out again."""
    with running(tmp_path / "trust") as (keeper, address):
        pi, real = joined(address, tmp_path / "trust"), Coordinator.join

        def late(coordinator: Coordinator, member: Member) -> None:
            keeper.remove(PI_NODE, "node pi was removed")
            coordinator.remove("pi", "node pi was removed", forever=False)
            real(coordinator, member)

        monkeypatch.setattr(Coordinator, "join", late)
        asked = control_pb2.JoinRequest(
            node="pi", address="127.0.0.1:5", version=__version__, instance="one", wire=WIRE
        )
        why = "pi is refused: node pi was removed; join with a new token"
        with coordinator_calls(address, pi) as stub, pytest.raises(grpc.RpcError, match=why):
            stub.Join(asked, timeout=30)
        with coordinator_calls(address, joined(address, tmp_path / "trust", ALICE)) as stub:
            assert not stub.Nodes(control_pb2.Empty(), timeout=30).nodes


def test_joining_renews_few_times_an_hour(tmp_path: Path) -> None:
    """So that no certificate fills the register; another party renews meanwhile."""
    now_unix_s = time.time()
    init_trust(tmp_path, now_unix_s)
    keeper = TrustKeeper(tmp_path, clock=lambda: now_unix_s)
    pi, board = (Authority.read(tmp_path).identity(node_party(name), now_unix_s).facts for name in ("pi", "board"))
    request = make_request(make_key())
    for _ in range(6):
        keeper.renew(pi, request)
    with pytest.raises(BusyError, match="node pi has renewed its certificate 6 times within an hour"):
        keeper.renew(pi, request)
    keeper.renew(board, request)
    now_unix_s += HOUR_S
    keeper.renew(pi, request)


def test_joining_of_guests_is_by_invitation_of_a_user(tmp_path: Path) -> None:
    """Their names are of one form, their certificates end after a day, renewed ones too, and they are no hosts."""
    trust, now_unix_s = tmp_path / "trust", time.time()
    with running(trust, lambda: now_unix_s) as (keeper, address):
        guest = node_party("eval-0123abcd")
        with pytest.raises(TrustError, match="node pi is no guest"):
            keeper.invite("pi", user="alice")
        identity = join(address, parse_token(keeper.invite(guest.name, user="alice")), tmp_path / "guest")
        assert identity.party == guest
        with pytest.raises(BusyError, match="take another name"):  # its certificate would end with the next one's
            keeper.invite(guest.name, user="alice")
        while keeper._invitations.take("alice"):
            pass
        with pytest.raises(BusyError, match="alice has invited 60 nodes within a minute"):
            keeper.invite("eval-00000000", user="alice")
        keeper.invite("eval-00000000", user="bob")
        with pytest.raises(BusyError, match="take another name"):  # who joins later would be the guest of this user
            keeper.invite("eval-00000000", user="carol")
        assert identity.facts.ends_unix_s - now_unix_s == pytest.approx(DAY_S, abs=1.5)
        credentials = Credentials(identity)
        assert identity.facts.renew_at_unix_s == identity.facts.ends_unix_s
        with membership(address, credentials) as stub:
            renew(stub, credentials, tmp_path / "guest")
        assert credentials.identity.facts.ends_unix_s == pytest.approx(identity.facts.ends_unix_s, abs=1.5)
        asked = control_pb2.JoinRequest(
            node=guest.name, address="127.0.0.1:5", version=__version__, instance="one", wire=WIRE
        )
        with coordinator_calls(address, credentials) as coordinator:
            with pytest.raises(grpc.RpcError, match="is a guest of one evaluation, no host"):
                coordinator.Join(asked, timeout=30)
            asked.is_guest = True
            coordinator.Join(asked, timeout=30)
        asked_for = control_pb2.EvaluateRequest(job_toml='[model]\npath = "m"\n', owner=guest.name)
        for name, told in (("bob", "is a guest of another user"), ("alice", "the submitter did not send adapter")):
            party = Party("submitter", name)
            user = Credentials(Authority.read(trust).identity(party, time.time(), has_own_runs_only=True))
            with coordinator_calls(address, user) as stub, pytest.raises(grpc.RpcError, match=told):
                next(stub.Evaluate(iter([control_pb2.EvaluateInput(request=asked_for)]), timeout=30))


def test_heartbeat_answers_have_the_removed_when_they_have_changed(tmp_path: Path) -> None:
    """A node that has the list gets no second one."""
    jetson = node_party("jetson")
    with running(tmp_path / "trust") as (keeper, address):
        pi, _ = joined(address, tmp_path / "trust"), joined(address, tmp_path / "trust", jetson)
        keeper.remove(jetson, "sold")
        with coordinator_calls(address, pi) as stub:

            def beat(version: str) -> Any:
                request = control_pb2.HeartbeatRequest(node="pi", instance="one", removals_version=version)
                return stub.Heartbeat(request, timeout=30)

            first = beat("")
            assert removals_from_proto(first.removed).entries == (Removal("sold", jetson, 1),)
            assert first.removals_version == keeper.credentials.removed.version
            same = beat(first.removals_version)
            assert not same.removed and same.removals_version == first.removals_version


@pytest.mark.parametrize("days", [20.0, -400.0])
def test_keeper_makes_itself_a_new_certificate_where_its_own_ends_soon(tmp_path: Path, days: float) -> None:
    """One that has expired, or ends within 90 days: the new one lasts as long as the authority, and is kept."""
    init_trust(tmp_path, time.time())
    authority = Authority.read(tmp_path)
    write_identity(tmp_path, authority.identity(COORDINATOR, time.time() - 600 * DAY_S, days=600 + days))
    found = TrustKeeper(tmp_path).credentials.identity
    last = read_certificate(authority.certificate_pem).not_valid_after_utc.timestamp()
    assert found.facts.ends_unix_s == pytest.approx(last, abs=2)
    assert read_identity(tmp_path, time.time()) == TrustKeeper(tmp_path).credentials.identity == found


def test_joining_port_that_is_taken_names_its_option(tmp_path: Path) -> None:
    """The port of the coordinator itself is free: it is not --bind that has to change, and nothing stays behind."""
    init_trust(tmp_path, time.time())
    keeper = TrustKeeper(tmp_path)
    taken = Server("127.0.0.1:0", lambda server: None)
    try:
        with (
            using_credentials(keeper.credentials),
            pytest.raises(ConnectionFailedError, match="take another --join-port"),
        ):
            CoordinatorServer("127.0.0.1:0", lease_s=10.0, keeper=keeper, join_port=taken.port)
    finally:
        taken.stop(0.0)


def test_joining_with_a_token_from_before_the_first_start(tmp_path: Path) -> None:
    """The coordinator's port is not known yet when it is made: those who join look at the one after it."""
    init_trust(tmp_path / "trust", time.time())
    token = invited(tmp_path / "trust")
    assert token.port == 0
    keeper = TrustKeeper(tmp_path / "trust")
    with using_credentials(keeper.credentials):
        server = CoordinatorServer("127.0.0.1:0", lease_s=10.0, keeper=keeper)
    with server:
        joins_at = invited(tmp_path / "trust").port
        assert joins_at > 0
        assert join(f"127.0.0.1:{joins_at - 1}", token, tmp_path / "node").party == PI_NODE
