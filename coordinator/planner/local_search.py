"""Local search of a ring: several starts, then moves and random kicks, until the budget is used up.

Moves shift blocks between stages, and exchange, replace, insert, remove, shift or reverse stages. A ring is evaluated
from the top down: stages above the highest changed one keep their figures, and the evaluation stops once the ring can't
be better than the limit. Rings that do not fit count as worse the more bytes they lack, so a search may begin with one.
If there are no more rings than evaluations, each is evaluated once instead.

The result depends only on seed and evaluations, unless the clock ends the search first.

Source: iterated local search (Lourenco, Martin and Stuetzle, 2003).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.planner.draft import nearest_chain
from coordinator.planner.ring_costs import RingCosts
from coordinator.planner.step_time import PlacedStages, Ring, Rows, at_the_head, frozen_s, place


def num_rings(num_nodes: int, num_blocks: int, max_hosts: int) -> int:
    """Number of rings: 24 for two nodes and 12 blocks, 93 for three nodes and 6 blocks."""
    sizes = range(1, min(max_hosts, num_nodes, num_blocks) + 1)
    return sum(math.perm(num_nodes, hosts) * math.comb(num_blocks - 1, hosts - 1) for hosts in sizes)


def every_ring(num_nodes: int, num_blocks: int, max_hosts: int) -> Iterator[Ring]:
    """Yield every ring, each node with at least one block; rings with fewer hosts are first."""
    for hosts in range(1, min(max_hosts, num_nodes, num_blocks) + 1):
        for nodes in itertools.permutations(range(num_nodes), hosts):
            for cuts in itertools.combinations(range(1, num_blocks), hosts - 1):
                edges = (0, *cuts, num_blocks)
                yield Ring(nodes=nodes, counts=tuple(stop - start for start, stop in itertools.pairwise(edges)))


class Move(NamedTuple):
    """A small change of a ring.

    Kinds: ``give`` k blocks from stage i to stage j; ``drop`` stage i, its blocks go to stage j; ``swap`` the nodes
    of i and j; ``replace`` the node of i by node j; ``insert`` node j before stage i with k blocks of stage l;
    ``move`` stage i to position j; ``reverse`` the stages from i to j.
    """

    kind: str
    i: int
    j: int
    k: int = 0
    l: int = 0  # noqa: E741 - a fourth number


def moves(ring: Ring, free: Sequence[int], max_hosts: int) -> Iterator[Move]:
    """Yield all moves of a ring; only nodes in ``free`` may be added."""
    length = len(ring.nodes)
    for i in range(length):
        for j in range(length):
            if i == j:
                continue
            yield from (Move("give", i, j, k) for k in (1, 2, 4) if ring.counts[i] > k)
            if abs(i - j) == 1:
                yield Move("drop", i, j)
            if i < j:
                yield Move("swap", i, j)
            if i < j - 1:
                yield Move("reverse", i, j)
            yield Move("move", i, j)
        yield from (Move("replace", i, node) for node in free)
    if length < max_hosts:
        for at in range(length + 1):
            for donor in {max(0, at - 1), min(at, length - 1)}:
                for k in {1, ring.counts[donor] // 2}:
                    if 0 < k < ring.counts[donor]:
                        yield from (Move("insert", at, node, k, donor) for node in free)


def applied(ring: Ring, move: Move) -> Ring | None:
    """Apply a move to a ring; None if it is impossible, as the ring has changed since it was listed."""
    kind, i, j, k, donor = move
    nodes, counts = list(ring.nodes), list(ring.counts)
    length = len(nodes)
    if i >= length + (kind == "insert") or (kind not in ("replace", "insert") and (j >= length or i == j)):
        return None
    if kind == "give":
        if counts[i] <= k:
            return None
        counts[i] -= k
        counts[j] += k
    elif kind == "drop":
        counts[j] += counts[i]
        del nodes[i], counts[i]
    elif kind == "swap":
        nodes[i], nodes[j] = nodes[j], nodes[i]
    elif kind == "replace":
        if j in nodes:
            return None
        nodes[i] = j
    elif kind == "insert":
        if j in nodes or donor >= length or counts[donor] <= k:
            return None
        counts[donor] -= k
        nodes.insert(i, j)
        counts.insert(i, k)
    elif kind == "move":
        nodes.insert(j, nodes.pop(i))
        counts.insert(j, counts.pop(i))
    else:
        nodes[i : j + 1] = nodes[i : j + 1][::-1]
        counts[i : j + 1] = counts[i : j + 1][::-1]
    return Ring(nodes=tuple(nodes), counts=tuple(counts))


MemoryShortfall = Callable[[int, int, int, int], int]


def starts(costs: RingCosts, lacking: MemoryShortfall, max_hosts: int) -> list[Ring]:
    """Construct rings to begin with; some may not fit the nodes' memory."""
    nodes = range(costs.num_nodes)
    block_s = _block_s(costs)
    num_blocks = costs.stop - costs.first
    rankings = {tuple(sorted(nodes, key=lambda node: (block_s[node], node))), tuple(ranked_nodes(costs))}
    caps = [_cap(costs, lacking, node) for node in nodes]
    rings: dict[Ring, None] = {}
    for ranking in sorted(rankings):
        for num_hosts in _sizes(min(max_hosts, costs.num_nodes, num_blocks)):
            counts = greedy_split(ranking[:num_hosts], block_s, caps, num_blocks)
            hosts = [node for node in ranking[:num_hosts] if counts[node]]
            near = nearest_chain(
                hosts[0], hosts, lambda first, other: costs.hidden_s[first][other] + costs.grad_s[other][first]
            )
            for order in (hosts, hosts[::-1], near):
                rings[Ring(nodes=tuple(order), counts=tuple(counts[node] for node in order))] = None
    return list(rings)


