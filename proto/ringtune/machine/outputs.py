"""Standard output and error that never end a command: what can't be shown is escaped, what can't be written is let go.

A disk that is full, a pipe that nobody reads and a terminal that was closed refuse what is written to them; an output
that is no UTF-8 has no bytes for most signs. Neither is the fault of a run, which has its files and its exit code.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import sys
import threading
from typing import Any, Final, TextIO, cast

ESCAPED: Final = "ringtune-escaped"
"""Name of the error handler by which a sign that an output lacks is replaced, or escaped as in a Python text."""

_INSTEAD: Final = str.maketrans({"…": "..."})
_NAMES: Final = {1: "standard output", 2: "standard error"}
_REFUSED: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO})


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start : error.end].translate(_INSTEAD)
    return found.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error(ESCAPED, _escape)


class _LastingFile(io.FileIO):
    """A descriptor to which every write succeeds; the first one that doesn't is told on the standard error.

    Of a pipe whose reader has read enough, as ``head``, nothing is told.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.lost: OSError | None = None
        self._lock = threading.Lock()

    def write(self, data: Any) -> int:
        """Write, or let go of what can't be written."""
        try:
            return super().write(data) or 0
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._tell(error)
        with memoryview(data) as view:
            return view.nbytes

    def _tell(self, error: OSError) -> None:
        with self._lock:
            is_first, self.lost = self.lost is None, self.lost or error
        if is_first and self.fileno() != 2 and error.errno != errno.EPIPE:
            name = _NAMES.get(self.fileno(), "an output")
            what = f"{name} can't be written ({error.strerror}); the command goes on, and what it prints is lost"
            with contextlib.suppress(OSError):
                os.write(2, f"ringtune: {what}\n".encode())


def lasting(stream: TextIO) -> TextIO:
    """Return a stream to the same descriptor to which every text can be written.

    One that is such a stream already, or has no descriptor, as in a notebook, is returned as it is.

    Args:
        stream: a standard output; what waits in it is written first, if that can be done.
    """
    if isinstance(_raw(stream), _LastingFile):
        return stream
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    file = _LastingFile(descriptor)
    return io.TextIOWrapper(
        cast(Any, io.BufferedWriter(file)),
        encoding=stream.encoding,
        errors=ESCAPED,
        line_buffering=getattr(stream, "line_buffering", False) or stream.isatty(),
        write_through=getattr(stream, "write_through", False),
    )


def guard_outputs() -> None:
    """Let nothing that this process prints end it; to be called before anything keeps one of the two streams.

    A standard descriptor that was closed leads nowhere from here on: else the next file that is opened would get what
    is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free, so this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - for the life of the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)


def lost_output() -> OSError | None:
    """Why some of what this process printed is lost; None if all was written, or nothing is known."""
    file = _raw(sys.stdout)
    if not isinstance(file, _LastingFile):
        return None
    sys.stdout.flush()
    return file.lost


def _raw(stream: object) -> object:
    return getattr(getattr(stream, "buffer", None), "raw", None)
