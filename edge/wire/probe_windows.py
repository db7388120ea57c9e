"""How much a measurement of a link sends, and the windows that its arrivals are cut into."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

_WINDOW_BYTES: Final = 1_000_000
_LEAST_WINDOW_BYTES: Final = 1 << 16
_WINDOW_S: Final = 0.1
_MOST_WINDOWS: Final = 9
_TRIPS_TO_SPEED_UP: Final = 10


class Thoroughness(NamedTuple):
    """How much a measurement sends.

    Attributes:
        pings: small messages.
        alone: long messages one by one.
        alone_s: about the most seconds that one of them takes; on slower links they are shorter.
        least_windows: of a stream.
        least_s: of all windows together.
        window_s: about the most seconds that a window waits for its bytes.
    """

    pings: int
    alone: int
    alone_s: float
    least_windows: int
    least_s: float
    window_s: float


THOROUGH: Final = Thoroughness(pings=20, alone=9, alone_s=1.0, least_windows=3, least_s=0.5, window_s=math.inf)
BRIEF: Final = Thoroughness(pings=8, alone=4, alone_s=0.3, least_windows=2, least_s=0.2, window_s=0.5)
"""For a run that waits for it; what is measured is corrected by what the run shows."""


class Windows:
    """Cuts arrivals into windows and drops the first one.

    Args:
        latency_s: of the link; over a long one it takes some round trips until both ends send at full speed.
        effort: how many windows, and of how many seconds together.
        rate_bytes_per_s: about how fast the link is; infinite if it is not known to be slow.

    Attributes:
        rates: of the windows that count, bytes per second.
        rate_bytes_per_s: of what came last; 0 until two messages came.
    """

    def __init__(
        self, latency_s: float, effort: Thoroughness = THOROUGH, *, rate_bytes_per_s: float = math.inf
    ) -> None:
        self._effort = effort
        self._least_bytes = min(_WINDOW_BYTES, max(_LEAST_WINDOW_BYTES, rate_bytes_per_s * effort.window_s))
        self._first_s = max(_WINDOW_S, 2 * _TRIPS_TO_SPEED_UP * latency_s)
        self.rates: list[float] = []
        self.rate_bytes_per_s = 0.0
        self._start: tuple[int, float] | None = None
        self._last = (0, 0.0)
        self._counted_s = 0.0
        self._is_first = True

    @property
    def are_enough(self) -> bool:
        """Whether the windows suffice for a median: three at least, and either half a second or nine windows."""
        if len(self.rates) < self._effort.least_windows:
            return False
        return self._counted_s >= self._effort.least_s or len(self.rates) >= _MOST_WINDOWS

    def add(self, arrived_bytes: int, at_s: float) -> None:
        """Note that ``arrived_bytes`` in all had arrived at ``at_s`` of the target's clock."""
        if self._start is None:
            self._start = self._last = (arrived_bytes, at_s)
            return
        taken_s = at_s - self._last[1]
        if taken_s > 0:
            self.rate_bytes_per_s = (arrived_bytes - self._last[0]) / taken_s
        self._last = (arrived_bytes, at_s)
        window_bytes, window_s = arrived_bytes - self._start[0], at_s - self._start[1]
        if window_bytes < self._least_bytes or window_s < (self._first_s if self._is_first else _WINDOW_S):
            return
        self._start = self._last
        if self._is_first:
            self._is_first = False
            return
        self.rates.append(window_bytes / window_s)
        self._counted_s += window_s
