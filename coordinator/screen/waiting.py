"""Say on the standard error output what a command waits for, and on a terminal how far it is.

Results go to the standard output, and none of this does.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import Final, Self, TextIO, TypeVar

from coordinator.screen.progress import Progress
from ringtune.quantities import format_seconds

Cell = TypeVar("Cell")
_INTERVAL_S: Final = 0.2
QUIET_S: Final = 2.0
"""What takes no longer needs no word."""
_PHASES: Final = {
    "joining": "waiting for nodes to join",
    "inspecting": "nodes load the model, count their rows and time their work; then they are planned for",
}


class Waiting(Progress):
    """Says what is waited for while in its context, once it takes longer than ``QUIET_S``; as a progress, each phase.

    A terminal shows the seconds on one line, which is gone at the end; elsewhere each thing is said once, on a line.

    Args:
        what: is waited for, e.g. ``reading train.csv``.
        stream: where it is said; the standard error output if not given.
        quiet_s: how long nothing is said, in seconds.
    """

    def __init__(self, what: str, *, stream: TextIO | None = None, quiet_s: float = QUIET_S) -> None:
        self._what, self._quiet_s = what, quiet_s
        self._stream = sys.stderr if stream is None else stream
        self._since_s = time.monotonic()
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._say, name="waiting", daemon=True)

    def __enter__(self) -> Self:
        """Begin to wait."""
        self._since_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Say no more."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()

    def state(self, state: str) -> None:
        """Wait for another thing from now on: a phase of a run, or anything else in words."""
        with self._changed:
            self._what, self._since_s = _PHASES.get(state, state), time.monotonic()
            self._changed.notify()

    def _say(self) -> None:
        said, width = "", 0
        with self._changed, contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
            while not self._is_over:
                took_s = time.monotonic() - self._since_s
                if took_s < self._quiet_s:
                    self._changed.wait(self._quiet_s - took_s)
                elif self._stream.isatty():
                    width = _write(self._stream, f"{self._what} ... {format_seconds(round(took_s))}", width)
                    self._changed.wait(1.0)
                else:
                    if said != self._what:
                        self._stream.write(f"{self._what} ...\n")
                        self._stream.flush()
                        said = self._what
                    self._changed.wait()
            if width:
                _write(self._stream, "", width)
                _write(self._stream, "", 0)


def shown_cells(
    cells: Iterable[Cell], total: int, stream: TextIO, *, now_s: Callable[[], float] = time.monotonic
) -> Generator[Cell]:
    """Pass the results of a sweep on as they come, and show their number and the time that the others will take.

    Nothing is written to what is no terminal.

    Args:
        cells: results.
        total: how many there will be.
        stream: where it is shown: the standard error output, so that results can go elsewhere.
        now_s: a monotonic clock.
    """
    if not stream.isatty():
        yield from cells
        return
    began_s = shown_s = now_s()
    width = _write(stream, f"0 of {total:,} cells", 0)
    try:
        for done, cell in enumerate(cells, start=1):
            if now_s() - shown_s >= _INTERVAL_S or done == total:
                shown_s = now_s()
                left_s = (shown_s - began_s) / done * (total - done)
                width = _write(stream, f"{done:,} of {total:,} cells, {format_seconds(left_s)} left", width)
            yield cell
    finally:
        _write(stream, "", width)
        _write(stream, "", 0)


def _write(stream: TextIO, text: str, width: int) -> int:
    """Write over a line that was ``width`` wide, and return the new width."""
    stream.write(f"\r{text.ljust(width)}")
    stream.flush()
    return len(text)
