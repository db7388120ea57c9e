"""Rows of Parquet files, Arrow files and folders of them, read by pyarrow in a process with limits.

==============================  ====================================================================
``rows.parquet``                one file; ``rows.arrow`` is a stream or a file of record batches
folder                          all its shards, in the order of their names; of ``datasets.save_to_disk``
                                those that ``state.json`` lists
folder with several splits      refused; ``FOLDER/train`` names the files ``train-00000-of-00004.parquet`` ...
                                in FOLDER, or the folder ``train`` of a ``DatasetDict``
==============================  ====================================================================

A few bytes of a compressed or encoded column may stand for gigabytes, and a damaged file can end the process that reads
it. So ``python -m ringtune.storage.arrow_files`` reads one batch of rows after the other, with ``_MEMORY_BYTES`` of
address space and ``_BATCH_S`` seconds of processor time for a batch, and writes a JSON line for each row. All rows
together may have ``MAX_BYTES``, or ``MAX_FACTOR`` times the bytes of their files, whichever is more.

Values arrive as from JSON: lists and structs as lists and tables, without the null fields that Arrow gives to structs
with unlike keys; dictionaries as their values; dates, times and decimals as texts, in ISO form. A column of bytes is
read only as the column of pictures, the others are left out with a note. Integers with the names of a ``ClassLabel`` of
``datasets``, in the schema or in a list, become these names; -1 is a missing one.

Source: Parquet and Arrow IPC by pyarrow 26; datasets 4.4, ``save_to_disk`` and ``Features`` in the schema's metadata.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.util
import itertools
import json
import math
import os
import re
import resource
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ringtune.errors import DataError
from ringtune.machine.process import die_with_parent
from ringtune.storage.strict import is_lfs_pointer, pointer_advice, read_json, regular
from ringtune.storage.text_files import MAX_BYTES, MAX_FACTOR, MAX_ROW_BYTES, PYARROW_REMEDY, TOO_MUCH

ARROW_SUFFIXES: Final = (".parquet", ".arrow")
PICTURES: Final = (".npy", ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_SPLITS_FILE: Final = "dataset_dict.json"
_STATE_FILE: Final = "state.json"
_NUMBERING: Final = re.compile(r"[-_.]?\d{4,}(\b.*)?$")
_SHARD: Final = re.compile(r"(?P<name>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})")
_SHOWN: Final = 8

_MEMORY_BYTES: Final = 3 << 29
_BATCH_S: Final = 60
_WAIT_S: Final = 10 * _BATCH_S
_BATCH_BYTES: Final = 1 << 22
_BATCH_ROWS: Final = 256
_PIPE_BYTES: Final = 1 << 16
_BYTES: Final = "\0bytes"
_END: Final = b"\xff\xff\xff\xff\0\0\0\0"
"""Of a stream of record batches."""
_ENVIRONMENT: Final = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "ARROW_IO_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Each thread that a library starts takes address space: numpy's 40 MiB for each core."""


class ArrowHeader(NamedTuple):
    """Columns of Parquet or Arrow files.

    Attributes:
        columns: names of those that are read, in order.
        left_out: name -> type of columns of bytes.
        pictures: those of the columns in ``left_out`` that may have pictures.
        classes: name of a column -> its class names, from ``datasets``.
    """

    columns: tuple[str, ...]
    left_out: Mapping[str, str]
    pictures: tuple[str, ...]
    classes: Mapping[str, Sequence[str]]


def is_arrow(path: Path) -> bool:
    """Whether a path names Parquet or Arrow files: one, a folder of them, or a split of a folder.

    A folder of pictures, one folder a class, stays one where such a file lies beside them.
    """
    if path.suffix.lower() in ARROW_SUFFIXES:
        return True
    if path.is_dir():
        return any((path / name).is_file() for name in (_SPLITS_FILE, _STATE_FILE)) or (
            bool(_entries(path)) and not any(file.suffix.lower() in PICTURES for file in path.glob("*/*"))
        )
    return not path.exists() and bool(_splits(path.parent).get(path.name))


def arrow_files(path: Path) -> tuple[Path, ...]:
    """Return the files that a path names, as ``is_arrow`` knows them; raises ``DataError``."""
    if path.is_dir():
        files = _of_folder(path)
    elif path.exists() or path.suffix.lower() in ARROW_SUFFIXES:
        files = (path,)
    else:
        files = _splits(path.parent).get(path.name, ())
    for file in files or (path,):
        if not file.is_file():
            raise DataError(f"{file} is not there; set data.train, data.eval or --data")
        if is_lfs_pointer(file):
            raise DataError(pointer_advice(file))
    if files != (path,):
        _check_shards(files)
    return files


