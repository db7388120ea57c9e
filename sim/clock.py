"""A virtual clock: callbacks in the order of (time, order of scheduling)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Time that passes only when something is due.

    Ties run in the order in which they were scheduled, so a run is reproducible.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time_s: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` at ``time_s``; a time in the past means now."""
        heapq.heappush(self._queue, (max(time_s, self.now_s), next(self._order), callback))

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` in ``delay_s`` seconds."""
        self.at(self.now_s + delay_s, callback)

    def run(self, *, until_s: float = float("inf")) -> None:
        """Run what is due up to ``until_s``, or until nothing is left."""
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, callback = heapq.heappop(self._queue)
            callback()
