"""Say what a file is by its first bytes, where it is no table that nodes could read.

A node reads UTF-8 with commas between the columns, and says which line breaks that. Whoever begins does not know yet
that a spreadsheet, another encoding or another separator is the reason, so these are named here before any line is.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Final

from ringtune.errors import DataError
from ringtune.files.pointers import is_lfs_pointer, pointer_advice

TABLES: Final = (".csv", ".jsonl")
_FIRST_BYTES = 1 << 16
_SHOWN_CHARACTERS = 60
_FORMATS = (
    (b"PK\x03\x04", "a zip archive or a spreadsheet"),
    (b"PAR1", "a Parquet file"),
    (b"%PDF", "a PDF document"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\xd0\xcf\x11\xe0", "an old spreadsheet"),
    (b"SQLite format 3", "a SQLite database"),
)
_BYTE_ORDER_MARKS = ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))


def check_table_file(path: Path) -> None:
    """Refuse a file that is no text table in UTF-8 with commas, and say what it is instead.

    Raises:
        DataError: what was seen, and what to do.
    """
    if not path.is_file():
        raise DataError(f"{path} is not there; give --data a .csv, .jsonl, .txt or .npz file, or a folder of images")
    if is_lfs_pointer(path):
        raise DataError(pointer_advice(path))
    with path.open("rb") as file:
        first = file.read(_FIRST_BYTES)
    if not first.strip():
        raise DataError(f"{path} is empty; give it a line with the names of the columns, and a line for each row")
    found = next((name for mark, name in _FORMATS if first.startswith(mark)), "")
    if found:
        raise DataError(f"{path} is {found} by its first bytes; save its rows as CSV in UTF-8")
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS if first.startswith(mark)), "")
    if encoding or not _is_utf8(path):
        raise DataError(_of_encoding(path, encoding))
    if path.suffix.lower() == ".csv":
        _check_separator(path, first.decode("utf-8-sig", errors="ignore"))


def _is_utf8(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8-sig") as file:
            while file.read(_FIRST_BYTES):
                pass
    except UnicodeDecodeError:
        return False
    return True


def _of_encoding(path: Path, encoding: str) -> str:
    """Say that a file is not UTF-8, with the first place that is not and how it is converted."""
    if encoding:
        return f"{path} is {encoding} by its first bytes; convert it: iconv -f {encoding} -t UTF-8 {path} > NEW"
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                around = line[max(0, error.start - 10) : error.start + 10].decode("cp1252", errors="replace")
                return (
                    f"{path}, line {number} is not UTF-8 (byte 0x{line[error.start]:02x}); as Windows-1252 it reads "
                    f"{around.strip()!r}; convert it: iconv -f WINDOWS-1252 -t UTF-8 {path} > NEW"
                )
    return f"{path} is not UTF-8; convert it"


def _check_separator(path: Path, text: str) -> None:
    """Refuse a header of one column that another separator would divide."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    if len(next(csv.reader([line]), [])) > 1:
        return
    for separator, name in ((";", "semicolons (;)"), ("\t", "tabs"), ("|", "bars (|)")):
        if separator in line:
            columns = ", ".join(repr(part.strip()[:_SHOWN_CHARACTERS]) for part in line.split(separator))
            raise DataError(
                f"{path} has {name} between its columns ({columns}); save it with commas between the columns"
            )
