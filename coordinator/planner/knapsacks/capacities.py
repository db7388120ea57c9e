"""From what a job asks to what each board may do: capacities for full and for forward-only operations.

Source: D2FT, section II-B (C^pf and C^po) and III-B (counts such as three full and one forward-only of five).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.planner.knapsacks.counts import Counts, check_counts, counts_of
from ringtune.jobs.operations import OperationsSettings
from ringtune.schedule.operations.choice import PRUNING_STEPS, BlockCapacity, Choice, Policy
from ringtune.schedule.placement import Slice


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
    each = _mean_cost(hosts, costs)
    counts = counts_of(settings, len(microbatch_sizes), each)
    check_counts(settings, counts, len(microbatch_sizes))
    subnets = 1 if settings.by_slice else subnets
    refresh = settings.refresh_rounds * local_iterations * owners
    return Choice(
        policy=settings.policy,
        subnets=subnets,
        capacities=(_capacity(counts, each, microbatch_sizes, subnets),),
        backward_score=settings.backward_score,
        forward_score=settings.forward_score,
        score_scale=settings.score_scale,
        refresh_steps=refresh or (PRUNING_STEPS if Policy(settings.policy).is_pruning else 0),
        groups=tuple((host.start, host.stop) for host in hosts) if settings.by_slice else (),
    )


def _mean_cost(hosts: Sequence[Slice], costs: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
    blocks = sum(host.num_blocks for host in hosts)
    forward, backward = (
        sum(costs[host.node][at] * host.num_blocks for host in hosts) / max(1, blocks) for at in (0, 1)
    )
    return forward, backward


def _capacity(counts: Counts, each: tuple[float, float], sizes: Sequence[int], subnets: int) -> BlockCapacity:
    forward, backward = (cost / subnets for cost in each)
    largest = sorted(sizes, reverse=True)
    return BlockCapacity(
        full=(forward + backward) * sum(largest[: counts.full]),
        forward_only=forward * sum(largest[: counts.forward_only]),
        forward=forward,
        backward=backward,
    )
