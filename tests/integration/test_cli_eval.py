"""``ringtune eval``, ``predict``, ``status`` and ``export`` as a user types them, after a run on real nodes.

The commands are typed in this process (``tests.support.typed``); ``test_kill_and_resume`` starts one as a user does.
"""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from ringtune.errors import DataError, IntegrityError, InvalidInputError, UsageError
from tests.support import tiny
from tests.support.cluster import TEMPLATE, Cluster
from tests.support.typed import run_here

JOB = """
[model]
path = "{model}"
[runtime]
lease_s = 30.0
[train]
learning_rate = 0.01
batch_size = 8
microbatches = 2
max_length = 16
local_iterations = 4
rounds = 2
[unfreeze]
every_steps = 3
"""


def here(*arguments: object) -> CompletedProcess[str]:
    """A command in this process, whose local node is forked from the cluster's template."""
    return run_here(TEMPLATE.get, *arguments)


def good(*arguments: object) -> dict[str, Any]:
    """The last JSON line of a command that has to succeed."""
    done = here(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def run(ring: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, trained on the cluster's nodes."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "job.toml").write_text(JOB.format(model=ring.model))
    good("train", folder / "job.toml", "--coordinator", ring.address, "--out", folder / "run")
    return folder / "run"


def test_eval_gives_what_the_run_reported(ring: Cluster, run: Path) -> None:
    """Alone, on the ring, and of its nodes' own rows: the figures of the run on the same rows; nodes are idle again."""
    trained = json.loads((run / "report.json").read_text())["eval"]
    alone = good("eval", run, "--data", ring.eval)
    there = good("eval", run, "--data", ring.eval, "--coordinator", ring.address)
    their_own = good("eval", run, "--coordinator", ring.address)
    for found in (alone, there, their_own):
        assert (found["count"], found["accuracy"]) == (trained["count"], trained["accuracy"])
        assert found["loss"] == pytest.approx(trained["loss"], rel=1e-5)
    ring.wait_idle(*ring.names)
    for guest in ring.states().keys() - set(ring.names):
        ring.wait_gone(guest)
    left = Path(os.environ["XDG_STATE_HOME"]) / "ringtune"
    assert not list(left.glob("eval-*")), "an evaluation leaves nothing in the user's folder"


def test_eval_takes_a_run_of_full_parameters(ring: Cluster, tmp_path: Path) -> None:
    """The whole model goes back to the nodes, each its part; what is exported predicts the same without us.

    An owner has sent the private block and gets it back. It is that of the best evaluation, before the last step, which
    nodes have kept on their disks.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    job = JOB.format(model=ring.model).partition("[unfreeze]")[0]
    job = job.replace("learning_rate = 0.01", "learning_rate = 1.0")  # so large that the loss soon rises
    more = 'method = "hift"\neval_every = 4\nkeep_best = true\n[privacy]\nprivate_blocks = 1\n'
    (tmp_path / "job.toml").write_text(job + more)
    good("train", tmp_path / "job.toml", "--coordinator", ring.address, "--out", tmp_path / "run")
    report = json.loads((tmp_path / "run/report.json").read_text())
    trained = report["eval"]
    assert trained["step"] == report["best"]["step"] < report["steps"]
    assert not (tmp_path / "run/adapter").exists() and not (tmp_path / "run/best").exists()
    found = good("eval", tmp_path / "run", "--coordinator", ring.address)
    assert (found["count"], found["accuracy"]) == (trained["count"], trained["accuracy"])
    assert found["loss"] == pytest.approx(trained["loss"], rel=1e-5)
    good("export", tmp_path / "run", "--out", tmp_path / "out", "--base-model", "acme/tiny")
    model = AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "out")).eval()
    rows = list(csv.DictReader(ring.eval.read_text().splitlines()))
    words = AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    inputs = words([row["text"] for row in rows], padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        predicted = model(**inputs).logits.argmax(dim=-1).tolist()
    hits = sum(model.config.id2label[index] == row["label"] for index, row in zip(predicted, rows, strict=True))
    assert hits / len(rows) == trained["accuracy"]
    everything = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert str(ring.folder).encode() not in everything


def test_eval_of_other_rows_needs_no_class_of_them_all(run: Path, tmp_path: Path) -> None:
    """Rows of one class are enough; the head keeps its classes."""
    rows = tiny.write_rows(tmp_path / "rows.csv", 5, labels=tiny.LABELS[:1])
    found = good("eval", run, "--data", rows)
    assert found["count"] == 5
    assert 0 <= found["accuracy"] <= 1


def test_eval_and_predict_refuse_what_they_can_not_use(run: Path, tmp_path: Path) -> None:
    """Exit codes and words as everywhere; no traceback."""
    rows, text = tiny.write_rows(tmp_path / "rows.csv", 5, labels=("good", "strange")), tmp_path / "text.csv"
    text.write_text("text\nw1\n")
    for command, words, code, message in (
        ("eval", (rows,), DataError.exit_code, "strange"),
        ("eval", (tmp_path / "gone.csv",), DataError.exit_code, "is not there"),
        ("predict", (tmp_path / "gone.csv",), DataError.exit_code, "is not there; give --data"),
        ("predict", (text, "--save", "out.xlsx"), UsageError.exit_code, "written as .csv or .jsonl"),
        ("predict", (text, "--coordinator", "127.0.0.1:1"), UsageError.exit_code, "writes texts of a language model"),
        ("predict", (text, "--user", "anna"), UsageError.exit_code, "no adapters of single users"),
    ):
        done = here(command, run, "--data", *words)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        assert message in done.stderr, (command, *words)


def test_eval_refuses_a_damaged_or_missing_adapter(ring: Cluster, run: Path, tmp_path: Path) -> None:
    """Half a file is damage, named by the node; a run without one did not end."""
    broken = tmp_path / "run"
    (broken / "adapter").mkdir(parents=True)
    for path in (*run.glob("*.*"), *run.glob("adapter/*")):
        (broken / path.relative_to(run)).write_bytes(path.read_bytes())
    weights = broken / "adapter/adapter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = here("eval", broken, "--data", ring.eval)
    assert done.returncode == IntegrityError.exit_code, done.stderr
    assert "adapter.safetensors is damaged" in done.stderr
    weights.unlink()
    assert here("eval", broken, "--data", ring.eval).returncode == InvalidInputError.exit_code


def test_status_tells_of_the_last_run(ring: Cluster, run: Path) -> None:
    """Phase, nodes and their state, asked for from outside."""
    found = good("status", "--coordinator", ring.address)
    assert found["run"]["is_over"]
    states = {node["node"]: node["state"] for node in found["nodes"]}
    assert {name: states.pop(name) for name in ring.names} == dict.fromkeys(ring.names, "idle")
    assert set(states.values()) <= {"lost"}, "a guest whose call to leave came too late is one until its lease ends"
    assert "nothing is driven now" in here("status", "--coordinator", ring.address).stdout


@pytest.mark.promise("8 adapterhub folder")
def test_export_loads_with_nothing_of_ours(ring: Cluster, run: Path, tmp_path: Path) -> None:
    """The exported folder gives the logits of the run's adapter in the plain library, and tells no path or name."""
    from adapters import AutoAdapterModel

    good("export", run, "--out", tmp_path / "out", "--base-model", "acme/tiny")
    logits = []
    for folder in (tmp_path / "out", run / "adapter"):
        model = AutoAdapterModel.from_pretrained(str(ring.model))
        model.load_adapter(str(folder), use_safetensors=True, set_active=True)
        with torch.no_grad():
            logits.append(model.eval()(input_ids=torch.arange(5, 15)[None]).logits)
    assert torch.equal(*logits)
    assert tuple(model.get_labels()) == tiny.LABELS
    everything = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert str(ring.folder).encode() not in everything
