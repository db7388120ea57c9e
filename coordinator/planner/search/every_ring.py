"""Count and list all rings of a few nodes and blocks, where to try each is quicker than to search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from coordinator.planner.predict.step_time import Ring


def num_rings(num_nodes: int, num_blocks: int, max_hosts: int) -> int:
    """How many rings there are: 24 of two nodes and 12 blocks, 93 of three nodes and 6 blocks."""
    sizes = range(1, min(max_hosts, num_nodes, num_blocks) + 1)
    return sum(math.perm(num_nodes, hosts) * math.comb(num_blocks - 1, hosts - 1) for hosts in sizes)


def every_ring(num_nodes: int, num_blocks: int, max_hosts: int) -> Iterator[Ring]:
    """List every ring: any nodes in any order, each with one block at least; fewer hosts come first."""
    for hosts in range(1, min(max_hosts, num_nodes, num_blocks) + 1):
        for nodes in itertools.permutations(range(num_nodes), hosts):
            for cuts in itertools.combinations(range(1, num_blocks), hosts - 1):
                edges = (0, *cuts, num_blocks)
                yield Ring(nodes=nodes, counts=tuple(stop - start for start, stop in itertools.pairwise(edges)))
