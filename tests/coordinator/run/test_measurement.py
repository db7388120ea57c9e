"""Measurements of nodes and links, over real gRPC with agents that need no torch."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from coordinator.client.follow import Outcome
from coordinator.client.submit import Client
from coordinator.planner.given_plan import GivenPlan
from coordinator.run import measurement
from coordinator.run.members import LONGEST_AGE_S, LinkCache, Member
from coordinator.run.node_client import AgentCalls
from coordinator.run.requests import MeasureRequest, RunRequest
from coordinator.screen.progress import Progress
from ringtune.costs.links import MIN_SAMPLES
from ringtune.costs.measurement import hidden_bytes
from ringtune.costs.profile import LinkFacts, Profile
from ringtune.errors import (
    BusyError,
    ConnectionFailedError,
    DataError,
    FrameError,
    IntegrityError,
    InterruptedRunError,
    ModelError,
    PeerLostError,
)
from ringtune.schedule.turns import Turn
from ringtune.v1 import control_pb2
from tests.support.fake_agents import CALL_S, MODEL, FakeAgent, FakeCluster, facts, job, submit

HOSTS: dict[str, dict[str, Any]] = {name: {"host": f"127.0.0.{index}"} for index, name in enumerate("abcd", start=1)}


def run(cluster: FakeCluster, **options: Any) -> Outcome:
    """Run the small job on every node."""
    return submit(cluster, RunRequest(job=job(), num_nodes=len(cluster.agents), **options))


def links_asked(cluster: FakeCluster) -> list[str]:
    """Which links were measured: source>target."""
    return sorted(
        f"{agent.node}>{entry.removeprefix('link ')}"
        for agent in cluster.agents.values()
        for entry in agent.log
        if entry.startswith("link ")
    )


def test_run_on_several_machines_measures_every_link_once() -> None:
    """Three machines have six links; the next run knows them, and says so in its profile.

    With a given profile or plan nothing is asked; of the latter the profile is complete where links are known.
    """
    with FakeCluster("a", "b", "c", agents=HOSTS) as cluster:
        first = run(cluster)
        asked = links_asked(cluster)
        assert first.plan is not None
        given = GivenPlan(plan=first.plan)
        outcomes = [first, run(cluster), run(cluster, profile=first.profile), run(cluster, plan=given)]
        cluster.server.coordinator.links = LinkCache()
        unknown = run(cluster, plan=given)
        assert links_asked(cluster) == asked == ["a>b", "a>c", "b>a", "b>c", "c>a", "c>b"]
    for outcome in outcomes:
        assert outcome.profile is not None
        assert [link.rate_bytes_per_s for link in outcome.profile.links] == [1e6] * 6
        assert not any(link.is_assumed for link in outcome.profile.links)
    assert unknown.profile is not None and unknown.profile.links == ()


def _near_or_far(request: control_pb2.MeasureLinkRequest, *, node: str) -> control_pb2.MeasureLinkReply:
    is_near = {node, request.target} in ({"a", "c"}, {"b", "d"})
    return control_pb2.MeasureLinkReply(rate_bytes_per_s=1e7 if is_near else 1e5, latency_s=0.001, samples=3)


def test_run_orders_its_owners_by_their_links() -> None:
    """Of four owners a and c, and b and d, are near each other: the order of turns is not that of the names."""
    agents = {name: {**HOSTS[name], "on_link": partial(_near_or_far, node=name)} for name in "abcd"}
    with FakeCluster(*"abcd", agents=agents) as cluster:
        outcome = run(cluster, plan_only=True)
    assert outcome.plan is not None
    assert [owner.node for owner in outcome.plan.course.owners] == ["a", "c", "b", "d"]


def _impossible(request: control_pb2.MeasureLinkRequest) -> control_pb2.MeasureLinkReply:
    return control_pb2.MeasureLinkReply(rate_bytes_per_s=-1.0, latency_s=0.001, samples=3)


def test_run_begins_without_a_host_whose_link_can_not_be() -> None:
    """The others plan anew: what they measured stays known, and no link of the host is in the profile."""
    agents = {**HOSTS, "c": {**HOSTS["c"], "rows": 0, "on_link": _impossible}}
    with FakeCluster("a", "b", "c", agents=agents) as cluster:
        outcome = run(cluster)
        assert cluster.agents["c"].released.wait(CALL_S)
        asked = [link for link in links_asked(cluster) if "c" not in link]
    assert outcome.plan is not None and outcome.profile is not None
    assert set(outcome.plan.nodes) == {"a", "b"} and asked == ["a>b", "b>a"]
    assert [(link.source, link.target) for link in outcome.profile.links] == [("a", "b"), ("b", "a")]
    (note,) = [note for note in outcome.notes if note.endswith("the run begins without node c")]
    assert note.startswith("node c: ") and "use one version on all machines" in note


def test_run_whose_owner_measures_what_can_not_be_ends_by_its_name() -> None:
    """Its rows are needed."""
    agents = {**HOSTS, "b": {**HOSTS["b"], "on_link": _impossible}}
    with FakeCluster("a", "b", agents=agents) as cluster, pytest.raises(IntegrityError, match=r"node b: .*one version"):
        run(cluster)


def test_run_on_one_machine_measures_no_link_and_knows_what_they_are() -> None:
    """Two nodes of a machine talk through its memory: nothing is asked, and every link stands in the profile."""
    with FakeCluster("a", "b") as cluster:
        outcome = run(cluster)
        assert links_asked(cluster) == []
    assert outcome.profile is not None
    assert [(link.source, link.target, link.is_assumed) for link in outcome.profile.links] == [
        ("a", "b", True),
        ("b", "a", True),
    ]


def _with_transfers(agent: FakeAgent, turns: list[Turn]) -> None:
    """Report the turns as done, and that the other node's messages came at 1 MB/s."""
    request = agent.report(turns)
    for index in range(MIN_SAMPLES):
        request.transfers.add(
            source="b" if agent.node == "a" else "a", bytes=20_000, seconds=0.021, at_unix_s=100.0 + index
        )
    agent.stub.Report(request, timeout=CALL_S)


