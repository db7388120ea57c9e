"""Ctrl-C once ends a run in order, twice at once. SIGTERM counts as Ctrl-C.

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
    """Listens to both signals while in its context; to be used in the main thread."""

    def __init__(self) -> None:
        self._ask: Callable[[], None] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        """Begin to listen."""
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def asking(self, ask: Callable[[], None]) -> Iterator[None]:
        """Within this, the first signal calls ``ask`` on a thread of its own; the second one raises.

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
