"""The doctor on certificates: this machine's, the coordinator's, and whether each takes the other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.server.certificate_authority import Authority
from edge.doctor import Check, Level, check_coordinator, check_other, check_own
from ringtune.transport.identity import write_identity
from ringtune.transport.parties import IDENTITY, node_party
from ringtune.transport.speaker import Speaker, is_encrypted, speak_as
from tests.contract.transport.test_tls import COORDINATOR_ITSELF, serving
from tests.support.trust_parts import AUTHORITY, DAY_S, keep, speaker_of


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    yield
    speak_as(None)


def own(folder: Path | None, *, insecure: bool = False) -> Check:
    """The check of an identity."""
    return check_own("node", folder, insecure=insecure)


def test_doctor_names_whose_certificate_it_is_and_until_when(tmp_path: Path) -> None:
    """From then on it speaks with it; with ``--insecure``, or without one, it is plain text."""
    assert (own(None).level, is_encrypted()) == (Level.PASS, False)
    keep(tmp_path, speaker_of("pi"))
    found = own(tmp_path)
    assert (found.level, is_encrypted()) == (Level.PASS, True)
    assert found.found.startswith("node pi, until 20")
    assert (own(None, insecure=True).level, is_encrypted()) == (Level.PASS, False)


@pytest.mark.parametrize(
    ("later_days", "level", "text"),
    [
        (0, Level.PASS, "until"),
        (-274, Level.PASS, "until"),
        (-276, Level.WARN, "should have been renewed"),
        (-366, Level.FAIL, "has expired"),
        (3, Level.FAIL, "not valid before"),
    ],
)
def test_doctor_judges_the_age_of_a_certificate(tmp_path: Path, later_days: int, level: Level, text: str) -> None:
    """Late is a warning, expired a failure; each says what to do."""
    keep(tmp_path, speaker_of("pi", later_s=later_days * DAY_S))
    found = own(tmp_path)
    assert found.level is level
    assert text in found.found
    assert bool(found.remedy) == (level is not Level.PASS)


def test_doctor_fails_where_an_identity_is_open_missing_or_foreign(tmp_path: Path) -> None:
    """One line each, with the file."""
    assert "No such file" in own(tmp_path / "none").found
    keep(tmp_path, speaker_of("pi"))
    (tmp_path / IDENTITY).chmod(0o644)
    found = own(tmp_path)
    assert (found.level, "can be read by other users" in found.found) == (Level.FAIL, True)
    assert not is_encrypted()


OTHERS = {
    "well": (lambda: COORDINATOR_ITSELF, Level.PASS, "of the same authority"),
    "expired": (lambda: speaker_of("coordinator", "coordinator", later_s=-366 * DAY_S), Level.FAIL, "has expired"),
    "a node": (lambda: speaker_of("b"), Level.FAIL, "is of node b, not of a coordinator"),
    "foreign": (
        lambda: speaker_of("coordinator", "coordinator", authority=Authority.make(time.time())),
        Level.FAIL,
        "another authority",
    ),
    "plain": (lambda: None, Level.FAIL, "speaks plain text"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_doctor_checks_the_certificate_of_a_coordinator(tmp_path: Path, case: str) -> None:
    """Chain, dates and name; in plain text there is nothing to check."""
    make, level, text = OTHERS[case]
    server: Speaker | None = make()  # type: ignore[no-untyped-call]
    with serving(server) as (address, _):
        assert check_other(address) == []
        write_identity(tmp_path, AUTHORITY.identity(node_party("pi"), time.time()))
        assert own(tmp_path).level is Level.PASS
        (found,) = check_other(address)
    assert found.level is level
    assert text in found.found


def test_doctor_says_why_a_coordinator_can_not_be_talked_to() -> None:
    """Without a certificate gRPC knows a closed socket only; the remedy is in the line."""
    with serving(COORDINATOR_ITSELF) as (address, _):
        (found,) = check_coordinator(address)
    assert found.level is Level.FAIL
    assert "takes certificates only, and this process has none; join with a token" in found.remedy
