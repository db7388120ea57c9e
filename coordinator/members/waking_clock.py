"""A clock that stands still while its process does, so that nobody is held for silent who was not listened to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

MOST_BETWEEN_S: Final = 1.5
"""Whoever looks at leases reads the clock several times in so many seconds; a longer gap is none of theirs."""


class WakingClock:
    """Monotonic seconds, without those in which nobody could read them.

    A process that was stopped (SIGSTOP, Ctrl-Z), swapped out, or on a machine that slept wakes with all leases over
    by the machine's clock, while the heartbeats of that time wait to be read. By this one they are as they were.

    Args:
        now_s: a monotonic clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._read_s = now_s()
        self._stood_s = 0.0

    def __call__(self) -> float:
        """Seconds, of which only differences count."""
        with self._lock:
            now_s = self._now_s()
            gap_s, self._read_s = now_s - self._read_s, now_s
            if gap_s > MOST_BETWEEN_S:
                self._stood_s += gap_s
            return now_s - self._stood_s
