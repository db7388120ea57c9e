"""Operations of a course: given tables, or the rules by which the run chooses some.

Before a ring is found, all blocks count as alike, with the mean costs of the nodes. ``operations.balance`` and
``operations.by_slice`` depend on a subnet's host and are settled once the slices are known. All else of a choice is
independent of the slices, so no other placement trains other weights.

What operations save, and what their scores take, is explained here too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.planner.draft import Draft
from coordinator.planner.judge import paid_after, score_pass_s, score_passes
from ringtune.costs.action_costs import CourseCosts, all_full, done_of, total
from ringtune.costs.profile import ModelFacts, Profile
from ringtune.errors import JobError, PlanError
from ringtune.job.job import Job
from ringtune.quantities import format_bytes, format_seconds
from ringtune.schedule.actions import Op
from ringtune.schedule.batches import num_batches
from ringtune.schedule.course import Course
from ringtune.schedule.operation_tables import Choice, Policy, ScoredWeights, packed_length
from ringtune.schedule.placement import Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StepKind, Turn, items
from ringtune.techniques.operation_capacities import job_choice, with_tables
from ringtune.techniques.operations import choosers_of, expected_table, kept_subnets, operations_of, whole
from ringtune.transport.endpoints import MAX_MESSAGE_BYTES

_MEAN = "mean"
_BATCH_BYTES = 100
"""Bytes of JSON text per batch besides its codes: owner, id, position, brackets."""


def with_operations(job: Job, draft: Draft, model: ModelFacts, profile: Profile) -> Draft:
    """Give a draft with training steps the operations of its job; raises ``JobError`` or ``PlanError``."""
    course = draft.course
    if not (job.operations.is_any and course.num_steps):
        return draft
    if job.operations.table:
        return dataclasses.replace(draft, course=with_tables(job, course, model))
    mean = _mean(block_costs(course, profile))
    blocks = [Slice(node=_MEAN, start=at, stop=at + 1) for at in range(course.num_blocks)]
    hosts = blocks if job.operations.by_slice else [Slice(node=_MEAN, start=0, stop=course.num_blocks)]
    choice = job_choice(job, course, model, hosts, {_MEAN: mean})
    return dataclasses.replace(draft, course=_checked(dataclasses.replace(course, choice=choice)))


def with_fitting_operations(
    job: Job, drafts: Sequence[Draft], model: ModelFacts, profile: Profile
) -> tuple[list[Draft], tuple[str, ...]]:
    """Give drafts the operations of their job; drop those with a number of micro-batches that does not fit.

    Returns:
        The drafts, the reason for each dropped number of micro-batches, and of other scores than the job's.

    Raises:
        JobError: no draft is left, because of the counts.
        PlanError: no draft is left, because of given tables.
    """
    fitting, errors = [], dict[int, JobError | PlanError]()
    for draft in drafts:
        try:
            fitting.append(with_operations(job, draft, model, profile))
        except (JobError, PlanError) as error:
            errors.setdefault(draft.course.microbatches, error)
    if not fitting:
        raise next(iter(errors.values()))
    notes = [f"{count} micro-batches were not tried: {error}" for count, error in errors.items()]
    if fitting[0].course.choice is not None and operations_of(job) != job.operations:
        notes.append(
            f"operations are chosen by scores of adapters (operations.scores = {ScoredWeights.ADAPTER.value!r}): base "
            f"weights in {job.runtime.frozen} (runtime.frozen) have no gradients"
        )
    return fitting, tuple(notes)


def settled(job: Job, plan: Plan, model: ModelFacts, profile: Profile) -> Plan:
    """Return the plan with the operations that depend on its slices; the plan itself if none do."""
    operations, course = job.operations, plan.course
    if course.choice is None or not (operations.balance or operations.by_slice) or operations.table:
        return plan
    costs = block_costs(dataclasses.replace(course, choice=None), profile)
    if not operations.balance:
        costs = dict.fromkeys(costs, _mean(costs))
    choice = job_choice(job, course, model, plan.placement.hosts, costs)
    return Plan(_checked(dataclasses.replace(course, choice=choice)), plan.placements)


def _checked(course: Course) -> Course:
    """Return the course, or refuse tables that no message can carry, and pruning that may leave nothing to train."""
    choice = course.choice
    if choice is None:
        return course
    if not choice.prunes:
        _check_size(course, choice)
        return course
    keep, blocks = kept_subnets(course), [chooser.stop - chooser.start for chooser in choosers_of(course)]
    if whole(keep, 1) < min(blocks):
        what = "blocks, and the smallest slice has" if choice.by_slice else "subnets, and the smallest part is"
        raise JobError(
            f"operations.policy = '{choice.policy}' may keep {keep:.2g} of {sum(blocks)} {what} {min(blocks)}, so "
            "nothing would train; raise operations.compute or operations.full, or leave operations.by_slice out"
        )
    return course


def _check_size(course: Course, choice: Choice) -> None:
    """Refuse tables that may be too large for the message to a node."""
    batches = sum(num_batches(owner.train_rows, course.batch_size) for owner in course.owners)
    codes = course.microbatches * choice.passes(course.microbatches) * course.num_blocks * choice.subnets
    most = batches * (packed_length(codes) + _BATCH_BYTES)
    if choice.policy != Policy.STANDARD and most > MAX_MESSAGE_BYTES:
        raise JobError(
            f"operations of {batches:,} batches with {codes:,} operations each may be {format_bytes(most)} of text, a "
            f"message has room for {format_bytes(MAX_MESSAGE_BYTES)}; raise operations.heads (0 = whole blocks) or "
            "train.batch_size"
        )


def block_costs(course: Course, profile: Profile) -> dict[str, tuple[float, float]]:
    """Return for each node (forward, backward): seconds of one block for one row of a micro-batch.

    The forward is without graph; ``backward`` is the rest of a full operation: graph and backward.
    """
    costs = CourseCosts(course, profile)
    rows = course.microbatch_sizes()[0]
    sizes = [costs.size(owner.node, rows, StepKind.TRAIN) for owner in course.owners]
    size, top = sum(sizes) / len(sizes), course.head + 2

    def seconds(node: str, op: Op) -> float:
        lowest = top if op is Op.FORWARD_FREE else 0
        return costs.nodes[node].seconds(op, 1, 2, size=size, lowest=lowest, kind=StepKind.TRAIN) / rows

    costs_of = {}
    for node in costs.nodes:
        forward_s = seconds(node, Op.FORWARD_FREE)
        costs_of[node] = (forward_s, max(0.0, seconds(node, Op.FORWARD) + seconds(node, Op.BACKWARD) - forward_s))
    return costs_of


def _mean(costs: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
    forward_s, backward_s = zip(*costs.values(), strict=True)
    return sum(forward_s) / len(costs), sum(backward_s) / len(costs)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCounts:
    """Number of micro-batches of a batch for which each subnet of a node may be full, and forward-only.

    Attributes:
        forward_share: seconds of a forward over those of a full operation on this node.
    """

    node: str
    full: float
    forward_only: float
    forward_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationsReason:
    """Predicted cost of operations, as shares of a step in which every operation is full.

    Attributes:
        is_assumed: whether the run will choose the tables.
        compute: seconds of blocks.
        sent: bytes between blocks.
        score_s: seconds of each pass, by the simulator.
        paid_after: steps after which one pass is repaid, by the formula; None if never.
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

    def lines(self, seconds: Callable[[float], str] = format_seconds) -> list[str]:
        """Write the explanation as lines; ``seconds`` formats times."""
        assumed = ", assumed until the run has chosen" if self.is_assumed else ""
        lines = [
            f"  operations: {self.compute:.0%} of the compute and {self.sent:.0%} of the bytes of all full{assumed} "
            f"({self.paper_compute:.0%} and {self.paper_sent:.0%} by the paper's count)"
        ]
        if self.policy and Policy(self.policy).is_pruning:
            stay = self.counts[0].full / self.microbatches
            lines.append(f"    {self.policy}: {stay:.0%} of all subnets stay, for all micro-batches")
        else:
            for each in self.counts:
                counts = f"full for {each.full:.3g} and forward-only for {each.forward_only:.3g} of {self.microbatches}"
                share = f"there a forward costs {each.forward_share:.0%} of a full operation"
                lines.append(f"    {each.node}: each subnet is {counts} micro-batches; {share}")
        if self.score_passes:
            paid = "has never paid" if self.paid_after is None else f"has paid after {self.paid_after} steps"
            passes = "one pass" if self.score_passes == 1 else f"each of {self.score_passes} passes"
            takes = f"{passes} takes {seconds(self.score_s)} by the simulator"
            lines.append(f"    scores come on top of all steps: {takes} and {paid} by the formula")
        return lines


