"""Predict what all steps of a plan take, and when its scores have paid."""

from __future__ import annotations

import dataclasses
import math

from coordinator.planner.draft import Draft
from coordinator.planner.fitting.slice_saving import planned_saving
from coordinator.planner.predict.judge import simulated_steps_s
from coordinator.planner.predict.ring_costs import ring_costs
from coordinator.planner.predict.step_time import Ring, job_s
from ringtune.costs.profile import Profile
from ringtune.costs.times.operation_shares import all_full
from ringtune.schedule.plan import Plan


def plan_job_s(plan: Plan, profile: Profile, *, optimizer: str) -> float:
    """Predicted seconds of all steps of a plan; those of scores come on top.

    They are by the formula, or by the simulator where stages have several hosts, of which the formula knows nothing.

    Raises:
        PlanError: a node was not measured, or a link is missing.
    """
    placement = plan.placement
    draft = Draft(course=plan.course, private_blocks=placement.private_blocks, credits=placement.credits)
    if placement.has_replicas:
        costs = ring_costs(draft, profile, optimizer=optimizer)
        return simulated_steps_s(plan, profile, costs, optimizer=optimizer)
    costs = dataclasses.replace(
        ring_costs(draft, profile, optimizer=optimizer),
        saving=lambda node, start, stop, above: planned_saving(plan, start, stop),
    )
    pieces = [piece for piece in placement.slices if piece.num_blocks]
    nodes = tuple(costs.names.index(piece.node) for piece in pieces)
    return job_s(costs, Ring(nodes=nodes, counts=tuple(piece.num_blocks for piece in pieces)))


def paid_after(plan: Plan, profile: Profile, pass_s: float, *, optimizer: str) -> int | None:
    """After how many steps operations have saved the seconds of one pass of scores; None if they save nothing."""
    all_steps_s = [plan_job_s(one, profile, optimizer=optimizer) for one in (all_full(plan), plan)]
    saved_s = (all_steps_s[0] - all_steps_s[1]) / plan.course.num_steps
    return math.ceil(pass_s / saved_s) if saved_s > 1e-9 * all_steps_s[0] / plan.course.num_steps else None
