"""Predictions: the process and its errors, rows beside their columns, a sample of text, and ``Run.predict``."""

from __future__ import annotations

import csv
import dataclasses
import errno
import functools
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringtune
from coordinator.api import predict
from coordinator.api.plan import plan
from coordinator.api.predict import CsvWriter, JsonWriter, RowPrediction, Sampling, Summary, _read, writer_to
from coordinator.api.text_process import LineProcess
from coordinator.cli.init_wizard import DefaultAnswers, WizardOptions, begin
from coordinator.client.saved_run import SavedRun, read_run
from ringtune.errors import (
    DataError,
    DeadlineError,
    InvalidInputError,
    ModelError,
    PeerLostError,
    RingTuneError,
    StorageError,
    UsageError,
)
from ringtune.job.job import Job, Model
from ringtune.job.rows import FRAMES, NO_PICTURE
from ringtune.storage.tables import table_rows
from tests.support.fake_agents import Notes, job
from tests.support.model_folder import write_any_family
from tests.support.saved_runs import write_run

LINE = 'print(\'{"row": {"text": "a"}, "predicted": {"predicted": "pos"}}\', flush=True)\n'


def started(code: str, log: Path) -> LineProcess:
    """Start Python with some code in place of a model."""
    return LineProcess("predicting", [sys.executable, "-S", "-c", code], log)


def read(code: str, folder: Path, *, wait_s: float = 60.0, most: int = 10) -> list[str]:
    """Read what is predicted, at most so many rows; the process has ended then."""
    with started(code, folder / "log") as process:
        found = [one.said["predicted"] for one in itertools.islice(_read(process, wait_s=wait_s), most)]
    assert process._process.returncode is not None
    return found


def test_process_gives_every_line_and_ends(tmp_path: Path) -> None:
    """More lines than are read ahead; and whoever reads no more leaves no process behind."""
    assert read(LINE * 3, tmp_path) == ["pos"] * 3
    assert read(f"while True: {LINE}", tmp_path, most=700) == ["pos"] * 700
    long = LINE.replace("pos", "' + 'é' * 300_000 + '")  # in many pieces
    assert read(f"{long}{LINE}{long}", tmp_path) == ["é" * 300_000, "pos", "é" * 300_000]
    told = list[str]()
    with started(LINE + """print('{"told": "1 of 1 rows"}')""", tmp_path / "log") as process:
        assert len(list(_read(process, wait_s=60.0, tell=told.append))) == 1 and told == ["1 of 1 rows"]


def test_process_that_ends_its_output_alone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unloading its libraries may take long; for ever, it is killed."""
    monkeypatch.setattr("coordinator.api.text_process._END_S", 0.1)
    with pytest.raises(DeadlineError, match="predicting gave all its output and does not end"):
        read(f"{LINE}import os, time\nos.close(1)\ntime.sleep(600)", tmp_path)


def test_process_that_fails_or_says_nothing_is_told(tmp_path: Path) -> None:
    """After the rows before it; with the class that its exit code says, or as one that was lost."""
    code = LINE + "import sys; sys.stderr.write('error: a column is missing\\n'); sys.exit(5)"
    with pytest.raises(InvalidInputError, match="column is missing"):
        read(code, tmp_path)
    with pytest.raises(PeerLostError, match="predicting was ended by SIGTERM"):
        read("import os; os.kill(os.getpid(), 15)", tmp_path)
    # What was waited for, how long, and which key is the remedy; the process is ended
    with pytest.raises(DeadlineError, match=r"waited 0\.2 s for the next row .* raise runtime\.wait_s"):
        read("import time; time.sleep(600)", tmp_path, wait_s=0.2)


PROMPT = "Once\n upon"


def shown(folder: Path, prompt: str = PROMPT) -> list[str]:
    """What is told of a sample."""
    notes = Notes()
    predict.show_sample(job(model__task="causal-lm", train__sample_prompt=prompt), folder, notes)
    return notes.texts


def test_sample_goes_on_from_the_prompt_and_stands_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt goes to the one that predicts as it is; the report keeps what it had."""
    folder = write_run(tmp_path / "run")
    before = json.loads((folder / "report.json").read_text())

    def fake(run: Any, data: Path, how: Sampling) -> Iterator[RowPrediction]:
        ((_, row),) = table_rows(data, {"data.text": "text"})
        assert (row["text"], how) == (PROMPT, Sampling(max_new_tokens=40))
        yield RowPrediction(row, {"predicted": " a time.\nThe end", "tokens": 6})

    monkeypatch.setattr(predict, "predict_rows", fake)
    assert shown(folder) == [
        "sample of text, 6 tokens after train.sample_prompt:",
        "  Once",
        "   upon a time.",
        "  The end",
    ]
    wanted = {"prompt": PROMPT, "text": " a time.\nThe end", "tokens": 6}
    assert json.loads((folder / "report.json").read_text()) == before | {"sample": wanted}


