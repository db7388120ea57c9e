"""A run on several machines measures the links that it may use before it is planned, and only what is not known."""

from __future__ import annotations

from functools import partial
from typing import Any

from coordinator.drive.plan_making import link_measuring
from coordinator.drive.requests import RunRequest
from coordinator.members.link_cache import LONGEST_AGE_S, LinkCache
from coordinator.members.registry import Member
from coordinator.planner.given.given_plan import GivenPlan
from coordinator.screen.progress import Progress
from coordinator.submit.client import Client
from coordinator.submit.outcome import Outcome
from ringtune.costs.links.recorded import LEAST_SAMPLES
from ringtune.costs.measured.measuring import hidden_bytes
from ringtune.costs.profile import LinkFacts, Profile
from ringtune.schedule.turns.turns import Turn
from ringtune.v1 import control_pb2
from tests.support.fake_agents import CALL_S, MODEL, FakeAgent, FakeCluster, facts, job

HOSTS: dict[str, dict[str, Any]] = {name: {"host": f"127.0.0.{index}"} for index, name in enumerate("abcd", start=1)}


def run(cluster: FakeCluster, **options: Any) -> Outcome:
    """Run the small job on every node."""
    with Client(cluster.server.address) as client:
        request = RunRequest(job=job(), num_nodes=len(cluster.agents), **options)
        return client.run(request, progress=Progress(), folder=None)


def links_asked(cluster: FakeCluster) -> list[str]:
    """Which links were measured: source>target."""
    return sorted(
        f"{agent.node}>{entry.removeprefix('link ')}"
        for agent in cluster.agents.values()
        for entry in agent.log
        if entry.startswith("link ")
    )


def test_run_on_several_machines_measures_every_link_once() -> None:
    """Three machines have six links; the next run on them knows the links, and says so in its profile."""
    with FakeCluster("a", "b", "c", agents=HOSTS) as cluster:
        first = run(cluster)
        asked = links_asked(cluster)
        second = run(cluster)
        asked_again = links_asked(cluster)
    assert asked == asked_again == ["a>b", "a>c", "b>a", "b>c", "c>a", "c>b"]
    for outcome in (first, second):
        assert outcome.profile is not None
        assert [link.rate_bytes_per_s for link in outcome.profile.links] == [1e6] * 6
        assert not any(link.is_assumed for link in outcome.profile.links)


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


def test_run_with_a_given_profile_measures_no_link() -> None:
    """The profile's links are taken, whatever they are."""
    with FakeCluster("a", "b", agents={name: HOSTS[name] for name in "ab"}) as cluster:
        first = run(cluster)
        asked = links_asked(cluster)
        run(cluster, profile=first.profile)
        assert links_asked(cluster) == asked


def test_run_with_a_given_plan_measures_no_link_and_has_those_that_are_known() -> None:
    """Its plan is fixed, so nothing is asked for it; its profile is complete all the same where links are known."""
    with FakeCluster("a", "b", agents={name: HOSTS[name] for name in "ab"}) as cluster:
        first = run(cluster)
        asked = links_asked(cluster)
        assert first.plan is not None
        assert first.profile is not None
        given = run(cluster, plan=GivenPlan(plan=first.plan))
        cluster.server.coordinator.links = LinkCache()
        unknown = run(cluster, plan=GivenPlan(plan=first.plan))
        assert links_asked(cluster) == asked
    assert given.profile is not None
    assert given.profile.links == first.profile.links != ()
    assert unknown.profile is not None
    assert unknown.profile.links == ()


def _with_transfers(agent: FakeAgent, turns: list[Turn]) -> None:
    """Report the turns as done, and that the other node's messages came at 1 MB/s."""
    request = agent.report(turns)
    for index in range(LEAST_SAMPLES):
        request.transfers.add(
            source="b" if agent.node == "a" else "a", bytes=20_000, seconds=0.021, at_unix_s=100.0 + index
        )
    agent.stub.Report(request, timeout=CALL_S)


def test_links_that_a_run_does_not_use_grow_old_beside_it() -> None:
    """Measured at 0 min and known at 50 to a run that sends nothing over them: at 61 min they are measured anew."""
    now_s = [0.0]
    with FakeCluster("a", "b", agents={name: HOSTS[name] for name in "ab"}) as cluster:
        cluster.server.coordinator.links = LinkCache(lambda: now_s[0])
        asked = []
        for minutes in (0, 50, 61):
            now_s[0] = 60.0 * minutes
            run(cluster)
            asked.append(len(links_asked(cluster)))
    assert asked == [2, 2, 4]


def test_links_that_a_run_uses_stay_young() -> None:
    """The messages of the run at 50 min showed what they are, so at 61 min nothing is measured."""
    now_s = [0.0]
    agents = {name: {**HOSTS[name], "on_grant": _with_transfers} for name in "ab"}
    with FakeCluster("a", "b", agents=agents) as cluster:
        cluster.server.coordinator.links = LinkCache(lambda: now_s[0])
        for minutes in (0, 50, 61):
            now_s[0] = 60.0 * minutes
            run(cluster)
        assert links_asked(cluster) == ["a>b", "b>a"]


def test_links_of_a_given_profile_are_not_known_to_the_next_run() -> None:
    """Nobody here measured them, so a run without the profile asks for its own links."""
    links = tuple(
        LinkFacts(source=source, target=target, rate_bytes_per_s=7e3, latency_s=9.0) for source, target in ("ab", "ba")
    )
    agents = {name: {**HOSTS[name], "on_grant": _with_transfers} for name in "ab"}
    with FakeCluster("a", "b", agents=agents) as cluster:
        run(cluster, profile=Profile(nodes=(facts("a"), facts("b")), links=links))
        assert links_asked(cluster) == []
        run(cluster)
        assert links_asked(cluster) == ["a>b", "b>a"]


class Calls:
    """Calls to a node that note what is asked and answer at once."""

    def __init__(self, node: str, answers: list[link_measuring.LinkAnswer]) -> None:
        self._node, self._answers = node, answers

    def measure_link(self, target: str, address: str, message_bytes: int, **_: Any) -> None:
        """Answer with 2 MB/s."""
        reply = control_pb2.MeasureLinkReply(rate_bytes_per_s=2e6, latency_s=0.002, samples=3)
        self._answers.append(link_measuring.LinkAnswer((self._node, target), reply))


def test_measuring_stops_at_its_budget_and_says_what_it_assumes() -> None:
    """Eight machines have 56 links. A wave a second and a budget of 3.5 s: four waves, the other links are assumed."""
    names = [f"n{index}" for index in range(8)]
    members = [Member(node=name, address=f"10.0.0.{index + 1}:7000", instance="i") for index, name in enumerate(names)]
    now_s, answers = [0.0], list[link_measuring.LinkAnswer]()
    calls: Any = {name: Calls(name, answers) for name in names}
    measuring = link_measuring.LinkMeasuring(
        members,
        calls,
        job(),
        MODEL,
        cache=LinkCache(),
        put=answers.append,
        budget_s=3.5,
        now_s=lambda: now_s[0],
    )
    measuring.go_on()
    while not measuring.is_done:
        now_s[0] += 0.25
        measuring.take(answers.pop(0))
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
