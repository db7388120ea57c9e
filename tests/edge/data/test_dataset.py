"""An owner's rows: read strictly, shared out without loss, padded, and known by their digest."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from edge.data.dataset import OwnerDataset, RowsDigest
from edge.data.tokens import Encoder, NoTokenError
from ringtune.config.sections import Data
from ringtune.errors import DataError, ModelError
from ringtune.job.job import parse_job
from ringtune.job.rows import read_rows
from ringtune.models.family import CLASSIFICATION
from ringtune.schedule.batches import BatchStream
from ringtune.schedule.turns import Item, StepKind
from tests.support import hand_ring as ring
from tests.support import tiny
from tests.support.tiny_data import SUFFIXES, shuffle_rows, write_task_rows
from tests.support.tiny_families import write_family


def _pairs(path: Path) -> list[tuple[str, str]]:
    found = read_rows(path, CLASSIFICATION, Data())
    return list(zip(found.rows, found.labels, strict=True))


def _item(kind: StepKind, batch: int, rows: int, owner: str = "a") -> Item:
    return Item(seq=0, kind=kind, step=0, owner=owner, batch=batch, rows=rows, turn=0)


def test_data_of_csv_and_jsonl_are_equal_and_keep_foreign_text(tmp_path: Path) -> None:
    """Commas, quotes, line breaks, a byte order mark and other scripts survive; integers become class names."""
    for suffix in ("csv", "jsonl"):
        path = tiny.write_rows(tmp_path / f"rows.{suffix}", 20, seed=4)
        assert _pairs(path) == tiny.make_rows(20, seed=4)
    path = tmp_path / "rows.csv"
    path.write_text('\ufefftext,label\n"a, ""b""\nc",1\nhéllo 你好,0\n', encoding="utf-8")
    assert _pairs(path) == [('a, "b"\nc', "1"), ("héllo 你好", "0")]
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "x", "label": 3}\n\n', encoding="utf-8")
    assert _pairs(path) == [("x", "3")]


BAD_FILES = (
    ("csv", "text,class\na,b\n", r"has no column 'label'; it has the columns 'text', 'class'; set data\.label"),
    ("csv", "text,label\n", "has no rows"),
    ("csv", "", "has no rows"),
    ("csv", "text,label\na\n", "line 2: column 'label' is empty; fill it in or remove the row, or set data.missing"),
    ("csv", "text,label\na,\n", "line 2: column 'label' is empty"),
    ("txt", "a", "read from .csv, .tsv, .jsonl, .json, .xlsx, .parquet, .arrow; also packed as .gz or .zst"),
    ("jsonl", '{"text": "a", "label": "b"}\n{"text"\n', "line 2: it is not JSON"),
    ("jsonl", "[1]\n", "line 1: it is not a JSON object"),
    ("jsonl", '{"text": 1, "label": "b"}\n', "line 1: column 'text' is not text"),
    ("jsonl", '{"text": "a", "label": 0.5}\n', "is not a class name"),
)


def test_data_errors_name_file_line_and_column(model_folder: Path, tmp_path: Path) -> None:
    """A wrong file says where it is wrong; a missing one, bytes that are no text, and no tokenizer are told apart."""
    for suffix, content, message in BAD_FILES:
        path = tmp_path / f"rows.{suffix}"
        path.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=message) as caught:
            read_rows(path, CLASSIFICATION, Data())
        assert str(path) in str(caught.value)
    with pytest.raises(DataError, match="is not there"):
        read_rows(tmp_path / "no.csv", CLASSIFICATION, Data())
    path = tmp_path / "rows.csv"
    path.write_bytes(b"text,label\n\x81,a\n")
    with pytest.raises(DataError, match="UTF-8"):
        read_rows(path, CLASSIFICATION, Data())
    rows, job = tiny.write_rows(tmp_path / "good.csv", 5), ring.make_job(model_folder)
    for folder, message in ((tmp_path / "none", "is not a folder"), (tmp_path, r"tokenizer \(tokenizer.json\); save")):
        with pytest.raises(ModelError, match=message):
            OwnerDataset.load(job, rows, None, tokenizer_folder=folder)


def test_data_batch_is_what_the_tokenizer_pads(model_folder: Path, tmp_path: Path) -> None:
    """A batch holds the stream's rows, padded to the longest of the batch and cut at max_length."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    job = ring.make_job(model_folder, train__max_length=12)
    path = tiny.write_rows(tmp_path / "train.csv", 25, seed=1)
    dataset = OwnerDataset.load(job, path, None, tokenizer_folder=model_folder)
    dataset.set_labels(tiny.LABELS)
    plan = ring.make_plan(job, {"a": dataset}, {"b": (0, 4)})
    rows = tiny.make_rows(25, seed=1)
    stream = BatchStream(25, 6, plan.course.seed, "a")
    widths = set()
    for index in range(9):
        batch = dataset.batch(plan.course, _item(StepKind.TRAIN, index, 6))
        picked = [rows[row] for row in stream.rows(index)]
        want = tokenizer(
            [text for text, _ in picked], padding="longest", truncation=True, max_length=12, return_tensors="pt"
        )
        assert torch.equal(batch.ids, want["input_ids"])
        assert torch.equal(batch.mask, want["attention_mask"])
        assert torch.equal(batch.token_type_ids, want["token_type_ids"])
        assert batch.labels.tolist() == [tiny.LABELS.index(label) for _, label in picked]
        widths.add(batch.ids.shape[1])
    assert max(widths) == 12


