"""A whole run over real gRPC with agents that need no torch: its files, its failures, its end."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors import deserialize

from coordinator.drive import agent_calls
from coordinator.drive.requests import RunRequest
from coordinator.drive.run_driver import RunDriver
from coordinator.planner.make_plan import make_plan
from coordinator.run_folder.folder import RunFolder
from coordinator.screen.progress import PlainProgress, Progress
from coordinator.submit.client import Client
from coordinator.submit.outcome import Outcome
from ringtune.costs.profile import Profile
from ringtune.costs.work_times import Work
from ringtune.errors import (
    BusyError,
    CapacityError,
    DataError,
    DeadlineError,
    IntegrityError,
    InterruptedRunError,
    JobError,
    ModelError,
    PeerLostError,
    RingTuneError,
    StorageError,
)
from ringtune.schedule.turns import Turn
from ringtune.v1 import control_pb2
from tests.support.fake_agents import CALL_S, MODEL, NO_TIMES, FakeAgent, FakeCluster, job, read_lines, steps_of
from tests.support.fake_agents import facts as fake_facts


def run(cluster: FakeCluster, folder: Path | None = None, *, num_nodes: int = 2, **changes: object) -> Outcome:
    """Submit the small job and follow it to its end."""
    with Client(cluster.server.address) as client:
        if folder is None:
            return client.run(
                RunRequest(job=job(**changes), num_nodes=num_nodes, join_s=0.5), progress=Progress(), folder=None
            )
        with RunFolder(folder) as files:
            return client.run(RunRequest(job=job(**changes), num_nodes=num_nodes), progress=Progress(), folder=files)


def test_run_writes_the_whole_folder(tmp_path: Path) -> None:
    """A good run leaves job, plan, profile, metrics, report, trace and adapter, and nothing half done."""
    with FakeCluster("a", "b") as cluster:
        run(cluster, tmp_path / "out")
    names = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert names == [
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


@pytest.mark.promise("7 bounded memory")
def test_run_that_can_not_fit_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    """Train and plan refuse with the same two numbers; a measurement of such a job would itself use up the memory."""
    little = {"facts_changes": {"memory_bytes": 1500, "activation_token_bytes": 250}}
    with FakeCluster("a", "b", agents={"a": little, "b": little}) as cluster:
        with pytest.raises(CapacityError) as refused:
            run(cluster)
        asked = [agent.inspected.measure for agent in cluster.agents.values()]
        facts = {name: fake_facts(name, memory_bytes=1500, **NO_TIMES) for name in ("a", "b")}
        with pytest.raises(CapacityError) as planned:
            make_plan(job(), facts)
    assert asked == [False, False]
    assert str(refused.value) == str(planned.value)


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


@pytest.mark.promise("6 every wait ends")
def test_run_that_fails_with_text_that_can_not_be_encoded_ends_for_its_submitter() -> None:
    """Half an emoji in a label is valid JSON; the error that names it is escaped, and the submitter hears it."""
    other = {"facts_changes": {"labels": ("\ud83d", "pos")}}
    with FakeCluster("a", "b", agents={"b": other}) as cluster, pytest.raises(DataError, match="ud83d"):
        run(cluster, data__labels=["neg", "pos"])


@pytest.mark.promise("6 every wait ends")
def test_run_whose_last_files_fail_by_a_bug_ends_for_its_submitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last event comes all the same, and says what failed."""
    finish = RunDriver._finish_files

    def broken(driver: RunDriver) -> None:
        finish(driver)
        raise ValueError("no such figure")

    heard: list[control_pb2.RunEvent] = []
    monkeypatch.setattr(RunDriver, "_finish_files", broken)
    with FakeCluster("a", "b") as cluster:
        cluster.server.coordinator.sinks.append(heard.append)
        with pytest.raises(RingTuneError, match="internal error, ValueError: no such figure"):
            run(cluster)
    assert heard[-1].WhichOneof("event") == "failure"


@pytest.mark.parametrize("name", ["gettempdir", "TemporaryDirectory"])
def test_run_without_room_for_what_nodes_send_names_the_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A full temporary folder is no bug: exit code 9 and the folder, whether it is found or only can't be written."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, name, full)
    with FakeCluster("a", "b") as cluster, pytest.raises(StorageError, match="No space left on device"):
        run(cluster)


def test_run_merges_the_blocks_of_all_nodes(tmp_path: Path) -> None:
    """The adapter file has every block exactly once, whoever hosted it."""
    with FakeCluster("a", "b") as cluster:
        run(cluster, tmp_path)
    merged = dict(deserialize((tmp_path / "adapter/adapter.safetensors").read_bytes()))
    assert sorted(merged) == [f"block.{block}" for block in range(4)]


