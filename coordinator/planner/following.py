"""Let a plan follow the unfreezing schedule where the job allows it and the simulator says that it pays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from coordinator.planner.effort import Effort
from coordinator.planner.phases.choice import choose_phases
from coordinator.planner.phases.reason import PhasesReason
from coordinator.planner.planned import Planned
from ringtune.errors import CapacityError, StorageError
from ringtune.jobs.job import Job
from ringtune.jobs.parts.placement import NEVER
from ringtune.schedule.plan import Plan


def with_phases(job: Job, planned: Planned, effort: Effort, check: Callable[[Plan], Planned]) -> Planned:
    """Give a run further placements where the job allows it and that is faster than to stay.

    Args:
        job: of the run.
        planned: with one placement.
        effort: how hard to look; without the simulator nothing is looked at.
        check: refuses a plan that does not fit, and tells the memory of one that does.
    """
    if job.placement.follow == NEVER or not effort.judged_actions:
        return planned
    if planned.choice is None or planned.profile is None or all(link.is_assumed for link in planned.profile.links):
        return planned
    better, reason = choose_phases(
        planned.plan,
        planned.profile,
        optimizer=job.train.optimizer,
        dtype=job.model.dtype,
        activations=job.memory.activations,
        with_replicas=job.placement.replicas != NEVER,
        clock=effort.clock(),
    )
    if better is None:
        return dataclasses.replace(planned, phases=reason)
    try:
        memory = check(better).memory
    except (CapacityError, StorageError) as error:
        return dataclasses.replace(planned, phases=PhasesReason(why_not=str(error)))
    return dataclasses.replace(planned, plan=better, memory=memory, phases=reason)
