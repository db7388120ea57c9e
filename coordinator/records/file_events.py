"""Send files to a run's submitter in pieces while the run goes on, each with its digest last."""

from __future__ import annotations

from coordinator.records.events import EventSink
from ringtune.files.chunks import FileCutter, cut_pieces
from ringtune.files.pieces import Pieces
from ringtune.v1 import control_pb2


class GrowingFile:
    """A file that is sent piece by piece.

    Args:
        path: relative to the run's folder.
        emit: sends an event to the submitter.
    """

    def __init__(self, path: str, emit: EventSink) -> None:
        self._cutter = FileCutter(path)
        self._emit = emit
        self._is_closed = False

    def write(self, content: bytes) -> None:
        """Add content to the file; small pieces are sent together."""
        for chunk in self._cutter.add(content):
            self._emit(control_pb2.RunEvent(file=chunk))

    def close(self) -> None:
        """Send the rest of the file and its digest; a second call has no effect."""
        if not self._is_closed:
            self._is_closed = True
            self._emit(control_pb2.RunEvent(file=self._cutter.end()))


def send_file(path: str, content: Pieces, emit: EventSink) -> None:
    """Send a whole file to the submitter."""
    for chunk in cut_pieces(path, content):
        emit(control_pb2.RunEvent(file=chunk))
