"""The command line: help without delay, exit codes, machine-readable errors; ``ringtune train`` and ``page``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from coordinator.client import connection
from coordinator.client.local_nodes import AgentTemplate
from coordinator.client.saved_run import read_place
from coordinator.server.coordinator import ShutdownSignals
from ringtune import cli
from ringtune.errors import (
    CapacityError,
    ConnectionFailedError,
    DataError,
    JobError,
    ModelError,
    UsageError,
    all_errors,
)
from ringtune.ids import RUN_ID
from ringtune.storage.durable import mark
from tests.coordinator.web.test_streams import begun
from tests.support.fake_agents import JOB_TEXT
from tests.support.kept_runs import keeping
from tests.support.model_folder import write_model
from tests.support.processes import source_environment
from tests.support.saved_runs import contents, write_run
from tests.support.typed import run_alone

COMMANDS = (
    "audit",
    "chat",
    "coordinator",
    "demo",
    "doctor",
    "eval",
    "export",
    "fetch",
    "init",
    "join",
    "logs",
    "measure",
    "node",
    "nodes",
    "page",
    "plan",
    "predict",
    "runs",
    "serve",
    "sim",
    "status",
    "stop",
    "train",
    "what-if",
)
LIMIT_S = 120.0


def test_cli_help_lists_every_command_and_exit_code() -> None:
    """The commands of all packages are there, each with a line."""
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    assert sorted(re.findall(r"^│ ([a-z][a-z-]*) +[A-Z]", result.output, re.MULTILINE)) == sorted(COMMANDS)
    assert re.findall(r"^╭─ (.+?) ─+", result.output, re.MULTILINE) == ["Options", *cli.PANELS]
    assert "not installed" not in result.output
    # Where a user looks first stands what each code means
    output = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "200"}).output
    told = output[output.index("Exit codes:") :]
    for code in {0, cli.BUG_EXIT_CODE, 143} | {kind.exit_code for kind in all_errors()}:
        assert re.search(rf"(: |; ){code} ", " ".join(told.split())), f"exit code {code} is not told"


def test_cli_help_loads_nothing_heavy() -> None:
    """Neither torch nor grpc is imported for the help; that is what keeps it below 0.3 s."""
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from ringtune import cli\n"
        "CliRunner().invoke(cli.app, ['--help'])\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'grpc', 'numpy', 'transformers'}))\n"
    )
    found = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=source_environment(),
        check=True,
    )
    assert found.stdout.strip() == "[]"


def test_cli_help_wraps_its_paragraphs_once() -> None:
    """In 80 columns a line ends where the next word has no room; a switch shows no type of a value."""
    for words in ("", *cli.all_commands()):
        result = CliRunner().invoke(cli.app, [*words.split(), "--help"], env={"COLUMNS": "80"})
        text = result.output.partition("╭")[0].splitlines()[2:]
        assert result.exit_code == 0 and len(text) > 1, words
        for line, following in pairwise(map(str.strip, text)):
            assert not line or not following or len(line) + 1 + len(following.split()[0]) > 78, (words, line)
        assert "<bool>" not in result.output, words


def test_cli_json_error_is_a_line_on_standard_output() -> None:
    """Machines get the class, the message and the exit code; also of what the parser refuses, with where the help is.

    A misspelt command names the nearest one.
    """
    for arguments, error, says in (
        (("plan", "none.toml"), JobError, "none.toml"),
        (("plan", "job.toml", "--sets", "3"), UsageError, "--help'"),
        (("plan", "job.toml", "--nodes", "x"), UsageError, "--help'"),
        (("trian",), UsageError, "train"),
        (("--bogus",), UsageError, "--help'"),
        (("--bogus", "plan", "job.toml"), UsageError, "--help'"),
    ):
        result = run_alone(*arguments, "--json")
        line = json.loads(result.stdout)
        assert (line["event"], line["error"], line["exit_code"]) == ("error", error.__name__, error.exit_code)
        assert says in line["message"] and result.returncode == error.exit_code, arguments
        assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1, arguments


def test_cli_refuses_a_loop_of_links_by_its_path(tmp_path: Path) -> None:
    """In the place of a model, where pathlib raises an error of its own."""
    run, loop = write_run(tmp_path / "run"), tmp_path / "loop"
    loop.symlink_to(loop)
    (tmp_path / "rows.csv").write_text("text,label\nhi,pos\n")
    words = ["predict", str(run), "--data", str(tmp_path / "rows.csv"), "--model", str(loop)]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 2 and "can't be used as a path: Too many levels of symbolic links" in result.output


def test_cli_without_arguments_shows_its_help() -> None:
    """Whoever types the bare name wants to know what there is."""
    result = run_alone()
    assert "Usage" in result.stdout
    assert "error:" not in result.stderr


@pytest.mark.promise("6 every wait ends")
def test_cli_unknown_coordinator_is_an_error_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens there: exit code 3 after the connect deadline, which is seconds."""
    assert connection.CONNECT_S <= 5.0
    monkeypatch.setattr(connection, "CONNECT_S", 0.2)
    result = CliRunner().invoke(cli.app, ["nodes", "--coordinator", "127.0.0.1:9"])
    assert result.exit_code == ConnectionFailedError.exit_code
    assert "no coordinator answers at 127.0.0.1:9 (waited 0.2 s)" in result.stderr


