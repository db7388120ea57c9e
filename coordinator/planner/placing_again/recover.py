"""Another placement of a run whose nodes are fewer, because some are lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from coordinator.planner.choose import choose_plan, plan_of
from coordinator.planner.draft import drafts_of
from coordinator.planner.effort import Effort
from coordinator.planner.make_plan import refuse_if_full
from ringtune.costs.profile import Profile
from ringtune.errors import CapacityError
from ringtune.jobs.job import Job
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan


def placed_without(part: Plan, job: Job, profile: Profile, lost: Collection[str], effort: Effort) -> Placement:
    """Find the best ring of the nodes that are left.

    Args:
        part: of the run's plan that held.
        job: of the run.
        profile: of its nodes and links; lost nodes in it are left out.
        lost: names of nodes.
        effort: how hard to look.

    Raises:
        CapacityError: the others have no memory for the model.
    """
    placement, living = part.placement, without(profile, lost)
    error = CapacityError(f"without it no ring of {', '.join(living.by_name)} has memory for the model")
    for draft in drafts_of(part):
        choice = choose_plan([draft], living, optimizer=job.train.optimizer, dtype=job.model.dtype, effort=effort)
        if choice is None:
            continue
        found = plan_of(choice.best.draft, choice.costs, choice.best.ring).placement
        placed = dataclasses.replace(placement, slices=found.slices, credits=found.credits)
        alone = Plan.of(part.course, dataclasses.replace(placed, placement_number=0, first_turn=0))
        try:
            refuse_if_full(job, alone, living.by_name)
        except CapacityError as refused:
            error = refused
        else:
            return placed
    raise error


def without(profile: Profile, lost: Collection[str]) -> Profile:
    """The profile of the nodes that are left, and of the links between them."""
    return dataclasses.replace(
        profile,
        nodes=tuple(node for node in profile.nodes if node.node not in lost),
        links=tuple(link for link in profile.links if not {link.source, link.target} & set(lost)),
    )
