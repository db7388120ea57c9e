"""``ringtune coordinator``, ``nodes`` and ``measure``, as they are typed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer
from typer.testing import CliRunner

from coordinator.cli.measure import measure as measure_command
from coordinator.planner.given_plan import read_profile
from coordinator.run.members import Member
from coordinator.run.requests import RunRequest
from coordinator.screen.progress import join_lines
from coordinator.server import run_store
from coordinator.server.certificate_authority import TrustKeeper, init_trust, make_token
from coordinator.server.coordinator import ShutdownSignals
from coordinator.server.server import CoordinatorServer
from edge.options import AgentOptions
from ringtune import __version__, cli
from ringtune.costs.profile import Profile
from ringtune.errors import PeerLostError, TrustError, UsageError
from ringtune.quantities import parse_seconds
from ringtune.transport.channels import open_channel
from ringtune.transport.credentials import using_credentials
from ringtune.transport.enrollment import join
from ringtune.transport.identity import read_identity
from ringtune.transport.parties import VARIABLE, Party, node_party, parse_token
from ringtune.v1 import control_pb2, control_pb2_grpc
from tests.support.fake_agents import CALL_S, JOB_TEXT, LEASE_S, FakeCluster, job

app = typer.Typer()
app.command()(measure_command)


def member(node: str) -> Member:
    """A member on this machine."""
    return Member(node=node, address="127.0.0.1:1", instance="i", version=__version__)


@contextlib.contextmanager
def plain(*names: str) -> Iterator[CoordinatorServer]:
    """A coordinator in plain text with members."""
    with CoordinatorServer("127.0.0.1:0", lease_s=LEASE_S) as server:
        for name in names:
            server.coordinator.join(member(name))
        yield server


def ask(server: CoordinatorServer, *words: str, code: int = 0, trust: Path | None = None) -> str:
    """What ``ringtune nodes`` with further words prints."""
    with using_credentials(None):
        asked = CliRunner().invoke(
            cli.app, ["nodes", *words, "--coordinator", server.address], env={VARIABLE: str(trust) if trust else ""}
        )
    assert asked.exit_code == code, asked.output
    return asked.output


def states(server: CoordinatorServer) -> dict[str, str]:
    """The state of each member."""
    lines = ask(server, "--json").splitlines()
    return {entry["node"]: entry["state"] for entry in map(json.loads, lines)}


def test_nodes_shows_one_by_name() -> None:
    """A line for each thing, or JSON as in the list; another name is an error."""
    with plain("a", "b") as server:
        shown = ask(server, "show", "b")
        assert ["node", "b"] in [line.split() for line in shown.splitlines()]
        assert "127.0.0.1:1" in shown
        assert json.loads(ask(server, "show", "b", "--json"))["node"] == "b"
        assert "node c is no member" in ask(server, "show", "c", code=2)


def test_nodes_drained_are_taken_into_no_new_run() -> None:
    """They stay members, and may be taken again."""
    with plain("a", "b") as server:
        told = json.loads(ask(server, "drain", "a", "--json"))
        assert told == {"event": "drained", "node": "a", "run_id": ""}
        assert states(server) == {"a": "drained", "b": "idle"}
        assert [each.node for each in server.coordinator.living()] == ["b"]
        ask(server, "drain", "a", "--undo")
        assert [each.node for each in server.coordinator.living()] == ["a", "b"]
        assert "node c is no member" in ask(server, "drain", "c", code=2)


def test_nodes_removed_in_plain_text_are_refused_while_the_coordinator_runs() -> None:
    """There is no certificate to refuse, so the name is."""
    with plain("a", "b") as server:
        ask(server, "remove", "a", "--reason", "it was sold")
        assert states(server) == {"b": "idle"}
        with pytest.raises(TrustError, match="node a was removed: it was sold"):
            server.coordinator.join(member("a"))
        assert server.coordinator.heartbeat("a", "i", 0)[0] is False
        assert "is not allowed" in ask(server, "remove", "../a", code=2)


def test_nodes_removed_are_refused_by_certificate(tmp_path: Path) -> None:
    """Who was removed joins again with a new token only; a name that never joined is an error."""
    trust = tmp_path / "trust"
    init_trust(trust, time.time())
    keeper = TrustKeeper(trust)
    with using_credentials(keeper.credentials):
        server = CoordinatorServer("127.0.0.1:0", lease_s=LEASE_S, keeper=keeper)
    with server:

        def identity() -> Any:
            return join(server.address, make_token(trust, node_party("pi"), time.time() + 3600), tmp_path / "pi")

        first = identity()
        server.coordinator.join(member("pi"))
        told = json.loads(ask(server, "remove", "pi", "--json", trust=trust / "admin"))
        assert (told["certificates"], told["was_member"]) == (1, True)
        assert "node pi was removed" in keeper.credentials.refusal(first.facts)
        assert keeper.credentials.refusal(identity().facts) == ""
        server.coordinator.join(member("pi"))
        assert "node p1 has no certificate" in ask(server, "remove", "p1", code=3, trust=trust / "admin")
        assert "takes certificates only" in ask(server, "remove", "pi", code=3)


def test_nodes_removed_or_drained_during_a_run() -> None:
    """A drained node works on to the run's end; for a removed one the run hears at once that it is gone."""
    hold: dict[str, Any] = {"on_grant": lambda agent, turns: None}
    with FakeCluster("a", agents={"a": hold}) as cluster:
        coordinator = cluster.server.coordinator
        driver = coordinator.run(RunRequest(job=job(), plan_only=False, num_nodes=1, join_s=CALL_S))
        assert cluster.agents["a"].granted.wait(CALL_S)
        assert coordinator.drain_node("a", undo=False) == driver.run_id
        assert [state for _, state, _ in coordinator.members()] == ["draining"]
        assert coordinator.remove("a", "node a was removed", forever=True)
        failure = [event.failure for event in driver.events() if event.WhichOneof("event") == "failure"][-1]
    assert failure.error == "PeerLostError"
    assert "node a was removed; the run can't use it any more" in failure.message


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


