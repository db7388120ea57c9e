"""The events of a run in one file, each with its length and checksum, written as they come.

A crash leaves at most a torn last event, which readers pass over. Nothing is held in memory: whoever follows a run
reads the file while it grows.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from ringtune.errors import IntegrityError
from ringtune.files.durable import make_folder, storage_errors, sync_folder
from ringtune.v1 import control_pb2

_LOG = logging.getLogger(__name__)
_HEAD: Final = struct.Struct(">II")
_MOST_BYTES: Final = 1 << 30


class EventLog:
    """Appends events to a file.

    Args:
        path: of the file; made, with its folder.

    Attributes:
        size_bytes: of the events that are whole.

    Raises:
        StorageError: it can't be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size_bytes = 0
        with storage_errors(path):
            make_folder(path.parent)
            self._file = path.open("xb", buffering=0)
            sync_folder(path.parent)

    def append(self, event: control_pb2.RunEvent) -> None:
        """Write one event; if there is no room, the file is as before.

        Raises:
            StorageError: no room.
        """
        content = event.SerializeToString()
        whole = _HEAD.pack(len(content), zlib.crc32(content)) + content
        with storage_errors(self._path):
            try:
                self._write(whole)
            except OSError:
                os.ftruncate(self._file.fileno(), self.size_bytes)
                self._file.seek(self.size_bytes)
                raise
        self.size_bytes += len(whole)

    def _write(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            left = left[self._file.write(left) :]

    def force(self) -> None:
        """Force what was written to the disk.

        Raises:
            StorageError: the disk refuses.
        """
        with storage_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Entry(NamedTuple):
    """An event, and where the next one begins."""

    event: control_pb2.RunEvent
    end: int


def read_events(path: Path, *, start: int = 0, stop: int | None = None, to_damage: bool = False) -> Iterator[Entry]:
    """Yield the whole events of a file, from one position to another; a torn last one is left out.

    Args:
        path: of the file.
        start: position of the first event.
        stop: position behind the last event; None = the end of the file.
        to_damage: a damaged event ends the events as a torn one does, and is no error.

    Raises:
        IntegrityError: the file can't be read, or an event in it is damaged.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            while stop is None or file.tell() < stop:
                head = file.read(_HEAD.size)
                if len(head) < _HEAD.size:
                    return
                length, checksum = _HEAD.unpack(head)
                content = file.read(length) if length <= _MOST_BYTES else b""
                if len(content) < length:
                    return
                if zlib.crc32(content) != checksum:
                    damage = f"{path} is damaged at byte {file.tell() - length}; what is before can be read"
                    if not to_damage:
                        raise IntegrityError(damage)
                    _LOG.warning(damage)
                    return
                yield Entry(control_pb2.RunEvent.FromString(content), file.tell())
    except OSError as error:
        raise IntegrityError(f"can't read {path}: {error.strerror}") from error