def split_paths(folder: Path) -> list[Path]:
    """Return the paths that name the splits of a folder of Parquet or Arrow files: files, or names without numbers."""
    paths = _saved(folder)
    if paths is None:
        named = _splits(folder).items()
        paths = [files[0] if [file.stem for file in files] == [name] else folder / name for name, files in named]
    return paths or [folder]


def _saved(folder: Path) -> list[Path] | None:
    """Read a folder of ``datasets.save_to_disk``: folders of splits, none where it is one itself; None of another."""
    if (folder / _SPLITS_FILE).is_file():
        return _named_in(folder, _SPLITS_FILE, lambda content: content["splits"])
    return [] if (folder / _STATE_FILE).is_file() else None


def _named_in(folder: Path, file: str, names_of: Callable[[Any], Any]) -> list[Path]:
    """Return what a file of ``datasets.save_to_disk`` names, at least one entry of its folder; raises ``DataError``."""
    try:
        names = list(names_of(read_json(folder / file)))
        if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
            raise ValueError("it names nothing in this folder")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} is no folder of datasets.save_to_disk ({error}); save it again") from error
    return [folder / name for name in names]


def _of_folder(folder: Path) -> tuple[Path, ...]:
    saved = _saved(folder)
    if saved == []:
        files = _named_in(folder, _STATE_FILE, lambda content: [entry["filename"] for entry in content["_data_files"]])
        return tuple(files)
    splits = split_paths(folder)
    if len(splits) > 1:
        shown = ", ".join(path.name for path in splits[:_SHOWN]) + (", ..." if len(splits) > _SHOWN else "")
        raise DataError(f"{folder} has the splits {shown}; name one, such as {splits[0]}")
    if saved:
        return arrow_files(saved[0])
    if not (shards := _splits(folder)):
        raise DataError(f"{folder} has no Parquet or Arrow files; set data.train, data.eval or --data")
    return next(iter(shards.values()))


def _entries(folder: Path) -> list[Path]:
    try:
        named = [path for path in folder.iterdir() if path.suffix.lower() in ARROW_SUFFIXES]
        return sorted(path for path in named if not path.name.startswith(".") and not path.is_dir())
    except OSError:  # no folder, or one of another user
        return []


