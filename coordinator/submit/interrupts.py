"""Ctrl-C ends a run in order, a second Ctrl-C at once; SIGTERM and a closed terminal (SIGHUP) count as Ctrl-C.

A handler runs between any two instructions of the main thread, so it only starts a thread or raises.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from coordinator.submit.terminal import Terminal
from ringtune.errors import InterruptedRunError
from ringtune.machine.grace import end_within
from ringtune.machine.signals import handled

GRACE_S = 30.0
"""The longest that a command takes to end that was told to end at once, whatever a thread of it waits for."""


class Interrupts:
    """Handles SIGINT, SIGTERM and SIGHUP while in its context, as ``handled`` does; to be used in the main thread.

    Args:
        log: gets what is printed after the terminal was closed; None = nobody does.
    """

    def __init__(self, log: Path | None = None) -> None:
        self._ask: Callable[[], None] | None = None
        self._hearing = handled(self._on_signal)
        self._terminal = Terminal(log)

    def __enter__(self) -> Interrupts:
        """Install the handlers."""
        self._terminal.__enter__()
        self._hearing.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Install the handlers that were there before."""
        self._hearing.__exit__(kind, error, traceback)
        self._terminal.__exit__(kind, error, traceback)

    @contextmanager
    def asking(self, ask: Callable[[], None]) -> Iterator[None]:
        """Let the first signal within this context call ``ask`` on a thread of its own, and the second one raise.

        Args:
            ask: asks for an end in order; may take a while, must not raise.
        """
        self._ask = ask
        try:
            yield
        finally:
            self._ask = None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._terminal.closed()
        ask, self._ask = self._ask, None
        if ask is None:
            end_within(GRACE_S, InterruptedRunError.exit_code)
            raise KeyboardInterrupt
        threading.Thread(target=ask, name="drain", daemon=True).start()


@contextmanager
def heard_interrupts(log: Path) -> Iterator[Interrupts]:
    """Yield interrupts that hear signals in the main thread; elsewhere no thread may, and they hear none.

    Args:
        log: as in ``Interrupts``.
    """
    interrupts = Interrupts(log=log)
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    with interrupts:
        yield interrupts
