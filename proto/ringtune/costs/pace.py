"""Whether nodes keep their pace during a run: what their actions take, turn by turn, over what the profile says.

A node's *pace* in a turn is the recorded seconds of its actions over those of the profile. What counts is how it
changes: a node of pace 1.1 from the start is one that the profile has wrong by a tenth, as the plan had. ::

    train turn         0      1     2  |   3     4     5     6
    pace of node b  (1.6)   1.0   1.1  |  1.1   2.2   2.1   2.0
                    begins  the usual one      `-- three turns in a row: node b is 1.98 times as slow

Here the seconds on the clock count, also where a quota holds: a throttled board computes as fast as ever while it may.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from ringtune.costs.links.recorded import RecordedLinks
from ringtune.costs.profile import Profile
from ringtune.costs.recorded_times import RecordedProfile
from ringtune.schedule.actions import Action
from ringtune.schedule.course import Course
from ringtune.schedule.turns import StepKind, Turn

USUAL_TURNS: Final = 2
"""Train turns after the first one whose pace is the usual one of a node."""

LASTING_TURNS: Final = 3
"""A change counts when it lasts for so many train turns."""

CHANGED: Final = 1.25
"""A pace counts as changed when it is so many times the usual one, or the usual one so many times the pace."""


class _Done(NamedTuple):
    node: str
    action: Action
    seconds: float


class PaceWatch:
    """Watches the pace of every node on one placement.

    Args:
        course: of the run.
        profile: that the placement was planned with.
    """

    def __init__(self, course: Course, profile: Profile) -> None:
        self._course, self._profile = course, profile
        self._open: dict[int, tuple[Turn, list[_Done]]] = {}
        self._turn_of: dict[int, int] = {}
        self._kept: deque[tuple[Turn, list[_Done]]] = deque(maxlen=LASTING_TURNS)
        self._num_turns = 0
        self._usual: dict[str, list[float]] = {}
        self._newest: deque[Mapping[str, float]] = deque(maxlen=LASTING_TURNS)

    def granted(self, turn: Turn) -> None:
        """Expect the actions of a turn; only train turns count."""
        if turn.kind is StepKind.TRAIN:
            self._open[turn.index] = (turn, [])
            self._turn_of |= dict.fromkeys(range(turn.first_seq, turn.end_seq), turn.index)

    def add(self, node: str, action: Action, seconds: float) -> None:
        """Add the seconds on the clock of an action of a node."""
        index = self._turn_of.get(action.seq)
        if index is not None:
            self._open[index][1].append(_Done(node, action, seconds))

    def turn_done(self, turn: Turn) -> None:
        """Note the pace of every node in a turn that is done."""
        found = self._open.pop(turn.index, None)
        if found is None:
            return
        for seq in range(turn.first_seq, turn.end_seq):
            self._turn_of.pop(seq, None)
        self._kept.append(found)
        recorded = self._recorded([found])
        paces = {node: seconds / known for node, (seconds, known) in recorded.pace.items() if known > 0}
        self._num_turns += 1
        if self._num_turns == 1:
            return
        if self._num_turns <= 1 + USUAL_TURNS:
            for node, pace in paces.items():
                self._usual.setdefault(node, []).append(pace)
        else:
            self._newest.append(paces)

    def changed(self) -> dict[str, float]:
        """The nodes whose pace has lastingly changed, each with how many times as long its actions take now."""
        if len(self._newest) < LASTING_TURNS:
            return {}
        found = {}
        for node, usual in self._usual.items():
            ratios = [paces.get(node, 0.0) / statistics.fmean(usual) for paces in self._newest]
            if min(ratios) >= CHANGED or (min(ratios) > 0 and max(ratios) <= 1 / CHANGED):
                found[node] = statistics.fmean(ratios)
        return found

    def profile(self, links: RecordedLinks) -> Profile:
        """The profile with what actions took in the newest turns, and the rates of the links as transfers show them."""
        recorded = self._recorded(self._kept)
        recorded.links = links
        return recorded.profile()

    def _recorded(self, turns: list[tuple[Turn, list[_Done]]] | deque[tuple[Turn, list[_Done]]]) -> RecordedProfile:
        recorded = RecordedProfile(self._course, self._profile)
        for turn, actions in turns:
            recorded.granted(turn)
            for node, action, seconds in actions:
                recorded.add(node, action, seconds)
        return recorded
