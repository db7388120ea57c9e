"""Evaluation of a result: on a coordinator's nodes, over real calls, and by lm-eval's tasks with a script instead."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from coordinator.api import evaluation
from coordinator.api import evaluation as api
from coordinator.api import predict as api_predict
from coordinator.api.evaluation import evaluate_on_ring, harness, lines_of, rows_to_evaluate
from coordinator.api.predict import predict
from coordinator.cli.evaluate import evaluate as evaluate_command
from coordinator.client.follow import Outcome
from coordinator.client.saved_run import evaluation_job, read_run
from coordinator.client.submit import Client
from coordinator.run.members import Member
from coordinator.run.requests import Evaluation, RunRequest, invited
from coordinator.screen.progress import Progress
from ringtune.errors import (
    BusyError,
    DataError,
    IntegrityError,
    InvalidInputError,
    PeerLostError,
    RingTuneError,
    UsageError,
)
from ringtune.job.job import Data, Job
from ringtune.techniques.generation import GenerationSettings
from tests.support.cases import cases
from tests.support.fake_agents import CALL_S, FakeCluster, facts, job
from tests.support.plans import changed
from tests.support.saved_runs import adapter_files, texts_instead, write_run
from tests.support.typed import run_alone

app = typer.Typer()
app.command()(evaluate_command)


def evaluate(cluster: FakeCluster, folder: Path, owner: str) -> Outcome:
    """Evaluate a run's folder with a node as the owner."""
    run = read_run(folder)
    with Client(cluster.server.address) as client:
        return client.evaluate(
            evaluation_job(run, folder / "rows.csv"), owner=owner, saved=run.saved, progress=Progress()
        )


def test_evaluation_loads_everywhere_and_counts_one_owner(tmp_path: Path) -> None:
    """Nodes are measured and get the files before a turn; only the owner's rows count; nothing is trained."""
    with FakeCluster("a", "b", "c") as cluster:
        came = evaluate(cluster, write_run(tmp_path / "run"), "b")
        assert came.report["eval"] == {"accuracy": 0.4, "loss": 0.5, "rows": 5, "count": 5}
        assert came.report["steps"] == 0
        assert came.plan is not None
        assert [owner.node for owner in came.plan.course.owners] == ["b"]
        assert {piece.node for piece in came.plan.placement.slices} == {"a", "b", "c"}
        for agent in cluster.agents.values():
            assert agent.released.wait(CALL_S)
            assert agent.log == ["inspect", "prepare", "load", "grant", "collect", "release"]
            assert agent.loaded == adapter_files()


def test_evaluation_ends_with_the_error_of_a_node_that_refuses_the_adapter(tmp_path: Path) -> None:
    """The node's own words reach the user, and every node is released."""
    refusal = IntegrityError("adapter.safetensors lacks a tensor")
    with FakeCluster("node-0", "node-1", agents={"node-0": {"fails_at": {"load": refusal}}}) as cluster:
        with pytest.raises(IntegrityError, match=r"node node-0: adapter.safetensors lacks a tensor"):
            evaluate(cluster, write_run(tmp_path / "run"), "node-1")
        assert all(agent.released.wait(CALL_S) for agent in cluster.agents.values())
        assert "grant" not in cluster.agents["node-0"].log


def test_evaluation_without_an_owner_counts_the_rows_of_all(tmp_path: Path) -> None:
    """Every node that has rows to evaluate on does so; the counts are added up."""
    with FakeCluster("a", "b", "c", agents={"c": {"rows": 0}}) as cluster:
        came = evaluate(cluster, write_run(tmp_path / "run"), "")
        assert came.report["eval"] == {"accuracy": 0.4, "loss": 0.5, "rows": 10, "count": 10}
        assert came.plan is not None
        assert [owner.node for owner in came.plan.course.owners] == ["a", "b"]


