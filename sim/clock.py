"""A virtual clock: callbacks in the order of (time, order of scheduling)."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any


class VirtualClock:
    """Time that passes only when something is due.

    Ties run in the order in which they were scheduled, so a run is reproducible.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = count()
        self._is_stopped = False

    def at(self, time_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Call ``callback(*args)`` at ``time_s``; a time in the past means now."""
        heappush(self._queue, (time_s if time_s > self.now_s else self.now_s, next(self._numbers), callback, args))

    def after(self, delay_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Call ``callback(*args)`` in ``delay_s`` seconds."""
        self.at(self.now_s + delay_s, callback, *args)

    def stop(self) -> None:
        """Run nothing more after the callback that is under way."""
        self._is_stopped = True

    def run(self, *, until_s: float = float("inf")) -> None:
        """Run what is due up to ``until_s``, or until nothing is left, or until somebody stops the clock."""
        queue = self._queue
        while queue and queue[0][0] <= until_s and not self._is_stopped:
            self.now_s, _, callback, args = heappop(queue)
            callback(*args)
