"""Words with tags from JSON lines and CoNLL files; what is wrong is named with its place and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringtune.errors import DataError
from ringtune.storage.tables import RowAccount, TaggedWords, tagged_rows
from tests.support.cases import cases


def texts(path: Path, content: str, *, tags: str = "tags") -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Write a file and read it."""
    path.write_text(content, encoding="utf-8")
    return [(row.words, row.tags) for row in read(path, tags=tags)]


def read(path: Path, *, words: str = "words", tags: str = "tags", known_tags: str = "") -> list[TaggedWords]:
    """Read all rows; those that can't be used are an error."""
    account = RowAccount(path)
    rows = list(tagged_rows(path, account, words=words, tags=tags, known_tags=known_tags))
    account.check()
    return rows


def test_tagged_rows_of_json_lines_and_conll_are_the_same(tmp_path: Path) -> None:
    """Whole numbers are names; columns between word and tag, document lines and further blank lines don't count."""
    wanted = [(("Anna", "sings"), ("B-PER", "0")), (("Oh",), ("O",))]
    lines = [{"words": ["Anna", "sings"], "tags": ["B-PER", 0], "id": 1}, {"words": ["Oh"], "tags": ["O"]}]
    assert texts(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines)) == wanted
    text = "-DOCSTART- -X- O O\n\nAnna NNP B-PER\nsings VB 0\n\n\n\nOh UH O"
    assert texts(tmp_path / "a.conll", text) == wanted
    assert texts(tmp_path / "b.iob", "Anna\tB-PER\r\nsings\t0\r\n \r\nOh\tO\r\n") == wanted
    assert texts(tmp_path / "c.bio", "a b\tO\n") == [(("a b",), ("O",))]


def test_tagged_rows_without_tags_are_read_where_none_are_asked_for(tmp_path: Path) -> None:
    """What is to be predicted has words alone; tags that are there stay in the row."""
    assert texts(tmp_path / "a.jsonl", '{"words": ["a"]}\n', tags="") == [(("a",), ())]
    assert texts(tmp_path / "a.conll", "a\nb\n", tags="") == [(("a", "b"), ())]
    path = tmp_path / "b.conll"
    path.write_text("a X O\n")
    (row,) = read(path, tags="")
    assert row.record == (1, {"words": ["a"], "tags": ["O"]}) and row.tags == ()


@cases(
    ("row", "message"),
    [
        ({"words": "a b", "tags": ["O", "O"]}, "column 'words' (data.words) is no list but a str; give a list"),
        ({"words": ["a"], "tags": "O"}, "column 'tags' (data.tags) is no list but a str; give a list of names"),
        ({"words": ["a", "b"], "tags": ["O"]}, "has 2 words and column 'tags' (data.tags) has 1 tags; give each word"),
        ({"words": [], "tags": []}, "has no words; remove the row"),
        ({"words": ["a", " "], "tags": ["O", "O"]}, "word 2 of column 'words' (data.words) is empty; remove it"),
        ({"words": ["a", 7], "tags": ["O", "O"]}, "word 2 of column 'words' (data.words) is no text but a int"),
        ({"words": ["a"], "tags": [" "]}, "tag 1 of column 'tags' (data.tags) is no name but empty; give a text or"),
        ({"words": ["a"], "tags": [True]}, "tag 1 of column 'tags' (data.tags) is no name but a bool"),
        ({"words": ["a"]}, "column 'tags' is empty; fill it in"),
    ],
)
def test_tagged_rows_refuse_a_row_by_its_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    """Line, column, what is wrong and what to do."""
    good = json.dumps({"words": ["x"], "tags": ["O"]})
    with pytest.raises(DataError) as caught:
        texts(tmp_path / "rows.jsonl", f"{good}\n{json.dumps(row)}\n")
    assert "rows.jsonl, line 2" in str(caught.value) and message in str(caught.value)


@cases(
    ("name", "content", "message"),
    [
        (
            "a.conll",
            "a O\nb\n",
            "line 2: the line has one column; a line has a word, a tab or blanks, and its tag last",
        ),
        ("a.conll", "a X O\n\nb O\n", "line 3: the line has 2 columns and line 1 has 3; the last column is the tag"),
        ("a.conll", "a\tO\n\tO\n", "line 2: the line has an empty word"),
        ("a.conll", "a\tO\nb\t\n", "line 2: the line has an empty tag"),
        ("a.csv", "words,tags\na,O\n", "is a table of cells, and words are lists; write .jsonl, a line such as"),
        ("a.txt", "a", "has the suffix '.txt'"),
    ],
)
def test_tagged_rows_refuse_a_file(tmp_path: Path, name: str, content: str, message: str) -> None:
    """A missing tag would shift columns, so that all lines have to have the same number."""
    with pytest.raises(DataError) as caught:
        texts(tmp_path / name, content)
    assert message in str(caught.value)


def test_tagged_rows_name_a_file_that_is_no_text(tmp_path: Path) -> None:
    """Neither a missing one nor another encoding is read."""
    with pytest.raises(DataError, match=r"is not there; set data\.train"):
        read(tmp_path / "a.conll")
    (tmp_path / "a.conll").write_bytes(b"\x81 O\n")
    with pytest.raises(DataError, match=r"line 1 is neither UTF-8 nor Windows-1252 \(byte 0x81\); set data.encoding"):
        read(tmp_path / "a.conll")


def test_tagged_rows_of_conll_have_the_columns_of_the_job(tmp_path: Path) -> None:
    """Also where tags are there and nobody asks for them: what was predicted is compared with them."""
    path = tmp_path / "rows.conll"
    path.write_text("Anna\tB-PER\nsings\tO\n")
    (asked,) = read(path, words="tokens", tags="ner_tags")
    (known,) = read(path, words="tokens", tags="", known_tags="ner_tags")
    assert asked.record[1] == known.record[1] == {"tokens": ["Anna", "sings"], "ner_tags": ["B-PER", "O"]}
    assert (asked.tags, known.tags) == (("B-PER", "O"), ())
