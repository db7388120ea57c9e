"""Runs that continue without their submitter: kept, stopped, fetched, and their folder written anew."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.client import detached_runs as module
from coordinator.client import submit
from coordinator.client.checkpoints import RunCheckpoints, find_resume
from coordinator.client.detached_runs import fetch_run, fetched_folder, find_run, only_run, stop_run, update_run_folder
from coordinator.client.follow import Outcome, show_events
from coordinator.client.run_folder import WRITTEN, RunFolder
from coordinator.client.saved_run import RunLocation, read_place, read_run
from coordinator.client.submit import Client, Interrupts
from coordinator.run.driver import Driver
from coordinator.run.requests import RunRequest
from coordinator.run.run_driver import RunWork
from coordinator.screen.listing import run_table, runs_json
from coordinator.screen.progress import JsonProgress, Progress
from coordinator.server.coordinator import Coordinator, ShutdownSignals
from coordinator.server.run_record import RunRecord
from coordinator.server.run_store import RunStore, StoredRun
from ringtune.errors import BusyError, ConnectionFailedError, InterruptedRunError, StorageError, UsageError
from ringtune.storage.durable import rename_durably
from ringtune.v1 import control_pb2
from tests.support.fake_agents import CALL_S, FakeCluster, job, steps_of
from tests.support.kept_runs import JOB, LONG, Gate, breaking_when_it_trains, content, ended, keeping, start
from tests.support.saved_runs import contents, write_run

PLACE = RunLocation(run_id="r20260102-030405-00000000", coordinator="x:1", is_local=False, pid=1)


def fetch(out: Path) -> None:
    """Replace a run's folder by a small one."""
    with fetched_folder(out, replace=True, goes_on=False) as folder:
        PLACE.write(folder.path)
        for name in ("plan.json", "report.json", "checkpoints/step-8.json", "adapter/adapter.safetensors"):
            folder.write_text(name, "{}")


