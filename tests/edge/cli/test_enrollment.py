"""Enrollment of a node: as whom it speaks, and how it finds its coordinator."""

from __future__ import annotations

import io
import queue
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.server.certificate_authority import Authority
from coordinator.server.server import announcing
from edge.cli import enrollment
from edge.cli.enrollment import choose_trust, find_coordinator, read_token, resolve_node_name
from edge.options import default_name, default_state
from ringtune import __version__, cli
from ringtune.errors import ConnectionFailedError, TokenError, TrustError, UsageError
from ringtune.transport.credentials import Credentials, process_credentials, use_credentials
from ringtune.transport.discovery import SERVICE, Announcement, words_of
from ringtune.transport.identity import Identity, read_identity
from ringtune.transport.parties import IDENTITY, Party, Token, make_secret, node_party, node_trust
from tests.coordinator.server.test_certificate_authority import invited, running
from tests.support.trust_parts import DAY_S, credentials_of, keep

HASH = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    yield
    use_credentials(None)


def choose(tmp_path: Path, **changes: Any) -> Path | None:
    """What node ``pi`` chooses with its state folder in ``tmp_path``."""
    usual: dict[str, Any] = {"trust": None, "token_file": None, "insecure": False, "coordinator": "127.0.0.1:1"}
    asked = usual | changes
    trust, token_file = asked.pop("trust"), asked.pop("token_file")
    return choose_trust("pi", trust, token_file, state=tmp_path, **asked)


def spoken() -> str:
    """As whom this process speaks."""
    who = process_credentials()
    return str(who.identity.party) if who else ""


def test_choosing_takes_the_identity_that_is_there(tmp_path: Path) -> None:
    """In the state folder, or where the user says; not in a local run, and not with ``--insecure``."""
    keep(node_trust(tmp_path), credentials_of("pi"))
    assert (choose(tmp_path), spoken()) == (node_trust(tmp_path), "node pi")
    assert (choose(tmp_path, insecure=True), spoken()) == (None, "")
    assert (choose(tmp_path, is_local=True), spoken()) == (None, "")
    keep(tmp_path / "elsewhere", credentials_of("pi"))
    assert choose(tmp_path, trust=tmp_path / "elsewhere", is_local=True) == tmp_path / "elsewhere"
    assert spoken() == "node pi"


def test_choosing_joins_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that joined may stay as it is: a token counts where there is no identity yet."""
    asked: list[Path] = []

    def join_as(
        party: Party, token_file: Path, folder: Path, coordinator: str, join_s: float, *, token: Token | None
    ) -> None:
        asked.append(token_file)
        keep(folder, credentials_of(party.name))

    monkeypatch.setattr(enrollment, "join_as", join_as)
    for _ in range(2):
        assert choose(tmp_path, token_file=Path("t")) == node_trust(tmp_path)
        assert spoken() == "node pi"
    assert asked == [Path("t")]


def test_choosing_joins_anew_where_the_authority_was_replaced(tmp_path: Path) -> None:
    """With a token of the new one; that in the command line of a service, used, gone or of the old one, is left."""
    file, folder = tmp_path / "t", node_trust(tmp_path / "state")
    with running(tmp_path / "trust") as (keeper, address):
        kept = keep(folder, credentials_of("pi"))
        for text in ("", str(Token(node_party("pi"), 7071, HASH, make_secret()))):
            file.write_text(text)
            assert choose(tmp_path / "state", token_file=file, coordinator=address) == folder
            assert read_identity(folder, time.time()) == kept
        file.write_text(str(invited(tmp_path / "trust", node_party("pi"))))
        for _ in range(2):
            choose(tmp_path / "state", token_file=file, coordinator=address)
            assert read_identity(folder, time.time()).authorities == keeper.authorities
            file.write_text(str(invited(tmp_path / "trust", node_party("b"))))
        later = keep(folder, Credentials(Authority.make(time.time() + 60).identity(node_party("pi"), time.time())))
        file.write_text(str(invited(tmp_path / "trust", node_party("pi"))))
        choose(tmp_path / "state", token_file=file, coordinator=address)
        assert read_identity(folder, time.time()) == later


def test_choosing_joins_anew_where_the_certificate_is_of_no_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was removed, or has expired; one that holds is kept, whatever token there is, and a used token is left."""
    file, folder, pi = tmp_path / "t", node_trust(tmp_path / "state"), node_party("pi")
    with running(tmp_path / "trust") as (keeper, address):

        def chosen() -> Identity:
            choose(tmp_path / "state", token_file=file, coordinator=address)
            return read_identity(folder, time.time())

        file.write_text(str(invited(tmp_path / "trust", pi)))
        first = chosen()
        file.write_text(str(invited(tmp_path / "trust", pi)))
        assert chosen() == first
        keeper.remove(pi, "it was stolen")
        assert chosen() == first, "the removal took back the token too"
        file.write_text(str(invited(tmp_path / "trust", pi)))
        second = chosen()
        assert second == chosen() != first
        assert caplog.messages[-1].endswith(
            "the certificate of node pi is refused: it was stolen; join with a new token"
        )
        keep(folder, Credentials(keeper._authority.identity(pi, time.time() - 400 * DAY_S)))
        file.write_text(str(invited(tmp_path / "trust", pi)))
        assert chosen() not in (first, second)
        assert "has expired" in caplog.messages[-1]


