"""Let the hosts of a plan keep hidden states of rows that come again, where that saves work and there is room."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from coordinator.planner.planned import Planned
from ringtune.errors import PlanError, StorageError
from ringtune.jobs.job import Job
from ringtune.quantities import format_bytes
from ringtune.rounds.turns.expected_prefixes import expect_prefixes
from ringtune.schedule.passage import PrefixCache
from ringtune.schedule.plan import Plan
from ringtune.schedule.prefixes.kept import why_no_cache


def with_prefix_cache(job: Job, planned: Planned, fitting: Callable[[Plan], Planned]) -> Planned:
    """Return a plan with the cache that its job asks for, or without and with the reason.

    Args:
        job: of the run.
        planned: without a cache.
        fitting: returns what the nodes of a plan need; raises ``StorageError`` where a disk has no room.
    """
    plan, cache = planned.plan, job.cache.of_placement(job.model.dtype)
    if cache is None or not plan.course.num_steps:
        return planned
    problem = why_no_cache(plan.course, bool(plan.placement.helpers))
    if not problem:
        cached = Plan(plan.course, tuple(dataclasses.replace(one, cache=cache) for one in plan.placements))
        if not expect_prefixes(cached).entering:
            problem = (
                "no batch comes again while the blocks below stay frozen, or none has room; train longer on fewer "
                "rows, unfreeze later, or raise cache.max_bytes"
            )
    if not problem:
        try:
            found = fitting(cached)
            return dataclasses.replace(planned, plan=cached, memory=found.memory)
        except StorageError as error:
            problem = str(error)
    return dataclasses.replace(planned, left_out=(*planned.left_out, f"hidden states are not kept: {problem}"))


def check_given_cache(job: Job, plan: Plan) -> None:
    """Refuse a given plan whose hosts keep what the job does not ask for.

    Raises:
        PlanError: says what the plan has and what the job says.
    """
    wanted, remedy = job.cache.of_placement(job.model.dtype), "plan anew with 'ringtune plan JOB --save FILE'"
    for cache in (one.cache for one in plan.placements if one.cache is not None):
        if cache != wanted:
            says = "cache.prefix = 'off'" if wanted is None else _text(wanted)
            raise PlanError(f"the plan has hosts keep hidden states, {_text(cache)}; the job says {says}; {remedy}")


def _text(cache: PrefixCache) -> str:
    return f"{format_bytes(cache.max_bytes)} of {cache.dtype} at most"
