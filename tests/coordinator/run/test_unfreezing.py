"""A run that decides when to unfreeze, over gRPC: its grants, and how it goes on from a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from coordinator.client.checkpoints import RunCheckpoints, find_resume
from coordinator.client.run_folder import RunFolder
from coordinator.client.submit import Client
from coordinator.run.requests import RunRequest
from coordinator.screen.plan_text import plan_text, table_text
from coordinator.screen.progress import Progress
from ringtune.errors import PlanError
from ringtune.run_control.checkpoint import Resume
from ringtune.schedule.turns import NOTHING_KNOWN, StepKind, Turn
from tests.support.fake_agents import CALL_S, FakeAgent, FakeCluster, job, read_lines
from tests.support.plans import make_plan

# turns of two steps, two owners, a patience of two turns, and agents whose loss rests: steps 10, 16 and 22
JOB = job(train__max_steps=24, train__checkpoint_every=12, unfreeze__at="auto", unfreeze__patience_steps=4)


def run(cluster: FakeCluster, out: Path, *, resume: Resume | None = None) -> None:
    """Run the job, or go on with it."""
    with RunFolder(out, resume=resume is not None) as folder, Client(cluster.server.address) as client:
        client.run(RunRequest(job=JOB, resume=resume), progress=Progress(), folder=folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[int, tuple[int, ...]]]]:
    """The folder of a run, and by node and step the decisions with which its turns were granted."""
    out, granted = tmp_path_factory.mktemp("whole"), dict[str, dict[int, tuple[int, ...]]](a={}, b={})

    def on_grant(agent: FakeAgent, turns: list[Turn]) -> None:
        granted[agent.node] |= {turn.first_step: turn.unfreeze_at for turn in turns if turn.kind is StepKind.TRAIN}
        agent.stub.Report(agent.report(turns), timeout=CALL_S)

    with FakeCluster("a", "b", agents={name: {"on_grant": on_grant} for name in granted}) as cluster:
        run(cluster, out)
    return out, granted


@pytest.fixture
def stopped(whole: tuple[Path, object], tmp_path: Path) -> Path:
    """The folder of a run as it was after step 12, with lines of metrics of all 24 steps."""
    out = shutil.copytree(whole[0], tmp_path / "run")
    assert json.loads((out / "report.json").read_text())["unfreeze_at"] == [10, 16, 22]
    checkpoints = RunCheckpoints(out)
    assert checkpoints.steps() == (24, 12)
    checkpoints.path(24).unlink()
    (out / "report.json").unlink()
    return out


def test_unfreezing_goes_on_with_the_decisions_of_the_whole_run(stopped: Path) -> None:
    """The manifest knows the losses: metrics and report are those of the run that was never stopped."""
    whole = [(line["step"], line.get("depth")) for line in read_lines(stopped / "metrics.jsonl")]
    resume = find_resume(stopped, JOB, print)
    assert resume is not None and resume.manifests[0].unfreezing.unfreeze_at == (10,)
    with FakeCluster("a", "b") as cluster:
        run(cluster, stopped, resume=resume)
    assert [(line["step"], line.get("depth")) for line in read_lines(stopped / "metrics.jsonl")] == whole
    report = json.loads((stopped / "report.json").read_text())
    assert (report["unfreeze_at"], report["whole"]["steps"]) == ([10, 16, 22], 24)


def test_unfreezing_without_its_losses_does_not_go_on(stopped: Path) -> None:
    """A manifest that lacks them would lead to another run; it is refused before any node is asked."""
    path = RunCheckpoints(stopped).path(12)
    value = json.loads(path.read_text())
    del value["unfreezing"], value["digest"]
    manifest = RunCheckpoints(stopped).read()[0][0]
    forgotten = dataclasses.replace(manifest, unfreezing=NOTHING_KNOWN)
    path.write_text(json.dumps({**value, "digest": forgotten.digest}))
    with pytest.raises(PlanError, match="what is known of the losses is of 0 turns, step 12 comes after 6"):
        find_resume(stopped, JOB, print)


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


def test_unfreezing_reaches_every_node_with_its_turn(
    whole: tuple[Path, dict[str, dict[int, tuple[int, ...]]]],
) -> None:
    """Each granted turn carries all decisions that hold for it, to every node the same."""
    granted = whole[1]
    assert granted["a"] == granted["b"]
    assert {step: granted["a"][step] for step in (0, 8, 10, 14, 16, 22)} == {
        0: (),
        8: (),
        10: (10,),
        14: (10,),
        16: (10, 16),
        22: (10, 16, 22),
    }
