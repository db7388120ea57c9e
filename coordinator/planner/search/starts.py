"""Construct rings to begin a local search with: the best 1, 2, 3, 4, 6, 8, ... nodes, each set in three orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.planner.predict.ring_costs import RingCosts
from coordinator.planner.predict.step_time import Ring

Lacking = Callable[[int, int, int, int], int]


def starts(costs: RingCosts, lacking: Lacking, max_hosts: int) -> list[Ring]:
    """Construct rings to begin with; not every one fits the nodes' memory."""
    nodes = range(costs.num_nodes)
    block_s = _block_s(costs)
    num_blocks = costs.stop - costs.first
    rankings = {tuple(sorted(nodes, key=lambda node: (block_s[node], node))), tuple(ranked_nodes(costs))}
    caps = [_cap(costs, lacking, node) for node in nodes]
    found: dict[Ring, None] = {}
    for ranking in sorted(rankings):
        for num_hosts in _sizes(min(max_hosts, costs.num_nodes, num_blocks)):
            counts = shared_out(ranking[:num_hosts], block_s, caps, num_blocks)
            hosts = [node for node in ranking[:num_hosts] if counts[node]]
            for order in (hosts, hosts[::-1], _chain(costs, hosts)):
                found[Ring(nodes=tuple(order), counts=tuple(counts[node] for node in order))] = None
    return list(found)


def ranked_nodes(costs: RingCosts) -> list[int]:
    """Sort all nodes by the seconds of an average slice plus those of messages to near nodes (``_near_s``)."""
    block_s = _block_s(costs)
    per_stage = max(1, (costs.stop - costs.first) // costs.num_nodes)
    nodes = range(costs.num_nodes)
    return sorted(nodes, key=lambda node: (block_s[node] * per_stage + _near_s(costs, node), node))


def _block_s(costs: RingCosts) -> list[float]:
    return [one + other for one, other in zip(costs.graph_s, costs.backward_s, strict=True)]


def shared_out(nodes: Sequence[int], block_s: Sequence[float], caps: Sequence[int], num_blocks: int) -> dict[int, int]:
    """Give each block in turn to the node that would then be done first; blocks without room go to ``nodes[0]``.

    Example: 6 blocks on nodes of 1 s and 2 s a block are 4 and 2.
    """
    counts = dict.fromkeys(nodes, 0)
    for _ in range(num_blocks):
        able = [node for node in nodes if counts[node] < caps[node]] or list(nodes[:1])
        counts[min(able, key=lambda node: ((counts[node] + 1) * block_s[node], node))] += 1
    return counts


def _sizes(most: int) -> list[int]:
    sizes = {1, most}
    size = 2
    while size < most:
        sizes |= {size, min(most, size * 3 // 2)}
        size *= 2
    return sorted(sizes)


def _cap(costs: RingCosts, lacking: Lacking, node: int) -> int:
    """The most blocks that a node can host right below the top block.

    If not one fits there: all blocks if the node can host them all, else 0.
    """
    stop = costs.stop - 1
    for count in range(stop - costs.first, 0, -1):
        if not lacking(node, stop - count, stop, 1):
            return count
    return 0 if lacking(node, costs.first, costs.stop, 0) else costs.stop - costs.first


def _near_s(costs: RingCosts, node: int) -> float:
    """Seconds of a hidden state to another node and a gradient back, averaged over the nearer half of the others."""
    times = sorted(costs.hidden_s[node][to] + costs.grad_s[to][node] for to in range(costs.num_nodes) if to != node)
    half = times[: max(1, len(times) // 2)]
    return sum(half) / len(half) if half else 0.0


def _chain(costs: RingCosts, hosts: Sequence[int]) -> list[int]:
    """Sort the hosts: the first stays first, then always the nearest one that is left."""
    chain, left = [hosts[0]], set(hosts[1:])
    while left:
        last = chain[-1]
        nearest = min(left, key=lambda node: (costs.hidden_s[last][node] + costs.grad_s[node][last], node))
        chain.append(nearest)
        left.remove(nearest)
    return chain