def ranked_nodes(costs: RingCosts) -> list[int]:
    """Sort all nodes by the seconds of an average slice plus those of messages to near nodes (``_near_s``)."""
    block_s = _block_s(costs)
    per_stage = max(1, (costs.stop - costs.first) // costs.num_nodes)
    nodes = range(costs.num_nodes)
    return sorted(nodes, key=lambda node: (block_s[node] * per_stage + _near_s(costs, node), node))


def _block_s(costs: RingCosts) -> list[float]:
    return [graph_s + other for graph_s, other in zip(costs.graph_s, costs.backward_s, strict=True)]


def greedy_split(
    nodes: Sequence[int], block_s: Sequence[float], caps: Sequence[int], num_blocks: int
) -> dict[int, int]:
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


def _cap(costs: RingCosts, lacking: MemoryShortfall, node: int) -> int:
    """Return the most blocks that a node can host right below the top block.

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


_BETTER = 1 - 1e-9
_PROMISING, _OTHERS = 10, 4
_Value = tuple[int, float]
_WORST: _Value = (1 << 62, float("inf"))


def _by_value(pair: tuple[_Value, Ring]) -> _Value:
    return pair[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Limits of a local search: rings evaluated, and seconds on the monotonic clock ``now_s``."""

    evaluations: int
    seconds: float
    now_s: Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalResult:
    """Result of a local search.

    Attributes:
        pool: the best ring of every set of hosts that was evaluated, best first.
        was_cut: whether the clock ended the search before its evaluations were used up.
        is_complete: whether every ring was evaluated, so that none is better.
    """

    ring: Ring | None
    pool: tuple[tuple[float, Ring], ...]
    evaluations: int
    was_cut: bool = False
    is_complete: bool = False


def search_local(
    costs: RingCosts,
    lacking: MemoryShortfall,
    budget: Budget,
    *,
    seed: int = 0,
    known: tuple[Ring, ...] = (),
    max_hosts: int = 0,
    construct: bool = True,
) -> LocalResult:
    """Search for a ring with a short predicted time.

    ``lacking``: (node, start, stop, hosts above) -> bytes that the node lacks. The search begins with the ``known``
    rings and, with ``construct``, with constructed ones. ``max_hosts`` = 0: no limit. Fewer depths and one mean owner
    in ``costs`` make evaluations cheap.
    """
    return _Local(costs, lacking, budget, seed, max_hosts or costs.num_nodes).run(known, construct=construct)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage of an evaluated ring, with figures of the ring from the top down to this stage."""

    node: int
    count: int
    lacking: int
    sum_s: float
    frozen: list[float]
    rows: Rows
    above: PlacedStages


class _BudgetExhausted(Exception):
    """Raised when the budget is used up."""


class _Local:
    def __init__(self, costs: RingCosts, lacking: MemoryShortfall, budget: Budget, seed: int, max_hosts: int) -> None:
        self._costs, self._lacking, self._budget, self._max_hosts = costs, lacking, budget, max_hosts
        self._random = random.Random(seed)  # noqa: S311 - orders moves, guards nothing
        self._num_blocks = costs.stop - costs.first
        self._sizes = (costs.num_nodes, self._num_blocks, self._max_hosts)
        self._weights = [owner.weight for owner in costs.owners]
        self._evaluations = 0
        self._end_s = budget.now_s() + budget.seconds
        self._was_cut = False
        self._kept: list[_Stage] = []  # of the current ring, from the top down
        self._ranked = ranked_nodes(costs)
        self._pool: dict[frozenset[int], tuple[_Value, Ring]] = {}

    def run(self, known: tuple[Ring, ...], *, construct: bool) -> LocalResult:
        """Evaluate every ring, or search until the budget is used up."""
        is_complete = num_rings(*self._sizes) <= self._budget.evaluations
        try:
            if is_complete:
                for ring in every_ring(*self._sizes):
                    best = self._pool.get(frozenset(ring.nodes))
                    self._evaluated(ring, _WORST if best is None else best[0])
            else:
                self._search(known, construct=construct)
        except _BudgetExhausted:
            is_complete = False
        fitting = sorted(
            ((value[1], ring) for value, ring in self._pool.values() if not value[0]),
            key=lambda pair: (pair[0], pair[1].nodes),
        )
        return LocalResult(
            ring=fitting[0][1] if fitting else None,
            pool=tuple(fitting),
            evaluations=self._evaluations,
            was_cut=self._was_cut,
            is_complete=is_complete,
        )

    def _search(self, known: tuple[Ring, ...], *, construct: bool) -> None:
        """Climb from the best starts, then from kicked rings, until ``_BudgetExhausted``."""
        begins = [*known, *(starts(self._costs, self._lacking, self._max_hosts) if construct else [])]
        ranked = sorted(((self._fresh(ring), ring) for ring in begins), key=_by_value)
        if not ranked:
            return
        current = best = min((self._climb(ring) for _, ring in ranked[:4]), key=_by_value)
        while True:
            local = self._climb(self._kicked(current[1]))
            if local[0][0] < current[0][0] or local[0] <= (current[0][0], current[0][1] * 1.005):
                current = local
            best = min(best, local, key=_by_value)
            if current[0] > (best[0][0], best[0][1] * 1.02):
                current = best

    # ---- evaluation -------------------------------------------------------------------------------

    def _fresh(self, ring: Ring) -> _Value:
        self._kept = []
        value = self._evaluated(ring, _WORST)
        if value is None:
            raise _BudgetExhausted
        return value

    def _evaluated(self, ring: Ring, limit: _Value) -> _Value | None:
        """Evaluate a ring: (missing bytes, seconds of the job), compared in this order; None if not below ``limit``.

        A ring below ``limit`` becomes the current one: its stages are kept for the next evaluation, and it enters the
        pool if it is the best of its set of hosts.
        """
        self._evaluations += 1
        if self._evaluations > self._budget.evaluations:
            raise _BudgetExhausted
        if self._evaluations % 64 == 0 and self._budget.now_s() > self._end_s:
            self._was_cut = True
            raise _BudgetExhausted
        costs, kept = self._costs, self._kept
        length, same = len(ring.nodes), 0
        while (
            same < min(length, len(kept)) - 1
            and kept[same].node == ring.nodes[-1 - same]
            and kept[same].count == ring.counts[-1 - same]
        ):
            same += 1
        fresh: list[_Stage] = []
        if same:
            top = kept[same - 1]
            above, lacking, sum_s = top.above, top.lacking, top.sum_s
        else:
            above, lacking, sum_s = at_the_head(costs, ring.nodes[-1]), 0, 0.0
        stop = costs.stop - above.placed
        for index in range(length - 1 - same, -1, -1):
            node, count = ring.nodes[index], ring.counts[index]
            lacking += self._lacking(node, stop - count, stop, length - 1 - index)
            is_bottom = index == 0
            frozen = frozen_s(costs, above, node, count, is_bottom=is_bottom)
            first = costs.stop - stop + 1
            rows, above = place(costs, above, node, count, is_bottom=is_bottom)
            sum_s += self._sum_s(rows, first)
            if (lacking, sum_s) >= limit:
                return None
            fresh.append(_Stage(node, count, lacking, sum_s, frozen, rows, above))
            stop -= count
        stages = kept[:same] + fresh
        value = (lacking, self._total_s(stages))
        if value >= limit:
            return None
        self._kept = stages
        self._remember(value, ring)
        return value

    def _sum_s(self, rows: Rows, first: int) -> float:
        steps, weights = self._costs.steps_at, self._weights
        if len(weights) == 1:
            return sum(steps[at] * row[0] for at, row in enumerate(rows, start=first) if row)
        return sum(steps[at] * sum(map(float.__mul__, weights, row)) for at, row in enumerate(rows, start=first) if row)

    def _total_s(self, stages: list[_Stage]) -> float:
        """Seconds of all steps; no step is shorter than the busiest frozen stage below its lowest trained one."""
        steps, weights = self._costs.steps_at, self._weights
        below = [0.0] * len(weights)
        total_s, at = 0.0, self._num_blocks
        for stage in reversed(stages):
            for row in reversed(stage.rows):
                if row:
                    total_s += steps[at] * sum(map(float.__mul__, weights, map(max, row, below)))
                at -= 1
            below = list(map(max, below, stage.frozen))
        return total_s

    # ---- search -----------------------------------------------------------------------------------

    def _climb(self, ring: Ring) -> tuple[_Value, Ring]:
        """Apply moves that make the ring better, in random order, until no move does."""
        value = self._fresh(ring)
        improved = True
        while improved:
            improved = False
            listed = list(moves(ring, self._free(ring), self._max_hosts))
            self._random.shuffle(listed)
            for move in listed:
                candidate = applied(ring, move)
                if candidate is None:
                    continue
                better = self._evaluated(candidate, (value[0], value[1] * _BETTER))
                if better is not None:
                    ring, value, improved = candidate, better, True
        return value, ring

    def _free(self, ring: Ring) -> list[int]:
        """Return nodes that may be added: the ``_PROMISING`` best ranked ones and ``_OTHERS`` drawn from the rest."""
        free = [node for node in self._ranked if node not in ring.nodes]
        rest = free[_PROMISING:]
        return free[:_PROMISING] + self._random.sample(rest, min(_OTHERS, len(rest)))

    def _remember(self, value: _Value, ring: Ring) -> None:
        key = frozenset(ring.nodes)
        if key not in self._pool or value < self._pool[key][0]:
            self._pool[key] = (value, ring)
        if len(self._pool) > 400:
            worst = sorted(self._pool, key=lambda key: self._pool[key][0])[200:]
            for key in worst:
                del self._pool[key]

    def _kicked(self, ring: Ring) -> Ring:
        """Apply two to five random moves to a ring, whatever they cost."""
        for _ in range(self._random.randint(2, 5)):
            listed = list(moves(ring, self._free(ring), self._max_hosts))
            if listed:
                ring = applied(ring, self._random.choice(listed)) or ring
        return ring
