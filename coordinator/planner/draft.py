"""A draft is what the planner has to place: a course whose blocks have no hosts yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ringtune.schedule.course import Course
from ringtune.schedule.helped import helped
from ringtune.schedule.helping.offload import IN_STEP, Manner, Offload
from ringtune.schedule.placement import CREDITS, Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.saving import Velora
from ringtune.schedule.slice_policy import NONE, RECOMPUTE
from ringtune.schedule.turns.versions import may_be_stale
from ringtune.schedule.units import Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A course with the private blocks and credits of its placement, but without slices.

    Attributes:
        course: the run.
        private_blocks: that each owner runs itself.
        credits: hidden states in flight per (link, boundary).
        activations: ``memory.activations`` of the job: what blocks keep for their backward.
        state_on_disk: whether the optimizer state of units that rest is in files.
        copies: whether hosts keep the ends of turns, and copies of one another's.
        velora: VeLoRA as ``auto`` could choose it for slices; None = it has nothing to do, or the course has it.
        may_project: whether ``auto`` may choose it.
        helper_of: host -> helper: who fits the adapters of all blocks of a host that may train.
        manner: how helpers fit.
    """

    course: Course
    private_blocks: int = 0
    credits: int = CREDITS
    activations: str = NONE
    velora: Velora | None = None
    state_on_disk: bool = False
    copies: bool = False
    may_project: bool = False
    helper_of: Mapping[str, str] = field(default_factory=dict)
    manner: Manner = IN_STEP

    def with_choices(self, microbatches: int, wire_dtype: str) -> Draft:
        """Copy the draft with so many micro-batches (0 = its own number) and this wire dtype.

        Where a method uses stale weights, credits become at least the number of micro-batches: two hosts must have
        room for a whole item between them. Where all parameters train they become no more than that, and 2: a forward
        sees all updates before, so that room for the next item is enough, and hidden states of large models take much.
        """
        course = dataclasses.replace(
            self.course, microbatches=microbatches or self.course.microbatches, wire_dtype=wire_dtype
        )
        least = course.microbatches if may_be_stale(course) else 1
        most = max(2, course.microbatches) if course.method.full_parameters else self.credits
        return dataclasses.replace(self, course=course, credits=max(min(self.credits, most), least))

    @property
    def projected_course(self) -> Course:
        """The course with VeLoRA in every block that can have it; the course itself where none can."""
        return self.course if self.velora is None else dataclasses.replace(self.course, velora=self.velora)

    def with_offload(self, course: Course) -> Course:
        """Copy a course with how helpers fit, as if they fitted each block that may train; without helpers as it is."""
        blocks = course.trainable.ranges_within(0, course.num_blocks)
        if course.offload is not None or not (self.helper_of and blocks) or self.manner.is_exact:
            return course
        offload = Offload(blocks=tuple(Range(*one) for one in blocks), **dataclasses.asdict(self.manner))
        return dataclasses.replace(course, offload=offload)

    def may_host(self, node: str, start: int, stop: int) -> bool:
        """Whether a node may host these blocks.

        Where each user has adapters of their own, a node without a helper hosts no blocks that may train.
        """
        if not (self.manner.has_users and self.course.num_steps) or node in self.helper_of:
            return True
        return not self.course.trainable.ranges_within(start, stop)

    def placed(
        self, slices: Iterable[Slice], recompute: tuple[Range, ...] = (), projected: tuple[Range, ...] = ()
    ) -> Plan:
        """Make the plan that places the draft on ``slices``.

        Args:
            slices: in ring order.
            recompute: blocks whose backward runs them again.
            projected: blocks for which ``auto`` chose VeLoRA.
        """
        placement = Placement(
            slices=tuple(slices),
            private_blocks=self.private_blocks,
            credits=self.credits,
            recompute=recompute,
            state_on_disk=self.state_on_disk,
            copies=self.copies,
        )
        course = self.course
        if self.velora is not None and projected:
            course = dataclasses.replace(course, velora=dataclasses.replace(self.velora, blocks=projected))
        plan = Plan.of(course, placement)
        return helped(plan, self.helper_of, self.manner)


def drafts_of(part: Plan) -> tuple[Draft, ...]:
    """What is to be placed anew of a run under way, in which the same blocks run again as before.

    Each slice is first taken to keep everything, which is safe. Where blocks run again, it is then taken to run all
    again that it trains, as more may fit so; whether a placement fits has to be looked at with the blocks that do.
    """
    placement = part.placement
    draft = Draft(
        course=part.course,
        private_blocks=placement.private_blocks,
        credits=placement.credits,
        copies=placement.copies,
    )
    return (draft, dataclasses.replace(draft, activations=RECOMPUTE)) if placement.recompute else (draft,)
