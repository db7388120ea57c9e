"""Rows of users: read strictly from a column, sorted and counted by name; classes and windows go with their rows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from edge.data.dataset import OwnerDataset
from edge.runtime.executor import _check_data
from ringtune.errors import DataError
from ringtune.job.job import Job
from ringtune.schedule.run_shape import Owner, UserRows
from tests.support import hand_ring as ring
from tests.support import tiny
from tests.support.tiny_data import make_questions

USERS = ("ben", "anna", "carl", "anna", "ben")


def _job(folder: Path, **changes: Any) -> Job:
    return ring.make_job(folder, **{"data__user": "who", "offload__mode": "auto", "offload__users": "alone", **changes})


def _write(path: Path, rows: list[dict[str, Any]], users: tuple[Any, ...] = USERS) -> Path:
    records = [{**row, "who": users[at % len(users)]} for at, row in enumerate(rows)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def _texts(count: int, *, seed: int) -> list[dict[str, Any]]:
    return [{"text": text, "label": label} for text, label in tiny.make_rows(count, seed=seed)]


def _load(job: Job, folder: Path, train: Path, evaluation: Path | None = None, **share: Any) -> OwnerDataset:
    return OwnerDataset.load(job, train, evaluation, tokenizer_folder=folder, **share)


def test_users_are_counted_by_name_and_their_rows_lie_together(tmp_path: Path, model_folder: Path) -> None:
    """Ben's training rows come after anna's, in file order; texts and classes stay together."""
    rows = _texts(10, seed=1)
    train = _write(tmp_path / "train.jsonl", rows)
    evaluation = _write(tmp_path / "eval.jsonl", _texts(3, seed=2), ("dora", "ben", "dora"))
    found = _load(_job(model_folder), model_folder, train, evaluation)
    assert found.users == (
        UserRows(name="anna", train_rows=4),
        UserRows(name="ben", train_rows=4, eval_rows=1),
        UserRows(name="carl", train_rows=2),
        UserRows(name="dora", train_rows=0, eval_rows=2),
    )
    order = sorted(range(10), key=lambda at: USERS[at % 5])
    plain = _write(tmp_path / "sorted.jsonl", [rows[at] for at in order])
    in_order = _load(ring.make_job(model_folder), model_folder, plain)
    for dataset in (found, in_order):
        dataset.set_labels(tiny.LABELS)
    ours, theirs = (dataset._train.batch(range(10), dataset._targets) for dataset in (found, in_order))
    assert ours.ids.equal(theirs.ids) and ours.labels.equal(theirs.labels)


def test_users_have_all_windows_of_their_questions(tmp_path: Path, model_folder: Path) -> None:
    """A question without an answer is skipped with its user; windows follow in the order of users."""
    rows = make_questions(10, seed=5)
    rows[3] = {**rows[3], "answer": "not in there"}
    train = _write(tmp_path / "train.jsonl", rows, tuple(f"u{at}" for at in range(10)))
    job = _job(model_folder, model__task="question-answering", train__max_length=16)
    found = _load(job, model_folder, train)
    assert [user.name for user in found.users] == sorted(f"u{at}" for at in range(10) if at != 3)
    assert sum(user.train_rows for user in found.users) == found.train_rows > 9
    windows = found._train.scores._windows
    at = 0
    for index, user in enumerate(found.users):
        assert {window.question for window in windows[at : at + user.train_rows]} == {index}
        at += user.train_rows


def test_users_of_texts_for_a_language_model(tmp_path: Path, model_folder: Path) -> None:
    """A table of texts has a column; a plain text has none, and is refused with the remedy."""
    job = _job(model_folder, model__task="causal-lm")
    found = _load(job, model_folder, _write(tmp_path / "train.jsonl", _texts(5, seed=1)))
    assert [user.name for user in found.users] == ["anna", "ben", "carl"]
    (tmp_path / "train.txt").write_text("one two three", encoding="utf-8")
    with pytest.raises(DataError, match=r"train.txt is a plain text without columns, so data.user = 'who'"):
        _load(job, model_folder, tmp_path / "train.txt")


def test_users_count_for_the_digest_of_rows(tmp_path: Path, model_folder: Path) -> None:
    """Rows that change hands are other rows, even where their order stays; without users digests last."""
    rows = _texts(4, seed=1)
    files = [_write(tmp_path / f"{name}.jsonl", rows, users) for name, users in (("x", ("a", "a")), ("y", ("a", "b")))]
    rows_of = [_load(_job(model_folder), model_folder, file) for file in files]
    assert rows_of[0].digest("run") != rows_of[1].digest("run")
    plain = [_load(ring.make_job(model_folder), model_folder, file) for file in files]
    assert plain[0].digest("run") == plain[1].digest("run") != rows_of[0].digest("run")


def test_users_with_odd_names_are_refused_by_line(tmp_path: Path, model_folder: Path) -> None:
    """Names are those of folders: an empty cell or another name says in which line; without the column, the key."""
    for value, said in (
        ("", "line 2: column 'who' is empty"),
        ("  ", "line 2: column 'who' is empty"),
        ("../x", "is no name of a user; use 1 to 63 small letters"),
        ("Anna", "line 2: column 'who' (data.user) is no name of a user; use 1"),
        (None, "line 2: column 'who' is empty"),
        (True, "line 2: column 'who' (data.user) is not a user name but a bool"),
        (1.5, "is not a user name but a float"),
    ):
        train = _write(tmp_path / "train.jsonl", _texts(4, seed=1), ("anna", value, "anna", "anna"))
        with pytest.raises(DataError) as caught:
            _load(_job(model_folder), model_folder, train)
        assert said in str(caught.value)
    path = tiny.write_rows(tmp_path / "train.csv", 4, seed=1)
    with pytest.raises(DataError, match=r"has no column 'who'; it has the columns 'text', 'label'; set data.user"):
        _load(_job(model_folder), model_folder, path)


def test_users_of_a_node_have_to_be_those_of_the_plan(tmp_path: Path, model_folder: Path) -> None:
    """Whose row is which is told from the plan's counts, so a node checks them; the error names who differs."""
    job = _job(model_folder)
    found = _load(job, model_folder, _write(tmp_path / "train.jsonl", _texts(10, seed=1)))
    course = ring.make_plan(job, {"a": found}, {"a": (0, 4)}).course
    owner = Owner(node="a", train_rows=10, users=found.users)
    _check_data(dataclasses.replace(course, owners=(owner,)), "a", found)
    others = (*(dataclasses.replace(user, train_rows=3) for user in found.users[:2]), found.users[2])
    more = (*others, UserRows(name="dora", train_rows=2))
    wrong = dataclasses.replace(course, owners=(dataclasses.replace(owner, users=more),))
    with pytest.raises(DataError) as caught:
        _check_data(wrong, "a", found)
    assert str(caught.value) == (
        "node a has rows of anna (4 and 0), ben (4 and 0), the plan says anna (3 and 0), ben (3 and 0), dora (2 and 0)"
        "; plan anew"
    )
