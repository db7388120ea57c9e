"""Rows: files of another format, cells and columns that can't be, labels that do not fit."""

from __future__ import annotations

from tests.support.bad_input.case import TRAIN, Case, Place

GOOD = "w1 w2,good\nw3 w4,bad\n" * 8
CSV: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "no rows": ("text,label\n", ("rows",)),
    "nothing": ("", ("rows",)),
    "no header": ("w1 w2,good\nw3,bad\n", ("text", "data.text")),
    "another column": ("sentence,label\n" + GOOD, ("text", "sentence")),
    "no label column": ("text\nw1\nw2\n", ("label",)),
    "another column after semicolons": ("text;klass\n" + GOOD.replace(",", ";"), ("label", "klass")),
    "a duplicate header": ("text,label,text\nw1,good,w2\nw3,bad,w4\n", ("columns 1 and 3", "same name")),
    "an empty label": ("text,label\nw1,good\nw2,\n", ("line 3", "label")),
    "a blank label": ("text,label\nw1,good\nw2,  \n", ("line 3", "label")),
    "a missing cell": ("text,label\nw1,good\nw2\n", ("line 3", "label")),
    "a cell too many": ("text,label\nw1,good\nw2,bad,more\n", ("line 3",)),
    "an open quote": ('text,label\n"w1,good\nw2,bad\n', ("line",)),
    "one class": ("text,label\nw1,good\nw2,good\n" * 1 + "w3,good\n" * 6, ("class",)),
    "a line that is no UTF-8": ("text,label\nw1 \xe9,good\n".encode() + b"\xe9,bad\n", ("utf-8", "line 3")),
    "half a UTF-16": (("text,label\n" + GOOD).encode("utf-16")[:-1], ("utf-16",)),
    "a byte order mark and an empty label": ("\ufefftext,label\nw1,good\nw2,\n", ("line 3", "label")),
    "zeros": (bytes(1000), ("line",)),
    "bytes": (bytes(range(256)) * 4, ("utf-8",)),
    "a cell of 20 MB": ("text,label\n" + "w1 " * 7_000_000 + ",good\nw2,bad\n", ("line 2", "characters")),
}
JSONL: dict[str, tuple[str, tuple[str, ...]]] = {
    "null text": ('{"text": null, "label": "good"}\n{"text": "w1", "label": "bad"}\n', ("line 1", "text", "empty")),
    "null label": ('{"text": "w1", "label": null}\n{"text": "w1", "label": "bad"}\n', ("line 1", "label", "empty")),
    "a number as text": ('{"text": 3, "label": "good"}\n', ("line 1", "text")),
    "a list as label": ('{"text": "w1", "label": ["good"]}\n', ("line 1", "label")),
    "a fraction as label": ('{"text": "w1", "label": 0.5}\n', ("line 1", "label")),
    "true as label": ('{"text": "w1", "label": true}\n', ("line 1", "label")),
    "an empty label": ('{"text": "w1", "label": ""}\n', ("line 1", "label")),
    "a line that is no object": ("[1, 2]\n", ("line 1", "object")),
    "a line that is no JSON": ('{"text": "w1", "label": "good"}\nnot json\n', ("line 2", "json")),
    "a whole JSON list": (
        '[\n{"text": "w1", "label": "good"},\n{"text": "w2", "label": "bad"}\n]\n',
        ("lines 1", "json"),
    ),
    "a missing key": ('{"text": "w1"}\n', ("text", "label")),
    "deep nesting": ("[" * 100_000 + "\n", ("line 1",)),
    "a byte order mark and a wrong line": ('\ufeff{"text": "w1", "label": "good"}\n3\n', ("line 2", "object")),
    "half an emoji": ('{"text": "\\ud83d", "label": "good"}\n', ("line 1", "surrogate")),
    "a prompt and its completion": ('{"prompt": "w1", "completion": "w2"}\n', ("text", "prompt")),
    "null": ("null\n", ("line 1", "object")),
    "a duplicate key": ('{"text": "w1", "text": "w2", "label": "good"}\n', ("line 1", "twice")),
}
FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "a text file": ("train.txt", (".txt",)),
    "parquet": ("train.parquet", (".parquet",)),
    "no suffix": ("train", ("suffix",)),
    "xlsx": ("train.xlsx", (".xlsx",)),
}

_LEFT = {"csv: one class": ("out",), "a new label in the evaluation": ("out",)}
"""What is found when all rows are known leaves the folder of the run."""


def cases() -> list[Case]:
    """All of them."""
    found = [_train(f"csv: {name}", "train.csv", content, says) for name, (content, says) in CSV.items()]
    found += [_train(f"jsonl: {name}", "train.jsonl", content, says) for name, (content, says) in JSONL.items()]
    found += [_train(f"data: {name}", file, "text,label\n" + GOOD, says) for name, (file, says) in FILES.items()]
    found += [
        _eval("a new label in the evaluation", "text,label\nw1,good\nw2,neutral\n", "neutral"),
        _eval("evaluation without a column", "text,klass\nw1,good\n", "label"),
        _eval("evaluation without rows", "text,label\n", "rows"),
        Case(
            name="a label that data.labels lacks",
            arguments=(*TRAIN, "--set", 'data.labels=["good","fine"]'),
            code=5,
            says=("bad", "data.labels"),
            leaves=("out",),
        ),
        Case(
            name="fewer rows than owners",
            arguments=("train", "job.toml", "--local", "2", "--out", "out"),
            code=5,
            says=("rows",),
            prepare=lambda place: place.write("train.csv", "text,label\nw1,good\n"),
            leaves=("out",),
        ),
    ]
    return found


def _train(name: str, file: str, content: str | bytes, says: tuple[str, ...]) -> Case:
    """Training rows with this content; they are read before anything is started or written."""

    def prepare(place: Place) -> None:
        place.write(file, content)
        place.job(("train.csv", file))

    return Case(name=name, arguments=TRAIN, code=5, says=says, prepare=prepare, leaves=_LEFT.get(name, ()))


def _eval(name: str, content: str | bytes, *says: str) -> Case:
    """Evaluation rows with this content."""

    def prepare(place: Place) -> None:
        place.write("eval.csv", content)
        place.job(('train = "train.csv"', 'train = "train.csv"\neval = "eval.csv"'))

    return Case(name=name, arguments=TRAIN, code=5, says=says, prepare=prepare, leaves=_LEFT.get(name, ()))