def test_sample_that_can_not_be_made_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the reason and the way; the report is as it was."""
    folder = write_run(tmp_path / "run")
    before = (folder / "report.json").read_bytes()

    def fails(*_: Any) -> Iterator[RowPrediction]:
        raise ModelError("the base model is not here")

    monkeypatch.setattr(predict, "predict_rows", fails)
    (told,) = shown(folder)
    assert told == "no sample of text: the base model is not here; 'ringtune predict' makes one where the base model is"
    assert (folder / "report.json").read_bytes() == before
    # Nothing is read or told
    assert shown(tmp_path / "gone", "") == []


SAID = {"predicted": "pos", "probability": 0.75, "of_class": {"neg": 0.25, "pos": 0.75}}


def found(said: dict[str, Any] | None = None, **row: Any) -> RowPrediction:
    """A row with a prediction."""
    return RowPrediction(row=row, said=said or SAID)


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


def test_writing_refuses_a_column_that_is_called_like_a_prediction_and_rows_that_differ() -> None:
    """Nothing of the row is lost silently."""
    for writer in (CsvWriter(io.StringIO()), JsonWriter(io.StringIO())):
        with pytest.raises(DataError, match="a column 'predicted', which a prediction is called; rename it"):
            writer.add(found(predicted="mine"))
    # The form that can say it is named
    writer = CsvWriter(io.StringIO())
    writer.add(found(text="a"))
    with pytest.raises(DataError, match=r"rows differ in column 'id', which csv can't say; write .jsonl"):
        writer.add(found(text="a", id=1))


def test_writing_leaves_no_half_file(tmp_path: Path) -> None:
    """A file that was there stays as it was when a row can't be written."""
    path, mine = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    path.write_text("before")
    mine.write_text("of the user")
    with pytest.raises(DataError), writer_to(path, tmp_path / "rows.csv", print) as writer:
        writer.add(found(predicted=1))
    assert path.read_text() == "before" and sorted(tmp_path.iterdir()) == [path, mine]
    assert mine.read_text() == "of the user"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_obeys_nothing_of_a_prediction(tmp_path: Path) -> None:
    """Elsewhere it is as it was said; half a character of a file's name is escaped."""
    said = {"predicted": "a\x1b[2J\x9bé\r\n"}
    for writer, file, shown in (
        (CsvWriter, _Terminal(newline=""), 'predicted\r\n"a\\x1b[2J\\x9bé\r\n"\r\n'),
        (CsvWriter, io.StringIO(newline=""), 'predicted\r\n"a\x1b[2J\x9bé\r\n"\r\n'),
        (functools.partial(JsonWriter, event="e"), io.StringIO(), json.dumps({"event": "e", **said}) + "\n"),
    ):
        writer(file).add(found(said))
        assert file.getvalue() == shown
    for ending in ("csv", "jsonl"):
        with writer_to(tmp_path / f"out.{ending}", tmp_path, print) as named:
            named.add(found(said, file="\udcff"))
        assert "\\udcff" in (tmp_path / f"out.{ending}").read_text(encoding="utf-8")


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_writing_again_keeps_what_was_corrected_by_hand(ending: str, tmp_path: Path) -> None:
    """The same predictions leave nothing behind; other ones each earlier file, which is named; of a link the link."""
    path, said = tmp_path / f"out.{ending}", list[str]()

    def write(label: str) -> str:
        with writer_to(path, tmp_path / "rows.csv", said.append) as writer:
            writer.add(found({**SAID, "predicted": label}, text="a"))
        return path.read_text()

    first = write("pos")
    assert write("pos") == first and said == [] and list(tmp_path.iterdir()) == [path]
    corrected = first.replace("pos", "corrected")
    path.write_text(corrected)
    assert write("pos") == first and (last := write("neg")) != first
    asides = [Path(line.removeprefix(f"the earlier content of {path} is in ")) for line in said]
    assert [file.read_text() for file in asides] == [corrected, first]
    assert set(tmp_path.iterdir()) == {path, *asides}
    other = path.rename(tmp_path / "other")
    path.symlink_to(other)
    assert write("pos") == first and not path.is_symlink() and other.read_text() == last and len(said) == 3