def _splits(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Return name of a split -> its shards: names are equal but for a number of four digits or more, and the rest."""
    splits: dict[str, list[Path]] = {}
    for path in _entries(folder):
        splits.setdefault(_NUMBERING.sub("", path.stem), []).append(path)
    return {name: tuple(files) for name, files in splits.items()}


def _check_shards(files: Sequence[Path]) -> None:
    """Refuse shards ``NAME-00000-of-00004`` of which one is missing, and other files of their name or of its like."""
    shards = [_SHARD.match(file.stem) for file in files]
    kinds = [(file.suffix.lower(), shard and shard["count"]) for file, shard in zip(files, shards, strict=True)]
    if other := next((file for file, kind in zip(files, kinds, strict=True) if kind != kinds[0]), None):
        raise DataError(
            f"{files[0]} and {other.name} are no shards of one set, and may have the same rows; name one file, or move "
            "one away"
        )
    if not all(shards):
        return
    there, count = {int(shard["index"]) for shard in shards if shard}, int(shards[0]["count"] if shards[0] else 0)
    missing = [index for index in range(min(count, len(files) + 1)) if index not in there]
    if missing or len(there) != len(files):
        which = f"shard {missing[0]:05}-of-{count:05} is missing" if missing else "a shard is there twice"
        raise DataError(f"{files[0].parent} is not complete: {which}; fetch it again, or name one file")


# ---- the reading process, seen from outside -----------------------------------------------------------


def arrow_header(path: Path) -> ArrowHeader:
    """Read the names of the columns; raises ``DataError`` as ``arrow_rows``."""
    with contextlib.closing(arrow_rows(path)) as rows:
        header: Any = next(rows)
    return header  # type: ignore[no-any-return]


def arrow_rows(
    path: Path, picture: str = "", only: Collection[str] | None = None
) -> Generator[ArrowHeader | Mapping[str, Any] | str, None, None]:
    """Yield the header, then for each row its columns, or what is wrong with it; raises ``DataError``.

    Args:
        path: as ``is_arrow`` knows it.
        picture: column of pictures, whose values are bytes; a struct with ``bytes`` counts as them.
        only: columns that rows have, as far as they are in the header; None = all. Others are not decoded.
    """
    with contextlib.closing(_lines(path, picture, only)) as lines:
        columns, left_out, pictures, classes = next(lines)
        header = ArrowHeader(tuple(columns), left_out, tuple(pictures), classes)
        yield header
        names = _chosen(header.columns, only)
        for row in lines:
            yield row if isinstance(row, str) else dict(zip(names, row, strict=True))


def _chosen(columns: Sequence[str], only: Collection[str] | None) -> list[str]:
    return [name for name in columns if only is None or name in only]


def _lines(path: Path, picture: str, only: Collection[str] | None) -> Generator[Any, None, None]:
    """Yield what the process writes, decoded; it is ended with the iterator."""
    files = arrow_files(path)
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError(f"{path} {PYARROW_REMEDY}; or save its rows as .jsonl")
    columns = {"picture": picture, "only": None if only is None else sorted(only)}
    head = {"files": list(map(str, files)), **columns, "memory": _MEMORY_BYTES, "parent": os.getpid()}
    command = [sys.executable, "-P", "-m", "ringtune.storage.arrow_files"]
    try:
        process = subprocess.Popen(  # noqa: S603 - our own module
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | _ENVIRONMENT,
        )
    except OSError as error:
        raise DataError(f"the process that reads {path} can't be started ({error.strerror}); free memory") from error
    sink: Any = process.stdin
    source: Any = process.stdout
    try:
        with contextlib.suppress(BrokenPipeError), sink:
            sink.write(json.dumps(head).encode())
        for line in _split(source.fileno(), path):
            row = json.loads(line, object_hook=_unpacked)
            if not isinstance(row, dict):
                yield row
            elif row:
                raise DataError(f"{row['error']}")
            else:
                return
        code = process.wait(_WAIT_S)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise DataError(
            f"{path} can't be read: the process that did so ended {how}; the file is damaged, or a batch of its rows "
            f"needs more than {_MEMORY_BYTES >> 20} MiB or {_BATCH_S} s; write it again, in smaller batches"
        )
    finally:
        process.kill()
        process.wait()
        source.close()


def _unpacked(table: dict[str, Any]) -> Any:
    return base64.b64decode(table[_BYTES]) if _BYTES in table else table


def _split(source: int, path: Path) -> Iterator[bytes]:
    ready, rest = select.poll(), list[bytes]()
    ready.register(source, select.POLLIN)
    while True:
        if not ready.poll(_WAIT_S * 1000):
            raise DataError(f"nothing of {path} was read for {_WAIT_S} s; look after its disk, or copy it")
        if not (piece := os.read(source, _PIPE_BYTES)):
            return
        first, *more = piece.split(b"\n")
        rest.append(first)
        for following in more:
            yield b"".join(rest)
            rest = [following]


# ---- inside the process -------------------------------------------------------------------------------


def main() -> int:
    """Write header and rows of the files named on standard input, a JSON line each, then an empty table or an error."""
    head = json.load(sys.stdin)
    if not die_with_parent(head["parent"]):
        return 1
    _limit(resource.RLIMIT_AS, head["memory"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    files, end = [Path(file) for file in head["files"]], {}
    try:
        for line in encoded_rows(files, head["picture"], head["only"], begin_batch=_limit_time):
            sys.stdout.buffer.write(line + b"\n")
    except BrokenPipeError:
        return 0
    except DataError as error:
        end = {"error": str(error)}
    sys.stdout.buffer.write(json.dumps(end).encode() + b"\n")
    sys.stdout.buffer.flush()
    return 0


def encoded_rows(
    files: Sequence[Path],
    picture: str = "",
    only: Collection[str] | None = None,
    *,
    most_bytes: int = MAX_BYTES,
    begin_batch: Callable[[], object] = int,
) -> Iterator[bytes]:
    """Yield the header and rows of files as JSON; see the docstring of the module, and ``arrow_rows``.

    ``begin_batch`` is called before each batch of rows.
    """
    first: _Columns | None = None
    left = max(most_bytes, MAX_FACTOR * sum(file.stat().st_size for file in files))
    for file in files:
        try:
            for columns, batch in _batches(file, picture, only):
                begin_batch()
                if first is None:
                    first = columns
                    yield json.dumps(columns.header).encode()
                if columns.header != first.header or columns.types != first.types:
                    raise DataError(f"{file} has other columns or types than {files[0]}; write them alike")
                for row in columns.rows(batch) if batch is not None else ():
                    line = json.dumps(row, ensure_ascii=False).encode(errors="surrogatepass")
                    left -= len(line)
                    if left < 0:
                        raise DataError(f"{file} {TOO_MUCH}")
                    yield line if len(line) <= MAX_ROW_BYTES else _TOO_LONG
        except DataError:
            raise
        except _UnusableError as error:
            raise DataError(f"{file}: {error}; write it as texts in UTF-8, or leave the column out") from error
        except MemoryError as error:
            raise DataError(
                f"{file}: a batch of its rows needs more memory than it may take; write it in smaller batches"
            ) from error
        except Exception as error:  # pyarrow has errors of many kinds for a damaged file
            said = " ".join(str(error).split())[:300]
            raise DataError(f"{file} can't be read ({type(error).__name__}: {said}); write or copy it again") from error


_TOO_LONG: Final = json.dumps(f"it has more than {MAX_ROW_BYTES >> 20} MiB").encode()


def _batches(file: Path, picture: str, only: Collection[str] | None) -> Iterator[tuple[_Columns, Any]]:
    """Yield the columns of a file without a batch, then with each batch of its rows."""
    arrow: Any = importlib.import_module("pyarrow")
    with open(file, "rb", opener=regular) as opened:
        mark = opened.read(6)
    if mark[:4] in (b"PAR1", b"PARE"):
        parquet: Any = importlib.import_module("pyarrow.parquet")
        with parquet.ParquetFile(
            file, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
        ) as source:
            columns = _Columns.of(source.schema_arrow, file, picture, only)
            yield columns, None
            for group in range(source.num_row_groups):
                facts = source.metadata.row_group(group)
                rows = _BATCH_BYTES * facts.num_rows // max(1, facts.total_byte_size)
                batches = source.iter_batches(
                    min(max(1, rows), _BATCH_ROWS), row_groups=[group], columns=columns.names, use_threads=False
                )
                yield from ((columns, batch) for batch in batches)
        return
    with arrow.OSFile(str(file)) as opened:
        if mark == b"ARROW1":
            source = arrow.ipc.open_file(opened)
            batches = map(source.get_batch, range(source.num_record_batches))
        else:
            opened.seek(max(0, opened.size() - len(_END)))
            if opened.read() != _END:
                raise DataError(f"{file} is no Arrow file, or cut off; write or copy it again")
            opened.seek(0)
            source = batches = arrow.ipc.open_stream(opened)
        columns = _Columns.of(source.schema, file, picture, only)
        yield columns, None
        for batch in batches:
            batch.validate(full=True)
            for at in range(0, batch.num_rows, _BATCH_ROWS):
                yield columns, batch.slice(at, _BATCH_ROWS).select(columns.names)


def _limit_time() -> None:
    """Give this process ``_BATCH_S`` more seconds of processor time; the kernel ends it after that."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(usage.ru_utime + usage.ru_stime) + _BATCH_S)


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


class _Columns(NamedTuple):
    """Columns of one file: ``header`` is for ``ArrowHeader``, ``types`` of all its columns, ``names`` those read."""

    header: tuple[list[str], dict[str, str], list[str], dict[str, list[str]]]
    names: list[str]
    types: list[str]
    picture: str

    @staticmethod
    def of(schema: Any, file: Path, picture: str, only: Collection[str] | None) -> _Columns:
        kinds: Any = importlib.import_module("pyarrow.types")
        names = list(map(str, schema.names))
        if twice := next((name for name, count in Counter(names).items() if count > 1), None):
            raise DataError(f"{file} has the column {twice!r} twice; rename one of them")
        left_out = {name: str(schema.field(name).type)[:300] for name in names if _has_bytes(schema.field(name).type)}
        pictures = [
            name
            for name in left_out
            for kind in (schema.field(name).type,)
            if _is_bytes(kind) or (kinds.is_struct(kind) and any(_is_bytes(part.type) for part in kind))
        ]
        if picture in pictures:
            del left_out[picture]
        read = [name for name in names if name not in left_out]
        classes = {name: labels for name, labels in _class_names(schema.metadata).items() if name in read}
        types = [str(schema.field(name).type) for name in read]
        return _Columns((read, left_out, pictures, classes), _chosen(read, only), types, picture)

    def rows(self, batch: Any) -> Iterator[Any]:
        """Yield the values of each row, or a sentence on what is wrong with it; raises ``_UnusableError``."""
        classes = self.header[3]
        columns = [_values(batch.column(name), name) for name in self.names]
        for values in zip(*columns, strict=True) if columns else itertools.repeat((), batch.num_rows):
            try:
                yield [
                    _named(value, classes[name], name)
                    if name in classes
                    else _picture(value)
                    if name == self.picture
                    else _plain(value)
                    for name, value in zip(self.names, values, strict=True)
                ]
            except _UnusableError as error:
                yield str(error)


class _UnusableError(Exception):
    """A value, or a column, that can't be used."""


def _is_bytes(kind: Any) -> bool:
    kinds: Any = importlib.import_module("pyarrow.types")
    return any(is_of(kind) for is_of in (kinds.is_binary, kinds.is_large_binary, kinds.is_fixed_size_binary)) or (
        str(kind) == "binary_view"
    )


def _has_bytes(kind: Any) -> bool:
    """Whether a type has bytes, at any depth."""
    inner = getattr(kind, "storage_type", None) or getattr(kind, "value_type", None)
    if inner is not None:
        return _has_bytes(inner)
    return _is_bytes(kind) or any(_has_bytes(kind.field(at).type) for at in range(kind.num_fields))


def _values(column: Any, name: str) -> Any:
    """Return the values of a column as Python's; times without their nanoseconds, which Python has no type for.

    Raises:
        _UnusableError: not all of them can be: a text is no UTF-8, or a map has times with nanoseconds.
    """
    kind = column.type
    try:
        coarse = _without_nanoseconds(kind)
        return (column if coarse == kind else column.cast(coarse, safe=False)).to_pylist()
    except ValueError as error:  # says the value, which stays here
        what = f"column {name!r} of type {str(kind)[:300]} has a value that can't be read"
        raise _UnusableError(f"{what} ({type(error).__name__})") from error


def _without_nanoseconds(kind: Any) -> Any:
    """Return a type with microseconds in place of nanoseconds, in lists and structs too."""
    arrow: Any = importlib.import_module("pyarrow")
    if str(kind).startswith("timestamp[ns"):
        return arrow.timestamp("us", kind.tz)
    if str(kind) in ("time64[ns]", "duration[ns]"):
        return arrow.time64("us") if str(kind) == "time64[ns]" else arrow.duration("us")
    if arrow.types.is_struct(kind):
        return arrow.struct([field.with_type(_without_nanoseconds(field.type)) for field in kind])
    for is_of, of in ((arrow.types.is_list, arrow.list_), (arrow.types.is_large_list, arrow.large_list)):
        if is_of(kind):
            return of(kind.value_field.with_type(_without_nanoseconds(kind.value_type)))
    return kind


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items() if part is not None and "\0" not in name}
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