def test_choosing_refuses_what_does_not_belong_together(tmp_path: Path) -> None:
    """Another node's identity or token, a folder without one, certificates with plain text."""
    keep(tmp_path / "b", credentials_of("b"))
    with pytest.raises(TrustError, match="is of node b, not of node pi"):
        choose(tmp_path, trust=tmp_path / "b")
    assert spoken() == ""
    with pytest.raises(TrustError, match="No such file"):
        choose(tmp_path, trust=tmp_path / "none")
    for changes in ({"trust": tmp_path / "b"}, {"token_file": tmp_path / "t"}):
        with pytest.raises(UsageError, match="--insecure does not"):
            choose(tmp_path, insecure=True, **changes)
    (tmp_path / "t").write_text(str(Token(node_party("b"), 7071, HASH, make_secret())))
    with pytest.raises(TokenError, match="is for node b, not for node pi; leave --name out, or give --name b"):
        choose(tmp_path, token_file=tmp_path / "t")


def test_choosing_a_name_of_the_user_the_token_the_certificate_or_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order; two certificates name nobody, and a token that is gone leaves the name to the certificate."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    host, file = default_name(), tmp_path / "t"

    def named(name: str = "", trust: Path | None = None, token_file: Path | None = file, **more: Any) -> str:
        asked: dict[str, Any] = {"state": None, "insecure": False} | more
        return resolve_node_name(name, trust, token_file, **asked)[0]

    assert named(token_file=None) == named() == host
    keep(node_trust(default_state("pi")), credentials_of("pi"))
    assert (named(), named(token_file=None), named("b"), named(insecure=True)) == ("pi", "pi", "b", host)
    token = Token(node_party("c"), 7071, HASH, make_secret())
    file.write_text(str(token))
    assert resolve_node_name("", None, file, state=None, insecure=False) == ("c", token)
    assert named("b") == "b"
    keep(node_trust(tmp_path / "own"), credentials_of("d"))
    assert named(token_file=None, state=tmp_path / "own") == "d"
    assert named(token_file=None, trust=node_trust(tmp_path / "own")) == "d"
    keep(node_trust(default_state("e")), credentials_of("e"))
    assert named(token_file=None) == host
    file.write_text(str(Token(Party("submitter", "alice"), 7071, HASH, make_secret())))
    with pytest.raises(TokenError, match="is for submitter alice, not for a node; make one for the node with"):
        named()


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


def test_choosing_a_bad_identity_ends_the_command_in_a_line(tmp_path: Path) -> None:
    """Exit code 3 before anything is started, and the file or the clock is named."""
    cases: dict[str, tuple[Credentials, str]] = {
        "missing": (credentials_of("pi"), "can't read the certificate"),
        "readable": (credentials_of("pi"), "can be read by other users"),
        "expired": (credentials_of("pi", later_s=-366 * DAY_S), "has expired"),
        "early": (credentials_of("pi", later_s=3 * DAY_S), "is not valid before"),
        "foreign": (credentials_of("pi"), "is of another authority"),
        "damaged": (credentials_of("pi"), "is damaged"),
        "other name": (credentials_of("b"), "is of node b, not of node pi"),
    }
    for case, (who, text) in cases.items():
        identity, file = keep(tmp_path / case, who), tmp_path / case / IDENTITY
        if case == "missing":
            file.unlink()
        if case == "readable":
            file.chmod(0o644)
        if case == "damaged":
            file.write_bytes(file.read_bytes()[:400])
        if case == "foreign":
            other = Authority.make(time.time()).certificate_pem
            file.write_bytes(file.read_bytes().replace(identity.authorities_pem, other))
        asked = CliRunner().invoke(cli.app, ["node", "--name", "pi", "--trust", str(tmp_path / case)])
        assert asked.exit_code == 3, asked.output
        assert text in asked.stderr, case
        assert len(asked.stderr.strip().splitlines()) == 1


