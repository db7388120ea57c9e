"""Runs that choose operations or when to unfreeze, over gRPC: grants, files, checkpoints, and what goes wrong."""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from coordinator.client.checkpoints import RunCheckpoints, find_resume
from coordinator.client.run_files import TablesFile
from coordinator.run.requests import RunRequest
from coordinator.run.run_driver import choose_beside
from coordinator.screen.plan_text import plan_text, table_text
from ringtune.errors import DivergedError, IntegrityError, PlanError, RingTuneError
from ringtune.job.job import Job
from ringtune.run_control import events as rd
from ringtune.run_control.checkpoint import Resume
from ringtune.schedule.operation_tables import Operations
from ringtune.schedule.turns import StepKind, Turn
from tests.support.choosing import make_choice
from tests.support.fake_agents import CALL_S, FakeAgent, FakeCluster, job, read_lines, submit
from tests.support.plans import changed, make_plan

WAIT_S = 20.0
# turns of two steps, two owners: tables at steps 0, 4 and 8; agents whose scores are other ones at each
JOB = job(
    train__max_steps=12,
    train__checkpoint_every=4,
    train__eval_every=4,
    operations__policy="two-stage",
    operations__full=1,
    operations__forward_only=1,
    operations__refresh_rounds=1,
)
CHOOSER = "ringtune.techniques.knapsacks"


def run(cluster: FakeCluster, out: Path, *, wanted: Job = JOB, resume: Resume | None = None) -> None:
    """Run the job, or go on with it."""
    submit(cluster, RunRequest(job=wanted, resume=resume), out)


def lines_of(out: Path) -> list[tuple[Any, ...]]:
    """What metrics.jsonl says of steps and decisions."""
    names = ("kind", "step", "depth", "digest", "full", "shortcut", "bytes")
    return [tuple(str(line.get(name)) for name in names) for line in read_lines(out / "metrics.jsonl")]


Tables = dict[tuple[StepKind, int], Operations | None]


@pytest.fixture(scope="module")
def granted() -> dict[str, Tables]:
    """The tables that turns brought to each node in the run of ``whole``, by kind and first step of the turn."""
    return {"a": {}, "b": {}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, granted: dict[str, Tables]) -> Path:
    """The folder of a run that went through."""

    def on_grant(agent: FakeAgent, turns: list[Turn]) -> None:
        granted[agent.node] |= {(turn.kind, turn.first_step): turn.operations for turn in turns}
        agent.stub.Report(agent.report(turns), timeout=CALL_S)

    out = tmp_path_factory.mktemp("whole")
    with FakeCluster("a", "b", agents={name: {"on_grant": on_grant} for name in granted}) as cluster:
        run(cluster, out)
    return out


def test_choosing_logs_each_table_with_its_step(whole: Path) -> None:
    """operations.json has the tables, metrics.jsonl a line before the first step of each, with the counts."""
    tables = TablesFile(whole).read()
    assert [table.step for table in tables] == [0, 4, 8]
    assert tables[0].operations != tables[1].operations != tables[2].operations
    lines = read_lines(whole / "metrics.jsonl")
    decided = [(line["step"], line["digest"]) for line in lines if line["kind"] == "operations"]
    assert decided == [(table.step, table.operations.digest) for table in tables]
    followed = [lines[at + 1] for at, line in enumerate(lines) if line["kind"] == "operations"]
    assert [(line["kind"], line["step"]) for line in followed] == [("train", 1), ("train", 5), ("train", 9)]
    (first, *_) = (line for line in lines if line["kind"] == "operations")
    rows, subnets = [row for batch in tables[0].operations.batches for row in batch.rows], tables[0].operations.subnets
    codes = "".join(row[-subnets:] for row in rows)  # in so few steps only the top block trains
    assert [first[name] for name in ("full", "forward_only", "shortcut")] == [codes.count(code) for code in "123"]


def test_choosing_goes_on_with_the_tables_of_the_whole_run(whole: Path, tmp_path: Path) -> None:
    """The run goes on where a table is due: it scores again, and all lines are those of the whole run."""
    out = shutil.copytree(whole, tmp_path / "run")
    checkpoints = RunCheckpoints(out)
    assert [manifest.step for manifest in checkpoints.read()[0]] == [12, 8]
    checkpoints.path(12).unlink()
    (out / "report.json").unlink()
    goes_on(out, 8, whole)


