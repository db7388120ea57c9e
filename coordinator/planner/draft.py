"""A draft: the course of a job on its nodes, before its blocks have hosts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ringtune.costs.memory_sizes import DEFAULT_SETTINGS, MemorySettings
from ringtune.costs.profile import NodeFacts
from ringtune.job.job import Job
from ringtune.schedule.course import IN_STEP, Course, HelperSettings
from ringtune.schedule.placement import CREDITS, Placement, Rack, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import Range
from ringtune.schedule.versions import may_be_stale
from ringtune.techniques.activation_checkpointing import RECOMPUTE, SavingPolicy, SliceSaving, without_helped
from ringtune.techniques.offload import helped, helpers_by_host


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A course with the private blocks and credits of its placement, but without slices.

    Attributes:
        private_blocks: number of lowest blocks that each owner runs itself.
        saving: what slices may keep for their backwards.
        state_on_disk: whether the optimizer state of units that do not train now is in files.
        keeps_best: whether nodes keep the best result on their disks.
        has_files: whether the run has begun, so that its checkpoints may be on the disks already.
        copies: whether hosts keep the state at the end of the last turns, and copies of another host's; where all
            parameters train, copies of another host's checkpoints.
        has_room_for_all: whether a host's disk has to have room for such copies of all blocks that it does not host,
            whichever host is before it in the ring.
        helper_of: host -> the helper that fits the adapters of all its trainable blocks.
    """

    course: Course
    private_blocks: int = 0
    credits: int = CREDITS
    saving: SavingPolicy = field(default_factory=SavingPolicy)
    state_on_disk: bool = False
    keeps_best: bool = False
    has_files: bool = False
    copies: bool = False
    num_copies: int = 0
    racks: tuple[Rack, ...] = ()
    has_room_for_all: bool = False
    helper_of: Mapping[str, str] = field(default_factory=dict)
    helper_settings: HelperSettings = IN_STEP
    settings: MemorySettings = DEFAULT_SETTINGS

    @staticmethod
    def of(plan: Plan) -> Draft:
        """Return the draft of a plan; each slice keeps all activations, whatever the plan saves."""
        placement = plan.placement
        return Draft(
            course=plan.course,
            private_blocks=placement.private_blocks,
            credits=placement.credits,
            state_on_disk=placement.state_on_disk,
            copies=placement.copies,
            num_copies=placement.num_copies,
            racks=placement.racks,
        )

    def of_job(self, job: Job) -> Draft:
        """Copy the draft with the settings of a job, and with what nodes keep in its run."""
        return dataclasses.replace(self, keeps_best=job.keeps_best_on_disk, settings=MemorySettings.of_job(job))

    def with_choices(self, microbatches: int, wire_dtype: str) -> Draft:
        """Copy the draft with this number of micro-batches (0 = its own) and this wire dtype.

        With stale weights the credits become at least the number of micro-batches: two hosts need room for a whole item
        between them. Where all parameters train, they become at most the number of micro-batches, but not below 2: a
        forward waits for all earlier updates, so more items are never in flight, and hidden states are large.
        """
        course = dataclasses.replace(
            self.course, microbatches=microbatches or self.course.microbatches, wire_dtype=wire_dtype
        )
        least = course.microbatches if may_be_stale(course) else 1
        most = max(2, course.microbatches) if course.method.full_parameters else self.credits
        return dataclasses.replace(self, course=course, credits=max(min(self.credits, most), least))

    def with_helper_settings(self, course: Course) -> Course:
        """Copy a course as if helpers fitted every trainable block.

        Unchanged without helpers, or with settings of helpers that change no result.
        """
        if course.offload is not None or not self.helper_of:
            return course
        blocks = itertools.starmap(Range, course.trainable.ranges_within(0, course.num_blocks))
        return dataclasses.replace(course, offload=self.helper_settings.of_blocks(blocks))

    def may_host(self, node: str, start: int, stop: int) -> bool:
        """Whether a node may host blocks [start, stop).

        Where each user has adapters of their own, only nodes with a helper may host trainable blocks.
        """
        if not (self.helper_settings.has_users and self.course.num_steps) or node in self.helper_of:
            return True
        return not self.course.trainable.ranges_within(start, stop)

    def placed(self, slices: Sequence[Slice], savings: Mapping[str, SliceSaving] | None = None) -> Plan:
        """Make the plan with these slices, in ring order; they keep everything, but for ``savings`` by node."""
        course, recompute = self.saving.placed(self.course, slices, savings or {})
        placement = Placement(
            slices=tuple(slices),
            private_blocks=self.private_blocks,
            credits=self.credits,
            recompute=recompute,
            state_on_disk=self.state_on_disk,
            copies=self.copies,
            num_copies=self.num_copies,
            racks=self.racks,
        )
        plan = Plan.of(without_helped(course, placement.hosts, self.helper_of), placement)
        return helped(plan, self.helper_of, self.helper_settings)


def drafts_of(part: Plan, job: Job, *, has_files: bool = False) -> tuple[Draft, ...]:
    """Return the drafts for another placement of the rest of a run; ``has_files`` as in ``Draft``.

    Hosts have the helpers that they have now. The first draft keeps all activations. If blocks of the present placement
    run again, a second draft recomputes all trained blocks of a slice, so that more may fit. The caller checks memory
    with the blocks that really run again.
    """
    draft = dataclasses.replace(
        Draft.of(part),
        course=dataclasses.replace(part.course, offload=None),
        has_files=has_files,
        helper_of=helpers_by_host(part),
        helper_settings=part.course.helper_settings,
    ).of_job(job)
    return (draft, dataclasses.replace(draft, saving=SavingPolicy(RECOMPUTE))) if part.placement.recompute else (draft,)


N = TypeVar("N", int, str)


def nearest_chain(first: N, nodes: Iterable[N], seconds: Callable[[N, N], float]) -> list[N]:
    """Sort nodes: ``first`` first, then always the nearest of the rest."""
    chain, left = [first], set(nodes) - {first}
    while left:
        chain.append(min(left, key=lambda node: (seconds(chain[-1], node), node)))
        left.remove(chain[-1])
    return chain


def racks_of(nodes: Iterable[NodeFacts], num_copies: int, before: Iterable[Rack] = ()) -> tuple[Rack, ...]:
    """Return the racks of nodes, and those of ``before``, sorted, for the places of copies.

    There are none where copies have no number and racks decide nothing: all nodes share one, or no two do.
    """
    places = dict(before) | {node.node: node.rack for node in nodes}
    apart = {rack or f"/{node}" for node, rack in places.items()}
    decide = num_copies or 1 < len(apart) < len(places)
    return tuple(Rack(node, rack) for node, rack in sorted(places.items()) if rack) if decide else ()