def test_links_that_messages_of_a_run_have_shown_are_known_for_another_hour() -> None:
    """Measured at 0 min, and seen by a run at 50: at 61 min they are not measured anew."""
    now_s, options = [0.0], {"on_grant": _with_transfers}
    with FakeCluster("a", "b", agents={name: {**HOSTS[name], **options} for name in "ab"}) as cluster:
        cluster.server.coordinator.links = LinkCache(lambda: now_s[0])
        found = []
        for minutes in (0, 50, 61):
            now_s[0] = 60.0 * minutes
            run(cluster)
            found.append(len(links_asked(cluster)))
    assert found == [2, 2, 2]


class Calls:
    """Calls to a node that answer at once."""

    def measure_link(self, _: object, on_result: Callable[[control_pb2.MeasureLinkReply], None]) -> None:
        """Answer with 2 MB/s."""
        on_result(control_pb2.MeasureLinkReply(rate_bytes_per_s=2e6, latency_s=0.002, samples=3))


def test_measuring_stops_at_its_budget_and_says_what_it_assumes() -> None:
    """Eight machines have 56 links. A wave a second and a budget of 3.5 s: four waves, the other links are assumed."""
    names = [f"n{index}" for index in range(8)]
    members = [Member(node=name, address=f"10.0.0.{index + 1}:7000", instance="i") for index, name in enumerate(names)]
    now_s, answers = [0.0], list[tuple[Any, ...]]()
    calls: Any = dict.fromkeys(names, Calls())
    measuring = measurement.LinkMeasurement(
        members,
        calls,
        job(),
        MODEL,
        cache=LinkCache(),
        answered=lambda *answer: answers.append(answer),
        budget_s=3.5,
        now_s=lambda: now_s[0],
    )
    measuring.go_on()
    while not measuring.is_done:
        now_s[0] += 0.25
        measuring.take(*answers.pop(0))
    measuring.take(("n0", "left"), _impossible(control_pb2.MeasureLinkRequest()))  # asked by a measurement before
    links = measuring.links()
    assert len(links) == 56
    assert sum(not link.is_assumed for link in links) == 16
    assert {link.rate_bytes_per_s for link in links} == {2e6}
    assert "40 of 56 links were not measured" in measuring.note