def test_data_refuses_a_class_outside_the_labels(model_folder: Path, tmp_path: Path) -> None:
    """A class that the run doesn't have is named, in training and in evaluation rows."""
    job = ring.make_job(model_folder)
    train = tiny.write_rows(tmp_path / "train.csv", 20, labels=("bad", "good"))
    evaluation = tiny.write_rows(tmp_path / "eval.csv", 20, labels=("bad", "fair"))
    dataset = OwnerDataset.load(job, train, evaluation, tokenizer_folder=model_folder)
    assert dataset.labels == ("bad", "good")
    assert dataset.eval_labels == ("bad", "fair")
    with pytest.raises(DataError, match="'fair'"):
        dataset.set_labels(("bad", "good"))
    dataset.set_labels(("bad", "fair", "good"))


def test_data_holds_rows_out_of_what_is_trained_on(model_folder: Path, tmp_path: Path) -> None:
    """Owners train on the other rows and evaluate these, all rows once; with a file for evaluation all rows train."""
    job = ring.make_job(model_folder, data__held_out=0.25)
    path, other = tiny.write_rows(tmp_path / "all.csv", 24, seed=1), tiny.write_rows(tmp_path / "eval.csv", 3, seed=2)
    shares = [
        OwnerDataset.load(job, path, None, share=share, num_owners=2, tokenizer_folder=model_folder)
        for share in range(2)
    ]
    assert [(owner.train_rows, owner.eval_rows) for owner in shares] == [(9, 3), (9, 3)]
    found = [
        text for owner in shares for examples in (owner._train, owner._evaluation) for text in examples._rows._texts
    ]
    assert sorted(found) == sorted(text for text, _ in tiny.make_rows(24, seed=1))
    with_file = OwnerDataset.load(job, path, other, tokenizer_folder=model_folder)
    assert (with_file.train_rows, with_file.eval_rows) == (24, 3)


NO_NAMES: tuple[tuple[dict[str, object], bool], ...] = (
    ({"data__text": "label", "data__label": "text"}, False),
    ({"data__text": "label", "data__label": "text", "data__labels": ("a", "b")}, False),
    ({"data__text": "label", "data__label": "text", "data__labels": tuple(f"note {row}" for row in range(300))}, True),
    ({"model__task": "token-classification", "data__words": "tags", "data__tags": "words"}, False),
    (
        {"offload__mode": "auto", "offload__users": "alone", "train__method": "all", "data__user": "id"},
        False,
    ),
    ({"data__label": "group"}, True),
)
"""Columns that a job names, and whether a node tells their names."""


