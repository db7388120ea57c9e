"""Figures by lm-eval's tasks, with a script in place of the process: lines, progress, and what is refused before."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.api import evaluation as api
from coordinator.api.evaluation import harness, lines_of
from ringtune.errors import IntegrityError, InvalidInputError, PeerLostError
from tests.support.cases import cases
from tests.support.saved_runs import plan, write_run
from tests.support.typed import run_alone

FIGURES = {
    "piqa": {"acc,none": 0.5, "acc_stderr,none": 0.0123, "acc_norm,none": 1, "acc_norm_stderr,none": "N/A"},
    "gsm8k": {"sample_len": 1319, "exact_match,strict-match": 0.25},
    "group": {"sample_len": "none"},
    "\x1b[2J": {"acc,none": None},
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that learned to write, where lm-eval is installed."""
    folder = write_run(tmp_path / "run")
    text = (folder / "job.toml").read_text()
    (folder / "job.toml").write_text(text.replace('task = "sequence-classification"', 'task = "causal-lm"'))
    (folder / "plan.json").write_text(json.dumps(plan(labels=()).to_json()))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return folder


def played(code: str, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let some code be the process; return the words that it gets."""
    got: list[list[str]] = []

    def command(_module: str, _run: object, _job: object, _folder: Path, *words: str) -> list[str]:
        got.append(list(words))
        return [sys.executable, "-S", "-c", code]

    monkeypatch.setattr(api, "command_of", command)
    return got


def test_figures_of_tasks_are_printed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In lines or as JSON, behind the number of requests that are done."""
    code = "import json\nfor n in range(1, 121): print(json.dumps(dict(done=n)))\n"
    code += f"print(json.dumps(dict(tasks={FIGURES})))"
    got = played(code, monkeypatch)
    done = run_alone("eval", run, "--harness", "piqa, gsm8k", "--harness-data", tmp_path)
    assert done.returncode == 0 and got[0] == ["piqa,gsm8k", str(tmp_path)]
    assert done.stdout.splitlines() == [
        "piqa: acc 0.5000 +- 0.0123, acc_norm 1.0000",
        "gsm8k: exact_match (strict-match) 0.2500 on 1,319 rows",
        "group: no figures",
        "\\x1b[2J: acc -",
    ]
    assert done.stderr.splitlines() == [f"lm-eval: {count} requests" for count in (1, 10, 100)]
    done = run_alone("eval", run, "--harness", "piqa", "--json", "--apply-chat-template")
    assert json.loads(done.stdout) == {"event": "harness", "tasks": FIGURES}
    assert got[1] == ["piqa", "--apply-chat-template"]
    assert list(lines_of({})) == []


@cases(
    ("code", "kind", "told"),
    [
        ("import sys; sys.stderr.write('error: lm-eval: no task\\n'); sys.exit(5)", InvalidInputError, "no task"),
        ("import os; os.kill(os.getpid(), 9)", PeerLostError, "SIGKILL"),
        ("print('{\"done\": 1}')", IntegrityError, "without figures"),
    ],
)
def test_process_that_fails_is_told(
    code: str, kind: type[Exception], told: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own error."""
    played(code, monkeypatch)
    with pytest.raises(kind, match=told):
        harness(api_run(run), ["piqa"])


def api_run(folder: Path) -> Any:
    """A run as the API reads it."""
    from coordinator.client.saved_run import read_run

    return read_run(folder)


def test_what_makes_no_sense_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a process is started: other rows, no tasks, a folder that is none, another task, a missing extra."""
    for words, told in (
        (["--harness", "piqa", "--data", "x.csv"], "brings its own rows and computes on this machine; leave --data"),
        (["--harness", "piqa", "--missing", "skip"], "leave --missing out"),
        (["--harness-data", str(tmp_path)], "name tasks with it"),
        (["--apply-chat-template"], "name tasks with it"),
        (["--harness", "piqa,,x"], "--harness has no tasks"),
        (["--harness", "piqa", "--harness-data", str(tmp_path / "no")], "is no folder"),
        (["--harness", "piqa", "--user", "al"], "leave --user out"),
    ):
        done = run_alone("eval", run, *words)
        assert done.returncode == 2 and told in done.stderr, words
    other = write_run(tmp_path / "other")
    assert "is for language models" in run_alone("eval", other, "--harness", "piqa").stderr
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = run_alone("eval", run, "--harness", "piqa")
    assert done.returncode == 2 and "needs lm-eval, not installed here" in done.stderr and "[harness]" in done.stderr