def test_run_metrics_have_a_line_for_each_step(tmp_path: Path) -> None:
    """Eight steps: each with its number, loss, rate, seconds and the bytes of each link."""
    with FakeCluster("a", "b") as cluster:
        run(cluster, tmp_path, unfreeze__every_steps=3)
    lines = steps_of(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["initiator"] for line in lines] == ["a", "a", "b", "b"] * 2
    assert [line["round"] for line in lines] == [1] * 4 + [2] * 4
    assert [line["depth"] for line in lines] == [1, 1, 1, 2, 2, 2, 3, 3]
    assert {line["loss"] for line in lines} == {0.5}
    assert {line["lr"] for line in lines} == {1e-3}
    assert [line["seconds"] for line in lines[1:]] == [1.0] * 7
    # two micro-batches: a sends a hidden state and a gradient of each, b a hidden state
    assert lines[0]["bytes"] == {"a>b": 40, "b>a": 20}
    assert lines[0]["gradient_bytes"] == {"a>b": 20}


def test_run_metrics_have_the_evaluations_too(tmp_path: Path) -> None:
    """Each stands after the last step before it, under that step's number, as in the report."""
    with FakeCluster("a", "b") as cluster:
        run(cluster, tmp_path, train__eval_every=4)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] in ("train", "evaluation")] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    found = [line for line in lines if line["kind"] == "evaluation"]
    assert [(line["accuracy"], line["loss"], line["rows"]) for line in found] == [(0.4, 0.5, 10)] * 2
    report = json.loads((tmp_path / "report.json").read_text())
    assert [{"kind": "evaluation", **entry} for entry in report["evaluations"]] == found


def test_run_says_what_it_trains_on_and_how_long_before_it_trains(tmp_path: Path) -> None:
    """In the opening lines and in the report: two owners of ten rows, eight steps of four; and the predicted time."""
    stream = io.StringIO()
    with FakeCluster("a", "b") as cluster, RunFolder(tmp_path) as folder, Client(cluster.server.address) as client:
        client.run(RunRequest(job=job(train__turns="rows")), progress=PlainProgress(stream), folder=folder)
    lines = stream.getvalue().splitlines()
    opening = lines[: lines.index("training ...")]
    assert "trains 8 steps in 2 rounds (turns of 2 steps, by rows): 20 of 20 rows (100%), 1.6 passes" in opening
    assert "  a  4 steps of 4 rows: 10 of its 10 rows, each 1 to 3 times" in opening
    assert "2 classes: neg, pos" in opening
    assert any(line.startswith("predicted: ") for line in opening)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["training"]["used_share"], report["training"]["classes"]) == (1.0, ["neg", "pos"])
    assert report["training"]["owners"]["b"]["steps"] == 4
    assert report["predicted_steps_s"] > 0


def test_run_that_decides_unfreezes_by_its_losses(tmp_path: Path) -> None:
    """The loss of these agents rests: what was decided stands in metrics before its steps, and in the report."""
    with FakeCluster("a", "b") as cluster:
        run(cluster, tmp_path, train__max_steps=16, unfreeze__at="auto", unfreeze__patience_steps=2)
    lines = read_lines(tmp_path / "metrics.jsonl")
    decided = [{"kind": "unfreeze", "step": 8, "depth": 2}, {"kind": "unfreeze", "step": 12, "depth": 3}]
    assert [line for line in lines if line["kind"] == "unfreeze"] == decided
    numbers = [*range(1, 9), 8, *range(9, 13), 12, *range(13, 17)]
    assert [line["step"] for line in lines if "depth" in line] == numbers
    assert [line["depth"] for line in lines if line["kind"] == "train"] == [1] * 8 + [2] * 4 + [3] * 4
    assert json.loads((tmp_path / "report.json").read_text())["unfreeze_at"] == [8, 12]


def test_run_report_has_the_steps_of_every_form_of_unfreezing(tmp_path: Path) -> None:
    """So that any run can be repeated with its steps."""
    with FakeCluster("a", "b") as cluster:
        run(cluster, tmp_path, unfreeze__at=[3, 7, 99])
    assert json.loads((tmp_path / "report.json").read_text())["unfreeze_at"] == [3, 7]
    assert "unfreeze" not in (tmp_path / "metrics.jsonl").read_text()


