"""Each task through ``ringtune train --local`` with real agents: it trains, judges and leaves a whole folder.

The command is typed in this process (``tests.support.typed``); ``test_kill_and_resume`` starts it as a user does.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from transformers import AutoTokenizer

from edge.data.questions import exact_match, f1
from edge.runtime.inference import main
from ringtune.job.job import load_job
from ringtune.run_control.evaluation import MIN_ROWS, entities_of
from ringtune.schedule.plan import Plan
from tests.support.cluster import TEMPLATE
from tests.support.tiny_data import write_task_rows
from tests.support.tiny_families import write_family
from tests.support.torch_ring import write_family_inputs
from tests.support.typed import run_here

JOB = """
[model]
path = "model"
task = "{task}"
[data]
train = "{train}"
eval = "{eval}"
[runtime]
lease_s = 30.0
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
        ("vit", "image-classification", {"accuracy"}),
        pytest.param("llama", "regression", {"mse", "mae", "pearson", "r2"}, marks=pytest.mark.thorough),
        ("gpt2", "token-classification", {"accuracy", "entity_f1", "entity_precision", "entity_recall"}),
    ],
)
def test_train_local_on_each_task(
    tmp_path: Path, model_type: str, task: str, figures: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two nodes train four steps; the report has the task's own figures, and what is predicted then has the same."""
    write_family_inputs(tmp_path, model_type, task)
    write_task_rows(tmp_path, task, "eval", 2 * MIN_ROWS, seed=2)  # fewer of an owner would count no tags
    report = trained(tmp_path, task)
    for name in figures:
        assert math.isfinite(report["eval"][name])
    assert (tmp_path / "out/adapter/adapter.safetensors").stat().st_size > 0
    assert judged(tmp_path, task, capsys) == pytest.approx(
        {name: report["eval"][name] for name in figures}, rel=1e-5, abs=1e-5
    )


def test_three_commands_lead_from_a_spreadsheet_to_a_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A German export with gaps and a model folder, nothing else: what is read, left out and predicted is on screen."""
    monkeypatch.chdir(tmp_path)
    write_family(tmp_path / "model", "bert", num_blocks=2)
    rows = [f"{at};w{at} für w{at % 5};{('gut', 'schlecht')[at % 2]};1,5" for at in range(24)]
    rows[4], rows[9], rows[15] = "4;;gut;1,5", "9;w1;;1,5", "15;w2;;1,5"
    export = "\r\n".join(["sep=;", "Nr;Antwort;Stimmung;Preis", *rows, ""])
    (tmp_path / "Umfrage.csv").write_bytes(export.encode("cp1252"))
    (tmp_path / "neu.tsv").write_bytes("Wer\tText\na\tw1 für w2\nb\t\n".encode())

    began = run_here(TEMPLATE.get, "init", "--yes", "--data", "Umfrage.csv")
    assert began.returncode == 0, began.stderr
    for line in (
        "Task: sequence-classification, by texts with values that repeat as classes do.",
        "Columns not used: 'Nr', 'Preis'.",
        "Umfrage.csv is not UTF-8 (line 3, byte 0xfc) and is read as Windows-1252",
        'data.text = "Antwort": it has the longest texts',
        "3 rows can't be used: column 'Antwort' is empty in line 7; column 'Stimmung' is empty in lines 12, 18",
        "set data.missing = 'skip' (in predict and eval --missing=skip) to leave out these rows",
    ):
        assert line in began.stdout
    refused = run_here(TEMPLATE.get, "train", "job.toml", "--local", "1", "--out", "run")
    assert refused.returncode == 5 and "3 rows can't be used" in refused.stderr and not (tmp_path / "run").exists()

    options = ("--set", "data.missing=skip", "--set", "train.max_steps=2", "--set", "data.held_out=0")
    choices = ("--assume", "1", "--microbatches", "2", "--wire", "bfloat16", "--save", "plan.json")
    planned = run_here(TEMPLATE.get, "plan", "job.toml", *choices, *options)
    assert planned.returncode == 0, planned.stderr
    by_plan = ("--plan", "plan.json", *options)
    trained = run_here(TEMPLATE.get, "train", "job.toml", "--local", "1", "--out", "run", *by_plan)
    assert trained.returncode == 0, trained.stderr
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert plan == json.loads((tmp_path / "plan.json").read_text())["plan"]
    assert (plan["course"]["microbatches"], plan["course"]["wire_dtype"]) == (2, "bfloat16")
    assert "1 left out: column 'Antwort' is empty" in trained.stderr + trained.stdout
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["rows"]["left_out"] == {"column 'Antwort' is empty": 1, "column 'Stimmung' is empty": 2}
    assert report["training"]["rows"] == 21

    wrong = run_here(TEMPLATE.get, "predict", "run", "--data", "neu.tsv")
    assert wrong.returncode == 5 and "has no column 'Antwort'; it has the columns 'Wer', 'Text'" in wrong.stderr
    said = run_here(TEMPLATE.get, "predict", "run", "--data", "neu.tsv", "--column", "text=Text")
    assert said.returncode == 0, said.stderr
    assert "1 row is left out: column 'Text' is empty (line 3)" in said.stderr and "1 row: 1 " in said.stderr
    assert said.stdout.splitlines()[0].startswith("Wer,Text,predicted,probability")


@pytest.mark.promise("8 adapterhub folder")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model_type", "task"),
    [
        ("bert", "regression"),
        ("bert", "token-classification"),
        ("gpt2", "token-classification"),
        ("qwen2", "regression"),
    ],
)
def test_lines_of_a_card_load_a_result_that_predicts_the_same(
    tmp_path: Path, model_type: str, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code in the exported README.md, as it stands there: a number for a text, a tag for each word."""
    write_family_inputs(tmp_path, model_type, task)
    trained(tmp_path, task)
    result = tmp_path / "result"
    done = run_here(TEMPLATE.get, "export", tmp_path / "out", "--out", result, "--base-model", "some/model")
    assert done.returncode == 0, done.stderr
    code = (result / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    code = code.replace("PATH_OF_THIS_FOLDER", str(result))
    names: dict[str, Any] = {}
    exec(code.replace("some/model", str(tmp_path / "model")), names)  # noqa: S102
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "model"))
    lines = predicted(tmp_path, capsys)
    for line in lines:
        row = line["row"]
        text, split = (row["words"], True) if task == "token-classification" else (row["text"], False)
        cut = {"truncation": True, "max_length": 24}
        inputs = tokenizer(text, is_split_into_words=split, return_tensors="pt", **cut)
        with torch.no_grad():
            logits = names["model"].eval()(**inputs).logits[0]
        if not split:
            assert logits.tolist() == pytest.approx([line["predicted"]["predicted"]], abs=1e-5)
            continue
        labels = names["model"].get_labels()
        found: dict[int, str] = {}
        for word, said in zip(inputs.word_ids(0), logits.argmax(-1).tolist(), strict=True):
            if word is not None:
                found.setdefault(word, labels[said])
        assert list(found.values()) == line["predicted"]["predicted"]
    assert len(lines) == 11


