"""Tables of an owner: what a file has before its header, and where errors say it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtune.errors import DataError
from ringtune.files.tables import class_of, read_table, text_of


def test_table_may_begin_with_empty_lines(tmp_path: Path) -> None:
    """As it may have some between its rows; numbers of lines stay those of the file."""
    path = tmp_path / "rows.csv"
    path.write_text("\n\ntext,label\na,b\n\nc,d\n")
    rows = read_table(path, {"data.text": "text"})
    assert rows == [(4, {"text": "a", "label": "b"}), (6, {"text": "c", "label": "d"})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\ntext;label\na;b\n", r"rows\.csv, line 2 is separated by semicolons"),
        ("\n\ntext,text\na,b\n", r"rows\.csv, line 3 gives columns 1 and 2 the same name"),
        ("\n\n", r"rows\.csv has no rows"),
    ],
)
def test_table_names_the_line_of_its_header(tmp_path: Path, content: str, message: str) -> None:
    """Which is not always the first one."""
    path = tmp_path / "rows.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_table(path, {"data.text": "text"})


CANARY = "canaryinarow"


def texts_and_classes(path: Path) -> list[tuple[str, str]]:
    """What an owner reads for classification."""
    records = read_table(path, {"data.text": "text", "data.label": "label"})
    return [(text_of(path, record, "text"), class_of(path, record, "label")) for record in records]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", f"text,label\n{CANARY},{CANARY},{CANARY}\n"),
        ("rows.csv", f"text,label\n{CANARY}\n"),
        ("rows.csv", f'text,label\n"{CANARY}\n'),
        ("rows.csv", f"{CANARY},good\n{CANARY},bad\n"),
        ("rows.csv", f"{CANARY},{CANARY}\ntext,good\n"),
        ("rows.csv", f"{CANARY};good\n"),
        ("rows.csv", f"text,label\n{CANARY},\n"),
        ("rows.jsonl", f'{{"text": "{CANARY}", "label": ["{CANARY}"]}}\n'),
        ("rows.jsonl", f'{{"text": "{CANARY}", "label": {{"{CANARY}": 1}}}}\n'),
        ("rows.jsonl", f'{{"text": ["{CANARY}"], "label": "good"}}\n'),
        ("rows.jsonl", f'{{"text": "{CANARY}", "label": null}}\n'),
        ("rows.jsonl", f'{{"text": "{CANARY}", "label": {CANARY}}}\n'),
        ("rows.jsonl", f'"{CANARY}"\n'),
        ("rows.jsonl", f'{{"text": "{CANARY}\n'),
    ],
)
def test_error_about_a_row_has_nothing_of_the_row(tmp_path: Path, name: str, content: str) -> None:
    """It goes to the coordinator and the user, whose rows these are not; a first line may be a row too."""
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError) as raised:
        texts_and_classes(path)
    assert CANARY not in str(raised.value)
    assert path.name in str(raised.value)
