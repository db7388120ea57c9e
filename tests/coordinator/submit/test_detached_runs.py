"""Runs that go on without their submitter: kept at the coordinator, followed, stopped, gone on with, fetched."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from coordinator.drive.requests import RunRequest
from coordinator.drive.run_driver import RunDriver
from coordinator.kept_runs.kept_runs import KeptRuns
from coordinator.kept_runs.record import RunRecord
from coordinator.run_folder.checkpoints import RunCheckpoints, find_resume
from coordinator.run_folder.folder import RunFolder
from coordinator.run_folder.place import RunPlace, read_place
from coordinator.screen.progress import Progress
from coordinator.screen.run_list import run_lines, run_table
from coordinator.server.ending import Ending
from coordinator.submit.client import Client
from coordinator.submit.fetching import bring_up_to_date, fetch_run
from coordinator.submit.find_run import find_run, only_run
from coordinator.submit.interrupts import Interrupts
from coordinator.submit.run_log import show_events
from coordinator.submit.stopping import stop_run
from ringtune.errors import BusyError, ConnectionFailedError, InterruptedRunError, StorageError, UsageError
from ringtune.jobs.job import Job
from ringtune.schedule.turns import Turn
from ringtune.v1 import control_pb2
from tests.support.fake_agents import CALL_S, FakeAgent, FakeCluster, job, steps_of
from tests.support.tap import Tap

JOB = job(train__checkpoint_every=2)
LONG = job(train__checkpoint_every=2, train__rounds=500)


class Gate:
    """Holds the turns of nodes back until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, agent: FakeAgent, turns: list[Turn]) -> None:
        """Do the turns once the gate is open."""
        self.reached.set()
        assert self.open.wait(CALL_S)
        with contextlib.suppress(grpc.RpcError):  # the run may have been stopped meanwhile
            agent.stub.Report(agent.report(turns), timeout=CALL_S)


@contextlib.contextmanager
def keeping(folder: Path, gate: Gate | None = None) -> Iterator[FakeCluster]:
    """Two nodes and a coordinator that keeps runs."""
    kept = KeptRuns(folder)
    agents = {name: {"on_grant": gate} for name in ("a", "b")} if gate else None
    with contextlib.closing(kept), FakeCluster("a", "b", agents=agents) as cluster:
        cluster.server.coordinator.kept = kept
        yield cluster


def ended(client: Client, run_id: str) -> RunRecord:
    """What is kept of a run once it is over."""
    for _ in client.events(run_id, wait=True, whole=False, with_files=False):
        pass
    return next(record for record in client.runs() if record.run_id == run_id)


def start(client: Client, wanted: Job = JOB) -> str:
    """Submit and leave."""
    return client.start(RunRequest(job=wanted, num_nodes=2, join_s=5.0))


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a run's folder; times and ids differ from run to run, so only those without them."""
    names = ("adapter/adapter.safetensors", "adapter/model_head.safetensors", "adapter/adapter_config.json", "job.toml")
    return {name: (folder / name).read_bytes() for name in names}


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
        *("file", "checkpoint_json", "done", "note"),
    }
    assert files == {"trace.json", *(f"adapter/{name}" for name in ADAPTER)}


ADAPTER = ("adapter.safetensors", "adapter_config.json", "head_config.json", "model_head.safetensors")


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


def test_folder_is_brought_up_to_date_before_its_run_goes_on(tmp_path: Path) -> None:
    """What the run did after the connection was lost is fetched first; while it goes on, this is refused."""
    gate = Gate()
    out = tmp_path / "out"
    with keeping(tmp_path / "kept", gate) as cluster, Client(cluster.server.address) as client:
        run_id = start(client, LONG)
        with RunFolder(out):
            RunPlace(run_id=run_id, coordinator=client.address, is_local=False, pid=1).write(out)
        assert gate.reached.wait(CALL_S)
        with pytest.raises(BusyError, match="goes on; follow it with 'ringtune logs"):
            bring_up_to_date(client, out)
        gate.open.set()
        stop_run(client, run_id, now=False, wait_s=CALL_S)
        assert bring_up_to_date(client, out).startswith(f"fetched what run {run_id} did")
        assert bring_up_to_date(client, out) == ""
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
            RunPlace(run_id=run_id, coordinator=client.address, is_local=False, pid=1).write(out)
            if record.saved_step > 0:
                folder.write_text(f"checkpoints/step-{record.saved_step}.json", "{}")
        for damage in (
            lambda: None,
            lambda: (out / "report.json").unlink(),
            lambda: (out / "report.json").write_text('{"run_id": "of an earlier part"}', encoding="utf-8"),
            lambda: (out / "trace.json").rename(out / "trace.json.part"),
        ):
            damage()
            assert bring_up_to_date(client, out) == f"fetched what run {run_id} did without this folder, up to step 8"
            assert bring_up_to_date(client, out) == ""
            with pytest.raises(UsageError, match="is finished, nothing was changed; its results are there"):
                find_resume(out, wanted, print)


