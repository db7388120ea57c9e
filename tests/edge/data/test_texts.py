"""Texts, or pairs of them, with a number each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.data.dataset import OwnerDataset
from edge.data.texts import LabelledTexts
from edge.data.tokens import load_tokenizer
from ringtune.errors import DataError, JobError
from ringtune.job.job import Job
from tests.support import hand_ring as ring
from tests.support.tiny_data import write_numbered


def job_of(folder: Path, **overrides: Any) -> Job:
    """A job of regression."""
    return ring.make_job(folder, **{"model__task": "regression", "train__max_length": 16, **overrides})


def test_numbers_are_targets_as_they_are_written(model_folder: Path, tmp_path: Path) -> None:
    """In float64, whatever the model computes in; -100 is a number like any other."""
    path = tmp_path / "rows.jsonl"
    values = [0.1, "2.5", -100, 3]
    path.write_text("".join(json.dumps({"text": "w1 w2", "label": value}) + "\n" for value in values))
    data = OwnerDataset.load(job_of(model_folder), path, None, tokenizer_folder=model_folder)
    batch = data._train.batch(range(4), {})
    assert batch.labels.dtype == torch.float64 and sorted(batch.labels.tolist()) == [-100.0, 0.1, 2.5, 3.0]
    assert data.labels == ()


def test_number_that_is_none_is_refused_by_its_line(model_folder: Path, tmp_path: Path) -> None:
    """Line and column are named, the cell is not quoted."""
    path, source = tmp_path / "rows.jsonl", LabelledTexts(job_of(model_folder), model_folder)
    values: tuple[tuple[object, str], ...] = (
        ("high", "is not a number but a text; give a number such as 0.75, or remove the row"),
        ("2,5", "is not a number but a text; write a point in place of the decimal comma, or remove the row"),
        ("", "is empty; fill it in or remove the row, or set data.missing = 'skip'"),
        (True, "is not a finite number but a bool"),
        ([1], "is not a finite number but a list"),
        ("nan", "is not a finite number but a text"),
        (float("inf"), "is not a finite number but a float"),
        ("-1e10", "has a number beyond 1e+09; divide the column by its size"),
        (None, "is empty; fill it in or remove the row"),
        (10**400, "is not a number but a int"),
    )
    for value, message in values:
        path.write_text("".join(json.dumps({"text": "a", "label": number}) + "\n" for number in (0.5, value)))
        with pytest.raises(DataError) as caught:
            source.read(path)
        assert "rows.jsonl, line 2" in str(caught.value) and "'label'" in str(caught.value)
        assert message in str(caught.value) and "high" not in str(caught.value)


@pytest.mark.parametrize("task", ["regression", "sequence-classification"])
def test_pairs_of_texts_are_encoded_as_the_tokenizer_does(model_folder: Path, tmp_path: Path, task: str) -> None:
    """Types tell the second text from the first, and the longer one is cut first."""
    path = tmp_path / "rows.csv"
    first, second = "w1 w2", " ".join(["w3"] * 20)
    path.write_text(f"text,other,label\n{first},{second},1\n{first},w4,2\n")
    job = job_of(model_folder, model__task=task, data__text_pair="other")
    source = LabelledTexts(job, model_folder)
    found = source.read(path)
    batch = source.examples(found.rows, found.targets).batch(range(2), {"1": 0, "2": 1})
    tokenizer = load_tokenizer(model_folder)
    wanted = tokenizer(
        [first, first], [second, "w4"], truncation=True, max_length=16, padding=True, return_tensors="pt"
    )
    assert torch.equal(batch.ids, wanted["input_ids"])
    assert torch.equal(batch.token_type_ids, wanted["token_type_ids"]) and int(batch.token_type_ids.sum()) > 0


def test_pairs_have_columns_that_differ_and_tasks_that_know_them(model_folder: Path) -> None:
    """A key that is of no use is refused, as is a text beside itself."""
    with pytest.raises(JobError, match=r"data\.text and data\.text_pair are both column 'text'"):
        job_of(model_folder, data__text_pair="text")
    with pytest.raises(JobError, match=r"data\.text_pair has no meaning for model\.task = 'token-classification'"):
        job_of(model_folder, model__task="token-classification", data__text_pair="other")
    with pytest.raises(JobError, match=r"data\.labels has no meaning for model\.task = 'regression'"):
        job_of(model_folder, data__labels=("a", "b"))


def test_sums_of_numbers_come_with_the_last_row(model_folder: Path, tmp_path: Path) -> None:
    """Nothing of a batch alone, nor of nine rows; the correlation of a number with itself is 1."""
    source = LabelledTexts(job_of(model_folder), model_folder)
    few = source.read(write_numbered(tmp_path / "few.csv", 9, seed=1))
    nine = source.examples(few.rows, few.targets)
    every = nine.batch(range(9), {})
    assert nine.scores is not None and nine.scores.add(every, every.labels, 0) == ()
    found = source.read(write_numbered(tmp_path / "rows.csv", 12, seed=1))
    examples = source.examples(found.rows, found.targets)
    values, scores = [], examples.scores
    assert scores is not None
    for first in (0, 8):
        batch = examples.batch(range(first, min(first + 8, 12)), {})
        values.append(dict(scores.add(batch, batch.labels, 0)))
    assert values[0] == {} and values[1]["numbers"] == 12
    assert values[1]["spearman_sum"] == pytest.approx(1.0)
    assert values[1]["products_sum"] == values[1]["true_squares"] == values[1]["predicted_squares"]
