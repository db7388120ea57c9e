"""A timer for work on a shared processor: work is repeated in long windows, and the median of the windows counts.

A quota of a control group lets a process compute for a part of each period (10 ms on some testbeds, 100 ms by
default) and stops it for the rest. Work of a few milliseconds then often fits into the part that is free, and one
timing of it shows the speed without a quota; the median of such timings is wrong by the whole factor. So work is
repeated in a loop for a *window* of at least three periods, and the timing is the mean over the window::

    computes  |####......|####......|####......|      # 2.5 ms of each 10 ms
    one work   ##                                     looks 4 times as fast as the node is
    a window  [##-##------##-##------##-##-----]      what the node really does

Without a quota a window is some turns of the kernel's scheduler, for the same reason: neighbours.

A quota that the computing threads can use up makes a better clock: whatever the windows catch, work of so many
processor seconds takes those divided by the quota's cores, in the long run. So there processor seconds are timed, which
repeat within some percent where a window's seconds differ by ten. A node that has rested finds its quota full, and its
next work takes less: ``rested_s``.

This module does not load torch, so that an agent can read a ``TimingRequest`` before torch is loaded.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ringtune.costs.profile import Work, WorkTime
from ringtune.machine.resources import CpuQuota
from ringtune.schedule.course import FrozenWeights

T = TypeVar("T")
MIN_TIMINGS = 3
MAX_TIMINGS = 9
_PERIODS = 3
_RESTS, _MIN_RESTS = 12, 4
_RESTS_PER_BUDGET_S = 3
_MIN_WINDOW_S = 0.02
_MIN_QUOTA_WINDOW_S = 0.05


WAITING = frozenset({Work.SAVE})
"""Works that wait for something besides the processor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuClock:
    """Tells how long this process's computing would have taken at its quota alone, in seconds.

    Attributes:
        cores: of the quota; at 0.25 cores a processor second takes 4.
        period_s: after which the quota is filled up.
        cpu_s: processor seconds of this process so far.
    """

    cores: float
    period_s: float
    cpu_s: Callable[[], float] = time.process_time

    def __call__(self) -> float:
        """Processor seconds so far over the cores of the quota."""
        return self.cpu_s() / self.cores

    @staticmethod
    def of(quota: CpuQuota | None, threads: int) -> CpuClock | None:
        """Make the clock of a quota that so many computing threads can use up; None if there is none."""
        return CpuClock(cores=quota.cores, period_s=quota.period_s) if quota and quota.cores <= threads else None


def working_clock(quota: CpuQuota | None, threads: int) -> Callable[[], float]:
    """Make a clock of what the calling thread's computing takes at a quota alone; it stands at 0 where none holds.

    With several computing threads it stands too: one thread can't tell what the others did.
    """
    clock = CpuClock.of(quota, threads) if threads == 1 else None
    return dataclasses.replace(clock, cpu_s=time.thread_time) if clock else lambda: 0.0


def window_of(quota: CpuQuota | None) -> float:
    """Seconds of a window: three periods of the quota, at least 0.05; without a quota 0.02."""
    return max(_MIN_QUOTA_WINDOW_S, _PERIODS * quota.period_s) if quota else _MIN_WINDOW_S


class Quartiles(NamedTuple):
    """Seconds of one work: median, lower and upper quartile over ``samples`` windows."""

    median_s: float
    low_s: float
    high_s: float
    samples: int

    @staticmethod
    def of(timings: list[float]) -> Quartiles:
        """Compute median and quartiles of at least one timing; of a single one all three are equal."""
        if len(timings) == 1:
            return Quartiles(timings[0], timings[0], timings[0], 1)
        low_s, median_s, high_s = statistics.quantiles(timings, n=4, method="inclusive")
        return Quartiles(median_s, low_s, high_s, len(timings))

    def at(self, work: Work, rows: int = 0, tokens: int = 0, *, share: float = 1.0) -> WorkTime:
        """Make the measured point of ``work`` at this size, with this share of a block's subnets."""
        return WorkTime(
            work=work,
            rows=rows,
            tokens=tokens,
            median_s=self.median_s,
            low_s=self.low_s,
            high_s=self.high_s,
            samples=self.samples,
            share=share,
        )


