"""Certificates: what they say, how long they hold, and what is refused of an identity on a disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from coordinator.trust.authority import DAYS, Authority
from ringtune.errors import TrustError
from ringtune.trust.certificates import (
    BACKDATED_S,
    facts_of,
    is_issued_by,
    make_key,
    make_request,
    read_certificate,
    requested_key,
)
from ringtune.trust.identity import Identity, read_identity, write_identity
from ringtune.trust.parties import ANY_MEMBER, COORDINATOR, Party, node_party
from ringtune.trust.places import IDENTITY

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


def test_certificates_name_their_bearer_and_hold_for_a_month() -> None:
    """The certificate of a node says who it is, from two days before it was issued."""
    facts = AUTHORITY.identity(PI, NOW_S).facts
    assert facts.party == PI
    assert facts.begins_unix_s == NOW_S - BACKDATED_S
    assert facts.ends_unix_s == NOW_S + DAYS * DAY_S
    assert facts.renew_at_unix_s == pytest.approx(NOW_S + 20 * DAY_S)


@pytest.mark.parametrize(
    ("days_later", "problem"),
    [
        (-3.0, "not valid before"),
        (-2.0, ""),
        (-2 / 24, ""),
        (0.0, ""),
        (30.0, ""),
        (30.1, "has expired"),
        (400.0, "has expired"),
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
    with pytest.raises(TrustError, match=r"of node pi-4 has expired on 2027-02-14 08:00 UTC, and .*clock says 2028"):
        read_identity(tmp_path, NOW_S + 400 * DAY_S)


def test_authority_comes_back_from_its_folder(tmp_path: Path) -> None:
    """What it issues afterwards is of the same authority; a key that others can read is refused."""
    AUTHORITY.write(tmp_path)
    again = Authority.read(tmp_path)
    assert is_issued_by(again.identity(PI, NOW_S).certificate_pem, AUTHORITY.certificate_pem)
    (tmp_path / "authority.pem").chmod(0o644)
    with pytest.raises(TrustError, match="can be read by other users"):
        Authority.read(tmp_path)
