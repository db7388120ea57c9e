"""``ringtune eval``, ``status`` and ``export`` as a user types them, after a run on real nodes.

Each way to evaluate or export is a process once; other commands are typed in this process (``tests.support.typed``).
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from ringtune.errors import DataError, IntegrityError, InvalidInputError, UsageError
from tests.support import tiny
from tests.support.cluster import TEMPLATE, Cluster
from tests.support.processes import run_ringtune
from tests.support.typed import run_here

JOB = """
[model]
path = "{model}"
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


def good(*arguments: object, run: Callable[..., CompletedProcess[str]] = here) -> dict[str, Any]:
    """The last JSON line of a command that has to succeed."""
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def run(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, trained on the cluster's nodes."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "job.toml").write_text(JOB.format(model=cluster.model))
    good("train", folder / "job.toml", "--coordinator", cluster.address, "--out", folder / "run")
    return folder / "run"


def test_eval_gives_what_the_run_reported(cluster: Cluster, run: Path) -> None:
    """Alone, on the ring, and of its nodes' own rows: the figures of the run on the same rows; nodes are idle again."""
    trained = json.loads((run / "report.json").read_text())["eval"]
    alone = good("eval", run, "--data", cluster.eval, run=run_ringtune)
    ring = good("eval", run, "--data", cluster.eval, "--coordinator", cluster.address, run=run_ringtune)
    their_own = good("eval", run, "--coordinator", cluster.address)
    for found in (alone, ring, their_own):
        assert (found["count"], found["accuracy"]) == (trained["count"], trained["accuracy"])
        assert found["loss"] == pytest.approx(trained["loss"], rel=1e-5)
    cluster.wait_idle(*cluster.names)
    assert set(cluster.states()) == set(cluster.names)
    left = Path(os.environ["XDG_STATE_HOME"]) / "ringtune"
    assert not list(left.glob("eval-*")), "an evaluation leaves nothing in the user's folder"


def test_predict_names_classes_as_often_right_as_the_run_reported(cluster: Cluster, run: Path, tmp_path: Path) -> None:
    """From file to file: each row with its columns, shares that add up to 1, and the accuracy of the run."""
    trained = json.loads((run / "report.json").read_text())["eval"]
    found = good("predict", run, "--data", cluster.eval, "--save", tmp_path / "out.csv")
    assert (found["rows"], found["judged"]) == (trained["count"], trained["count"])
    assert found["accuracy"] == pytest.approx(trained["accuracy"], abs=1e-6)
    rows = list(csv.DictReader(cluster.eval.read_text().splitlines()))
    written = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [(line["text"], line["label"]) for line in written] == [(row["text"], row["label"]) for row in rows]
    for line in written:
        shares = {label: float(line[f"probability_{label}"]) for label in tiny.LABELS}
        assert sum(shares.values()) == pytest.approx(1, abs=1e-5)
        assert line["predicted"] == max(shares, key=shares.__getitem__)
    assert sum(line["predicted"] == line["label"] for line in written) / len(rows) == trained["accuracy"]


def test_predict_refuses_what_it_can_not_use(run: Path, tmp_path: Path) -> None:
    """Before any process is started; no traceback."""
    (tmp_path / "rows.csv").write_text("text\nw1\n")
    for words, code, message in (
        (("--data", tmp_path / "gone.csv"), DataError.exit_code, "is not there; give --data"),
        (("--data", tmp_path / "rows.csv", "--save", "out.xlsx"), UsageError.exit_code, "written as .csv or .jsonl"),
        (("--data", tmp_path / "rows.csv", "--user", "anna"), UsageError.exit_code, "no adapters of single users"),
    ):
        done = here("predict", run, *words)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        assert message in done.stderr


@pytest.mark.thorough
def test_eval_takes_a_run_of_own_weights(cluster: Cluster, tmp_path: Path) -> None:
    """Without an adapter the blocks' own weights go to the submitter and back to other nodes; export names them."""
    (tmp_path / "job.toml").write_text(JOB.format(model=cluster.model) + '[adapter]\nconfig = "full"\n')
    good("train", tmp_path / "job.toml", "--coordinator", cluster.address, "--out", tmp_path / "run")
    trained = json.loads((tmp_path / "run/report.json").read_text())["eval"]
    files = sorted(path.name for path in (tmp_path / "run/adapter").iterdir())
    assert files == ["blocks.safetensors", "head_config.json", "model_head.safetensors"]
    found = good("eval", tmp_path / "run", "--data", cluster.eval, "--coordinator", cluster.address)
    assert (found["count"], found["accuracy"]) == (trained["count"], trained["accuracy"])
    assert found["loss"] == pytest.approx(trained["loss"], rel=1e-5)
    done = here("export", tmp_path / "run", "--out", tmp_path / "exported")
    assert done.returncode == UsageError.exit_code
    assert "has no adapter to export" in done.stderr and "Traceback" not in done.stderr


def test_eval_takes_a_run_of_full_parameters(cluster: Cluster, tmp_path: Path) -> None:
    """The whole model goes back to the nodes, each its part; what is exported predicts the same without us."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    job = JOB.format(model=cluster.model).partition("[unfreeze]")[0]
    (tmp_path / "job.toml").write_text(f'{job}method = "hift"\n')
    good("train", tmp_path / "job.toml", "--coordinator", cluster.address, "--out", tmp_path / "run")
    trained = json.loads((tmp_path / "run/report.json").read_text())["eval"]
    assert not (tmp_path / "run/adapter").exists()
    for more in (("--data", cluster.eval), ()):
        found = good("eval", tmp_path / "run", *more, "--coordinator", cluster.address)
        assert (found["count"], found["accuracy"]) == (trained["count"], trained["accuracy"])
        assert found["loss"] == pytest.approx(trained["loss"], rel=1e-5)
    good("export", tmp_path / "run", "--out", tmp_path / "out", "--base-model", "acme/tiny")
    model = AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "out")).eval()
    rows = list(csv.DictReader(cluster.eval.read_text().splitlines()))
    words = AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    inputs = words([row["text"] for row in rows], padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        predicted = model(**inputs).logits.argmax(dim=-1).tolist()
    hits = sum(model.config.id2label[index] == row["label"] for index, row in zip(predicted, rows, strict=True))
    assert hits / len(rows) == trained["accuracy"]
    everything = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert str(cluster.folder).encode() not in everything


def test_eval_of_other_rows_needs_no_class_of_them_all(cluster: Cluster, run: Path, tmp_path: Path) -> None:
    """Rows of one class are enough; the head keeps its classes."""
    rows = tiny.write_rows(tmp_path / "rows.csv", 5, labels=tiny.LABELS[:1])
    found = good("eval", run, "--data", rows)
    assert found["count"] == 5
    assert 0 <= found["accuracy"] <= 1


def test_eval_refuses_a_foreign_class_and_a_missing_file(cluster: Cluster, run: Path, tmp_path: Path) -> None:
    """Exit codes and words as everywhere; no traceback."""
    rows = tiny.write_rows(tmp_path / "rows.csv", 5, labels=("good", "strange"))
    for data, message in ((rows, "strange"), (tmp_path / "none.csv", "is not there")):
        done = here("eval", run, "--data", data)
        assert done.returncode == DataError.exit_code, done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_eval_refuses_a_damaged_or_missing_adapter(cluster: Cluster, run: Path, tmp_path: Path) -> None:
    """Half a file is damage, named by the node; a run without one did not end."""
    broken = tmp_path / "run"
    (broken / "adapter").mkdir(parents=True)
    for path in (*run.glob("*.*"), *run.glob("adapter/*")):
        (broken / path.relative_to(run)).write_bytes(path.read_bytes())
    weights = broken / "adapter/adapter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = here("eval", broken, "--data", cluster.eval)
    assert done.returncode == IntegrityError.exit_code, done.stderr
    assert "adapter.safetensors is damaged" in done.stderr
    weights.unlink()
    assert here("eval", broken, "--data", cluster.eval).returncode == InvalidInputError.exit_code


def test_status_tells_of_the_last_run(cluster: Cluster, run: Path) -> None:
    """Phase, nodes and their state, asked for from outside."""
    found = good("status", "--coordinator", cluster.address)
    assert found["run"]["is_over"]
    assert {node["node"]: node["state"] for node in found["nodes"]} == dict.fromkeys(cluster.names, "idle")
    assert "nothing is driven now" in here("status", "--coordinator", cluster.address).stdout


@pytest.mark.promise("8 adapterhub folder")
def test_export_loads_with_nothing_of_ours(cluster: Cluster, run: Path, tmp_path: Path) -> None:
    """The exported folder gives the logits of the run's adapter in the plain library, and tells no path or name."""
    from adapters import AutoAdapterModel

    good("export", run, "--out", tmp_path / "out", "--base-model", "acme/tiny", run=run_ringtune)
    logits = []
    for folder in (tmp_path / "out", run / "adapter"):
        model = AutoAdapterModel.from_pretrained(str(cluster.model))
        model.load_adapter(str(folder), use_safetensors=True, set_active=True)
        with torch.no_grad():
            logits.append(model.eval()(input_ids=torch.arange(5, 15)[None]).logits)
    assert torch.equal(*logits)
    assert tuple(model.get_labels()) == tiny.LABELS
    everything = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    for private in (str(cluster.folder), "node-0"):
        assert private.encode() not in everything