def predicted(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Predict for the evaluation rows with the adapter."""
    (evaluation,) = folder.glob("eval.*")
    job = load_job(folder / "out/job.toml")
    labels = Plan.from_json(json.loads((folder / "out/plan.json").read_text())).course.labels
    (folder / "judged.toml").write_text(job.with_overrides({"data.labels": list(labels)} if labels else {}).to_toml())
    assert main([str(folder / "judged.toml"), str(folder / "out/adapter"), str(evaluation)], sys.stdout) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"row"')]


def judged(folder: Path, task: str, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    """Predict for the evaluation rows with the adapter, and judge that by hand."""
    (evaluation,) = folder.glob("eval.*")
    lines = predicted(folder, capsys)
    said = [str(line["predicted"]["predicted"]) for line in lines]
    if task == "token-classification":
        return judged_tags(lines)
    if task == "regression":
        return judged_numbers(lines)
    if task == "image-classification":
        right = np.load(evaluation)["label"].astype(str).tolist()
        return {"accuracy": sum(map(str.__eq__, said, right)) / len(right)}
    answers = [line["row"]["answer"]["text"] for line in lines]
    places = [line["predicted"] for line in lines]
    assert said == [line["row"]["context"][at["start"] : at["stop"]] for line, at in zip(lines, places, strict=True)]
    count = len(lines)
    return {
        "f1": sum(map(f1, said, answers)) / count,
        "exact_match": sum(map(exact_match, said, answers)) / count,
        "questions": count,
    }


def judged_tags(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Judge a tag for each word; all entities are odd ones, and no word is cut."""
    pairs = [(line["row"]["tags"], line["predicted"]["predicted"]) for line in lines]
    right = [true == said for truth, words in pairs for true, said in zip(truth, words, strict=True)]
    found = [(entities_of(truth), entities_of(words)) for truth, words in pairs]
    hits, true, predicted = (
        sum(map(len, sets)) for sets in ([a & b for a, b in found], [a for a, _ in found], [b for _, b in found])
    )
    return {
        "accuracy": sum(right) / len(right),
        "entity_f1": 2 * hits / (true + predicted),
        "entity_precision": hits / predicted if predicted else 0.0,
        "entity_recall": hits / true,
    }


def judged_numbers(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Judge a number for each row by numpy."""
    true = np.array([float(line["row"]["label"]) for line in lines])
    said = np.array([line["predicted"]["predicted"] for line in lines])
    mse = float(((true - said) ** 2).mean())
    pearson = float(np.corrcoef(true, said)[0, 1])
    return {"mse": mse, "mae": float(abs(true - said).mean()), "pearson": pearson, "r2": 1 - mse / float(true.var())}


def trained(folder: Path, task: str) -> dict[str, Any]:
    """Train four steps with the inputs in a folder; return the report."""
    (train,) = folder.glob("train.*")
    (evaluation,) = folder.glob("eval.*")
    text = JOB.format(task=task, train=train.name, eval=evaluation.name)
    (folder / "job.toml").write_text(text)
    done = run_here(TEMPLATE.get, "train", folder / "job.toml", "--local", "2", "--out", folder / "out")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads((folder / "out/report.json").read_text())
    assert report["steps"] == 4
    return report


@pytest.mark.promise("8 adapterhub folder")
def test_result_of_a_language_model_is_its_adapter_alone(tmp_path: Path) -> None:
    """The stock model with its own decoder gives the ring's figures; an old result with a decoder too."""
    write_family_inputs(tmp_path, "llama", "causal-lm")
    write_family(tmp_path / "model", "llama", with_decoder=True, tie_word_embeddings=False)
    wanted = trained(tmp_path, "causal-lm")["eval"]
    adapter = tmp_path / "out/adapter"
    assert sorted(path.name for path in adapter.iterdir()) == ["adapter.safetensors", "adapter_config.json"]
    assert stock_figures(tmp_path, adapter) == pytest.approx((wanted["loss"], wanted["accuracy"]), rel=1e-5)

    head = {"heads.ringtune.0.weight": torch.zeros(7, 3)}  # not even looked at
    (adapter / "model_head.safetensors").write_bytes(save(head))
    (adapter / "head_config.json").write_text("{}")
    done = run_here(TEMPLATE.get, "eval", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout.splitlines()[-1])
    assert (again["loss"], again["accuracy"]) == pytest.approx((wanted["loss"], wanted["accuracy"]), rel=1e-5)


def stock_figures(folder: Path, adapter: Path) -> tuple[float, float]:
    """Loss and accuracy of the evaluation rows, with nothing of ours."""
    import adapters
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(folder / "model"))
    adapters.init(model)
    model.load_adapter(str(adapter), use_safetensors=True, set_active=True)
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "model"))
    (rows,) = folder.glob("eval.*")
    loss, hits, count = 0.0, 0, 0
    for line in rows.read_text().splitlines():
        ids = tokenizer(json.loads(line)["text"], truncation=True, max_length=24, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = model.eval()(input_ids=ids).logits[0, :-1]
        loss += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        hits += int((logits.argmax(-1) == ids[0, 1:]).sum())
        count += ids.shape[1] - 1
    return loss / count, hits / count