def _picture(value: Any) -> Any:
    """Return the bytes of a picture, which may stand beside its path; null without."""
    content = (
        next((part for part in value.values() if isinstance(part, bytes)), None) if isinstance(value, dict) else value
    )
    return {_BYTES: base64.b64encode(content).decode()} if content else None


def _named(value: Any, names: Sequence[str], column: str) -> Any:
    """Return the name of a class, or the names in a list."""
    if isinstance(value, list):
        return [_named(part, names, column) for part in value]
    if value is None or value == -1:
        return None
    if not isinstance(value, int) or not 0 <= value < len(names):
        raise _UnusableError(f"column {column!r} has a class without a name in the file's schema")
    return names[value]


def _class_names(metadata: Mapping[bytes, bytes] | None) -> dict[str, list[str]]:
    """Return column -> class names from the features of ``datasets``; empty where there are none that can be read."""
    try:
        features = json.loads((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        classes = {name: _names_of(feature) for name, feature in features.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return {name: names for name, names in classes.items() if names}


def _names_of(feature: Any) -> list[str]:
    inner = feature[0] if isinstance(feature, list) and feature else feature
    inner = inner.get("feature", inner) if isinstance(inner, dict) else {}
    names = inner.get("names") if isinstance(inner, dict) and inner.get("_type") == "ClassLabel" else None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


if __name__ == "__main__":
    sys.exit(main())
