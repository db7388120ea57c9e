"""Timer for work on a shared processor: the median over windows in which the work is repeated.

A quota of a control group lets a process compute for a part of each period (10 ms on some testbeds, 100 ms by default).
Work of a few milliseconds often fits into that part, so that one timing shows the speed without a quota. So work is
repeated for a *window* of at least three periods, and the timing is the mean over the window::

    computes  |####......|####......|####......|      # 2.5 ms of each 10 ms
    one work   ##                                     looks 4 times as fast as the node is
    a window  [##-##------##-##------##-##-----]      what the node really does

Without a quota a window covers some time slices of the kernel's scheduler, because of neighbours.

Where the computing threads can use up the quota, processor seconds are timed instead: divided by the quota's cores they
are the seconds in the long run, and they repeat within some percent where a window's seconds differ by ten. After a
pause the quota is full, and the next work takes less: ``rested_s``.

Timings are kept in the node's folder, so that a second start takes seconds::

    STATE/profile.json    {"schema": 4, "entries": {KEY: ENTRY}}
    ENTRY                 {"budget_s", "at_unix_s", "activation_token_bytes", "rested_s", "handling_s", "work_times",
                           "lowest_token_bytes"}

The key is a digest of the known causes of a timing: model, processor and threads, shape of the job, batch and classes,
number of neighbours timed at the same time, version of torch. The newest 16 entries stay, and hold for
``LONGEST_AGE_S``, because of unknown causes (a fan, a power supply, other programs). An unreadable file gives a
warning, and a new measurement.

This module does not load torch: an agent reads a ``TimingRequest`` before torch is loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from edge.checkpoint.state_folder import CACHE_FILE
from ringtune.costs.profile import Measured, Work, WorkTime
from ringtune.errors import InvalidInputError, StorageError
from ringtune.machine.resources import CpuQuota
from ringtune.schedule.course import FrozenWeights
from ringtune.storage.durable import write_durably
from ringtune.storage.strict import check_fields, parse_json, read_dataclass, to_table

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
MIN_TIMINGS = 3
MAX_TIMINGS = 9
_PERIODS = 3
_PAUSES, _MIN_PAUSES = 12, 4
_PAUSES_PER_BUDGET_S = 3
_MIN_WINDOW_S = 0.02
_MIN_QUOTA_WINDOW_S = 0.05


WAITING = frozenset({Work.SAVE})
"""Works that wait for something besides the processor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuClock:
    """Seconds that this process's computing would have taken at its quota alone.

    Attributes:
        cores: of the quota; at 0.25 cores a processor second takes 4.
        period_s: interval after which the quota is full again.
        cpu_s: returns processor seconds of this process so far.
    """

    cores: float
    period_s: float
    cpu_s: Callable[[], float] = time.process_time

    def __call__(self) -> float:
        """Processor seconds so far, divided by the cores of the quota."""
        return self.cpu_s() / self.cores

    @staticmethod
    def of(quota: CpuQuota | None, threads: int) -> CpuClock | None:
        """Make the clock of a quota of at most ``threads`` cores, which the threads can use up; None without one."""
        return CpuClock(cores=quota.cores, period_s=quota.period_s) if quota and quota.cores <= threads else None


def working_clock(quota: CpuQuota | None, threads: int) -> Callable[[], float]:
    """Make a clock of the calling thread's computing at a quota alone.

    It stands at 0 without a quota, and with several computing threads, because one thread can't measure the others.
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
        """Make the measured point of ``work`` at this size; ``share`` is the active part of a block's subnets."""
        return WorkTime(work=work, rows=rows, tokens=tokens, share=share, **self._asdict())


