"""A coordinator says what happens, one line each, and saves its run when it is ended."""

from __future__ import annotations

import os
import re
import signal

import pytest

from coordinator.client.submit import Client
from coordinator.run.members import Member, Registry
from coordinator.run.requests import RunRequest
from coordinator.screen.progress import Progress
from coordinator.server.coordinator import Coordinator, ShutdownSignals
from ringtune import __version__
from ringtune.errors import ModelError, RingTuneError
from tests.support.fake_agents import FakeCluster, job


def member(node: str = "pi", **changes: object) -> Member:
    """A node of another process each time."""
    values = {
        "address": "127.0.0.1:5",
        "instance": "one",
        "version": __version__,
        "threads": 4,
        "memory_bytes": 3 << 30,
    }
    return Member(node=node, **{**values, **changes})  # type: ignore[arg-type]


def test_registry_lists_a_lost_member_once_until_it_joins_again() -> None:
    """A lease that ends is news once; after a restart it can be news again."""
    registry = Registry(lease_s=10.0)
    registry.join(member("a"), 0.0)
    registry.join(member("b"), 5.0)
    assert registry.newly_lost(9.0) == ()
    assert [entry.node for entry in registry.newly_lost(11.0)] == ["a"]
    assert [entry.node for entry in registry.newly_lost(16.0)] == ["b"]
    assert registry.newly_lost(17.0) == ()
    registry.join(member("a", instance="two"), 18.0)
    assert registry.newly_lost(19.0) == ()
    assert [entry.node for entry in registry.newly_lost(29.0)] == ["a"]


def test_coordinator_says_who_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what a node has; one that is told twice that it left is a stranger."""
    said: list[str] = []
    now_s = [100.0]
    coordinator = Coordinator(lease_s=10.0)
    monkeypatch.setattr(coordinator, "_now_s", lambda: now_s[0])
    coordinator.say = said.append
    coordinator.join(member(has_data=True))
    for now_s[0] in (105.0, 111.0, 112.0):
        coordinator.report_lost_members()
    coordinator.leave("pi", "one")
    coordinator.leave("pi", "one")
    assert said[0] == "node pi joined from 127.0.0.1:5: 4 threads, 3,072 MiB, cpu, owns rows"
    assert said[1:] == ["node pi is lost: last contact 11.0 s ago", "node pi left"]


def test_coordinator_says_when_runs_begin_and_how_they_end() -> None:
    """Id, steps and seconds; why one failed; a plan and a run are told apart."""
    said: list[str] = []
    with FakeCluster("a", "b") as cluster:
        cluster.server.coordinator.say = said.append
        with Client(cluster.server.address) as client:
            client.run(RunRequest(job=job(), num_nodes=2), progress=Progress(), folder=None)
            client.run(RunRequest(job=job(), num_nodes=2, plan_only=True), progress=Progress(), folder=None)
    with FakeCluster("a", agents={"a": {"fails_at": {"inspect": ModelError("no such model")}}}) as cluster:
        cluster.server.coordinator.say = said.append
        with Client(cluster.server.address) as client, pytest.raises(RingTuneError, match="no such model"):
            client.run(RunRequest(job=job(), num_nodes=1), progress=Progress(), folder=None)
    patterns = [
        r"run r\S+ of model started by \S+@\S+",
        r"run r\S+ done: 8 steps, whole run .*",
        r"plan r\S+ of model started by \S+@\S+",
        r"plan r\S+ done: .*",
        r"run r\S+ of model started by \S+@\S+",
        r"run r\S+ failed: .*no such model; 0 steps, whole run .*",
    ]
    assert len(said) == len(patterns), said
    for line, pattern in zip(said, patterns, strict=True):
        assert re.fullmatch(pattern, line), line


def test_coordinator_whose_terminal_is_gone_serves_on() -> None:
    """That a line can't be shown is no error of the node that joins."""

    def broken(_line: str) -> None:
        raise OSError(5, "Input/output error")

    coordinator = Coordinator()
    coordinator.say = broken
    coordinator.join(member())
    assert [entry.node for entry in coordinator.living()] == ["pi"]


RUN = "r20260102-030405-00000000"


def gone(_line: str) -> None:
    """A terminal that was closed: every write to it fails."""
    raise OSError(5, "Input/output error")


def test_ending_drains_the_run_though_the_terminal_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP says that nobody can be told any more; the run gets its checkpoint all the same."""
    coordinator = Coordinator()
    coordinator.say = gone
    drained: list[str] = []
    monkeypatch.setattr(coordinator, "driven", lambda: "" if drained else RUN)
    monkeypatch.setattr(coordinator, "drain", lambda run_id, reason: drained.append(run_id))
    with ShutdownSignals() as ending:
        os.kill(os.getpid(), signal.SIGHUP)
        assert ending.wait()
        ending.save(coordinator)
    assert drained == [RUN]
