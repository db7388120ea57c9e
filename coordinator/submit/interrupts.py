"""Ctrl-C ends a run in order, a second Ctrl-C at once; SIGTERM counts as Ctrl-C.

A handler runs between any two instructions of the main thread, so it only starts a thread or raises.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Handles SIGINT and SIGTERM while in its context; to be used in the main thread."""

    def __init__(self) -> None:
        self._ask: Callable[[], None] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        """Install the handlers."""
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Install the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

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

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        ask, self._ask = self._ask, None
        if ask is None:
            raise KeyboardInterrupt
        threading.Thread(target=ask, name="drain", daemon=True).start()
