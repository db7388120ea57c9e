"""Files that a run sends to its submitter while it goes on: cut into chunks, each with a digest at its end."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from ringtune.v1 import control_pb2

_CHUNK_BYTES = 1 << 20

Emit = Callable[[control_pb2.RunEvent], None]


class GrowingFile:
    """A file that is sent piece by piece.

    Args:
        path: relative to the run's folder.
        emit: sends an event to the submitter.
    """

    def __init__(self, path: str, emit: Emit) -> None:
        self._path = path
        self._emit = emit
        self._digest: Any = hashlib.sha256()
        self._pending = bytearray()
        self._is_closed = False

    def write(self, content: bytes) -> None:
        """Add to the file; small pieces are sent together."""
        self._pending += content
        while len(self._pending) >= _CHUNK_BYTES:
            self._send(bytes(self._pending[:_CHUNK_BYTES]), last=False)
            del self._pending[:_CHUNK_BYTES]

    def close(self) -> None:
        """Complete the file; again has no effect."""
        if not self._is_closed:
            self._is_closed = True
            self._send(bytes(self._pending), last=True)
            self._pending.clear()

    def _send(self, chunk: bytes, *, last: bool) -> None:
        self._digest.update(chunk)
        digest = self._digest.hexdigest() if last else ""
        file = control_pb2.FileChunk(path=self._path, chunk=chunk, last=last, sha256=digest)
        self._emit(control_pb2.RunEvent(file=file))


def send_file(path: str, content: bytes, emit: Emit) -> None:
    """Send a whole file."""
    file = GrowingFile(path, emit)
    file.write(content)
    file.close()
