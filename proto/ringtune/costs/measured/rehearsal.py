"""The rehearsal of a job: a few steps of the very ring, whose results are thrown away, to learn what actions take.

Works that are timed one by one miss what a ring adds: neighbours in the same memory, threads that send while others
compute, and a quota that all of them share. So ``ringtune measure`` ends with a rehearsal, and corrects its times by
what the rehearsal's actions took, as a run corrects them for the next one.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping
from typing import Final

from ringtune.costs.profile import NodeFacts, Profile
from ringtune.costs.work_times import BLOCK_WORKS, Work, WorkTable, WorkTime
from ringtune.jobs.job import Job
from ringtune.schedule.operations.choice import Policy

SKIPPED_ITEMS: Final = 4
"""First items of a rehearsal that do not count: kernels, caches and connections are used for the first time in them."""

REHEARSAL_S: Final = 60.0
"""Most seconds that a rehearsal trains."""

_SHALLOW_STEPS: Final = SKIPPED_ITEMS + 6
_DEEP_STEPS: Final = 14
_TURN_STEPS: Final = 4


def rehearsal_steps(job: Job, num_blocks: int) -> int:
    """Number of steps after which a rehearsal has seen enough: some shallow ones, one each depth, some of all blocks.

    Example: 29 for six blocks, 47 for twenty-four; 27 for six of which two are private, as these never train.

    Args:
        job: that will run.
        num_blocks: of the model.
    """
    return _SHALLOW_STEPS + _deeper(job, num_blocks) + _DEEP_STEPS


def rehearsal_of(job: Job, num_blocks: int) -> Job:
    """Make the job of the rehearsal: the same work in short turns, all depths soon, nothing saved.

    Args:
        job: that will run.
        num_blocks: of the model.
    """
    steps = rehearsal_steps(job, num_blocks)
    changes: dict[str, object] = {
        "train.max_steps": 2 * steps,  # it is stopped before its end, which would evaluate and collect
        "train.local_iterations": min(job.train.local_iterations, _TURN_STEPS),
        "train.eval_every": 0,
        "train.checkpoint_every": 0,
        "recovery.copies": "none",
        "operations.policy": Policy.STANDARD.value,  # whole blocks: parts of them take as much longer
    }
    if job.unfreeze is not None:
        changes["unfreeze.at"] = [_SHALLOW_STEPS + block for block in range(_deeper(job, num_blocks))]
    return job.with_overrides(changes)


def _deeper(job: Job, num_blocks: int) -> int:
    """How many blocks can be unfrozen besides the top one."""
    return max(0, num_blocks - job.privacy.private_blocks - 1)


def rehearsed(before: Profile, after: Profile) -> Profile:
    """Correct the nodes that hosted nothing in a rehearsal as those that did.

    Args:
        before: the profile that the rehearsal was planned with.
        after: what came of it; has the same nodes.

    Returns:
        ``after``, in which each work that a node did not do takes longer by the median ratio of those that did it.
    """
    known, ratios = before.by_name, dict[str, list[float]]()
    own = [_ratios(known[node.node], node) for node in after.nodes]
    for work, ratio in itertools.chain.from_iterable(found.items() for found in own):
        ratios.setdefault(work, []).append(ratio)
    medians = {work: statistics.median(found) for work, found in ratios.items()}
    with_messages = any(node.has_messages for node in after.nodes)
    missing = [{work: ratio for work, ratio in medians.items() if work not in found} for found in own]
    nodes = zip(after.nodes, missing, strict=True)
    return dataclasses.replace(
        after, nodes=tuple(_corrected(node, lacks, with_messages=with_messages) for node, lacks in nodes)
    )


def _ratios(before: NodeFacts, after: NodeFacts) -> dict[str, float]:
    """Seconds after over seconds before of each work that has changed, at the sizes of the points before."""
    if before.work_times == after.work_times:
        return {}
    table = WorkTable(after.work_times, where=f"node {after.node}")
    found: dict[str, list[float]] = {}
    for point in before.work_times:
        work = Work(point.work)
        if point.median_s > 0 and work in table:
            found.setdefault(point.work, []).append(table.seconds(work, point.size) / point.median_s)
    ratios = {work: statistics.fmean(values) for work, values in found.items()}
    return {work: ratio for work, ratio in ratios.items() if abs(ratio - 1) > _SAME}


_SAME: Final = 1e-9


def _corrected(node: NodeFacts, missing: Mapping[str, float], *, with_messages: bool) -> NodeFacts:
    """The facts of a node in which works that it did not rehearse take longer by these ratios of the others."""
    if not missing:
        return node
    return dataclasses.replace(
        node,
        work_times=tuple(_scaled(point, missing.get(point.work, 1.0)) for point in node.work_times),
        has_messages=node.has_messages or (with_messages and any(work in missing for work in BLOCK_WORKS)),
        block_forward_s=node.block_forward_s * missing.get(Work.FORWARD, 1.0),
        block_graph_s=node.block_graph_s * missing.get(Work.GRAPH, 1.0),
        block_backward_s=node.block_backward_s * missing.get(Work.BACKWARD, 1.0),
    )


def _scaled(point: WorkTime, ratio: float) -> WorkTime:
    return dataclasses.replace(
        point, median_s=point.median_s * ratio, low_s=point.low_s * ratio, high_s=point.high_s * ratio
    )
