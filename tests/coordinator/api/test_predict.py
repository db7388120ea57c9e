"""``Run.predict``: rows of a file or given ones, what comes back, and the errors of the command."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ringtune
from coordinator.predicting import process
from ringtune.errors import DataError, RingTuneError, UsageError
from tests.coordinator.predicting.test_process import started
from tests.support.saved_runs import write_run

ROWS = [{"text": "good"}, {"text": "bad", "label": "neg"}]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ringtune.Run:
    """A finished run; in place of its model a process that knows one word, and says what it was asked."""

    @contextmanager
    def fake(words: Sequence[str], log: Path) -> Iterator[Any]:
        (tmp_path / "words.json").write_text(json.dumps(list(words)))
        rows = [json.loads(line) for line in Path(words[2]).read_text().splitlines()]
        said = {"predicted": "pos", "of_class": {"pos": 0.75, "neg": 0.25}}
        code = "\n".join(f"print({json.dumps({'row': row, 'predicted': said})!r})" for row in rows)
        process = started(code, log)
        yield process
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()

    monkeypatch.setattr(process, "_started", fake)
    return ringtune.Run(write_run(tmp_path / "run"))


def test_predict_gives_rows_with_what_is_predicted(
    run: ringtune.Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that are given, and the very rows from a file; options get to the process."""
    found = run.predict(ROWS, max_new_tokens=7, temperature=0.5, seed=3)
    assert found["text"] == ["good", "bad"]
    assert found[0] == {"text": "good", "predicted": "pos", "probabilities": {"pos": 0.75, "neg": 0.25}}
    words = json.loads((tmp_path / "words.json").read_text())
    assert words[3:] == ["--max-new-tokens", "7", "--temperature", "0.5", "--seed", "3"]
    assert not Path(words[2]).exists(), "nothing of the rows stays"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert run.predict(tmp_path / "rows.jsonl") == found
    assert run.predict(["good", "bad"])["text"] == ["good", "bad"], "texts alone are rows of the job's one column"
    assert run.predict([{"body": "good"}], columns={"text": "body"})[0]["predicted"] == "pos"
    with caplog.at_level("WARNING"):
        assert run.predict(["good", " "], missing="skip")
    assert "1 row is left out: column 'text' is empty (line 2)" in caplog.text


def test_predict_writes_what_the_command_writes(run: ringtune.Run, tmp_path: Path) -> None:
    """A column of probabilities for each class."""
    run.predict([ROWS[1]], save=tmp_path / "out.csv")
    with (tmp_path / "out.csv").open() as file:
        assert list(csv.DictReader(file)) == [
            {"text": "bad", "label": "neg", "predicted": "pos", "probability_pos": "0.75", "probability_neg": "0.25"}
        ]


@pytest.mark.parametrize(
    ("data", "options", "kind", "message"),
    [
        ("gone.csv", {}, DataError, r"gone\.csv is not there"),
        ([], {}, UsageError, "give one at least"),
        ([1], {}, UsageError, "rows are a file, texts or mappings"),
        (["a text"], {"columns": {"words": "x"}}, UsageError, r"this run reads the columns text, label"),
        (
            ["a text", " "],
            {},
            DataError,
            r"line 2: column 'text' is empty; fill it in .*\(in predict and eval missing=skip\)",
        ),
        (["a text"], {"missing": "x"}, UsageError, r"missing=?.* is 'x', it has to be one of error, skip"),
        (
            [{"body": "x"}],
            {},
            DataError,
            r"^the rows has no column 'text'; it has the columns 'body'",
        ),
        ([{"text": object()}], {}, UsageError, "JSON has no form for"),
        (ROWS, {"user": "anna"}, UsageError, "no adapters of single users"),
        (ROWS, {"max_new_tokens": 0}, UsageError, r"max_new_tokens is 0, it has to be in \[1, 4096\]"),
        (ROWS, {"temperature": -1.0}, UsageError, "temperature is -1"),
        (ROWS, {"seed": -1}, UsageError, "seed is -1"),
        (ROWS, {"save": "out.txt"}, UsageError, r"written as \.csv or \.jsonl"),
    ],
)
def test_predict_refuses_as_the_command_does(
    run: ringtune.Run, data: Any, options: dict[str, Any], kind: type[RingTuneError], message: str
) -> None:
    """Before anything is started."""
    with pytest.raises(kind, match=message):
        run.predict(data, **options)
    assert not (run.folder.parent / "words.json").exists()
