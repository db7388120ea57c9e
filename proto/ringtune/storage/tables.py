"""Files of rows: tables, words with tags (CoNLL), and accounts of unusable rows.

Tables are rows under a header (.csv, .tsv, .xlsx), a JSON object a line (.jsonl), a JSON list of objects, which is read
whole (.json), or Parquet and Arrow (``ringtune.storage.arrow_files``); text files may be compressed as .gz or .zst.

The separator of a csv file is that of a line ``sep=;``, else the one that gives all first lines the same number of
cells. A CoNLL file has a word a line, in columns separated by tabs or blanks: the first is the word, the last its tag.
A blank line ends a text, and lines with ``-DOCSTART-`` as word are left out.

Readers continue after a bad row, so that all problems of a file are reported at once, with lines (``RowAccount``).
Messages are sent to the coordinator and its users, so they quote no cell of a row, and no first line either: it may be
a row where the header was forgotten.
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
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from ringtune.errors import DataError
from ringtune.storage.arrow_files import ARROW_SUFFIXES, arrow_rows, is_arrow
from ringtune.storage.text_files import (
    AUTO,
    MAX_BYTES,
    MAX_ROW_BYTES,
    PACKED,
    check_archive,
    check_rows_file,
    form_suffix,
    opened_text,
    text_form,
)
from ringtune.texts import listed, shown

_SHOWN_LINES: Final = 5
_SHOWN_PROBLEMS: Final = 8
_MAX_PROBLEMS: Final = 100


class Problem(NamedTuple):
    """Reason why a row can't be used, without line and cells; it may be a missing value (``data.missing``)."""

    what: str
    remedy: str = "correct or remove the row"
    is_missing: bool = False


