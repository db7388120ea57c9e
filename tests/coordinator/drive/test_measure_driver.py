"""A measurement over real gRPC with agents that need no torch: who is asked what, in which order, and every failure."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import Any

import pytest

from coordinator.screen.progress import Progress
from coordinator.submit.client import Client
from ringtune.costs.measured.measuring import hidden_bytes
from ringtune.costs.profile import LinkFacts, Profile
from ringtune.errors import (
    BusyError,
    CapacityError,
    ConnectionFailedError,
    DataError,
    DeadlineError,
    FrameError,
    InterruptedRunError,
    ModelError,
    PeerLostError,
)
from ringtune.v1 import control_pb2
from tests.support.fake_agents import CALL_S, MODEL, FakeCluster, facts, job


def measure(cluster: FakeCluster, **options: Any) -> Profile:
    """Measure the small job on the nodes that are there."""
    changes = options.pop("changes", {})
    with Client(cluster.server.address) as client:
        return client.measure(job(**changes), progress=Progress(), **{"join_s": 0.5, **options})


def test_measurement_gives_every_node_and_every_directed_link() -> None:
    """The facts as the nodes said them, links with quartiles, and everybody is free again."""
    with FakeCluster("a", "b", "c") as cluster:
        found = measure(cluster)
        assert all(agent.released.wait(CALL_S) for agent in cluster.agents.values())
        assert {state for _, state, _ in cluster.server.coordinator.members()} == {"idle"}
    assert found.nodes == tuple(facts(name) for name in "abc")
    assert found.links == tuple(
        LinkFacts(
            source=source,
            target=target,
            rate_bytes_per_s=1e6,
            latency_s=0.001,
            rate_low_bytes_per_s=9e5,
            rate_high_bytes_per_s=1.1e6,
        )
        for source, target in itertools.permutations("abc", 2)
    )


def test_measurement_asks_all_nodes_at_once_or_those_of_a_machine_one_by_one() -> None:
    """All three are on this machine: each has two busy neighbours, or none while it is its turn."""
    barrier, order = threading.Barrier(3), list[str]()
    with FakeCluster("a", "b", "c") as cluster:
        for agent in cluster.agents.values():
            agent.on_inspect = lambda: barrier.wait(CALL_S)
        measure(cluster, with_links=False)
        assert [agent.inspected.neighbours for agent in cluster.agents.values()] == [2, 2, 2]
        for name, agent in cluster.agents.items():
            agent.on_inspect = partial(order.append, name)
        measure(cluster, with_links=False, one_by_one=True, is_fresh=True)
        asked = [agent.inspected for agent in cluster.agents.values()]
    assert order == ["a", "b", "c"]
    assert [(one.neighbours, one.fresh, one.measure, one.measure_s > 1) for one in asked] == [(0, True, True, True)] * 3


def test_measurement_of_links_never_has_two_pairs_on_a_machine() -> None:
    """Messages are as long as a hidden state of the job, and no link is measured beside another one."""
    running, most, sizes = [0], [0], set()
    lock = threading.Lock()

    def watch(request: control_pb2.MeasureLinkRequest) -> control_pb2.MeasureLinkReply:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
            sizes.add(request.message_bytes)
        try:
            return control_pb2.MeasureLinkReply(rate_bytes_per_s=5.0, latency_s=0.1, samples=3)
        finally:
            with lock:
                running[0] -= 1

    options = {name: {"on_link": watch} for name in "abcd"}
    with FakeCluster("a", "b", "c", "d", agents=options) as cluster:
        found = measure(cluster)
        logs = {name: [entry for entry in agent.log if "link" in entry] for name, agent in cluster.agents.items()}
    assert len(found.links) == 12 and most == [1]
    assert sizes == {hidden_bytes(job(), MODEL)}
    assert all(len(log) == 3 for log in logs.values())


def test_measurement_lets_all_nodes_compute_and_send_at_once() -> None:
    """After the links all three are asked at one moment, each about its successor; what a byte took is in the facts."""
    barrier, asked = threading.Barrier(3), dict[str, str]()

    def answer(request: control_pb2.MeasureLinkRequest, node: str) -> control_pb2.MeasureLinkReply:
        if request.computing_s:
            asked[node] = request.target
            barrier.wait(CALL_S)
            return control_pb2.MeasureLinkReply(computing_lost_s_per_byte=1e-9 * (1 + ord(node) - ord("a")))
        return control_pb2.MeasureLinkReply(rate_bytes_per_s=5.0, latency_s=0.1, samples=3)

    with FakeCluster(
        "a", "b", "c", agents={name: {"on_link": partial(answer, node=name)} for name in "abc"}
    ) as cluster:
        found = measure(cluster)
    assert asked == {"a": "b", "b": "c", "c": "a"}
    assert [node.message_s_per_byte for node in found.nodes] == pytest.approx([1e-9, 2e-9, 3e-9])


def test_measurement_without_links_asks_for_none() -> None:
    """Neither if the user says so, nor with a single node."""
    with FakeCluster("a", "b") as cluster:
        assert measure(cluster, with_links=False).links == ()
    with FakeCluster("a") as cluster:
        assert measure(cluster).links == ()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fails_at": {"inspect": DataError("no column 'text'")}}, DataError, "node b: no column"),
        (
            {"fails_at": {"link a": ConnectionFailedError("b -> a can't be measured")}},
            ConnectionFailedError,
            "b -> a can't be measured",
        ),
        ({"facts_changes": {"node": "x"}}, Exception, "node b sent the facts of node x"),
    ],
)
def test_measurement_that_fails_names_the_node_and_frees_the_others(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Whatever a node answers is what the user hears."""
    with FakeCluster("a", "b", agents={"b": options}) as cluster:
        with pytest.raises(error, match=message):
            measure(cluster)
        assert all(agent.released.wait(CALL_S) for agent in cluster.agents.values())


