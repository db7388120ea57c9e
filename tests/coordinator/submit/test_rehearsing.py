"""The rehearsal of a measurement: the sink that ends it, and what comes of a profile if it fails."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.screen.progress import PlainProgress
from coordinator.submit.client import Client
from coordinator.submit.rehearsing import Rehearsing
from ringtune.costs.measured.rehearsal import REHEARSAL_S
from ringtune.costs.profile import Profile
from ringtune.errors import CapacityError, InterruptedRunError, PeerLostError, RingTuneError
from ringtune.v1 import control_pb2
from tests.support.fake_agents import CALL_S, FakeAgent, FakeCluster, facts, job

PROFILE = Profile(nodes=(facts("a"), facts("b")))


def step(kind: str = "train") -> control_pb2.RunEvent:
    """An item that is through."""
    return control_pb2.RunEvent(step_json=json.dumps({"kind": kind, "step": 1}))


def test_rehearsal_ends_once_after_its_steps() -> None:
    """Training steps count, other items do not; the end is asked for once, by the run's id."""
    ended: list[str] = []
    sink = Rehearsing(2, ended.append, clock=lambda: 0.0)
    for event in (
        control_pb2.RunEvent(run_id="r-1"),
        control_pb2.RunEvent(state="training"),
        step(),
        step("evaluation"),
    ):
        sink(event)
    assert (ended, sink.is_enough) == ([], False)
    sink(step())
    sink(step())
    assert (ended, sink.is_enough) == (["r-1"], True)


def test_rehearsal_ends_when_its_time_is_over() -> None:
    """Steps that take long are not waited for; the time runs from the first of them."""
    now_s, ended = [0.0], list[str]()
    sink = Rehearsing(100, ended.append, clock=lambda: now_s[0])
    sink(control_pb2.RunEvent(run_id="r-1"))
    now_s[0] = 1000.0
    sink(control_pb2.RunEvent(state="training"))
    now_s[0] += REHEARSAL_S
    sink(step())
    assert not ended
    now_s[0] += 0.1
    sink(step())
    assert ended == ["r-1"]


def rehearse(
    *,
    agents: dict[str, dict[str, Any]] | None = None,
    at_the_end: Callable[[FakeCluster], None] | None = None,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Profile, str]:
    """Rehearse on two fake nodes; return the profile and what was said.

    Args:
        agents: their options by name.
        at_the_end: what happens in place of the end that the rehearsal asks for.
        monkeypatch: of the test.
    """
    said = io.StringIO()
    with FakeCluster("a", "b", agents=agents) as cluster, Client(cluster.server.address) as client:
        if at_the_end is not None:
            monkeypatch.setattr(client, "stop_run", lambda *_args, **_options: at_the_end(cluster))
        found = client.rehearse(job(), PROFILE, progress=PlainProgress(said), num_nodes=2, join_s=5.0)
    return found, said.getvalue()


def slow(agent: FakeAgent, turns: list[Any]) -> None:
    """Report steps, never a whole grant, so that the rehearsal does not end by itself."""
    report = agent.report(turns)
    del report.turns_done[:]
    agent.stub.Report(report, timeout=CALL_S)


def test_rehearsal_that_ends_as_it_asked_for_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own end is no failure."""
    found, said = rehearse(monkeypatch=monkeypatch)
    assert [node.node for node in found.nodes] == ["a", "b"]
    assert "failed" not in said


def test_rehearsal_is_interrupted_by_the_user_after_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C counts at any time: what measures ends with exit code 130, not as if all were well."""

    def interrupt(_cluster: FakeCluster) -> None:
        raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError):
        rehearse(at_the_end=interrupt, monkeypatch=monkeypatch)


def test_rehearsal_that_loses_a_node_after_its_last_step_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that it did not ask for is told, and corrects nothing."""

    def lose(cluster: FakeCluster) -> None:
        cluster.server.coordinator.node_failed("b", PeerLostError("node b was ended by SIGKILL"))

    found, said = rehearse(agents={name: {"on_grant": slow} for name in "ab"}, at_the_end=lose, monkeypatch=monkeypatch)
    assert found == PROFILE
    assert said.count("the rehearsal failed") == 1 and "node b was ended by SIGKILL" in said


@pytest.mark.parametrize("error", [CapacityError("needs 3 GiB, has 1 GiB"), PeerLostError("gone")])
def test_rehearsal_that_fails_keeps_what_was_measured(error: RingTuneError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes of measuring are not lost because the ring does not train; the reason is one line."""
    found, said = rehearse(agents={"b": {"fails_at": {"prepare": error}}}, monkeypatch=monkeypatch)
    assert found == PROFILE
    (line,) = [line for line in said.splitlines() if "failed" in line]
    assert "as they were measured before it" in line and str(error) in line
