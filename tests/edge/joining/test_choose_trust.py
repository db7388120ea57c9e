"""As whom a node speaks: what is asked for, what is there, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.agent_options import AgentOptions
from edge.joining import choose_trust as chosen
from edge.joining.choose_trust import choose_trust, read_token
from ringtune.errors import TokenError, TrustError, UsageError
from ringtune.trust.parties import Party, node_party
from ringtune.trust.places import node_trust
from ringtune.trust.speaking import speak_as, speaker
from ringtune.trust.tokens import Token, make_secret
from tests.support.trust_parts import keep, speaker_of

HASH = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    yield
    speak_as(None)


def choose(tmp_path: Path, **changes: Any) -> Path | None:
    """What node ``pi`` chooses with its state folder in ``tmp_path``."""
    asked: dict[str, Any] = {"trust": None, "token_file": None, "insecure": False} | changes
    trust, token_file = asked.pop("trust"), asked.pop("token_file")
    return choose_trust("pi", trust, token_file, state=tmp_path, coordinator="127.0.0.1:1", **asked)


def spoken() -> str:
    """As whom this process speaks."""
    who = speaker()
    return str(who.identity.party) if who else ""


def test_choosing_is_plain_without_an_identity(tmp_path: Path) -> None:
    """As it was before there were certificates."""
    assert (choose(tmp_path), spoken()) == (None, "")


def test_choosing_takes_the_identity_that_is_there(tmp_path: Path) -> None:
    """In the state folder, or where the user says; not in a local run, and not with ``--insecure``."""
    keep(node_trust(tmp_path), speaker_of("pi"))
    assert (choose(tmp_path), spoken()) == (node_trust(tmp_path), "node pi")
    assert (choose(tmp_path, insecure=True), spoken()) == (None, "")
    assert (choose(tmp_path, is_local=True), spoken()) == (None, "")
    keep(tmp_path / "elsewhere", speaker_of("pi"))
    assert choose(tmp_path, trust=tmp_path / "elsewhere", is_local=True) == tmp_path / "elsewhere"
    assert spoken() == "node pi"


def test_choosing_joins_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that joined may stay as it is: a token counts where there is no identity yet."""
    asked: list[Path] = []

    def join_as(party: Party, token_file: Path, folder: Path, coordinator: str) -> None:
        asked.append(token_file)
        keep(folder, speaker_of(party.name))

    monkeypatch.setattr(chosen, "join_as", join_as)
    for _ in range(2):
        assert choose(tmp_path, token_file=Path("t")) == node_trust(tmp_path)
        assert spoken() == "node pi"
    assert asked == [Path("t")]


def test_choosing_refuses_what_does_not_belong_together(tmp_path: Path) -> None:
    """Another node's identity or token, a folder without one, certificates with plain text."""
    keep(tmp_path / "b", speaker_of("b"))
    with pytest.raises(TrustError, match="is of node b, not of node pi"):
        choose(tmp_path, trust=tmp_path / "b")
    assert spoken() == ""
    with pytest.raises(TrustError, match="No such file"):
        choose(tmp_path, trust=tmp_path / "none")
    for changes in ({"trust": tmp_path / "b"}, {"token_file": tmp_path / "t"}):
        with pytest.raises(UsageError, match="--insecure does not"):
            choose(tmp_path, insecure=True, **changes)
    (tmp_path / "t").write_text(str(Token(node_party("b"), 7071, HASH, make_secret())))
    with pytest.raises(TokenError, match="is for node b, not for node pi"):
        choose(tmp_path, token_file=tmp_path / "t")


def test_choosing_reads_a_token_from_a_file_or_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no token is not repeated, however long it is."""
    token = Token(node_party("pi"), 7071, HASH, make_secret())
    (tmp_path / "t").write_text(f"{token}\n")
    assert read_token(tmp_path / "t") == token
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{token}\n"))
    assert read_token(Path("-")) == token
    for content in (b"", b"secret" * 1000, b"\xff\x00"):
        (tmp_path / "t").write_bytes(content)
        with pytest.raises(TokenError) as refused:
            read_token(tmp_path / "t")
        assert "secret" not in str(refused.value)
    with pytest.raises(UsageError, match="can't read --token-file"):
        read_token(tmp_path / "none")


def test_choosing_an_identity_opens_the_way_to_other_machines(tmp_path: Path) -> None:
    """Without ``--insecure`` an address beyond this machine needs a certificate, and with one it is allowed."""
    with pytest.raises(UsageError, match="no certificate to encrypt with"):
        AgentOptions(coordinator="10.0.0.1:7070", name="pi")
    keep(node_trust(tmp_path), speaker_of("pi"))
    choose(tmp_path)
    AgentOptions(coordinator="10.0.0.1:7070", name="pi")
