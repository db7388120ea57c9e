"""Text files in UTF-8, UTF-16, UTF-32 or Windows-1252, plain or gzip; the detected encoding is reported.

``auto`` detects UTF-16 and UTF-32 by their byte order mark, and UTF-8 if every line is valid. Another file is read as
Windows-1252, which spreadsheets write, unless at least half of its lines with other characters than ASCII are UTF-8:
then the others are damaged, and the file is refused.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, NamedTuple, TextIO, cast

from ringtune.errors import DataError
from ringtune.storage.strict import is_lfs_pointer, pointer_advice

AUTO: Final = "auto"
_GZIP: Final = ".gz"
_UTF_8: Final = "utf-8-sig"
_MARKS: Final = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_FORMATS: Final = (
    (b"PK\x03\x04", "a zip archive or a spreadsheet (.xlsx)"),
    (b"PAR1", "a Parquet file"),
    (b"%PDF", "a PDF document"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\xd0\xcf\x11\xe0", "an old spreadsheet"),
    (b"SQLite format 3", "a SQLite database"),
)
_FIRST_BYTES: Final = 16


class TextForm(NamedTuple):
    """Encoding of a text file, and a note on how it was chosen.

    Attributes:
        encoding: Python's name.
        note: for the user; empty for UTF-8 and for a given encoding.
    """

    encoding: str
    note: str = ""


def form_suffix(path: Path) -> str:
    """Return the suffix without ``.gz``: ``.csv`` for ``Rows.CSV`` and ``rows.csv.gz``."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix == _GZIP else suffix


def check_rows_file(path: Path) -> None:
    """Refuse a missing file, a folder, and a pointer of Git LFS; raises ``DataError``."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; set data.train, data.eval or --data to a .csv or .jsonl file in it")
    if not path.is_file():
        raise DataError(f"{path} is not there; set data.train, data.eval or --data")
    if is_lfs_pointer(path):
        raise DataError(pointer_advice(path))


def text_form(path: Path, encoding: str = AUTO) -> TextForm:
    """Detect the encoding of a file, unpacked if it ends in ``.gz``, unless ``encoding`` names one.

    Raises:
        DataError: no file, another format by its first bytes, or no encoding fits; names line and byte.
    """
    check_rows_file(path)
    with _opened(path) as file:
        first = file.read(_FIRST_BYTES)
        if kind := next((name for mark, name in _FORMATS if first.startswith(mark)), ""):
            raise DataError(f"{path} is {kind} by its first bytes; save its rows as CSV in UTF-8")
        if encoding != AUTO:
            return TextForm(encoding)
        if marked := next((name for mark, name in _MARKS if first.startswith(mark)), ""):
            return TextForm(marked, f"{path} is read as {marked.upper()}, by its first bytes")
        file.seek(0)
        return _by_lines(path, file)


@contextmanager
def opened_text(path: Path, form: TextForm) -> Iterator[TextIO]:
    """Open a file as text, with unchanged line ends; raises ``DataError`` if it is not in that encoding."""
    with _opened(path) as file:
        try:
            yield io.TextIOWrapper(cast("IO[bytes]", file), encoding=form.encoding, newline="")
        except UnicodeError as error:
            raise DataError(f"{path} is not {form.encoding} ({error}); set data.encoding, or convert it") from error


def read_text(path: Path, encoding: str = AUTO) -> tuple[str, str]:
    """Return the text of a file, with line feeds as line ends, and a note on its encoding."""
    form = text_form(path, encoding)
    with opened_text(path, form) as file:
        return file.read().replace("\r\n", "\n").replace("\r", "\n"), form.note


def is_encoding(name: str) -> bool:
    """Whether a name is ``auto`` or a text encoding that Python knows."""
    try:
        return name == AUTO or isinstance("".encode(name), bytes)
    except (LookupError, ValueError):
        return False


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a file's bytes, unpacked if it ends in ``.gz``."""
    is_packed = path.suffix.lower() == _GZIP
    try:
        with path.open("rb") as file:
            yield cast("io.BufferedIOBase", gzip.GzipFile(fileobj=file)) if is_packed else file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is no readable gzip archive ({error}); pack it again") from error
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}; set data.train, data.eval or --data") from error


def _by_lines(path: Path, file: io.BufferedIOBase) -> TextForm:
    """Choose UTF-8 or Windows-1252 by the lines that are not ASCII."""
    good = bad = 0
    place = ""
    for number, line in enumerate(file, start=1):
        if line.isascii():
            continue
        try:
            line.decode()
            good += 1
        except UnicodeDecodeError as error:
            place = place or f"line {number}, byte 0x{line[error.start]:02x}"
            bad += 1
            _check_windows(path, number, line)
    if not bad:
        return TextForm(_UTF_8)
    if good >= bad:
        raise DataError(
            f"{path} is not UTF-8 ({place}), though {good:,} other lines are; correct the {bad:,} that are not, or set "
            "data.encoding"
        )
    note = f"{path} is not UTF-8 ({place}) and is read as Windows-1252; if that is wrong, set data.encoding"
    return TextForm("cp1252", note)


def _check_windows(path: Path, number: int, line: bytes) -> None:
    try:
        line.decode("cp1252")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, line {number} is neither UTF-8 nor Windows-1252 (byte 0x{line[error.start]:02x}); set "
            "data.encoding, e.g. 'cp1251', or convert it to UTF-8"
        ) from error
