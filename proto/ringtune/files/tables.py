"""Tables of an owner: rows under a header (.csv, .tsv, .xlsx), or a JSON object a line (.jsonl); text also as .gz.

The separator of a csv file is found by its first lines: a line ``sep=;``, else that which gives all lines the same
number of cells. Rows that can't be used go to the file's account (``row_account``), with their lines. A first line may
be a row, too, where somebody forgot the header, so no message of an owner names it.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import re
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

from ringtune.errors import DataError
from ringtune.files.row_account import Problem, RowAccount, RowError
from ringtune.files.text_files import AUTO, check_rows_file, form_suffix, opened_text, text_form

TABLE_SUFFIXES: Final = (".csv", ".tsv", ".jsonl", ".xlsx")

MAX_CELL_CHARACTERS: Final = 1 << 24
"""Most characters of a cell; a longer one is a file whose quotes do not match."""

MOST_NUMBER: Final = 1e9
"""Largest number, in size, that a model can be asked to predict; numbers of order 1 are learned best."""

Record = tuple[int, Mapping[str, object]]

_SEPARATORS: Final = {",": "commas", ";": "semicolons (;)", "\t": "tabs", "|": "bars (|)"}
_DECIMAL_COMMA: Final = re.compile(r"[+-]?\d+,\d+")
_SAMPLE_CHARACTERS: Final = 1 << 16


def table_rows(
    path: Path,
    columns: Mapping[str, str],
    account: RowAccount | None = None,
    *,
    encoding: str = AUTO,
    may_be_empty: Collection[str] = (),
) -> Iterator[Record]:
    """The rows of a table that have a value in each of some columns, one after the other.

    Args:
        path: a file with a suffix of ``TABLE_SUFFIXES``, the texts also with ``.gz``.
        columns: job key (``data.text``) -> name of the column.
        account: gets rows that can't be used, and columns and notes of the file; None = one of its own, which has to
            be without problems at the end.
        encoding: of a text file; ``auto`` finds out.
        may_be_empty: keys of columns that need no value in each row.

    Yields:
        Line number and columns of each row.

    Raises:
        DataError: no file, another suffix, not readable, or a column is missing in every row.
    """
    check_rows_file(path)
    book = account or RowAccount(path)
    if path.suffix.lower() == ".xlsx":
        records = _read_xlsx(path, columns, book)
    else:
        records = _read_text(path, columns, book, encoding)
    needed = [column for key, column in columns.items() if key not in may_be_empty]
    for line, found in records:
        if empty := next((column for column in needed if _is_missing(found.get(column))), ""):
            book.bad(line, _missing(empty))
        else:
            yield line, found
    if account is None:
        book.check()


def text_of(record: Record, column: str) -> str:
    """The value of a column that has to be text.

    Raises:
        RowError: it is something else, or characters that no tokenizer can take.
    """
    value = record[1][column]
    if not isinstance(value, str):
        raise RowError(Problem(f"column {column!r} is not text but {_kind(value)}", "put the text in quotes"))
    return checked_text(value, f"column {column!r}")


def checked_text(text: str, where: str) -> str:
    r"""Refuse a text that is legal JSON and no Unicode text, such as ``"\ud83d"``, and one with a zero character.

    Raises:
        RowError: names the place that is given.
    """
    if "\0" in text:
        raise RowError(Problem(f"{where} has a zero character", "remove it"))
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RowError(Problem(f"{where} has half of a surrogate pair, which is no character")) from None
    return text


def class_of(record: Record, column: str) -> str:
    """The class name in a column: a text or a whole number, ``1.0`` included.

    Raises:
        RowError: the value is something else.
    """
    value = record[1][column]
    is_name = isinstance(value, str | int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_name:
        raise RowError(
            Problem(f"column {column!r} is not a class name but {_kind(value)}", "give a text or a whole number")
        )
    return checked_text(str(value), f"column {column!r}")


def number_of(record: Record, column: str) -> float:
    """The number in a column: a number, or a text that says one.

    Raises:
        RowError: the value is something else, not finite, or larger than ``MOST_NUMBER``.
    """
    value = record[1][column]
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, str | int | float) else float(value)
        problem = "" if math.isfinite(number) else f"not a finite number but {_kind(value)}"
    except (ValueError, OverflowError):
        number, problem = 0.0, f"not a number but {_kind(value)}"
    if problem:
        has_comma = isinstance(value, str) and bool(_DECIMAL_COMMA.fullmatch(value.strip()))
        point = "write a point in place of the decimal comma" if has_comma else "give a number such as 0.75"
        remedy = f"{point}, or remove the row"
        raise RowError(Problem(f"column {column!r} is {problem}", remedy))
    if abs(number) > MOST_NUMBER:
        raise RowError(
            Problem(f"column {column!r} has a number beyond {MOST_NUMBER:g}", "divide the column by its size")
        )
    return number


def _kind(value: object) -> str:
    """Say what a value is, without the value."""
    return "a text" if isinstance(value, str) else f"a {type(value).__name__}"


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _missing(column: str) -> Problem:
    return Problem(f"column {column!r} is empty", "fill it in or remove the row", is_missing=True)


def require_columns(account: RowAccount, columns: Mapping[str, str], found: Sequence[str]) -> None:
    """Refuse a file that lacks columns, with all of those that it lacks.

    Args:
        account: of the file.
        columns: job key -> name.
        found: columns of the file, or of its first row.

    Raises:
        DataError: says which are there, where that can't be a row of somebody else's.
    """
    missing = {key: name for key, name in columns.items() if name not in found}
    if not missing:
        return
    names = " and ".join(repr(name) for name in missing.values())
    has = f"it has the columns {', '.join(map(repr, found))}"
    if not account.is_own and len(missing) == len(columns):  # the first line may be a row
        has = "the first line, or the keys, have to name the columns, and name none of those that are wanted"
    keys = " and ".join(missing)
    how = f"set {keys}"
    if account.is_own:
        options = " ".join(f"--column {key.removeprefix('data.')}=NAME" for key in missing)
        how += f", or in init, predict and eval {options}"
    raise DataError(f"{account.path} has no column{'s' if len(missing) > 1 else ''} {names}; {has}; {how}")


# ---- csv and tsv ------------------------------------------------------------------------------------


def _read_text(path: Path, columns: Mapping[str, str], account: RowAccount, encoding: str) -> Iterator[Record]:
    """Read a text file by its suffix."""
    suffix = form_suffix(path)
    readers: dict[str, Callable[[TextIO, Mapping[str, str], RowAccount], Iterator[Record]]] = {
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".jsonl": _read_jsonl,
    }
    if suffix not in readers:
        raise DataError(f"{path} has the suffix {suffix!r}; rows are read from {', '.join(TABLE_SUFFIXES)} or .gz")
    form = text_form(path, encoding)
    account.notes += filter(None, [form.note])
    with opened_text(path, form) as file:
        yield from readers[suffix](file, columns, account)


def _read_csv(file: TextIO, columns: Mapping[str, str], account: RowAccount) -> Iterator[Record]:
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    sample = file.read(_SAMPLE_CHARACTERS)
    named = _named_separator(sample)
    separator = named or _separator(account, sample)
    lines = _lines_again(sample, file)
    if named:
        next(lines)
    reader = csv.reader(lines, delimiter=separator, strict=True)
    shift = bool(named)  # lines before the reader's first one
    try:
        header = next((cells for cells in reader if cells), [])
        _check_header(account, header, reader.line_num + shift)
        for cells in reader:
            if len(cells) > len(header):
                account.bad(reader.line_num + shift, _too_many(len(cells), len(header), _SEPARATORS[separator]))
            elif cells:
                if account.rows == 0:
                    require_columns(account, columns, header)
                account.rows += 1
                missing: list[str | None] = [None] * (len(header) - len(cells))
                yield reader.line_num + shift, dict(zip(header, [*cells, *missing], strict=True))
    except csv.Error as error:
        account.bad(reader.line_num + shift, Problem(_csv_problem(str(error)), "correct it; lines below are not read"))


def _named_separator(sample: str) -> str:
    """The separator that a first line ``sep=;`` names, as Excel writes and reads it; empty without one."""
    line = sample[: sample.find("\n")].rstrip("\r") if "\n" in sample else sample
    return line[4:] if line[:4].lower() == "sep=" and line[4:] in _SEPARATORS else ""


def _separator(account: RowAccount, sample: str) -> str:
    """Find what separates the columns: what gives all first lines as many cells, two at least, as the header has."""
    order = sorted(_SEPARATORS, key=lambda sign: sign != "\t") if form_suffix(account.path) == ".tsv" else _SEPARATORS
    widths: dict[str, list[int]] = {}
    for sign in order:
        try:
            rows = [len(cells) for cells in csv.reader(io.StringIO(sample, newline=""), delimiter=sign) if cells]
        except csv.Error:
            rows = []
        widths[sign] = rows[:-1] if len(sample) == _SAMPLE_CHARACTERS else rows  # the last one may be cut
    fits = [sign for sign, found in widths.items() if found and found[0] > 1 and len(set(found)) == 1]
    if not fits:
        fits = [sign for sign, found in widths.items() if found and found[0] > 1]
    if not fits:
        return next(iter(order))
    best = max(fits, key=lambda sign: widths[sign][0])
    others = " or ".join(_SEPARATORS[sign] for sign in fits if sign != best)
    if others or best != next(iter(order)):
        would = f"; {others} would fit, too: with a first line such as 'sep=,' it says so itself" if others else ""
        account.notes.append(f"{account.path} has {_SEPARATORS[best]} between its columns{would}")
    return best


def _lines_again(sample: str, file: TextIO) -> Iterator[str]:
    """Yield the lines of the whole file, of which the beginning has been read; the last line read may be half a one."""
    *lines, rest = [*io.StringIO(sample, newline=""), ""][:-1] or [""]
    yield from lines
    following = file.readline()
    if rest.endswith("\n") or (rest.endswith("\r") and following != "\n"):
        yield rest
        rest = ""
    if rest or following:
        yield rest + following
    yield from file


def _csv_problem(problem: str) -> str:
    if "field larger" in problem:
        return f"a cell has more than {MAX_CELL_CHARACTERS:,} characters, so a quote may be missing"
    if "NUL" in problem:
        return "it has a zero byte, so it is no CSV"
    if "unexpected end of data" in problem:
        return "a quote is opened and never closed"
    return problem


def _too_many(cells: int, columns: int, separator: str) -> Problem:
    what = f"the row has {cells} cells, the header has {columns} columns"
    return Problem(what, f"put a text with {separator} in quotes")


def _check_header(account: RowAccount, header: Sequence[str], line: int) -> None:
    """Note the columns; refuse those that stand twice."""
    if any("\0" in name for name in header):
        raise DataError(f"{account.path}, line {line}: {_csv_problem('NUL')}; give a text file, or set data.encoding")
    for index, name in enumerate(header):
        if name in header[:index]:
            both = f"columns {header.index(name) + 1} and {index + 1}"
            raise DataError(f"{account.path}, line {line} gives {both} the same name; rename one of them")
    account.columns = tuple(header)


# ---- jsonl ------------------------------------------------------------------------------------------


def _read_jsonl(file: TextIO, columns: Mapping[str, str], account: RowAccount) -> Iterator[Record]:
    known: dict[str, None] = {}
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line, object_pairs_hook=_without_duplicates)
        except RowError as error:
            account.bad(number, error.problem)
            continue
        except (ValueError, RecursionError) as error:
            account.bad(number, Problem(f"it is not JSON: {getattr(error, 'msg', 'a number or nesting is too long')}"))
            continue
        if not isinstance(found, dict):
            account.bad(number, Problem("it is not a JSON object", "write one object a line"))
            continue
        known.update(dict.fromkeys(found))
        account.rows += 1
        account.columns = tuple(known)
        yield number, found
    if account.rows:
        require_columns(account, columns, account.columns)


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError(Problem(f"it has the key {twice!r} twice", "keep one"))
    return table


# ---- xlsx -------------------------------------------------------------------------------------------


def _read_xlsx(path: Path, columns: Mapping[str, str], account: RowAccount) -> Iterator[Record]:
    """Read the first sheet that has rows; formulas count as the values that were saved with them."""
    try:
        library: Any = importlib.import_module("openpyxl")
    except ImportError as error:
        raise DataError(f"{path} needs the package 'openpyxl' (extra 'excel'); install it, or save as CSV") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of styles and validations, which are not read
            book = library.load_workbook(path, read_only=True, data_only=True)
        try:
            sheets = [sheet for sheet in book.worksheets if any(_filled(cells) for cells in _cells(sheet))]
            if len(sheets) > 1:
                names = ", ".join(repr(str(sheet.title)) for sheet in sheets[1:])
                account.notes.append(f"{path}: only the sheet {sheets[0].title!r} is read, not {names}")
            if sheets:
                yield from _sheet_rows(sheets[0], columns, account)
        finally:
            book.close()
    except (OSError, ValueError, KeyError, TypeError, IndexError, SyntaxError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is no readable spreadsheet ({error}); save it anew, or as CSV") from error


def _cells(sheet: Any) -> Iterable[tuple[object, ...]]:
    return sheet.iter_rows(values_only=True)  # type: ignore[no-any-return]


def _filled(cells: Sequence[object]) -> list[str | None]:
    """The cells of a row up to its last one with a value, as texts, as a csv file has them; dates in ISO form."""
    last = max((place for place, value in enumerate(cells, start=1) if value is not None), default=0)
    return [None if value is None else _text(value) for value in cells[:last]]


def _text(value: Any) -> str:
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


def _sheet_rows(sheet: Any, columns: Mapping[str, str], account: RowAccount) -> Iterator[Record]:
    header: list[str] = []
    for number, row in enumerate(_cells(sheet), start=1):
        cells = _filled(row)
        if not cells:
            continue
        if not header:
            header = [name or "" for name in cells]
            _check_header(account, header, number)
            continue
        if len(cells) > len(header):
            account.bad(number, Problem(f"the row has {len(cells)} cells, the header has {len(header)} columns"))
            continue
        if account.rows == 0:
            require_columns(account, columns, header)
        account.rows += 1
        yield number, dict(zip(header, [*cells, *[None] * (len(header) - len(cells))], strict=True))
