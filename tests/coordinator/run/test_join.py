"""A node that comes while a run is under way, over real gRPC with agents that need no torch."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.run.join import KnownNodes, refusal_reason
from coordinator.run.requests import RunRequest
from coordinator.run.run_driver import RunDriver
from ringtune.errors import DataError, FrameError, IntegrityError
from ringtune.schedule.methods import Hift, RingAda
from ringtune.v1 import control_pb2
from tests.support.fake_agents import CALL_S, MODEL, FakeAgent, FakeCluster, facts, job
from tests.support.plans import changed, make_plan

KNOWN = KnownNodes(make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"]), {name: facts(name) for name in "ab"})
OTHER = dataclasses.replace(MODEL, digest="cd" * 32)


def silent(number: int) -> dict[str, Any]:
    """An agent on a machine of its own that never ends a turn."""
    return {"on_grant": lambda agent, turns: None, "host": f"127.0.0.{number}"}


class Going:
    """A run that is under way, with what its submitter hears.

    Args:
        cluster: of its nodes.
        changes: of the job.
    """

    def __init__(self, cluster: FakeCluster, **changes: object) -> None:
        self.cluster = cluster
        self._notes: queue.Queue[str] = queue.Queue()
        cluster.server.coordinator.sinks.append(self._hear)
        self.driver: RunDriver = cluster.server.coordinator.run(RunRequest(job=job(**changes), num_nodes=2))
        assert all(agent.granted.wait(CALL_S) for agent in cluster.agents.values())

    def _hear(self, event: control_pb2.RunEvent) -> None:
        if event.WhichOneof("event") == "note":
            self._notes.put(event.note)

    def note_of(self, node: str) -> str:
        """The next note that begins with this node."""
        while not (note := self._notes.get(timeout=CALL_S)).startswith(f"node {node} "):
            pass
        return note


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Two nodes on machines of their own."""
    with FakeCluster("a", "b", agents={"a": silent(1), "b": silent(2)}) as made:
        yield made


def come(cluster: FakeCluster, **values: Any) -> FakeAgent:
    """A third node joins."""
    agent = FakeAgent("c", cluster.server.address, **{**silent(3), "rows": 0, **values})
    cluster.agents["c"] = agent
    agent.join()
    return agent


def test_node_that_comes_is_asked_and_may_have_blocks(cluster: FakeCluster) -> None:
    """It measures itself as the others did, and is of the run from then on."""
    going = Going(cluster)
    agent = come(cluster)
    assert going.note_of("c").startswith("node c may get blocks of this run")
    assert agent.log == ["inspect"] and agent.inspected.measure and agent.inspected.measure_s == 1.0
    assert going.driver.nodes == {"a", "b", "c"}
    going.driver.stop("test")
    assert agent.released.wait(CALL_S)


@pytest.mark.parametrize(
    ("values", "changes", "why"),
    [
        ({}, {"placement__replan": "never"}, "placement.replan is 'never'"),
        ({}, {"train__method": "pipeadapter"}, "the run stays on its placement, as the result of pipeadapter"),
        ({"facts_changes": {"model": OTHER}}, {}, "it has model cdcdcdcdcdcd…, the run has abababababab…"),
        ({"fails_at": {"inspect": DataError("no such file")}}, {}, "no such file"),
    ],
)
def test_node_that_does_not_fit_takes_no_part_and_the_run_goes_on(
    cluster: FakeCluster, values: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    """The user is told why; nobody else notices."""
    going = Going(cluster, **changes)
    come(cluster, **values)
    note = going.note_of("c")
    assert "takes no part in this run" in note and why in note
    assert going.driver.nodes == {"a", "b"}
    going.driver.stop("test")


def test_node_that_is_drained_takes_no_part(cluster: FakeCluster) -> None:
    """It is to be taken into no run, and this is one."""
    agent = come(cluster)
    cluster.server.coordinator.drain_node("c", undo=False)
    going = Going(cluster_of(cluster))
    cluster.server.coordinator.leave("c", agent.address)
    agent.join()
    assert going.note_of("c").endswith("it is drained")
    going.driver.stop("test")


def cluster_of(cluster: FakeCluster) -> FakeCluster:
    """The same, but for a node that takes no part."""
    cluster.agents = {name: agent for name, agent in cluster.agents.items() if name != "c"}
    return cluster


def test_node_on_the_machine_of_all_others_takes_no_part() -> None:
    """Its work would be taken for slow boards."""
    quiet: dict[str, Any] = {"on_grant": lambda agent, turns: None}
    with FakeCluster("a", "b", agents={"a": quiet, "b": quiet}) as cluster:
        going = Going(cluster)
        come(cluster, host="127.0.0.1")
        assert "its nodes share a machine" in going.note_of("c")
        going.driver.stop("test")


def test_run_that_waits_for_room_asks_members_that_had_no_part(cluster: FakeCluster) -> None:
    """One that was left out by the plan, or came when nobody was wanted, is asked then."""
    going = Going(cluster, placement__replan="never")
    agent = come(cluster)
    assert "takes no part" in going.note_of("c") and agent.log == []
    machine: Any = going.driver._rounds
    going.driver._join_handler.ask_others(going.driver.nodes)  # nobody is awaited
    machine.awaited.for_room("CapacityError", "nothing fits", ("b",), time.monotonic() + 60.0)
    going.driver._join_handler.ask_others(going.driver.nodes)
    assert going.note_of("c") == "node c is back; resuming"
    assert agent.log == ["inspect"] and going.driver.nodes == {"a", "b", "c"}
    going.driver.stop("test")


def test_report_of_a_former_process_is_refused(cluster: FakeCluster) -> None:
    """It is told to forget the run; what the node says that took its place is taken."""
    going = Going(cluster)
    node = cluster.agents["a"]
    with pytest.raises(FrameError, match="another process is node a"):
        going.driver.report(control_pb2.ReportRequest(run_id=node.run_id, node="a", number=1, instance="old"))
    going.driver.report(control_pb2.ReportRequest(run_id=node.run_id, node="a", number=1, instance=node.address))
    with pytest.raises(IntegrityError, match="node z is not in run"):
        going.driver.report(control_pb2.ReportRequest(run_id=node.run_id, node="z", number=1))
    going.driver.stop("test")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"rows": 11}, "it has 11 training and 5 evaluation rows, the run began with 10 and 5"),
        ({"labels": ("neg", "new")}, "its rows have other labels"),
        ({"model": OTHER}, "it has model"),
        ({"memory_bytes": 5}, ""),
    ],
)
def test_owner_that_comes_back_has_the_rows_that_it_had(changes: dict[str, Any], why: str) -> None:
    """Counts, labels and model; what it has of memory is a matter of the placement."""
    found = refusal_reason(facts("b", **changes), KNOWN)
    assert found.startswith(why) and bool(found) == bool(why)


def test_host_that_comes_may_have_any_rows() -> None:
    """They are not of the course."""
    assert refusal_reason(facts("c", rows=99), KNOWN) == ""


def test_owner_with_copies_comes_back_with_the_device_that_it_had() -> None:
    """Another one would update its copies otherwise; without copies it may."""
    for method, is_refused in ((Hift(), True), (RingAda(every_steps=2), False)):
        known = KnownNodes(changed(KNOWN.plan, method=method), KNOWN.facts)
        found = refusal_reason(dataclasses.replace(facts("b"), numerics="cuda NVIDIA T4 sm_75"), known)
        assert ("equal in every bit" in found) == is_refused
