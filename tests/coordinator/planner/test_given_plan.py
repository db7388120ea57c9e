"""A plan or a profile that the user gives: a run carries it out, or refuses one of something else."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.plan import plan as plan_for_nodes
from coordinator.api.train import local_ring
from coordinator.client.run_folder import RunFolder
from coordinator.client.submit import Client
from coordinator.planner.given_plan import (
    GivenPlan,
    accept_plan,
    read_given_plan,
    read_profile,
    require_members,
    with_given_times,
)
from coordinator.planner.limits import Choices
from coordinator.planner.make_plan import make_plan
from coordinator.run.events import EventSink
from coordinator.run.requests import RunRequest
from coordinator.screen.progress import Progress
from ringtune import __version__
from ringtune.costs.measurement import job_shape
from ringtune.costs.profile import WHOLE_WORKS, LinkFacts, NodeFacts, Profile, Work, WorkTime
from ringtune.errors import CapacityError, DataError, DeadlineError, ModelError, PlanError, RingTuneError, UsageError
from ringtune.job.job import Job
from ringtune.schedule.plan import Plan
from tests.support.cases import cases
from tests.support.fake_agents import MODEL, NO_TIMES, FakeCluster, facts, job


def two() -> dict[str, NodeFacts]:
    """The facts of both nodes of the small ring."""
    return {name: facts(name) for name in "ab"}


def given(wanted: Job | None = None, **choices: Any) -> GivenPlan:
    """What ``ringtune plan`` writes for the two nodes."""
    plan = make_plan(wanted or job(), two(), **choices).plan
    return GivenPlan(plan=plan, version=__version__, model_digest=MODEL.digest)


def test_given_plan_is_carried_out_as_it_is() -> None:
    """Micro-batches, wire dtype and slices may be others than the planner would choose now; memory is known."""
    plan = given(microbatches=(4,), wire_dtypes=("bfloat16",)).plan
    moved = [
        dataclasses.replace(piece, start=at, stop=to)
        for piece, at, to in zip(plan.placement.slices, (0, 1), (1, 4), strict=True)
    ]
    plan = Plan.of(plan.course, dataclasses.replace(plan.placement, slices=tuple(moved), credits=1))
    made = accept_plan(GivenPlan(plan=plan), job(), two())
    assert made.plan == plan and sorted(made.memory) == ["a", "b"]
    # PipeAdapter counts the hosts above each block: the job's method is compared as it is on the plan's own ring
    wanted = job(train__method="pipeadapter")
    plan = given(wanted).plan
    slices = tuple(
        dataclasses.replace(piece, start=at, stop=to)
        for piece, at, to in zip(plan.placement.slices, (0, 3), (3, 4), strict=True)
    )
    uneven = Plan.of(plan.course, dataclasses.replace(plan.placement, slices=slices))
    assert uneven.course.method != plan.course.method
    assert accept_plan(GivenPlan(plan=uneven), wanted, two()).plan == uneven


def test_given_plan_without_the_private_blocks_of_the_job_is_refused() -> None:
    """Else a host would get what only owners are to see."""
    wanted = job(privacy__private_blocks=1)
    plan = given(wanted).plan
    lowest, *others = plan.placement.slices
    slices = (dataclasses.replace(lowest, start=0), *others)
    bare = Plan.of(plan.course, dataclasses.replace(plan.placement, private_blocks=0, slices=slices))
    with pytest.raises(PlanError, match="0 private blocks, the job says"):
        accept_plan(GivenPlan(plan=bare), wanted, two())


def test_given_plan_reads_back_from_its_file(tmp_path: Path) -> None:
    """The file of the command, its line, and the bare plan of a run."""
    wanted = given()
    (tmp_path / "file.json").write_text(json.dumps({"event": "plan", **wanted.to_json(), "memory": {}}))
    (tmp_path / "bare.json").write_text(json.dumps(wanted.plan.to_json()))
    assert read_given_plan(tmp_path / "file.json") == wanted
    assert read_given_plan(tmp_path / "bare.json") == GivenPlan(plan=wanted.plan)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "can't read the plan .*plan.json"),
        ("{", "is not JSON"),
        ("[]", "is no table"),
        ("{}", r"plan schema None is not 2"),
        (json.dumps({**given().to_json(), "version": "0.0.1"}), "made by ringtune 0.0.1, this is"),
        (json.dumps({**given().to_json(), "version": 7}), "have to be text"),
    ],
)
def test_given_plan_that_is_none_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    """The error names the file and the remedy."""
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=message) as caught:
        read_given_plan(path)
    assert str(path) in str(caught.value)


def with_model(nodes: dict[str, NodeFacts], **changes: Any) -> dict[str, NodeFacts]:
    """The nodes with another model."""
    model = dataclasses.replace(MODEL, **changes)
    return {name: dataclasses.replace(node, model=model) for name, node in nodes.items()}


PLANNED = given()
BARE = GivenPlan(plan=PLANNED.plan)
OF_ONE_OWNER = GivenPlan(plan=make_plan(job(), {**two(), "b": facts("b", rows=0)}).plan)
PACKED = dataclasses.replace(PLANNED.plan, course=dataclasses.replace(PLANNED.plan.course, packed=True))
OTHER_NODES = {
    "rows": {**two(), "b": facts("b", rows=11)},
    "names": {"a": facts("a"), "c": facts("c")},
    "memory": {**two(), "a": facts("a", memory_bytes=1)},
    "model": with_model(two(), digest="cd" * 32),
    "width": with_model(two(), hidden_size=2 * MODEL.hidden_size),
}


@cases(
    ("plan", "nodes", "error", "message"),
    [
        (PLANNED, "rows", DataError, "node b has 11 training and 5 evaluation rows, the plan says 10 and 5"),
        (OF_ONE_OWNER, "", DataError, "node b has 10 training and 5 evaluation rows, the plan says 0 and 0"),
        (PLANNED, "names", PlanError, "the plan is for the nodes a, b; b not among a, c"),
        (PLANNED, "model", ModelError, "the plan is for model abab.*, the nodes have cdcd"),
        (BARE, "width", PlanError, r"hidden_size = 8, the job says 16 \(model.path\)"),
        (GivenPlan(plan=PACKED), "", PlanError, r"packed = True, the job says False \(train.packing\)"),
        (PLANNED, "memory", CapacityError, "node a needs .* but has 1 B"),
    ],
)
def test_given_plan_does_not_fit_other_nodes(
    plan: GivenPlan, nodes: str, error: type[RingTuneError], message: str
) -> None:
    """Names, rows, model and memory."""
    with pytest.raises(error, match=message):
        accept_plan(plan, job(), OTHER_NODES.get(nodes, two()))


@cases(
    ("changes", "message"),
    [
        ({"train__batch_size": 8}, r"batch_size = 4, the job says 8 \(train.batch_size\)"),
        ({"train__rounds": 3}, r"the job says 12 \(train.rounds, train.epochs or train.max_steps\)"),
        ({"train__seed": 3}, r"seed = 0, the job says 3"),
        ({"privacy__private_blocks": 1}, "frozen_blocks = 0, the job says 1"),
        ({"unfreeze__every_steps": 3}, r"method = .*, the job says .* \(train\.method, \[unfreeze\]\); change it, or"),
        ({"data__labels": ["neg", "pos", "so"]}, r"labels = .* \(data.labels\)"),
    ],
)
def test_given_plan_does_not_fit_another_job(changes: dict[str, object], message: str) -> None:
    """Every key of the job that the planner does not choose."""
    with pytest.raises(PlanError, match=message):
        accept_plan(PLANNED, job(**changes), two())


def test_members_of_a_local_ring_are_checked_before_any_is_started() -> None:
    """The names of a local ring are known beforehand."""
    require_members(given().plan, ["a", "b", "c"])
    with pytest.raises(PlanError, match="a, b not among node-0, node-1: give the same nodes, or plan anew"):
        require_members(given().plan, ["node-0", "node-1"])


def test_resume_of_a_local_ring_with_other_nodes_is_refused_before_any_is_started() -> None:
    """The shards of missing nodes are named, or the owners whose rows would be shared otherwise."""
    begun = make_plan(job(data__train="rows.csv"), {f"node-{number}": facts(f"node-{number}") for number in range(3)})
    nodes, owners = begun.plan.nodes, len(begun.plan.course.all_owners)
    assert (nodes, owners) == (("node-0", "node-1", "node-2"), 3)
    for num_nodes, message in (
        (2, "node-0, node-1, node-2; --local 2 lacks node-2, give the same number"),
        (4, "3 nodes owned data when the run began, --local 4 would share it among 4; give the same number"),
    ):
        ring = local_ring(job(data__train="rows.csv"), num_nodes, Progress(), goes_on=begun.plan)
        with pytest.raises(UsageError, match=re.escape(message)), ring:
            pytest.fail("it was started")


# ---- the whole way ---------------------------------------------------------------------------------


def trained_plan(folder: Path, cluster: FakeCluster, *sinks: EventSink, **options: Any) -> Plan:
    """The plan that a run on the cluster says that it carried out."""
    with Client(cluster.server.address) as client, RunFolder(folder) as files:
        client.run(RunRequest(job=job(), join_s=0.5, **options), progress=Progress(), folder=files, sinks=sinks)
    return Plan.from_json(json.loads((folder / "plan.json").read_text()))


def test_run_carries_a_given_plan_out(tmp_path: Path) -> None:
    """Every node prepares that very plan; another member is not asked for, and its rows are named."""
    wanted = given(microbatches=(1,), wire_dtypes=("float16",))
    notes: list[str] = []
    with FakeCluster("a", "b", "c") as cluster:
        found = trained_plan(tmp_path, cluster, lambda event: notes.append(event.note), plan=wanted)
        assert "inspect" not in cluster.agents["c"].log
    assert found == wanted.plan
    assert "not in the given plan, so their rows are not trained on: c" in notes


def test_run_waits_for_the_nodes_of_a_given_plan(tmp_path: Path) -> None:
    """The error says that it is the plan that wants them."""
    with FakeCluster("a") as cluster, pytest.raises(DeadlineError, match="for node b: the given plan is for the nodes"):
        trained_plan(tmp_path, cluster, plan=given())


def test_plan_and_run_decide_alike(tmp_path: Path) -> None:
    """Same facts, same choices: what a run decides is what the planner says beforehand, digest and all."""
    choices = Choices(microbatches=(1, 2, 4), wire_dtypes=("float32", "bfloat16"))
    with FakeCluster("a", "b", agents={"a": {"facts_changes": {"cut_rows": 3}}}) as cluster:
        with Client(cluster.server.address) as client:
            planned, profile, _ = client.plan(job(), num_nodes=2, join_s=0.5, choices=choices)
        trained = trained_plan(tmp_path, cluster, choices=choices)
        shown = plan_for_nodes(job(), coordinator=cluster.server.address, nodes=2, join_s=0.5, explain=True)
    assert shown.why is not None and shown.rows == ("3 rows are longer than train.max_length = 8 tokens and are cut",)
    text = "\n".join(shown.lines())
    assert (text.count("searched "), text.count(shown.rows[0])) == (1, 1)
    here = make_plan(job(), profile.by_name, links=profile.links, **choices._asdict())
    assert planned.digest == trained.digest == here.plan.digest
    assert (trained.course.microbatches, trained.course.wire_dtype) == (1, "float32")  # not the job's 2


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
    # What messages take from computing is not counted a second time in the next plan
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


def test_run_refuses_a_profile_of_something_else(tmp_path: Path) -> None:
    """A node that is missing is named, and nothing is trained."""
    with FakeCluster("a", "b") as cluster:
        with pytest.raises(PlanError, match="the profile lacks node b; measure anew"):
            train(cluster, tmp_path / "run", Profile(nodes=(measured("a"),)))
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
