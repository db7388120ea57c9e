"""A run that keeps its best result, over gRPC: what it leaves, and how it is made longer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from coordinator.client.checkpoints import find_resume
from coordinator.client.run_folder import RunFolder
from coordinator.client.submit import Client
from coordinator.run.requests import RunRequest
from coordinator.screen.progress import Progress, report_lines
from ringtune.errors import IntegrityError
from ringtune.job.job import Job
from tests.support.fake_agents import FakeCluster, block_tensor, job, read_lines

LOSSES = {4: 0.5, 8: 0.3, 12: 0.4, 16: 0.35, 20: 0.2}
BEST = {"train.keep_best": True, "train.eval_every": 4, "train.checkpoint_every": 4}


def keeping(num_steps: int) -> Job:
    """So long a run, turns of two steps, an evaluation every four."""
    return job(train__max_steps=num_steps).with_overrides(BEST)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Two owners, whose tensors gain 100 in a step."""
    with FakeCluster("a", "b") as found:
        for agent in found.agents.values():
            agent.loss_of, agent.drift = lambda step: LOSSES.get(step, 0.6), 100
        yield found


def run(cluster: FakeCluster, out: Path, num_steps: int, *, resumes: bool = False) -> None:
    """Train so many steps, or go on."""
    wanted = keeping(num_steps)
    resume = find_resume(out, wanted, print) if resumes else None
    with RunFolder(out, resume=resumes) as folder, Client(cluster.server.address) as client:
        client.run(RunRequest(job=wanted, resume=resume), progress=Progress(), folder=folder)


def step_of(folder: Path) -> float:
    """After which step the adapter was sent that lies there."""
    return float(load_file(folder / "adapter" / "adapter.safetensors")[block_tensor(0)][0]) / 100


def test_best_result_is_that_of_the_run(cluster: FakeCluster, tmp_path: Path) -> None:
    """Adapter, lines of evaluations and report say the same step; what no checkpoint needs any more is dropped."""
    run(cluster, tmp_path, 12)
    assert step_of(tmp_path) == 8
    evaluations = [line for line in read_lines(tmp_path / "metrics.jsonl") if line["kind"] == "evaluation"]
    assert [(line["step"], line["is_best"]) for line in evaluations] == [(4, True), (8, True), (12, False)]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["best"] == {"step": 8, "loss": pytest.approx(0.3)}
    assert report["eval"]["step"] == 8 and report["eval"]["loss"] == pytest.approx(0.3)
    result, risen = report_lines(report)[-2:]
    assert result.startswith("the result is that of step 8, the best evaluation: ") and "loss 0.3000 on " in result
    assert risen == "evaluation loss has risen since step 8 (0.3 -> 0.4): the result of step 8 is kept"
    assert step_of(tmp_path / "best" / "8") == 8
    assert sorted(entry.name for entry in (tmp_path / "best").iterdir()) == ["4", "8"]


def test_best_result_leaves_what_its_user_has_put_in_its_place(cluster: FakeCluster, tmp_path: Path) -> None:
    """A folder that came while the run trained is put aside and named; that of the run is the best result."""
    out, said = tmp_path / "run", list[str]()
    with RunFolder(out, say=said.append) as folder, Client(cluster.server.address) as client:
        (out / "adapter").mkdir()
        (out / "adapter/notes.txt").write_text("mine")
        client.run(RunRequest(job=keeping(12)), progress=Progress(), folder=folder)
        assert step_of(out) == 8 and not (out / "adapter/notes.txt").exists()
        folder.add_best(8, is_result=True)
    (aside,) = tmp_path.glob("run.replaced-*")
    assert (aside / "adapter/notes.txt").read_text() == "mine"
    assert said == [f"what was changed after the run wrote it is in {aside}: adapter"]


def test_best_result_of_the_last_step_is_sent_once(cluster: FakeCluster, tmp_path: Path) -> None:
    """The last evaluation is the best one: nodes are asked at the end only, as for any run."""
    run(cluster, tmp_path, 8)
    assert step_of(tmp_path) == 8
    assert sorted(entry.name for entry in (tmp_path / "best").iterdir()) == ["4"]
    assert [agent.log.count("collect") for agent in cluster.agents.values()] == [2, 2]


def test_best_result_of_a_run_that_is_made_longer(cluster: FakeCluster, tmp_path: Path) -> None:
    """The best step may be one of the part before, which lies in the folder, or a later one."""
    run(cluster, tmp_path, 12)
    run(cluster, tmp_path, 16, resumes=True)
    assert step_of(tmp_path) == 8
    assert json.loads((tmp_path / "report.json").read_text())["best"]["step"] == 8
    run(cluster, tmp_path, 22, resumes=True)
    assert step_of(tmp_path) == 20


def test_best_result_that_is_gone_is_named(cluster: FakeCluster, tmp_path: Path) -> None:
    """A checkpoint is of no use without it."""
    run(cluster, tmp_path, 12)
    shutil.rmtree(tmp_path / "best")
    with pytest.raises(
        IntegrityError, match=r"checkpoint of step 12 can't be used: .*best/8, the best result until then"
    ):
        find_resume(tmp_path, keeping(16), print)
