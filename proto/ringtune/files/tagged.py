"""Texts as words with a tag each: JSON lines with two lists, or CoNLL files; read strictly, errors say where.

A CoNLL file has a word a line, in columns divided by tabs or blanks: the first is the word, the last its tag. A blank
line ends a text, and lines with ``-DOCSTART-`` as word are left out. As in tables, no error quotes a cell of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from ringtune.errors import DataError
from ringtune.files.row_account import Problem, RowAccount, RowError
from ringtune.files.tables import Record, checked_text, table_rows
from ringtune.files.text_files import AUTO, form_suffix, opened_text, text_form

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
    return form_suffix(path) in CONLL_SUFFIXES


def tagged_rows(
    path: Path,
    account: RowAccount,
    *,
    words: str,
    tags: str,
    more: dict[str, str] | None = None,
    known_tags: str = "",
    encoding: str = AUTO,
) -> Iterator[TaggedWords]:
    """The texts of a file, one after the other.

    Args:
        path: a ``.jsonl`` file, or one with a suffix of ``CONLL_SUFFIXES``; also with ``.gz``.
        account: gets rows that can't be used: no lists of texts, an empty word, words and tags of different numbers,
            lines of different numbers of columns.
        words: column of the words.
        tags: column of the tags; empty = they are not asked for, and need not be there.
        more: further columns that have to be there, as ``table_rows`` takes them; none of a CoNLL file.
        known_tags: what the tags of a CoNLL file are called in records where they are not asked for.
        encoding: of the file.

    Raises:
        DataError: the file can't be used.
    """
    if is_conll(path):
        yield from _read_conll(path, account, (words, tags or known_tags or _TAGS), encoding, needs_tags=bool(tags))
        return
    if form_suffix(path) in (".csv", ".tsv", ".xlsx"):
        raise DataError(
            f"{path} is a table of cells, and words are lists; write .jsonl, a line such as "
            '{"words": ["Anna", "sings"], "tags": ["B-PER", "O"]}, or CoNLL, a word and its tag a line, as .conll'
        )
    needed = {"data.words": words, **({"data.tags": tags} if tags else {}), **(more or {})}
    for record in table_rows(path, needed, account, encoding=encoding):
        try:
            found = _words_of(record, words)
            yield TaggedWords(found, _tags_of(record, words, tags, len(found)) if tags else (), record)
        except RowError as error:
            account.bad(record[0], error.problem)


def _words_of(record: Record, column: str) -> tuple[str, ...]:
    where, value = f"column {column!r} (data.words)", record[1][column]
    if not isinstance(value, list):
        raise RowError(Problem(f"{where} is no list but a {type(value).__name__}", "give a list of texts, one a word"))
    if not value:
        raise RowError(Problem(f"{where} has no words", "remove the row", is_missing=True))
    for index, word in enumerate(value, start=1):
        if not isinstance(word, str):
            what = f"word {index} of {where} is no text but a {type(word).__name__}"
            raise RowError(Problem(what, "put it in quotes"))
        if not checked_text(word, f"word {index} of {where}").strip():
            raise RowError(Problem(f"word {index} of {where} is empty", "remove it and its tag", is_missing=True))
    return tuple(value)


def _tags_of(record: Record, words: str, column: str, num_words: int) -> tuple[str, ...]:
    where, value = f"column {column!r} (data.tags)", record[1][column]
    if not isinstance(value, list):
        raise RowError(Problem(f"{where} is no list but a {type(value).__name__}", "give a list of names, one a word"))
    if len(value) != num_words:
        what = f"column {words!r} (data.words) has {num_words} words and {where} has {len(value)} tags"
        raise RowError(Problem(what, "give each word one tag"))
    for index, tag in enumerate(value, start=1):
        if isinstance(tag, bool) or not isinstance(tag, str | int) or not str(tag).strip():
            what = "empty" if isinstance(tag, str) else f"a {type(tag).__name__}"
            raise RowError(Problem(f"tag {index} of {where} is no name but {what}", "give a text or a whole number"))
        checked_text(str(tag), f"tag {index} of {where}")
    return tuple(map(str, value))


def _read_conll(
    path: Path, account: RowAccount, names: tuple[str, str], encoding: str, *, needs_tags: bool
) -> Iterator[TaggedWords]:
    form = text_form(path, encoding)
    account.notes += filter(None, [form.note])
    rows: list[tuple[int, list[str]]] = []
    first: tuple[int, int] | None = None  # line and number of columns of the first word
    with opened_text(path, form) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                yield from _one_text(account, rows, names, needs_tags=needs_tags)
                rows = []
                continue
            text = line.rstrip("\r\n")
            cells = [cell.strip() for cell in text.split("\t")] if "\t" in text else text.split()
            if cells[0] == _DOCUMENT:
                continue
            first = first or (number, len(cells))
            try:
                _check_cells(cells, first, needs_tags=needs_tags)
            except RowError as error:
                account.bad(number, error.problem)
                continue
            rows.append((number, cells))
    yield from _one_text(account, rows, names, needs_tags=needs_tags)


def _check_cells(cells: list[str], first: tuple[int, int], *, needs_tags: bool) -> None:
    if needs_tags and len(cells) == 1:
        raise RowError(Problem("the line has one column", "a line has a word, a tab or blanks, and its tag last"))
    if len(cells) != first[1]:
        what = f"the line has {len(cells)} columns and line {first[0]} has {first[1]}"
        raise RowError(Problem(what, "the last column is the tag, so give all lines the same columns"))
    if not cells[0] or (needs_tags and not cells[-1]):
        what = f"the line has an empty {'tag' if cells[0] else 'word'}"
        raise RowError(Problem(what, "the first column is the word, the last its tag; correct or remove the line"))
    checked_text(cells[0], "the word")


def _one_text(
    account: RowAccount, rows: list[tuple[int, list[str]]], names: tuple[str, str], *, needs_tags: bool
) -> Iterator[TaggedWords]:
    """Make a text of the lines between two blank ones; its columns have the names of the job, its line is the first."""
    if not rows:
        return
    words = tuple(cells[0] for _, cells in rows)
    tags = tuple(cells[-1] for _, cells in rows) if len(rows[0][1]) > 1 else ()
    columns: dict[str, object] = {names[0]: list(words), **({names[1]: list(tags)} if tags else {})}
    account.columns = tuple(columns)
    account.rows += 1
    yield TaggedWords(words, tags if needs_tags else (), (rows[0][0], columns))