class RowError(Exception):
    """A row can't be used; readers catch it and note its problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.what)
        self.problem = problem


@dataclass(slots=True)
class _Lines:
    """Rows with the same problem: their number, and the first few lines."""

    count: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, line: int) -> None:
        self.count += 1
        if len(self.first) < _SHOWN_LINES:
            self.first.append(line)

    def text(self, word: str) -> str:
        """Write ``lines 3, 5 and 2 more``, for the word ``line``."""
        more = f" and {self.count - len(self.first):,} more" if self.count > len(self.first) else ""
        return f"{word}{'s' if self.count > 1 else ''} {', '.join(map(str, self.first))}{more}"


class RowAccount:
    """Unusable rows, columns and notes of one file, filled by its readers.

    Args:
        skips_missing: whether rows with an empty or missing cell are left out (``data.missing = "skip"``).
        is_own: whether messages stay with the owner of the file, so that they may name all of its columns.

    Attributes:
        rows: number of rows read, including those with a missing value.
        columns: of the file, in order; empty where it has none.
        notes: on how the file was read, for the user.
    """

    def __init__(self, path: Path, *, skips_missing: bool = False, is_own: bool = False) -> None:
        self.path = path
        self.is_own = is_own
        self.rows = 0
        self.columns: tuple[str, ...] = ()
        self.notes: list[str] = []
        self._names: set[str] = set()
        self._skips_missing = skips_missing
        self._bad: dict[Problem, _Lines] = {}
        self._left_out: dict[str, _Lines] = {}
        self._word = _word(path)

    def bad(self, line: int, problem: Problem) -> None:
        """Note a row that can't be used."""
        if problem not in self._bad and len(self._bad) >= _MAX_PROBLEMS:
            problem = Problem("has another problem")
        self._bad.setdefault(problem, _Lines()).add(line)

    def count(self, line: int, names: Collection[str]) -> None:
        """Count a row with these columns, where rows have columns of their own; raises ``DataError`` for too many."""
        self.rows += 1
        if not self._names.issuperset(names):
            self._names.update(names)
            _check_width(self.path, line, len(self._names))
            self.columns = tuple(dict.fromkeys((*self.columns, *names)))

    def leave_out(self, line: int, what: str) -> None:
        """Note a row that is left out whatever the job says."""
        self._left_out.setdefault(what, _Lines()).add(line)

    @property
    def left_out(self) -> Mapping[str, int]:
        """Reason -> number of rows left out; with ``data.missing = "skip"`` also those with an empty cell."""
        return {what: lines.count for what, lines in self._reasons().items()}

    def lines_left_out(self) -> list[str]:
        """Write a sentence for each reason in ``left_out``."""
        return [
            f"{lines.count:,} row{'s are' if lines.count > 1 else ' is'} left out: {what} ({lines.text(self._word)})"
            for what, lines in self._reasons().items()
        ]

    def problems(self) -> str:
        """Write all problems and their remedies in one sentence; empty if there is none."""
        bad = {problem: lines for problem, lines in self._bad.items() if not self._skips(problem)}
        if not bad:
            return ""
        missing = sum(lines.count for problem, lines in bad.items() if problem.is_missing)
        total = sum(lines.count for lines in bad.values())
        skip = "set data.missing = 'skip' (in predict and eval --missing=skip) to leave out"
        if total == 1:
            (problem, lines), *_ = bad.items()
            return f"{self.path}, {lines.text(self._word)}: {problem.what}; {problem.remedy}" + (
                f", or {skip} the row" if missing else ""
            )
        shown = [
            f"{problem.what} in {lines.text(self._word)}" for problem, lines in list(bad.items())[:_SHOWN_PROBLEMS]
        ]
        shown += [f"and {len(bad) - len(shown)} other problems"] if len(bad) > len(shown) else []
        remedies = list(dict.fromkeys(problem.remedy for problem in bad))
        remedy = remedies[0] if len(remedies) == 1 else "correct or remove them"
        which = "these rows" if missing == total else f"the {missing:,} with an empty cell"
        return f"{self.path}: {total:,} rows can't be used: {'; '.join(shown)}; {remedy}" + (
            f", or {skip} {which}" if missing else ""
        )

    def check(self) -> None:
        """Refuse the file if it has bad rows, with a ``DataError`` that has all of them."""
        if problems := self.problems():
            raise DataError(problems)

    def _reasons(self) -> dict[str, _Lines]:
        skipped = {problem.what: lines for problem, lines in self._bad.items() if self._skips(problem)}
        return self._left_out | skipped

    def _skips(self, problem: Problem) -> bool:
        return self._skips_missing and problem.is_missing


MAX_COLUMNS: Final = 4096
"""Most columns of a table; each row takes memory and time for all of them, also for those that it leaves out."""


def _check_width(path: Path, line: int, num_columns: int) -> None:
    if num_columns > MAX_COLUMNS:
        raise DataError(
            f"{row_place(path, line)}: there are more than {MAX_COLUMNS:,} columns, the most that are read; leave out "
            "those that are not used, or put values with many names into one column"
        )


def _word(path: Path) -> str:
    return "row" if is_arrow(path) else "line"


def row_place(path: Path, number: int) -> str:
    """Write the place of a row: ``train.csv, line 3``, or ``train.parquet, row 3``."""
    return f"{path}, {_word(path)} {number}"


TABLE_SUFFIXES: Final = (".csv", ".tsv", ".jsonl", ".json", ".xlsx", *ARROW_SUFFIXES)

MAX_CELL_CHARACTERS: Final = 1 << 24
"""Most characters of a cell; a longer one comes from unmatched quotes."""

MAX_NUMBER: Final = 1e9
"""Largest absolute value of a target in regression; targets of order 1 are learned best."""

Record = tuple[int, Mapping[str, object]]

_SEPARATORS: Final = {",": "commas", ";": "semicolons (;)", "\t": "tabs", "|": "bars (|)"}
_DECIMAL_COMMA: Final = re.compile(r"[+-]?\d+,\d+")
_SAMPLE_CHARACTERS: Final = 1 << 16
_SIGN: Final = re.compile(r"[^ \t\r\n]")


