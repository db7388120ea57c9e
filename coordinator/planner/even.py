"""Nodes that are alike get even slices in the order of their names.

Measured times of equal machines differ by some percent from start to start. A plan that followed them would differ
each time, and gain nothing. So where no link between them was measured nodes count as alike if they report the same
hardware, or if their blocks' times differ by no more than ``ALIKE``; then all get the times of the middle one. Among
alike nodes the even split is taken unless another, with the same micro-batches and wire dtype, is predicted to be
faster than it by more than ``WORTH``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from ringtune.costs.profile import NodeFacts
from ringtune.costs.work_times import WorkTime

ALIKE = 1.15
WORTH = 1.15
_TOLERANCE = 1.15


def as_alike(nodes: Sequence[NodeFacts]) -> tuple[NodeFacts, ...] | None:
    """Give all nodes equal times if they are alike; return None if they differ.

    Nodes are alike if they report the same hardware, threads and device, or if the slowest block takes at most
    ``ALIKE`` times the fastest. If any node was not measured all count as alike, with times of 1; the backward of a
    block all of whose parameters train takes 2.
    """
    if any(not block_s(node) > 0 for node in nodes):
        return tuple(
            dataclasses.replace(
                node,
                work_times=(),
                block_forward_s=1.0,
                block_graph_s=1.0,
                block_backward_s=2.0 if node.model.embedding_train_bytes else 1.0,
                train_tokens=0.0,
            )
            for node in nodes
        )
    ranked = sorted(nodes, key=lambda node: (block_s(node), node.node))
    machines = {(node.hardware, node.threads, node.device) for node in nodes}
    same = len(machines) == 1 and nodes[0].hardware
    if not same and block_s(ranked[-1]) > ALIKE * block_s(ranked[0]):
        return None
    middle = ranked[len(ranked) // 2]
    tokens = [node.train_tokens for node in nodes if node.train_rows]
    points = _points(ranked)
    mean_tokens = sum(tokens) / len(tokens) if tokens and all(tokens) else 0.0
    return tuple(
        dataclasses.replace(
            node,
            work_times=points,
            block_forward_s=middle.block_forward_s,
            block_graph_s=middle.block_graph_s,
            block_backward_s=middle.block_backward_s,
            train_tokens=mean_tokens,
        )
        for node in nodes
    )


def _points(ranked: Sequence[NodeFacts]) -> tuple[WorkTime, ...]:
    """Take for every work the points of the middle node, by block time, among the nodes that measured that work.

    Not every node has every work: only owners measure embedding and head.
    """
    works = sorted({str(point.work) for node in ranked for point in node.work_times})
    found: list[WorkTime] = []
    for work in works:
        having = [node for node in ranked if any(point.work == work for point in node.work_times)]
        middle = having[len(having) // 2]
        found += [point for point in middle.work_times if point.work == work]
    return tuple(found)


def block_s(node: NodeFacts) -> float:
    """Seconds of one block's forward with graph and its backward for one micro-batch; 0 if the node was not measured.

    A node with only a forward without graph measured has the seconds of that.
    """
    return node.block_graph_s + node.block_backward_s or node.block_forward_s


def split_blocks(
    costs: Sequence[float], *, start: int, stop: int, longest: Callable[[int, int], int] | None = None
) -> tuple[int, ...] | None:
    """Share blocks out in contiguous slices, so that the slowest slice is fast and the counts are even.

    Among the splits whose slowest slice is at most 15 % slower than the best one the most even is taken. Blocks that
    are left over go to the earlier nodes, whose blocks train last: 10 blocks on four equal nodes are 3, 3, 2, 2.

    Args:
        costs: of one block on each node, in ring order; any unit.
        start: first block to place.
        stop: one past the last block.
        longest: (index, first) -> the largest end of a slice of that node that begins at ``first``; -1 if it
            can't even be empty. No limit if not given.

    Returns:
        Counts in ring order, None if no split fits.
    """
    ends = longest or (lambda index, first: stop)
    best = _fill(costs, start, stop, ends, limit=math.inf, weight=None)
    if best is None:
        return None
    slowest = max(cost * count for cost, count in zip(costs, best, strict=True))
    return _fill(costs, start, stop, ends, limit=slowest * _TOLERANCE, weight=lambda count: count * count)


def _fill(
    costs: Sequence[float],
    start: int,
    stop: int,
    ends: Callable[[int, int], int],
    *,
    limit: float,
    weight: Callable[[int], int] | None,
) -> tuple[int, ...] | None:
    """Find the best of all contiguous splits exactly, from the last node to the first.

    Without ``weight`` it minimises the slowest slice, with it the sum of weights; no slice costs more than
    ``limit``. Among equals, earlier nodes get more.
    """
    nothing: tuple[float, tuple[int, ...]] = (0.0, ())
    tails: dict[int, tuple[float, tuple[int, ...]]] = {stop: nothing}
    for index in reversed(range(len(costs))):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first in range(start, stop + 1):
            last = min(ends(index, first), stop)
            for end in range(last, first - 1, -1):
                count = end - first
                if end not in tails or costs[index] * count > limit * (1 + 1e-9):
                    continue
                rest, counts = tails[end]
                score = max(rest, costs[index] * count) if weight is None else rest + weight(count)
                if first not in longer or score < longer[first][0]:
                    longer[first] = (score, (count, *counts))
        tails = longer
    return tails[start][1] if start in tails else None