@pytest.mark.parametrize(("columns", "tells"), NO_NAMES)
def test_data_of_columns_that_are_no_names_stay(
    columns: dict[str, object], tells: bool, model_folder: Path, tmp_path: Path
) -> None:
    """A job that names texts, words or persons as classes, tags or users learns none of them; the owner's own may."""
    job, path = ring.make_job(model_folder, **columns), tmp_path / "rows.jsonl"
    rows = [
        {"text": f"note {row}", "label": "ab"[row % 2], "group": f"g{row % 90}", "id": f"p{row}"}
        | {"words": [f"w{row}", "the"], "tags": ["B", "O"]}
        for row in range(300)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    OwnerDataset.load(job, path, None, tokenizer_folder=model_folder, hides_counts=False)
    if tells:
        OwnerDataset.load(job, path, None, tokenizer_folder=model_folder)
        return
    with pytest.raises(DataError, match=r"data\.(label|tags|user)\) has 30[01] different names") as caught:
        OwnerDataset.load(job, path, None, tokenizer_folder=model_folder)
    assert not re.search(r"note \d|w\d|p\d", str(caught.value).replace(str(path), ""))


def test_data_counts_classes_where_that_tells_nobody_a_label(model_folder: Path, tmp_path: Path) -> None:
    """After the last step only, and of nine rows never, unless whoever hears of it owns the rows.

    What an evaluation that was broken off has counted is no part of the next run's.
    """
    job, train = ring.make_job(model_folder), tiny.write_rows(tmp_path / "train.csv", 12, seed=1)
    for eval_rows, hides, counted_at in ((14, True, "end"), (9, True, ""), (9, False, "all")):
        judged = tiny.write_rows(tmp_path / "eval.csv", eval_rows, seed=2)
        dataset = OwnerDataset.load(job, train, judged, tokenizer_folder=model_folder, hides_counts=hides)
        dataset.set_labels(tiny.LABELS)
        course = ring.make_plan(job, {"a": dataset}, {"b": (0, 4)}).course
        half = dataclasses.replace(_item(StepKind.EVALUATE, 0, 6), step=course.num_steps)
        dataset.score(course, half, dataset.batch(course, half), torch.zeros(6, dtype=torch.int64))
        dataset.set_labels(tiny.LABELS)
        for step, is_counted in ((0, counted_at == "all"), (course.num_steps, counted_at != "")):
            told, truths = [], Counter[int]()
            for index, first in enumerate(range(0, eval_rows, 6)):
                count = min(6, eval_rows - first)
                item = dataclasses.replace(_item(StepKind.EVALUATE, index, count), step=step)
                batch = dataset.batch(course, item)
                truths.update(batch.labels.tolist())
                told.append(dataset.score(course, item, batch, torch.zeros(count, dtype=torch.int64)))
            counts = tuple((f"class:{true}:0", float(count)) for true, count in sorted(truths.items()))
            assert told[:-1] == [()] * (len(told) - 1) and told[-1] == (counts if is_counted else ()), counted_at


def test_encoder_counts_what_it_cuts_and_refuses_what_has_no_token() -> None:
    """A text of exactly the longest length is whole; one without a token would have no place for a loss."""

    def tokenizer(*texts: str, max_length: int = 99, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for text in texts for word in text.split()][:max_length]}

    encoder = Encoder(tokenizer, ["a b c", "a b c d", ("a", "b c d"), "a"], 3)
    assert [len(row.ids) for row in encoder] == [3, 3, 3, 1]
    assert encoder.cut_rows == 2
    empty = Encoder(lambda *_, **__: {"input_ids": []}, ["\u200b"], 3)
    with pytest.raises(
        NoTokenError, match="a text of 1 characters has no token that the tokenizer knows; remove its row"
    ):
        empty[0]


def test_a_text_without_a_token_is_refused_by_file_and_line(tmp_path: Path) -> None:
    """Before the first step where lengths are asked for, and in a batch; a tokenizer without special tokens."""
    folder = tiny.write_model(tmp_path / "model", num_blocks=1)
    saved = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(saved | {"post_processor": None}))
    rows, job = [("w1", "bad"), ("w2", "good"), ("\u200d", "bad")], ring.make_job(folder)
    for suffix, kind in itertools.product(("csv", "jsonl"), (StepKind.TRAIN, StepKind.EVALUATE)):
        good, bad = tmp_path / f"good.{suffix}", tmp_path / f"bad.{suffix}"
        for path, count in ((good, 2), (bad, 3)):
            lines = [json.dumps({"text": text, "label": label}) for text, label in rows[:count]]
            table = ["text,label", *(f"{text},{label}" for text, label in rows[:count])]
            path.write_text("\n".join(lines if suffix == "jsonl" else table) + "\n", encoding="utf-8")
        files = (good, bad) if kind is StepKind.EVALUATE else (bad, good)
        dataset = OwnerDataset.load(job, *files, tokenizer_folder=folder)
        dataset.set_labels(("bad", "good"))
        course = ring.make_plan(job, {"a": dataset}, {"b": (0, 4)}).course
        message = rf"bad\.{suffix}, line {3 if suffix == 'jsonl' else 4}: a text of 1 char"
        with pytest.raises(DataError, match=message):
            dataset.mean_tokens(4, 0, "a")
        with pytest.raises(DataError, match=message):
            dataset.batch(course, _item(kind, 0, 3))


