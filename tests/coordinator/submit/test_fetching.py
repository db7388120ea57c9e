"""Runs that are found, followed and fetched from the coordinator that keeps them; a fetch that is cut off."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.kept_runs.record import RunRecord
from coordinator.run_folder.checkpoints import find_resume
from coordinator.run_folder.folder import RunFolder
from coordinator.run_folder.place import RunPlace, read_place
from coordinator.screen.listing.run_list import run_lines, run_table
from coordinator.screen.progress import JsonProgress
from coordinator.submit.client import Client
from coordinator.submit.fetching import bring_up_to_date, fetch_run
from coordinator.submit.find_run import find_run, only_run
from coordinator.submit.run_log import show_events
from coordinator.submit.stopping import stop_run
from ringtune.errors import BusyError, ConnectionFailedError, UsageError
from ringtune.v1 import control_pb2
from tests.support.fake_agents import CALL_S, job
from tests.support.kept_runs import LONG, Gate, ended, keeping, start


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


def test_run_that_takes_the_place_of_another_leaves_it_beside_its_own(tmp_path: Path) -> None:
    """The same run again replaces its files; another one moves them, and says where they are."""
    said: list[str] = []
    out = tmp_path / "out"
    with keeping(tmp_path / "kept") as cluster, Client(cluster.server.address) as client:
        first, second = (ended(client, start(client)) for _ in range(2))
        for record in (first, first, second):
            fetch_run(client, record, out, replace=True, say=said.append)
    (aside,) = tmp_path.glob("out.replaced-*")
    assert said == [f"the files of the earlier run are in {aside}"]
    for folder, record in ((aside, first), (out, second)):
        place = read_place(folder)
        assert place is not None and place.run_id == record.run_id
        assert json.loads((folder / "report.json").read_text())["run_id"] == record.run_id


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
        show_events(client, run_id, follow=True, progress=JsonProgress(sys.stdout))
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["event"] for line in lines].count("step") >= 8
        assert lines[-1]["event"] == "report"
        table = run_table(client.runs())
        assert table[1].split()[:3] == [run_id, "done", "model"]
        assert json.loads(run_lines(client.runs())[0])["num_steps"] == 8


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
    after = replace(one, run_id="r20260102-030406-00000000", takes_up=run_id)
    assert only_run([one, after], lambda _: True, "run") is after, "it goes on with the other one"
    interrupted = replace(one, state="interrupted", message="the coordinator ended before the run did")
    assert run_table([interrupted, after])[-1].endswith(f"ended before the run did; {after.run_id} goes on with it")
    with pytest.raises(UsageError, match="there is no new run"):
        only_run([one], lambda record: record.is_fetched, "new run")
    with pytest.raises(UsageError, match=f"more than one run at this coordinator: {run_id}, {run_id}; name one"):
        only_run([one, one], lambda _: True, "run")
