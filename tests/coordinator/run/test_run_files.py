"""What a run leaves behind, over real gRPC with agents that need no torch: metrics, report, trace and adapter."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors import deserialize
from safetensors.numpy import load

from coordinator.client.run_folder import RunFolder
from coordinator.client.submit import Client
from coordinator.planner.given_plan import GivenPlan
from coordinator.planner.make_plan import make_plan
from coordinator.run.requests import RunRequest
from coordinator.screen.progress import PlainProgress, Progress
from ringtune.costs.profile import Profile, Work
from ringtune.errors import (
    DataError,
    IntegrityError,
)
from ringtune.schedule.turns import Turn
from ringtune.techniques.offload import helped
from tests.support.fake_agents import (
    CALL_S,
    NO_TIMES,
    FakeAgent,
    FakeCluster,
    block_tensor,
    facts,
    job,
    read_lines,
    steps_of,
)
from tests.support.fake_runs import run


def test_run_writes_the_whole_folder(tmp_path: Path) -> None:
    """A good run leaves job, plan, profile, metrics, report, trace and adapter, and nothing half done.

    Metrics have a line for each step, the adapter each block once, the trace each action, and the report sums up.
    """
    with FakeCluster("a", "b") as cluster:
        run(cluster, tmp_path, unfreeze__every_steps=3)
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert names == [
        ".ringtune-lock",
        ".ringtune-run",
        ".ringtune-written",
        "adapter/adapter.safetensors",
        "adapter/adapter_config.json",
        "adapter/head_config.json",
        "adapter/model_head.safetensors",
        "checkpoints/step-8.json",
        "job.toml",
        "metrics.jsonl",
        "plan.json",
        "profile.json",
        "report.json",
        "trace.json",
    ]
    merged = dict(deserialize((tmp_path / "adapter/adapter.safetensors").read_bytes()))
    assert sorted(merged) == [block_tensor(block) for block in range(4)]
    lines = steps_of(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["initiator"] for line in lines] == ["a", "a", "b", "b"] * 2
    assert [line["round"] for line in lines] == [1] * 4 + [2] * 4
    assert [line["depth"] for line in lines] == [1, 1, 1, 2, 2, 2, 3, 3]
    assert {(line["loss"], line["lr"]) for line in lines} == {(0.5, 1e-3)}
    assert [line["seconds"] for line in lines[1:]] == [1.0] * 7
    # two micro-batches: a sends a hidden state and a gradient of each, b a hidden state
    assert lines[0]["bytes"] == {"a>b": 40, "b>a": 20}
    assert lines[0]["gradient_bytes"] == {"a>b": 20}
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["steps"] == 8
    assert report["eval"] == {"step": 8, "accuracy": 4 / 10, "loss": 0.5, "rows": 10, "count": 10}
    assert set(report["nodes"]) == {"a", "b"}
    node = report["nodes"]["a"]
    assert (node["peak_rss_bytes"], node["hosted_bytes"], node["sent_bytes"]) == (7, 1234, report["links"]["a>b"])
    assert node["busy_s"] == pytest.approx(6 * 0.25)
    assert report["wall_s"] >= sum(report["phases_s"].values()) - 0.1
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["a", "b"]
    assert sum(event["ph"] == "X" for event in events) == 12


def _run_of_users(folder: Path, **options: Any) -> None:
    """Two owners who have adapters of their own, which a third node fits."""
    asked = {"adapter__config": "lora", "train__method": "all"}
    helper_of = dict.fromkeys("ab", "c")
    plan = make_plan(job(**asked), {name: facts(name, **NO_TIMES) for name in "ab"}).plan
    wanted = job(**asked, offload__mode=helper_of, offload__users="alone")
    request = RunRequest(job=wanted, join_s=0.5, plan=GivenPlan(plan=helped(plan, helper_of, wanted.offload.manner)))
    agents: dict[str, dict[str, Any]] = {"c": {"facts_changes": {"train_rows": 0, "eval_rows": 0}}, "b": options}
    with (
        FakeCluster("a", "b", "c", agents=agents) as cluster,
        Client(cluster.server.address) as client,
        RunFolder(folder) as files,
    ):
        client.run(request, progress=Progress(), folder=files)


def test_run_whose_users_have_adapters_of_their_own_writes_a_folder_for_each(tmp_path: Path) -> None:
    """Whole folders with every block, the head in each; and no adapter of all."""
    _run_of_users(tmp_path)
    names = {"adapter.safetensors", "adapter_config.json", "head_config.json", "model_head.safetensors"}
    assert not (tmp_path / "adapter").exists()
    for number, user in enumerate("ab"):
        assert {path.name for path in (tmp_path / "users" / user).iterdir()} == names
        merged = load((tmp_path / "users" / user / "adapter.safetensors").read_bytes())
        assert {name: list(value) for name, value in merged.items()} == {
            block_tensor(block): [block + 10 * number] * 3 for block in range(4)
        }


def test_run_without_the_adapters_of_a_user_has_no_result(tmp_path: Path) -> None:
    """A node that leaves a user out ends the run with the file's name, and nothing is written of the others."""
    with pytest.raises(IntegrityError, match=r"the nodes sent users/b/adapter\.safetensors with 0 numbers in block"):
        _run_of_users(tmp_path, without_user="b")
    assert not (tmp_path / "users").exists()


