"""Files in pieces on the wire: cut into messages with a digest at the end, and put together again on disk.

Who receives names the files that may come and how large they may be together; nothing that a sender says
becomes a path or an allocation before it was checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from ringtune.errors import IntegrityError, RingTuneError
from ringtune.v1 import control_pb2

CHUNK_BYTES: Final = 1 << 20

ADAPTER_FILES: Final = ("adapter_config.json", "adapter.safetensors", "head_config.json", "model_head.safetensors")
"""The AdapterHub folder of a run."""

MAX_ADAPTER_BYTES: Final = 1 << 32
"""What such a folder may have at most when it is sent to be evaluated."""


def cut_file(path: str, file: BinaryIO) -> Iterator[control_pb2.FileChunk]:
    """One file as messages; the last one has the digest."""
    digest = hashlib.sha256()
    chunk = file.read(CHUNK_BYTES)
    while True:
        following = file.read(CHUNK_BYTES)
        digest.update(chunk)
        last = not following
        yield control_pb2.FileChunk(path=path, chunk=chunk, last=last, sha256=digest.hexdigest() if last else "")
        if last:
            return
        chunk = following


def cut_folder(folder: Path, names: Iterable[str]) -> Iterator[control_pb2.FileChunk]:
    """These files of a folder, one after the other."""
    for name in names:
        with (folder / name).open("rb") as file:
            yield from cut_file(name, file)


def write_files(
    chunks: Iterable[control_pb2.FileChunk], folder: Path, *, names: Collection[str], max_bytes: int, source: str
) -> None:
    """Put files together in an empty folder.

    Args:
        chunks: of the files, each file's one after the other.
        folder: where they go.
        names: exactly these have to come.
        max_bytes: of all together.
        source: who sends, for errors.

    Raises:
        IntegrityError: another name, a name twice, too much, a digest that differs, or one that never came.
        RingTuneError: they can't be written here.
    """
    try:
        came = _write(chunks, folder, names, max_bytes, source)
    except OSError as error:
        raise RingTuneError(f"can't write the files that {source} sent: {error.strerror}; make room") from error
    missing = sorted(set(names) - came)
    if missing:
        raise IntegrityError(f"{source} did not send {', '.join(missing)}; use one version on all machines")


def _write(
    chunks: Iterable[control_pb2.FileChunk], folder: Path, names: Collection[str], max_bytes: int, source: str
) -> set[str]:
    left_bytes = max_bytes
    came: set[str] = set()
    pending = iter(chunks)
    for first in pending:
        if first.path not in names or first.path in came:
            raise IntegrityError(f"{source} sent a file {first.path!r} that was not expected")
        digest = hashlib.sha256()
        with (folder / first.path).open("xb") as file:
            for chunk in _of_one_file(first, pending, source):
                left_bytes -= len(chunk.chunk)
                if left_bytes < 0:
                    raise IntegrityError(f"{source} sent more than {max_bytes:,} bytes of files")
                digest.update(chunk.chunk)
                file.write(chunk.chunk)
                last = chunk
        if last.sha256 != digest.hexdigest():
            raise IntegrityError(f"{first.path} from {source} arrived damaged; try again")
        came.add(first.path)
    return came


def _of_one_file(
    first: control_pb2.FileChunk, pending: Iterator[control_pb2.FileChunk], source: str
) -> Iterator[control_pb2.FileChunk]:
    chunk: control_pb2.FileChunk | None = first
    while chunk is not None:
        if chunk.path != first.path:
            raise IntegrityError(f"{source} began {chunk.path!r} before {first.path!r} was complete")
        yield chunk
        if chunk.last:
            return
        chunk = next(pending, None)
    raise IntegrityError(f"{first.path} from {source} is not complete; try again")
