"""Predict how often a run gathers scores, and what that takes."""

from __future__ import annotations

import dataclasses
from typing import Final

from coordinator.planner.predict.judge import ItemEnds, run_probe
from ringtune.costs.profile import Profile
from ringtune.costs.times.operation_shares import all_full, done_of
from ringtune.costs.times.seconds import CourseCosts
from ringtune.schedule.actions import Op
from ringtune.schedule.course import Course
from ringtune.schedule.extent import Owner
from ringtune.schedule.methods import Everything
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.boundaries import scores_are_due
from ringtune.schedule.turns.turns import Item, StepKind, turn_sequence
from ringtune.schedule.turns.versions import may_be_stale
from ringtune.schedule.units import EMBEDDING
from sim.accounts.items import Items

MOST_BATCHES: Final = 24
"""Batches that are simulated, of all owners together; of each at least two."""


def score_passes(course: Course) -> int:
    """How often a run gathers scores: 0 if never."""
    return sum(scores_are_due(course, step) for step in range(0, course.num_steps, course.local_iterations))


def score_pass_s(plan: Plan, profile: Profile, *, optimizer: str) -> float:
    """Predicted seconds of gathering scores once, by the simulator for some batches of each owner.

    All other batches are added by the formula, times what the simulator takes of it.

    Raises:
        DeadlineError: the virtual run does not end; says who waits for what.
        PlanError: a node was not measured, or a link is missing.
    """
    few = _with_few_batches(plan)
    formula_s, few_s = (_by_formula_s(one, profile, optimizer=optimizer) for one in (plan, few))
    return _simulated_s(few, profile, optimizer=optimizer) * (formula_s / few_s if few_s else 1.0)


def _with_few_batches(plan: Plan) -> Plan:
    """The plan of one step after scores of so few batches that they are simulated at once."""
    course = plan.course
    rows = course.batch_size * max(2, MOST_BATCHES // len(course.owners))
    owners = tuple(
        dataclasses.replace(owner, train_rows=min(owner.train_rows, rows), eval_rows=0, users=())
        for owner in course.owners
    )
    method = course.method if may_be_stale(course) else Everything()
    few = dataclasses.replace(
        course, method=method, owners=owners, num_steps=1, local_iterations=1, eval_every=0, checkpoint_every=0
    )
    return Plan.of(few, plan.placement)


def _simulated_s(plan: Plan, profile: Profile, *, optimizer: str) -> float:
    """Seconds on the virtual clock until the last batch is scored everywhere."""
    costs = CourseCosts.of(plan, profile, optimizer=optimizer)
    granted = Items(costs)
    observer = ItemEnds(granted)
    run_probe(plan, profile, costs, granted, observer)
    scored = [turn for turn in turn_sequence(plan.course) if turn.kind is StepKind.SCORE]
    return max(observer.ends_s[seq] for turn in scored for seq in range(turn.first_seq, turn.end_seq))


def _by_formula_s(plan: Plan, profile: Profile, *, optimizer: str) -> float:
    """Seconds of gathering scores once, by the formula.

    No update parts the batches, so they follow each other at the pace of the busiest node or uplink; the first one
    goes all the way alone.
    """
    costs = CourseCosts.of(plan, profile, optimizer=optimizer)
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
