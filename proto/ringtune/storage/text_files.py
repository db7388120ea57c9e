"""Text files in UTF-8, UTF-16, UTF-32 or Windows-1252, plain, gzip or zstd; the detected encoding is reported.

A packed file is refused when it unpacks to more than ``MAX_BYTES``, or ``MAX_FACTOR`` times its bytes if that is more.
Zstandard (``.zst``) is unpacked by pyarrow, of the extra ``rows``.

``auto`` detects UTF-16 and UTF-32 by their byte order mark, and UTF-8 if every line is valid. Another file is read as
Windows-1252, which spreadsheets write, unless at least half of its lines with other characters than ASCII are UTF-8:
then the others are damaged, and the file is refused.
"""

from __future__ import annotations

import codecs
import gzip
import importlib
import io
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TextIO, cast

from ringtune.errors import DataError
from ringtune.storage.strict import is_lfs_pointer, pointer_advice, regular

AUTO: Final = "auto"
MAX_ROW_BYTES: Final = 1 << 26
"""Most bytes of a row of JSON; a longer one comes from a missing line end, or does not fit into memory."""
MAX_BYTES: Final = 1 << 30
_MAX_LINE: Final = 1 << 30
"""Most bytes of a line that is looked at for its encoding; a JSON list may stand in one."""
MAX_FACTOR: Final = 200
NPZ_REMEDY: Final = "write it with numpy.savez, not savez_compressed"
TOO_MUCH: Final = f"unpacks to more than {MAX_FACTOR} times its bytes; pack it anew if it is yours, with unlike rows"
PYARROW_REMEDY: Final = "needs the package 'pyarrow' (extra 'rows'): pip install 'pyarrow>=26,<27'"
PACKED: Final = (".gz", ".zst")
_ZSTD: Final = ".zst"
_UTF_8: Final = "utf-8-sig"
_MARKS: Final = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_ZIP: Final = b"PK\x03\x04"
_FORMATS: Final = (
    (_ZIP, "a zip archive or a spreadsheet (.xlsx)"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"%PDF", "a PDF document"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\xd0\xcf\x11\xe0", "an old spreadsheet"),
    (b"SQLite format 3", "a SQLite database"),
)
_RENAMED: Final = {
    "a Parquet file": "give it the suffix .parquet",
    "an Arrow file": "give it the suffix .arrow",
    "a gzip archive": "give it a further suffix .gz",
    "a zstd archive": "give it a further suffix .zst",
}
_FIRST_BYTES: Final = 16
_BUFFER_BYTES: Final = 1 << 16


class TextForm(NamedTuple):
    """Encoding of a text file by Python's name, and a note on how it was chosen, empty where it is the expected one."""

    encoding: str
    note: str = ""


def form_suffix(path: Path) -> str:
    """Return the suffix without ``.gz`` or ``.zst``: ``.csv`` for ``Rows.CSV`` and ``rows.csv.gz``."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in PACKED else suffix


def resolved(path: Path) -> Path:
    """Return an absolute path without links, but with the name of a link to a file of another suffix.

    The suffix names the format, and files in a hub's cache have none: ``train.parquet`` is a link to ``blobs/1f0e``.
    """
    target = path.resolve()
    return path.parent.resolve() / path.name if target.suffix != path.suffix and target.is_file() else target


def check_rows_file(path: Path) -> None:
    """Refuse a missing file, a folder, and a pointer of Git LFS; raises ``DataError``."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; set data.train, data.eval or --data to a .csv or .jsonl file in it")
    if not path.is_file():
        raise DataError(f"{path} is not there; set data.train, data.eval or --data")
    if is_lfs_pointer(path):
        raise DataError(pointer_advice(path))


def text_form(path: Path, encoding: str = AUTO) -> TextForm:
    """Detect the encoding of a file, unpacked if it is packed, unless ``encoding`` names one; raises ``DataError``."""
    check_rows_file(path)
    with _opened(path) as file:
        first = file.read(_FIRST_BYTES)
        if kind := next((name for mark, name in _FORMATS if first.startswith(mark)), ""):
            remedy = _RENAMED.get(kind, "save its rows as CSV in UTF-8")
            raise DataError(f"{path} is {kind} by its first bytes; {remedy}")
        if encoding != AUTO:
            return TextForm(encoding)
        if marked := next((name for mark, name in _MARKS if first.startswith(mark)), ""):
            return TextForm(marked, f"{path} is read as {marked.upper()}, by its first bytes")
    with _opened(path) as file:
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