def test_run_report_sums_up(tmp_path: Path) -> None:
    """Accuracy over both owners' rows, bytes of all links, and each node's own totals."""
    with FakeCluster("a", "b") as cluster:
        run(cluster, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["steps"] == 8
    assert report["eval"] == {"accuracy": 4 / 10, "loss": 0.5, "rows": 10, "count": 10}
    assert set(report["nodes"]) == {"a", "b"}
    assert report["nodes"]["a"]["peak_rss_bytes"] == 7
    assert report["nodes"]["a"]["hosted_bytes"] == 1234
    assert report["nodes"]["a"]["busy_s"] == pytest.approx(6 * 0.25)
    assert report["nodes"]["a"]["sent_bytes"] == report["links"]["a>b"]
    assert report["wall_s"] >= sum(report["phases_s"].values()) - 0.1


def test_run_trace_is_valid_json(tmp_path: Path) -> None:
    """The trace has a process for each node and its actions as complete events."""
    with FakeCluster("a", "b") as cluster:
        run(cluster, tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["a", "b"]
    assert sum(event["ph"] == "X" for event in events) == 12


def test_run_plan_only_prepares_nobody() -> None:
    """Asked for a plan, the coordinator inspects (once for sizes, once for times), plans and releases."""
    with FakeCluster("a", "b") as cluster, Client(cluster.server.address) as client:
        came = client.run(RunRequest(job=job(), plan_only=True), progress=Progress(), folder=None)
        logs = [agent.log for agent in cluster.agents.values()]
    assert came.plan is not None
    assert [(piece.node, piece.start, piece.stop) for piece in came.plan.placement.slices] == [("a", 0, 2), ("b", 2, 4)]
    assert set(came.memory) == {"a", "b"}
    assert logs == [["inspect", "inspect", "release"]] * 2


def test_run_takes_nodes_with_data_first() -> None:
    """Of three members two are wanted: the one without data stays idle."""
    with FakeCluster("a", "b", "c", agents={"a": {"rows": 0}}) as cluster:
        came = run(cluster, num_nodes=2)
        assert cluster.agents["a"].log == []
    assert came.plan is not None
    assert came.plan.nodes == ("b", "c")


@pytest.mark.parametrize("phase", ["inspect", "prepare", "grant", "collect"])
def test_run_ends_with_the_error_of_a_node(phase: str) -> None:
    """Whenever a node fails, its own error comes out, named, and every node is released."""
    failing = {"fails_at": {phase: ModelError("the weights are gone; copy them again")}}
    with FakeCluster("a", "b", agents={"b": failing}) as cluster:
        with pytest.raises(ModelError, match="node b: the weights are gone"):
            run(cluster)
        assert all(agent.released.wait(CALL_S) for agent in cluster.agents.values())
        assert not any(agent.is_finished for agent in cluster.agents.values())


def test_run_tells_nodes_whether_it_is_finished() -> None:
    """Only then may they drop their shards one day; a run that failed can be gone on with."""
    with FakeCluster("a", "b") as cluster:
        run(cluster)
        assert all(agent.released.wait(CALL_S) for agent in cluster.agents.values())
        assert all(agent.is_finished for agent in cluster.agents.values())


def test_run_ends_when_a_node_reports_an_error() -> None:
    """An error in a report counts like one in an answer, and names its node."""

    def fail(agent: FakeAgent, turns: list[Turn]) -> None:
        request = agent.report([])
        request.error, request.message = "DataError", "data/b.csv: row 7 has no text"
        agent.stub.Report(request, timeout=CALL_S)

    with (
        FakeCluster("a", "b", agents={"b": {"on_grant": fail}}) as cluster,
        pytest.raises(DataError, match=r"node b: .*row 7"),
    ):
        run(cluster)


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


def test_run_blames_the_node_that_others_lost() -> None:
    """If a node is silent and its neighbour lost its link, the neighbour's report ends the run after a moment."""

    def complain(agent: FakeAgent, turns: list[Turn]) -> None:
        request = agent.report([])
        request.error, request.message, request.lost_peer = "PeerLostError", "node a lost its link with node b", "b"
        agent.stub.Report(request, timeout=CALL_S)

    silent = {"on_grant": lambda agent, turns: None}
    with (
        FakeCluster("a", "b", agents={"a": {"on_grant": complain}, "b": silent}) as cluster,
        pytest.raises(PeerLostError, match="lost its link with node b"),
    ):
        run(cluster)


def test_run_ends_when_a_node_was_started_again() -> None:
    """The process that was prepared is gone although its name is alive: nobody would wait for its lease in vain."""

    def restart(agent: FakeAgent, turns: list[Turn]) -> None:
        agent.stub.Leave(control_pb2.LeaveRequest(node=agent.node, instance=agent.address), timeout=CALL_S)
        agent.join(instance="another process")

    with (
        FakeCluster("a", agents={"a": {"on_grant": restart}}) as cluster,
        pytest.raises(PeerLostError, match="node a is lost: it has left, or was started again"),
    ):
        run(cluster, num_nodes=1, runtime__wait_s=2.0)


def test_run_ends_when_a_call_fails_by_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody foresaw ends the run at once, by name, instead of being waited for."""

    def broken(*_: object, **__: object) -> dict[str, bytes]:
        raise KeyError("oops")

    monkeypatch.setattr(agent_calls, "write_any_files", broken)
    with FakeCluster("a") as cluster, pytest.raises(RingTuneError, match="node a: internal error, KeyError: 'oops'"):
        run(cluster, num_nodes=1, runtime__wait_s=2.0)


def test_run_declares_a_silent_node_lost() -> None:
    """A node that was not heard of for a whole lease ends the run with its name and both numbers."""
    silent = {"on_grant": lambda agent, turns: None}
    with (
        FakeCluster("a", lease_s=0.6, agents={"a": silent}) as cluster,
        pytest.raises(PeerLostError, match=r"node a is lost: last heard of .* lease is 0\.6 s"),
    ):
        run(cluster, num_nodes=1, runtime__lease_s=0.6)


def test_run_ends_when_a_node_is_gone() -> None:
    """A node whose port is closed is lost, not an unreachable coordinator."""
    with FakeCluster("a", "b") as cluster:
        cluster.agents["b"].close()
        with pytest.raises(PeerLostError, match=r"node b at .* does not answer"):
            run(cluster)


@pytest.mark.promise("6 every wait ends")
def test_run_ends_when_nobody_makes_progress() -> None:
    """The longest wait of the job has an end, and the error names who was awaited."""
    silent = {"on_grant": lambda agent, turns: None}
    with (
        FakeCluster("a", "b", agents={"b": silent}) as cluster,
        pytest.raises(DeadlineError, match=r"waited [0-9.]+ s for turn 0 .* not done by b"),
    ):
        run(cluster, runtime__wait_s=0.7)


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
        assert [type(error) for error in ended] == [InterruptedRunError]
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


def test_run_refuses_reports_without_a_number() -> None:
    """A node of another version, whose reports could not be told apart, ends the run by name."""

    def send(agent: FakeAgent, turns: list[Turn]) -> None:
        request = agent.report(turns)
        request.number = 0
        agent.stub.Report(request, timeout=CALL_S)

    agents: dict[str, Any] = {"b": {"on_grant": send}}
    with FakeCluster("a", "b", agents=agents) as cluster, pytest.raises(IntegrityError, match="node b has no number"):
        run(cluster)


@pytest.mark.promise("6 every wait ends")
def test_run_waits_for_nodes_no_longer_than_asked() -> None:
    """Two nodes are wanted and one is there: the error says who has joined."""
    with (
        FakeCluster("a") as cluster,
        pytest.raises(DeadlineError, match=r"waited 0\.5 s for 2 nodes, 1 have joined \(a\)"),
    ):
        run(cluster)


def test_run_needs_a_node() -> None:
    """Without any member a run that takes whoever is there ends at once."""
    with FakeCluster() as cluster, pytest.raises(CapacityError, match="no node has joined"):
        run(cluster, num_nodes=0)


def test_run_refuses_a_shorter_lease_than_the_coordinators() -> None:
    """A lease that the coordinator can't keep is refused by name instead of ignored."""
    with FakeCluster("a") as cluster, pytest.raises(JobError, match=r"runtime\.lease_s = 3 is shorter"):
        run(cluster, num_nodes=1, runtime__lease_s=3.0)


def test_run_refuses_facts_of_another_model() -> None:
    """Nodes with different models are named before anything is built."""
    other = {"facts_changes": {"model": dataclasses.replace(MODEL, digest="cd" * 32)}}
    with (
        FakeCluster("a", "b", agents={"b": other}) as cluster,
        pytest.raises(ModelError, match="a and b have different"),
    ):
        run(cluster)


def test_run_refuses_a_tensor_that_two_nodes_sent(tmp_path: Path) -> None:
    """Results that contradict each other are no results: no adapter is written."""
    with (
        FakeCluster("a", "b", agents={"b": {"claims": (0, 1)}}) as cluster,
        pytest.raises(IntegrityError, match=r"both sent tensor block\.0"),
    ):
        run(cluster, tmp_path)
    assert not (tmp_path / "adapter").exists()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