def test_texts_end_with_a_remedy_where_a_node_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job that is sent writes texts and computes no loss."""
    jobs: list[Job] = []

    def lose(run: object, job: Job, *_: object, **__: object) -> None:
        jobs.append(job)
        raise PeerLostError("node b is gone")

    monkeypatch.setattr(evaluation, "_evaluated", lose)
    run = read_run(write_run(tmp_path / "run"))
    chat = run.job.with_overrides({"model.task": "chat", "data.labels": []})
    run = dataclasses.replace(run, job=chat, plan=changed(run.plan, labels=()))
    with pytest.raises(PeerLostError, match="node b is gone; texts that were begun are kept nowhere: type the command"):
        next(
            evaluation.texts_on_ring(
                run, tmp_path / "rows.jsonl", GenerationSettings(rows=7), "h:1", join_s=1.0, model=None, insecure=False
            )
        )
    assert [job.generation for job in jobs] == [GenerationSettings(rows=7, loss=False)]


def test_texts_that_a_coordinator_left_out_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it ends the run before all rows have one, or any; nothing is written to a file."""
    folder, ended = texts_instead(write_run(tmp_path / "run")), nullcontext((None, tmp_path / "states"))
    monkeypatch.setattr(evaluation, "_evaluated", lambda *_, **__: ended)

    def written() -> None:
        predict(str(folder), [{"text": "a"}, {"text": "b"}], coordinator="h:1", save=tmp_path / "out.csv")

    with pytest.raises(IntegrityError, match="ended the run without a text; use one version"):
        written()
    own = tmp_path / "states" / "eval" / "run"
    own.mkdir(parents=True)
    line = {"number": 1, "row": {"text": "b"}, "predicted": {"predicted": "c", "tokens": 1}, "is_cut": False}
    (own / "texts.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(IntegrityError, match=r"nodes of h:1 have written texts of 1 of 2 rows; call it again"):
        written()
    assert not (tmp_path / "out.csv").exists()
    monkeypatch.setattr(api_predict, "MAX_ROWS", 1)
    with pytest.raises(DataError, match=r"has 2 rows, and nodes write at most 1 texts; divide the file"):
        written()


def test_texts_are_read_one_by_one_in_the_order_of_their_rows(tmp_path: Path) -> None:
    """A row that was written again counts once, as it was written last; the agent's folder may be gone by then."""
    file, owner = tmp_path / "texts.jsonl", random.Random(0)
    lines = [{"number": number, "said": "ä" * owner.randrange(9)} for number in (*range(20), *range(5, 25))]
    owner.shuffle(lines)
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    texts = file.open("rb")
    file.unlink()
    last = {line["number"]: line for line in lines}
    assert list(evaluation.in_order(texts)) == [last[number] for number in range(25)]
    assert texts.closed


def test_evaluation_rows_are_given_or_those_of_the_job(tmp_path: Path) -> None:
    """Without --data the job's file or its held-out rows count, or on a ring those of its nodes; nothing is refused."""
    given, file = tmp_path / "given.csv", tmp_path / "job.csv"
    for path in (given, file):
        path.write_text("text,label\n", encoding="utf-8")
    of_job, held_out = Data(eval=str(file)), Data(held_out=0.1)
    assert rows_to_evaluate(given, of_job, on_ring=False) == rows_to_evaluate(given, Data(), on_ring=True) == given
    assert rows_to_evaluate(given, held_out, on_ring=False) == given
    assert rows_to_evaluate(None, of_job, on_ring=False) == file
    assert rows_to_evaluate(None, held_out, on_ring=False) is rows_to_evaluate(None, of_job, on_ring=True) is None
    with pytest.raises(UsageError, match=r"no data\.eval; give --data FILE"):
        rows_to_evaluate(None, Data(), on_ring=False)
    with pytest.raises(DataError, match="is not there"):
        rows_to_evaluate(None, Data(eval=str(tmp_path / "gone.csv")), on_ring=False)


def test_evaluation_on_the_rows_of_others_takes_no_options_of_a_node_here(tmp_path: Path) -> None:
    """They would be ignored, so they are refused with the remedy; with --data they are taken."""
    typed = [str(write_run(tmp_path / "run")), "--coordinator", "127.0.0.1:1", "--model", "tiny", "--join-s", "5"]
    done = CliRunner().invoke(app, typed)
    assert isinstance(done.exception, UsageError)
    assert "give --data FILE, or leave out --model and --join-s" in str(done.exception)
    done = CliRunner().invoke(app, [*typed, "--data", str(tmp_path / "gone.csv")])
    assert isinstance(done.exception, DataError)


@cases(
    ("owner", "message"),
    [
        ("c", "node c has no rows to evaluate on"),
        ("nobody", "node nobody has no rows to evaluate on"),
        ("", "no node has rows to evaluate on; start one with --eval-data, or give --data"),
    ],
)
def test_evaluation_needs_rows(tmp_path: Path, owner: str, message: str) -> None:
    """An owner without rows, or one that is not there, is named; the remedy names both ways to bring rows."""
    with FakeCluster("c", agents={"c": {"rows": 0}}) as cluster, pytest.raises(DataError, match=message):
        evaluate(cluster, write_run(tmp_path / "run"), owner)


def test_evaluation_of_damaged_files_is_refused_before_any_node_is_asked(tmp_path: Path) -> None:
    """A folder that loses a file on its way starts nothing."""
    folder = write_run(tmp_path / "run")
    with FakeCluster("a") as cluster:
        run = read_run(folder)
        (run.saved / "model_head.safetensors").unlink()
        with Client(cluster.server.address) as client, pytest.raises((RingTuneError, OSError)):
            client.evaluate(evaluation_job(run, folder / "rows.csv"), owner="a", saved=run.saved, progress=Progress())
        assert cluster.agents["a"].log == []


def test_evaluation_of_a_busy_coordinator_starts_nothing(tmp_path: Path) -> None:
    """While a run is driven, the user hears so at once, before a process is started."""
    (tmp_path / "rows.csv").write_text("text,label\na,b\n")
    run = read_run(write_run(tmp_path / "run"))
    hold: dict[str, Any] = {"on_grant": lambda agent, turns: None}
    with FakeCluster("a", agents={"a": hold}) as cluster:
        cluster.server.coordinator.run(RunRequest(job=job(), plan_only=False, num_nodes=1, join_s=5.0))
        assert cluster.agents["a"].granted.wait(CALL_S)
        with pytest.raises(BusyError, match=r"drives run .* \(training\)"):
            evaluate_on_ring(run, tmp_path / "rows.csv", cluster.server.address, join_s=1.0, model=None, insecure=False)
        assert [member.node for member in cluster.server.coordinator.living()] == ["a"]


def test_evaluation_guests_take_part_in_nothing_else() -> None:
    """A node that joined with rows to evaluate on is never trained on, and is there for its own evaluation only."""
    members = [Member(node=name, address="", instance="", is_guest=name != "a") for name in ("a", "mine", "other")]
    assert [member.node for member in invited(members, None)] == ["a"]
    assert [member.node for member in invited(members, Evaluation(owner="mine", folder=Path()))] == ["a", "mine"]
    # For the planner nobody else has rows or classes
    narrowed = Evaluation(owner="b", folder=Path()).narrow({name: facts(name) for name in ("a", "b")})
    assert (narrowed["a"].train_rows, narrowed["a"].eval_rows, narrowed["a"].labels) == (0, 0, ())
    assert narrowed["b"] == facts("b")


FIGURES = {
    "piqa": {"acc,none": 0.5, "acc_stderr,none": 0.0123, "acc_norm,none": 1, "acc_norm_stderr,none": "N/A"},
    "gsm8k": {"sample_len": 1319, "exact_match,strict-match": 0.25},
    "group": {"sample_len": "none"},
    "\x1b[2J": {"acc,none": None},
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that learned to write, where lm-eval is installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return texts_instead(write_run(tmp_path / "run"))


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
