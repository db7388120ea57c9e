"""What a run leaves behind, over real gRPC with agents that need no torch: files, and the best result."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors import deserialize
from safetensors.numpy import load, load_file

from coordinator.client.checkpoints import RunCheckpoints, find_resume
from coordinator.client.run_folder import RunFolder
from coordinator.client.submit import Client
from coordinator.planner.given_plan import GivenPlan
from coordinator.planner.make_plan import make_plan
from coordinator.run.requests import RunRequest
from coordinator.screen.progress import PlainProgress, Progress, report_lines
from ringtune.costs.profile import Profile, Work
from ringtune.errors import DataError, IntegrityError
from ringtune.job.job import Job
from ringtune.schedule.turns import Turn
from ringtune.techniques.offload import helped
from ringtune.transport.status import abort
from tests.support.fake_agents import (
    CALL_S,
    NO_TIMES,
    FakeAgent,
    FakeCluster,
    block_tensor,
    facts,
    job,
    read_lines,
    run,
    steps_of,
    submit,
)


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


def test_run_whose_users_have_adapters_of_their_own_writes_a_folder_for_each(tmp_path: Path) -> None:
    """Whole folders with every block, the head in each; and no adapter of all. A third node fits the adapters."""
    asked = {"adapter__config": "lora", "train__method": "all"}
    helper_of = dict.fromkeys("ab", "c")
    plan = make_plan(job(**asked), {name: facts(name, **NO_TIMES) for name in "ab"}).plan
    wanted = job(**asked, offload__mode=helper_of, offload__users="alone")
    request = RunRequest(
        job=wanted, join_s=0.5, plan=GivenPlan(plan=helped(plan, helper_of, wanted.offload.helper_settings))
    )
    agents: dict[str, dict[str, Any]] = {"c": {"facts_changes": {"train_rows": 0, "eval_rows": 0}}}
    with FakeCluster("a", "b", "c", agents=agents) as cluster:
        submit(cluster, request, tmp_path)
    names = {"adapter.safetensors", "adapter_config.json", "head_config.json", "model_head.safetensors"}
    assert not (tmp_path / "adapter").exists()
    for number, user in enumerate("ab"):
        assert {path.name for path in (tmp_path / "users" / user).iterdir()} == names
        merged = load((tmp_path / "users" / user / "adapter.safetensors").read_bytes())
        assert {name: list(value) for name, value in merged.items()} == {
            block_tensor(block): [block + 10 * number] * 3 for block in range(4)
        }


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
    with FakeCluster("a", "b") as cluster:
        submit(cluster, RunRequest(job=job(train__turns="rows")), tmp_path, progress=PlainProgress(stream))
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
    assert json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]


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
            run(cluster, out, runtime__record=True)
        report = json.loads((out / "report.json").read_text())
        nodes = {name: {**node, "peak_rss_bytes": 0} for name, node in report["nodes"].items()}
        recording = (out / "recordings/a.jsonl").read_text()
        found.append((report["eval"], report["steps"], report["links"], nodes, recording))
    assert found[0] == found[1]
    assert found[0][0]["count"] == 10


LOSSES = {4: 0.5, 8: 0.3, 12: 0.4, 16: 0.35, 20: 0.2}
BEST = {"train.keep_best": True, "train.eval_every": 4, "train.checkpoint_every": 4}


def keeping(num_steps: int) -> Job:
    """So long a run, turns of two steps, an evaluation every four."""
    return job(train__max_steps=num_steps).with_overrides(BEST)


@pytest.fixture
def keeping_cluster() -> Iterator[FakeCluster]:
    """Two owners, whose tensors gain 100 in a step."""
    with FakeCluster("a", "b") as found:
        for agent in found.agents.values():
            agent.loss_of, agent.drift = lambda step: LOSSES.get(step, 0.6), 100
        yield found


def run_keeping(keeping_cluster: FakeCluster, out: Path, num_steps: int, *, resumes: bool = False) -> None:
    """Train so many steps, or go on."""
    wanted = keeping(num_steps)
    resume = find_resume(out, wanted, print) if resumes else None
    submit(keeping_cluster, RunRequest(job=wanted, resume=resume), out)


def step_of(folder: Path) -> float:
    """After which step the adapter was sent that lies there."""
    return float(load_file(folder / "adapter" / "adapter.safetensors")[block_tensor(0)][0]) / 100


def test_best_result_is_that_of_the_run(keeping_cluster: FakeCluster, tmp_path: Path) -> None:
    """Adapter, lines of evaluations and report say the same step; what no checkpoint needs any more is dropped."""
    run_keeping(keeping_cluster, tmp_path, 12)
    assert step_of(tmp_path) == 8
    evaluations = [line for line in read_lines(tmp_path / "metrics.jsonl") if line["kind"] == "evaluation"]
    assert [(line["step"], line["is_best"]) for line in evaluations] == [(4, True), (8, True), (12, False)]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["best"] == {"step": 8, "loss": pytest.approx(0.3)}
    assert report["eval"]["step"] == 8 and report["eval"]["loss"] == pytest.approx(0.3)
    result, risen = report_lines(report)[-2:]
    assert result.startswith("the result is that of step 8, the best evaluation: ") and "loss 0.3000 on " in result
    assert risen == "evaluation loss has risen since step 8 (0.3 -> 0.4): the result of step 8 is kept"
    assert step_of(tmp_path / "best" / "8") == 8
    assert sorted(entry.name for entry in (tmp_path / "best").iterdir()) == ["4", "8"]
    # A checkpoint is of no use without it
    shutil.rmtree(tmp_path / "best")
    why = r"checkpoint of step 12 can't be used: .*best/8, the best result until then"
    with pytest.raises(IntegrityError, match=why):
        find_resume(tmp_path, keeping(16), print)


def test_best_result_leaves_what_its_user_has_put_in_its_place(keeping_cluster: FakeCluster, tmp_path: Path) -> None:
    """A folder that came while the run trained is put aside and named; that of the run is the best result."""
    out, said = tmp_path / "run", list[str]()
    with RunFolder(out, say=said.append) as folder, Client(keeping_cluster.server.address) as client:
        (out / "adapter").mkdir()
        (out / "adapter/notes.txt").write_text("mine")
        client.run(RunRequest(job=keeping(12)), progress=Progress(), folder=folder)
        assert step_of(out) == 8 and not (out / "adapter/notes.txt").exists()
        folder.add_best(8, is_result=True)
    (aside,) = tmp_path.glob("run.replaced-*")
    assert (aside / "adapter/notes.txt").read_text() == "mine"
    assert said == [f"what was changed after the run wrote it is in {aside}: adapter"]


def test_best_result_of_the_last_step_is_sent_once(keeping_cluster: FakeCluster, tmp_path: Path) -> None:
    """The last evaluation is the best one: nodes are asked at the end only, as for any run."""
    run_keeping(keeping_cluster, tmp_path, 8)
    assert step_of(tmp_path) == 8
    assert sorted(entry.name for entry in (tmp_path / "best").iterdir()) == ["4"]
    assert [agent.log.count("collect") for agent in keeping_cluster.agents.values()] == [2, 2]


def test_best_result_of_a_run_that_is_made_longer(keeping_cluster: FakeCluster, tmp_path: Path) -> None:
    """The best step may be one of the part before, which lies in the folder, or a later one."""
    run_keeping(keeping_cluster, tmp_path, 12)
    run_keeping(keeping_cluster, tmp_path, 16, resumes=True)
    assert step_of(tmp_path) == 8
    assert json.loads((tmp_path / "report.json").read_text())["best"]["step"] == 8
    run_keeping(keeping_cluster, tmp_path, 22, resumes=True)
    assert step_of(tmp_path) == 20


def test_resumed_run_with_other_rows_is_refused_before_anything_is_written(
    keeping_cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nodes compare their rows when they are inspected, so no line is added, and none after the step is cut."""
    run_keeping(keeping_cluster, tmp_path, 12)
    (tmp_path / "report.json").unlink()
    RunCheckpoints(tmp_path).path(12).unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")}
    inspect, refused = FakeAgent.Inspect, DataError("owner a: its rows, or their order, are not those of the start")

    def compares(agent: FakeAgent, request: Any, context: Any) -> Any:
        return abort(context, refused) if request.rows_run else inspect(agent, request, context)

    monkeypatch.setattr(FakeAgent, "Inspect", compares)
    monkeypatch.setattr(FakeAgent, "Prepare", lambda _, request, context: abort(context, refused))
    with FakeCluster("a", "b") as others, pytest.raises(DataError, match="owner a: its rows"):
        run_keeping(others, tmp_path, 12, resumes=True)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")} == before
