"""The choice of operations (D2FT): tables that a job gives, or capacities of boards, and the technique's record.

Capacities are numbers of micro-batches for which a subnet is full or forward-only. Counts give all boards nearly the
same busy time in a step, with the same total as equal counts. Example: two boards with equal slices, one twice as fast,
8 micro-batches, 60 % of the compute, a forward is 0.4 of full::

    board    full   forward-only   busy, in full operations of the slow board
    slow     2      3              3.2
    fast     6      1              3.2

Source: D2FT, section II-B (C^pf and C^po) and III-B (counts such as three full and one forward-only of five).
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ringtune.errors import JobError, PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.operation_tables import PRUNING_STEPS, BlockCapacity, Choice, Operations, Policy, TieBreak
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.techniques.base import ANEW, DecisionLines, Technique
from ringtune.techniques.operations import (
    OperationsSettings,
    check_model,
    check_operations,
    choice_lines,
    chosen_line,
    given_tables,
    job_subnets,
    operations_lines,
    operations_of,
    saved_lines,
    whole,
)


class OperationCounts(NamedTuple):
    """Numbers of full and forward-only operations of one subnet in one batch; all others are shortcuts."""

    full: int
    forward_only: int


def counts_of(settings: OperationsSettings, microbatches: int, each: tuple[float, float]) -> OperationCounts:
    """Counts of a job: its own, or as many whole full operations as fit ``compute``, then forward-only ones.

    ``each`` is the cost of a forward and of a backward.
    """
    if settings.policy == "standard":
        return OperationCounts(microbatches, 0)
    if settings.full is not None:
        return OperationCounts(settings.full, settings.forward_only or 0)
    if settings.compute is None:
        raise JobError(
            f"operations.policy = {settings.policy!r} needs to know how much is done; add operations.compute, such as "
            "0.6, or operations.full"
        )
    forward, both = each[0], each[0] + each[1]
    budget = settings.compute * microbatches * both
    full = min(microbatches, whole(budget, both))
    return OperationCounts(full, min(microbatches - full, whole(budget - full * both, forward)))


def check_counts(settings: OperationsSettings, counts: OperationCounts, microbatches: int) -> None:
    """Refuse counts above the number of micro-batches, and counts without a full operation; raises ``JobError``."""
    if sum(counts) > microbatches:
        raise JobError(
            f"operations.full = {counts.full} and operations.forward_only = {counts.forward_only} are more than the "
            f"{microbatches} micro-batches of a batch; lower them, or raise train.microbatches"
        )
    if counts.full or Policy(settings.policy).is_pruning:  # a share of all subnets need not be a whole micro-batch
        return
    if settings.compute is not None:
        raise JobError(
            f"operations.compute = {settings.compute} of {microbatches} micro-batches leaves nothing full, so nothing "
            f"would train; raise it to {1 / microbatches:.2g} at least, or raise train.microbatches"
        )
    raise JobError("operations.full is 0, so nothing would train; set it to 1 at least")


MIN_SHARE: Final = 0.95
"""The share of the possible compute below which ``balanced`` accepts no counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCost:
    """The costs of one host for one micro-batch, in seconds.

    Attributes:
        full_s: full operations of all its blocks.
        forward_s: forward-only ones of all its blocks.
    """

    node: str
    blocks: int
    full_s: float
    forward_s: float

    def busy_s(self, counts: OperationCounts) -> float:
        """Seconds of these operations."""
        return counts.full * self.full_s + counts.forward_only * self.forward_s

    def within(self, limit_s: float, microbatches: int) -> OperationCounts | None:
        """The counts with the longest busy time up to ``limit_s``; None if not even one full operation fits.

        At most one full operation is exchanged for forward-only ones.
        """
        most = min(microbatches, whole(limit_s, self.full_s))
        counts = []
        for full in (most, most - 1):
            rest = whole(limit_s - full * self.full_s, self.forward_s)
            counts.append(OperationCounts(full, min(microbatches - full, max(0, rest))))
        return max(
            (each for each in counts if each.full > 0), key=lambda each: (self.busy_s(each), each.full), default=None
        )


