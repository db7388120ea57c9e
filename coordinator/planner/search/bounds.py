"""Lower bounds of the seconds that unplaced blocks will take, for every set of nodes that may host them.

Each figure relaxes something: blocks of a node need not be neighbours, nodes come in any order, a block may be cut,
and every message takes the cheapest link. Where operation tables make blocks unequal, each counts as the lightest one.
Memory counts as the most blocks that a node could host anywhere. So no
completion of a ring is ever faster than its bound, and a search may drop whatever the bound rules out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.planner.predict.ring_costs import RingCosts

_INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class SetBounds:
    """Bounds of one set of nodes; lists are indexed by a number of blocks.

    Attributes:
        frozen_s: the busiest node of so many frozen blocks takes at least this in a step.
        path_s: so many trained blocks add at least this to the path of a micro-batch, the lowest one included.
        paced_s: the same with what the slowest action among them adds for the other micro-batches.
        share: frozen blocks that all nodes together do in a second of a step.
        ratio: a trained block takes at least so many times a frozen one.
        lowest_ratio: the lowest trained block takes at least so many times a frozen one.
        update_s: least update of a block.
    """

    frozen_s: Sequence[float]
    path_s: Sequence[float]
    paced_s: Sequence[float]
    share: float
    ratio: float
    lowest_ratio: float
    update_s: float

    def busy_s(self, frozen: int, trained: int) -> float:
        """Seconds that the busiest node takes at least for so many frozen and trained blocks; at least 1 trains."""
        blocks = frozen + (trained - 1) * self.ratio + self.lowest_ratio
        return max(self.frozen_s[frozen], blocks / self.share if self.share else 0.0)


def set_bounds(costs: RingCosts, nodes: Sequence[int], caps: Sequence[int], num_blocks: int) -> SetBounds | None:
    """Compute the bounds of a set of nodes.

    Args:
        costs: of the job.
        nodes: the set.
        caps: per node of the job, the most blocks that it can host anywhere.
        num_blocks: blocks that may be left.

    Returns:
        None if no node of the set can host a single block.
    """
    able = [node for node in nodes if caps[node]]
    if not able:
        return None
    micro = costs.num_micro * costs.least_weight
    free = {node: micro * costs.forward_s[node] for node in able}
    full = {node: micro * (costs.graph_s[node] + costs.least_back_s[node]) + costs.update_s[node] for node in able}
    low = {
        node: micro * (costs.graph_lowest_s[node] + costs.least_back_lowest_s[node]) + costs.update_s[node]
        for node in able
    }
    has_time = all(free.values())
    path, paced = _paths(costs, able, caps, num_blocks)
    return SetBounds(
        frozen_s=_frozen(free, caps, num_blocks),
        path_s=path,
        paced_s=paced,
        share=sum(1 / free[node] for node in able) if has_time else 0.0,
        ratio=min(full[node] / free[node] for node in able) if has_time else 0.0,
        lowest_ratio=min(low[node] / free[node] for node in able) if has_time else 0.0,
        update_s=min(costs.update_s[node] for node in able),
    )


def _frozen(free: dict[int, float], caps: Sequence[int], num_blocks: int) -> list[float]:
    """Least possible seconds of the busiest node for 0, 1, ... frozen blocks.

    Each block goes to the node that would then be done first, which is optimal for equal blocks.
    """
    counts = dict.fromkeys(free, 0)
    busiest = [0.0]
    for _ in range(num_blocks):
        open_nodes = [node for node in free if counts[node] < caps[node]]
        if not open_nodes:
            busiest.append(_INFINITE)
            continue
        node = min(open_nodes, key=lambda node: (counts[node] + 1) * free[node])
        counts[node] += 1
        busiest.append(max(busiest[-1], counts[node] * free[node]))
    return busiest


def _paths(
    costs: RingCosts, able: Sequence[int], caps: Sequence[int], num_blocks: int
) -> tuple[list[float], list[float]]:
    """Least seconds of a micro-batch's path through 0, 1, ... trained blocks, without and with the pace of the others.

    The lowest block counts the least that it takes on any node, whoever hosts the rest.
    """
    weight = costs.least_weight
    both = {node: weight * (costs.graph_s[node] + costs.least_back_s[node]) for node in able}
    slower = {node: weight * max(costs.graph_s[node], costs.least_back_s[node]) for node in able}
    lowest_s = weight * min(costs.graph_lowest_s[node] + costs.least_back_lowest_s[node] for node in able)
    others = range(costs.num_nodes)
    move_s = costs.least_visit * min(
        (costs.hidden_s[node][to] + costs.grad_s[to][node] for node in able for to in others if to != node), default=0.0
    )
    ranked = sorted(able, key=lambda node: both[node])
    path = [0.0] + [_INFINITE] * num_blocks
    paced = list(path)
    paces = sorted({0.0, *(slower[node] * count for node in able for count in range(1, caps[node] + 1))})
    for pace_s in paces:
        room = {
            node: caps[node] if not slower[node] else min(caps[node], int(pace_s / slower[node] * (1 + 1e-12)))
            for node in able
        }
        for trained, sum_s in enumerate(_filled(ranked, both, room, move_s, num_blocks - 1), start=1):
            path[trained] = min(path[trained], lowest_s + sum_s)
            paced[trained] = min(paced[trained], lowest_s + sum_s + (costs.num_micro - 1) * pace_s)
    return path, paced


def _filled(
    ranked: Sequence[int], both: dict[int, float], room: dict[int, int], move_s: float, num_blocks: int
) -> list[float]:
    """Least seconds of 0, 1, ... blocks: the cheapest nodes first, plus ``move_s`` for each node needed at least.

    Example: with room for 2 blocks on every node, 3 blocks count two moves.
    """
    sums, total_s = [move_s], 0.0
    steps = [both[node] for node in ranked for _ in range(room[node])]
    widest = sorted(room.values(), reverse=True)
    needed, reach = 0, 0
    for count, block_s in enumerate(steps[:num_blocks], start=1):
        total_s += block_s
        while reach < count:
            reach += widest[needed]
            needed += 1
        sums.append(total_s + max(1, needed) * move_s)
    return sums
