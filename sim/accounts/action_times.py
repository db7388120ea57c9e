"""How long each action takes on the virtual clock: a profile's medians, or what was recorded.

A recording of the very same run is replayed action by action, stragglers included. For another plan its samples are
pools: an action that was not recorded takes the time of one drawn from those of its node and kind, per block.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from ringtune.costs.times.seconds import CourseCosts
from ringtune.schedule.actions import Action, Op, Scope
from ringtune.schedule.course import Course
from sim.accounts.items import ItemKind, Items
from sim.accounts.memory_ledger import Effect


class ActionKind:
    """All actions of a node that are alike: seconds, how many ended, and their effect on memory.

    Attributes:
        node: whose.
        op: of all of them.
        seconds: of one, the profile's median; None until it is asked for.
        count: how many ended.
        busy_s: seconds of those.
        effect: what one does to memory; None if nothing.
    """

    __slots__ = ("busy_s", "count", "effect", "node", "op", "seconds")

    def __init__(self, node: str, op: Op, effect: Effect | None) -> None:
        self.node, self.op, self.effect = node, op, effect
        self.seconds: float | None = None
        self.busy_s = 0.0
        self.count = 0


class ProfileTimes:
    """Medians of a profile, and the kind of action that each node carries out.

    Args:
        costs: of the run.
        granted: the items of the run.
        effect: what an action of an item does to memory; None = nobody counts it.

    Attributes:
        kinds: every kind that there was.
        running: the kind of the action that each node began last.
    """

    def __init__(
        self,
        costs: CourseCosts,
        granted: Items,
        effect: Callable[[str, Action, ItemKind], Effect | None] | None = None,
    ) -> None:
        self._costs, self._by_seq, self._effect = costs, granted.by_seq, effect
        self.kinds: dict[tuple[str, Op, int, int, int, int], ActionKind] = {}
        self.running: dict[str, ActionKind] = {}

    def __call__(self, node: str, action: Action) -> float:
        """Seconds of an action that begins now.

        Raises:
            PlanError: that work was not measured on the node.
        """
        op, seq, micro, start, stop, _, _ = action
        found = self.kinds.get((node, op, micro, start, stop, self._by_seq[seq].number))
        if found is None or found.seconds is None:
            found = self.begins(node, action)
            found.seconds = self._seconds(node, action)
        self.running[node] = found
        return found.seconds

    def begins(self, node: str, action: Action) -> ActionKind:
        """Note the kind of an action that begins now."""
        op, seq, micro, start, stop, _, _ = action
        item = self._by_seq[seq]
        key = (node, op, micro, start, stop, item.number)
        found = self.kinds.get(key)
        if found is None:
            effect = self._effect(node, action, item) if self._effect is not None else None
            found = self.kinds[key] = ActionKind(node, op, effect)
        self.running[node] = found
        return found

    def _seconds(self, node: str, action: Action) -> float:
        item, micro = self._by_seq[action.seq], action.micro
        if micro < 0:
            return self._costs.action_s(node, action, size=0.0, lowest=self._costs.course.head, kind=item.kind)
        return self._costs.action_s(
            node,
            action,
            size=item.sizes[micro],
            lowest=item.lowest[micro],
            kind=item.kind,
            patterns=item.patterns(micro, action.start, action.stop) if item.rows else (),
            trained=item.trained,
        )


class RecordedTimes:
    """Times of actions from a recording, and from the medians of a profile for what has no sample.

    Args:
        course: the run to be simulated.
        samples: (node, action, seconds) in the order of the recording.
        medians: times where a node has no sample of that kind; told of every action.
        granted: the items of the run.
        same_run: whether the recording is of this very plan, so that actions are the same ones.
        seed: of the draws from the pools.
    """

    def __init__(
        self,
        course: Course,
        samples: Iterable[tuple[str, Action, float]],
        medians: ProfileTimes,
        granted: Items,
        *,
        same_run: bool,
        seed: int = 0,
    ) -> None:
        self._head, self._by_seq = course.head, granted.by_seq
        self._medians, self._same_run = medians, same_run
        self._pools: dict[tuple[str, Op, bool, bool], list[float]] = {}
        self._random = random.Random(seed)  # noqa: S311 - draws samples, guards nothing
        found = tuple(samples)
        self._exact = {(node, action): seconds for node, action, seconds in found}
        trained = {action.seq for _, action, _ in found if action.op is Op.UPDATE}
        for node, action, seconds in found:
            kind = self._kind(node, action, action.seq in trained)
            self._pools.setdefault(kind, []).append(seconds / self._units(action))

    def __call__(self, node: str, action: Action) -> float:
        """Seconds of an action that begins now.

        A replay of the very run takes the recorded time; else a drawn sample counts, else the median.
        """
        self._medians.begins(node, action)
        if self._same_run:
            exact = self._exact.get((node, action))
            if exact is not None:
                return exact
        pool = self._pools.get(self._kind(node, action, self._by_seq[action.seq].kind.has_update))
        return self._random.choice(pool) * self._units(action) if pool else self._medians(node, action)

    def _kind(self, node: str, action: Action, is_trained: bool) -> tuple[str, Op, bool, bool]:
        """The pool of an action: samples of one pool may stand for each other.

        Heads of evaluations have no backward, and the head's update is no block's.
        """
        return node, action.op, is_trained, action.start == self._head

    def _units(self, action: Action) -> int:
        return action.stop - action.start if action.op.scope in (Scope.RANGE, Scope.UNITS) else 1
