"""From what a job asks to what each board may do: capacities for full and for forward-only operations.

Source: D2FT, section II-B (C^pf and C^po) and III-B (counts such as three full and one forward-only of five).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.planner.knapsacks.balance import Board, balanced
from coordinator.planner.knapsacks.counts import Counts, check_counts, counts_of
from ringtune.errors import JobError
from ringtune.jobs.operations.settings import OperationsSettings
from ringtune.schedule.operations.choice import PRUNING_STEPS, BlockCapacity, Choice, Policy
from ringtune.schedule.placement import Slice
from ringtune.schedule.spreading.choosers import whole


def choice_of(
    settings: OperationsSettings,
    *,
    subnets: int,
    microbatch_sizes: tuple[int, ...],
    hosts: Sequence[Slice],
    costs: Mapping[str, tuple[float, float]],
    num_blocks: int,
    local_iterations: int,
    owners: int,
) -> Choice:
    """How a run chooses its tables, from what its job asks and what its boards need.

    Args:
        settings: ``[operations]`` of the job.
        subnets: of each block; with ``by_slice`` blocks have one.
        microbatch_sizes: rows of each micro-batch of a whole batch.
        hosts: who hosts which blocks.
        costs: of each host, seconds of a forward and of a backward of one block for one row.
        num_blocks: of the model.
        local_iterations: steps of one turn.
        owners: turns of one round.

    Raises:
        JobError: a budget or counts that do not fit the micro-batches, or under which nothing is ever full.
    """
    hosts = [host for host in hosts if host.num_blocks]
    mean, subnets = _mean_cost(hosts, costs), 1 if settings.by_slice else subnets
    counts = counts_of(settings, len(microbatch_sizes), mean)
    check_counts(settings, counts, len(microbatch_sizes))
    pruning = Policy(settings.policy).is_pruning
    if settings.balance:
        by_node = _balanced(settings, counts, hosts, costs, len(microbatch_sizes))
        each = {host.node: _capacity(by_node[host.node], costs[host.node], microbatch_sizes, subnets) for host in hosts}
        capacities = _by_block(each, hosts, num_blocks)
    elif pruning:
        capacities = (_pruning_capacity(settings, counts, mean, microbatch_sizes, subnets * num_blocks),)
    elif settings.compute is not None:
        capacities = (_share_capacity(settings.compute, mean, microbatch_sizes, subnets),)
    else:
        capacities = (_capacity(counts, mean, microbatch_sizes, subnets),)
    refresh = settings.refresh_rounds * local_iterations * owners
    return Choice(
        policy=settings.policy,
        subnets=subnets,
        capacities=capacities,
        backward_score=settings.backward_score,
        forward_score=settings.forward_score,
        score_scale=settings.score_scale,
        ties=settings.ties,
        is_counted=settings.full is not None and not pruning,
        refresh_steps=refresh or (PRUNING_STEPS if pruning else 0),
        groups=tuple((host.start, host.stop) for host in hosts) if settings.by_slice else (),
    )


def _balanced(
    settings: OperationsSettings,
    counts: Counts,
    hosts: Sequence[Slice],
    costs: Mapping[str, tuple[float, float]],
    microbatches: int,
) -> dict[str, Counts]:
    if Policy(settings.policy).is_pruning:
        raise JobError(
            f"operations.balance has no meaning with operations.policy = '{settings.policy}', whose budget is over all "
            "subnets; remove one of them"
        )
    boards = []
    for host in hosts:
        forward, both = costs[host.node][0] * host.num_blocks, sum(costs[host.node]) * host.num_blocks
        boards.append(Board(node=host.node, blocks=host.num_blocks, full_s=both, forward_s=forward))
    forward, backward = _mean_cost(hosts, costs)
    each = counts.full + counts.forward_only * forward / (forward + backward)
    if settings.compute is not None:
        each = settings.compute * microbatches
    return balanced(boards, microbatches, each * sum(board.blocks for board in boards))


def _by_block(
    capacities: Mapping[str, BlockCapacity], hosts: Sequence[Slice], num_blocks: int
) -> tuple[BlockCapacity, ...]:
    """The capacity of each block by its host; private blocks, which choose nothing, get that of the first host."""
    found = [capacities[hosts[0].node]] * num_blocks
    for host in hosts:
        found[host.start : host.stop] = [capacities[host.node]] * host.num_blocks
    return tuple(found)


def _pruning_capacity(
    settings: OperationsSettings, counts: Counts, each: tuple[float, float], sizes: Sequence[int], subnets: int
) -> BlockCapacity:
    """The share of all subnets that may stay, as a capacity of each; pruning has no forward-only operations."""
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


def _capacity(counts: Counts, each: tuple[float, float], sizes: Sequence[int], subnets: int) -> BlockCapacity:
    """So many micro-batches of mean rows."""
    forward, backward = (cost / subnets for cost in each)
    rows = sum(sizes) / len(sizes)
    return BlockCapacity(
        full=(forward + backward) * counts.full * rows,
        forward_only=forward * counts.forward_only * rows,
        forward=forward,
        backward=backward,
    )


def _share_capacity(compute: float, each: tuple[float, float], sizes: Sequence[int], subnets: int) -> BlockCapacity:
    """A share of a batch's rows: the most rows of full operations that fit it, and forward-only ones of the rest."""
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
    """The rows of those micro-batches that fill so many rows best."""
    found = {0}
    for size in sizes:
        found |= {rows + size for rows in found if rows + size <= most}
    return max(found)