def cut_off(client: Client, monkeypatch: pytest.MonkeyPatch, *, after: str) -> None:
    """Let the connection be lost after the first event of a kind while a run is fetched."""
    whole = client.events

    def events(run_id: str, **options: bool) -> Iterator[control_pb2.RunEvent]:
        for event in whole(run_id, wait=False, whole=True, with_files=options["with_files"]):
            yield event
            if event.WhichOneof("event") == after:
                raise ConnectionFailedError("the connection is lost")

    monkeypatch.setattr(client, "events", events)


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file of a folder with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("after", ["job_toml", "plan_json", "checkpoint_json"])
def test_fetch_that_is_cut_off_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    """What was there stays, in a folder that is new nothing does, and the next fetch gets all."""
    out, new = tmp_path / "out", tmp_path / "new"
    with keeping(tmp_path / "kept") as cluster, Client(cluster.server.address) as client:
        record = ended(client, start(client))
        fetch_run(client, record, out, replace=False)
        (out / "checkpoints/step-8.json").unlink()  # as of a run that was followed to an earlier step
        (out / "mine.txt").write_text("not of the run", encoding="utf-8")
        before = files_in(out)
        with monkeypatch.context() as lost:
            cut_off(client, lost, after=after)
            with pytest.raises(ConnectionFailedError, match="is lost"):
                fetch_run(client, record, out, replace=True)
            with pytest.raises(ConnectionFailedError, match="is lost"):
                fetch_run(client, record, new, replace=False)
        assert files_in(out) == before
        assert not new.exists()
        with pytest.raises(UsageError, match="already holds a run"):
            fetch_run(client, record, out, replace=False)
        assert files_in(out) == before
        fetch_run(client, record, out, replace=True)
        assert set(files_in(out)) == {*before, "checkpoints/step-8.json"}


def test_fetched_folder_tells_where_its_run_is_driven(tmp_path: Path) -> None:
    """Of a run that goes on, too: it can be followed, stopped and fetched again by its folder."""
    gate, out = Gate(), tmp_path / "out"
    with keeping(tmp_path / "kept", gate) as cluster, Client(cluster.server.address) as client:
        run_id = start(client, LONG)
        assert gate.reached.wait(CALL_S)
        (record,) = client.runs()
        for replace in (False, True):
            fetch_run(client, record, out, replace=replace)
            assert find_run(str(out), "x:1")[:2] == (run_id, client.address)
        client.stop_run(run_id, "enough", now=True)
        gate.open.set()
        ended(client, run_id)


def test_log_of_a_run_is_what_its_submitter_would_have_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Phases, steps and the report, until the run is over."""
    with keeping(tmp_path / "kept") as cluster, Client(cluster.server.address) as client:
        run_id = start(client)
        show_events(client, run_id, follow=True, as_json=True)
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["event"] for line in lines].count("step") >= 8
        assert lines[-1]["event"] == "report"
        table = run_table(client.runs())
        assert table[1].split()[:3] == [run_id, "done", "model"]
        assert json.loads(run_lines(client.runs())[0])["num_steps"] == 8


def test_coordinator_of_a_local_run_keeps_nothing_and_says_so() -> None:
    """Its runs end with their submitter."""
    with FakeCluster("a", "b") as cluster, Client(cluster.server.address) as client:
        with pytest.raises(UsageError, match="keeps no runs"):
            client.runs()
        with pytest.raises(UsageError, match="keeps no runs"):
            start(client)
        assert cluster.agents["a"].released.wait(CALL_S)


def test_run_is_found_by_id_by_folder_or_because_it_is_alone(tmp_path: Path) -> None:
    """A folder tells where its run is driven; more than one run has to be named."""
    run_id = "r20260102-030405-00000000"
    assert find_run("", "x:1") == ("", "x:1", None, None)
    assert find_run(run_id, "x:1") == (run_id, "x:1", None, None)
    with pytest.raises(UsageError, match="neither the id of a run nor its folder"):
        find_run(str(tmp_path / "none"), "x:1")
    with pytest.raises(UsageError, match="does not tell where"):
        find_run(str(tmp_path), "x:1")
    place = RunPlace(run_id=run_id, coordinator="y:2", is_local=True, pid=7, local_nodes=3)
    place.write(tmp_path)
    assert read_place(tmp_path) == place
    assert find_run(str(tmp_path), "x:1") == (run_id, "y:2", place, tmp_path)
    one = RunRecord(run_id=run_id, first_run=run_id, model="", method="", submitted_by="", started_unix_s=0.0)
    assert only_run([one], lambda _: True, "run") is one
    with pytest.raises(UsageError, match="there is no new run"):
        only_run([one], lambda record: record.is_fetched, "new run")
    with pytest.raises(UsageError, match=f"more than one run at this coordinator: {run_id}, {run_id}; name one"):
        only_run([one, one], lambda _: True, "run")
