"""The register: a token is used once, by one key, in time; what was removed stays removed."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.trust.authority import Authority
from coordinator.trust.folder import init_trust, make_token
from coordinator.trust.register import FILE, Register
from ringtune.errors import StorageError, TokenError, TrustError, UsageError
from ringtune.trust.certificates import facts_of, fingerprint, make_key
from ringtune.trust.identity import read_identity
from ringtune.trust.parties import COORDINATOR, Party, node_party
from ringtune.trust.tokens import INVALID, parse_token, secret_hash

NOW_S = 1_800_000_000.0
HOUR_S = 3600.0
PI = node_party("pi")
AUTHORITY = Authority.make(NOW_S)


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
    made.add_token("t", PI, NOW_S + HOUR_S)
    return made


def test_register_gives_one_certificate_for_a_token(register: Register) -> None:
    """The same key gets the same certificate again, because its answer may have got lost; no other key gets one."""
    pem = register.redeem("t", "key", NOW_S, issue)
    assert facts_of(pem).party == PI
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
    assert facts_of(register.redeem("t", "other", NOW_S, issue)).party == PI


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
    register.add_token("open", PI, NOW_S + HOUR_S)
    register.add_token("of another", node_party("jetson"), NOW_S + HOUR_S)
    assert register.remove(PI, "it was stolen") == 1
    found = Register(tmp_path).removed(NOW_S)
    assert [(each.serial, each.reason) for each in found] == [(serial, "it was stolen")]
    assert register.removed(NOW_S + 31 * 24 * HOUR_S) == ()
    with pytest.raises(TokenError):
        register.redeem("open", "key", NOW_S, never)
    assert register.redeem("of another", "key", NOW_S, issue)


def test_register_removes_nobody_whom_it_does_not_know(register: Register) -> None:
    """A misspelt name is told; a second removal is none."""
    with pytest.raises(TrustError, match="node p1 has no certificate"):
        register.remove(node_party("p1"), "gone")
    register.redeem("t", "key", NOW_S, issue)
    assert [register.remove(PI, "gone"), register.remove(PI, "gone")] == [1, 0]


def test_register_ends_older_certificates_of_a_name_that_joins_anew(register: Register) -> None:
    """A board that lost its disk joins with a new token, and what was on the disk is worth nothing."""
    old = facts_of(register.redeem("t", "key", NOW_S, issue)).serial
    register.add_token("second", PI, NOW_S + HOUR_S)
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
    token = make_token(folder, PI, NOW_S + HOUR_S)
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
        make_token(tmp_path, PI, NOW_S)
    init_trust(tmp_path, NOW_S)
    assert read_identity(tmp_path, NOW_S).party == COORDINATOR