def explain_operations(plan: Plan, profile: Profile, *, optimizer: str = "adamw") -> OperationsReason | None:
    """Explain the operations of a plan by the last steps of its first owner, where most blocks train.

    None if all operations are full.
    """
    course = plan.course
    if not course.may_skip or not course.num_steps:
        return None
    soonest = plan.soonest()
    with_table = soonest if course.operations else soonest.decided((), expected_table(soonest.course))
    costs = CourseCosts.of(plan, profile)
    turn = _last_steps(soonest)
    done, full = (
        total(each for item in items(run.course, turn) for each in done_of(run, item, costs).values())
        for run in (with_table, all_full(soonest))
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
    """Return a turn at the end of the run with at most the number of batches that the first owner has."""
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
    rows, counts = plan.course.batch_size / plan.course.microbatches, []
    for host in plan.placement.hosts:
        each = choice.capacity(host.start)
        both = each.forward + each.backward
        counts.append(
            NodeCounts(
                node=host.node,
                full=each.full / both / rows,
                forward_only=each.forward_only / each.forward / rows if each.forward else 0.0,
                forward_share=each.forward / both,
            )
        )
    return tuple(counts)


def balance_line(own_s: float, equal_s: float, seconds: Callable[[float], str]) -> str:
    """Say what unequal counts gain, from the seconds of all steps with the nodes' own counts and with equal ones."""
    more = own_s / equal_s - 1 if equal_s else 0.0
    says = f"takes {more:.1%} longer" if more > 5e-4 else f"gains {-more:.1%}" if more < -5e-4 else "gains nothing"
    return f"    operations.balance {says}: {seconds(own_s)} for all steps, {seconds(equal_s)} with equal counts"