def test_run_metrics_have_the_evaluations_and_its_report_the_steps_of_unfreezing(tmp_path: Path) -> None:
    """Each evaluation stands after the last step before it, under that step's number, as in the report.

    The report has the steps of every form of unfreezing, so that any run can be repeated with them.
    """
    with FakeCluster("a", "b") as cluster:
        run(cluster, tmp_path, train__eval_every=4, unfreeze__at=[3, 7, 99])
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] in ("train", "evaluation")] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    found = [line for line in lines if line["kind"] == "evaluation"]
    assert [(line["accuracy"], line["loss"], line["rows"]) for line in found] == [(0.4, 0.5, 10)] * 2
    report = json.loads((tmp_path / "report.json").read_text())
    assert [{"kind": "evaluation", **entry} for entry in report["evaluations"]] == found
    assert report["unfreeze_at"] == [3, 7]
    assert "unfreeze" not in (tmp_path / "metrics.jsonl").read_text()


def test_run_says_what_it_trains_on_and_how_long_before_it_trains(tmp_path: Path) -> None:
    """In the opening lines and in the report: two owners of ten rows, eight steps of four; and the predicted time."""
    stream = io.StringIO()
    with FakeCluster("a", "b") as cluster, RunFolder(tmp_path) as folder, Client(cluster.server.address) as client:
        client.run(RunRequest(job=job(train__turns="rows")), progress=PlainProgress(stream), folder=folder)
    lines = stream.getvalue().splitlines()
    opening = lines[: lines.index("training ...")]
    assert "trains 8 steps in 2 rounds (turns of 2 steps, by rows): 20 of 20 rows (100%), 1.6 epochs" in opening
    assert "  a  4 steps of 4 rows: 10 of its 10 rows, each 1 to 3 times" in opening
    assert "2 classes: neg, pos" in opening
    assert any(line.startswith("predicted: ") for line in opening)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["training"]["used_share"], report["training"]["classes"]) == (1.0, ["neg", "pos"])
    assert report["training"]["owners"]["b"]["steps"] == 4
    assert report["predicted_steps_s"] > 0


def test_run_that_fails_leaves_a_profile_of_what_it_recorded(tmp_path: Path) -> None:
    """Node a's heads took 0.25 s each until it failed: the profile in the folder says so."""

    def work_and_fail(agent: FakeAgent, turns: list[Turn]) -> None:
        agent.stub.Report(agent.report(turns), timeout=CALL_S)
        request = agent.report([])
        request.error, request.message = "DataError", "data/a.csv is gone"
        agent.stub.Report(request, timeout=CALL_S)

    with (
        FakeCluster("a", "b", agents={"a": {"on_grant": work_and_fail}}) as cluster,
        pytest.raises(DataError, match="is gone"),
    ):
        run(cluster, tmp_path / "out", train__local_iterations=8)
    profile = Profile.from_json(json.loads((tmp_path / "out" / "profile.json").read_text(encoding="utf-8")))
    heads = [point for point in profile.by_name["a"].work_times if point.work == Work.HEAD]
    assert [point.median_s for point in heads] == [pytest.approx(0.25)]


def test_run_counts_a_repeated_report_once(tmp_path: Path) -> None:
    """A node that did not hear that its report arrived sends it again: no step, byte, second or line counts twice."""

    def send(agent: FakeAgent, turns: list[Turn], times: int) -> None:
        request = agent.report(turns)
        request.recording = f"turns {[turn.index for turn in turns]}\n"
        for _ in range(times):
            agent.stub.Report(request, timeout=CALL_S)

    found = []
    for times in (1, 3):
        out = tmp_path / str(times)
        agents = {name: {"on_grant": partial(send, times=times)} for name in "ab"}
        with FakeCluster("a", "b", agents=agents) as cluster:
            run(cluster, out)
        report = json.loads((out / "report.json").read_text())
        nodes = {name: {**node, "peak_rss_bytes": 0} for name, node in report["nodes"].items()}
        recording = (out / "recordings/a.jsonl").read_text()
        found.append((report["eval"], report["steps"], report["links"], nodes, recording))
    assert found[0] == found[1]
    assert found[0][0]["count"] == 10


def test_run_refuses_a_tensor_that_two_nodes_sent(tmp_path: Path) -> None:
    """Results that contradict each other are no results: no adapter is written."""
    with (
        FakeCluster("a", "b", agents={"b": {"claims": (0, 1)}}) as cluster,
        pytest.raises(IntegrityError, match=r"node b sent .*layer\.0\.x' of a block that it does not answer for"),
    ):
        run(cluster, tmp_path)
    assert not (tmp_path / "adapter").exists()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