def balanced(boards: Sequence[HostCost], microbatches: int, most: float) -> dict[str, OperationCounts]:
    """Choose counts for each board with the smallest spread of busy seconds; raises ``JobError``.

    They do at least ``MIN_SHARE`` of the possible compute. The choice is exact: for each possible longest busy time all
    other boards get the counts that fill it best. ``most`` is the limit of all boards together, in full operations of
    one block for one micro-batch.
    """
    limits = sorted(
        {
            board.busy_s(OperationCounts(full, forward_only))
            for board in boards
            for full in range(1, microbatches + 1)
            for forward_only in range(microbatches - full + 1)
        }
    )
    stop = bisect.bisect_right(limits, most * (1 + 1e-9), key=lambda limit: _compute(boards, microbatches, limit))
    fitting = [limit for limit in limits[:stop] if _counts(boards, microbatches, limit)]
    if not fitting:
        raise JobError(
            f"operations.balance can't give each of {len(boards)} nodes one full micro-batch of {microbatches}; raise "
            "operations.compute or operations.full, or leave operations.balance out"
        )
    least = MIN_SHARE * _compute(boards, microbatches, fitting[-1])
    near = [limit for limit in fitting if _compute(boards, microbatches, limit) >= least]
    best = min(near, key=lambda limit: (math.ceil(100 * spread(boards, _counts(boards, microbatches, limit))), -limit))
    return _counts(boards, microbatches, best)


def spread(boards: Sequence[HostCost], counts: dict[str, OperationCounts]) -> float:
    """Longest minus shortest busy time, as a share of the longest."""
    busy = [board.busy_s(counts[board.node]) for board in boards]
    return (max(busy) - min(busy)) / max(busy)


def _counts(boards: Sequence[HostCost], microbatches: int, limit_s: float) -> dict[str, OperationCounts]:
    """Counts of all boards within a time; empty if a board has no full operation."""
    counts_of = {}
    for board in boards:
        counts = board.within(limit_s, microbatches)
        if counts is None:
            return {}
        counts_of[board.node] = counts
    return counts_of


def _compute(boards: Sequence[HostCost], microbatches: int, limit_s: float) -> float:
    counts = _counts(boards, microbatches, limit_s)
    return (
        math.fsum(board.blocks * board.busy_s(counts[board.node]) / board.full_s for board in boards) if counts else 0
    )


def choice_of(
    settings: OperationsSettings,
    course: Course,
    *,
    subnets: int,
    hosts: Sequence[Slice],
    costs: Mapping[str, tuple[float, float]],
) -> Choice:
    """Make the settings by which a run chooses its tables, from ``[operations]`` and the times of its boards.

    Args:
        settings: of the job.
        course: without the choice.
        subnets: of each block; with ``by_slice`` blocks have one.
        hosts: slices; empty ones are ignored.
        costs: by host, seconds of a forward and of a backward of one block for one row.
    """
    hosts, sizes = [host for host in hosts if host.num_blocks], course.microbatch_sizes()
    mean, subnets = _mean_cost(hosts, costs), 1 if settings.by_slice else subnets
    counts = counts_of(settings, len(sizes), mean)
    check_counts(settings, counts, len(sizes))
    pruning = Policy(settings.policy).is_pruning
    if settings.balance:
        by_node = _balanced(settings, counts, hosts, costs, len(sizes))
        host_of = {block: host.node for host in reversed(hosts) for block in range(host.start, host.stop)}
        nodes = (host_of.get(block, hosts[0].node) for block in range(course.num_blocks))  # private ones are not used
        capacities = tuple(_capacity(by_node[node], costs[node], sizes, subnets) for node in nodes)
    elif pruning:
        capacities = (_pruning_capacity(settings, counts, mean, sizes, subnets * course.num_blocks),)
    elif settings.compute is not None:
        capacities = (_share_capacity(settings.compute, mean, sizes, subnets),)
    else:
        capacities = (_capacity(counts, mean, sizes, subnets),)
    refresh = settings.refresh_rounds * course.local_iterations * len(course.owners)
    return Choice(
        policy=settings.policy,
        subnets=subnets,
        capacities=capacities,
        backward_score=settings.backward_score,
        forward_score=settings.forward_score,
        scored_weights=settings.scores,
        score_scale=settings.score_scale,
        ties=settings.ties,
        rotate=settings.rotate,
        is_counted=settings.full is not None and not pruning,
        refresh_steps=refresh or (PRUNING_STEPS if pruning else 0),
        groups=tuple((host.start, host.stop) for host in hosts) if settings.by_slice else (),
    )


def _balanced(
    settings: OperationsSettings,
    counts: OperationCounts,
    hosts: Sequence[Slice],
    costs: Mapping[str, tuple[float, float]],
    microbatches: int,
) -> dict[str, OperationCounts]:
    if Policy(settings.policy).is_pruning:
        raise JobError(
            f"operations.balance has no meaning with operations.policy = '{settings.policy}', whose budget is over all "
            "subnets; remove one of them"
        )
    boards = []
    for host in hosts:
        forward, both = costs[host.node][0] * host.num_blocks, sum(costs[host.node]) * host.num_blocks
        boards.append(HostCost(node=host.node, blocks=host.num_blocks, full_s=both, forward_s=forward))
    forward, backward = _mean_cost(hosts, costs)
    each = counts.full + counts.forward_only * forward / (forward + backward)
    if settings.compute is not None:
        each = settings.compute * microbatches
    return balanced(boards, microbatches, each * sum(board.blocks for board in boards))


