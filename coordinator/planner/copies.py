"""Whether the hosts of a plan keep copies of what they train, and what is said of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from coordinator.planner.planned import Planned
from ringtune.costs.memory.by_method.kept_turns import end_of_turn_bytes
from ringtune.costs.memory.share import Share
from ringtune.costs.memory.sizes import Sizes
from ringtune.costs.memory.terms import MemoryEstimate
from ringtune.costs.profile import NodeFacts
from ringtune.errors import CapacityError, PlanError
from ringtune.jobs.job import Job
from ringtune.jobs.parts.recovery import NEXT, NONE, SKIP
from ringtune.quantities import format_bytes
from ringtune.schedule.changing_hands.placements import why_it_stays
from ringtune.schedule.plan import Plan


def with_copies(
    job: Job, planned: Planned, facts: Mapping[str, NodeFacts], fitting: Callable[[Plan], Planned]
) -> Planned:
    """Return a plan with the copies that its job asks for, or without and with the reason.

    Args:
        job: of the run.
        planned: as it was planned or given.
        facts: of every node of the plan, by name.
        fitting: returns what the nodes of a plan need; raises ``CapacityError`` where one has no memory.

    Raises:
        PlanError: the job insists on copies, and the run stays on its placement.
        CapacityError: the job insists on copies, for which a node has no memory.
    """
    plan, wanted = planned.plan, job.recovery.copies
    if wanted == NONE or not plan.course.num_steps:
        return _as_said(planned, fitting, copies=False)
    if why := why_it_stays(plan.course, plan.placements):
        if wanted == NEXT:
            raise PlanError(f"the run can't go on without a lost node: {why}; set recovery.copies = 'none'")
        return _without(job, planned, facts, fitting, why)
    if wanted == NEXT:
        return _as_said(planned, fitting, copies=True)
    if len(plan.placement.hosts) == 1 and not (job.recovery.owners == SKIP and len(plan.course.owners) > 1):
        return _as_said(planned, fitting, copies=False)
    try:
        return _as_said(planned, fitting, copies=True)
    except CapacityError as error:
        return _without(job, planned, facts, fitting, str(error))


def copies_line(plan: Plan, memory: Mapping[str, MemoryEstimate]) -> list[str]:
    """Say what hosts keep of the ends of turns, and its bytes; nothing where they keep nothing."""
    if not plan.placement.copies:
        return []
    kept = {node: memory[node].parts()["kept"] for node in plan.nodes if node in memory}
    each = ", ".join(f"{node} {format_bytes(size)}" for node, size in kept.items() if size)
    return [f"hosts keep copies of the last turns in memory, to go on without a lost one: {each or 'nothing'}"]


def _as_said(planned: Planned, fitting: Callable[[Plan], Planned], *, copies: bool) -> Planned:
    plan = planned.plan
    if all(one.copies == copies for one in plan.placements):
        return planned
    changed = plan.with_copies(copies)
    return dataclasses.replace(planned, plan=changed, memory=fitting(changed).memory)


def _without(
    job: Job, planned: Planned, facts: Mapping[str, NodeFacts], fitting: Callable[[Plan], Planned], why: str
) -> Planned:
    """The plan without copies, with the reason and what they would be."""
    plan = planned.plan
    node = facts[plan.nodes[0]]
    sizes = Sizes.at(plan.course, node, optimizer=job.train.optimizer, dtype=job.model.dtype)
    most = max(end_of_turn_bytes(plan.course, Share.of(plan, one), sizes) for one in plan.nodes)
    said = (
        f"no copies are kept of what hosts train, {format_bytes(most)} a turn at most: {why}; checkpoints on the disks "
        "are there to go on from"
    )
    return dataclasses.replace(_as_said(planned, fitting, copies=False), left_out=(*planned.left_out, said))
