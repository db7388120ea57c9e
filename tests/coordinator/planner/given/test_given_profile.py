"""A run with a given profile plans by its times, and refuses one of something else; the run corrects it in the end."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.drive.requests import RunRequest
from coordinator.planner.given.given_profile import read_profile, with_given_times
from coordinator.run_folder.folder import RunFolder
from coordinator.screen.progress import Progress
from coordinator.submit.client import Client
from ringtune.costs.measured.measuring import job_shape
from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.costs.work_times import WHOLE_WORKS, Work, WorkTime
from ringtune.errors import PlanError
from tests.support.fake_agents import MODEL, NO_TIMES, FakeCluster, facts, job

SHAPE = job_shape(job())
POINTS = tuple(
    WorkTime(work=work, rows=2, tokens=8, median_s=0.5, low_s=0.4, high_s=0.7, samples=3) for work in WHOLE_WORKS
)
LINK = LinkFacts(source="a", target="b", rate_bytes_per_s=1e6, latency_s=0.1)
BACK = dataclasses.replace(LINK, source="b", target="a")


def measured(name: str, **changes: Any) -> NodeFacts:
    """A node as ``ringtune measure`` writes it."""
    values = {"rows": 3, "shape": SHAPE, "work_times": POINTS, "hardware": "Made-up 3000", **changes}
    return facts(name, **values)


def train(cluster: FakeCluster, folder: Path, profile: Profile, **changes: object) -> Profile:
    """A run with a given profile; gives the one that it leaves."""
    with Client(cluster.server.address) as client, RunFolder(folder) as files:
        client.run(RunRequest(job=job(**changes), num_nodes=2, profile=profile), progress=Progress(), folder=files)
    return read_profile(folder / "profile.json")


def test_given_times_replace_measured_ones_and_nothing_else() -> None:
    """Rows, labels and memory are those of today; links of other nodes are left out."""
    live = {name: facts(name, rows=7, memory_bytes=5, train_tokens=9.0, **NO_TIMES) for name in "ab"}
    other = LinkFacts(source="a", target="z", rate_bytes_per_s=1e6, latency_s=0.1)
    given = Profile(nodes=tuple(measured(name) for name in "abz"), links=(LINK, other))
    found = with_given_times(live, given)
    assert found.links == (LINK,) and [node.node for node in found.nodes] == ["a", "b"]
    expected = dataclasses.replace(
        live["a"],
        block_forward_s=0.001,
        block_graph_s=0.0011,
        block_backward_s=0.0012,
        shape=SHAPE,
        work_times=POINTS,
        hardware="Made-up 3000",
    )
    assert found.by_name["a"] == expected


def test_given_times_that_a_run_recorded_have_its_messages_in_them() -> None:
    """What messages take from computing is not counted a second time in the next plan."""
    live = {"a": facts("a", **NO_TIMES)}
    for was_recorded in (True, False):
        found = with_given_times(live, Profile(nodes=(measured("a", has_messages=was_recorded),)))
        assert found.by_name["a"].has_messages is was_recorded


def test_run_with_a_given_profile_measures_nothing(tmp_path: Path) -> None:
    """Nodes are asked for rows only; the profile of the run has the given times and links."""
    given = Profile(nodes=(measured("a"), measured("b")), links=(LINK, BACK))
    with FakeCluster("a", "b") as cluster:
        found = train(cluster, tmp_path / "run", given)
        assert not any(agent.inspected.measure for agent in cluster.agents.values())
    assert found.links == (LINK, BACK)
    assert found.by_name["a"].train_rows == 10
    assert found.by_name["b"].work_times[0] == POINTS[0]


def test_run_corrects_the_profile_by_its_own_actions(tmp_path: Path) -> None:
    """The fake nodes take a quarter of a second for each head: eight training steps are enough to say so."""
    given = Profile(nodes=(measured("a"), measured("b")))
    with FakeCluster("a", "b") as cluster:
        found = train(cluster, tmp_path / "run", given, train__rounds=6)
    heads = [point for point in found.by_name["a"].work_times if point.work == Work.HEAD]
    assert heads[-1].median_s == pytest.approx(0.25) and heads[-1].samples >= 12
    assert [point for point in found.by_name["a"].work_times if point.work == Work.FORWARD] == [
        point for point in POINTS if point.work == Work.FORWARD
    ]
    assert json.loads((tmp_path / "run" / "profile.json").read_text())["schema"] == 3


def test_run_without_a_profile_asks_nodes_to_measure_beside_their_neighbours(tmp_path: Path) -> None:
    """Both are on this machine and will compute at the same time; a run takes a second for it, not four."""
    with FakeCluster("a", "b") as cluster:
        with Client(cluster.server.address) as client:
            client.run(RunRequest(job=job(), num_nodes=2), progress=Progress(), folder=None)
        asked = [agent.inspected for agent in cluster.agents.values()]
    assert [(one.measure, one.neighbours, one.fresh) for one in asked] == [(True, 1, False)] * 2
    assert all(0 < one.measure_s <= 1 for one in asked)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((measured("a"),), "the profile lacks node b; measure anew"),
        (
            (measured("a"), measured("b", model=dataclasses.replace(MODEL, digest="cd" * 32))),
            "node b was profiled with another model",
        ),
        (
            (measured("a"), measured("b", shape=dataclasses.replace(SHAPE, tokens=16))),
            "node b was profiled with tokens 16, the job has 8",
        ),
    ],
)
def test_run_refuses_a_profile_of_something_else(tmp_path: Path, nodes: tuple[NodeFacts, ...], message: str) -> None:
    """A node that is missing, another model, another shape: each is named, and nothing is trained."""
    with FakeCluster("a", "b") as cluster:
        with pytest.raises(PlanError, match=message):
            train(cluster, tmp_path / "run", Profile(nodes=nodes))
        assert not any("prepare" in agent.log for agent in cluster.agents.values())


@pytest.mark.parametrize("content", ["", "{", '{"schema": 1}', "[]", '{"schema": 2, "nodes": [{"node": "a"}]}'])
def test_profile_file_that_can_not_be_used_is_named(tmp_path: Path, content: str) -> None:
    """With the remedy."""
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(PlanError, match="profile"):
        read_profile(path)
    with pytest.raises(PlanError, match="make it with 'ringtune measure'"):
        read_profile(tmp_path / "absent.json")
