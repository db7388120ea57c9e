"""Certificates and their register: what they say, how long they hold, and what is refused."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from coordinator.server.certificate_authority import DAYS, FILE, Authority, Register, init_trust, make_token
from ringtune.errors import StorageError, TokenError, TrustError, UsageError
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
from ringtune.transport.parties import (
    ANY_MEMBER,
    COORDINATOR,
    IDENTITY,
    INVALID,
    Party,
    node_party,
    parse_token,
    secret_hash,
)

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


@pytest.mark.parametrize(
    ("days_later", "problem"),
    [
        (-3.0, "not valid before"),
        (-2.0, ""),
        (-2 / 24, ""),
        (0.0, ""),
        (DAYS, ""),
        (DAYS + 0.1, "has expired"),
        (800.0, "has expired"),
    ],
)
def test_certificates_hold_with_a_clock_that_is_two_hours_off(days_later: float, problem: str) -> None:
    """Backdating covers boards without a battery; what goes beyond names the clock."""
    found = AUTHORITY.identity(PI, NOW_S).facts.problem_at(NOW_S + days_later * DAY_S)
    assert problem in found
    assert bool(found) == bool(problem)
    assert "clock" in found or not found


def test_certificates_of_users_serve_nobody() -> None:
    """Nodes and coordinator may be connected to by the name of any member, a user's certificate is a client's only."""
    user = AUTHORITY.identity(Party("submitter", "alice"), NOW_S).certificate_pem
    assert server_names(user) == ["alice.submitter.ringtune"]
    assert uses(user) == {ExtendedKeyUsageOID.CLIENT_AUTH}
    for party in (COORDINATOR, PI):
        pem = AUTHORITY.identity(party, NOW_S).certificate_pem
        assert server_names(pem) == [party.server_name, ANY_MEMBER]
        assert uses(pem) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}


def test_certificates_end_with_their_authority() -> None:
    """Whatever is asked for; then nothing is issued any more, and the clock and the remedy are named."""
    last = read_certificate(AUTHORITY.certificate_pem).not_valid_after_utc.timestamp()
    assert AUTHORITY.identity(PI, last - DAY_S).facts.ends_unix_s == last
    with pytest.raises(TrustError, match=r"authority has expired on .* clock says .* 'ringtune coordinator init"):
        AUTHORITY.identity(PI, last + 1)


def test_certificates_of_another_authority_are_told_apart() -> None:
    """The name of an authority proves nothing, its signature does."""
    other = Authority.make(NOW_S)
    pem = other.identity(PI, NOW_S).certificate_pem
    assert is_issued_by(pem, other.certificate_pem)
    assert not is_issued_by(pem, AUTHORITY.certificate_pem)
    mine = AUTHORITY.identity(PI, NOW_S)
    with pytest.raises(TrustError, match="another authority"):
        Identity.of(mine.key_pem, mine.certificate_pem, other.certificate_pem)


def test_certificates_are_for_who_has_the_key() -> None:
    """A request is signed with the key that it is for; one that was changed on its way is refused."""
    key = make_key()
    request = make_request(key)
    assert requested_key(request) == key.public_key()
    for damaged in (b"", b"hello", request[:80], request.replace(request[100:104], b"AAAA")):
        with pytest.raises(TrustError):
            requested_key(damaged)


def test_certificates_issued_twice_differ_in_serial() -> None:
    """One of them can be removed without the other."""
    first, second = (facts_of(AUTHORITY.identity(PI, NOW_S).certificate_pem) for _ in range(2))
    assert first.serial != second.serial


# ---- on a disk -------------------------------------------------------------------------------------


def test_identity_comes_back_from_its_folder(tmp_path: Path) -> None:
    """One file, for this user only, in a folder that nobody else can enter."""
    folder = tmp_path / "trust"
    identity = AUTHORITY.identity(PI, NOW_S)
    write_identity(folder, identity)
    assert read_identity(folder, NOW_S) == identity
    assert (folder.stat().st_mode & 0o777, (folder / IDENTITY).stat().st_mode & 0o777) == (0o700, 0o600)


def test_identity_hides_its_key_in_logs() -> None:
    """What a log or a traceback shows of an identity has no key in it."""
    identity = AUTHORITY.identity(PI, NOW_S)
    assert "PRIVATE" not in f"{identity!r}"
    assert "key" not in repr(AUTHORITY)


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


def test_identity_that_has_expired_names_the_clock(tmp_path: Path) -> None:
    """Either the clock is wrong or the certificate is old: the message has both dates."""
    write_identity(tmp_path, AUTHORITY.identity(PI, NOW_S))
    with pytest.raises(TrustError, match=r"of node pi-4 has expired on 2028-01-15 08:00 UTC, and .*clock says 2028"):
        read_identity(tmp_path, NOW_S + 400 * DAY_S)


def test_authority_comes_back_from_its_folder(tmp_path: Path) -> None:
    """What it issues afterwards is of the same authority; a key that others can read is refused."""
    AUTHORITY.write(tmp_path)
    again = Authority.read(tmp_path)
    assert is_issued_by(again.identity(PI, NOW_S).certificate_pem, AUTHORITY.certificate_pem)
    (tmp_path / "authority.pem").chmod(0o644)
    with pytest.raises(TrustError, match="can be read by other users"):
        Authority.read(tmp_path)


HOUR_S = 3600.0
PI_NODE = node_party("pi")


def issue(party: Party) -> bytes:
    """A certificate for somebody."""
    return AUTHORITY.issue(party, make_key().public_key(), NOW_S)


def never(party: Party) -> bytes:
    """Nobody may get a certificate here."""
    raise AssertionError(f"a certificate for {party}")


@pytest.fixture
def register(tmp_path: Path) -> Register:
    """A register with a token ``t`` for the node ``pi``, which ends in an hour."""
    made = Register(tmp_path)
    made.add_token("t", PI_NODE, NOW_S + HOUR_S)
    return made


def test_register_gives_one_certificate_for_a_token(register: Register) -> None:
    """The same key gets the same certificate again, because its answer may have got lost; no other key gets one."""
    pem = register.redeem("t", "key", NOW_S, issue)
    assert facts_of(pem).party == PI_NODE
    assert register.redeem("t", "key", NOW_S + 1, never) == pem
    with pytest.raises(TokenError):
        register.redeem("t", "other key", NOW_S + 1, never)


@pytest.mark.parametrize(
    ("token", "later_s", "used", "reason"),
    [("wrong", 0, False, "no token"), ("t", HOUR_S + 1, False, "expired"), ("t", 1, True, "used")],
)
def test_register_refuses_tokens_with_one_text(
    register: Register, token: str, later_s: float, used: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger learns nothing of the difference between wrong, used and expired; the log tells the user."""
    if used:
        register.redeem("t", "key", NOW_S, issue)
    with caplog.at_level(logging.WARNING), pytest.raises(TokenError) as refused:
        register.redeem(token, "other", NOW_S + later_s, never)
    assert str(refused.value) == INVALID
    assert reason in caplog.text


