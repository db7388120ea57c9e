"""Whether nodes keep their pace during a run: what their actions take, turn by turn, over what the profile says.

A node's *pace* in a turn is the recorded seconds of its works over those of the profile. What counts is how it
changes: a node of pace 1.1 from the start is one that the profile has wrong by a tenth, as the plan had. Each work has
a pace of its own, as the profile may have forwards wrong and backwards right, and a node has more of one and less of
the other when more trains.

Turns are compared where the node had the same to do (``ringtune.costs.measured.lasting``): as many of its blocks
train, blocks below them do or do not, and it is the initiator or is not. A board with a quota of processor time that it
can't see takes 1.0 for frozen blocks, as it rests between them, and 2.0 when its own blocks train and it rests no more;
nothing has happened to it. As more trains elsewhere, it rests longer and looks faster, hardly ever slower. So that it
is *slower* is asked of all turns in which it did the same, that it is *faster* only of those in which all nodes did.

A change that begins with the very turn from which on more of the node's own blocks train is taken for theirs.

Here the seconds on the clock count, also where a quota holds: a throttled board computes as fast as ever while it may.

A node whose pace has changed has changed it for all works, also for those that it had none of: one that only ran frozen
blocks forward, in twice the usual time, would go backward in twice the usual time too.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple

from ringtune.costs.links.recorded import RecordedLinks
from ringtune.costs.measured.lasting import LASTING_TURNS, LastingChanges
from ringtune.costs.measured.link_pace import LinkWatch
from ringtune.costs.measured.recorded_times import RecordedProfile
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.schedule.actions import Action
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import StepKind, Turn
from ringtune.schedule.turns.versions import trained

CHANGED: Final = 1.25
"""A pace counts as changed when it is so many times the usual one, or the usual one so many times the pace."""


_OF_COMPUTING: Final = ("block_forward_s", "block_graph_s", "block_backward_s", "handling_s", "message_s_per_byte")
"""Seconds of a node's facts that depend on its pace, besides those of its works."""


def kinds_of_work(part: Plan, turn: Turn) -> tuple[Hashable, dict[str, Hashable]]:
    """What trains in a turn, at its first and its last step: in the whole ring, and as each host has it to do."""
    course = part.course.decided(turn.unfreeze_at)
    depth = tuple(trained(course, StepKind.TRAIN, step) for step in (turn.first_step, turn.end_step - 1))
    kinds: dict[str, Hashable] = {
        piece.node: (
            turn.owner == piece.node,
            *(
                (len(units.within(piece.start, piece.stop).blocks), bool(units.within(0, piece.start).blocks))
                for units in depth
            ),
        )
        for piece in part.placement.hosts
    }
    return depth, kinds


class _Done(NamedTuple):
    node: str
    action: Action
    seconds: float


class PaceWatch:
    """Watches the pace of every node on one placement.

    Args:
        part: of the run's plan that holds.
        profile: that the placement was planned with.

    Attributes:
        links: the watch of the links between the nodes.
    """

    def __init__(self, part: Plan, profile: Profile) -> None:
        self._part, self._profile = part, profile
        self._open: dict[int, tuple[Turn, list[_Done]]] = {}
        self._turn_of: dict[int, int] = {}
        self._kept: deque[tuple[Turn, list[_Done]]] = deque(maxlen=LASTING_TURNS)
        self._num_turns = 0
        self.links = LinkWatch(profile.links)
        self._same_work: LastingChanges[str] = LastingChanges(CHANGED)
        self._same_depth: LastingChanges[str] = LastingChanges(CHANGED)

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
        depth, kinds = kinds_of_work(self._part, turn)
        self.links.turn_done(kinds)
        self._kept.append(found)
        self._num_turns += 1
        if self._num_turns == 1:
            return
        works: dict[str, dict[str, tuple[float, float]]] = {}
        for (node, work), times in self._recorded([found], self._profile).pace.items():
            works.setdefault(node, {})[work] = times
        for node, times_of in works.items():
            self._same_work.add(node, kinds.get(node), times_of)
            self._same_depth.add(node, (depth, kinds.get(node)), times_of)

    def changed(self) -> dict[str, float]:
        """The nodes whose pace has lastingly changed, each with how many times as long its actions take now."""
        slower = {node: ratio for node, ratio in self._same_work.changed().items() if ratio > 1}
        return slower | {node: ratio for node, ratio in self._same_depth.changed().items() if ratio < 1}

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
        recorded = RecordedProfile(self._part.course, known, recompute=self._part.placement.recompute)
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
