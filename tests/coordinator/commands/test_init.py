"""``ringtune init``: a job file that can be used at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringtune import cli
from ringtune.errors import UsageError
from ringtune.jobs.job import Job, load_job
from ringtune.models.family import TASKS
from tests.contract.test_hints import parse


@pytest.mark.parametrize("task", TASKS)
def test_init_writes_a_job_of_the_task(task: str, tmp_path: Path) -> None:
    """The file is read as it is; what the user did not say has the defaults."""
    file = tmp_path / "mine.toml"
    options = ["--task", task, "--model", "m", "--data", "rows.csv", "--eval-data", "held.csv"]
    shown = CliRunner().invoke(cli.app, ["init", str(file), *options])
    assert shown.exit_code == 0, shown.output
    found = load_job(file)
    wanted = {"path": str(tmp_path / "m"), "task": task}, {"train": str(tmp_path / "rows.csv")}
    assert found == Job.from_tables({"model": wanted[0], "data": {**wanted[1], "eval": str(tmp_path / "held.csv")}})
    lines = file.read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) <= 120
    assert sum(line.startswith("#") for line in lines) > 10
    for line in shown.stdout.splitlines()[1:]:
        parse(line.strip())


def test_init_tells_that_the_model_is_not_there_yet(tmp_path: Path) -> None:
    """What the folder has to hold, and where one comes from; a folder that is there is not spoken of."""
    typed = ["init", str(tmp_path / "job.toml"), "--model", "models/tiny"]
    (line,) = CliRunner().invoke(cli.app, typed).stderr.splitlines()
    assert line.startswith("models/tiny is not there yet: model.path has to be a folder with config.json")
    assert "'ringtune demo' fetches one" in line
    (tmp_path / "models/tiny").mkdir(parents=True)
    (tmp_path / "job.toml").unlink()
    assert CliRunner().invoke(cli.app, typed).stderr == ""


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    """A file that is there stays as it is."""
    file = tmp_path / "job.toml"
    file.write_text("mine", encoding="utf-8")
    refused = CliRunner().invoke(cli.app, ["init", str(file)])
    assert refused.exit_code == UsageError.exit_code
    assert "is there already" in refused.stderr
    assert file.read_text(encoding="utf-8") == "mine"


def test_init_names_the_nearest_task(tmp_path: Path) -> None:
    """A misspelt task writes nothing."""
    refused = CliRunner().invoke(cli.app, ["init", str(tmp_path / "job.toml"), "--task", "causal-ml"])
    assert refused.exit_code == UsageError.exit_code
    assert "did you mean 'causal-lm'?" in refused.stderr
    assert not (tmp_path / "job.toml").exists()


def test_init_tells_machines_where_the_file_is(tmp_path: Path) -> None:
    """One line of JSON."""
    shown = CliRunner().invoke(cli.app, ["init", str(tmp_path / "job.toml"), "--json"])
    assert json.loads(shown.stdout)["file"] == str(tmp_path / "job.toml")
