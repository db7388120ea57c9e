"""A node looks for its coordinator: what it knows, and one real announcement on the loopback interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.server.announcing import announcing
from edge.joining import looking
from edge.joining.looking import find_coordinator
from ringtune import __version__
from ringtune.errors import TrustError, UsageError
from ringtune.trust.announcing import Announcement
from ringtune.trust.parties import node_party
from ringtune.trust.places import node_trust
from ringtune.trust.tokens import Token, make_secret
from tests.support.trust_parts import keep, speaker_of

HASH = "0123456789abcdef" * 4
FOUND = Announcement(name="desk", address="192.168.1.10:7070", version="0.2.0", authority=HASH[:16])


@pytest.fixture(autouse=True)
def _nobody_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "_listens", lambda address: False)


def token_in(folder: Path, authority_sha256: str = HASH) -> Path:
    """A file with a token of node ``pi``."""
    token = Token(node_party("pi"), 0, authority_sha256, make_secret())
    (folder / "token").write_text(str(token))
    return folder / "token"


def find(tmp_path: Path, *, token: Path | None = None, insecure: bool = False) -> str:
    """The address that node ``pi`` finds."""
    return find_coordinator("pi", None, token, state=tmp_path, insecure=insecure)[0]


def test_node_takes_the_coordinator_of_this_machine_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without looking further."""
    monkeypatch.setattr(looking, "_listens", lambda address: True)
    monkeypatch.setattr(looking, "announced", lambda look_s: pytest.fail("looked"))
    assert find(tmp_path) == "127.0.0.1:7070"


def test_node_trusts_its_token_and_later_its_certificate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With neither, or with ``--insecure``, it joins none by itself."""
    monkeypatch.setattr(looking, "announced", lambda look_s: [FOUND])
    address, token = find_coordinator("pi", None, token_in(tmp_path), state=tmp_path, insecure=False)
    assert address == FOUND.address and token is not None and token.authority_sha256 == HASH
    for insecure in (False, True):
        with pytest.raises(UsageError, match="joins none by itself"):
            find(tmp_path, insecure=insecure)
    keep(node_trust(tmp_path), speaker_of("pi"))
    with pytest.raises(TrustError, match="of the certificate in"):
        find(tmp_path, token=token_in(tmp_path))


def test_node_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Looking is an extra; an address needs none."""
    import sys

    monkeypatch.setitem(sys.modules, "zeroconf", None)
    with pytest.raises(UsageError, match=r"give --coordinator HOST:PORT, or install .*\[discovery\]"):
        find(tmp_path, token=token_in(tmp_path))


def test_announced_coordinator_is_found_on_the_loopback_interface(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Announced and found by the real library; with the token of another authority it is refused."""
    said: list[str] = []
    with announcing("127.0.0.1:7171", asked=True, authority_sha256=HASH, say=said.append) as is_announced:
        assert is_announced and not said
        found = looking.announced(60.0, interfaces=["127.0.0.1"], enough=lambda one: one.authority == HASH[:16])
    assert [(one.address, one.version) for one in found] == [("127.0.0.1:7171", __version__)]
    monkeypatch.setattr(looking, "announced", lambda look_s: found)
    assert find(tmp_path, token=token_in(tmp_path)) == "127.0.0.1:7171"
    with pytest.raises(TrustError, match=r"127\.0\.0\.1:7171 .*none has the authority"):
        find(tmp_path, token=token_in(tmp_path, "f" * 64))


@pytest.mark.parametrize(("address", "asked"), [("127.0.0.1:7070", None), ("192.0.2.1:7070", False)])
def test_coordinator_keeps_quiet(address: str, asked: bool | None) -> None:
    """On this machine only, or because it was told so."""
    with announcing(address, asked=asked, authority_sha256=HASH, say=pytest.fail) as is_announced:
        assert not is_announced
