"""Tables of an owner: csv with a header, or a JSON object a line; read strictly, errors say where."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from ringtune.errors import DataError

Record = tuple[int, Mapping[str, object]]


def read_table(path: Path, columns: Mapping[str, str]) -> list[Record]:
    """Read a table that has to have some columns.

    Args:
        path: a ``.csv`` or ``.jsonl`` file.
        columns: job key (``data.text``) -> name of the column.

    Returns:
        Line number and columns of each row.

    Raises:
        DataError: no file, another suffix, not readable, a column is missing, or no rows.
    """
    if not path.is_file():
        raise DataError(f"{path} is not there; set data.train, data.eval or --data")
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path} ends in {path.suffix!r}; rows are read from .csv or .jsonl")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            records = [_checked(path, record, columns) for record in reader(path, file)]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}); convert it") from error
    if not records:
        raise DataError(f"{path} has no rows; give it data or leave it out")
    return records


def text_of(path: Path, record: Record, column: str) -> str:
    """A column that has to be text.

    Raises:
        DataError: it is something else.
    """
    number, found = record
    value = found[column]
    if not isinstance(value, str):
        raise DataError(f"{path}, line {number}: column {column!r} is not text")
    return value


def class_of(path: Path, record: Record, column: str) -> str:
    """A column that has to be a class name: a text or a whole number.

    Raises:
        DataError: it is something else, or empty.
    """
    number, found = record
    value = found[column]
    if not isinstance(value, str | int) or not str(value).strip():
        raise DataError(f"{path}, line {number}: column {column!r} is not a class name")
    return str(value)


def _checked(path: Path, record: Record, columns: Mapping[str, str]) -> Record:
    number, found = record
    for column in columns.values():
        if found.get(column) is None:
            known = ", ".join(repr(name) for name in found)
            keys = ", ".join(columns)
            raise DataError(f"{path}, line {number} has no column {column!r}; it has {known}; set {keys}")
    return record


def _read_csv(path: Path, file: Iterator[str]) -> Iterator[Record]:
    reader = csv.DictReader(file, strict=True)
    try:
        for found in reader:
            yield reader.line_num, {key: value for key, value in found.items() if key is not None}
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error


def _read_jsonl(path: Path, file: Iterator[str]) -> Iterator[Record]:
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
