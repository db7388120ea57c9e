"""Another placement for a running run: without lost nodes, or after nodes and links have changed their speed.

Candidates are the present placement, and the best rings and stages with several hosts for all steps and for stretches
of the remaining ones. The simulator judges them with the times of the newest turns, for the remaining steps.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from coordinator.planner.draft import Draft, drafts_of, racks_of
from coordinator.planner.helpers import helper_maps
from coordinator.planner.judge import Ranking, simulated_steps_s
from coordinator.planner.limits import Effort
from coordinator.planner.make_plan import refuse_if_full
from coordinator.planner.memory import MemoryCaps
from coordinator.planner.phases import candidates
from coordinator.planner.replicas import choose_replicas, layout_text
from coordinator.planner.ring_costs import RingCosts, depth_of, ring_costs
from coordinator.planner.search import choose_plan, plan_of
from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.profile import Profile
from ringtune.errors import CapacityError, PlanError, StorageError
from ringtune.job.job import Job
from ringtune.quantities import format_seconds
from ringtune.schedule.course import Course
from ringtune.schedule.migration import sources
from ringtune.schedule.placement import Helper, Placement, Rack
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import in_ranges
from ringtune.schedule.stages import no_replicas
from ringtune.techniques.offload import helpers_by_host, helpers_of


def placed_without(
    part: Plan, job: Job, profile: Profile, lost: Collection[str], effort: Effort, *, goes_on: bool = False
) -> Placement:
    """Return the best ring of the nodes that are not lost; raises ``CapacityError`` or ``StorageError``.

    A host whose helper is lost trains its blocks itself, unless that would change the result or nothing fits then: it
    gets another helper in that case. ``part`` is the run's plan on its last placement. With ``goes_on`` the disks have
    files of the run already.
    """
    placement, living = part.placement, profile.without(lost)
    needs_helpers = part.course.helper_settings.needs_helpers
    also = ", with a helper for each host," if needs_helpers else ""
    error: CapacityError | StorageError = CapacityError(
        f"without it no ring of {', '.join(living.by_name)}{also} has memory for the model"
    )
    for draft in _helped_again(drafts_of(part, job, has_files=goes_on), living):
        choice = choose_plan([draft], living, effort=effort)
        if choice is None:
            continue
        new = plan_of(choice.best.draft, choice.costs, choice.best.ring).placement
        helpers = _helpers(part.course, new, draft.helper_of)
        if needs_helpers and not _are_whole(part.course, helpers):
            continue
        placed = dataclasses.replace(
            placement, slices=new.slices, credits=new.credits, helpers=helpers, racks=_racks(placement, profile)
        )
        alone = Plan.of(part.course, dataclasses.replace(placed, placement_number=0, first_turn=0))
        try:
            refuse_if_full(job, alone, living.by_name, goes_on=goes_on)
        except (CapacityError, StorageError) as refused:
            error = refused
        else:
            return placed
    raise error


def _racks(placement: Placement, profile: Profile) -> tuple[Rack, ...]:
    """Return the racks of a placement, with those of nodes that have joined since."""
    return racks_of(profile.nodes, placement.num_copies, placement.racks) if placement.copies else ()


def _are_whole(course: Course, helpers: Sequence[Helper]) -> bool:
    """Whether each block that helpers fit by the course has one."""
    helped = {block for helper in helpers for block in range(helper.start, helper.stop)}
    return course.offload is None or all(block in helped for part in course.offload.blocks for block in range(*part))


def _helped_again(drafts: Sequence[Draft], living: Profile) -> Iterator[Draft]:
    """Yield drafts with the helpers that are left, then with others in place of lost ones."""
    names = living.by_name
    lefts = [
        {host: helper for host, helper in draft.helper_of.items() if {host, helper} <= names.keys()} for draft in drafts
    ]
    for draft, left in zip(drafts, lefts, strict=True):
        if not draft.helper_settings.needs_helpers:
            yield dataclasses.replace(draft, helper_of=left)
    for draft, left in zip(drafts, lefts, strict=True):
        if draft.helper_of and len(names) > 1:
            for helper_of in helper_maps(living):
                yield dataclasses.replace(draft, helper_of={**helper_of, **left})


CERTAIN_SHARE: Final = 0.1
"""A smaller share of the remaining seconds may be an error of the prediction (``tests.bench.predictions``)."""


class PlacementProposal(NamedTuple):
    """Another placement for the remaining steps, compared with the present one.

    Seconds are those of the remaining steps, on the present placement and on the other one, and of the move.
    ``is_named``: it has helpers again that the job names, whether they make the steps faster or not.
    """

    placement: Placement
    text: str
    stays_s: float
    moves_s: float
    cost_s: float
    is_named: bool = False

    @property
    def is_worth_it(self) -> bool:
        """Whether the job names it, or gain less cost is more than ``CERTAIN_SHARE`` of the remaining seconds."""
        return self.is_named or self.stays_s - self.moves_s - self.cost_s > CERTAIN_SHARE * self.stays_s

    def line(self) -> str:
        """Return gain and cost as a line."""
        if self.is_named:
            return f"{self.text}, as offload.mode names them"
        gain = f"gains {format_seconds(self.stays_s - self.moves_s)} of {format_seconds(self.stays_s)}"
        return f"{self.text}: {gain} and costs {format_seconds(self.cost_s)}, as predicted from the newest turns"


def replanned(
    part: Plan,
    job: Job,
    profile: Profile,
    *,
    step: int,
    move_s: float,
    effort: Effort,
    unfreeze_at: tuple[int, ...] = (),
    began_as: Plan | None = None,
) -> PlacementProposal | None:
    """Find the best other placement for the remaining steps.

    Helpers with which the run began, and which are lost and back, are tried again; those that the job names are taken.

    If the losses decide what trains, seconds are predicted as if nothing more were unfrozen, and memory must suffice
    for all that may be.

    ``part`` is the run's plan on its present placement, ``step`` the number of optimizer steps done, ``move_s`` the
    seconds in which nodes build their slices at a move, ``unfreeze_at`` the run's decisions so far
    (``Turn.unfreeze_at``), ``began_as`` the run's plan on its first placement, by default ``part``.

    Returns:
        None if no step remains, or no other placement fits.
    """
    placement, now, effort = part.placement, part.decided(unfreeze_at), effort.begun()
    drafts = drafts_of(now, job, has_files=True)
    costs = _of_the_rest(ring_costs(drafts[0], profile), now.course, step)
    if not costs.depths:
        return None

    def seconds(plan: Plan) -> float:
        return simulated_steps_s(plan, profile, costs)

    drafts += () if now is part else drafts_of(part, job, has_files=True)
    shares = job.may_have_replicas and not no_replicas(part.course)
    placements = [
        other.placement for each in drafts for other in _others(each, job, profile, effort, costs, shares=shares)
    ]
    present, here = drafts[0].helper_of, profile.by_name.keys()
    first = helpers_by_host(began_as or part)
    again = {host: helper for host, helper in first.items() if {host, helper} <= here and present.get(host) != helper}
    pairs = [(other, present) for other in placements if other.slices != placement.slices]
    pairs += [(other, {**present, **again}) for other in (placement, *placements)] if again else []
    others = {
        (other.slices, helping): dataclasses.replace(
            placement, slices=other.slices, credits=other.credits, helpers=helping, racks=_racks(placement, profile)
        )
        for other, helper_of in pairs
        for helping in [_helpers(part.course, other, helper_of)]
        if (other.slices, helping) != (placement.slices, placement.helpers)
    }
    fitting = [other for other in others.values() if _fits(part, other, job, profile)]
    named_again = again.items() & job.offload.helpers.items()
    named = [
        other for other in fitting if named_again & {(other.host_of(each.start), each.node) for each in other.helpers}
    ]
    if not fitting:
        return None
    ranking = Ranking[Placement](lambda other: seconds(Plan.of(now.course, other))).judge_all(named or fitting)
    moves_s, best = ranking.ranked[0]
    cost_s = move_s + _fetching_s(now, best, job, profile, step)
    text = layout_text(Plan.of(now.course, best))
    if best.helpers != placement.helpers:
        helps = ", ".join(f"{helper.node} helps {best.host_of(helper.start)}" for helper in best.joined_helpers())
        text = f"{text}, where {helps or 'nobody helps'}"
    return PlacementProposal(best, text, seconds(now), moves_s, cost_s, bool(named))


def _helpers(course: Course, placement: Placement, helper_of: Mapping[str, str]) -> tuple[Helper, ...]:
    """Return the helpers of hosts for their blocks without projections, of which the course has hosts train."""
    helpers = helpers_of(course, placement.hosts, helper_of)
    return tuple(helper for helper in helpers if not in_ranges(helper.start, course.projected))


def _others(
    draft: Draft, job: Job, profile: Profile, effort: Effort, rest: RingCosts, *, shares: bool
) -> Iterator[Plan]:
    """Yield the best ring, with ``shares`` the best stages, for all steps, and for stretches of the remaining ones."""
    clock = effort.clock()
    caps = MemoryCaps(draft, profile.by_name)
    is_ring = draft.course.may_skip or draft.course.method.max_hosts == 1
    with_replicas = shares and not is_ring and not draft.helper_of
    yield from candidates(draft, rest, caps, with_replicas=with_replicas, clock=clock)
    choice = choose_plan([draft], profile, effort=effort)
    if choice is None:
        return
    ring = plan_of(choice.best.draft, choice.costs, choice.best.ring)
    yield ring
    if shares:
        clock = effort.clock()
        stages, _ = choose_replicas(ring, [draft], profile, is_over=clock.is_over)
        if stages is not None:
            yield stages


def _fits(part: Plan, other: Placement, job: Job, profile: Profile) -> bool:
    try:
        refuse_if_full(job, part.extended(other, part.placement.first_turn + 1), profile.by_name, goes_on=True)
    except (CapacityError, StorageError, PlanError):
        return False
    return True


def _of_the_rest(costs: RingCosts, course: Course, step: int) -> RingCosts:
    """Return the tables of a course with the remaining steps alone."""
    method = course.method.expected()
    counts = Counter(depth_of(method.trained(course, at)) for at in range(step, course.num_steps))
    return dataclasses.replace(costs, steps_at=tuple(counts[at] for at in range(len(costs.steps_at))))


def _fetching_s(part: Plan, other: Placement, job: Job, profile: Profile, step: int) -> float:
    """Seconds in which the slowest node fetches trained blocks from others."""
    links = profile.link_by_pair
    sizes = Sizes.of_job(job, part.course, profile.nodes[0])
    longest_s = 0.0
    for node in profile.by_name:
        found_s = 0.0
        for source in sources(part.course, part.placement, other, node, step):
            link = links.get((source.node, node))
            found_s += link.seconds((source.stop - source.start) * sizes.snapshot_bytes) if link is not None else 0.0
        longest_s = max(longest_s, found_s)
    return longest_s
