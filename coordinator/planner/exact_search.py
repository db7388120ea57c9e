"""Exact search of the fastest ring: branch and bound from the top of the ring down, with dominance.

One stage is placed after the other, first the one with the highest block. The search is exact, because nothing is
dropped that could be better than what is kept:

* *branching* covers every order, every subset of nodes and every slice that fits its node's memory; of nodes that can
  be exchanged without changing any table only the first free one is tried;
* *bounding* drops a partial ring if ``set_bounds`` shows that no completion beats the best ring known: at a depth whose
  lowest trained block is placed a step never gets shorter by adding stages, at the others path, span and busy times
  only grow;
* *dominance* drops a partial ring if another with the same nodes, the same lowest node and the same blocks is at
  least as good in every figure that a completion can depend on (step times so far, path, pace, span and busy times
  per owner): every completion of the one is then at least as good on the other, because all formulas grow with all
  figures, and memory depends on the number of hosts above, which is equal.

Bounds are seconds that unplaced blocks take at least, for every set of nodes that may host them. Each relaxes
something: blocks of a node need not be neighbours, nodes have any order, a block may be cut, every message takes the
cheapest link, and memory is the most blocks that a node could host anywhere. Where operation tables make blocks
unequal, each counts as the lightest one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.planner.ring_costs import RingCosts
from coordinator.planner.step_time import PlacedStages, Ring, Rows, at_the_head, frozen_s, job_s, overlapped, place

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
    micro = costs.num_micro * costs.min_weight
    free = {node: micro * costs.forward_s[node] for node in able}
    full = {node: micro * (costs.graph_s[node] + costs.min_back_s[node]) + costs.update_s[node] for node in able}
    low = {
        node: micro * (costs.graph_lowest_s[node] + costs.min_back_lowest_s[node]) + costs.update_s[node]
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

    The lowest block counts the least that it takes on any node, for any hosts of the rest.
    """
    weight = costs.min_weight
    both = {node: weight * (costs.graph_s[node] + costs.min_back_s[node]) for node in able}
    slower = {node: weight * max(costs.graph_s[node], costs.min_back_s[node]) for node in able}
    lowest_s = weight * min(costs.graph_lowest_s[node] + costs.min_back_lowest_s[node] for node in able)
    others = range(costs.num_nodes)
    move_s = costs.min_visit * min(
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


Fits = Callable[[int, int, int, int], bool]
"""(node, start, stop, hosts above) -> whether it fits."""
_EQUAL = 1 - 1e-12
_LOOKS = 16  # partial rings between two looks at the clock


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactResult:
    """The result of an exact search.

    Attributes:
        ring: the best one; None if none fits.
        job_s: its predicted time.
        proven: whether nothing better exists.
        lower_s: nothing is faster than this.
        expanded: partial rings that were tried.
        others: good rings of other sets of hosts, best first.
    """

    ring: Ring | None
    job_s: float
    proven: bool
    lower_s: float
    expanded: int
    others: tuple[tuple[float, Ring], ...] = ()


def search_exact(
    costs: RingCosts,
    fits: Fits,
    *,
    known: Ring | None = None,
    max_hosts: int = 0,
    max_expanded: int = 3_000_000,
    is_over: Callable[[], bool] = lambda: False,
) -> ExactResult:
    """Find the ring with the least predicted time.

    Args:
        costs: of the job; all steps and owners count.
        fits: memory.
        known: a good ring to begin with; the better, the faster.
        max_hosts: most stages; 0 = all nodes.
        max_expanded: give up proving after so many partial rings, and say so.
        is_over: whether the time is used up; asked again and again, then as after ``max_expanded``.
    """
    return _Search(costs, fits, known, max_hosts or costs.num_nodes, max_expanded, is_over).run()


@dataclass(frozen=True, slots=True)
class _Partial:
    mask: int
    start: int
    above: PlacedStages
    rows: Rows
    nodes: tuple[int, ...]
    counts: tuple[int, ...]
    later_s: float


class _Search:
    def __init__(
        self,
        costs: RingCosts,
        fits: Fits,
        known: Ring | None,
        max_hosts: int,
        max_expanded: int,
        is_over: Callable[[], bool],
    ) -> None:
        self._costs, self._fits, self._max_hosts = costs, fits, max_hosts
        self._best_s = float("inf") if known is None else job_s(costs, known)
        self._best = known
        self._budget, self._expanded = max_expanded, 0
        self._is_over, self._looks = is_over, 0
        self._weights = [owner.weight for owner in costs.owners]
        self._steps = costs.steps_at
        self._bounds: dict[int, SetBounds | None] = {}
        self._seen: dict[tuple[int, int, int], list[list[float]]] = {}
        self._twins = _twins(costs, fits)
        self._caps = [self._cap(node) for node in range(costs.num_nodes)]
        self._pool: dict[int, tuple[float, Ring]] = {}
        self._cut_s = float("inf")

    def run(self) -> ExactResult:
        costs = self._costs
        everyone = (1 << costs.num_nodes) - 1
        roots = []
        for node in range(costs.num_nodes):
            if self._is_first_twin(node, 0):
                roots += self._children(
                    _Partial(0, costs.stop, at_the_head(costs, node), [], (), (), 0.0), [node], everyone
                )
        self._descend(roots)
        proven = self._expanded < self._budget
        return ExactResult(
            ring=self._best,
            job_s=self._best_s,
            proven=proven,
            lower_s=self._best_s if proven else min(self._best_s, self._cut_s),
            expanded=self._expanded,
            others=tuple(sorted(self._pool.values(), key=lambda pair: (pair[0], pair[1].nodes, pair[1].counts))),
        )

    def _descend(self, level: list[tuple[float, _Partial]]) -> None:
        """Follow partial rings depth first, the one with the least bound first, until the budget is used up."""
        level.sort(key=lambda pair: pair[0])
        everyone = (1 << self._costs.num_nodes) - 1
        for bound_s, partial in level:
            if bound_s >= self._best_s * _EQUAL:
                return
            if self._must_end():
                self._cut_s = min(self._cut_s, bound_s)
                return
            if not self._is_new(partial):
                continue
            left = everyone & ~partial.mask
            nodes = [node for node in range(self._costs.num_nodes) if left >> node & 1]
            nodes = [node for node in nodes if self._is_first_twin(node, partial.mask)]
            self._descend(self._children(partial, nodes, left))

    def _must_end(self) -> bool:
        """Whether the budget is used up; a clock that ends the search uses all of it up."""
        self._looks += 1
        if self._looks % _LOOKS == 0 and self._expanded < self._budget and self._is_over():
            self._budget = self._expanded
        return self._expanded >= self._budget

    def _children(self, partial: _Partial, nodes: Sequence[int], left: int) -> list[tuple[float, _Partial]]:
        """List every way to put the next stage on one of ``nodes``, each with its bound.

        A ring that reaches the lowest block is complete: it is compared with the best one and not listed.
        """
        costs, found = self._costs, []
        num_above = len(partial.nodes)
        for node in nodes:
            rest = left & ~(1 << node)
            is_last_host = num_above + 1 >= self._max_hosts or not rest
            for start in range(partial.start - 1, costs.first - 1, -1):
                if is_last_host and start > costs.first:
                    continue
                if not self._fits(node, start, partial.start, num_above):
                    continue
                left_s = self._min_frozen_s(rest, start - costs.first)
                count, is_bottom = partial.start - start, start == costs.first
                frozen = frozen_s(costs, partial.above, node, count, is_bottom=is_bottom)
                rows = [list(map(max, row, frozen)) for row in partial.rows]
                done_s = self._done_s(rows, left_s)
                if done_s + partial.later_s >= self._best_s * _EQUAL:
                    continue
                self._expanded += 1
                fresh, above = place(costs, partial.above, node, count, is_bottom=is_bottom)
                done_s += self._done_s(fresh, left_s, first=len(rows) + 1)
                rows += fresh
                mask, nodes_of, counts = partial.mask | 1 << node, (node, *partial.nodes), (count, *partial.counts)
                if is_bottom:
                    self._judge(mask, done_s, Ring(nodes=nodes_of, counts=counts))
                    continue
                later_s = self._later_s(above, rest, start - costs.first, len(rows))
                if done_s + later_s < self._best_s * _EQUAL:
                    found.append((done_s + later_s, _Partial(mask, start, above, rows, nodes_of, counts, later_s)))
        return found

    def _min_frozen_s(self, mask: int, left: int) -> float:
        """Seconds that ``left`` frozen blocks take at least in a step on the nodes of ``mask``.

        Infinite if none of those nodes can host a block.
        """
        bounds = self._set_bounds(mask) if left else None
        return (bounds.frozen_s[left] if bounds is not None else float("inf")) if left else 0.0

    def _done_s(self, rows: Rows, min_s: float, *, first: int = 1) -> float:
        """Seconds of all steps at the depths whose lowest trained block is placed, each step at least ``min_s``."""
        total_s, weights, steps = 0.0, self._weights, self._steps
        for at, row in enumerate(rows, start=first):
            if row:
                total_s += steps[at] * sum(
                    [weight * (value if value > min_s else min_s) for weight, value in zip(weights, row, strict=True)]
                )
        return total_s

    def _judge(self, mask: int, total_s: float, ring: Ring) -> None:
        known = self._pool.get(mask)
        if known is None or total_s < known[0]:
            self._pool[mask] = (total_s, ring)
        if total_s < self._best_s:
            self._best_s, self._best = total_s, ring

    def _later_s(self, above: PlacedStages, rest: int, left: int, placed: int) -> float:
        """Lower bound of the seconds of all steps at the depths whose lowest trained block is not placed yet."""
        costs, bounds = self._costs, self._set_bounds(rest)
        if bounds is None:
            return float("inf")
        weights, steps, micro = self._weights, self._steps, costs.num_micro
        total_s = 0.0
        paths = [
            max(above.path_s + end_s + (micro - 1) * max(above.slowest_s, pace_s), span_s)
            for end_s, pace_s, span_s in zip(above.ends_s, above.pace_s, above.span_s, strict=True)
        ]
        ends = [above.path_s + end_s for end_s in above.ends_s]
        owners = list(zip(weights, paths, ends, above.busy_s, strict=True))
        for trained in range(1, left + 1):
            at = placed + trained
            if not steps[at]:
                continue
            busy_s = bounds.busy_s(left - trained, trained)
            path_s, paced_s = bounds.path_s[trained] + bounds.update_s, bounds.paced_s[trained] + bounds.update_s
            if costs.stale_steps:
                busy = [max(busy_s, own_busy_s) for _, _, _, own_busy_s in owners]
                critical = [max(own_path_s + path_s, end_s + paced_s) for _, own_path_s, end_s, _ in owners]
                total_s += steps[at] * sum(map(float.__mul__, weights, overlapped(costs, busy, critical)))
                continue
            total_s += steps[at] * sum(
                [
                    weight * max(busy_s, own_busy_s, own_path_s + path_s, end_s + paced_s)
                    for weight, own_path_s, end_s, own_busy_s in owners
                ]
            )
        return total_s

    def _is_new(self, partial: _Partial) -> bool:
        """Whether no partial ring followed before dominates this one.

        A ring dominates another with the same nodes, lowest node and start if none of its figures is larger.
        """
        above = partial.above
        figures = [
            *[above.path_s + end_s for end_s in above.ends_s],
            *[max(above.slowest_s, pace_s) for pace_s in above.pace_s],
            *above.span_s,
            *above.busy_s,
        ]
        for at, row in enumerate(partial.rows, start=1):
            if self._steps[at]:
                figures += row
        fronts = self._seen.setdefault((partial.mask, above.node, partial.start), [])
        for other in fronts:
            if all(map(float.__le__, other, figures)):
                return False
        fronts.append(figures)
        return True

    def _set_bounds(self, mask: int) -> SetBounds | None:
        if mask not in self._bounds:
            nodes = [node for node in range(self._costs.num_nodes) if mask >> node & 1]
            self._bounds[mask] = set_bounds(self._costs, nodes, self._caps, self._costs.stop - self._costs.first)
        return self._bounds[mask]

    def _cap(self, node: int) -> int:
        """The most blocks that a node can host at any place of the ring."""
        first, stop = self._costs.first, self._costs.stop
        for count in range(stop - first, 0, -1):
            for start in range(first, stop - count + 1):
                over = stop - start - count
                above = range(1, min(self._costs.num_nodes - 1, over) + 1) if over else range(1)
                if any(self._fits(node, start, start + count, hosts) for hosts in above):
                    return count
        return 0

    def _is_first_twin(self, node: int, mask: int) -> bool:
        return all(mask >> other & 1 for other in self._twins[node])


def _twins(costs: RingCosts, fits: Fits) -> list[list[int]]:
    """List per node the earlier nodes that are its twins: exchanging the two changes no table."""
    return [[other for other in range(node) if _are_twins(costs, fits, other, node)] for node in range(costs.num_nodes)]


def _are_twins(costs: RingCosts, fits: Fits, one: int, two: int) -> bool:
    """Whether exchanging two nodes changes no table at all."""
    swap = list(range(costs.num_nodes))
    swap[one], swap[two] = two, one

    def same(row: Sequence[float]) -> bool:
        return row[one] == row[two]

    rows = (
        costs.forward_s,
        costs.graph_s,
        costs.graph_lowest_s,
        costs.backward_s,
        costs.backward_lowest_s,
        costs.projected_back_s,
        costs.projected_back_lowest_s,
        costs.update_s,
        costs.uplink_s,
        costs.downlink_s,
        costs.sending_s,
        costs.receiving_s,
    )
    if not all(map(same, rows)):
        return False
    for table in (costs.hidden_s, costs.grad_s, costs.hidden_wire_s, costs.grad_wire_s):
        if any(table[at][to] != table[swap[at]][swap[to]] for at in range(len(swap)) for to in range(len(swap))):
            return False
    if ((one in costs.owner_of), (two in costs.owner_of)) in ((True, False), (False, True)):
        return False
    for owner in costs.owners:
        other = costs.owners[costs.owner_of[swap[owner.node]]]
        if (owner.embed_s, owner.head_s, owner.update_s) != (other.embed_s, other.head_s, other.update_s):
            return False
        for own, others in (
            (owner.up_s, other.up_s),
            (owner.down_s, other.down_s),
            (owner.wire_s, other.wire_s),
            (owner.into_s, other.into_s),
        ):
            if any(own[at] != others[swap[at]] for at in range(len(swap))):
                return False
    blocks = range(costs.first, costs.stop)
    return all(
        fits(one, start, stop, above) == fits(two, start, stop, above)
        and costs.saving_of(one, start, stop, above) == costs.saving_of(two, start, stop, above)
        for start in blocks
        for stop in range(start + 1, costs.stop + 1)
        for above in ({0} if stop == costs.stop else {1, max(1, min(costs.num_nodes - 1, costs.stop - stop))})
    )
