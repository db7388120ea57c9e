"""The coordinator's clock as this node knows it: from round trips, without a look at the node's own wall clock.

Half a round trip is the most that a comparison can be off by, and the two clocks drift apart afterwards. So the
comparison that counts is the one whose doubt is the least by now::

    node         sent            received      their time was read in the middle, give or take half the round trip
    coordinator        their time

Source: the clock filter of NTP (RFC 5905, section 10).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

_DRIFT = 1e-4
_KEPT = 64


class _Comparison(NamedTuple):
    """One look at the other clock: when, its lead over this node's monotonic clock, and how far that may be off."""

    at_s: float
    lead_s: float
    doubt_s: float


class SharedClock:
    """Tells the coordinator's time; any thread may ask and compare.

    Until the first comparison it tells this node's own wall clock.

    Args:
        clock: this node's monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._lead_s = time.time() - clock()
        self._seen: deque[_Comparison] = deque(maxlen=_KEPT)

    def compare(self, sent_s: float, received_s: float, there_unix_s: float) -> None:
        """Note what the coordinator's clock said between two monotonic times of this node; 0 = it said nothing.

        Example: asked at 10 s, answered at 12 s with 1000 s: the coordinator's clock leads by 989 s, or by 1 s more or
        less.
        """
        if there_unix_s <= 0:
            return
        half_s = max(0.0, received_s - sent_s) / 2
        with self._lock:
            self._seen.append(_Comparison(received_s, there_unix_s - (sent_s + half_s), half_s))
            best = min(self._seen, key=lambda seen: seen.doubt_s + _DRIFT * (received_s - seen.at_s))
            self._lead_s = best.lead_s

    def forget(self) -> None:
        """Drop every comparison: the coordinator is another process now."""
        with self._lock:
            self._seen.clear()

    def unix_s(self, monotonic_s: float) -> float:
        """The coordinator's time at a monotonic time of this node."""
        return monotonic_s + self._lead_s

    def now_unix_s(self) -> float:
        """The coordinator's time now."""
        return self.unix_s(self._clock())