def _pruning_capacity(
    settings: OperationsSettings, counts: OperationCounts, each: tuple[float, float], sizes: Sequence[int], subnets: int
) -> BlockCapacity:
    """The share of all subnets to keep, as a capacity of each; pruning has no forward-only operations."""
    count, forward_share = len(sizes), each[0] / sum(each)
    share = (counts.full + counts.forward_only * forward_share) / count
    share = share if settings.compute is None else settings.compute
    if whole(share * subnets, 1) < 1:
        raise JobError(
            f"operations with policy '{settings.policy}' leave {share:.2g} of {subnets} subnets, so none; raise "
            "operations.compute or operations.full"
        )
    return BlockCapacity(full=sum(each) * share * sum(sizes), forward_only=0, forward=each[0], backward=each[1])


def _mean_cost(hosts: Sequence[Slice], costs: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
    blocks = sum(host.num_blocks for host in hosts)
    forward, backward = (
        sum(costs[host.node][at] * host.num_blocks for host in hosts) / max(1, blocks) for at in (0, 1)
    )
    return forward, backward


def _capacity(counts: OperationCounts, each: tuple[float, float], sizes: Sequence[int], subnets: int) -> BlockCapacity:
    """The capacity for counts of micro-batches of mean rows."""
    forward, backward = (cost / subnets for cost in each)
    rows = sum(sizes) / len(sizes)
    return BlockCapacity(
        full=(forward + backward) * counts.full * rows,
        forward_only=forward * counts.forward_only * rows,
        forward=forward,
        backward=backward,
    )


def _share_capacity(compute: float, each: tuple[float, float], sizes: Sequence[int], subnets: int) -> BlockCapacity:
    """The capacity for a share of a batch's rows: most full rows that fit, forward-only ones of the rest."""
    forward, backward = (cost / subnets for cost in each)
    budget = compute * sum(sizes) * (forward + backward)
    full = _rows(sizes, whole(budget, forward + backward))
    rest = whole(budget - full * (forward + backward), forward)
    return BlockCapacity(
        full=(forward + backward) * full,
        forward_only=forward * _rows(sizes, min(rest, sum(sizes) - full)),
        forward=forward,
        backward=backward,
    )


def _rows(sizes: Sequence[int], most: int) -> int:
    sums = {0}
    for size in sizes:
        sums |= {rows + size for rows in sums if rows + size <= most}
    return max(sums)


_ANEW: Final = f"change it, or {ANEW}"


def with_tables(job: Any, course: Course, model: Any) -> Course:
    """Give a course the tables that its job names: the only one, or several in sequence.

    Raises:
        JobError: they are of another model.
        PlanError: they are of another course; names the difference.
    """
    tables = given_tables(job.operations)
    job_subnets(job, model)
    try:
        for origin in filter(None, (table.origin for table in tables)):
            origin.require(course.table_origin)
        if len(tables) == 1:
            return dataclasses.replace(course, operations=tables[0].operations)
        return dataclasses.replace(course, choice=Choice.given(tables))
    except PlanError as error:
        raise PlanError(f"operations.table does not fit this run: {error}") from error


_KEYS: Final = {
    "subnets": "heads",
    "groups": "by_slice",
    "scored_weights": "scores",
    "refresh_steps": "refresh_rounds",
} | {name: name for name in ("backward_score", "forward_score", "score_scale", "ties", "rotate")}
"""Fields of ``Choice`` -> the key of ``[operations]`` that sets each."""


def check_plan(job: Any, plan: Plan, model: Any) -> None:
    """Refuse a given plan with other operations than the job says; raises ``PlanError``.

    A plan may have a table if its job says nothing of operations. Capacities of subnets are compared with the times
    that the plan was made with.
    """
    course = plan.course
    if job.operations.table:
        expected = with_tables(job, dataclasses.replace(course, operations=None, choice=None), model)
        if (course.operations, course.choice) != (expected.operations, expected.choice):
            raise PlanError(f"the plan has other operations than the job's operations.table; {_ANEW}")
        return
    says, choice = job.operations.policy, course.choice
    has = choice.policy if choice else ""
    if job.operations.is_chosen and has != says:
        plans = f"operations.policy = {has}" if has else "no operations to choose"
        raise PlanError(f"the plan has {plans}, the job says {says}; {_ANEW}")
    if choice is None or choice.tables:
        return
    if not job.operations.is_chosen:
        raise PlanError(f"the plan has operations.policy = {has}, the job says {says}; {_ANEW}")
    again = job_choice(job, course, model, plan.placement.hosts, _costs_of(choice, plan.placement.hosts))
    for name, key in _KEYS.items():
        has_now, says_now = getattr(choice, name), getattr(again, name)
        if has_now != says_now:
            raise PlanError(f"the plan has {name} = {has_now}, the job says {says_now} (operations.{key}); {_ANEW}")
    if choice.is_counted != again.is_counted or not _are_alike(choice.capacities, again.capacities):
        raise PlanError(f"the plan's subnets may do more or less than operations.compute, full or balance say; {_ANEW}")


def _costs_of(choice: Choice, hosts: Sequence[Slice]) -> dict[str, tuple[float, float]]:
    """Seconds of a block with which a choice was made, for each host; pruning has one capacity for whole blocks."""
    count = 1 if choice.prunes else choice.subnets
    capacities = ((host.node, choice.capacity(host.start)) for host in hosts)
    return {node: (each.forward * count, each.backward * count) for node, each in capacities}


def _are_alike(first: Sequence[BlockCapacity], second: Sequence[BlockCapacity]) -> bool:
    pairs = zip(map(dataclasses.astuple, first), map(dataclasses.astuple, second), strict=False)
    return len(first) == len(second) and all(
        math.isclose(has, says, rel_tol=1e-9, abs_tol=1e-15) for pair in pairs for has, says in zip(*pair, strict=True)
    )


def job_choice(
    job: Any, course: Course, model: Any, hosts: Sequence[Slice], costs: Mapping[str, tuple[float, float]]
) -> Choice:
    """Return the choice of a job, as ``choice_of``; ``costs`` are of the nodes of ``hosts``."""
    return choice_of(operations_of(job), course, subnets=job_subnets(job, model).count, hosts=hosts, costs=costs)


_FORMER: Final[Mapping[str, object]] = {"ties": TieBreak.SPREAD.value, "rotate": False}
"""Keys of which another value was the former behaviour than the one that is now the default."""


def _unused_keys(job: Any) -> Sequence[str]:
    chosen = job.operations.is_chosen and Policy(job.operations.policy).breaks_ties
    return () if chosen else tuple(f"operations.{name}" for name in _FORMER)


def _check_changes(course: Course, values: Mapping[str, int | str]) -> None:
    """Refuse other batches where the plan has operation tables, which belong to its batches."""
    has_tables = course.operations is not None or (course.choice is not None and course.choice.tables)
    for key in ("batch_size", "microbatches"):
        if has_tables and values.get(key, getattr(course, key)) != getattr(course, key):
            raise PlanError(
                f"--change {key}={values[key]}: the plan has operation tables of batches with {key} = "
                f"{getattr(course, key)}; take the plan of a run without tables"
            )


def _without_node(
    plan: Plan, node: str, placements: Sequence[Placement]
) -> tuple[Mapping[str, object], Sequence[Placement]]:
    """Remove the batches of an owner from the tables of a plan."""

    def others(table: Operations) -> Operations:
        return dataclasses.replace(table, batches=tuple(entry for entry in table.batches if entry.owner != node))

    operations, choice = plan.course.operations and others(plan.course.operations), plan.course.choice
    if choice is not None:
        tables = (dataclasses.replace(entry, operations=others(entry.operations)) for entry in choice.tables)
        choice = dataclasses.replace(choice, tables=tuple(tables))
    return {"operations": operations, "choice": choice}, placements


TECHNIQUE: Final = Technique(
    name="operations",
    course_fields=("operations", "choice"),
    later_keys={
        f"operations.{name}": value for name, value in {**dataclasses.asdict(OperationsSettings()), **_FORMER}.items()
    },
    unused_keys=_unused_keys,
    check_job=lambda job: check_operations(job.operations, adapter=job.adapter, train=job.train),
    check_model=check_model,
    check_plan=check_plan,
    check_changes=_check_changes,
    without_node=_without_node,
    training_lines=lambda plan, _: choice_lines(plan),
    table_lines=operations_lines,
    decisions={
        "operations": DecisionLines(
            chosen_line, lambda entry: f"another operation table holds from step {int(entry['step']) + 1} on"
        )
    },
    report_lines=lambda report: saved_lines(report.get("operations")),
)
