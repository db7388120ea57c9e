"""A curve of any length in few of its own points."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.web.thin_curve import Point, ThinCurve

FEW = settings(max_examples=40)
VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=120)


def curve_of(values: list[float], most: int = 8) -> ThinCurve:
    """A curve of values at the steps from 1 on."""
    curve = ThinCurve(most)
    for step, value in enumerate(values, 1):
        curve.add(step, value)
    return curve


def test_thin_curve_keeps_a_short_one_whole() -> None:
    """Fewer steps than buckets: each is there."""
    assert curve_of([3.0, 1.0, 2.0]).points() == [(1, 3.0), (2, 1.0), (3, 2.0)]


def test_thin_curve_shows_the_docstrings_example() -> None:
    """Of each stretch the lowest and the highest value stay, at their own steps."""
    curve = ThinCurve(4)
    for step, value in enumerate([5.0, 3.0, 4.0, 2.0, 9.0, 1.0, 2.0, 2.0, 7.0, 6.0, 8.0, 7.0, 3.0]):
        curve.add(step, value)
    assert curve.points() == [(0, 5.0), (3, 2.0), (4, 9.0), (5, 1.0), (9, 6.0), (10, 8.0), (12, 3.0)]


@FEW
@given(VALUES)
def test_thin_curve_has_true_points_in_order_and_the_extremes(values: list[float]) -> None:
    """Each point is one of the run's, none stands before another, and neither peak nor pit nor the end is lost."""
    points = curve_of(values).points()
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert all(values[step - 1] == value for step, value in points)
    shown = [value for _, value in points]
    assert (min(shown), max(shown)) == (min(values), max(values))
    assert points[-1] == (len(values), values[-1])


@FEW
@given(VALUES)
def test_thin_curve_is_bounded(values: list[float]) -> None:
    """Two points of each bucket and the newest one are all there can be."""
    assert len(curve_of(values, 8).points()) <= 2 * 8 + 1


@FEW
@given(VALUES, st.integers(1, 40))
def test_thin_curve_tells_those_who_follow_only_what_is_new(values: list[float], every: int) -> None:
    """Who takes settled points from where it was, and starts anew with each generation, has the whole curve."""
    had: list[Point] = []
    curve, generation = ThinCurve(8), -1
    for step, value in enumerate(values, 1):
        curve.add(step, value)
        if step % every == 0 or step == len(values):
            had = had if generation == curve.generation else []
            had += curve.settled(len(had))
            generation = curve.generation
    assert [*had, *curve.unsettled()] == curve.points()


@FEW
@given(VALUES, st.integers(0, 120))
def test_thin_curve_that_is_cut_has_nothing_after(values: list[float], last: int) -> None:
    """A run that goes back forgets its later steps, and goes on from there."""
    curve = curve_of(values)
    before = curve.points()
    curve.cut(last)
    assert set(curve.points()) <= {point for point in before if point.step <= last}
    curve.add(last + 1, 0.5)
    assert curve.points()[-1] == Point(last + 1, 0.5)


def test_thin_curve_takes_a_step_that_comes_again_as_a_cut() -> None:
    """The steps from there on are those of the second attempt."""
    curve = curve_of([5.0, 4.0, 3.0], 16)
    curve.add(2, 9.0)
    assert curve.points() == [(1, 5.0), (2, 9.0)]
