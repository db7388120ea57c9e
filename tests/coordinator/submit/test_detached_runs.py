"""Runs that go on without their submitter: kept at the coordinator, stopped, ended with it, gone on with."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

import pytest

from coordinator.drive.requests import RunRequest
from coordinator.drive.run_driver import RunDriver
from coordinator.kept_runs.kept_runs import KeptRuns
from coordinator.run_folder.checkpoints import RunCheckpoints, find_resume
from coordinator.run_folder.folder import RunFolder
from coordinator.screen.progress import Progress
from coordinator.server.ending import Ending
from coordinator.submit.client import Client
from coordinator.submit.fetching import fetch_run
from coordinator.submit.interrupts import Interrupts
from coordinator.submit.stopping import stop_run
from ringtune.errors import ConnectionFailedError, InterruptedRunError, StorageError, UsageError
from ringtune.v1 import control_pb2
from tests.support.fake_agents import CALL_S, FakeCluster, steps_of
from tests.support.kept_runs import JOB, LONG, Gate, content, ended, keeping, start
from tests.support.tap import Tap

ADAPTER = ("adapter.safetensors", "adapter_config.json", "head_config.json", "model_head.safetensors")


def test_run_goes_on_when_nobody_follows_it_and_is_fetched_whole(tmp_path: Path) -> None:
    """The folder is that of a run that was followed; only then may the coordinator drop the books."""
    with keeping(tmp_path / "kept") as cluster, Client(cluster.server.address) as client:
        with RunFolder(tmp_path / "followed") as folder:
            client.run(RunRequest(job=JOB, num_nodes=2), progress=Progress(), folder=folder)
        record = ended(client, start(client))
        assert (record.state, record.steps_done, record.num_steps, record.is_fetched) == ("done", 8, 8, False)
        assert [entry.is_fetched for entry in client.runs()] == [True, False]
        fetch_run(client, record, tmp_path / "fetched", replace=False)
        assert [entry.is_fetched for entry in client.runs()] == [True, True]
    names = [
        sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        for folder in (tmp_path / "followed", tmp_path / "fetched")
    ]
    assert sorted([*names[0], "run.json"]) == names[1]
    assert content(tmp_path / "fetched") == content(tmp_path / "followed")
    assert RunCheckpoints(tmp_path / "fetched").steps() == (8, 6)
    assert [line["step"] for line in steps_of(tmp_path / "fetched/metrics.jsonl")] == list(range(1, 9))


def test_books_have_neither_rows_nor_the_content_of_the_nodes(tmp_path: Path) -> None:
    """What is kept are the events of a run, whose results are weights and figures."""
    with keeping(tmp_path / "kept") as cluster, Client(cluster.server.address) as client:
        run_id = start(client)
        ended(client, run_id)
        kinds = {event.WhichOneof("event") for event in client.events(run_id, wait=False, whole=True, with_files=True)}
        files = {
            event.file.path
            for event in client.events(run_id, wait=False, whole=True, with_files=True)
            if event.HasField("file")
        }
    assert kinds <= {
        *("run_id", "state", "job_toml", "profile_json", "plan_json", "metrics_json", "step_json", "report_json"),
        *("file", "checkpoint_json", "done", "note", "members_json"),
    }
    assert files == {"trace.json", *(f"adapter/{name}" for name in ADAPTER)}


def test_run_survives_the_connection_of_its_submitter(tmp_path: Path) -> None:
    """The error says how to come back; the nodes are told that older shards may go, as if somebody followed."""
    gate = Gate()
    with keeping(tmp_path / "kept", gate) as cluster:
        tap = Tap(int(cluster.server.address.rpartition(":")[2]))

        def cut(event: control_pb2.RunEvent) -> None:
            if event.state == "training":
                tap.close()

        with (
            Client(f"127.0.0.1:{tap.port}") as client,
            RunFolder(tmp_path / "out") as folder,
            pytest.raises(ConnectionFailedError) as lost,
        ):
            client.run(RunRequest(job=LONG, num_nodes=2), progress=Progress(), folder=folder, sinks=(cut,))
        assert client.goes_on
        gate.open.set()
        with Client(cluster.server.address) as again:
            (record,) = again.runs()
            assert f"'ringtune fetch {record.run_id} --coordinator {client.address}'" in str(lost.value)
            events = again.events(record.run_id, wait=True, whole=False, with_files=False)
            assert next(event for event in events if '"step": 60' in event.step_json)
            again.stop_run(record.run_id, "enough", now=True)
            assert ended(again, record.run_id).state == "stopped"
        assert max(cluster.agents["a"].keeps_from) >= 2


def test_full_disk_of_the_submitter_does_not_end_the_run(tmp_path: Path) -> None:
    """Exit code 9 for the submitter, and its files can be fetched."""

    def full(event: control_pb2.RunEvent) -> None:
        if event.HasField("plan_json"):
            raise StorageError("no room")

    with keeping(tmp_path / "kept") as cluster, Client(cluster.server.address) as client:
        with RunFolder(tmp_path / "out") as folder, pytest.raises(StorageError, match="goes on without this command"):
            client.run(RunRequest(job=JOB, num_nodes=2), progress=Progress(), folder=folder, sinks=(full,))
        (record,) = client.runs()
        assert ended(client, record.run_id).state == "done"


def test_full_disk_of_the_coordinator_ends_the_run_with_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The submitter hears of the coordinator's disk, and what was saved before can be gone on from."""
    gate = Gate()
    with keeping(tmp_path / "kept", gate) as cluster, Client(cluster.server.address) as client:
        kept = cluster.server.coordinator.kept

        def fill(event: control_pb2.RunEvent) -> None:
            if event.checkpoint_json and json.loads(event.checkpoint_json)["step"] == 4:
                (run,) = kept._runs.values()

                def refuse(_event: control_pb2.RunEvent) -> None:
                    raise StorageError("can't write: No space left on device")

                monkeypatch.setattr(run._log, "append", refuse)

        cluster.server.coordinator.sinks.append(fill)
        gate.open.set()
        with RunFolder(tmp_path / "out") as folder, pytest.raises(StorageError, match="No space left"):
            client.run(RunRequest(job=LONG, num_nodes=2), progress=Progress(), folder=folder)
    assert RunCheckpoints(tmp_path / "out").steps()[0] == 2
    assert find_resume(tmp_path / "out", LONG, print) is not None


