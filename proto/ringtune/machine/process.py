"""Start and end of a process: signals, grace time, standard outputs, and the error of a process that ended.

Grace time: a thread that waits for a call has a deadline; one that waits for a hanging disk, an unread pipe, or a lock
of such a thread has none. ``end_within`` ends a process that does not end in time.

Outputs: a full disk, an unread pipe and a closed terminal refuse output, and an output other than UTF-8 can't encode
most characters. Neither ends a command, which has its files and its exit code: such characters are escaped, and output
that can't be written is dropped.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
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
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeVar, cast

from ringtune.errors import DeadlineError, PeerLostError, RingTuneError, all_errors, internal_error
from ringtune.texts import indented

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")
ENDS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG: Final = 1  # of linux/prctl.h


def die_with_parent(parent: int) -> bool:
    """Let the kernel kill this process as soon as its parent has ended; nothing happens but on Linux.

    Returns:
        Whether the parent still runs.

    Source: Linux, prctl(2), ``PR_SET_PDEATHSIG``.
    """
    try:
        zero = ctypes.c_ulong(0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), zero, zero, zero)
    except (OSError, AttributeError):
        pass
    return os.getppid() == parent


@contextmanager
def handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Install ``handler`` for SIGINT, SIGTERM and SIGHUP in this context; to be entered in the main thread.

    An ignored SIGHUP stays ignored, so that ``nohup`` works. The earlier handlers are restored at the end. A handler
    runs between any two instructions of the main thread, so it should only note the signal, start a thread, or raise.
    It must not set an event: the main thread may hold the event's lock, and would wait for itself for ever.
    """
    takes_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    numbers = [number for number in ENDS if takes_hangup or number != signal.SIGHUP]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


_SAY_S: Final = 0.5
"""Time limit of the last message; standard error may be what hangs."""
_lock = threading.RLock()  # a signal handler may run inside another one
_ends_s = float("inf")
_is_own = False


def mark_command_process() -> None:
    """Mark this process as that of a command, which ``end_within`` may end; a host program is never ended."""
    global _is_own
    _is_own = True


def end_within(grace_s: float, code: int) -> None:
    """End the process of a command after ``grace_s`` seconds with an exit code, unless it has ended by itself.

    Of several calls the earliest end counts. The calling thread must hold no lock; a signal handler may call it.
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


# ---- work of threads and processes ------------------------------------------------------------------


def carry_out(function: Callable[[], T], future: Future[T]) -> None:
    """Run a function on this thread for its future, unless that was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def result_within(future: Future[T], timeout_s: float, otherwise: str) -> T:
    """Wait for a result; after ``timeout_s`` seconds cancel it, and raise ``DeadlineError`` with this message."""
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():  # the function itself raised it
            raise
        future.cancel()
        raise DeadlineError(otherwise) from None


def exit_code_of(work: Callable[[], object]) -> int:
    """Do the work of this process; return its exit code: 1 once nobody reads its output, else that of its error.

    An error is written to standard error, where ``exit_error`` finds it.
    """
    try:
        work()
    except BrokenPipeError:
        return 1
    except (RingTuneError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:
            raise
        told = error if isinstance(error, RingTuneError) else internal_error(error)
        sys.stderr.write(f"error: {indented(str(told))}\n")
        return told.exit_code
    return 0


def keep_output() -> TextIO:
    """Return standard output; what libraries and processes below print from now on goes to standard error."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return output


def keep_input() -> int:
    """Return a new descriptor of standard input, which libraries and processes below find empty from now on."""
    stdin = sys.stdin.fileno()
    kept, nothing = os.dup(stdin), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, stdin)
    os.close(nothing)
    return kept


# ---- outputs ----------------------------------------------------------------------------------------


ESCAPED: Final = "ringtune-escaped"
"""Name of the encoding error handler that replaces or escapes a character that an output can't encode."""

_INSTEAD: Final = str.maketrans({"…": "..."})
_NAMES: Final = {1: "standard output", 2: "standard error"}
_REFUSED: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO})


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_INSTEAD)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error(ESCAPED, _escape)


class _LastingFile(io.FileIO):
    """A descriptor to which every write succeeds; the first lost one is reported on standard error.

    A broken pipe is not reported: the reader, such as ``head``, has read enough.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.lost: OSError | None = None
        self._lock = threading.Lock()

    def write(self, data: Any) -> int:
        """Write, or drop data that can't be written."""
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

    A stream without a descriptor, as in a notebook, is returned unchanged. Buffered text is written first, if possible.
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
    """Make writes to standard output and error never fail; to be called before the streams are stored anywhere.

    A closed standard descriptor is opened on the null device; otherwise the next opened file would get its number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - for the life of the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = unbreakable_stream(sys.stdout), unbreakable_stream(sys.stderr)


def lost_output() -> OSError | None:
    """Return why some standard output was lost; None if all was written, or it is unknown."""
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


_TAIL_BYTES = 4096


def exit_error(who: str, code: int, output: str | None = None, *, log: Path) -> RingTuneError:
    """Make the error of a process that ended by itself.

    The exit code selects the error's class, the last line ``error: ...`` the message. If one of them is missing, or a
    signal ended the process, it is a ``PeerLostError``.

    ``who`` is the process, such as ``node node-1``; ``code`` is negative for a signal; ``log`` is the file with its
    output, ``output`` the end of that, None = as in the file.
    """
    if output is None:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            output = file.read().decode(errors="replace")
    lines = [line.removeprefix("error: ") for line in output.splitlines() if line.startswith("error: ")]
    kinds = {kind.exit_code: kind for kind in reversed(all_errors()) if kind is not RingTuneError}
    if lines and code in kinds:
        return kinds[code](f"{who}: {lines[-1]}")
    if code < 0:  # from outside, often for lack of memory; its last output does not explain it
        name = signal.Signals(-code).name
        why = _OUT_OF_MEMORY if name == "SIGKILL" else f"see {log} and repeat or --resume the run"
        return PeerLostError(f"{who} was ended by {name}; {why}")
    last = output.strip().splitlines()[-1:] or ["it printed nothing"]
    return PeerLostError(
        f"{who} ended with exit code {code} ({last[0][:300]}); see {log} and repeat or --resume the run"
    )
