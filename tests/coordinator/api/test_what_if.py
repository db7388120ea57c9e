"""``ringtune.what_if``, ``plan`` and ``evaluate`` give what the commands give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ringtune
from coordinator.api import evaluation
from coordinator.api.arguments import typed
from coordinator.client.saved_run import SavedRun
from coordinator.planner.given_plan import read_profile
from coordinator.screen.tables import profile_text
from ringtune.errors import PlanError, UsageError
from ringtune.job.job import load_job
from sim.prediction import predict
from tests.support.fake_agents import FakeCluster, job
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
