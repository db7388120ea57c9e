"""A plan as the planner hands it over: with the memory of its nodes, and with why it is as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.planner.choose import Choice
from coordinator.planner.explaining.cache import cache_price
from coordinator.planner.explaining.helpers import HelpersReason
from coordinator.planner.fitting.frozen import timed_otherwise
from coordinator.planner.phases.reason import PhasesReason
from coordinator.planner.replicating.reason import ReplicasReason
from ringtune.costs.memory.terms import MemoryEstimate
from ringtune.costs.profile import Profile
from ringtune.quantities import format_seconds
from ringtune.schedule.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan with the memory that each of its nodes needs.

    Attributes:
        plan: the plan.
        memory: what each node of the plan holds at most.
        choice: what the planner preferred it to; None for a plan that was made before.
        profile: what it was planned with; of alike nodes the times are equal.
        left_out: what the job asks for and the plan has not, each with its reason: numbers of micro-batches that the
            operations do not fit, helpers of hosts where nothing trains.
        helping: what the planner thought of helpers, where the job leaves them to it.
        replicas: what the planner thought of stages with several hosts; None where it did not look.
        phases: what it thought of slices that follow the schedule; None where it did not look.
        num_searched: layouts that were searched for it; 0 for a plan that was made before.
        search_s: seconds that this took.
    """

    plan: Plan
    memory: Mapping[str, MemoryEstimate]
    choice: Choice | None = None
    profile: Profile | None = None
    left_out: tuple[str, ...] = ()
    helping: HelpersReason | None = None
    replicas: ReplicasReason | None = None
    phases: PhasesReason | None = None
    num_searched: int = dataclasses.field(default=0, compare=False)
    search_s: float = dataclasses.field(default=0.0, compare=False)

    @property
    def effort_line(self) -> str:
        """How many layouts were searched, and how long that took; empty for a plan that was made before.

        Example: ``searched 412 layouts in 1.8 s``.
        """
        if not self.num_searched:
            return ""
        plural = "s" if self.num_searched > 1 else ""
        return f"searched {self.num_searched:,} layout{plural} in {format_seconds(self.search_s)}"

    @property
    def note(self) -> str:
        """What whoever sees the plan has to know: left out, kept on disks, cut by the clock; mostly empty."""
        cut_after_s = self.choice.cut_after_s if self.choice else None
        otherwise = timed_otherwise(self.plan.course, self.profile.nodes if self.profile else ())
        cut = [] if cut_after_s is None else [cut_note(cut_after_s)]
        return "; ".join([*self.left_out, *cache_price(self.plan), *([otherwise] if otherwise else []), *cut])

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes that each node of the plan holds at most."""
        return {node: estimate.total_bytes for node, estimate in self.memory.items()}


def cut_note(seconds: float) -> str:
    """Say that the clock ended the planning, and what follows."""
    return (
        f"planning was cut after {seconds:g} s (runtime.plan_s): this is the best plan found so far; with more time "
        "or on another machine it may be another one"
    )
