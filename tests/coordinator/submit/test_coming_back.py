"""A submitter whose connection breaks, or whose coordinator is away: it comes back, for a bounded time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import pytest

from coordinator.drive.requests import RunRequest
from coordinator.kept_runs.kept_runs import KeptRuns
from coordinator.run_folder.folder import RunFolder
from coordinator.screen.progress import Progress
from coordinator.submit.client import Client
from coordinator.submit.coming_back import Following
from coordinator.submit.outcome import Outcome
from ringtune.errors import ConnectionFailedError, InterruptedRunError
from ringtune.v1 import control_pb2
from tests.coordinator.kept_runs.test_record import ONE, TWO, record
from tests.support.fake_agents import CALL_S, FakeCluster, steps_of
from tests.support.kept_runs import JOB, Gate, content, ended, keeping
from tests.support.tap import Tap


class Notes(Progress):
    """Remembers what a user was told."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        """Remember it."""
        self.texts.append(text)


def test_submitter_whose_connection_breaks_hears_the_rest(tmp_path: Path) -> None:
    """Twice, at a step and at a file: the folder is that of a run that was followed in one go, and so is its error."""
    with keeping(tmp_path / "kept") as cluster:
        with Client(cluster.server.address) as client, RunFolder(tmp_path / "whole") as folder:
            client.run(RunRequest(job=JOB, num_nodes=2), progress=Progress(), folder=folder)
        tap = Tap(int(cluster.server.address.rpartition(":")[2]))
        cuts = ["step_json", "file"]

        def cut(event: control_pb2.RunEvent) -> None:
            if cuts and event.WhichOneof("event") == cuts[0]:
                del cuts[0]
                tap.cut()

        with contextlib.closing(tap), Client(f"127.0.0.1:{tap.port}") as client, RunFolder(tmp_path / "out") as folder:
            outcome = client.run(
                RunRequest(job=JOB, num_nodes=2),
                progress=Progress(),
                folder=folder,
                sinks=(cut,),
                coordinator_wait_s=CALL_S,
            )
            assert outcome.is_done and not cuts
            assert [entry.is_fetched for entry in client.runs()] == [True, True]
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert [line["step"] for line in steps_of(tmp_path / "out/metrics.jsonl")] == list(range(1, 9))


@pytest.mark.promise("6 every wait ends")
def test_submitter_waits_for_a_bounded_time(tmp_path: Path) -> None:
    """Then the error says how to come back; the run does not end with the waiting."""
    gate, notes = Gate(), Notes()
    with keeping(tmp_path / "kept", gate) as cluster:
        tap = Tap(int(cluster.server.address.rpartition(":")[2]))

        def cut(event: control_pb2.RunEvent) -> None:
            if event.state == "training":
                tap.close()

        with (
            Client(f"127.0.0.1:{tap.port}") as client,
            RunFolder(tmp_path / "out") as folder,
            pytest.raises(ConnectionFailedError, match="has not answered for 1 s") as lost,
        ):
            client.run(
                RunRequest(job=JOB, num_nodes=2), progress=notes, folder=folder, sinks=(cut,), coordinator_wait_s=1.0
            )
        assert client.goes_on
        assert notes.texts[-1].endswith("does not answer; waiting up to 1 s until it does")
        gate.open.set()
        with Client(cluster.server.address) as again:
            (kept,) = again.runs()
            assert f"'ringtune fetch {kept.run_id} --coordinator {client.address}'" in str(lost.value)


def following(cluster: FakeCluster, client: Client) -> Following:
    """A follower of which nothing has come yet."""
    return Following(client, Outcome(JOB), None, submission="mine", say=lambda text: None)


def test_run_is_found_whose_id_has_not_come(tmp_path: Path) -> None:
    """By the number that the submitter drew; where it is not there, the run was not begun."""
    done = control_pb2.RunEvent(done=True)
    with keeping(tmp_path / "kept") as cluster, Client(cluster.server.address) as client:
        kept: KeptRuns = cluster.server.coordinator.kept  # type: ignore[assignment]
        kept.begin(record(TWO, submission="another's"), on_saved=print)(done)
        lost = following(cluster, client)
        assert lost.may_go_on
        with pytest.raises(ConnectionFailedError, match="has not begun the run; submit it again"):
            lost.go_on(CALL_S, print)
        assert lost.is_left
        kept.begin(record(ONE, submission="mine"), on_saved=print)(done)
        outcome = Outcome(JOB)
        found = Following(client, outcome, None, submission="mine", say=print)

        def hear(events: Iterable[control_pb2.RunEvent]) -> None:
            for event in events:
                outcome(event)

        found.go_on(CALL_S, hear)
        assert outcome.is_done


def test_interrupted_run_that_is_not_taken_up_is_an_error(tmp_path: Path) -> None:
    """The coordinator is back, and leaves the run to the user."""
    with keeping(tmp_path / "kept") as cluster, Client(cluster.server.address) as client:
        kept: KeptRuns = cluster.server.coordinator.kept  # type: ignore[assignment]
        kept.begin(record(ONE, submission="mine", state="interrupted"), on_saved=print).close()
        left = following(cluster, client)
        with pytest.raises(ConnectionFailedError, match=f"ended before run {ONE} did, and does not go on with it"):
            left.go_on(CALL_S, list)
        assert left.is_left


def test_ctrl_c_ends_the_waiting_and_not_the_run(tmp_path: Path) -> None:
    """The run can't be told, and the error says so."""

    class Impatient(Progress):
        def note(self, text: str) -> None:
            if "does not answer" in text:
                raise KeyboardInterrupt

    gate = Gate()
    with keeping(tmp_path / "kept", gate) as cluster:
        tap = Tap(int(cluster.server.address.rpartition(":")[2]))

        def cut(event: control_pb2.RunEvent) -> None:
            if event.state == "training":
                tap.close()

        with (
            Client(f"127.0.0.1:{tap.port}") as client,
            RunFolder(tmp_path / "out") as folder,
            pytest.raises(InterruptedRunError, match="stopped here, but not there"),
        ):
            client.run(
                RunRequest(job=JOB, num_nodes=2),
                progress=Impatient(),
                folder=folder,
                sinks=(cut,),
                coordinator_wait_s=CALL_S,
            )
        assert client.goes_on
        gate.open.set()
        with Client(cluster.server.address) as again:
            (kept,) = again.runs()
            assert ended(again, kept.run_id).state == "done"
