"""A curve of any length in a bounded number of its own points: of each stretch of steps the lowest and the highest.

::

    steps    0 1 2 3 | 4 5 6 7 | 8 9 ...        one bucket = a stretch of steps of one width
    values   5 3 4 2 | 9 1 2 2 |
    points   (0,5) (3,2)   (4,9) (5,1)          each is a point of the curve; a spike is never lost

When there are too many buckets, neighbours are merged and the width doubles, so a point costs constant time on average.
Points of all buckets but the last are settled: whoever has them needs only what came since, until ``generation``
changes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

MOST_BUCKETS: Final = 512


class Point(NamedTuple):
    """One value of a curve, at a step."""

    step: int
    value: float


class _Bucket(NamedTuple):
    place: int
    low: Point
    high: Point

    def with_point(self, point: Point) -> _Bucket:
        low = point if point.value < self.low.value else self.low
        high = point if point.value > self.high.value else self.high
        return _Bucket(self.place, low, high)

    @property
    def points(self) -> list[Point]:
        return [self.low] if self.low == self.high else sorted((self.low, self.high))


class ThinCurve:
    """Keeps the points of a curve that show its shape.

    Args:
        most_buckets: at most two points are kept of each.

    Attributes:
        generation: counts how often settled points became others.
        last: the newest point, which is always shown.
    """

    def __init__(self, most_buckets: int = MOST_BUCKETS) -> None:
        self._most = most_buckets
        self._width = 1
        self._buckets: list[_Bucket] = []
        self._settled: list[Point] = []
        self.generation = 0
        self.last: Point | None = None

    def add(self, step: int, value: float) -> None:
        """Add a point; one whose step is not above the last one replaces what the curve has from that step on."""
        if self.last is not None and step <= self.last.step:
            self.cut(step - 1)
        point, place = Point(step, value), step // self._width
        self.last = point
        if self._buckets and self._buckets[-1].place == place:
            self._buckets[-1] = self._buckets[-1].with_point(point)
            return
        if self._buckets:
            self._settled += self._buckets[-1].points
        self._buckets.append(_Bucket(place, point, point))
        if len(self._buckets) > self._most:
            self._merge()

    def cut(self, last_step: int) -> None:
        """Forget the points after ``last_step``, as far as they are kept."""
        self._buckets = [
            _Bucket(bucket.place, min(points, key=_value), max(points, key=_value))
            for bucket in self._buckets
            if (points := [point for point in bucket.points if point.step <= last_step])
        ]
        kept = [point for bucket in self._buckets for point in bucket.points]
        self.last = kept[-1] if kept else None
        self._settle()

    def settled(self, start: int = 0) -> list[Point]:
        """List the points that stay until ``generation`` changes, from the ``start``-th on."""
        return self._settled[start:]

    def unsettled(self) -> list[Point]:
        """List the points that the next one may replace: those of the last bucket, and the newest."""
        points = self._buckets[-1].points if self._buckets else []
        return points if self.last is None or self.last in points else [*points, self.last]

    def points(self) -> list[Point]:
        """List all points, in the order of their steps."""
        return [*self._settled, *self.unsettled()]

    def _merge(self) -> None:
        self._width *= 2
        merged: list[_Bucket] = []
        for bucket in self._buckets:
            place = bucket.place // 2
            if merged and merged[-1].place == place:
                merged[-1] = merged[-1].with_point(bucket.low).with_point(bucket.high)
            else:
                merged.append(bucket._replace(place=place))
        self._buckets = merged
        self._settle()

    def _settle(self) -> None:
        self._settled = [point for bucket in self._buckets[:-1] for point in bucket.points]
        self.generation += 1


def _value(point: Point) -> float:
    return point.value