def test_choosing_of_a_run_made_longer_is_that_of_the_long_run(whole: Path, tmp_path: Path) -> None:
    """A table that is due where the shorter run ended is chosen by the longer one."""
    with FakeCluster("a", "b") as cluster:
        run(cluster, tmp_path, wanted=JOB.with_overrides({"train.max_steps": 4}))
    assert [table.step for table in TablesFile(tmp_path).read()] == [0]
    goes_on(tmp_path, 4, whole)


def goes_on(out: Path, step: int, whole: Path) -> None:
    """Go on with a run after a step; all that it logs is what the whole run has logged."""
    resume = find_resume(out, JOB, print)
    assert resume is not None and resume.manifests[0].step == step
    assert resume.manifests[0].operations == TablesFile(whole).read()[step // 4 - 1].operations
    with FakeCluster("a", "b") as cluster:
        run(cluster, out, resume=resume)
    assert TablesFile(out).read() == TablesFile(whole).read()
    assert lines_of(out) == lines_of(whole)


def test_choosing_reaches_every_node_with_its_turn(whole: Path, granted: dict[str, Tables]) -> None:
    """Every train turn carries the table of its step to every node, score turns the one before."""
    tables = {table.step: table.operations for table in TablesFile(whole).read()}
    assert granted["a"] == granted["b"]
    found = granted["a"]
    assert [found[StepKind.TRAIN, step] for step in range(0, 12, 2)] == [
        tables[step // 4 * 4] for step in range(0, 12, 2)
    ]
    assert [found[StepKind.SCORE, step] for step in (0, 4, 8)] == [None, tables[0], tables[4]]
    assert [found[StepKind.CHECKPOINT, step] for step in (4, 8, 12)] == [tables[0], tables[4], tables[8]]


def _spoiled(change: Any) -> Any:
    def on_grant(agent: FakeAgent, turns: list[Turn]) -> None:
        report = agent.report(turns)
        change(report)
        agent.stub.Report(report, timeout=CALL_S)

    return on_grant


def _not_a_number(report: Any) -> None:
    for message in report.scores:
        message.values = b"\0\0\0\0\0\0\xf8\x7f" * (len(message.values) // 8)


def _left_out(report: Any) -> None:
    del report.scores[:1]


def _doubled(report: Any) -> None:
    report.scores.extend(report.scores[:1])


def _cut(report: Any) -> None:
    for message in report.scores:
        message.values = message.values[:-1]


def _widened(report: Any) -> None:
    for message in report.scores:
        message.scores, message.subnets, message.values = 1, 4096, bytes(8 * 4096)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_not_a_number, DivergedError, "node b reports .*batch .*micro-batch .*block .*subnet .*nan"),
        (_left_out, IntegrityError, "node b reports scores at the end of turn 0 of node a without some that it owes"),
        (_doubled, IntegrityError, "node b reports scores at the end of turn 0 of node a twice"),
        (_cut, IntegrityError, "bytes, which are not"),
        (_widened, IntegrityError, "node b reports 1 scores of 4096 subnets, the run has "),
    ],
)
def test_choosing_with_wrong_scores_ends_the_run(
    tmp_path: Path, change: Any, error: type[RingTuneError], message: str
) -> None:
    """Nothing is trained, and one clear sentence says who sent what."""
    agents = {"b": {"on_grant": _spoiled(change)}}
    with FakeCluster("a", "b", agents=agents) as cluster, pytest.raises(error, match=message):
        run(cluster, tmp_path)
    assert not (tmp_path / "operations.json").exists()


def test_choosing_with_scores_without_end_ends_the_run(tmp_path: Path) -> None:
    """A node that sends scores and never ends their turn does not fill the coordinator's memory."""

    def on_grant(agent: FakeAgent, turns: list[Turn]) -> None:
        report = agent.report(turns)
        del report.turns_done[:]
        report.scores.extend(20 * list(report.scores))
        agent.stub.Report(report, timeout=CALL_S)

    agents = {name: {"on_grant": on_grant} for name in ("a", "b")}
    with FakeCluster("a", "b", agents=agents) as cluster, pytest.raises(IntegrityError, match="too many scores"):
        run(cluster, tmp_path)


# ---- the thread that chooses -----------------------------------------------------------------------


