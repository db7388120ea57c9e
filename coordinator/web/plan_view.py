"""What the page says of a plan: who hosts which blocks, in ring order, and what each node may and shall hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringtune.costs.profile import Profile
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.versions import ever_trained
from ringtune.schedule.units import Units


def plan_view(
    plan: Plan, placement_number: int, profile: Profile | None, needed_bytes: Mapping[str, int]
) -> dict[str, Any]:
    """Write a plan as the page reads it.

    Args:
        plan: of the run.
        placement_number: of the placement that holds; another one than the plan's counts as its first.
        profile: of the nodes; None = not known.
        needed_bytes: what each node needs at most, as far as it is known.
    """
    course = plan.course
    part = (
        plan.at(placement_number)
        if placement_number in {one.placement_number for one in plan.placements}
        else plan.at(plan.placement.placement_number)
    )
    budgets = {node.node: node.memory_bytes for node in profile.nodes} if profile else {}
    helps = {one.node: part.placement.host_of(one.start) for one in part.placement.joined_helpers()}
    nodes = []
    for name in plan.nodes:
        piece, owner = part.slice_of(name), course.owner(name)
        nodes.append(
            {
                "node": name,
                "start": piece.start,
                "stop": piece.stop,
                "rows": owner.train_rows if owner else 0,
                "owner": owner is not None,
                "helps": helps.get(name, ""),
                "needed_bytes": needed_bytes.get(name, 0),
                "budget_bytes": budgets.get(name, 0),
            }
        )
    return {
        "digest": plan.digest[:12],
        "method": course.method.name,
        "num_blocks": course.num_blocks,
        "num_steps": course.num_steps,
        "batch_size": course.batch_size,
        "microbatches": course.microbatches,
        "wire_dtype": course.wire_dtype,
        "placement_number": part.placement.placement_number,
        "private_blocks": part.placement.private_blocks,
        "ever_trained": [list(one) for one in ever_trained(course).ranges],
        "nodes": nodes,
    }


def trained_view(plan: Plan, step: int, depth: int) -> list[list[int]]:
    """List the units that a step trains, as half-open ranges; the head is unit ``num_blocks``.

    Args:
        plan: of the run.
        step: counted from 1.
        depth: of that step, where the top of the model trains.
    """
    course = plan.course
    units = (
        course.method.trained(course, max(0, step - 1))
        if course.method.full_parameters
        else Units.top(course.num_blocks, depth)
    )
    return [list(one) for one in units.ranges]
