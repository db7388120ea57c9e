"""``ringtune init``: a job file that can be used at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ringtune import cli
from ringtune.errors import DataError, ModelError, UsageError
from ringtune.job.job import Job, load_job
from ringtune.models.family import TASKS
from tests.contract.test_hints import parse
from tests.support.model_folder import write_model


@pytest.mark.parametrize("task", TASKS)
def test_init_writes_a_template_of_the_task(task: str, tmp_path: Path) -> None:
    """Nothing is looked at; the file is read as it is, and what the user did not say has the defaults."""
    file = tmp_path / "mine.toml"
    options = ["--template", "--task", task, "--model", "m", "--data", "rows.csv", "--eval-data", "held.csv"]
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


def beside(tmp_path: Path, *options: str) -> Result:
    """Type init for a job file in a folder that has 40 rows and a model."""
    rows = [f"{'w' * (20 + index)},{index % 2}" for index in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,mood", *rows]), encoding="utf-8")
    write_model(tmp_path / "models/tiny")
    return CliRunner().invoke(cli.app, ["init", str(tmp_path / "job.toml"), *options])


def test_init_looks_at_what_lies_beside_the_file(tmp_path: Path) -> None:
    """Rows, columns and model are found, and what was seen is told; the job is one that training takes as it is."""
    shown = beside(tmp_path, "--yes")
    assert shown.exit_code == 0, shown.output
    job = load_job(tmp_path / "job.toml")
    assert (job.model.path, job.data.train) == (str(tmp_path / "models/tiny"), str(tmp_path / "rows.csv"))
    assert (job.model.task, job.data.text, job.data.label) == ("sequence-classification", "text", "mood")
    assert (job.data.held_out, job.train.max_length, job.unfreeze and job.unfreeze.every_steps) == (0.1, 32, 20)
    assert (job.train.eval_every, job.train.keep_best) == (10, True)
    assert "rows.csv has 40 rows and the columns 'text'" in shown.stdout
    assert "'mood' (2 different values: 0, 1)" in shown.stdout
    assert "  train.keep_best = true: " in shown.stdout
    assert " epochs of 36 rows\n" in shown.stdout, "4 of the 40 rows are held out"
    text = (tmp_path / "job.toml").read_text(encoding="utf-8")
    assert 'path = "models/tiny"' in text and 'train = "rows.csv"' in text
    assert "# Chosen: there is no file of rows to evaluate on." in text
    for line in shown.stdout.splitlines()[-2:]:
        parse(line.strip())


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        (["--data", "gone.csv"], DataError.exit_code, "gone.csv is not there"),
        (["--model", "gone"], ModelError.exit_code, "gone"),
        (["--task", "image-classification"], DataError.exit_code, "needs an npz file or a folder of images"),
        (["--task", "causal-lm"], ModelError.exit_code, "has heads for sequence-classification"),
        (["--column", "label=moood"], DataError.exit_code, "name one of them"),
        (["--column", "label"], UsageError.exit_code, "is not KEY=COLUMN"),
        (["--template", "--column", "label=mood"], UsageError.exit_code, "looks at no rows"),
    ],
)
def test_init_says_what_it_can_not_use(typed: list[str], code: int, message: str, tmp_path: Path) -> None:
    """One message, and no file."""
    refused = beside(tmp_path, "--yes", *typed)
    assert refused.exit_code == code, refused.output
    assert message in refused.stderr and len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "job.toml").exists()


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
    """One line of JSON, with what was chosen."""
    shown = beside(tmp_path, "--json")
    assert json.loads(shown.stdout)["file"] == str(tmp_path / "job.toml")
    assert json.loads(shown.stdout)["chosen"]["data.label"] == "mood"
