"""A coordinator's handle and the runs that it gives, over real calls to nodes without torch."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

import ringtune
from coordinator.api.members import Coordinator
from coordinator.client import connection
from ringtune.errors import ConnectionFailedError, DeadlineError, InterruptedRunError, InvalidInputError, UsageError
from ringtune.transport.speaker import speaker
from tests.support.fake_agents import CALL_S, job
from tests.support.kept_runs import JOB, LONG, Gate, keeping


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_coordinator_trains_and_its_run_tells_everything(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a folder the run gets a new one; what is shown is what the command shows, or nothing."""
    with keeping(here / "kept") as cluster:
        handle = ringtune.connect(cluster.server.address)
        assert [row["node"] for row in handle.nodes()] == ["a", "b"]
        run = handle.train(JOB, nodes=2, train__rounds=1)
        assert "step 4/4" in capsys.readouterr().out
        again = handle.train(JOB, nodes=2, progress=False)
        assert capsys.readouterr().out == ""
        assert [str(one.folder) for one in (run, again)] == ["run-1", "run-2"]
        assert run.state == again.state == "done"
        assert run.metrics["step"] == [1, 2, 3, 4] and run.metrics["initiator"] == ["a", "a", "b", "b"]
        assert run.adapter == Path("run-1/adapter") and (run.adapter / "adapter.safetensors").is_file()
        assert run.plan.nodes == ("a", "b") and run.job.train.rounds == 1
        assert run.report["steps"] == 4 and run.wait() is run
        assert handle.runs()["steps_done"] == [4, 8]
        assert handle.status()["run"]["run_id"] == handle.runs()[-1]["run_id"]
        assert run.plot().figure.axes[0].get_title() == "run-1"
        with pytest.raises(UsageError, match="see its 'adapter'"):
            run.model  # noqa: B018
    assert speaker() is None


def test_coordinator_plans_for_its_nodes(here: Path) -> None:
    """The plan prints itself, and a run carries it out."""
    with keeping(here / "kept") as cluster:
        handle = ringtune.connect(cluster.server.address)
        planned = handle.plan(JOB, nodes=2)
        assert planned.is_measured and "2 classes: neg, pos" in str(planned)
        assert set(planned.memory_bytes) == {"a", "b"}
        saved = planned.save(here / "plan.json")
        for number, given in enumerate((planned, saved)):
            run = handle.train(JOB, nodes=2, plan=given, out=f"out-{number}", progress=False)
            assert run.plan.digest == planned.plan.digest


def test_run_that_is_left_is_waited_for_and_stopped(here: Path) -> None:
    """It goes on at the coordinator; its files come at the end, and a stopped one says so."""
    gate = Gate()
    with keeping(here / "kept", gate) as cluster:
        handle = ringtune.connect(cluster.server.address)
        run = handle.train(LONG, nodes=2, out="out", wait=False)
        assert run.state == "running" and len(run.metrics) == 0
        with pytest.raises(InvalidInputError, match=r"has no plan.json yet"):
            run.plan  # noqa: B018
        threading.Timer(0.0, gate.open.set).start()
        stopped = run.stop(wait_s=CALL_S)
        assert stopped is run and run.state == "stopped" and len(run.metrics) > 0
        with pytest.raises(InterruptedRunError, match="stopped by"):
            ringtune.Run("out").wait(progress=False)
        with pytest.raises(UsageError, match="not driven there now"):
            run.stop()


def test_run_is_fetched_by_its_id(here: Path) -> None:
    """Into a folder of that name, or the one that is named."""
    with keeping(here / "kept") as cluster:
        handle = ringtune.connect(cluster.server.address)
        run = handle.train(job(train__checkpoint_every=2), nodes=2, out="out", wait=False)
        assert run.wait(progress=False).state == "done"
        (row,) = handle.runs()
        assert handle.fetch(row["run_id"]).folder == Path(row["run_id"])
        assert handle.fetch(row["run_id"], "other").metrics["step"] == run.metrics["step"]
        with pytest.raises(UsageError, match="is not stored there"):
            handle.fetch("r20260102-030405-00000000")


def test_run_that_failed_leaves_no_new_folder(here: Path) -> None:
    """The error is that of the tree; a folder that the user named is left alone."""
    with keeping(here / "kept") as cluster:
        handle = ringtune.connect(cluster.server.address)
        with pytest.raises(DeadlineError):
            handle.train(JOB, nodes=3, join_s=0.1, progress=False)
    assert not (here / "run-1").exists()


def test_train_refuses_options_that_contradict_each_other() -> None:
    """Before anything is read, in the words of Python."""
    rows: list[tuple[dict[str, object], str]] = [
        ({}, "give one of local=N"),
        ({"local": 2, "coordinator": "x:1"}, "give one of local=N"),
        ({"local": 2, "nodes": 2}, "nodes= is for coordinator="),
        ({"local": 2, "resume": True}, "resumes the run in out=DIR"),
        ({"local": 2, "out": "x", "resume": True, "replace": True}, "replace=True would move its files away"),
        ({"local": 2, "plan": "p.json", "wire": "float16"}, "leave out microbatches= and wire="),
        ({"local": 2, "plan": "p.json", "resume": True, "out": "x"}, "the run's own plan"),
        (
            {"coordinator": "x:1", "web": "127.0.0.1:0"},
            "web= is for local=; start the coordinator with 'ringtune coord",
        ),
        ({"coordinator": "x:1", "log": "tensorboard", "wait": False}, "log= is written by the command that follows"),
    ]
    for options, text in rows:
        with pytest.raises(UsageError, match=text):
            ringtune.train("none.toml", **options)  # type: ignore[arg-type]


def test_connect_refuses_who_is_not_there(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens at a port that was free, and another machine needs a certificate."""
    monkeypatch.setattr(connection, "CONNECT_S", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConnectionFailedError, match="no coordinator answers"):
            ringtune.connect(address)
    with pytest.raises(UsageError, match="reaches beyond this machine"):
        ringtune.connect("192.0.2.1:7070")
    assert repr(Coordinator(address)) == f"Coordinator({address!r})"
    with pytest.raises(UsageError, match="is no folder"):
        ringtune.Run("nowhere")
