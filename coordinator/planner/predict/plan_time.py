"""Predict by the formula what all steps of a plan take, what its scores take, and when those have paid."""

from __future__ import annotations

import math

from coordinator.planner.draft import Draft
from coordinator.planner.predict.ring_costs import ring_costs
from coordinator.planner.predict.step_time import Ring, job_s
from ringtune.costs.operation_shares import all_full, done_of
from ringtune.costs.profile import Profile
from ringtune.costs.seconds import CourseCosts
from ringtune.schedule.actions import Op
from ringtune.schedule.boundaries import scores_are_due
from ringtune.schedule.course import Course
from ringtune.schedule.extent import Owner
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, StepKind
from ringtune.schedule.units import EMBEDDING


def plan_job_s(plan: Plan, profile: Profile, *, optimizer: str) -> float:
    """Predicted seconds of all steps of a plan; those of scores come on top.

    Raises:
        PlanError: a node was not measured, or a link is missing.
    """
    placement = plan.placement
    draft = Draft(course=plan.course, private_blocks=placement.private_blocks, credits=placement.credits)
    costs = ring_costs(draft, profile, optimizer=optimizer)
    pieces = [piece for piece in placement.slices if piece.num_blocks]
    nodes = tuple(costs.names.index(piece.node) for piece in pieces)
    return job_s(costs, Ring(nodes=nodes, counts=tuple(piece.num_blocks for piece in pieces)))


def score_passes(course: Course) -> int:
    """How often a run gathers scores: 0 if never."""
    return sum(scores_are_due(course, step) for step in range(0, course.num_steps, course.local_iterations))


def score_pass_s(plan: Plan, profile: Profile, *, optimizer: str) -> float:
    """Predicted seconds of gathering scores once.

    No update parts the batches, so they follow each other at the pace of the busiest node or uplink; the first one
    goes all the way alone.

    Raises:
        PlanError: a node was not measured.
    """
    costs = CourseCosts(plan.course, profile, nodes=plan.nodes, optimizer=optimizer)
    uplinks: dict[str, float] = {}
    for link in profile.links:
        uplinks[link.source] = max(uplinks.get(link.source, 0.0), link.rate_bytes_per_s)
    seconds = 0.0
    for owner in plan.course.owners:
        busy, sent = _of_item(plan, owner, costs)
        wires = [sent[node] / uplinks[node] for node in sent if uplinks.get(node)]
        seconds += plan.course.num_scored(owner) * max([*busy.values(), *wires])
        if owner is plan.course.owners[0]:
            seconds += (sum(busy.values()) - max(busy.values())) / plan.course.microbatches
    return seconds


def _of_item(plan: Plan, owner: Owner, costs: CourseCosts) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds that each node computes for a batch that is scored, and bytes that it sends."""
    course, rows = plan.course, plan.course.batch_rows(owner)
    item = Item(seq=0, kind=StepKind.SCORE, step=0, owner=owner.node, batch=0, rows=rows, turn=0)
    done = done_of(all_full(plan), item, costs)
    busy = {node: each.work_s for node, each in done.items()}
    for size in course.microbatch_sizes(rows):
        tokens = costs.size(owner.node, size, StepKind.SCORE)
        for op, unit in ((Op.EMBED, EMBEDDING), (Op.HEAD, course.head)):
            busy[owner.node] += costs.nodes[owner.node].seconds(
                op, unit, unit + 1, size=tokens, lowest=course.trainable.lowest, kind=StepKind.SCORE
            )
    return busy, {node: each.sent_bytes for node, each in done.items()}


def paid_after(plan: Plan, profile: Profile, pass_s: float, *, optimizer: str) -> int | None:
    """After how many steps operations have saved the seconds of one pass of scores; None if they save nothing."""
    all_steps_s = [plan_job_s(one, profile, optimizer=optimizer) for one in (all_full(plan), plan)]
    saved_s = (all_steps_s[0] - all_steps_s[1]) / plan.course.num_steps
    return math.ceil(pass_s / saved_s) if saved_s > 1e-9 * all_steps_s[0] / plan.course.num_steps else None
