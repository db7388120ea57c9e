"""The start and end of a process: signals, grace time, standard outputs, and the error of one that ended.

Grace time: a thread that waits for a call has a deadline; one that waits for a disk that hangs, a pipe that nobody
reads, or a lock of such a thread has none. ``end_within`` ends a process that does not end in its own order.

Outputs: a full disk, a pipe that nobody reads and a closed terminal refuse output, and an output other than UTF-8 can't
encode most characters. Neither ends a command, which has its files and its exit code: such characters are escaped, and
output that can't be written is dropped.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, TextIO, cast

from ringtune.errors import PeerLostError, RingTuneError, all_errors

ENDS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let ``handler`` handle SIGINT, SIGTERM and SIGHUP in this context; to be entered in the main thread.

    SIGHUP stays ignored where it was, so that ``nohup`` does what it is for. The handlers that were there before are
    given back. A handler runs between any two instructions of the main thread, so it should only note the signal,
    start a thread, or raise.

    Args:
        handler: called with the number of the signal, and the frame that it interrupts.
    """
    hears = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    wanted = [number for number in ENDS if hears or number != signal.SIGHUP]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


_SAY_S: Final = 0.5
"""So long may it take to say why; standard error may be what hangs."""
_lock = threading.Lock()
_ends_s = float("inf")
_is_own = False


def mark_command_process() -> None:
    """Say that this process is that of a command, and may be ended; nothing ends one into which it was only loaded."""
    global _is_own
    _is_own = True


def end_within(grace_s: float, code: int) -> None:
    """Let the process of a command end with an exit code after so many seconds, unless it has ended by itself.

    Of several calls the one with the earliest end counts. To be called where no lock is held by the same thread, such
    as in the handler of a signal.

    Args:
        grace_s: seconds from now.
        code: of the exit.
    """
    global _ends_s
    end_s = time.monotonic() + grace_s
    with _lock:
        if not _is_own or end_s >= _ends_s:
            return
        _ends_s = end_s
    threading.Thread(target=_end, args=(grace_s, code), name="grace", daemon=True).start()


def _end(grace_s: float, code: int) -> None:
    time.sleep(grace_s)
    saying = threading.Thread(target=_say, args=(grace_s,), name="grace-says", daemon=True)
    saying.start()
    saying.join(_SAY_S)
    os._exit(code)


def _say(grace_s: float) -> None:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    waiting = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident() and names.get(ident) != "grace":
            waiting.append(f"{names.get(ident, ident)} at {frame.f_code.co_filename}:{frame.f_lineno}")
    sys.stderr.write(f"error: did not end within {grace_s:g} s, so it ends now; threads: {'; '.join(waiting)}\n")
    sys.stderr.flush()


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
    """A descriptor to which every write succeeds; the first one that doesn't is reported on the standard error.

    Of a pipe whose reader has read enough, as ``head``, nothing is reported.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.lost: OSError | None = None
        self._lock = threading.Lock()

    def write(self, data: Any) -> int:
        """Write, or drop what can't be written."""
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


def unbreakable_stream(stream: TextIO) -> TextIO:
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
    sys.stdout, sys.stderr = unbreakable_stream(sys.stdout), unbreakable_stream(sys.stderr)


def lost_output() -> OSError | None:
    """Why some of what this process printed is lost; None if all was written, or nothing is known."""
    file = _raw(sys.stdout)
    if not isinstance(file, _LastingFile):
        return None
    sys.stdout.flush()
    return file.lost


def _raw(stream: object) -> object:
    return getattr(getattr(stream, "buffer", None), "raw", None)


_OUT_OF_MEMORY = (
    "the system does so where memory runs out ('journalctl -k' tells): free some, lower train.batch_size or take more "
    "nodes, then repeat or --resume the run"
)


def exit_error(who: str, code: int, output: str, *, log: Path) -> RingTuneError:
    """Make the error of a process that ended by itself.

    The exit code tells the error's class and the last line ``error: ...`` its message. If one of them is missing, or
    a signal ended the process, the node counts as lost.

    Args:
        who: ended, e.g. ``node node-1``.
        code: what the process ended with; negative for a signal.
        output: the end of what it printed.
        log: where all of it is.
    """
    lines = [line.removeprefix("error: ") for line in output.splitlines() if line.startswith("error: ")]
    kinds = {kind.exit_code: kind for kind in reversed(all_errors()) if kind is not RingTuneError}
    if lines and code in kinds:
        return kinds[code](f"{who}: {lines[-1]}")
    if code < 0:  # from outside, often for want of memory; its own last words say nothing about it
        name = signal.Signals(-code).name
        why = _OUT_OF_MEMORY if name == "SIGKILL" else f"see {log} and repeat or --resume the run"
        return PeerLostError(f"{who} was ended by {name}; {why}")
    last = output.strip().splitlines()[-1:] or ["it printed nothing"]
    return PeerLostError(
        f"{who} ended with exit code {code} ({last[0][:300]}); see {log} and repeat or --resume the run"
    )
