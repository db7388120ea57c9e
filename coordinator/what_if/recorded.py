"""Times that a real run recorded, for what-ifs: drawn for another plan, scaled where a node is faster or slower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from ringtune.costs.profile import NodeFacts, Profile
from ringtune.errors import PlanError
from ringtune.schedule.actions import Action
from ringtune.schedule.plan import Plan
from sim.recorded import Recording

Sample = tuple[str, Action, float]


class Times(TypedDict, total=False):
    """What ``sim.prediction.predict`` is given of a recording."""

    samples: tuple[Sample, ...]
    same_run: bool
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A recording of a run.

    Attributes:
        recording: its compute actions.
        plan: whose run it is, or was taken to be.
        is_of_plan: whether it is of that very plan, action by action.
        seed: of draws where the plan is another.
    """

    recording: Recording
    plan: Plan
    is_of_plan: bool
    seed: int = 0

    def options(self, plan: Plan, before: Profile, after: Profile, added: Sequence[tuple[str, str]]) -> Times:
        """Give a prediction the recorded times.

        Args:
            plan: to be predicted.
            before: the profile as it is.
            after: the profile that the plan is predicted with; a node in it may be faster than before.
            added: (name, like): a node that was not there takes the times of the one that it is like.

        Raises:
            PlanError: the micro-batches have another size, so that the times say nothing about them.
        """
        course, recorded = plan.course, self.plan.course
        sizes = [(each.microbatch_sizes()[0], each.max_length) for each in (recorded, course)]
        if sizes[0] != sizes[1]:
            raise PlanError(
                f"the recorded times are of micro-batches of {sizes[0][0]} x {sizes[0][1]} tokens, asked is about "
                f"{sizes[1][0]} x {sizes[1][1]}; leave out --trace, then the times of the profile are scaled"
            )
        old, new = before.by_name, after.by_name
        speeds = {name: _speed(old[name], new[name]) for name in old if name in new}
        samples = [(node, action, seconds / speeds.get(node, 1.0)) for node, action, seconds in self.recording.samples]
        for name, like in added:
            speed = _speed(old[like], new[name]) if like in old and name in new else 1.0
            samples += [(name, action, s / speed) for node, action, s in self.recording.samples if node == like]
        same_run = self.is_of_plan and plan.digest == self.plan.digest
        return Times(samples=tuple(samples), same_run=same_run, seed=self.seed)


def _speed(before: NodeFacts, after: NodeFacts) -> float:
    """How many times as fast a node computes as before, by its profile: 0.004 s after 0.008 s a block is 2."""
    old, new = (_some_s(node) for node in (before, after))
    return old / new if old and new else 1.0


def _some_s(node: NodeFacts) -> float:
    """Any time of the node that grows with all its others."""
    times: Mapping[str, float] = {str(point.work): point.median_s for point in node.work_times if point.median_s > 0}
    return times[min(times)] if times else node.block_forward_s
