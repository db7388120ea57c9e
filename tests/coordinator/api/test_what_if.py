"""``ringtune.what_if``, ``plan`` and ``evaluate`` give what the commands give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ringtune
from ringtune.errors import DataError, PlanError, UsageError
from tests.support.predictions import asked, write_pair, write_run
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
    """In the words of Python."""
    for options in ({"assume": 2, "profile": "p"}, {"coordinator": "x:1", "profile": "p"}):
        with pytest.raises(UsageError, match="give one of coordinator="):
            ringtune.plan(model__path="m", **options)
    with pytest.raises(UsageError, match="assume=3"):
        ringtune.plan(model__path="m", nodes=3)


def test_evaluate_refuses_what_the_command_refuses(tmp_path: Path) -> None:
    """Rows that are not there, and none at all; before an agent is started."""
    run = ringtune.Run(write_saved_run(tmp_path / "run"))
    assert run.adapter == tmp_path / "run/adapter"
    with pytest.raises(DataError, match=r"gone.csv is not there"):
        run.evaluate(tmp_path / "gone.csv")
    with pytest.raises(UsageError, match=r"no data\.eval"):
        ringtune.evaluate(tmp_path / "run")
    with pytest.raises(UsageError, match="leave user= out"):
        run.evaluate(tmp_path / "run/report.json", user="anna")
