"""Tables of an owner: csv with a header, or a JSON object a line; read strictly, errors say where.

An error goes to the coordinator and to the user, so it has no cell of a row in it. A first line may be a row, too,
where somebody forgot the header.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from ringtune.errors import DataError
from ringtune.files.pointers import is_lfs_pointer, pointer_advice

MAX_CELL_CHARACTERS: Final = 1 << 24
"""Most characters of a cell; a longer one is a file whose quotes do not match."""

MOST_NUMBER: Final = 1e9
"""Largest number, in size, that a model can be asked to predict; numbers of order 1 are learned best."""

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
    if path.is_dir():
        raise DataError(f"{path} is a folder; set data.train, data.eval or --data to a .csv or .jsonl file in it")
    if not path.is_file():
        raise DataError(f"{path} is not there; set data.train, data.eval or --data")
    if is_lfs_pointer(path):
        raise DataError(pointer_advice(path))
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path} has the suffix {path.suffix!r}; rows are read from .csv or .jsonl")
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
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise DataError(
            f"{path}, line {number}: column {column!r} is not a class name but {_kind(value)}; give a text or a whole "
            "number"
        )
    return str(value)


def number_of(path: Path, record: Record, column: str) -> float:
    """The number in a column: a number, or a text that says one.

    Raises:
        DataError: the value is something else, not finite, or larger than ``MOST_NUMBER``.
    """
    line, found = record
    value = found[column]
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, str | int | float) else float(value)
        problem = "" if math.isfinite(number) else f"not a finite number but {_kind(value)}"
    except (ValueError, OverflowError):
        number, problem = 0.0, f"not a number but {_kind(value)}"
    if problem:
        raise DataError(
            f"{path}, line {line}: column {column!r} is {problem}; give a number such as 0.75, or remove the row"
        )
    if abs(number) > MOST_NUMBER:
        raise DataError(
            f"{path}, line {line}: column {column!r} has a number beyond {MOST_NUMBER:g}; divide the column by its size"
        )
    return number


def _kind(value: object) -> str:
    """Say what a value is, without the value."""
    if isinstance(value, str):
        return "a text" if value.strip() else "empty"
    return f"a {type(value).__name__}"


def _checked(path: Path, record: Record, columns: Mapping[str, str]) -> Record:
    number, found = record
    for key, column in columns.items():
        if column not in found:
            raise DataError(
                f"{path}, line {number} has no column {column!r}; {_known(found, columns.values())}; set {key}"
            )
        if found[column] is None:
            raise DataError(f"{path}, line {number} has no column {column!r}: it is null or missing; correct the row")
    return record


def _known(found: Mapping[str, object], wanted: Collection[str]) -> str:
    """Say which columns a table has, if what names them is surely a header: one of those that are wanted is there."""
    if not any(column in found for column in wanted):
        return "the first line, or the keys, have to name the columns, and name none of those that are wanted"
    return "it has " + ", ".join(repr(name) for name in found)


def _read_csv(path: Path, file: Iterable[str]) -> Iterator[Record]:
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    reader = csv.reader(file, strict=True)
    header: list[str] = []
    try:
        header = next((cells for cells in reader if cells), [])
        _check_header(path, header, reader.line_num)
        for cells in reader:
            if not cells:
                continue
            if len(cells) > len(header):
                raise DataError(
                    f"{path}, line {reader.line_num} has {len(cells)} cells, the header has {len(header)} columns; put "
                    "a text with commas in quotes"
                )
            missing: list[str | None] = [None] * (len(header) - len(cells))
            yield reader.line_num, dict(zip(header, [*cells, *missing], strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {_csv_problem(str(error))}") from error


def _csv_problem(problem: str) -> str:
    if "field larger" in problem:
        return f"a cell has more than {MAX_CELL_CHARACTERS:,} characters; is a quote missing? shorten it"
    if "NUL" in problem:
        return "it has a zero byte, so it is no CSV; give a text file"
    if "unexpected end of data" in problem:
        return "a quote is opened and never closed"
    return problem


def _check_header(path: Path, header: Sequence[str], line: int) -> None:
    """Refuse columns that stand twice, and a header that is separated by something else than commas."""
    for index, name in enumerate(header):
        if name in header[:index]:
            both = f"columns {header.index(name) + 1} and {index + 1}"
            raise DataError(f"{path}, line {line} gives {both} the same name; rename one of them")
    if len(header) != 1:
        return
    if "\0" in header[0]:
        raise DataError(f"{path}, line {line}: {_csv_problem('NUL')}")
    for separator, name in ((";", "semicolons (;)"), ("\t", "tabs"), ("|", "bars (|)")):
        if separator in header[0]:
            raise DataError(f"{path}, line {line} is separated by {name}; save it with commas between the columns")


def _read_jsonl(path: Path, file: Iterable[str]) -> Iterator[Record]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line, object_pairs_hook=_without_duplicates)
        except _TwiceError as error:
            raise DataError(f"{path}, line {number} has the key {str(error)!r} twice; keep one") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise DataError(f"{path}, line {number} is not a JSON object; .jsonl has one object a line")
        yield number, found


class _TwiceError(Exception):
    """A key stands twice in a JSON object."""


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return table