def test_fetched_folder_goes_on_with_a_copy(tmp_path: Path) -> None:
    """Metrics grow in the copy; the log of the command stays, and what the run put away is gone from its old place."""
    out = write_run(tmp_path / "run")
    (out / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n', encoding="utf-8")
    (out / "run.log").write_text("said", encoding="utf-8")
    with fetched_folder(out, replace=False, goes_on=True) as folder:
        folder.add_metrics('{"kind": "train", "step": 2}')
        folder.rewind_to(2)
        assert len((out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 1
    assert len((out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    assert (out / "run.log").read_text(encoding="utf-8") == "said"
    assert not (out / "report.json").exists() and not (out / "adapter").exists()
    assert (out / "parts/1/adapter/adapter.safetensors").is_file()
    assert not (out / "fetching").exists()


def test_fetched_folder_has_the_users_of_the_run_that_came_and_no_other(tmp_path: Path) -> None:
    """A user of the run that was there before is not left among them."""
    out = tmp_path / "run"
    for users in (("anna", "ben"), ("anna",)):
        with fetched_folder(out, replace=True, goes_on=False) as folder:
            for user in users:
                folder.write_text(f"users/{user}/adapter.safetensors", "{}")
        assert sorted(path.name for path in (out / "users").iterdir()) == list(users)


@pytest.mark.parametrize("goes_on", [False, True])
def test_fetched_folder_keeps_what_the_same_run_has_not_written(tmp_path: Path, goes_on: bool) -> None:
    """Notes, a link and files of the run that the user changed are put aside, and told; the run's own ones go."""
    out, said = tmp_path / "run", list[str]()
    chunk = control_pb2.FileChunk(path="trace.json", chunk=b"[")

    def fetch_again(step: int) -> None:
        with fetched_folder(out, replace=True, goes_on=goes_on, is_same=True, say=said.append) as folder:
            for name in ("job.toml", "plan.json", f"checkpoints/step-{step}.json", "adapter/README.md"):
                folder.write_text(name, f"steps: {step}, and as many lines as there are: {'x' * step}")
            folder.add_metrics(f'{{"kind": "train", "step": {step}}}')
            folder.add_chunk(chunk)

    fetch_again(4)
    fetch_again(8)
    assert not list(tmp_path.glob("run.replaced-*")) and not said, "all of it was the run's"
    for name in ("adapter/notes.txt", "adapter/README.md", "job.toml"):
        (out / name).write_text("mine", encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/plan.json").write_text("mine", encoding="utf-8")
    (out / "checkpoints/link").symlink_to(tmp_path / "elsewhere")
    fetch_again(12)
    (aside,) = tmp_path.glob("run.replaced-*")
    left = sorted(str(path.relative_to(aside)) for path in aside.rglob("*") if not path.is_dir() or path.is_symlink())
    changed = ["adapter/README.md", "adapter/notes.txt", "checkpoints/link", "job.toml"]
    if goes_on:  # what is not replaced is in the folder too
        changed.remove("adapter/notes.txt")
        assert (out / "adapter/notes.txt").read_text(encoding="utf-8") == "mine"
    assert left == changed
    assert all((aside / name).read_text(encoding="utf-8") == "mine" for name in left if not name.endswith("link"))
    assert (tmp_path / "elsewhere/plan.json").is_file()
    named = ", ".join(changed[:3]) + " and 1 more" * (len(changed) > 3)
    assert said == [f"files that were changed after the run wrote them are in {aside}: {named}"]
    assert (out / "adapter/README.md").read_text(encoding="utf-8").startswith("steps: 12")
    fetch_again(16)
    assert len(list(tmp_path.glob("run.replaced-*"))) == len(said) == 1, "what is in the folder is the run's again"


def test_fetched_folder_whose_writer_was_killed_keeps_what_differs(tmp_path: Path) -> None:
    """Nobody wrote down what is the run's: what it has again, or goes on with, goes; the rest is put aside."""
    out, said = tmp_path / "run", list[str]()
    for metrics, profile in (("1\n", "a"), ("1\n2\n", "b")):
        with fetched_folder(out, replace=True, goes_on=False, is_same=True, say=said.append) as folder:
            folder.write_text("metrics.jsonl", metrics)
            folder.write_text("profile.json", profile)
            folder.write_text("plan.json", "{}")
        (out / WRITTEN).unlink()
    (aside,) = tmp_path.glob("run.replaced-*")
    assert [path.name for path in aside.iterdir()] == ["profile.json"]
    assert said == [f"files that were changed after the run wrote them are in {aside}: profile.json"]


@pytest.mark.parametrize("calls", range(5))
def test_fetched_folder_that_is_cut_short_does_not_look_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Wherever the change ends, the folder tells its place, and has a report and checkpoints only if it has all."""
    out = write_run(tmp_path / "run")
    (out / "checkpoints").mkdir()
    left = [calls]

    def rename_some(path: Path, target: Path) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StorageError("killed")
        rename_durably(path, target)

    monkeypatch.setattr(module, "rename_durably", rename_some)
    with pytest.raises(StorageError, match="killed"):
        fetch(out)
    assert read_place(out) == (PLACE if calls else None)
    has = [(out / name).exists() for name in ("adapter", "plan.json", "checkpoints/step-8.json", "report.json")]
    assert has == [number < calls - 1 for number in range(4)]
    (aside,) = tmp_path.glob("run.replaced-*")
    assert read_run(aside).report["steps"] == 8, "the earlier run is whole"


ADAPTER = ("adapter.safetensors", "adapter_config.json", "head_config.json", "model_head.safetensors")


def test_run_goes_on_when_nobody_follows_it_and_is_fetched_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is that of a run that was followed; only then may the coordinator drop the books.

    These are the events of a run, whose results are weights and figures; its log is what a submitter would have seen.
    """
    with keeping(tmp_path / "kept") as cluster, Client(cluster.server.address) as client:
        with RunFolder(tmp_path / "followed") as folder:
            client.run(RunRequest(job=JOB, num_nodes=2), progress=Progress(), folder=folder)
        record = ended(client, start(client))
        assert (record.state, record.steps_done, record.num_steps, record.is_fetched) == ("done", 8, 8, False)
        assert [entry.is_fetched for entry in client.runs()] == [True, False]
        events = list(client.events(record.run_id, wait=False, whole=True, with_files=True))
        fetch_run(client, record, tmp_path / "fetched", replace=False)
        assert [entry.is_fetched for entry in client.runs()] == [True, True]
        show_events(client, record.run_id, follow=True, progress=JsonProgress(sys.stdout))
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["event"] for line in lines].count("step") >= 8 and lines[-1]["event"] == "report"
        assert run_table(client.runs())[2].split()[:3] == [record.run_id, "done", "model"]
        assert runs_json(client.runs())[1]["num_steps"] == 8
    names = [
        sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        for folder in (tmp_path / "followed", tmp_path / "fetched")
    ]
    assert sorted([*names[0], "run.json"]) == names[1]
    assert content(tmp_path / "fetched") == content(tmp_path / "followed")
    assert RunCheckpoints(tmp_path / "fetched").steps() == (8, 6)
    assert [line["step"] for line in steps_of(tmp_path / "fetched/metrics.jsonl")] == list(range(1, 9))
    assert {event.WhichOneof("event") for event in events} <= {
        *("run_id", "state", "job_toml", "profile_json", "plan_json", "metrics_json", "step_json", "report_json"),
        *("file", "checkpoint_json", "done", "note", "members_json"),
    }
    files = {event.file.path for event in events if event.HasField("file")}
    assert files == {"trace.json", *(f"adapter/{name}" for name in ADAPTER)}


def test_run_survives_the_connection_of_its_submitter(tmp_path: Path) -> None:
    """The error says how to come back; the nodes are told that older shards may go, as if somebody followed."""
    gate = Gate()
    with keeping(tmp_path / "kept", gate) as cluster:
        address, cut = breaking_when_it_trains(cluster)
        with (
            Client(address) as client,
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
        with RunFolder(tmp_path / "out") as folder, pytest.raises(StorageError, match="continues without this command"):
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


def test_run_is_stopped_from_outside_and_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``stop`` saves; the folder of both runs together is that of one run."""
    gate, drain = Gate(), Driver.drain

    def drained(driver: Driver, reason: str) -> None:
        drain(driver, reason)
        gate.open.set()

    monkeypatch.setattr(Driver, "drain", drained)
    with keeping(tmp_path / "kept", gate) as cluster, Client(cluster.server.address) as client:
        run_id = start(client, LONG)
        assert gate.reached.wait(CALL_S)
        said = stop_run(client, run_id, now=False, wait_s=CALL_S)
        record = ended(client, run_id)
        assert record.state == "stopped" and record.is_resumable
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
        client.stop_run(second, "enough", now=True)
        going_on = ended(client, second)
        gate.open.set()
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
        ShutdownSignals().save(cluster.server.coordinator)
        record = ended(client, run_id)
        assert cluster.server.coordinator.driven() == ""
    assert record.state == "stopped" and record.is_resumable
    assert record.message == f"the coordinator was stopped, with a checkpoint of step {record.saved_step}"


def test_coordinator_ends_only_after_the_last_words_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is not driven any more while it writes its profile, its trace and its end; nobody follows this one."""
    reached, go_on = threading.Event(), threading.Event()
    finish, join = RunWork.finish_files, Driver.join

    def slow(work: RunWork) -> None:
        reached.set()
        assert go_on.wait(CALL_S)
        finish(work)

    def awaited(driver: Driver, timeout_s: float) -> bool:
        go_on.set()
        return join(driver, timeout_s)

    monkeypatch.setattr(RunWork, "finish_files", slow)
    monkeypatch.setattr(Driver, "join", awaited)
    with keeping(tmp_path / "kept") as cluster, Client(cluster.server.address) as client:
        run_id = start(client)
        assert reached.wait(CALL_S)
        assert cluster.server.coordinator.driven() == ""
    with contextlib.closing(RunStore(tmp_path / "kept")) as again:
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


def test_ctrl_c_before_the_id_of_a_run_ends_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stored already, so that it would train without its submitter, who was told that it does not."""
    gate, take = Gate(), Outcome.__call__

    def stop(outcome: Outcome, event: control_pb2.RunEvent) -> None:
        take(outcome, event)
        if event.kept:
            raise KeyboardInterrupt

    monkeypatch.setattr(Outcome, "__call__", stop)
    with keeping(tmp_path / "kept", gate) as cluster, Client(cluster.server.address) as client:
        with pytest.raises(InterruptedRunError, match="stopped before it trained"):
            start(client)
        (record,) = client.runs()
        assert ended(client, record.run_id).state == "stopped"
        gate.open.set()


def test_ctrl_c_before_a_run_has_begun_ends_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command waits for the run that its coordinator is about to store, and the coordinator for its driver."""
    gate, begin, driver_of = Gate(), RunStore.begin, Coordinator.driver_of
    interrupted, asked = threading.Event(), threading.Event()

    def stop(_call: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def late(store: RunStore, *given: Any, **more: Any) -> StoredRun:
        assert interrupted.wait(CALL_S)
        return begin(store, *given, **more)

    def ask(coordinator: Coordinator, run_id: str) -> Driver:
        asked.set()
        return driver_of(coordinator, run_id)

    monkeypatch.setattr(RunStore, "begin", late)
    monkeypatch.setattr(Coordinator, "driver_of", ask)
    with keeping(tmp_path / "kept", gate) as cluster, Client(cluster.server.address) as client:
        monkeypatch.setattr(cluster.server.coordinator.offers, "put", lambda *_: asked.wait(CALL_S))
        monkeypatch.setattr(client, "heard", stop)
        with pytest.raises(InterruptedRunError, match=r"^stopped; every node"):
            client.run(RunRequest(job=JOB, num_nodes=2), progress=Progress(), folder=None)
        monkeypatch.undo()
        (record,) = client.runs()
        assert ended(client, record.run_id).state == "stopped"
        gate.open.set()


def test_ctrl_c_before_a_run_begins_that_takes_too_long_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run may train later, so the error has the commands that list and end it."""
    begin, left = RunStore.begin, threading.Event()

    def late(store: RunStore, *given: Any, **more: Any) -> StoredRun:
        assert left.wait(CALL_S)
        return begin(store, *given, **more)

    def stop(_call: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunStore, "begin", late)
    monkeypatch.setattr(submit, "CALL_S", 0.0)
    with keeping(tmp_path / "kept") as cluster, Client(cluster.server.address) as client:
        monkeypatch.setattr(client, "heard", stop)
        with pytest.raises(InterruptedRunError, match="has not begun the run") as told:
            client.run(RunRequest(job=JOB, num_nodes=2), progress=Progress(), folder=None)
        assert f"'ringtune stop RUN --coordinator {client.address}'" in str(told.value)
        left.set()


def test_coordinator_of_a_local_run_keeps_nothing_and_says_so() -> None:
    """Its runs end with their submitter."""
    with FakeCluster("a", "b") as cluster, Client(cluster.server.address) as client:
        with pytest.raises(UsageError, match="stores no runs"):
            client.runs()
        with pytest.raises(UsageError, match="stores no runs"):
            start(client)
        assert cluster.agents["a"].released.wait(CALL_S)


def test_folder_is_brought_up_to_date_before_its_run_goes_on(tmp_path: Path) -> None:
    """What the run did after the connection was lost is fetched first; while it goes on, this is refused."""
    gate = Gate()
    out = tmp_path / "out"
    with keeping(tmp_path / "kept", gate) as cluster, Client(cluster.server.address) as client:
        run_id = start(client, LONG)
        with RunFolder(out):
            RunLocation(run_id=run_id, coordinator=client.address, is_local=False, pid=1).write(out)
        assert gate.reached.wait(CALL_S)
        with pytest.raises(BusyError, match="is running; follow it with 'ringtune logs"):
            update_run_folder(client, out)
        gate.open.set()
        stop_run(client, run_id, now=False, wait_s=CALL_S)
        assert update_run_folder(client, out).startswith(f"fetched the events of run {run_id} that")
        assert update_run_folder(client, out) == ""
        assert find_resume(out, LONG, print) is not None


@pytest.mark.parametrize("checkpoint_every", [0, 2])
def test_run_that_is_done_is_fetched_and_not_trained_again(tmp_path: Path, checkpoint_every: int) -> None:
    """A folder with its last checkpoint is not all of it, and some runs have none: what counts is its own report."""
    wanted, out = job(train__checkpoint_every=checkpoint_every), tmp_path / "out"
    with keeping(tmp_path / "kept") as cluster, Client(cluster.server.address) as client:
        run_id = start(client, wanted)
        record = ended(client, run_id)
        assert (record.state, record.saved_step) == ("done", 8 if checkpoint_every else -1)
        with RunFolder(out) as folder:
            RunLocation(run_id=run_id, coordinator=client.address, is_local=False, pid=1).write(out)
            if record.saved_step > 0:
                folder.write_text(f"checkpoints/step-{record.saved_step}.json", "{}")
        for damage in (
            lambda: None,
            lambda: (out / "report.json").unlink(),
            lambda: (out / "report.json").write_text('{"run_id": "of an earlier part"}', encoding="utf-8"),
            lambda: (out / "trace.json").rename(out / "trace.json.part"),
        ):
            damage()
            told = update_run_folder(client, out).split("; ")
            assert told[0] == f"fetched the events of run {run_id} that this folder lacked, up to step 8"
            aside = list(tmp_path.glob("out.replaced-*"))
            assert told[1:] == [
                f"files that were changed after the run wrote them are in {path}: report.json" for path in aside
            ]
            for path in aside:
                assert (path / "report.json").read_text(encoding="utf-8") == '{"run_id": "of an earlier part"}'
                path.rename(tmp_path / "seen")
            assert update_run_folder(client, out) == ""
            with pytest.raises(UsageError, match="is finished, nothing was changed; its results are there"):
                find_resume(out, wanted, print)
        assert (tmp_path / "seen").is_dir(), "a report that somebody else wrote is told once, and kept"


def cut_off(client: Client, monkeypatch: pytest.MonkeyPatch, *, after: str) -> None:
    """Let the connection be lost after the first event of a kind while a run is fetched."""
    whole = client.events

    def events(run_id: str, **options: bool) -> Iterator[control_pb2.RunEvent]:
        for event in whole(run_id, wait=False, whole=True, with_files=options["with_files"]):
            yield event
            if event.WhichOneof("event") == after:
                raise ConnectionFailedError("the connection is lost")

    monkeypatch.setattr(client, "events", events)


def test_fetch_that_is_cut_off_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there stays, in a folder that is new nothing does, and the next fetch gets all."""
    out, new = tmp_path / "out", tmp_path / "new"
    with keeping(tmp_path / "kept") as cluster, Client(cluster.server.address) as client:
        record = ended(client, start(client))
        fetch_run(client, record, out, replace=False)
        (out / "checkpoints/step-8.json").unlink()  # as of a run that was followed to an earlier step
        (out / "mine.txt").write_text("not of the run", encoding="utf-8")
        before = contents(out)
        for after in ("job_toml", "plan_json", "checkpoint_json"):
            with monkeypatch.context() as lost:
                cut_off(client, lost, after=after)
                for folder, replace in ((out, True), (new, False)):
                    with pytest.raises(ConnectionFailedError, match="is lost"):
                        fetch_run(client, record, folder, replace=replace)
            assert contents(out) == before
            assert not new.exists()
        with pytest.raises(UsageError, match="already holds a run"):
            fetch_run(client, record, out, replace=False)
        assert contents(out) == before
        fetch_run(client, record, out, replace=True)
        assert set(contents(out)) == {*before, "checkpoints/step-8.json"}


def test_run_is_found_by_id_by_folder_or_because_it_is_alone(tmp_path: Path) -> None:
    """A folder tells where its run is driven; more than one run has to be named."""
    run_id = "r20260102-030405-00000000"
    assert find_run("", "x:1") == ("", "x:1", None, None)
    assert find_run(run_id, "x:1") == (run_id, "x:1", None, None)
    with pytest.raises(UsageError, match="neither the id of a run nor its folder"):
        find_run(str(tmp_path / "none"), "x:1")
    with pytest.raises(UsageError, match="has no record of where"):
        find_run(str(tmp_path), "x:1")
    place = RunLocation(run_id=run_id, coordinator="y:2", is_local=True, pid=7, local_nodes=3)
    place.write(tmp_path)
    assert read_place(tmp_path) == place
    assert find_run(str(tmp_path), "x:1") == (run_id, "y:2", place, tmp_path)
    one = RunRecord(run_id=run_id, first_run=run_id, model="", method="", submitted_by="", started_unix_s=0.0)
    assert only_run({run_id: one}, lambda _: True, "run") is one
    after = replace(one, run_id="r20260102-030406-00000000", takes_up=run_id)
    both = {run_id: one, after.run_id: after}
    assert only_run(both, lambda _: True, "run") is after, "it goes on with the other one"
    interrupted = replace(one, state="interrupted", message="the coordinator ended before the run did")
    assert run_table([interrupted, after])[-1].endswith(f"ended before the run did; {after.run_id} resumes it")
    with pytest.raises(UsageError, match="there is no new run"):
        only_run(both, lambda record: record.is_fetched, "new run")
    with pytest.raises(UsageError, match=f"more than one run at this coordinator: {run_id}, {after.run_id}; name one"):
        only_run({**both, after.run_id: replace(after, takes_up="")}, lambda _: True, "run")