def test_register_that_can_not_issue_keeps_the_token(register: Register) -> None:
    """A token is consumed with its certificate or not at all."""

    def fail(party: Party) -> bytes:
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
    serial = facts_of(register.redeem("t", "key", NOW_S, issue)).serial
    register.add_token("open", PI_NODE, NOW_S + HOUR_S)
    register.add_token("of another", node_party("jetson"), NOW_S + HOUR_S)
    assert register.remove(PI_NODE, "it was stolen") == 1
    found = Register(tmp_path).removed(NOW_S)
    assert [(each.serial, each.reason) for each in found] == [(serial, "it was stolen")]
    assert register.removed(NOW_S + (DAYS + 1) * DAY_S) == ()
    with pytest.raises(TokenError):
        register.redeem("open", "key", NOW_S, never)
    assert register.redeem("of another", "key", NOW_S, issue)


def test_register_removes_nobody_whom_it_does_not_know(register: Register) -> None:
    """A misspelt name is told; a second removal is none."""
    with pytest.raises(TrustError, match="node p1 has no certificate"):
        register.remove(node_party("p1"), "gone")
    register.redeem("t", "key", NOW_S, issue)
    assert [register.remove(PI_NODE, "gone"), register.remove(PI_NODE, "gone")] == [1, 0]


def test_register_ends_older_certificates_of_a_name_that_joins_anew(register: Register) -> None:
    """A board that lost its disk joins with a new token, and what was on the disk is worth nothing."""
    old = facts_of(register.redeem("t", "key", NOW_S, issue)).serial
    register.add_token("second", PI_NODE, NOW_S + HOUR_S)
    new = facts_of(register.redeem("second", "new key", NOW_S, issue)).serial
    assert [each.serial for each in register.removed(NOW_S)] == [old]
    assert new != old


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"not a database" * 99), lambda path: _newer(path)])
def test_register_that_is_damaged_or_newer_is_refused(
    register: Register, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    """It names the file; nothing is made anew over it."""
    damage(tmp_path / FILE)
    content = (tmp_path / FILE).read_bytes()
    with pytest.raises(StorageError, match=r"register\.sqlite"):
        Register(tmp_path)
    assert (tmp_path / FILE).read_bytes() == content


def _newer(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
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