def test_choosing_to_join_waits_for_a_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A board may be up before the coordinator is; whatever else fails is said at once."""
    tries: list[str] = []

    def join(coordinator: str, token: Token, folder: Path) -> None:
        tries.append(coordinator)
        if len(tries) < 3:
            raise ConnectionFailedError("nobody answers")
        keep(folder, credentials_of("pi"))

    monkeypatch.setattr("ringtune.transport.enrollment.join", join)
    monkeypatch.setattr(enrollment, "_RETRY_S", 0.0)
    (tmp_path / "t").write_text(str(Token(node_party("pi"), 0, HASH, make_secret())))
    assert choose(tmp_path, token_file=tmp_path / "t", join_s=60.0) == node_trust(tmp_path)
    assert tries == ["127.0.0.1:1"] * 3
    monkeypatch.setattr(enrollment, "_RETRY_S", 1.0)
    tries.clear()
    with pytest.raises(ConnectionFailedError):
        choose(tmp_path / "other", token_file=tmp_path / "t")
    assert len(tries) == 1


FOUND = Announcement(name="desk", address="192.168.1.10:7070", version="0.2.0", authority=HASH[:16])


@pytest.fixture(autouse=True)
def _nobody_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrollment, "_listens", lambda address: False)


def token_in(folder: Path, authority_sha256: str = HASH) -> Path:
    """A file with a token of node ``pi``."""
    token = Token(node_party("pi"), 0, authority_sha256, make_secret())
    (folder / "token").write_text(str(token))
    return folder / "token"


def find(tmp_path: Path, *, token: Path | None = None, insecure: bool = False) -> str:
    """The address that node ``pi`` finds."""
    return find_coordinator("pi", None, token, state=tmp_path, insecure=insecure)[0]


def test_node_trusts_its_token_and_later_its_certificate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With neither, or with ``--insecure``, it joins none by itself."""
    monkeypatch.setattr(enrollment, "announced", lambda look_s: [FOUND])
    address, token = find_coordinator("pi", None, token_in(tmp_path), state=tmp_path, insecure=False)
    assert address == FOUND.address and token is not None and token.authority_sha256 == HASH
    for insecure in (False, True):
        with pytest.raises(UsageError, match="joins none by itself"):
            find(tmp_path, insecure=insecure)
    keep(node_trust(tmp_path), credentials_of("pi"))
    with pytest.raises(TrustError, match="of the certificate in"):
        find(tmp_path, token=token_in(tmp_path))


def test_announced_coordinator_is_found_on_the_loopback_interface(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Announced and found by the real library; with the token of another authority it is refused."""
    said: list[str] = []
    sha256 = secrets.token_hex(32)  # other tests of this machine may announce theirs
    with announcing("127.0.0.1:7171", asked=True, authority_sha256=sha256, say=said.append) as is_announced:
        assert is_announced and not said
        found = enrollment.announced(60.0, interfaces=["127.0.0.1"], enough=lambda one: one.authority == sha256[:16])
    assert (found[-1].address, found[-1].version) == ("127.0.0.1:7171", __version__)
    monkeypatch.setattr(enrollment, "announced", lambda look_s: found[-1:])
    assert find(tmp_path, token=token_in(tmp_path, sha256)) == "127.0.0.1:7171"
    with pytest.raises(TrustError, match=r"127\.0\.0\.1:7171 .*none has the authority"):
        find(tmp_path, token=token_in(tmp_path, "f" * 64))


def test_announcement_that_is_told_late_is_asked_for_again() -> None:
    """Its coordinator may be busy; meanwhile the others are read."""
    asked: list[str] = []

    def told(_: str, name: str, *, timeout: int) -> Any:
        asked.append(name.partition(".")[0])
        words = {name.encode(): word for name, word in words_of(__version__, HASH).items()}
        info = SimpleNamespace(parsed_addresses=lambda: ["127.0.0.1"], port=7171, properties=words)
        return None if asked == ["late"] else info

    names: queue.Queue[str] = queue.Queue()
    for name in ("late", "desk"):
        names.put(f"{name}.{SERVICE}")
    network, end_s = SimpleNamespace(get_service_info=told), time.monotonic() + 60.0
    found = enrollment._read(network, names, end_s, lambda one: one.name == "late")
    assert [one.name for one in found] == ["desk", "late"] and asked == ["late", "desk", "late"]


@pytest.mark.parametrize(("address", "asked"), [("127.0.0.1:7070", None), ("192.0.2.1:7070", False)])
def test_coordinator_keeps_quiet(address: str, asked: bool | None) -> None:
    """On this machine only, or because it was told so."""
    with announcing(address, asked=asked, authority_sha256=HASH, say=pytest.fail) as is_announced:
        assert not is_announced