def chosen(monkeypatch: pytest.MonkeyPatch, choose_table: Any) -> rd.OperationsChosen | rd.OperationsFailed:
    """What comes of a choice."""
    monkeypatch.setitem(sys.modules, CHOOSER, types.SimpleNamespace(choose_table=choose_table))
    found: list[rd.OperationsChosen | rd.OperationsFailed] = []
    course = changed(make_plan([("a", 0, 4)], ["a"]), choice=make_choice()).course
    choose_beside(course, 4, (), found.append).join(WAIT_S)
    return found[0]


def test_choosing_answers_with_the_table_or_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is for the step that was asked for."""
    table = Operations(subnets=2)
    assert chosen(monkeypatch, lambda course, scores, step: table) == rd.OperationsChosen(4, table)
    # An error of the project keeps its class and words; any other one asks to be reported

    def refuses(course: object, scores: object, step: int) -> Operations:
        raise PlanError("a score is no number")

    def breaks(course: object, scores: object, step: int) -> Operations:
        raise KeyError("x")

    assert chosen(monkeypatch, refuses) == rd.OperationsFailed(4, "PlanError", "a score is no number")
    failed = chosen(monkeypatch, breaks)
    assert isinstance(failed, rd.OperationsFailed) and failed.error == "RingTuneError"
    assert "KeyError" in failed.message and "please report it" in failed.message


# turns of two steps, two owners, a patience of two turns, and agents whose loss rests: steps 10, 16 and 22
AUTO = job(train__max_steps=24, train__checkpoint_every=12, unfreeze__at="auto", unfreeze__patience_steps=4)


@pytest.fixture(scope="module")
def unfrozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose turns were granted with the decisions before them, at every node the same."""
    out, granted = tmp_path_factory.mktemp("whole"), dict[str, dict[int, tuple[int, ...]]](a={}, b={})

    def on_grant(agent: FakeAgent, turns: list[Turn]) -> None:
        granted[agent.node] |= {turn.first_step: turn.unfreeze_at for turn in turns if turn.kind is StepKind.TRAIN}
        agent.stub.Report(agent.report(turns), timeout=CALL_S)

    with FakeCluster("a", "b", agents={name: {"on_grant": on_grant} for name in granted}) as cluster:
        run(cluster, out, wanted=AUTO)
    assert granted["a"] == granted["b"]
    assert [granted["a"][step] for step in (8, 10, 14, 16, 22)] == [(), (10,), (10,), (10, 16), (10, 16, 22)]
    return out


@pytest.fixture
def stopped(unfrozen: Path, tmp_path: Path) -> Path:
    """The folder of a run as it was after step 12, with lines of metrics of all 24 steps."""
    out = shutil.copytree(unfrozen, tmp_path / "run")
    assert json.loads((out / "report.json").read_text())["unfreeze_at"] == [10, 16, 22]
    checkpoints = RunCheckpoints(out)
    assert checkpoints.steps() == (24, 12)
    checkpoints.path(24).unlink()
    (out / "report.json").unlink()
    return out


def test_unfreezing_goes_on_with_the_decisions_of_the_whole_run(stopped: Path) -> None:
    """The manifest knows the losses: metrics and report are those of the run that was never stopped."""
    unfrozen = [(line["step"], line.get("depth")) for line in read_lines(stopped / "metrics.jsonl")]
    resume = find_resume(stopped, AUTO, print)
    assert resume is not None and resume.manifests[0].unfreezing.unfreeze_at == (10,)
    with FakeCluster("a", "b") as cluster:
        run(cluster, stopped, wanted=AUTO, resume=resume)
    assert [(line["step"], line.get("depth")) for line in read_lines(stopped / "metrics.jsonl")] == unfrozen
    report = json.loads((stopped / "report.json").read_text())
    assert (report["unfreeze_at"], report["whole"]["steps"]) == ([10, 16, 22], 24)


def test_unfreezing_is_shown_as_deep_as_it_can_get() -> None:
    """Before a run nobody knows its losses; its plan shows and bounds what may come."""
    slices = [("a", 0, 2), ("b", 2, 4)]
    auto = make_plan(slices, ["a", "b"], num_steps=24, unfreeze="auto", patience_steps=4)
    settled = make_plan(slices, ["a", "b"], num_steps=24, unfreeze="at", unfreeze_at=(10, 16, 22))
    assert table_text(auto, at_step=16, num_steps=1) == table_text(settled, at_step=16, num_steps=1)
    assert "actions from step 16, depth 3 at most, the losses decide:" in plan_text(
        auto, {}, at_step=16, measured=False
    )
    assert "actions from step 16, depth 3:" in plan_text(settled, {}, at_step=16, measured=False)