def test_writing_refuses_other_endings_and_the_rows_themselves(tmp_path: Path) -> None:
    """Before anything is predicted."""
    rows = tmp_path / "rows.csv"
    rows.write_text("text\n")
    with pytest.raises(UsageError, match=r"ends in '\.txt'"), writer_to(tmp_path / "a.txt", rows, print):
        pass
    with pytest.raises(UsageError, match="would replace the rows"), writer_to(rows, rows, print):
        pass
    (tmp_path / "a.csv").mkdir()
    with pytest.raises(StorageError, match="it is a folder"), writer_to(tmp_path / "a.csv", rows, print):
        pass


def test_summary_judges_what_has_its_own() -> None:
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
    # A word that is cut counts as none; a row without a number, or with one of no square, is not judged
    tags = Summary(Job(model=Model(path="m", task="token-classification")))
    tags.add(RowPrediction({"words": ["a", "b", "c"], "tags": ["X", "O", "O"]}, {"predicted": ["X", "X", None]}))
    tags.add(RowPrediction({"words": ["a"]}, {"predicted": ["O"]}))
    assert tags.to_json() == {"rows": 2, "tags": {"O": 1, "X": 2}, "judged": 2, "accuracy": 0.5}
    assert list(tags.lines())[1] == "accuracy 0.5000 on the 2 words that have a 'tags' of their own"
    numbers = Summary(Job(model=Model(path="m", task="regression")))
    for truth in (1.0, "3", "high", None, "nan", 1e200, "-1e308"):
        numbers.add(RowPrediction({"text": "a", "label": truth}, {"predicted": 2.0}))
    assert numbers.to_json() == {"rows": 7, "judged": 2, "mse": 1.0, "mae": 1.0}
    assert list(numbers.lines())[1] == "mse 1.0000, mae 1.0000 on the 2 rows that have a 'label' of their own"
    # An empty cell is no failure, and nobody has to guess that
    texts = Summary(Job(model=Model(path="m", task="causal-lm")))
    for said in ({"predicted": "", "tokens": 0}, {"predicted": " a", "tokens": 1}):
        texts.add(RowPrediction({"text": "a"}, said))
    assert texts.to_json() == {"rows": 2, "ended_at_once": 1}
    assert list(texts.lines())[1] == "1 of them got an empty text: the model's first token was that of the end"
    # Texts with references, the best of which counts; a row without one is not judged
    for reference in ("The cat sat.", ["a dog", "the CAT ran"], {"text": ["no"]}, "", None, 7, [3]):
        texts.add(RowPrediction({"text": "a", "answer": reference}, {"predicted": "the cat", "tokens": 2}))
    assert texts.to_json() == {"rows": 9, "ended_at_once": 1, "judged": 3, "rouge_l": round(1.6 / 3, 6)}
    assert list(texts.lines())[2] == "ROUGE-L 0.5333 on the 3 rows that have a 'answer' of their own"


ROWS = [{"text": "good"}, {"text": "bad", "label": "neg"}]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ringtune.Run:
    """A finished run; in place of its model a process that knows one word, and says what it was asked."""

    def fake(_module: str, _run: SavedRun, _job: Job, _folder: Path, *words: str) -> list[str]:
        (tmp_path / "words.json").write_text(json.dumps(list(words)))
        rows = [json.loads(line) for line in Path(words[0]).read_text().splitlines()]
        said = {"predicted": "pos", "of_class": {"pos": 0.75, "neg": 0.25}}
        code = "\n".join(f"print({json.dumps({'row': row, 'predicted': said})!r})" for row in rows)
        return [sys.executable, "-S", "-c", code]

    monkeypatch.setattr(predict, "command_of", fake)
    return ringtune.Run(write_run(tmp_path / "run"))


