"""``ringtune.measure`` and ``ringtune.simulate``: what the commands do, for a program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ringtune
from coordinator.planner.given_plan import read_profile
from coordinator.screen.tables import profile_text
from ringtune.errors import UsageError
from sim.prediction import predict
from tests.support.fake_agents import FakeCluster, job
from tests.support.predictions import PLAN, PROFILE, write_pair


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


def test_measure_names_its_arguments_as_python_does() -> None:
    """Neither nodes here nor a coordinator: nothing is started."""
    with pytest.raises(UsageError, match="give one of local=N and coordinator=HOST:PORT"):
        ringtune.measure(job())


def test_simulated_plan_is_that_of_the_simulator(tmp_path: Path) -> None:
    """Figures, text and files are of one prediction."""
    plan, profile = write_pair(tmp_path)
    found = ringtune.simulate(plan, profile=profile, out=tmp_path / "out")
    assert found.prediction.wall_s == predict(PLAN, PROFILE).wall_s
    assert found.measured is None and found.as_run is found.plan
    assert json.loads((tmp_path / "out/prediction.json").read_text()) == json.loads(json.dumps(found.to_json()))
    assert repr(found).splitlines()[1].startswith("predicted training ")
