"""Whether nodes keep their pace during a run: what their actions take, turn by turn, over what the profile says.

A node's *pace* in a turn is the recorded seconds of its works over those of the profile. What counts is how it
changes: a node of pace 1.1 from the start is one that the profile has wrong by a tenth, as the plan had. Each work has
a pace of its own, as the profile may have forwards wrong and backwards right, and a node has more of one and less of
the other when more trains. A node's change is that of all works together that it has had before. ::

    train turn         0      1     2  |   3     4     5     6
    pace of node b  (1.6)   1.0   1.1  |  1.1   2.2   2.1   2.0
                    begins  the usual one      `-- three turns in a row: node b is 1.98 times as slow

Here the seconds on the clock count, also where a quota holds: a throttled board computes as fast as ever while it may.

A node whose pace has changed has changed it for all works, also for those that it had none of: one that only ran frozen
blocks forward, in twice the usual time, would go backward in twice the usual time too.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ringtune.costs.links.recorded import RecordedLinks
from ringtune.costs.measured.link_pace import LinkWatch
from ringtune.costs.measured.recorded_times import RecordedProfile
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.costs.work_times import Work
from ringtune.schedule.actions import Action
from ringtune.schedule.course import Course
from ringtune.schedule.turns.turns import StepKind, Turn
from ringtune.schedule.units import Range

USUAL_TURNS: Final = 2
"""Train turns after the first one whose pace is the usual one of a node; of a work, the first ones that have it."""

LASTING_TURNS: Final = 3
"""A change counts when it lasts for so many train turns."""

CHANGED: Final = 1.25
"""A pace counts as changed when it is so many times the usual one, or the usual one so many times the pace."""


_OF_COMPUTING: Final = ("block_forward_s", "block_graph_s", "block_backward_s", "handling_s", "message_s_per_byte")
"""Seconds of a node's facts that depend on its pace, besides those of its works."""


class _Done(NamedTuple):
    node: str
    action: Action
    seconds: float


class PaceWatch:
    """Watches the pace of every node on one placement.

    Args:
        course: of the run.
        profile: that the placement was planned with.
        recompute: blocks whose backward runs them again.

    Attributes:
        links: the watch of the links between the nodes.
    """

    def __init__(self, course: Course, profile: Profile, *, recompute: Sequence[Range] = ()) -> None:
        self._course, self._profile, self._recompute = course, profile, recompute
        self._open: dict[int, tuple[Turn, list[_Done]]] = {}
        self._turn_of: dict[int, int] = {}
        self._kept: deque[tuple[Turn, list[_Done]]] = deque(maxlen=LASTING_TURNS)
        self._num_turns = 0
        self.links = LinkWatch(profile.links, usual_turns=USUAL_TURNS, lasting_turns=LASTING_TURNS)
        self._usual: dict[tuple[str, Work], list[float]] = {}
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
        self.links.turn_done()
        self._kept.append(found)
        self._num_turns += 1
        if self._num_turns == 1:
            return
        times: dict[str, tuple[float, float]] = {}
        for (node, work), (seconds, known_s) in self._recorded([found], self._profile).pace.items():
            usual = self._usual.setdefault((node, work), [])
            if len(usual) < USUAL_TURNS:
                usual.append(seconds / known_s)
                continue
            took_s, usual_s = times.get(node, (0.0, 0.0))
            times[node] = (took_s + seconds, usual_s + statistics.fmean(usual) * known_s)
        if self._num_turns > 1 + USUAL_TURNS:
            self._newest.append({node: took_s / usual_s for node, (took_s, usual_s) in times.items() if usual_s > 0})

    def changed(self) -> dict[str, float]:
        """The nodes whose pace has lastingly changed, each with how many times as long its actions take now."""
        if len(self._newest) < LASTING_TURNS:
            return {}
        found = {}
        for node in self._newest[-1]:
            ratios = [paces.get(node, 0.0) for paces in self._newest]
            if min(ratios) >= CHANGED or (min(ratios) > 0 and max(ratios) <= 1 / CHANGED):
                found[node] = statistics.fmean(ratios)
        return found

    def profile(self, links: RecordedLinks) -> Profile:
        """The profile with what actions took in the newest turns, and the rates of the links as transfers show them.

        Where the rate of a link has changed, the transfers of the newest turns alone say it.

        Args:
            links: with the transfers of the whole run.
        """
        factors = self.changed()
        nodes = tuple(_at_pace(node, factors.get(node.node, 1.0)) for node in self._profile.nodes)
        recorded = self._recorded(self._kept, dataclasses.replace(self._profile, nodes=nodes))
        recorded.links = links
        found = recorded.profile()
        if not (changed := self.links.changed()):
            return found
        newest = self.links.newest().links(found.links)
        return dataclasses.replace(
            found,
            links=tuple(
                new if (new.source, new.target) in changed else old
                for old, new in zip(found.links, newest, strict=True)
            ),
        )

    def _recorded(self, turns: Iterable[tuple[Turn, list[_Done]]], known: Profile) -> RecordedProfile:
        recorded = RecordedProfile(self._course, known, recompute=self._recompute)
        for turn, actions in turns:
            recorded.granted(turn)
            for node, action, seconds in actions:
                recorded.add(node, action, seconds)
        return recorded


def _at_pace(node: NodeFacts, factor: float) -> NodeFacts:
    """The facts of a node all of whose work takes so many times as long."""
    if factor == 1:
        return node
    quartiles = ("median_s", "low_s", "high_s")
    times = (
        dataclasses.replace(time, **{name: factor * getattr(time, name) for name in quartiles})
        for time in node.work_times
    )
    return dataclasses.replace(
        node, work_times=tuple(times), **{name: factor * getattr(node, name) for name in _OF_COMPUTING}
    )
