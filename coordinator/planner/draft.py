"""A draft is what the planner has to place: a course whose blocks have no hosts yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from ringtune.schedule.course import Course
from ringtune.schedule.placement import CREDITS, Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.versions import may_be_stale


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A course with the private blocks and credits of its placement, but without slices.

    Attributes:
        course: the run.
        private_blocks: that each owner runs itself.
        credits: hidden states in flight per (link, boundary).
    """

    course: Course
    private_blocks: int = 0
    credits: int = CREDITS

    def with_choices(self, microbatches: int, wire_dtype: str) -> Draft:
        """Copy the draft with so many micro-batches (0 = its own number) and this wire dtype.

        Where a method uses stale weights, credits become at least the number of micro-batches: two hosts must have
        room for a whole item between them.
        """
        course = dataclasses.replace(
            self.course, microbatches=microbatches or self.course.microbatches, wire_dtype=wire_dtype
        )
        least = course.microbatches if may_be_stale(course) else 1
        return dataclasses.replace(self, course=course, credits=max(self.credits, least))

    def placed(self, slices: Iterable[Slice]) -> Plan:
        """Make the plan that places the draft on ``slices``, which are in ring order."""
        placement = Placement(slices=tuple(slices), private_blocks=self.private_blocks, credits=self.credits)
        return Plan.of(self.course, placement)
