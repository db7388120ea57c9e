"""``ringtune coordinator``, its ``init`` and its ``token``, as they are typed."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from coordinator.screen.progress import join_lines
from coordinator.server import run_store
from coordinator.server.certificate_authority import TrustKeeper
from coordinator.server.coordinator import ShutdownSignals
from coordinator.server.server import CoordinatorServer
from edge.options import AgentOptions
from ringtune import cli
from ringtune.quantities import parse_seconds
from ringtune.transport.channels import open_channel
from ringtune.transport.identity import read_identity
from ringtune.transport.parties import Party, node_party, parse_token
from ringtune.transport.speaker import speaking_as
from ringtune.v1 import control_pb2, control_pb2_grpc
from tests.support.fake_agents import CALL_S

SOON_S = 0.2


def test_coordinator_answers_nobody_before_it_has_found_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks meanwhile waits: 'keeps no runs' would be taken for nothing to fetch."""
    addresses: list[str] = []
    channels: list[grpc.Channel] = []
    calls: list[Any] = []

    def folder(address: str) -> Path:
        addresses.append(address)
        return tmp_path

    class AskedWhileItReads(run_store.RunStore):
        def __init__(self, folder: Path, **options: Any) -> None:
            channel = open_channel(addresses[0])
            channels.append(channel)
            calls.append(control_pb2_grpc.CoordinatorStub(channel).Runs.future(control_pb2.Empty(), timeout=CALL_S))
            with pytest.raises(grpc.FutureTimeoutError):
                calls[0].exception(SOON_S)
            super().__init__(folder, **options)

    monkeypatch.setattr(run_store, "default_folder", folder)
    monkeypatch.setattr(run_store, "RunStore", AskedWhileItReads)
    monkeypatch.setattr(ShutdownSignals, "wait", lambda _: calls[0].result(CALL_S) is not None)
    result = CliRunner().invoke(cli.app, ["coordinator", "--bind", "127.0.0.1:0"])
    channels[0].close()
    assert result.exit_code == 0, result.output
    assert list(calls[0].result().runs) == []


def ask(*words: str, code: int = 0) -> str:
    """What a command prints."""
    result = CliRunner().invoke(cli.app, ["coordinator", *words])
    assert result.exit_code == code, result.output
    return result.output


def as_json(*words: str) -> dict[str, Any]:
    """What a command prints with ``--json``."""
    found: dict[str, Any] = json.loads(ask(*words, "--json"))
    return found


def test_trusting_prints_a_token_once(tmp_path: Path) -> None:
    """The plain output of ``token`` is the token alone, so that it can be piped; two are never equal."""
    trust = ["--trust", str(tmp_path / "trust")]
    made = as_json("init", *trust)
    first, second = (parse_token(ask("token", "pi", *trust)) for _ in range(2))
    assert first.party == second.party == node_party("pi")
    assert first.authority_sha256 == made["authority_sha256"]
    assert first.secret != second.secret


def test_trusting_writes_a_token_for_its_user_only(tmp_path: Path) -> None:
    """With ``--save`` the secret is in the file and nowhere else; the time to live is as asked."""
    trust, file = ["--trust", str(tmp_path / "trust")], tmp_path / "token"
    ask("init", *trust)
    told = as_json("token", "alice", "--role", "submitter", "--ttl", "30m", "--save", str(file), *trust)
    token = parse_token(file.read_text())
    assert token.party == Party("submitter", "alice")
    assert token.secret not in json.dumps(told)
    assert file.stat().st_mode & 0o777 == 0o600
    assert told["ends_unix_s"] == pytest.approx(time.time() + 1800, abs=60)


def test_trusting_writes_no_token_over_a_file(tmp_path: Path) -> None:
    """Whatever it is stays as it is, and no token is made that nobody has; the remedy is told."""
    trust, file = ["--trust", str(tmp_path / "trust")], tmp_path / "thesis.tex"
    ask("init", *trust)
    before = (tmp_path / "trust" / "register.sqlite").read_bytes()
    file.write_text("mine", encoding="utf-8")
    shown = ask("token", "pi", "--save", str(file), *trust, code=2)
    assert "thesis.tex is there already; give another name, or remove it" in shown
    assert file.read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "trust" / "register.sqlite").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["Pi"], 2, "node name 'Pi' is not allowed"),
        (["pi", "--role", "root"], 2, "--role 'root' is not one of"),
        (["pi", "--ttl", "soon"], 2, "'soon' is not a duration"),
        (["pi", "--ttl", "0h"], 2, "'0h' is not a duration"),
        (["pi"], 3, "has no authority; make one with 'ringtune coordinator init'"),
    ],
)
def test_trusting_refuses_in_a_line(tmp_path: Path, words: list[str], code: int, text: str) -> None:
    """Each with its exit code and a remedy."""
    shown = ask("token", *words, "--trust", str(tmp_path / "none"), code=code)
    assert text in shown
    assert len(shown.strip().splitlines()) == 1


def test_trusting_durations() -> None:
    """Seconds, minutes, hours and days."""
    assert [parse_seconds(text) for text in ("90s", "30m", "5min", "1.5h", "7d")] == [90, 1800, 300, 5400, 604800]


def test_trusting_printed_lines_lead_a_node_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of a coordinator, typed as they stand: a token is made, and the node joins under the token's name."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    started: list[AgentOptions] = []
    monkeypatch.setattr("edge.agent.process.run_agent", lambda given, **_: started.append(given))
    trust, file = tmp_path / "trust", tmp_path / "b1.token"
    ask("init", "--trust", str(trust))
    keeper = TrustKeeper(trust)
    with speaking_as(keeper.speaker), CoordinatorServer("127.0.0.1:0", lease_s=10.0, keeper=keeper) as server:
        made, joined = (
            shlex.split(line.partition(":   " if "NAME" in line else ":  ")[2])[1:]
            for line in join_lines(server.address, trust=trust)[:2]
        )
        for words in (made, joined):
            typed = [{"NAME": "b1", "FILE": str(file)}.get(word, word) for word in words]
            result = CliRunner().invoke(cli.app, typed)
            assert result.exit_code == 0, result.output
    (given,) = started
    assert (given.name, given.trust) == ("b1", tmp_path / "states" / "ringtune" / "b1" / "trust")
    assert given.trust is not None and read_identity(given.trust, time.time()).party == node_party("b1")
