"""Explain operations: what each node does of a batch and why, and what that saves of compute and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.planner.predict.plan_time import paid_after
from coordinator.planner.predict.score_time import score_pass_s, score_passes
from ringtune.costs.profile import Profile
from ringtune.costs.times.operation_shares import all_full, done_of, total
from ringtune.costs.times.seconds import CourseCosts
from ringtune.quantities import format_seconds
from ringtune.schedule.operations.choice import Choice, Policy
from ringtune.schedule.plan import Plan
from ringtune.schedule.spreading.expected import expected_table
from ringtune.schedule.turns.turns import StepKind, Turn, items


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCounts:
    """What the subnets of one node may do of a batch, in micro-batches.

    Attributes:
        node: its name.
        full: forward and backward.
        forward_only: the forward only.
        forward_share: what a forward costs of a full operation there.
    """

    node: str
    full: float
    forward_only: float
    forward_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationsReason:
    """What operations save, predicted, as shares of a step in which everything is full.

    Attributes:
        policy: that chooses them; empty where tables are given.
        is_assumed: whether the tables are not known yet.
        microbatches: of a batch.
        counts: of each host in ring order; none where tables are given.
        compute: seconds of blocks.
        sent: bytes between blocks.
        paper_compute: compute by the paper's count.
        paper_sent: communication by the paper's count.
        score_passes: how often scores are gathered.
        score_s: seconds of each pass, by the simulator.
        paid_after: steps after which one pass has paid, by the formula; None if it never does.
    """

    policy: str
    is_assumed: bool
    microbatches: int
    counts: tuple[NodeCounts, ...]
    compute: float
    sent: float
    paper_compute: float
    paper_sent: float
    score_passes: int = 0
    score_s: float = 0.0
    paid_after: int | None = None


def explain_operations(plan: Plan, profile: Profile, *, optimizer: str = "adamw") -> OperationsReason | None:
    """Explain the operations of a plan by the last steps of its first owner, where most trains; None if all is full.

    Args:
        plan: the plan.
        profile: that it was made with.
        optimizer: of the job.
    """
    course = plan.course
    if not course.may_skip or not course.num_steps:
        return None
    soonest = plan.soonest()
    with_table = soonest if course.operations else soonest.decided((), expected_table(soonest.course))
    costs = CourseCosts.of(plan, profile)
    turn = _last_steps(soonest)
    done, full = (
        total(each for item in items(one.course, turn) for each in done_of(one, item, costs).values())
        for one in (with_table, all_full(soonest))
    )
    choice = course.choice if course.operations is None else None
    passes = score_passes(course)
    pass_s = score_pass_s(plan, profile, optimizer=optimizer) if passes else 0.0
    return OperationsReason(
        score_passes=passes,
        score_s=pass_s,
        paid_after=paid_after(plan, profile, pass_s, optimizer=optimizer) if passes else None,
        policy=choice.policy if choice and not choice.tables else "",
        is_assumed=course.operations is None,
        microbatches=course.microbatches,
        counts=_counts(plan, choice) if choice else (),
        compute=done.work_s / full.work_s if full.work_s else 1.0,
        sent=done.sent_bytes / full.sent_bytes if full.sent_bytes else 1.0,
        paper_compute=done.paper_compute / full.paper_compute,
        paper_sent=done.paper_sent / full.paper_sent,
    )


def _last_steps(plan: Plan) -> Turn:
    """As many steps at the end of a run as its first owner has batches, at most a turn of them."""
    course, owner = plan.course, plan.course.owners[0]
    steps = min(course.num_steps, -(-owner.train_rows // course.batch_size))
    return Turn(
        index=0,
        kind=StepKind.TRAIN,
        owner=owner.node,
        round=0,
        first_seq=0,
        num_items=steps,
        first_step=course.num_steps - steps,
        first_batch=0,
    )


def _counts(plan: Plan, choice: Choice) -> tuple[NodeCounts, ...]:
    if not choice.capacities:
        return ()
    rows, found = plan.course.batch_size / plan.course.microbatches, []
    for host in plan.placement.hosts:
        each = choice.capacity(host.start)
        both = each.forward + each.backward
        found.append(
            NodeCounts(
                node=host.node,
                full=each.full / both / rows,
                forward_only=each.forward_only / each.forward / rows if each.forward else 0.0,
                forward_share=each.forward / both,
            )
        )
    return tuple(found)


def reason_lines(found: OperationsReason, seconds: Callable[[float], str] = format_seconds) -> list[str]:
    """Write the explanation as lines of text; ``seconds`` writes times."""
    assumed = ", assumed until the run has chosen" if found.is_assumed else ""
    lines = [
        f"  operations: {found.compute:.0%} of the compute and {found.sent:.0%} of the bytes of all full{assumed} "
        f"({found.paper_compute:.0%} and {found.paper_sent:.0%} by the paper's count)"
    ]
    if found.policy and Policy(found.policy).is_pruning:
        share = found.counts[0].full / found.microbatches
        lines.append(f"    {found.policy}: {share:.0%} of all subnets stay, for all micro-batches")
        return lines + _score_lines(found, seconds)
    lines += [
        f"    {each.node}: each subnet is full for {each.full:.3g} and forward-only for {each.forward_only:.3g} of "
        f"{found.microbatches} micro-batches; there a forward costs {each.forward_share:.0%} of a full operation"
        for each in found.counts
    ]
    return lines + _score_lines(found, seconds)


def _score_lines(found: OperationsReason, seconds: Callable[[float], str]) -> list[str]:
    if not found.score_passes:
        return []
    paid = "has never paid" if found.paid_after is None else f"has paid after {found.paid_after} steps"
    passes = "one pass" if found.score_passes == 1 else f"each of {found.score_passes} passes"
    takes = f"{passes} takes {seconds(found.score_s)} by the simulator"
    return [f"    scores come on top of all steps: {takes} and {paid} by the formula"]