def table_rows(
    path: Path,
    columns: Mapping[str, str],
    account: RowAccount | None = None,
    *,
    encoding: str = AUTO,
    may_be_empty: Collection[str] = (),
    only_needed: bool = False,
) -> Iterator[Record]:
    """Yield line number and columns of the rows of a table that have a value in each needed column.

    Args:
        path: a file with a suffix of ``TABLE_SUFFIXES``, text files also with ``.gz`` or ``.zst``; or a folder or split
            of Parquet or Arrow files.
        columns: job key (``data.text``) -> name of the column.
        account: for bad rows, columns and notes; None = bad rows raise ``DataError`` at the end.
        encoding: of a text file; ``auto`` = detected.
        may_be_empty: keys of columns that may be empty.
        only_needed: leave out other columns of Parquet and Arrow, which then need not be decoded.
    """
    book = account or RowAccount(path)
    if is_arrow(path):
        records = _read_arrow(path, columns, book, only_needed=only_needed)
    else:
        check_rows_file(path)
        is_sheet = path.suffix.lower() == ".xlsx"
        records = _read_xlsx(path, columns, book) if is_sheet else _read_text(path, columns, book, encoding)
    needed = [column for key, column in columns.items() if key not in may_be_empty]
    for line, row in records:
        if empty := next((column for column in needed if _is_missing(row.get(column))), ""):
            book.bad(line, Problem(f"column {empty!r} is empty", "fill it in or remove the row", is_missing=True))
        else:
            yield line, row
    if account is None:
        book.check()


def text_of(record: Record, column: str) -> str:
    """Return the text in a column; raises ``RowError`` for another type, or characters that no tokenizer accepts."""
    value = record[1][column]
    if not isinstance(value, str):
        raise RowError(Problem(f"column {column!r} is not text but {_kind(value)}", "put the text in quotes"))
    return checked_text(value, f"column {column!r}")


def checked_text(text: str, where: str) -> str:
    r"""Refuse a text with a zero character, or with half a surrogate pair, which JSON allows: ``"\ud83d"``."""
    if "\0" in text:
        raise RowError(Problem(f"{where} has a zero character", "remove it"))
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RowError(Problem(f"{where} has half of a surrogate pair, which is no character")) from None
    return text


