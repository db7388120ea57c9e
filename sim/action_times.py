"""How long each action takes on the virtual clock: a profile's medians, or what was recorded.

A recording of the very same run is replayed action by action, stragglers included. For another plan its samples are
pools: an action that was not recorded takes the time of one drawn from those of its node and kind, per block.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

from ringtune.costs.seconds import PlanCosts
from ringtune.schedule.lowering import Action, Op, Payload, lowest_with_graph
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, Turn, items


class ItemKind(NamedTuple):
    """What an action's time and memory depend on besides the action: equal for the items of a turn at one depth.

    Attributes:
        number: of its own for each kind that occurs, so that it is quick to look up by.
        kind: of the item.
        lowest: the lowest block that keeps a graph.
        sizes: padded tokens of each micro-batch.
    """

    number: int
    kind: StepKind
    lowest: int
    sizes: tuple[float, ...]


class Items:
    """Kind and sizes of every item that was granted and is not done.

    Args:
        costs: of the plan.

    Attributes:
        by_seq: the kind of each; asked for every action and message, so it is looked up without a call.
    """

    def __init__(self, costs: PlanCosts) -> None:
        self._costs = costs
        self._plan = costs.plan
        self.by_seq: dict[int, ItemKind] = {}
        self._known: dict[tuple[str, StepKind, int, int], ItemKind] = {}

    def granted(self, turn: Turn) -> None:
        """Note the items of a turn."""
        plan = self._plan.unfrozen_at(turn.unfreeze_at)
        for item in items(plan, turn):
            lowest = lowest_with_graph(plan, item.kind, item.step)
            key = (item.owner, item.kind, lowest, item.rows)
            if key not in self._known:
                rows = () if item.kind is StepKind.CHECKPOINT else self._plan.microbatch_sizes(item.rows)
                sizes = tuple(self._costs.size(item.owner, count, item.kind) for count in rows)
                self._known[key] = ItemKind(len(self._known), item.kind, lowest, sizes)
            self.by_seq[item.seq] = self._known[key]

    def forget(self, turn: Turn) -> None:
        """Drop the items of a turn that is done."""
        for seq in range(turn.first_seq, turn.end_seq):
            self.by_seq.pop(seq, None)

    def size(self, payload: str, seq: int, micro: int) -> float:
        """Padded tokens of a micro-batch; a head, whose ``seq`` is its turn, has none."""
        return 0.0 if payload == Payload.HEAD else self.by_seq[seq].sizes[micro]


class ProfileTimes:
    """Medians of a profile.

    Args:
        costs: of the plan.
        granted: the items of the run.
    """

    def __init__(self, costs: PlanCosts, granted: Items) -> None:
        self._costs, self._by_seq = costs, granted.by_seq
        self._known: dict[tuple[str, Op, int, int, int, int], float] = {}

    def __call__(self, node: str, action: Action) -> float:
        """Seconds of an action.

        Raises:
            PlanError: that work was not measured on the node.
        """
        op, seq, micro, start, stop, _, _ = action
        item = self._by_seq[seq]
        key = (node, op, micro, start, stop, item.number)
        found = self._known.get(key)
        if found is None:
            size = item.sizes[micro] if micro >= 0 else 0.0
            found = self._costs.action_s(node, action, size=size, lowest=item.lowest, kind=item.kind)
            self._known[key] = found
        return found


class RecordedTimes:
    """Samples of a recording, medians of a profile for what has none.

    Args:
        plan: of the run to be simulated.
        samples: (node, action, seconds) in the order of the recording.
        otherwise: times where a node has no sample of that kind.
        granted: the items of the run.
        same_run: whether the recording is of this very plan, so that actions are the same ones.
        seed: of the draws from the pools.
    """

    def __init__(
        self,
        plan: Plan,
        samples: Iterable[tuple[str, Action, float]],
        otherwise: ProfileTimes,
        granted: Items,
        *,
        same_run: bool,
        seed: int = 0,
    ) -> None:
        self._num_blocks, self._by_seq = plan.num_blocks, granted.by_seq
        self._otherwise, self._same_run = otherwise, same_run
        self._pools: dict[tuple[str, Op, bool, bool], list[float]] = {}
        self._random = random.Random(seed)  # noqa: S311 - draws samples, guards nothing
        found = tuple(samples)
        self._exact = {(node, action): seconds for node, action, seconds in found}
        trained = {action.seq for _, action, _ in found if action.op is Op.UPDATE}
        for node, action, seconds in found:
            kind = self._kind(node, action, action.seq in trained)
            self._pools.setdefault(kind, []).append(seconds / self._units(action))

    def __call__(self, node: str, action: Action) -> float:
        """Seconds of an action."""
        if self._same_run:
            exact = self._exact.get((node, action))
            if exact is not None:
                return exact
        pool = self._pools.get(self._kind(node, action, self._by_seq[action.seq].kind.has_update))
        return self._random.choice(pool) * self._units(action) if pool else self._otherwise(node, action)

    def _kind(self, node: str, action: Action, is_trained: bool) -> tuple[str, Op, bool, bool]:
        """What may stand for each other: heads of evaluations have no backward, the head's update is no block's."""
        return node, action.op, is_trained, action.start == self._num_blocks

    def _units(self, action: Action) -> int:
        return max(1, action.stop - action.start)
