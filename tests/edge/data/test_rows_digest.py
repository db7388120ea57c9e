"""The digest of an owner's rows: other rows or another order are seen, and runs can't be compared by it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge.data.rows import OwnerDataset
from edge.data.rows_digest import RowsDigest
from ringtune.jobs.job import parse_job
from tests.support import tiny
from tests.support.tiny_data import SUFFIXES, shuffle_rows, write_task_rows
from tests.support.tiny_families import write_family

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


@pytest.mark.parametrize(
    "other",
    [
        [ROWS[::-1]],
        [["ab", "c", *ROWS[2:]]],
        [ROWS[:2], ROWS[2:]],
        [[*ROWS[:2], ("q", "c", ("x",), "y", 3), ROWS[3]]],
        [[*ROWS[:3], np.arange(6.0).reshape(3, 2)]],
        [[*ROWS[:3], np.arange(6.0, dtype=np.float32).reshape(2, 3)]],
        [[*ROWS[:2], ("q", "c", ("x", "y"), "3"), ROWS[3]]],
    ],
)
def test_rows_digest_sees_what_differs(other: list[list[object]]) -> None:
    """Order, where a row ends, nesting, shape and type."""
    assert digest_of(ROWS) == digest_of(list(ROWS))
    assert digest_of(ROWS) != digest_of(*other)


def test_rows_digest_of_equal_rows_differs_between_runs() -> None:
    """Who sees the digests of two runs learns nothing about whether their rows were equal."""
    digest = RowsDigest()
    digest.add(ROWS)
    keyed = {digest.keyed(run) for run in (RUN, "r20260101-000000-00000001", "r20260102-000000-00000000")}
    assert len(keyed) == 3


@pytest.mark.parametrize("task", list(TASKS))
def test_rows_digest_of_every_task_follows_its_files(tmp_path: Path, task: str) -> None:
    """The same files give the same digest; other training or evaluation rows another one."""
    write_family(tmp_path / "model", TASKS[task], with_decoder=task == "causal-lm")
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


def test_rows_digest_sees_shuffled_rows_and_labels(tmp_path: Path) -> None:
    """As many rows of the same classes, in another order."""
    model = tiny.write_model(tmp_path / "model")
    path = tiny.write_rows(tmp_path / "train.csv", 20, seed=1)
    job = parse_job(f'[model]\npath = "{model}"', source="test")

    def digest() -> str:
        return OwnerDataset.load(job, path, None, tokenizer_folder=model).digest(RUN)

    before = digest()
    shuffle_rows(path)
    assert digest() != before