class Laps:
    """Sums of the seconds of each work within one window.

    Args:
        settle: waits until an accelerator has finished its queue.
        cpu: clock of works outside ``WAITING``; None = ``clock``.
    """

    def __init__(self, settle: Callable[[], None], clock: Callable[[], float], cpu: CpuClock | None = None) -> None:
        self._settle, self._clock, self._cpu = settle, clock, cpu
        self._sums: dict[Work, tuple[float, int]] = {}

    def lap(self, work: Work, function: Callable[[], T], *, times: int = 1) -> T:
        """Run ``function``, which does ``work`` ``times`` times; add its seconds to the window; return its result."""
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
    """Times cycles of work in windows."""

    window_s: float
    settle: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.perf_counter
    cpu: CpuClock | None = None

    def measure(self, cycle: Cycle, *, budget_s: float) -> dict[Work, Quartiles]:
        """Repeat ``cycle`` in 3 to 9 windows, after a burn-in of half a window; return quartiles of each work.

        Args:
            cycle: does each work of a loop once, within ``Laps.lap``; time outside is not counted.
            budget_s: after so many seconds no window begins, except the first ``MIN_TIMINGS``.
        """
        self._window(cycle, self.window_s / 2)
        started_s = self.clock()
        timings: dict[Work, list[float]] = {}
        for count in range(MAX_TIMINGS):
            if count >= MIN_TIMINGS and self.clock() - started_s >= budget_s:
                break
            for work, seconds in self._window(cycle, self.window_s).items():
                timings.setdefault(work, []).append(seconds)
        return {work: Quartiles.of(seconds) for work, seconds in timings.items()}

    def rested_s(
        self, work: Callable[[], object], *, budget_s: float, pause: Callable[[float], object] = time.sleep
    ) -> float:
        """Mean seconds that ``work`` takes less at its quota after a pause; 0 without a quota.

        Pauses are of different lengths, so that the work begins at any moment of a period; the first four are as evenly
        spread over it as all twelve.

        ``work`` runs after a pause. After ``budget_s`` no pause begins, except the first ``3 * budget_s`` (at
        least 4, at most 12).
        """
        if self.cpu is None:
            return 0.0
        saved = []
        least = min(_PAUSES, max(_MIN_PAUSES, round(_PAUSES_PER_BUDGET_S * budget_s)))
        started_s = self.clock()
        for index in range(_PAUSES):
            if index >= least and self.clock() - started_s >= budget_s:
                break
            pause((_PERIODS + _part_of_period(index)) * self.cpu.period_s)
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
    """Return the part of a period by which a pause exceeds whole periods: 0, 3, 6, 9, 1, 4, 7, 10, 2 .. twelfths."""
    steps = _PAUSES // _MIN_PAUSES
    return (index % _MIN_PAUSES * steps + index // _MIN_PAUSES) / _PAUSES


DEFAULT_BUDGET_S = 4.0


class TimingRequest(NamedTuple):
    """The coordinator's request for a measurement of one node.

    Attributes:
        budget_s: approximate seconds for all timings; slow boards take longer.
        neighbours: number of other nodes of this machine that are timed at the same time.
        frozen: dtype and arithmetic of frozen weights; None = the compute dtype.
    """

    budget_s: float = DEFAULT_BUDGET_S
    neighbours: int = 0
    is_fresh: bool = False
    frozen: FrozenWeights | None = None


class MeasuredWork(NamedTuple):
    """The timings of a node, and the activation bytes of one block.

    Attributes:
        activation_token_bytes: bytes per padded token that a forward with graph keeps of one block until its backward,
            its output included.
        rested_s: seconds that work takes less after a pause, under a quota of processor time.
        handling_s: seconds of every action besides its work.
        lowest_token_bytes: as ``activation_token_bytes``, for the lowest block that trains: its graph begins inside it.
    """

    work_times: tuple[WorkTime, ...]
    activation_token_bytes: float
    rested_s: float = 0.0
    handling_s: float = 0.0
    lowest_token_bytes: float = 0.0


SCHEMA = 4
KEPT_ENTRIES = 16
LONGEST_AGE_S = 7 * 24 * 3600.0


def cache_key(**parts: object) -> str:
    """Hex digest of ``parts``, the known causes of a timing."""
    text = json.dumps({name: repr(value) for name, value in parts.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """Timings with their budget and time; see ``MeasuredWork``."""

    budget_s: float
    at_unix_s: float
    activation_token_bytes: Measured
    rested_s: float
    handling_s: float
    lowest_token_bytes: float = 0.0
    work_times: tuple[WorkTime, ...]

    def __post_init__(self) -> None:
        """Refuse bytes that are negative."""
        check_fields(self, where="", error=InvalidInputError)

    @property
    def measured(self) -> MeasuredWork:
        """The timings."""
        return MeasuredWork(**{name: getattr(self, name) for name in MeasuredWork._fields})


class ProfileCache:
    """The cached timings of one node, in ``state``.

    Args:
        clock: wall clock, seconds since 1970. An entry from the future counts as too old: the clock was set back.
    """

    def __init__(self, state: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = state / CACHE_FILE
        self._clock = clock

    def find(self, key: str, *, budget_s: float) -> MeasuredWork | None:
        """Return timings under ``key`` of at least this budget and at most ``LONGEST_AGE_S`` old, or None."""
        entry = self._entries().get(key)
        if entry is None:
            return None
        try:
            kept = read_dataclass(_Entry, entry, where="", error=InvalidInputError)
        except InvalidInputError as error:
            _LOG.warning("%s: what was measured earlier is not readable (%s); it is measured again", self.path, error)
            return None
        is_young = 0 <= self._clock() - kept.at_unix_s <= LONGEST_AGE_S
        return kept.measured if is_young and kept.budget_s >= budget_s else None

    def put(self, key: str, measured: MeasuredWork, *, budget_s: float) -> None:
        """Store timings under ``key`` and keep the newest ``KEPT_ENTRIES``; a failed write gives only a warning."""
        entries = self._entries()
        entries.pop(key, None)
        entries[key] = to_table(_Entry(budget_s=budget_s, at_unix_s=self._clock(), **measured._asdict()))
        newest = dict(list(entries.items())[-KEPT_ENTRIES:])
        try:
            write_durably(self.path, json.dumps({"schema": SCHEMA, "entries": newest}, indent=1).encode())
        except StorageError as error:
            _LOG.warning("what was measured is not remembered: %s", error)

    def _entries(self) -> dict[str, dict[str, Any]]:
        try:
            value = parse_json(self.path.read_bytes())
            if value["schema"] != SCHEMA:
                return {}
            return {str(key): dict(entry) for key, entry in value["entries"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _LOG.warning("%s is not readable (%s: %s); it is measured again", self.path, type(error).__name__, error)
            return {}