def test_cache_ages_and_knows_addresses_and_sizes() -> None:
    """A link is known for an hour, at the very addresses, for messages of a like size; a later one replaces it."""
    now_s = [100.0]
    cache = LinkCache(lambda: now_s[0])
    addresses, size = {"a": "10.0.0.1:7000", "b": "10.0.0.2:7000"}, hidden_bytes(job(), MODEL)
    link = LinkFacts(source="a", target="b", rate_bytes_per_s=5.0, latency_s=0.1)
    cache.put((link,), addresses, size)
    assert cache.find(addresses, 2 * size) == cache.find(addresses, size // 2) == (link,)
    assert cache.find(addresses, 3 * size) == ()
    assert cache.find({**addresses, "b": "10.0.0.9:7000"}, size) == ()
    corrected = LinkFacts(source="a", target="b", rate_bytes_per_s=3.0, latency_s=0.1)
    assumed = LinkFacts(source="b", target="a", rate_bytes_per_s=3.0, latency_s=0.1, is_assumed=True)
    cache.put((corrected, assumed), addresses, size)
    assert cache.find(addresses, size) == (corrected,)
    now_s[0] += LONGEST_AGE_S + 1
    assert cache.find(addresses, size) == ()


def measure(cluster: FakeCluster, **options: Any) -> Profile:
    """Measure the small job on the nodes that are there."""
    changes = options.pop("changes", {})
    with Client(cluster.server.address) as client:
        request = MeasureRequest(job(**changes), **{"num_nodes": 0, "join_s": 0.5, **options})
        return client.measure(request, progress=Progress())


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
    """All three are on this machine: each has two busy neighbours, or none while it is its turn.

    Before the turns all are asked what they have: one of the last may be the only one with the model.
    """
    barrier, order = threading.Barrier(3), list[str]()
    with FakeCluster("a", "b", "c") as cluster:
        for agent in cluster.agents.values():
            agent.on_inspect = lambda: barrier.wait(CALL_S)
        assert measure(cluster, with_links=False).links == ()
        assert [agent.inspected.neighbours for agent in cluster.agents.values()] == [2, 2, 2]
        for name, agent in cluster.agents.items():
            agent.on_inspect = partial(order.append, name)
        measure(cluster, with_links=False, one_by_one=True, is_fresh=True)
        asked = [agent.inspected for agent in cluster.agents.values()]
    assert (sorted(order[:3]), order[3:]) == (["a", "b", "c"], ["a", "b", "c"])
    assert [(one.neighbours, one.fresh, one.measure, one.measure_s > 1) for one in asked] == [(0, True, True, True)] * 3


def test_measurement_of_links_never_has_two_pairs_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are as long as a hidden state of the job, and no link is measured beside another one."""
    running, most, sizes = list[str](), list[int](), set[int]()
    measure_link = AgentCalls.measure_link

    def watch(calls: AgentCalls, request: control_pb2.MeasureLinkRequest, on_result: Callable[[Any], None]) -> None:
        def answered(reply: Any) -> None:
            running.remove(calls.node)
            on_result(reply)

        if request.computing_s:  # behind the links, of all nodes at once
            measure_link(calls, request, on_result)
            return
        running.append(calls.node)
        most.append(len(running))
        sizes.add(request.message_bytes)
        measure_link(calls, request, answered)

    monkeypatch.setattr(AgentCalls, "measure_link", watch)
    with FakeCluster("a", "b", "c", "d") as cluster:
        found = measure(cluster)
        logs = {name: [entry for entry in agent.log if "link" in entry] for name, agent in cluster.agents.items()}
    assert len(found.links) == 12 and most == [1] * 12
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
        ({"facts_changes": {"model": dataclasses.replace(MODEL, digest="cd" * 32)}}, ModelError, "different models"),
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


@pytest.mark.parametrize(
    ("leaves", "changes", "message"),
    [
        (False, {"runtime__wait_s": 1.0}, r"node a at 127\.0\.0\.1:\d+ does not answer"),
        (True, {}, "node a is lost: it has left"),
    ],
)
def test_measurement_gives_up_on_a_node_that_does_not_answer(
    leaves: bool, changes: dict[str, Any], message: str
) -> None:
    """The deadline of the call ends it, or that the node has no lease any more, and the node is named."""
    go_on = threading.Event()
    with FakeCluster("a") as cluster:

        def hold() -> None:
            if leaves:
                cluster.server.coordinator.leave("a", cluster.agents["a"].address)
            go_on.wait(CALL_S)

        cluster.agents["a"].on_inspect = hold
        try:
            with pytest.raises(PeerLostError, match=message):
                measure(cluster, changes=changes)
        finally:
            go_on.set()


def test_measurement_excludes_others_and_stops_when_it_is_told_to() -> None:
    """A run beside it would be in its figures: whoever submits second is told who drives.

    As it stops, also when the user goes away, calls under way are cancelled and nodes released.
    """
    asked, go_on = threading.Event(), threading.Event()
    with FakeCluster("a") as cluster, ThreadPoolExecutor(1) as pool:

        def hold() -> None:
            asked.set()
            go_on.wait(CALL_S)

        cluster.agents["a"].on_inspect = hold
        first = pool.submit(measure, cluster)
        assert asked.wait(CALL_S)
        status = cluster.server.coordinator.run_status()
        assert status is not None and status.phase == "measuring nodes"
        with pytest.raises(BusyError, match="drives run"):
            measure(cluster)
        with pytest.raises(FrameError, match="is a measurement"):
            cluster.server.coordinator.report(control_pb2.ReportRequest(run_id=status.run_id, node="a"))
        assert cluster.server.coordinator.stop("enough", CALL_S)
        with pytest.raises(InterruptedRunError, match=r"^enough$"):
            first.result(CALL_S)
        go_on.set()
        assert cluster.agents["a"].released.wait(CALL_S)


def test_measurement_times_frozen_weights_as_a_run_would_hold_them() -> None:
    """Nodes are asked what they can do first: one that does not multiply bfloat16 lets all widen."""
    with FakeCluster("a", "b", agents={"a": {"facts_changes": {"fast_bfloat16": True}}}) as cluster:
        measure(cluster, changes={"runtime__frozen": "int8"})
        asked = [agent.inspected for agent in cluster.agents.values()]
        assert [(each.measure, each.frozen_dtype, each.frozen_native) for each in asked] == [(True, "int8", False)] * 2
        measure(cluster)
        assert [agent.inspected.frozen_dtype for agent in cluster.agents.values()] == ["", ""]
    with FakeCluster("a") as cluster:
        assert measure(cluster).links == ()
