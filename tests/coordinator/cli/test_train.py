"""``ringtune train`` as a face of ``ringtune.train``: its options are taken, a run that is left is told of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.client.saved_run import read_place
from ringtune import cli
from ringtune.ids import RUN_ID
from tests.support.fake_agents import JOB_TEXT
from tests.support.kept_runs import keeping


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder has a job."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB_TEXT)
    return tmp_path


def test_train_command_takes_options_and_shows_the_run(here: Path) -> None:
    """A changed job on two nodes, events as JSON lines, and the folder that was named."""
    with keeping(here / "kept") as cluster:
        words = ["train", "job.toml", "--coordinator", cluster.server.address, "--nodes", "2", "--out", "out", "--json"]
        done = CliRunner().invoke(cli.app, [*words, "--set", "train.rounds=1", "--set", "data.train=rows.csv"])
        again = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert {event["step"] for event in events if event["event"] == "step"} == {1, 2, 3, 4}
    assert events[-1]["text"] == "the run's files are in out"
    assert f'train = "{here / "rows.csv"}"' in (here / "out/job.toml").read_text(), "a path of this folder"
    assert again.exit_code == 2 and "already holds a run" in again.stderr


def test_train_command_leaves_a_run_at_its_coordinator(here: Path) -> None:
    """With a folder, that tells where the run is; without one nothing is written here. The id is printed."""
    with keeping(here / "kept") as cluster:
        words = ["train", "job.toml", "--coordinator", cluster.server.address, "--nodes", "2", "--detach"]
        first = CliRunner().invoke(cli.app, [*words, "--json"])
        assert first.exit_code == 0, first.output
        run_id = json.loads(first.stdout)["run_id"]
        followed = CliRunner().invoke(cli.app, ["logs", run_id, "--follow", "--coordinator", cluster.server.address])
        assert followed.exit_code == 0, followed.output
        files = sorted(path.name for path in here.iterdir())
        second = CliRunner().invoke(cli.app, [*words, "--out", "out"])
        assert second.exit_code == 0, second.output
    assert json.loads(first.stdout) == {
        "event": "detached",
        "run_id": run_id,
        "coordinator": cluster.server.address,
        "is_local": False,
        "pid": json.loads(first.stdout)["pid"],
        "local_nodes": 0,
        "out": "",
    }
    assert RUN_ID.fullmatch(run_id) and files == ["job.toml", "kept"]
    place = read_place(here / "out")
    assert second.stdout.splitlines()[0] == f"run {place.run_id} continues without this command"


def test_train_command_needs_to_know_where_to_train_and_where_to_write(here: Path) -> None:
    """Neither --local nor --coordinator, or both, or no folder, is a usage error, and no folder is made."""
    for words, says in (
        (["--out", "out"], "give one of --local N and --coordinator"),
        (["--out", "out", "--local", "2", "--coordinator", "127.0.0.1:7"], "give one of --local N and --coordinator"),
        (["--local", "2"], "give --out DIR"),
        (["--local", "2", "--out", "out", "--resume", "--replace"], "give one of them"),
    ):
        done = CliRunner().invoke(cli.app, ["train", "job.toml", *words])
        assert (done.exit_code, says in done.stderr) == (2, True), done.stderr
    assert [path.name for path in here.iterdir()] == ["job.toml"]