@pytest.mark.parametrize(
    ("wrong", "exit_code", "says"),
    [
        ("nodes", CapacityError.exit_code, "1000000 local nodes need"),
        ("model", ModelError.exit_code, "model"),
        ("rows", DataError.exit_code, "label"),
        ("job", JobError.exit_code, "train.batch"),
        ("folder", UsageError.exit_code, "is not the folder of a run: it holds notes.txt"),
        ("place", UsageError.exit_code, "is where the run writes its own files"),
        ("run", UsageError.exit_code, "choose another --out, or add --replace"),
    ],
)
def test_train_that_is_refused_has_started_and_written_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, exit_code: int, says: str
) -> None:
    """Folder, job, rows, model and memory are looked at before a node is started, and no file changes."""
    monkeypatch.setattr(AgentTemplate, "__enter__", lambda template: pytest.fail("a process was started"))
    out = tmp_path / "out"
    model = out / "model" if wrong == "place" else tmp_path / "tiny"
    write_model(model)
    job = tmp_path / "job.toml"
    rows = "text\na fine film\n" if wrong == "rows" else "text,label\na fine film,good\na bad one,bad\n"
    (tmp_path / "train.csv").write_text(rows)
    model = out / "logs" if wrong == "place" else model
    key = "batch" if wrong == "job" else "batch_size"
    job.write_text(f'[model]\npath = "{model}"\n[data]\ntrain = "train.csv"\n[train]\n{key} = 4\nmax_length = 8\n')
    if wrong == "model":
        (model / "config.json").write_text("{}")
    if wrong == "folder":
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    if wrong == "place":
        mark(out, "run")
        (out / "model").rename(out / "logs")
    if wrong == "run":
        write_run(out)
    before = contents(tmp_path)
    words = ["train", str(job), "--local", "1000000" if wrong == "nodes" else "1", "--out", str(out)]
    result = CliRunner().invoke(cli.app, words)
    assert (result.exit_code, says in result.stderr) == (exit_code, True), result.stderr
    assert contents(tmp_path) == before
    assert out.exists() == (wrong in ("folder", "place", "run"))


def test_cli_explains_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command whose package is not installed is listed and says what to install."""
    monkeypatch.setattr(cli, "command_targets", lambda: {"fly": "no_such_package.commands:app"})
    app = typer.Typer(cls=cli.LazyGroup)
    app.callback()(cli.options)
    listed = CliRunner().invoke(app, ["--help"])
    assert "no_such_package" in listed.output
    result = CliRunner().invoke(app, ["fly", "--high"])
    assert result.exit_code == 1
    assert "pip install '.[node]'" in result.output


def test_cli_finds_commands_of_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an installed distribution the entry points come from pyproject.toml."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    assert tuple(cli.command_targets()) == COMMANDS


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


WAIT_S = 60.0


def told(*words: str, code: int = 2) -> str:
    """What a command says that ends with a code."""
    result = CliRunner().invoke(cli.app, list(words))
    assert result.exit_code == code, result.output
    return result.output


def test_page_of_a_folder_that_is_gone_or_at_a_wrong_address_is_refused(tmp_path: Path) -> None:
    """In one sentence."""
    assert "the run is gone, or never was there" in told("page", str(tmp_path / "gone")).replace("\n", " ")
    # As everywhere
    assert "is not HOST:PORT" in told("page", str(begun(tmp_path / "run", 1)), "--web", "nowhere")


def test_page_of_a_folder_is_served_until_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed address answers with the run; SIGTERM ends it in order."""
    wait, seen = ShutdownSignals.wait, list[Any]()

    def visit(ending: ShutdownSignals) -> bool:
        if not seen:
            printed: Any = sys.stdout.buffer
            url = json.loads(printed.getvalue())["url"]
            with urllib.request.urlopen(f"{url}api/state", timeout=WAIT_S) as answer:  # noqa: S310 - our own address
                seen.append(json.load(answer))
            os.kill(os.getpid(), signal.SIGTERM)
        return wait(ending)

    monkeypatch.setattr(ShutdownSignals, "wait", visit)
    words = ["page", str(begun(tmp_path / "run", 3)), "--web", "127.0.0.1:0", "--json"]
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    assert seen[0]["run"]["num_steps"] == 8