def ask_coordinator(*words: str, code: int = 0) -> str:
    """What a command prints."""
    result = CliRunner().invoke(cli.app, ["coordinator", *words])
    assert result.exit_code == code, result.output
    return result.output


def as_json(*words: str) -> dict[str, Any]:
    """What a command prints with ``--json``."""
    found: dict[str, Any] = json.loads(ask_coordinator(*words, "--json"))
    return found


def test_trusting_prints_a_token_once(tmp_path: Path) -> None:
    """The plain output of ``token`` is the token alone, so that it can be piped; two are never equal."""
    trust = ["--trust", str(tmp_path / "trust")]
    made = as_json("init", *trust)
    first, second = (parse_token(ask_coordinator("token", "pi", *trust)) for _ in range(2))
    assert first.party == second.party == node_party("pi")
    assert first.authority_sha256 == made["authority_sha256"]
    assert first.secret != second.secret
    # Seconds, minutes, hours and days
    assert [parse_seconds(text) for text in ("90s", "30m", "5min", "1.5h", "7d")] == [90, 1800, 300, 5400, 604800]


def test_trusting_writes_a_token_for_its_user_only(tmp_path: Path) -> None:
    """With ``--save`` the secret is in the file and nowhere else; the time to live is as asked."""
    trust, file = ["--trust", str(tmp_path / "trust")], tmp_path / "token"
    ask_coordinator("init", *trust)
    told = as_json("token", "alice", "--role", "submitter", "--ttl", "30m", "--save", str(file), *trust)
    token = parse_token(file.read_text())
    assert token.party == Party("submitter", "alice")
    assert token.secret not in json.dumps(told)
    assert file.stat().st_mode & 0o777 == 0o600
    assert told["ends_unix_s"] == pytest.approx(time.time() + 1800, abs=60)


def test_trusting_writes_no_token_over_a_file(tmp_path: Path) -> None:
    """Whatever it is stays as it is, and no token is made that nobody has; the remedy is told."""
    trust, file = ["--trust", str(tmp_path / "trust")], tmp_path / "thesis.tex"
    ask_coordinator("init", *trust)
    before = (tmp_path / "trust" / "register.sqlite").read_bytes()
    file.write_text("mine", encoding="utf-8")
    shown = ask_coordinator("token", "pi", "--save", str(file), *trust, code=2)
    assert "thesis.tex is there already; give another name, or remove it" in shown
    assert file.read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "trust" / "register.sqlite").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["Pi"], 2, "node name 'Pi' is not allowed"),
        (["pi", "--role", "root"], 2, "--role 'root' is not one of"),
        (["eval-0123abcd"], 2, "the name eval-0123abcd is that of a guest, whom only 'ringtune eval RUN"),
        (["pi", "--ttl", "soon"], 2, "'soon' is not a duration"),
        (["pi", "--ttl", "0h"], 2, "'0h' is not a duration"),
        (["pi"], 3, "has no authority; make one with 'ringtune coordinator init'"),
    ],
)
def test_trusting_refuses_in_a_line(tmp_path: Path, words: list[str], code: int, text: str) -> None:
    """Each with its exit code and a remedy."""
    shown = ask_coordinator("token", *words, "--trust", str(tmp_path / "none"), code=code)
    assert text in shown
    assert len(shown.strip().splitlines()) == 1


