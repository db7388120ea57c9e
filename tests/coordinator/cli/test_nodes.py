"""``ringtune nodes`` and what stands below it: show, drain and remove, over a real connection."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.run.members import Member
from coordinator.run.requests import RunRequest
from coordinator.server.certificate_authority import TrustKeeper, init_trust, make_token
from coordinator.server.server import CoordinatorServer
from ringtune import __version__, cli
from ringtune.errors import TrustError
from ringtune.transport.enrollment import join
from ringtune.transport.parties import VARIABLE, node_party
from ringtune.transport.speaker import speaking_as
from tests.support.fake_agents import CALL_S, FakeCluster, job


def member(node: str) -> Member:
    """A member on this machine."""
    return Member(node=node, address="127.0.0.1:1", instance="i", version=__version__)


@contextlib.contextmanager
def plain(*names: str) -> Iterator[CoordinatorServer]:
    """A coordinator in plain text with members."""
    with CoordinatorServer("127.0.0.1:0", lease_s=60.0) as server:
        for name in names:
            server.coordinator.join(member(name))
        yield server


def ask(server: CoordinatorServer, *words: str, code: int = 0, trust: Path | None = None) -> str:
    """What ``ringtune nodes`` with further words prints."""
    with speaking_as(None):
        asked = CliRunner().invoke(
            cli.app,
            ["nodes", *words, "--coordinator", server.address],
            env={VARIABLE: str(trust) if trust else ""},
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
    with speaking_as(keeper.speaker):
        server = CoordinatorServer("127.0.0.1:0", lease_s=60.0, keeper=keeper)
    with server:

        def identity() -> Any:
            return join(server.address, make_token(trust, node_party("pi"), time.time() + 60), tmp_path / "pi")

        first = identity()
        server.coordinator.join(member("pi"))
        told = json.loads(ask(server, "remove", "pi", "--json", trust=trust / "admin"))
        assert (told["certificates"], told["was_member"]) == (1, True)
        assert "node pi was removed" in keeper.speaker.refusal(first.facts)
        assert keeper.speaker.refusal(identity().facts) == ""
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
