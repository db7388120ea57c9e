"""A whole run over real gRPC with agents that need no torch: who takes part, who hears of it, and what follows it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from coordinator.client.submit import Client
from coordinator.run.requests import RunRequest
from coordinator.screen.progress import Progress
from ringtune.errors import (
    BusyError,
    InterruptedRunError,
    RingTuneError,
)
from ringtune.v1 import control_pb2
from tests.support.fake_agents import CALL_S, FakeCluster, job
from tests.support.fake_runs import run


def test_run_tells_further_readers_what_it_tells_its_submitter() -> None:
    """A sink at the coordinator and one at the submitter hear the same events, from the run's id to its end."""
    there: list[control_pb2.RunEvent] = []
    here: list[control_pb2.RunEvent] = []
    with FakeCluster("a", "b") as cluster:
        cluster.server.coordinator.sinks.append(there.append)
        with Client(cluster.server.address) as client:
            client.run(RunRequest(job=job(), num_nodes=2), progress=Progress(), folder=None, sinks=(here.append,))
    assert there == here
    kinds = [event.WhichOneof("event") for event in there]
    assert [kinds[0], kinds[1], kinds[-1]] == ["run_id", "job_toml", "done"]
    assert {"plan_json", "step_json", "metrics_json", "report_json", "file"} <= set(kinds)


def test_run_goes_on_when_a_further_reader_fails() -> None:
    """What a reader raises is its own fault: the run ends well, and later readers hear everything."""
    heard: list[control_pb2.RunEvent] = []

    def broken(event: control_pb2.RunEvent) -> None:
        raise ValueError("this page does not load")

    with FakeCluster("a", "b") as cluster:
        cluster.server.coordinator.sinks += [broken, heard.append]
        outcome = run(cluster)
    assert outcome.report
    assert heard[-1].WhichOneof("event") == "done"


def test_run_plan_only_prepares_nobody() -> None:
    """Asked for a plan, the coordinator inspects (once for sizes, once for times), plans and releases."""
    with FakeCluster("a", "b") as cluster, Client(cluster.server.address) as client:
        came = client.run(RunRequest(job=job(), plan_only=True), progress=Progress(), folder=None)
        logs = [agent.log for agent in cluster.agents.values()]
        asked = [agent.inspected for agent in cluster.agents.values()]
    assert came.plan is not None
    assert [(piece.node, piece.start, piece.stop) for piece in came.plan.placement.slices] == [("a", 0, 2), ("b", 2, 4)]
    assert set(came.memory) == {"a", "b"}
    assert logs == [["inspect", "inspect", "release"]] * 2
    assert [(one.measure, one.neighbours, one.fresh) for one in asked] == [(True, 1, False)] * 2, "beside each other"
    assert all(0 < one.measure_s <= 1 for one in asked), "a run takes a second for it"


def test_run_takes_nodes_with_data_first() -> None:
    """Of three members two are wanted: the one without data stays idle."""
    with FakeCluster("a", "b", "c", agents={"a": {"rows": 0}}) as cluster:
        came = run(cluster, num_nodes=2)
        assert cluster.agents["a"].log == []
    assert came.plan is not None
    assert came.plan.nodes == ("b", "c")


def test_run_tells_nodes_whether_it_is_finished() -> None:
    """Only then may they drop their shards one day; a run that failed can be gone on with."""
    with FakeCluster("a", "b") as cluster:
        run(cluster)
        assert all(agent.released.wait(CALL_S) for agent in cluster.agents.values())
        assert all(agent.is_finished for agent in cluster.agents.values())


def test_run_that_is_cancelled_releases_every_node() -> None:
    """If the submitter goes away the run stops; nodes are free and the next run may begin."""
    silent: dict[str, Any] = {"on_grant": lambda agent, turns: None}
    with FakeCluster("a", "b", agents={"a": silent, "b": silent}) as cluster:
        client = Client(cluster.server.address)
        ended: list[RingTuneError] = []

        def follow() -> None:
            try:
                client.run(RunRequest(job=job(), num_nodes=2), progress=Progress(), folder=None)
            except RingTuneError as error:
                ended.append(error)

        thread = threading.Thread(target=follow)
        thread.start()
        assert cluster.agents["a"].granted.wait(CALL_S)
        client.close()
        thread.join(CALL_S)
        assert [type(error) for error in ended] == [InterruptedRunError], ended
        assert all(agent.released.wait(CALL_S) for agent in cluster.agents.values())
        assert cluster.server.coordinator.stop("test", CALL_S)


def test_run_is_refused_while_another_goes_on() -> None:
    """One run at a time: the second submitter is told which one goes on."""
    silent = {"on_grant": lambda agent, turns: None}
    with FakeCluster("a", agents={"a": silent}) as cluster:
        first = cluster.server.coordinator.run(RunRequest(job=job(), plan_only=False, num_nodes=1, join_s=1))
        with pytest.raises(BusyError, match=first.run_id):
            run(cluster, num_nodes=1)
        first.stop("test")
        assert first.join(CALL_S)


def test_run_can_follow_another_at_once() -> None:
    """Whoever hears that a run is done may submit the next one."""
    with FakeCluster("a", "b") as cluster:
        for _ in range(3):
            run(cluster)