def test_run_is_stopped_from_outside_and_goes_on_where_it_was(tmp_path: Path) -> None:
    """``stop`` saves; the folder of both runs together is that of one run."""
    gate = Gate()
    with keeping(tmp_path / "kept", gate) as cluster, Client(cluster.server.address) as client:
        run_id = start(client, LONG)
        assert gate.reached.wait(CALL_S)
        threading.Timer(0.2, gate.open.set).start()
        said = stop_run(client, run_id, now=False, wait_s=CALL_S)
        record = ended(client, run_id)
        assert record.state == "stopped" and record.can_go_on
        assert said == f"run {run_id}: {record.message}"
        assert record.message.endswith(f"with a checkpoint of step {record.saved_step}")
        assert "stopped by " in record.message and "@" in record.message
        with pytest.raises(UsageError, match="is not driven there now"):
            stop_run(client, run_id, now=False, wait_s=CALL_S)

        fetch_run(client, record, tmp_path / "first", replace=False)
        short = LONG.with_overrides({})
        resume = find_resume(tmp_path / "first", short, print)
        gate.open.clear()
        gate.reached.clear()
        second = client.start(RunRequest(job=short, num_nodes=0, join_s=5.0, resume=resume))
        assert gate.reached.wait(CALL_S)
        gate.open.set()
        client.stop_run(second, "enough", now=True)
        going_on = ended(client, second)
        assert going_on.first_run == run_id
        assert going_on.saved_step >= record.saved_step
        fetch_run(client, going_on, tmp_path / "both", replace=False)
    steps = [line["step"] for line in steps_of(tmp_path / "both/metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= record.steps_done
    assert json.loads((tmp_path / "both/parts/stops.json").read_text()) == [record.saved_step]


def test_coordinator_that_is_ended_saves_its_run_first(tmp_path: Path) -> None:
    """It is stopped, not interrupted: it can go on from where it was."""
    gate = Gate()
    with keeping(tmp_path / "kept", gate) as cluster, Client(cluster.server.address) as client:
        run_id = start(client, LONG)
        gate.open.set()
        Ending().save(cluster.server.coordinator)
        record = ended(client, run_id)
        assert cluster.server.coordinator.driven() == ""
    assert record.state == "stopped" and record.can_go_on
    assert record.message == f"the coordinator was stopped, with a checkpoint of step {record.saved_step}"


def test_coordinator_ends_only_after_the_last_words_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is not driven any more while it writes its profile, its trace and its end; nobody follows this one."""
    reached, go_on = threading.Event(), threading.Event()
    finish, join = RunDriver._finish_files, RunDriver.join

    def slow(driver: RunDriver) -> None:
        reached.set()
        assert go_on.wait(CALL_S)
        finish(driver)

    def awaited(driver: RunDriver, timeout_s: float) -> bool:
        go_on.set()
        return join(driver, timeout_s)

    monkeypatch.setattr(RunDriver, "_finish_files", slow)
    monkeypatch.setattr(RunDriver, "join", awaited)
    with keeping(tmp_path / "kept") as cluster, Client(cluster.server.address) as client:
        run_id = start(client)
        assert reached.wait(CALL_S)
        assert cluster.server.coordinator.driven() == ""
    with contextlib.closing(KeptRuns(tmp_path / "kept")) as again:
        assert again.records()[run_id].state == "done"
        assert list(again.events(run_id, wait=False))[-1].done


def test_second_ctrl_c_ends_a_kept_run_at_once(tmp_path: Path) -> None:
    """It does not end with the call, so it is told."""
    gate = Gate()
    interrupts = Interrupts()
    with keeping(tmp_path / "kept", gate) as cluster, Client(cluster.server.address) as client:

        def stop(event: control_pb2.RunEvent) -> None:
            if event.state == "training":
                raise KeyboardInterrupt

        with RunFolder(tmp_path / "out") as folder, pytest.raises(InterruptedRunError):
            client.run(
                RunRequest(job=JOB, num_nodes=2),
                progress=Progress(),
                folder=folder,
                interrupts=interrupts,
                sinks=(stop,),
            )
        (record,) = client.runs()
        assert ended(client, record.run_id).state == "stopped"
        gate.open.set()


def test_coordinator_of_a_local_run_keeps_nothing_and_says_so() -> None:
    """Its runs end with their submitter."""
    with FakeCluster("a", "b") as cluster, Client(cluster.server.address) as client:
        with pytest.raises(UsageError, match="keeps no runs"):
            client.runs()
        with pytest.raises(UsageError, match="keeps no runs"):
            start(client)
        assert cluster.agents["a"].released.wait(CALL_S)