def test_measurement_refuses_nodes_with_different_models() -> None:
    """Their times have nothing to do with each other."""
    import dataclasses

    other = dataclasses.replace(MODEL, digest="cd" * 32)
    with (
        FakeCluster("a", "b", agents={"b": {"facts_changes": {"model": other}}}) as cluster,
        pytest.raises(ModelError, match="different models"),
    ):
        measure(cluster)


def test_measurement_waits_for_nodes_and_says_who_came() -> None:
    """Like a run."""
    with FakeCluster("a") as cluster, pytest.raises(DeadlineError, match="1 have joined"):
        measure(cluster, num_nodes=2)
    with FakeCluster() as cluster, pytest.raises(CapacityError, match="no node has joined"):
        measure(cluster)


def test_measurement_gives_up_on_a_node_that_does_not_answer() -> None:
    """The deadline of the job ends it, and names the node."""
    go_on = threading.Event()
    with FakeCluster("a", "b") as cluster:
        cluster.agents["b"].on_inspect = lambda: go_on.wait(CALL_S)
        try:
            with pytest.raises(PeerLostError, match="node b"):
                measure(cluster, changes={"runtime__wait_s": 2.0})
        finally:
            go_on.set()


def test_measurement_ends_when_a_node_is_lost() -> None:
    """Its lease runs out while it measures; leases of the coordinator are short here."""
    go_on = threading.Event()
    with FakeCluster("a", lease_s=2.0) as cluster:
        cluster.agents["a"].on_inspect = lambda: go_on.wait(CALL_S)
        try:
            with pytest.raises(PeerLostError, match="node a is lost"):
                measure(cluster, changes={"runtime__lease_s": 2.0})
        finally:
            go_on.set()


def test_measurement_and_run_exclude_each_other() -> None:
    """One at a time: a run beside it would be in its figures. Whoever submits second is told who drives."""
    asked, go_on = threading.Event(), threading.Event()
    with FakeCluster("a") as cluster:

        def hold() -> None:
            asked.set()
            go_on.wait(CALL_S)

        cluster.agents["a"].on_inspect = hold
        found: list[Profile] = []
        first = threading.Thread(target=lambda: found.append(measure(cluster)))
        first.start()
        assert asked.wait(CALL_S)
        status = cluster.server.coordinator.run_status()
        assert status is not None and status.phase == "measuring nodes"
        with pytest.raises(BusyError, match="drives run"):
            measure(cluster)
        with pytest.raises(FrameError, match="is a measurement"):
            cluster.server.coordinator.report(control_pb2.ReportRequest(run_id=status.run_id, node="a"))
        go_on.set()
        first.join(CALL_S)
        assert len(found) == 1


def test_measurement_stops_when_it_is_told_to() -> None:
    """Calls under way are cancelled and nodes released, as when the user goes away."""
    asked, go_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []
    with FakeCluster("a") as cluster:

        def hold() -> None:
            asked.set()
            go_on.wait(CALL_S)

        def run() -> None:
            try:
                measure(cluster)
            except InterruptedRunError as error:
                errors.append(error)

        cluster.agents["a"].on_inspect = hold
        caller = threading.Thread(target=run)
        caller.start()
        assert asked.wait(CALL_S)
        assert cluster.server.coordinator.stop("enough", CALL_S)
        caller.join(CALL_S)
        go_on.set()
        assert cluster.agents["a"].released.wait(CALL_S)
    assert [str(error) for error in errors] == ["enough"]


def test_measurement_times_frozen_weights_as_a_run_would_hold_them() -> None:
    """Nodes are asked what they can do first: one that does not multiply bfloat16 lets all widen."""
    with FakeCluster("a", "b", agents={"a": {"facts_changes": {"fast_bfloat16": True}}}) as cluster:
        measure(cluster, changes={"runtime__frozen": "int8"})
        asked = [agent.inspected for agent in cluster.agents.values()]
        assert [(each.measure, each.frozen_dtype, each.frozen_native) for each in asked] == [(True, "int8", False)] * 2
        measure(cluster)
        assert [agent.inspected.frozen_dtype for agent in cluster.agents.values()] == ["", ""]
