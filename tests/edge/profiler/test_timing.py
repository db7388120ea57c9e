"""Timings of loops on a clock that the test moves: windows, medians, budget, and a quota that stops the clock."""

from __future__ import annotations

import pytest

from edge.profiler.timing import MAX_TIMINGS, MIN_TIMINGS, CpuClock, Laps, Quartiles, Timer, window_of
from ringtune.costs.profile import Work
from ringtune.machine.resources import CpuQuota


class ThrottledClock:
    """A processor that computes for the first part of every period and stands still for the rest.

    Args:
        period_s: of the quota.
        free_s: how long it computes in a period.
    """

    def __init__(self, period_s: float = 1.0, free_s: float = 1.0) -> None:
        self.now_s = 0.0
        self._period_s = period_s
        self._free_s = free_s
        self._left_s = free_s

    def __call__(self) -> float:
        """The time now."""
        return self.now_s

    def compute(self, seconds: float) -> float:
        """Take so much of the processor; gives the time."""
        while seconds > self._left_s:
            seconds -= self._left_s
            self.now_s += self._left_s + self._period_s - self._free_s
            self._left_s = self._free_s
        self._left_s -= seconds
        self.now_s += seconds
        return self.now_s


def measure(clock: ThrottledClock, seconds: float, *, window_s: float, budget_s: float = 100.0) -> Quartiles:
    """Time a work of so many processor seconds."""
    timer = Timer(window_s=window_s, clock=clock)
    cycle = lambda laps: laps.lap(Work.FORWARD, lambda: clock.compute(seconds))  # noqa: E731
    return timer.measure(cycle, budget_s=budget_s)[Work.FORWARD]


@pytest.mark.parametrize("seconds", [0.0002, 0.0011, 0.004, 0.02])
def test_timing_sees_a_quota_that_short_timings_would_miss(seconds: float) -> None:
    """A quarter of a core in periods of 10 ms: work takes four times as long, also what fits into one period."""
    quota = CpuQuota(0.25, 0.01)
    honest = measure(ThrottledClock(0.01, 0.0025), seconds, window_s=window_of(quota))
    assert honest.median_s == pytest.approx(4 * seconds, rel=0.25)


def test_timing_gives_median_and_quartiles_of_windows() -> None:
    """Of five windows the middle one, the second and the fourth."""
    spread = Quartiles.of([5.0, 1.0, 4.0, 2.0, 3.0])
    assert spread == Quartiles(3.0, 2.0, 4.0, 5)
    point = spread.at(Work.HEAD, 2, 8)
    assert (point.work, point.size, point.median_s, point.low_s, point.high_s, point.samples) == (
        "head",
        16,
        3.0,
        2.0,
        4.0,
        5,
    )
    assert Quartiles.of([7.0]) == Quartiles(7.0, 7.0, 7.0, 1)


def test_timing_keeps_to_its_budget_and_takes_three_at_least() -> None:
    """A slow board gets few timings, a fast one as many as are worth it."""
    slow, fast = ThrottledClock(), ThrottledClock()
    assert measure(slow, 2.0, window_s=0.02, budget_s=1.0).samples == MIN_TIMINGS
    assert slow.now_s == pytest.approx(2.0 * (MIN_TIMINGS + 1))
    assert measure(fast, 0.001, window_s=0.02, budget_s=1.0).samples == MAX_TIMINGS


def test_laps_divide_by_how_often_the_work_was_done_and_wait_for_the_device() -> None:
    """Three parts in a lap are three works; what is prepared between laps does not count."""
    clock, settled = ThrottledClock(), []
    laps = Laps(lambda: settled.append(clock()), clock)
    assert laps.lap(Work.EMBED, lambda: clock.compute(0.3), times=3) == pytest.approx(0.3)
    clock.compute(5.0)
    laps.lap(Work.EMBED, lambda: clock.compute(0.1))
    assert laps.means() == {Work.EMBED: pytest.approx(0.1)}
    assert settled == pytest.approx([0.0, 0.3, 5.3, 5.4])


def test_a_quota_that_computing_can_use_up_is_timed_by_processor_seconds() -> None:
    """Half a processor second takes 2 s at a quarter of a core, whatever the window caught; a disk is waited for."""
    clock, cpu_s = ThrottledClock(), [0.0]

    def work() -> None:
        clock.compute(0.7)
        cpu_s[0] += 0.5

    quota = CpuQuota(cores=0.25, period_s=0.1)
    laps = Laps(lambda: None, clock, CpuClock(cores=quota.cores, period_s=quota.period_s, cpu_s=lambda: cpu_s[0]))
    laps.lap(Work.FORWARD, work)
    laps.lap(Work.SAVE, work)
    assert laps.means() == {Work.FORWARD: pytest.approx(2.0), Work.SAVE: pytest.approx(0.7)}
    assert CpuClock.of(quota, 1) is not None
    assert CpuClock.of(CpuQuota(cores=1.5, period_s=0.1), 1) is None
    assert CpuClock.of(None, 1) is None


def test_rest_is_what_work_takes_less_with_a_full_quota() -> None:
    """A processor second at half a core takes 2 s, after a pause 1.6 s: a pause is worth 0.4 s."""
    now_s, cpu_s, pauses = [0.0], [0.0], list[float]()

    def work() -> None:
        now_s[0] += 1.6
        cpu_s[0] += 1.0

    cpu = CpuClock(cores=0.5, period_s=0.1, cpu_s=lambda: cpu_s[0])
    timer = Timer(window_s=0.1, clock=lambda: now_s[0], cpu=cpu)
    assert timer.rested_s(work, budget_s=4.0, pause=pauses.append) == pytest.approx(0.4)
    assert min(pauses) == pytest.approx(0.3) and max(pauses) < 0.4
    assert Timer(window_s=0.1).rested_s(work, budget_s=4.0, pause=pauses.append) == 0.0


@pytest.mark.parametrize(
    ("budget_s", "work_s", "period_s", "count"),
    [(1.0, 0.02, 0.1, 4), (1.0, 0.02, 0.01, 12), (1.0, 0.3, 0.01, 4), (4.0, 0.02, 0.1, 12), (4.0, 5.0, 0.1, 12)],
)
def test_rests_keep_to_their_budget_and_are_spread_over_a_period(
    budget_s: float, work_s: float, period_s: float, count: int
) -> None:
    """Before a run a second is spent on them, or four pauses; the four seconds of a measurement have room for all."""
    now_s, pauses = [0.0], list[float]()

    def take(seconds: float) -> None:
        now_s[0] += seconds

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        take(seconds)

    cpu = CpuClock(cores=0.5, period_s=period_s, cpu_s=lambda: now_s[0])
    timer = Timer(window_s=0.1, clock=lambda: now_s[0], cpu=cpu)
    timer.rested_s(lambda: take(work_s), budget_s=budget_s, pause=pause)
    parts = sorted(seconds / period_s - 3 for seconds in pauses)
    assert parts == pytest.approx([index / count for index in range(count)])
