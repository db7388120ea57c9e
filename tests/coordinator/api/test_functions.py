"""The functions of ``import ringtune`` give what the commands give; a coordinator, and the runs that it gives."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

import ringtune
from coordinator.api import evaluation
from coordinator.api.arguments import typed
from coordinator.api.members import Coordinator
from coordinator.client import connection
from coordinator.client.saved_run import SavedRun
from coordinator.planner.given_plan import read_profile
from coordinator.screen.tables import profile_text
from ringtune.errors import (
    ConnectionFailedError,
    DeadlineError,
    InterruptedRunError,
    InvalidInputError,
    PlanError,
    UsageError,
)
from ringtune.job.job import load_job
from ringtune.transport.credentials import process_credentials
from sim.prediction import predict
from tests.support.fake_agents import CALL_S, FakeCluster, job
from tests.support.kept_runs import JOB, LONG, Gate, keeping
from tests.support.predictions import PLAN, PROFILE, asked, write_pair, write_run
from tests.support.saved_runs import write_run as write_saved_run


def test_what_if_is_that_of_the_command(tmp_path: Path) -> None:
    """A run, its folder, or a plan with a profile; its text has both columns."""
    write_run(tmp_path / "run")
    told = asked(tmp_path / "run", "--change", "bob.compute=0.5", "--change", "microbatches=1")
    for plan in (tmp_path / "run", ringtune.Run(tmp_path / "run")):
        found = ringtune.what_if(plan, {"bob.compute": 0.5, "microbatches": 1})
        assert found.ratio == told["ratio"]
        assert json.loads(json.dumps(found.to_json()))["after"] == told["after"]
        assert str(found).splitlines()[0].split() == ["before", "after", "ratio"]
    plan_file, profile = write_pair(tmp_path)
    assert ringtune.what_if(plan_file, {"bob.compute": 1}, profile=profile).ratio == 1.0


def test_what_if_sweeps_over_values(tmp_path: Path) -> None:
    """Values as a list or as a range; the cells are a table."""
    write_run(tmp_path / "run")
    found = ringtune.what_if(tmp_path / "run", sweep={"bob.compute": [1, 2], "microbatches": "1:2:2"}, jobs=1)
    assert found.cells["bob.compute"] == ["1", "1", "2", "2"]
    assert found.cells[0]["wall_s"] > found.cells[2]["wall_s"]
    assert "(4 rows)" in str(found)


def test_what_if_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    """Nothing that changes, a node that there is not, and a job in place of a plan."""
    write_run(tmp_path / "run")
    with pytest.raises(UsageError, match="nothing changes; give change="):
        ringtune.what_if(tmp_path / "run")
    with pytest.raises(PlanError, match="carol"):
        ringtune.what_if(tmp_path / "run", {"carol.compute": 2})
    with pytest.raises(UsageError, match=r"job.toml is a job"):
        ringtune.what_if("job.toml", {"bob.compute": 2})


def test_plan_refuses_two_sorts_of_nodes() -> None:
    """In the words of Python; as a command does, in its own."""
    rows: list[tuple[dict[str, Any], str]] = [
        ({"coordinator": "x:1", "profile": "p"}, "give one of coordinator= and profile="),
        ({"assume": 2, "profile": "p"}, "assume= and memory= are for nodes that are not there"),
        ({"coordinator": "x:1", "memory": "1GiB"}, "assume= and memory= are for nodes that are not there"),
        ({"nodes": 3}, "nodes= is for coordinator=.*assume=3"),
    ]
    for options, text in rows:
        with pytest.raises(UsageError, match=text):
            ringtune.plan(model__path="m", **options)
        with pytest.raises(UsageError, match=r"--"):
            typed(ringtune.plan)(model__path="m", **options)


def test_evaluate_takes_the_rows_that_the_job_holds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file stands for them; what is evaluated, on what and where is told before it begins."""
    told = list[object]()

    def alone(run: SavedRun, data: Path | None, **_: object) -> dict[str, int]:
        told.append(data)
        return {"count": 1}

    monkeypatch.setattr(evaluation, "evaluate_alone", alone)
    job = write_saved_run(tmp_path / "run") / "job.toml"
    job.write_text(load_job(job).with_overrides({"data.held_out": 0.1}).to_toml())
    assert ringtune.evaluate(tmp_path / "run", tell=told.append) == {"count": 1}
    rows = "the held-out rows of /srv/carol/rows/train.csv"
    assert told == [f"evaluating {tmp_path / 'run'} on {rows}, with this machine ...", None]


def test_measurement_is_shown_saved_and_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job as it is in Python, with a changed key; nothing is printed that was not asked for."""
    out = tmp_path / "profile.json"
    with FakeCluster("a", "b") as cluster:
        found = ringtune.measure(
            job(),
            coordinator=cluster.server.address,
            save=out,
            progress=False,
            rehearse=False,
            fresh=True,
            train__max_length=4,
        )
        asked = [agent.inspected for agent in cluster.agents.values()]
    assert capsys.readouterr() == ("", "")
    assert all("max_length = 4" in one.job_toml and one.fresh for one in asked)
    assert read_profile(out) == found.profile and len(found.profile.links) == 2
    assert repr(found).splitlines() == profile_text(found.profile)
    assert read_profile(found.save(tmp_path / "again.json")) == found.profile


def test_simulated_plan_is_that_of_the_simulator(tmp_path: Path) -> None:
    """Figures, text and files are of one prediction."""
    plan, profile = write_pair(tmp_path)
    found = ringtune.simulate(plan, profile=profile, out=tmp_path / "out")
    assert found.prediction.wall_s == predict(PLAN, PROFILE).wall_s
    assert found.measured is None and found.as_run is found.plan
    assert json.loads((tmp_path / "out/prediction.json").read_text()) == json.loads(json.dumps(found.to_json()))
    assert repr(found).splitlines()[1].startswith("predicted training ")


def test_profile_whose_shape_leaves_settings_open_is_of_the_usual_ones(tmp_path: Path) -> None:
    """Without a job an empty optimizer or dtype is adamw or float32."""

    def leave_open(profile: dict[str, Any]) -> None:
        for node in profile["nodes"]:
            node["shape"] |= {"optimizer": "", "dtype": ""}

    plan, profile = write_pair(tmp_path, of_profile=leave_open)
    assert ringtune.simulate(plan, profile=profile).prediction.wall_s == predict(PLAN, PROFILE).wall_s


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
    assert process_credentials() is None


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


def test_train_refuses_options_that_contradict_each_other(tmp_path: Path) -> None:
    """Before anything is read, in the words of Python; the nodes of a local ring are known before any is started."""
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
    with pytest.raises(PlanError, match="alice, bob not among node-0, node-1: give the same nodes, or plan anew"):
        ringtune.train(job(), local=2, plan=write_pair(tmp_path)[0])


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
