"""Tables of an owner: csv with a header, or a JSON object a line; read strictly, errors say where."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ringtune.errors import DataError

Record = tuple[int, Mapping[str, object]]


def table_rows(path: Path, columns: Mapping[str, str]) -> Iterator[Record]:
    """The rows of a table that has to have some columns, one after the other.

    Args:
        path: a ``.csv`` or ``.jsonl`` file.
        columns: job key (``data.text``) -> name of the column.

    Yields:
        Line number and columns of each row.

    Raises:
        DataError: no file, another suffix, not readable, or a column is missing.
    """
    if not path.is_file():
        raise DataError(f"{path} is not there; set data.train, data.eval or --data")
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path} ends in {path.suffix!r}; rows are read from .csv or .jsonl")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for record in reader(path, file):
                yield _checked(path, record, columns)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}); convert it") from error


def read_table(path: Path, columns: Mapping[str, str]) -> list[Record]:
    """All rows of a table; see ``table_rows``.

    Raises:
        DataError: as there, or no rows.
    """
    records = list(table_rows(path, columns))
    if not records:
        raise DataError(f"{path} has no rows; give it data or leave it out")
    return records


def text_of(path: Path, record: Record, column: str) -> str:
    """The value of a column that has to be text.

    Raises:
        DataError: the value is something else.
    """
    number, found = record
    value = found[column]
    if not isinstance(value, str):
        raise DataError(f"{path}, line {number}: column {column!r} is not text")
    return value


def class_of(path: Path, record: Record, column: str) -> str:
    """The class name in a column: a text or a whole number.

    Raises:
        DataError: the value is something else, or empty.
    """
    number, found = record
    value = found[column]
    if not isinstance(value, str | int) or not str(value).strip():
        raise DataError(f"{path}, line {number}: column {column!r} is not a class name")
    return str(value)


def _checked(path: Path, record: Record, columns: Mapping[str, str]) -> Record:
    number, found = record
    for key, column in columns.items():
        if found.get(column) is None:
            known = ", ".join(repr(name) for name in found)
            raise DataError(f"{path}, line {number} has no column {column!r}; it has {known}; set {key}")
    return record


def _read_csv(path: Path, file: Iterable[str]) -> Iterator[Record]:
    reader = csv.DictReader(file, strict=True)
    try:
        for found in reader:
            yield reader.line_num, {key: value for key, value in found.items() if key is not None}
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error


def _read_jsonl(path: Path, file: Iterable[str]) -> Iterator[Record]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise DataError(f"{path}, line {number} is not a JSON object")
        yield number, found
