"""Time work on a shared processor: repeat it in long windows, and take the median of the windows.

A quota of a control group lets a process compute for a part of each period (10 ms on some testbeds, 100 ms by
default) and stops it for the rest. Work of a few milliseconds then often fits into the part that is free, and one
timing of it shows the speed without a quota; the median of such timings is wrong by the whole factor. So work is
repeated in a loop for a *window* of at least three periods, and the timing is the mean over the window::

    computes  |####......|####......|####......|      # 2.5 ms of each 10 ms
    one work   ##                                     looks 4 times as fast as the node is
    a window  [##-##------##-##------##-##-----]      what the node really does

Without a quota a window is some turns of the kernel's scheduler, for the same reason: neighbours.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ringtune.costs.work_times import Work, WorkTime
from ringtune.machine.cores import CpuQuota

T = TypeVar("T")
LEAST_TIMINGS = 3
MOST_TIMINGS = 9
_PERIODS = 3
_LEAST_WINDOW_S = 0.02
_LEAST_QUOTA_WINDOW_S = 0.05


def window_of(quota: CpuQuota | None) -> float:
    """Seconds of a window: three periods of the quota, at least 0.05; without a quota 0.02."""
    return max(_LEAST_QUOTA_WINDOW_S, _PERIODS * quota.period_s) if quota else _LEAST_WINDOW_S


class Spread(NamedTuple):
    """Seconds of one work: median, lower and upper quartile over ``samples`` windows."""

    median_s: float
    low_s: float
    high_s: float
    samples: int

    @staticmethod
    def of(timings: list[float]) -> Spread:
        """Compute median and quartiles of at least one timing; of a single one all three are equal."""
        if len(timings) == 1:
            return Spread(timings[0], timings[0], timings[0], 1)
        low_s, median_s, high_s = statistics.quantiles(timings, n=4, method="inclusive")
        return Spread(median_s, low_s, high_s, len(timings))

    def at(self, work: Work, rows: int = 0, tokens: int = 0) -> WorkTime:
        """Make the measured point of ``work`` at this size."""
        return WorkTime(
            work=work,
            rows=rows,
            tokens=tokens,
            median_s=self.median_s,
            low_s=self.low_s,
            high_s=self.high_s,
            samples=self.samples,
        )


class Laps:
    """Adds up how long each work took within one window.

    Args:
        settle: waits until an accelerator has done what it was given.
        clock: monotonic seconds.
    """

    def __init__(self, settle: Callable[[], None], clock: Callable[[], float]) -> None:
        self._settle = settle
        self._clock = clock
        self._sums: dict[Work, tuple[float, int]] = {}

    def lap(self, work: Work, function: Callable[[], T], *, times: int = 1) -> T:
        """Run ``function``, which does ``work`` ``times`` times, and add its seconds to the window."""
        self._settle()
        start_s = self._clock()
        result = function()
        self._settle()
        seconds, count = self._sums.get(work, (0.0, 0))
        self._sums[work] = (seconds + self._clock() - start_s, count + times)
        return result

    def means(self) -> dict[Work, float]:
        """Mean seconds of each work in this window: two laps of 1 s and 3 s are 2 s."""
        return {work: seconds / count for work, (seconds, count) in self._sums.items()}


Cycle = Callable[[Laps], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timer:
    """Times cycles of work in windows.

    Attributes:
        window_s: shortest timing, seconds.
        settle: waits until an accelerator has done what it was given.
        clock: monotonic seconds.
    """

    window_s: float
    settle: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.perf_counter

    def measure(self, cycle: Cycle, *, budget_s: float) -> dict[Work, Spread]:
        """Repeat ``cycle`` in windows, after a burn-in.

        Args:
            cycle: does the works of a loop once, each within ``Laps.lap``; what it prepares outside is not counted.
            budget_s: no further window is begun after so many seconds, once ``LEAST_TIMINGS`` windows are done.

        Returns:
            Seconds of each work that ``cycle`` has laps of.
        """
        self._window(cycle, self.window_s / 2)
        started_s = self.clock()
        timings: dict[Work, list[float]] = {}
        for count in range(MOST_TIMINGS):
            if count >= LEAST_TIMINGS and self.clock() - started_s >= budget_s:
                break
            for work, seconds in self._window(cycle, self.window_s).items():
                timings.setdefault(work, []).append(seconds)
        return {work: Spread.of(found) for work, found in timings.items()}

    def _window(self, cycle: Cycle, window_s: float) -> dict[Work, float]:
        laps = Laps(self.settle, self.clock)
        started_s = self.clock()
        while True:
            cycle(laps)
            if self.clock() - started_s >= window_s:
                return laps.means()
