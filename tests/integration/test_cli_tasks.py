"""Each task through ``ringtune train --local`` with real agents: it trains, judges and leaves a whole folder."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.support.processes import run_ringtune
from tests.support.torch_ring import write_family_inputs

JOB = """
[model]
path = "model"
task = "{task}"
[data]
train = "{train}"
eval = "{eval}"
[train]
batch_size = 4
microbatches = 2
max_length = 24
local_iterations = 2
max_steps = 4
"""


@pytest.mark.parametrize(
    ("model_type", "task", "figures"),
    [
        ("roberta", "question-answering", {"f1", "exact_match", "questions"}),
        ("llama", "causal-lm", {"perplexity"}),
        ("vit", "image-classification", {"accuracy"}),
    ],
)
def test_train_local_on_each_task(tmp_path: Path, model_type: str, task: str, figures: set[str]) -> None:
    """Two nodes train four steps; the report has the task's own figures, the adapter is there."""
    write_family_inputs(tmp_path, model_type, task)
    (train,) = tmp_path.glob("train.*")
    (evaluation,) = tmp_path.glob("eval.*")
    (tmp_path / "job.toml").write_text(JOB.format(task=task, train=train.name, eval=evaluation.name))
    done = run_ringtune("train", tmp_path / "job.toml", "--local", "2", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["steps"] == 4
    for name in figures:
        assert math.isfinite(report["eval"][name])
    assert (tmp_path / "out/adapter/adapter.safetensors").stat().st_size > 0