def class_of(record: Record, column: str) -> str:
    """Return the class name in a column, a text or a whole number (``1.0`` included); else raise ``RowError``."""
    value = record[1][column]
    is_name = isinstance(value, str | int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_name:
        raise RowError(
            Problem(f"column {column!r} is not a class name but {_kind(value)}", "give a text or a whole number")
        )
    return checked_text(str(value), f"column {column!r}")


def number_of(record: Record, column: str) -> float:
    """Return the number in a column, or in a text there; raises ``RowError`` if it is not finite, or too large."""
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
    if abs(number) > MAX_NUMBER:
        raise RowError(
            Problem(f"column {column!r} has a number beyond {MAX_NUMBER:g}", "divide the column by its size")
        )
    return number


def _kind(value: object) -> str:
    return "a text" if isinstance(value, str) else f"a {type(value).__name__}"


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def require_columns(account: RowAccount, columns: Mapping[str, str], present: Sequence[str]) -> None:
    """Refuse a file that lacks columns; the message has all missing ones; raises ``DataError``."""
    missing = {key: name for key, name in columns.items() if name not in present}
    if not missing:
        return
    names = " and ".join(repr(name) for name in missing.values())
    has = f"it has the columns {', '.join(map(repr, present))}"
    if not account.is_own and len(missing) == len(columns):  # the first line may be a row
        has = "the first line, or the keys, have to name the columns, but have none of the needed ones"
    keys = " and ".join(missing)
    how = f"set {keys}"
    if account.is_own:
        options = " ".join(f"--column {key.removeprefix('data.')}=NAME" for key in missing)
        how += f", or in init, predict and eval {options}"
    raise DataError(f"{account.path} has no column{'s' if len(missing) > 1 else ''} {names}; {has}; {how}")


def _lines(account: RowAccount, *parts: TextIO) -> Iterator[str]:
    """Yield the lines of a file, in parts, up to one that is too long for memory, which is a bad row."""
    number = 0
    for part in parts:
        while line := part.readline(MAX_ROW_BYTES):
            number += 1
            if len(line) == MAX_ROW_BYTES:
                what = f"it has more than {MAX_ROW_BYTES >> 20} million characters, so a line end may be missing"
                account.bad(number, Problem(what, "correct it; lines below are not read"))
                return
            yield line


# ---- csv and tsv ------------------------------------------------------------------------------------


def _read_text(path: Path, columns: Mapping[str, str], account: RowAccount, encoding: str) -> Iterator[Record]:
    suffix = form_suffix(path)
    readers: dict[str, Callable[[TextIO, Mapping[str, str], RowAccount], Iterator[Record]]] = {
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".jsonl": _read_jsonl,
        ".json": _read_json,
    }
    if suffix in TABLE_SUFFIXES and suffix not in readers:
        raise DataError(f"{path}: a file {suffix} is read as it is; unpack it")
    if suffix not in readers:
        known = f"{', '.join(TABLE_SUFFIXES)}; also packed as {' or '.join(PACKED)}"
        raise DataError(f"{path} has the suffix {suffix!r}; rows are read from {known}")
    form = text_form(path, encoding)
    account.notes += filter(None, [form.note])
    with opened_text(path, form) as file:
        yield from readers[suffix](file, columns, account)


def _read_csv(file: TextIO, columns: Mapping[str, str], account: RowAccount) -> Iterator[Record]:
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    sample = file.read(_SAMPLE_CHARACTERS)
    line = sample[: sample.find("\n")].rstrip("\r") if "\n" in sample else sample
    named = line[4:] if line[:4].lower() == "sep=" and line[4:] in _SEPARATORS else ""
    separator = named or _separator(account, sample)
    # the sample may end within a line; lines are those of the whole file again
    lines = _lines(account, io.StringIO(sample + file.readline(MAX_ROW_BYTES), newline=""), file)
    if named:
        next(lines)
    reader = csv.reader(lines, delimiter=separator, strict=True)
    shift = bool(named)  # lines before the reader's first one
    try:
        rows = ((reader.line_num + shift, cells) for cells in reader)
        yield from _under_header(rows, columns, account, f"put a text with {_SEPARATORS[separator]} in quotes")
    except csv.Error as error:
        account.bad(reader.line_num + shift, Problem(_csv_problem(str(error)), "correct it; lines below are not read"))


def _separator(account: RowAccount, sample: str) -> str:
    """Detect the separator: the one that gives all first lines as many cells, at least two, as the header."""
    order = sorted(_SEPARATORS, key=lambda sign: sign != "\t") if form_suffix(account.path) == ".tsv" else _SEPARATORS
    widths: dict[str, list[int]] = {}
    for sign in order:
        try:
            rows = [len(cells) for cells in csv.reader(io.StringIO(sample, newline=""), delimiter=sign) if cells]
        except csv.Error:
            rows = []
        widths[sign] = rows[:-1] if len(sample) == _SAMPLE_CHARACTERS else rows  # the last one may be cut
    fits = [sign for sign, counts in widths.items() if counts and counts[0] > 1 and len(set(counts)) == 1]
    if not fits:
        fits = [sign for sign, counts in widths.items() if counts and counts[0] > 1]
    if not fits:
        return next(iter(order))
    best = max(fits, key=lambda sign: widths[sign][0])
    others = " or ".join(_SEPARATORS[sign] for sign in fits if sign != best)
    if others or best != next(iter(order)):
        would = f"; {others} would fit too: give it a first line such as 'sep=,'" if others else ""
        account.notes.append(f"{account.path} has {_SEPARATORS[best]} between its columns{would}")
    return best


def _csv_problem(problem: str) -> str:
    if "field larger" in problem:
        return f"a cell has more than {MAX_CELL_CHARACTERS:,} characters, so a quote may be missing"
    if "NUL" in problem:
        return "it has a zero byte, so it is no CSV"
    if "unexpected end of data" in problem:
        return "a quote is opened and never closed"
    return problem


def _under_header(
    rows: Iterable[tuple[int, Sequence[str | None]]], columns: Mapping[str, str], account: RowAccount, remedy: str = ""
) -> Iterator[Record]:
    """Yield the rows after the first one that has cells, each with its line; the first one names the columns."""
    header: list[str] = []
    for line, cells in rows:
        if not header and cells:
            header = [name or "" for name in cells]
            _check_header(account, header, line)
        elif len(cells) > len(header):
            what = f"the row has {len(cells)} cells, the header has {len(header)} columns"
            account.bad(line, Problem(what, remedy) if remedy else Problem(what))
        elif cells:
            if account.rows == 0:
                require_columns(account, columns, header)
            account.rows += 1
            yield line, dict(zip(header, [*cells, *[None] * (len(header) - len(cells))], strict=True))


def _check_header(account: RowAccount, header: Sequence[str], line: int) -> None:
    if any("\0" in name for name in header):
        raise DataError(f"{account.path}, line {line}: {_csv_problem('NUL')}; give a text file, or set data.encoding")
    _check_width(account.path, line, len(header))
    places: dict[str, int] = {}
    for index, name in enumerate(header, start=1):
        if (first := places.setdefault(name, index)) != index:
            both = f"columns {first} and {index}"
            raise DataError(f"{account.path}, line {line} gives {both} the same name; rename one of them")
    account.columns = tuple(header)


# ---- jsonl and json ------------------------------------------------------------------------------------------


def _read_jsonl(file: TextIO, columns: Mapping[str, str], account: RowAccount) -> Iterator[Record]:
    for number, line in enumerate(_lines(account, file), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_without_duplicates)
        except RowError as error:
            account.bad(number, error.problem)
            continue
        except (ValueError, RecursionError) as error:
            account.bad(number, Problem(f"it is not JSON: {getattr(error, 'msg', 'a number or nesting is too long')}"))
            continue
        if not isinstance(row, dict):
            account.bad(number, Problem("it is not a JSON object", "write one object a line"))
            continue
        account.count(number, row)
        yield number, row
    if account.rows:
        require_columns(account, columns, account.columns)


def _read_json(file: TextIO, columns: Mapping[str, str], account: RowAccount) -> Iterator[Record]:
    """Read a list of objects; a row has the line in which it begins."""
    text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise DataError(
            f"{account.path} has more than {MAX_BYTES:,} characters, and is read whole; write rows as .jsonl"
        )
    twice: list[RowError] = []

    def table_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
        try:
            return _without_duplicates(pairs)
        except RowError as error:
            twice.append(error)
            return dict(pairs)

    decode = json.JSONDecoder(object_pairs_hook=table_of).raw_decode
    at, line = _next_sign(text, 0), 1
    if text[at : at + 1] != "[":
        raise DataError(f"{account.path} is no list; write [{{...}}, {{...}}], or an object a line in a .jsonl file")
    line += text.count("\n", 0, at)
    while True:
        begin = _next_sign(text, at + 1)
        line += text.count("\n", at, begin)
        if text[at] == "[" and text[begin : begin + 1] == "]":
            break
        try:
            row, end = decode(text, begin)
        except (ValueError, RecursionError) as error:
            what = f"it is not JSON: {getattr(error, 'msg', 'a number or nesting is too long')}"
            account.bad(line, Problem(what, "correct it; what follows is not read"))
            break
        if twice:
            account.bad(line, twice[0].problem)
            twice.clear()
        elif not isinstance(row, dict):
            account.bad(line, Problem("it is not a JSON object", "write a list of objects"))
        else:
            account.count(line, row)
            yield line, row
        at = _next_sign(text, end)
        line += text.count("\n", begin, at)
        if text[at : at + 1] != ",":
            if text[at : at + 1] != "]" or _next_sign(text, at + 1) < len(text):
                account.bad(line, Problem("it is not JSON: a comma or the end of the list is missing"))
            break
    if account.rows:
        require_columns(account, columns, account.columns)


def _next_sign(text: str, start: int) -> int:
    """Return the place of the next character that is no blank; the length of the text where there is none."""
    match = _SIGN.search(text, start)
    return match.start() if match else len(text)


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise RowError(Problem(f"it has the key {shown(twice)} twice", "keep one"))
    return table


# ---- parquet and arrow -----------------------------------------------------------------------------


def _read_arrow(path: Path, columns: Mapping[str, str], account: RowAccount, *, only_needed: bool) -> Iterator[Record]:
    only = columns.values() if only_needed else None
    with closing(arrow_rows(path, columns.get("data.image", ""), only)) as rows:
        header: Any = next(rows)
        account.columns = header.columns
        for name, kind in header.left_out.items():
            if name in columns.values():
                raise DataError(f"{path}: column {name!r} is of type {kind}; write it as texts, numbers or lists")
            account.notes.append(f"{path}: the column {name!r} has bytes and is not read")
        for number, row in enumerate(rows, start=1):
            if account.rows == 0:
                require_columns(account, columns, header.columns)
            account.rows += 1
            if isinstance(row, Mapping):
                yield number, row
            else:
                account.bad(number, Problem(str(row)))


# ---- xlsx -------------------------------------------------------------------------------------------


_DAMAGE: Final = (ArithmeticError, AttributeError, EOFError, LookupError, OSError, RuntimeError, SyntaxError)
"""Of openpyxl on a damaged sheet, beside errors of values, archives and their compression."""


def _read_xlsx(path: Path, columns: Mapping[str, str], account: RowAccount) -> Iterator[Record]:
    """Read the first sheet with rows; formulas count as the values that were saved with them."""
    try:
        library: Any = importlib.import_module("openpyxl")
    except ImportError as error:
        raise DataError(f"{path} needs the package 'openpyxl' (extra 'excel'); install it, or save as CSV") from error
    try:
        check_archive(path, "save it as CSV", most_bytes=_MAX_SHEET_BYTES, factor=_MAX_SHEET_FACTOR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of styles and validations, which are not read
            book = library.load_workbook(path, read_only=True, data_only=True)
        cells_of = _SheetReader(path)
        try:
            sheets = [sheet for sheet in book.worksheets if any(_filled(cells) for cells in cells_of(sheet))]
            if len(sheets) > 1:
                names = listed([shown(str(sheet.title)) for sheet in sheets[1:]], _SHOWN_PROBLEMS)
                account.notes.append(f"{path}: only the sheet {sheets[0].title!r} is read, not {names}")
            if sheets:
                rows = ((number, _filled(cells)) for number, cells in enumerate(cells_of(sheets[0]), start=1))
                yield from _under_header(rows, columns, account)
        finally:
            book.close()
    except (*_DAMAGE, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is no readable spreadsheet ({error}); save it again, or as CSV") from error


_MAX_SHEET_BYTES: Final = 1 << 28
_MAX_SHEET_FACTOR: Final = 20
"""An unpacked sheet takes up to four times its bytes in memory, as texts."""
_MAX_SHEET_ROWS: Final = 1 << 20
_MAX_SHEET_CELLS: Final = 1 << 24
_MAX_READINGS: Final = 4
"""Largest sheets that are looked through, in all: a book may have thousands, of which the first with rows is read."""


class _SheetReader:
    """Reads the sheets of one book, within limits for each and for all.

    A row or cell has its number in the file, so a few bytes may stand for any number of empty ones.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._most_cells = max(_MAX_SHEET_CELLS, _MAX_SHEET_FACTOR * path.stat().st_size)
        self._rows_left, self._cells_left = _MAX_READINGS * _MAX_SHEET_ROWS, _MAX_READINGS * self._most_cells

    def __call__(self, sheet: Any) -> Iterator[tuple[object, ...]]:
        """Yield the cells of each row, also of those that the file leaves out; raises ``DataError`` for too many."""
        sheet.reset_dimensions()  # in the file, and not needed
        left = self._most_cells
        for number, cells in enumerate(sheet.iter_rows(values_only=True), start=1):
            left -= len(cells)
            self._rows_left -= 1
            self._cells_left -= len(cells)
            if number > _MAX_SHEET_ROWS or min(left, self._rows_left, self._cells_left) < 0:
                raise DataError(
                    f"{self._path}: up to the sheet {shown(sheet.title)} are more than {_MAX_SHEET_ROWS:,} rows, or "
                    f"{_MAX_SHEET_CELLS:,} cells, most of them empty; save it as CSV, or remove what is far beyond the "
                    "rows"
                )
            yield cells


def _filled(cells: Sequence[object]) -> list[str | None]:
    """Return the cells of a row up to its last one with a value, as texts; dates in ISO form."""
    last = max((place for place, value in enumerate(cells, start=1) if value is not None), default=0)
    texts = (value.isoformat() if hasattr(value, "isoformat") else value for value in cells[:last])
    return [None if value is None else str(value) for value in texts]


CONLL_SUFFIXES: Final = (".conll", ".bio", ".iob")
_DOCUMENT: Final = "-DOCSTART-"
_TAGS: Final = "tags"


class TaggedWords(NamedTuple):
    """Words of one text, none empty, and the tag of each if they are read."""

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
    """Yield the texts of a file; raises ``DataError``.

    Args:
        path: a ``.jsonl`` file, or one with a suffix of ``CONLL_SUFFIXES``; also with ``.gz``.
        account: for bad rows: no lists of texts, an empty word, words and tags of different numbers, lines of different
            numbers of columns.
        words: column of the words.
        tags: column of the tags; empty = they are not read, and may be missing.
        more: further required columns, as for ``table_rows``; not for CoNLL.
        known_tags: name of the tags of a CoNLL file in records if they are not read.
        encoding: of the file.
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
            names = _words_of(record, words)
            yield TaggedWords(names, _tags_of(record, words, tags, len(names)) if tags else (), record)
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
        for number, line in enumerate(_lines(account, file), start=1):
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
                if needs_tags and len(cells) == 1:
                    remedy = "a line has a word, a tab or blanks, and its tag last"
                    raise RowError(Problem("the line has one column", remedy))
                if len(cells) != first[1]:
                    what = f"the line has {len(cells)} columns and line {first[0]} has {first[1]}"
                    raise RowError(Problem(what, "the last column is the tag, so give all lines the same columns"))
                if not cells[0] or (needs_tags and not cells[-1]):
                    what = f"the line has an empty {'tag' if cells[0] else 'word'}"
                    remedy = "the first column is the word, the last its tag; correct or remove the line"
                    raise RowError(Problem(what, remedy))
                checked_text(cells[0], "the word")
            except RowError as error:
                account.bad(number, error.problem)
                continue
            rows.append((number, cells))
    yield from _one_text(account, rows, names, needs_tags=needs_tags)


def _one_text(
    account: RowAccount, rows: list[tuple[int, list[str]]], names: tuple[str, str], *, needs_tags: bool
) -> Iterator[TaggedWords]:
    """Make a text of the lines between two blank ones, with the job's column names and the first line number."""
    if not rows:
        return
    words = tuple(cells[0] for _, cells in rows)
    tags = tuple(cells[-1] for _, cells in rows) if len(rows[0][1]) > 1 else ()
    columns: dict[str, object] = {names[0]: list(words), **({names[1]: list(tags)} if tags else {})}
    account.columns = tuple(columns)
    account.rows += 1
    yield TaggedWords(words, tags if needs_tags else (), (rows[0][0], columns))
