"""Whether what a node or link takes for the same work has lastingly changed, beyond its noise, turn by turn.

A turn gives each name its *pace*: seconds over those that are known for the work. Compared are only turns of one
*kind*, in which the name had the same to do. ::

    turn                 0      1     2     3     4  |   5     6     7
    kind                 x      x     x     y     y  |   y     y     y
    pace of b          (1.6)   1.0   1.1   1.5   1.6 |  3.1   3.0   3.2     the newest three of kind y
                       begins  `-- nothing to do with y  `-- 2.0 times as long as the usual 1.55

The pace counts as changed where each of the newest turns takes so many times as long as each of the usual ones, or the
other way round, and where the newest differ from the usual ones by more than noise makes likely. One turn in which a
board did other work besides would make all others look fast; of four usual turns and more the longest and the shortest
do not count, and with fewer nothing is called faster. Noise is what
neighbouring turns of one kind differ by, over all names together, as a run is too short to know it of each: with the
mean square ``d`` of differences of logarithms, a turn has the variance ``d / 2``, and a difference of the means of
``m`` usual and ``n`` newest turns that of ``d / 2 * (1 / m + 1 / n)``.
It has to be ``BEYOND_NOISE`` times its root. The largest difference does not count, as a change makes one itself.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Final, Generic, TypeVar

USUAL_TURNS: Final = 2
"""Least turns of a kind, after the run's first turn, that say what is usual."""

MOST_USUAL_TURNS: Final = 6
"""The first so many turns of a kind say what is usual: later ones might have drifted."""

_ENOUGH: Final = 4
"""Of so many usual turns the longest and the shortest do not count; with fewer nothing is called faster."""

LASTING_TURNS: Final = 3
"""A change counts when it lasts for so many turns."""

BEYOND_NOISE: Final = 4.0
"""Standard deviations by which the newest turns have to differ from the usual ones."""

Name = TypeVar("Name", bound=Hashable)

Works = Mapping[str, tuple[float, float]]
"""Of each work in a turn: seconds, and those that are known for it."""


class _Turns:
    """The turns of one name and kind: the first ones, the newest ones, and the number of all."""

    __slots__ = ("first", "newest", "number")

    def __init__(self) -> None:
        self.first: list[Works] = []
        self.newest: deque[Works] = deque(maxlen=LASTING_TURNS)
        self.number = 0

    def add(self, works: Works) -> None:
        if len(self.first) < MOST_USUAL_TURNS:
            self.first.append(works)
        self.newest.append(works)
        self.number += 1

    @property
    def usual(self) -> list[Works]:
        """The first turns, without the newest ones."""
        return self.first[: max(0, self.number - LASTING_TURNS)]


class LastingChanges(Generic[Name]):
    """Watches any number of names, which are all alike in their noise.

    Args:
        changed: a pace counts as changed when it is so many times the usual one, or the usual one so many times it.
    """

    def __init__(self, changed: float) -> None:
        self._changed = changed
        self._kinds: dict[tuple[Name, Hashable], _Turns] = {}
        self._now: dict[Name, Hashable] = {}
        self._squares, self._largest, self._differences = 0.0, 0.0, 0

    def add(self, name: Name, kind: Hashable, works: Works) -> None:
        """Add a turn of a name; works without seconds are left out."""
        works = {work: times for work, times in works.items() if min(times) > 0}
        if not works:
            return
        found = self._kinds.setdefault((name, kind), _Turns())
        difference = _log_ratio(works, [found.newest[-1]]) if found.newest else None
        if difference is not None:
            self._squares += difference**2
            self._largest = max(self._largest, difference**2)
            self._differences += 1
        found.add(works)
        self._now[name] = kind

    def changed(self) -> dict[Name, float]:
        """The names whose pace has lastingly changed, each with how many times as long the same work takes now."""
        ratios = {}
        for name, kind in self._now.items():
            turns = self._kinds[name, kind]
            if len(turns.usual) >= USUAL_TURNS and (ratio := self._lasting(turns)):
                ratios[name] = ratio
        return ratios

    def _lasting(self, turns: _Turns) -> float:
        """How many times as long the newest turns take; 0 where that is not lasting, or may be noise."""
        newest, usual = (
            sorted(log for works in each if (log := _log_ratio(works, turns.usual)) is not None)
            for each in (turns.newest, turns.usual)
        )
        if len(newest) < LASTING_TURNS:
            return 0.0
        change = statistics.fmean(newest) - statistics.median(usual)
        variance = max(0.0, self._squares - self._largest) / max(1, self._differences - 1) / 2
        noise = math.sqrt(variance * (1 / len(usual) + 1 / len(newest)))
        is_known_well = len(usual) >= _ENOUGH
        if is_known_well:
            usual = usual[1:-1]
        apart = max(newest[0] - usual[-1], usual[0] - newest[-1] if is_known_well else 0.0)
        return math.exp(change) if apart >= math.log(self._changed) and abs(change) >= BEYOND_NOISE * noise else 0.0


def _log_ratio(works: Works, usual: list[Works]) -> float | None:
    """The logarithm of how many times as long a turn took as the works that it shares with usual turns."""
    took_s = usual_s = 0.0
    for work, (seconds, known_s) in works.items():
        before = [turn[work] for turn in usual if work in turn]
        if before:
            took_s += seconds
            usual_s += known_s * sum(each_s for each_s, _ in before) / sum(each_s for _, each_s in before)
    return math.log(took_s / usual_s) if usual_s > 0 else None