def test_trusting_printed_lines_lead_a_node_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of a coordinator, typed as they stand: a token is made, and the node joins under the token's name."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    started: list[AgentOptions] = []
    monkeypatch.setattr("edge.agent.process.run_agent", lambda given, **_: started.append(given))
    trust, file = tmp_path / "trust", tmp_path / "b1.token"
    ask_coordinator("init", "--trust", str(trust))
    keeper = TrustKeeper(trust)
    with using_credentials(keeper.credentials), CoordinatorServer("127.0.0.1:0", lease_s=10.0, keeper=keeper) as server:
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


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command listens to SIGTERM; here it must not go on to."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    """The small job as a file."""
    path = tmp_path / "job.toml"
    path.write_text(JOB_TEXT)
    return str(path)


def test_measure_command_prints_tables_and_writes_the_profile(job_file: str, tmp_path: Path) -> None:
    """As text by default, one JSON line with ``--json``; the file is the same."""
    out = tmp_path / "profiles" / "profile.json"
    with FakeCluster("a", "b") as cluster:
        typed = [job_file, "--coordinator", cluster.server.address, "--save", str(out), "--no-rehearsal"]
        shown = CliRunner().invoke(app, typed)
        lines = CliRunner().invoke(app, [job_file, "--coordinator", cluster.server.address, "--json", "--no-links"])
    assert shown.exit_code == 0, shown.output
    assert "a -> b" in shown.output and f"the profile is in {out}" in shown.output
    found = read_profile(out)
    assert [node.node for node in found.nodes] == ["a", "b"] and len(found.links) == 2
    (event,) = [json.loads(line) for line in lines.stdout.splitlines()]
    assert event["event"] == "profile"
    assert Profile.from_json(event["profile"]) == dataclasses.replace(found, links=())


def test_measure_command_saves_over_a_profile_only(job_file: str, tmp_path: Path) -> None:
    """Measured again it replaces the earlier one; anything else stays as it is, and nothing is measured."""
    out, job = tmp_path / "profile.json", Path(job_file).read_text()
    with FakeCluster("a") as cluster:
        typed = [job_file, "--coordinator", cluster.server.address, "--no-rehearsal", "--save"]
        for _ in range(2):
            assert CliRunner().invoke(app, [*typed, str(out)]).exit_code == 0
        asked = cluster.agents["a"].inspected
        refused = CliRunner().invoke(app, [*typed, job_file])
        assert cluster.agents["a"].inspected is asked
    assert isinstance(refused.exception, UsageError)
    assert str(refused.exception) == (
        f"{job_file} is there already and is no profile that 'ringtune measure' saved; give another name, or remove it"
    )
    assert Path(job_file).read_text() == job


def test_measure_command_passes_its_options_on(job_file: str) -> None:
    """One by one, anew, with a changed job."""
    options = ["--one-by-one", "--fresh", "--set", "train.max_length=4", "--nodes", "2", "--no-rehearsal"]
    with FakeCluster("a", "b") as cluster:
        done = CliRunner().invoke(app, [job_file, "--coordinator", cluster.server.address, *options])
        asked = [agent.inspected for agent in cluster.agents.values()]
    assert done.exit_code == 0, done.output
    assert [(one.neighbours, one.fresh) for one in asked] == [(0, True)] * 2
    assert all("max_length = 4" in one.job_toml for one in asked)


def test_measure_command_saves_what_it_measured_if_the_rehearsal_fails(job_file: str, tmp_path: Path) -> None:
    """Also with --json somebody is told: on the standard error, beside the profile."""
    out = tmp_path / "profile.json"
    with FakeCluster("a", "b", agents={"b": {"fails_at": {"prepare": PeerLostError("gone")}}}) as cluster:
        done = CliRunner().invoke(
            app, [job_file, "--coordinator", cluster.server.address, "--save", str(out), "--json"]
        )
    assert done.exit_code == 0, done.output
    assert Profile.from_json(json.loads(done.stdout)["profile"]) == read_profile(out)
    (line,) = [line for line in done.stderr.splitlines() if "rehearsal failed" in line]
    assert "gone" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --local N and --coordinator"),
        (["--local", "2", "--coordinator", "127.0.0.1:1"], "give one of"),
        (["--local", "2", "--nodes", "2"], "--nodes is for --coordinator"),
    ],
)
def test_measure_command_refuses_what_makes_no_sense(job_file: str, arguments: list[str], message: str) -> None:
    """Before anything is started."""
    done = CliRunner().invoke(app, [job_file, *arguments])
    assert isinstance(done.exception, UsageError) and message in str(done.exception)
