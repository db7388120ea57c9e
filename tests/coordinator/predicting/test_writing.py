"""Predictions beside the columns of their rows: csv, jsonl, and the counts."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.predicting.process import Predicted
from coordinator.predicting.writing import CsvWriter, JsonWriter, Summary, writer_to
from ringtune.errors import DataError, UsageError
from ringtune.jobs.job import Job, Model

SAID = {"predicted": "pos", "probability": 0.75, "of_class": {"neg": 0.25, "pos": 0.75}}


def found(said: dict[str, Any] | None = None, **row: Any) -> Predicted:
    """A row with a prediction."""
    return Predicted(row=row, said=said or SAID)


def test_writing_keeps_the_columns_of_a_row_and_adds_its_own() -> None:
    """In csv each class has a column, in jsonl a table; commas, lists and null survive."""
    text, lines = io.StringIO(newline=""), io.StringIO()
    rows = [found(id=1, text="a, b", tags=["x"], note=None), found(id=2, text="c", tags=[], note="d")]
    table, objects = CsvWriter(text), JsonWriter(lines)
    for row in rows:
        table.add(row)
        objects.add(row)
    header, first, second = csv.reader(text.getvalue().splitlines())
    assert header == ["id", "text", "tags", "note", "predicted", "probability", "probability_neg", "probability_pos"]
    assert first == ["1", "a, b", '["x"]', "", "pos", "0.75", "0.25", "0.75"] and second[3] == "d"
    assert json.loads(lines.getvalue().splitlines()[0]) == {
        **rows[0].row,
        "predicted": "pos",
        "probability": 0.75,
        "probabilities": {"neg": 0.25, "pos": 0.75},
    }


def test_writing_refuses_a_column_that_is_called_like_a_prediction() -> None:
    """Nothing of the row is lost silently."""
    for writer in (CsvWriter(io.StringIO()), JsonWriter(io.StringIO())):
        with pytest.raises(DataError, match="a column 'predicted', which a prediction is called; rename it"):
            writer.add(found(predicted="mine"))


def test_writing_refuses_rows_that_differ_in_csv() -> None:
    """The form that can say it is named."""
    writer = CsvWriter(io.StringIO())
    writer.add(found(text="a"))
    with pytest.raises(DataError, match=r"rows differ in column 'id', which csv can't say; write .jsonl"):
        writer.add(found(text="a", id=1))


def test_writing_leaves_no_half_file(tmp_path: Path) -> None:
    """A file that was there stays as it was when a row can't be written; whole, it takes its place."""
    path, mine = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    path.write_text("before")
    mine.write_text("of the user")
    with pytest.raises(DataError), writer_to(path, tmp_path / "rows.csv") as writer:
        writer.add(found(predicted=1))
    assert path.read_text() == "before" and sorted(tmp_path.iterdir()) == [path, mine]
    with writer_to(path, tmp_path / "rows.csv") as writer:
        writer.add(found(text="a"))
    assert json.loads(path.read_text())["predicted"] == "pos" and sorted(tmp_path.iterdir()) == [path, mine]
    assert mine.read_text() == "of the user"


def test_writing_refuses_other_endings_and_the_rows_themselves(tmp_path: Path) -> None:
    """Before anything is predicted."""
    rows = tmp_path / "rows.csv"
    rows.write_text("text\n")
    with pytest.raises(UsageError, match=r"ends in '\.txt'"), writer_to(tmp_path / "a.txt", rows):
        pass
    with pytest.raises(UsageError, match="would replace the rows"), writer_to(rows, rows):
        pass


def test_summary_counts_classes_and_what_is_right() -> None:
    """Rows without a class are predicted and not judged; whole numbers are class names."""
    summary = Summary(Job(model=Model(path="m")))
    for row in (found(label="pos"), found(label="neg"), found(label=""), found(text="x")):
        summary.add(row)
    assert summary.to_json() == {"rows": 4, "classes": {"pos": 4}, "judged": 2, "accuracy": 0.5}
    assert list(summary.lines()) == ["4 rows: 4 pos", "accuracy 0.5000 on the 2 rows that have a 'label' of their own"]
    numbers = Summary(Job(model=Model(path="m")))
    numbers.add(found(label=""))
    assert next(iter(numbers.lines())) == "1 row: 1 pos"
    numbers = Summary(Job(model=Model(path="m")))
    numbers.add(found({**SAID, "predicted": "3"}, label=3))
    assert numbers.to_json()["accuracy"] == 1.0


def test_summary_judges_words_and_numbers() -> None:
    """A word that is cut counts as none; a row without a number is predicted and not judged."""
    tags = Summary(Job(model=Model(path="m", task="token-classification")))
    tags.add(Predicted({"words": ["a", "b", "c"], "tags": ["X", "O", "O"]}, {"predicted": ["X", "X", None]}))
    tags.add(Predicted({"words": ["a"]}, {"predicted": ["O"]}))
    assert tags.to_json() == {"rows": 2, "tags": {"O": 1, "X": 2}, "judged": 2, "accuracy": 0.5}
    assert list(tags.lines())[1] == "accuracy 0.5000 on the 2 words that have a 'tags' of their own"
    numbers = Summary(Job(model=Model(path="m", task="regression")))
    for truth in (1.0, "3", "high", None, "nan"):
        numbers.add(Predicted({"text": "a", "label": truth}, {"predicted": 2.0}))
    assert numbers.to_json() == {"rows": 5, "judged": 2, "mse": 1.0, "mae": 1.0}
    assert list(numbers.lines())[1] == "mse 1.0000, mae 1.0000 on the 2 rows that have a 'label' of their own"


def test_summary_tells_of_texts_that_ended_at_once() -> None:
    """An empty cell is no failure, and nobody has to guess that."""
    texts = Summary(Job(model=Model(path="m", task="causal-lm")))
    for said in ({"predicted": "", "tokens": 0}, {"predicted": " a", "tokens": 1}):
        texts.add(Predicted({"text": "a"}, said))
    assert texts.to_json() == {"rows": 2, "ended_at_once": 1}
    assert list(texts.lines())[1] == "1 of them got an empty text: the model's first token was that of the end"