def is_archive(path: Path) -> bool:
    """Whether a file begins as a zip archive."""
    with open(path, "rb", opener=regular) as file:
        return file.read(len(_ZIP)) == _ZIP


def check_archive(path: Path, remedy: str, *, most_bytes: int = MAX_BYTES, factor: int = MAX_FACTOR) -> None:
    """Refuse a zip archive that unpacks to more than both limits: bytes, and times the bytes of the file.

    Raises:
        DataError: it does.
        OSError, zipfile.BadZipFile: it is not readable.
    """
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > max(most_bytes, factor * path.stat().st_size):
        raise DataError(f"{path} unpacks to {unpacked:,} bytes, more than {factor} times its own; {remedy}")


def is_encoding(name: str) -> bool:
    """Whether a name is ``auto`` or a text encoding that Python knows."""
    try:
        return name == AUTO or isinstance("".encode(name), bytes)
    except (LookupError, ValueError):
        return False


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedIOBase]:
    suffix = path.suffix.lower()
    try:
        with open(path, "rb", opener=regular) as file:
            if suffix in PACKED:
                is_zstd = suffix == _ZSTD
                unpacked = _unpacked_zstd(path, file) if is_zstd else gzip.GzipFile(fileobj=_Gzipped(file.raw))
                yield io.BufferedReader(_Bounded(unpacked, path), _BUFFER_BYTES)
            else:
                yield cast("io.BufferedIOBase", file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is no readable gzip archive ({error}); pack it again") from error
    except OSError as error:
        if suffix == _ZSTD and error.errno is None:  # of pyarrow
            raise DataError(f"{path} is no readable zstd archive ({error}); pack it again") from error
        raise DataError(f"can't read {path}: {error.strerror}; set data.train, data.eval or --data") from error


_MAX_PADDING: Final = 1 << 16
"""Zeros behind a gzip archive, which some tapes need, or bytes of the name in its header."""


class _Gzipped(io.BufferedReader):
    """A gzip file, of which Python's reader skips names, and the zeros behind the archive, in single bytes."""

    _num_single = 0

    def read(self, size: int | None = -1) -> bytes:
        """Read; raises ``BadGzipFile`` behind too many bytes that were read one by one."""
        self._num_single = self._num_single + 1 if size == 1 else 0
        if self._num_single > _MAX_PADDING:
            raise gzip.BadGzipFile(f"more than {_MAX_PADDING:,} zeros follow it, or its name is longer")
        return super().read(size)


def _unpacked_zstd(path: Path, file: IO[bytes]) -> Any:
    try:
        return importlib.import_module("pyarrow").CompressedInputStream(file, "zstd")
    except ImportError as error:
        raise DataError(f"{path} {PYARROW_REMEDY}; or pack it with gzip") from error


class _Bounded(io.RawIOBase):
    """Unpacked bytes, up to a limit."""

    def __init__(self, source: Any, path: Path) -> None:
        self._source, self._path = source, path
        self._left = max(MAX_BYTES, MAX_FACTOR * path.stat().st_size)

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; raises ``DataError`` beyond the limit."""
        data = self._source.read(len(buffer))
        buffer[: len(data)] = data
        self._left -= len(data)
        if self._left < 0:
            raise DataError(f"{self._path} {TOO_MUCH}")
        return len(data)


def _by_lines(path: Path, file: io.BufferedIOBase) -> TextForm:
    """Choose UTF-8 or Windows-1252 by the lines that are not ASCII."""
    good = bad = 0
    place = ""
    for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), b""), start=1):
        if len(line) == _MAX_LINE:
            raise DataError(f"{path}, line {number} has {_MAX_LINE:,} bytes or more; divide it into lines")
        if line.isascii():
            continue
        try:
            line.decode()
            good += 1
        except UnicodeDecodeError as error:
            place = place or f"line {number}, byte 0x{line[error.start]:02x}"
            bad += 1
            try:
                line.decode("cp1252")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number} is neither UTF-8 nor Windows-1252 (byte 0x{line[error.start]:02x}); set "
                    "data.encoding, e.g. 'cp1251', or convert it to UTF-8"
                ) from error
    if not bad:
        return TextForm(_UTF_8)
    if good >= bad:
        raise DataError(
            f"{path} is not UTF-8 ({place}), though {good:,} other lines are; correct the {bad:,} that are not, or set "
            "data.encoding"
        )
    note = f"{path} is not UTF-8 ({place}) and is read as Windows-1252; if that is wrong, set data.encoding"
    return TextForm("cp1252", note)