def test_rows_that_are_left_out_or_cut_are_counted_by_owner(model_folder: Path, tmp_path: Path) -> None:
    """Shares of what is left out add up to the file's number; lengths are known once they were asked for."""
    rows = [*tiny.make_rows(9, seed=1), ("", "bad"), (" ", "bad"), ("w1", ""), (" ".join(["w2"] * 40), "bad")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    job = ring.make_job(model_folder, data__missing="skip", train__max_length=32)
    parts = [
        OwnerDataset.load(job, path, None, share=share, num_owners=2, tokenizer_folder=model_folder)
        for share in range(2)
    ]
    assert sum(part.train_rows for part in parts) == 10
    found = sum((Counter(part.left_out) for part in parts), Counter[str]())
    assert found == {"column 'text' is empty": 2, "column 'label' is empty": 1}
    for part in parts:
        part.mean_tokens(4, 1, "a")
    assert sum(part.cut_rows for part in parts) == 1


RUN = "r20260101-000000-00000000"
TASKS = {
    "sequence-classification": "bert",
    "regression": "bert",
    "token-classification": "bert",
    "question-answering": "bert",
    "causal-lm": "gpt2",
    "image-classification": "vit",
}


def digest_of(*parts: list[object]) -> str:
    """The digest of these lists of rows."""
    digest = RowsDigest()
    for rows in parts:
        digest.add(rows)
    return digest.keyed(RUN)


ROWS: list[object] = ["a", "bc", ("q", "c", ("x", "y"), 3), np.arange(6.0).reshape(2, 3)]


def test_rows_digest_sees_what_differs() -> None:
    """Order, where a row ends, nesting, shape and type."""
    others: list[list[list[object]]] = [
        [ROWS[::-1]],
        [["ab", "c", *ROWS[2:]]],
        [ROWS[:2], ROWS[2:]],
        [[*ROWS[:2], ("q", "c", ("x",), "y", 3), ROWS[3]]],
        [[*ROWS[:3], np.arange(6.0).reshape(3, 2)]],
        [[*ROWS[:3], np.arange(6.0, dtype=np.float32).reshape(2, 3)]],
        [[*ROWS[:2], ("q", "c", ("x", "y"), "3"), ROWS[3]]],
    ]
    assert digest_of(ROWS) == digest_of(list(ROWS))
    for number, other in enumerate(others):
        assert digest_of(ROWS) != digest_of(*other), number


def test_rows_digest_of_equal_rows_differs_between_runs() -> None:
    """Who sees the digests of two runs learns nothing about whether their rows were equal."""
    digest = RowsDigest()
    digest.add(ROWS)
    keyed = {digest.keyed(run) for run in (RUN, "r20260101-000000-00000001", "r20260102-000000-00000000")}
    assert len(keyed) == 3


@pytest.mark.parametrize("task", list(TASKS))
def test_rows_digest_of_every_task_follows_its_files(tmp_path: Path, task: str) -> None:
    """The same files give the same digest; other training or evaluation rows another one."""
    write_family(tmp_path / "model", TASKS[task], num_blocks=1, with_decoder=task == "causal-lm")
    names = {"train": 1, "same": 1, "other": 2, "eval": 3}
    for name, seed in names.items():
        write_task_rows(tmp_path, task, name, 12, seed=seed)
    job = parse_job(f'[model]\npath = "{tmp_path / "model"}"\ntask = "{task}"\n[train]\nmax_length = 32', source="test")

    def digest(train: str, evaluation: str = "eval", *, share: int = 0) -> str:
        paths = [tmp_path / f"{name}.{SUFFIXES[task]}" for name in (train, evaluation)]
        data = OwnerDataset.load(job, *paths, share=share, num_owners=2, tokenizer_folder=tmp_path / "model")
        return data.digest(RUN)

    assert digest("train") == digest("same")
    assert len({digest("train"), digest("other"), digest("train", "other"), digest("train", share=1)}) == 4
    if task == "sequence-classification":
        shuffle_rows(tmp_path / f"same.{SUFFIXES[task]}")
        assert digest("same") != digest("train"), "as many rows of the same classes, in another order"