class Laps:
    """Adds up how long each work took within one window.

    Args:
        settle: waits until an accelerator has done what it was given.
        clock: monotonic seconds.
        cpu: times work that only computes by processor seconds; None = by the clock.
    """

    def __init__(self, settle: Callable[[], None], clock: Callable[[], float], cpu: CpuClock | None = None) -> None:
        self._settle = settle
        self._clock = clock
        self._cpu = cpu
        self._sums: dict[Work, tuple[float, int]] = {}

    def lap(self, work: Work, function: Callable[[], T], *, times: int = 1) -> T:
        """Run ``function``, which does ``work`` ``times`` times, and add its seconds to the window."""
        clock = self._cpu if self._cpu is not None and work not in WAITING else self._clock
        self._settle()
        start_s = clock()
        result = function()
        self._settle()
        seconds, count = self._sums.get(work, (0.0, 0))
        self._sums[work] = (seconds + clock() - start_s, count + times)
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
        cpu: see ``Laps``.
    """

    window_s: float
    settle: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.perf_counter
    cpu: CpuClock | None = None

    def measure(self, cycle: Cycle, *, budget_s: float) -> dict[Work, Quartiles]:
        """Repeat ``cycle`` in windows, after a burn-in.

        Args:
            cycle: does the works of a loop once, each within ``Laps.lap``; what it prepares outside is not counted.
            budget_s: no further window is begun after so many seconds, once ``MIN_TIMINGS`` windows are done.

        Returns:
            Seconds of each work that ``cycle`` has laps of.
        """
        self._window(cycle, self.window_s / 2)
        started_s = self.clock()
        timings: dict[Work, list[float]] = {}
        for count in range(MAX_TIMINGS):
            if count >= MIN_TIMINGS and self.clock() - started_s >= budget_s:
                break
            for work, seconds in self._window(cycle, self.window_s).items():
                timings.setdefault(work, []).append(seconds)
        return {work: Quartiles.of(found) for work, found in timings.items()}

    def rested_s(
        self, work: Callable[[], object], *, budget_s: float, rest: Callable[[float], object] = time.sleep
    ) -> float:
        """Mean seconds that ``work`` takes less at its quota after a rest; 0 without a quota.

        Rests are of different lengths, so that the work begins at any moment of a period. The first four are as evenly
        spread over it as all twelve.

        Args:
            work: what to do after a rest.
            budget_s: no further rest is begun after so many seconds, once three for each of these seconds are done, but
                four at least and twelve at most.
            rest: waits so many seconds.
        """
        if self.cpu is None:
            return 0.0
        saved = []
        least = min(_RESTS, max(_MIN_RESTS, round(_RESTS_PER_BUDGET_S * budget_s)))
        started_s = self.clock()
        for index in range(_RESTS):
            if index >= least and self.clock() - started_s >= budget_s:
                break
            rest((_PERIODS + _part_of_period(index)) * self.cpu.period_s)
            self.settle()
            start_s, start_cpu_s = self.clock(), self.cpu()
            work()
            self.settle()
            saved.append(self.cpu() - start_cpu_s - (self.clock() - start_s))
        return max(0.0, statistics.fmean(saved))

    def _window(self, cycle: Cycle, window_s: float) -> dict[Work, float]:
        laps = Laps(self.settle, self.clock, self.cpu)
        started_s = self.clock()
        while True:
            cycle(laps)
            if self.clock() - started_s >= window_s:
                return laps.means()


def _part_of_period(index: int) -> float:
    """Return by which part of a period a rest is longer than whole ones: 0, 3, 6, 9, 1, 4, 7, 10, 2 .. twelfths."""
    steps = _RESTS // _MIN_RESTS
    return (index % _MIN_RESTS * steps + index // _MIN_RESTS) / _RESTS


DEFAULT_BUDGET_S = 4.0


class TimingRequest(NamedTuple):
    """The coordinator's wishes for a measurement of one node.

    Attributes:
        budget_s: about how long all timings may take, in seconds; slow boards take longer.
        neighbours: other nodes of this machine that are timed at the same moment.
        is_fresh: measure anew even what the node remembers.
        frozen: how frozen weights are held; None = in the type of the computation.
    """

    budget_s: float = DEFAULT_BUDGET_S
    neighbours: int = 0
    is_fresh: bool = False
    frozen: FrozenWeights | None = None


class MeasuredWork(NamedTuple):
    """The timings of a node, and the activation bytes of one block.

    Attributes:
        work_times: every point.
        activation_token_bytes: what a forward with graph keeps of one block until its backward, its output included,
            for each padded token.
        rested_s: what work takes less after a rest, under a quota of processor time.
        handling_s: what every action takes besides its work.
        lowest_token_bytes: as ``activation_token_bytes``, of the lowest block that trains: its graph begins inside it.
    """

    work_times: tuple[WorkTime, ...]
    activation_token_bytes: float
    rested_s: float = 0.0
    handling_s: float = 0.0
    lowest_token_bytes: float = 0.0
