"""Texts as words with a tag each: JSON lines with two lists, or CoNLL files; read strictly, errors say where.

A CoNLL file has a word a line, in columns divided by tabs or blanks: the first is the word, the last its tag. A blank
line ends a text, and lines with ``-DOCSTART-`` as word are left out. As in tables, no error quotes a cell of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from ringtune.errors import DataError
from ringtune.files.pointers import is_lfs_pointer, pointer_advice
from ringtune.files.tables import Record, table_rows

CONLL_SUFFIXES: Final = (".conll", ".bio", ".iob")
_DOCUMENT: Final = "-DOCSTART-"
_TAGS: Final = "tags"


class TaggedWords(NamedTuple):
    """The words of one text.

    Attributes:
        words: none is empty, and there is one at least.
        tags: name of the tag of each word; empty where they are not asked for.
        record: line and columns, as ``table_rows`` has them.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    record: Record


def is_conll(path: Path) -> bool:
    """Whether a file has a word a line, by its suffix."""
    return path.suffix.lower() in CONLL_SUFFIXES


def tagged_rows(
    path: Path, *, words: str, tags: str, more: dict[str, str] | None = None, known_tags: str = ""
) -> Iterator[TaggedWords]:
    """The texts of a file, one after the other.

    Args:
        path: a ``.jsonl`` file, or one with a suffix of ``CONLL_SUFFIXES``.
        words: column of the words.
        tags: column of the tags; empty = they are not asked for, and need not be there.
        more: further columns that have to be there, as ``table_rows`` takes them; none of a CoNLL file.
        known_tags: what the tags of a CoNLL file are called in records where they are not asked for.

    Raises:
        DataError: the file can't be used, or a row: no lists of texts, an empty word, words and tags of different
            numbers, lines of different numbers of columns; says where.
    """
    if is_conll(path):
        yield from _read_conll(path, (words, tags or known_tags or _TAGS), needs_tags=bool(tags))
        return
    if path.suffix.lower() == ".csv":
        raise DataError(
            f"{path} is a table of cells, and words are lists; write .jsonl, a line such as "
            '{"words": ["Anna", "sings"], "tags": ["B-PER", "O"]}, or CoNLL, a word and its tag a line, as .conll'
        )
    needed = {"data.words": words, **({"data.tags": tags} if tags else {}), **(more or {})}
    for record in table_rows(path, needed):
        found = _words_of(path, record, words)
        yield TaggedWords(found, _tags_of(path, record, words, tags, len(found)) if tags else (), record)


def read_tagged(path: Path, *, words: str, tags: str, more: dict[str, str] | None = None) -> list[TaggedWords]:
    """All texts of a file; see ``tagged_rows``.

    Raises:
        DataError: as there, or no rows.
    """
    found = list(tagged_rows(path, words=words, tags=tags, more=more))
    if not found:
        raise DataError(f"{path} has no rows; give it data or leave it out")
    return found


def _words_of(path: Path, record: Record, column: str) -> tuple[str, ...]:
    line, row = record
    value = row[column]
    if not isinstance(value, list):
        raise DataError(
            f"{path}, line {line}: column {column!r} (data.words) is no list but a {type(value).__name__}; give a list "
            "of texts, one for each word"
        )
    if not value:
        raise DataError(f"{path}, line {line}: column {column!r} (data.words) has no words; remove the row")
    for index, word in enumerate(value, start=1):
        if not isinstance(word, str):
            raise DataError(
                f"{path}, line {line}: word {index} of column {column!r} (data.words) is no text but a "
                f"{type(word).__name__}; put it in quotes"
            )
        if not word.strip():
            raise DataError(
                f"{path}, line {line}: word {index} of column {column!r} (data.words) is empty; remove it and its tag"
            )
    return tuple(value)


def _tags_of(path: Path, record: Record, words: str, column: str, num_words: int) -> tuple[str, ...]:
    line, row = record
    value = row[column]
    if not isinstance(value, list):
        raise DataError(
            f"{path}, line {line}: column {column!r} (data.tags) is no list but a {type(value).__name__}; give a list "
            "of names, one for each word"
        )
    if len(value) != num_words:
        raise DataError(
            f"{path}, line {line}: column {words!r} (data.words) has {num_words} words and column {column!r} "
            f"(data.tags) has {len(value)} tags; give each word one tag"
        )
    for index, tag in enumerate(value, start=1):
        if isinstance(tag, bool) or not isinstance(tag, str | int) or not str(tag).strip():
            what = "empty" if isinstance(tag, str) else f"a {type(tag).__name__}"
            raise DataError(
                f"{path}, line {line}: tag {index} of column {column!r} (data.tags) is no name but {what}; give a text "
                "or a whole number"
            )
    return tuple(map(str, value))


def _read_conll(path: Path, names: tuple[str, str], *, needs_tags: bool) -> Iterator[TaggedWords]:
    if not path.is_file():
        raise DataError(f"{path} is not there; set data.train, data.eval or --data")
    if is_lfs_pointer(path):
        raise DataError(pointer_advice(path))
    rows: list[tuple[int, list[str]]] = []
    first: tuple[int, int] | None = None  # line and number of columns of the first word
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    yield from _one_text(rows, names, needs_tags=needs_tags)
                    rows = []
                    continue
                text = line.rstrip("\r\n")
                cells = [cell.strip() for cell in text.split("\t")] if "\t" in text else text.split()
                if cells[0] == _DOCUMENT:
                    continue
                first = first or (number, len(cells))
                _check_cells(path, number, cells, first, needs_tags=needs_tags)
                rows.append((number, cells))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}); convert it") from error
    yield from _one_text(rows, names, needs_tags=needs_tags)


def _check_cells(path: Path, number: int, cells: list[str], first: tuple[int, int], *, needs_tags: bool) -> None:
    if needs_tags and len(cells) == 1:
        raise DataError(f"{path}, line {number} has one column; a line has a word, a tab or blanks, and its tag last")
    if len(cells) != first[1]:
        raise DataError(
            f"{path}, line {number} has {len(cells)} columns and line {first[0]} has {first[1]}; the last column is "
            "the tag, so give all lines the same columns"
        )
    if not cells[0] or (needs_tags and not cells[-1]):
        raise DataError(
            f"{path}, line {number} has an empty {'tag' if cells[0] else 'word'}; the first column is the word, the "
            "last its tag; correct or remove the line"
        )


def _one_text(rows: list[tuple[int, list[str]]], names: tuple[str, str], *, needs_tags: bool) -> Iterator[TaggedWords]:
    """Make a text of the lines between two blank ones; its columns have the names of the job, its line is the first."""
    if not rows:
        return
    words = tuple(cells[0] for _, cells in rows)
    tags = tuple(cells[-1] for _, cells in rows) if len(rows[0][1]) > 1 else ()
    columns: dict[str, object] = {names[0]: list(words), **({names[1]: list(tags)} if tags else {})}
    yield TaggedWords(words, tags if needs_tags else (), (rows[0][0], columns))