def test_predict_gives_rows_with_what_is_predicted(
    run: ringtune.Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that are given, and the very rows from a file; options get to the process."""
    found = run.predict(ROWS, max_new_tokens=7, temperature=0.5, seed=3)
    assert found["text"] == ["good", "bad"]
    assert found[0] == {"text": "good", "predicted": "pos", "probabilities": {"pos": 0.75, "neg": 0.25}}
    words = json.loads((tmp_path / "words.json").read_text())
    assert words[1:] == ["--max-new-tokens", "7", "--temperature", "0.5", "--seed", "3"]
    assert not Path(words[0]).exists(), "nothing of the rows stays"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert run.predict(tmp_path / "rows.jsonl") == found
    run.predict(tmp_path / "rows.jsonl", save=tmp_path / "out.csv")
    written = list(csv.reader((tmp_path / "out.csv").read_text().splitlines()))
    assert written[0][:3] == ["text", "label", "predicted"], "the second row alone has a label"
    assert [row[:3] for row in written[1:]] == [["good", "", "pos"], ["bad", "neg", "pos"]]
    assert run.predict(["good", "bad"])["text"] == ["good", "bad"], "texts alone are rows of the job's one column"
    assert run.predict([{"body": "good"}], columns={"text": "body"})[0]["predicted"] == "pos"
    with caplog.at_level("WARNING"):
        assert run.predict(["good", " "], missing="skip")
    assert "1 row is left out: column 'text' is empty (line 2)" in caplog.text


def write_pictures(folder: Path) -> None:
    """Two classes with a picture each, and one of them with a moving one of three frames and a note."""
    pictures = pytest.importorskip("PIL.Image")
    first, *others = (pictures.new("L", (4, 4), value) for value in (40, 90, 200))
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        first.save(folder / name / "still.png")
    first.save(folder / "cat" / "moving.gif", save_all=True, append_images=others)
    (folder / "cat" / "notes.txt").write_text("x")


def ways_to_read_pictures(folder: Path, tmp_path: Path) -> dict[str, Callable[[], Sequence[str]]]:
    """Command -> what it tells of a folder of pictures before anything is started."""
    vit = {"model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 4}
    write_any_family(tmp_path / "model", {**vit, "patch_size": 2, "num_channels": 1})
    pictures = job(
        model__path=str(tmp_path / "model"), model__task="image-classification", data__train=str(folder), data__eval=""
    )
    run = dataclasses.replace(read_run(write_run(tmp_path / "run")), job=pictures)
    wishes = WizardOptions(folder=tmp_path, model=str(tmp_path / "model"), data=folder)
    np.savez(tmp_path / "rows.npz", image=np.zeros((6, 4, 4)), label=np.arange(6) % 2)
    judged = dataclasses.replace(wishes, data=tmp_path / "rows.npz", eval_data=folder)
    return {
        "init": lambda: [line.removesuffix(".") for line in begin(wishes, DefaultAnswers()).saw],
        "init --eval-data": lambda: [line.removesuffix(".") for line in begin(judged, DefaultAnswers()).saw],
        "plan": lambda: plan(pictures, assume=1, memory="1GiB").rows,
        "predict": lambda: predict.check_request(run, folder, Sampling(), "").notes,
    }


def test_pictures_that_are_left_out_are_counted_by_every_command(tmp_path: Path) -> None:
    """Frames after the first, and files that are no pictures, in one sentence each."""
    write_pictures(folder := tmp_path / "rows")
    wanted = {f"1 left out in {folder}: {NO_PICTURE}", f"2 left out in {folder}: {FRAMES}"}
    for command, tell in ways_to_read_pictures(folder, tmp_path).items():
        assert wanted == {line for line in tell() if "left out" in line}, command


def test_pictures_without_their_package_are_refused_by_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the nodes, with the file and the remedy."""
    write_pictures(folder := tmp_path / "rows")
    ways = ways_to_read_pictures(folder, tmp_path)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    for tell in ways.values():
        with pytest.raises(DataError, match=r"moving\.gif needs the package 'pillow' to be read; install it, or give"):
            tell()


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
        ([{"body": "x"}], {}, DataError, r"^the list has no column 'text'; it has the columns 'body'"),
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


def test_save_on_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that becomes full while predictions are written is an error with the file; no file is left."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with (
        pytest.raises(StorageError, match=r"out\.csv: No space left"),
        writer_to(tmp_path / "out.csv", tmp_path, print),
    ):
        pass
    assert not list(tmp_path.iterdir())
