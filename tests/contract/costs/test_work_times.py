"""Times between measured sizes, and what a timing may be."""

from __future__ import annotations

import pytest

from ringtune.costs.work_times import Work, WorkTable, WorkTime
from ringtune.errors import InvalidInputError, PlanError


def point(work: Work, rows: int, tokens: int, seconds: float) -> WorkTime:
    """A timing without spread."""
    return WorkTime(work=work, rows=rows, tokens=tokens, median_s=seconds, low_s=seconds, high_s=seconds, samples=3)


TABLE = WorkTable(
    [
        point(Work.FORWARD, 4, 64, 0.010),
        point(Work.FORWARD, 4, 32, 0.006),
        point(Work.FORWARD, 8, 64, 0.022),
        point(Work.HEAD, 4, 64, 0.004),
        point(Work.UPDATE, 0, 0, 0.003),
    ],
    where="node pi-3",
)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (128, 0.006),
        (256, 0.010),
        (512, 0.022),
        (192, 0.008),
        (384, 0.016),
        (1024, 0.046),
        (64, 0.004),
        (0, 0.002),
    ],
)
def test_work_table_is_linear_between_points_and_goes_on_outside(size: float, seconds: float) -> None:
    """Points are met exactly; beyond them the nearest line goes on."""
    assert TABLE.seconds(Work.FORWARD, size) == pytest.approx(seconds, rel=1e-12)


def test_work_table_never_falls_below_proportion() -> None:
    """Two noisy points may cross zero, a time may not."""
    steep = WorkTable([point(Work.HEAD, 1, 10, 0.001), point(Work.HEAD, 1, 20, 0.010)], where="node a")
    assert steep.seconds(Work.HEAD, 1) == pytest.approx(0.0001)


def test_work_table_does_not_fall_beyond_the_largest_size() -> None:
    """Where the larger of two noisy points is the faster one, the time stays as it is there."""
    falling = WorkTable([point(Work.DECODE, 1, 10, 0.003), point(Work.DECODE, 1, 20, 0.002)], where="node a")
    assert falling.seconds(Work.DECODE, 15) == pytest.approx(0.0025)
    assert falling.seconds(Work.DECODE, 20) == falling.seconds(Work.DECODE, 1000) == 0.002


def test_work_table_scales_a_single_point() -> None:
    """With one size measured, time is in proportion; without a size it is constant."""
    assert TABLE.seconds(Work.HEAD, 512) == pytest.approx(0.008)
    assert TABLE.seconds(Work.UPDATE, 512) == 0.003


def test_work_table_names_what_is_missing() -> None:
    """A profile without that work can't be guessed from."""
    assert Work.EMBED not in TABLE
    with pytest.raises(PlanError, match="node pi-3 has no measured time for 'embed'; measure anew"):
        TABLE.seconds(Work.EMBED, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"work": "nap"}, "work 'nap' is not one of embed"),
        ({"median_s": -1.0}, "forward.median_s is -1.0"),
        ({"median_s": float("nan")}, "forward.median_s is nan"),
        ({"median_s": 9.0}, "quartiles 0.1 and 0.3 do not enclose the median 9.0"),
        ({"samples": 0}, "forward.samples is 0"),
    ],
)
def test_work_time_refuses_impossible_values(change: dict[str, object], message: str) -> None:
    """What a peer sent is not trusted."""
    good = {"work": "forward", "rows": 1, "tokens": 8, "median_s": 0.2, "low_s": 0.1, "high_s": 0.3, "samples": 3}
    with pytest.raises(InvalidInputError) as caught:
        WorkTime(**{**good, **change})  # type: ignore[arg-type]
    assert message in str(caught.value)
