"""Find a good ring for many nodes: several starts, then local search with kicks, until the budget is used up.

Moves shift a boundary, hand blocks from one stage to another, exchange, replace, insert or remove nodes, move a stage
and reverse a part of the ring. A ring is evaluated from the top down; what lies above the highest changed stage is
kept from before, and the evaluation ends as soon as the ring can't win any more. Rings that don't fit count as worse
the more bytes they lack, so that a search may begin with one. For a seed and a number of evaluations the result is
always the same; only if the clock ends the search first does it depend on the machine. Where there are fewer rings
than evaluations, each is evaluated once instead.

Source: iterated local search (Lourenco, Martin and Stuetzle, 2003).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from coordinator.planner.predict.ring_costs import RingCosts
from coordinator.planner.predict.stages import Above, Rows, at_the_head, frozen_s, place
from coordinator.planner.predict.step_time import Ring
from coordinator.planner.search.every_ring import every_ring, num_rings
from coordinator.planner.search.moves import applied, moves
from coordinator.planner.search.starts import ranked_nodes, starts

Lacking = Callable[[int, int, int, int], int]
"""(node, start, stop, hosts above) -> bytes that are missing there; 0 if it fits."""
_BETTER = 1 - 1e-9
_PROMISING, _OTHERS = 10, 4
_Value = tuple[int, float]
_WORST: _Value = (1 << 62, float("inf"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Limits of a local search: rings evaluated and seconds.

    Attributes:
        evaluations: of rings; the result depends on nothing else unless the clock ends the search first.
        seconds: on ``now_s``.
        now_s: a clock, monotonic.
    """

    evaluations: int
    seconds: float
    now_s: Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalResult:
    """What a local search found.

    Attributes:
        ring: the best ring; None if none fits.
        value_s: its predicted time under the costs that were searched with.
        pool: the best ring of every set of hosts that was a local optimum, best first.
        evaluations: rings that were looked at.
        was_cut: whether the clock ended the search before its evaluations were used up.
    """

    ring: Ring | None
    value_s: float
    pool: tuple[tuple[float, Ring], ...]
    evaluations: int
    was_cut: bool = False


def search_local(
    costs: RingCosts,
    lacking: Lacking,
    budget: Budget,
    *,
    seed: int = 0,
    known: tuple[Ring, ...] = (),
    max_hosts: int = 0,
    construct: bool = True,
) -> LocalResult:
    """Search for a ring with a short predicted time.

    Args:
        costs: of the job; fewer depths and one mean owner make evaluations cheap.
        lacking: memory.
        budget: when to stop.
        seed: of the order of moves and of the kicks.
        known: rings to begin with, besides the constructed ones.
        max_hosts: most stages; 0 = no limit.
        construct: also begin with constructed rings.
    """
    return _Local(costs, lacking, budget, seed, max_hosts or costs.num_nodes).run(known, construct=construct)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage of an evaluated ring, with the figures of the ring from the top down to this stage."""

    node: int
    count: int
    lacking: int
    sum_s: float
    frozen: list[float]
    rows: Rows
    above: Above


class _Over(Exception):
    """Ends a search whose budget is used up."""


class _Local:
    def __init__(self, costs: RingCosts, lacking: Lacking, budget: Budget, seed: int, max_hosts: int) -> None:
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
        """Try every ring, or search until the budget is used up."""
        best: tuple[_Value, Ring] | None = None
        is_small = num_rings(*self._sizes) <= self._budget.evaluations
        try:
            for found in self._tried() if is_small else self._searched(known, construct=construct):
                best = found  # a clock may end the search at any ring
        except _Over:
            pass
        return self._result(best)

    def _tried(self) -> Iterator[tuple[_Value, Ring]]:
        """Evaluate every ring that may be the best of its hosts; give the best one each time that it changes."""
        best: tuple[_Value, Ring] | None = None
        for ring in every_ring(*self._sizes):
            known = self._pool.get(frozenset(ring.nodes))
            value = self._evaluated(ring, _WORST if known is None else known[0])
            if value is None:
                continue
            self._remember(value, ring)
            if best is None or value < best[0]:
                best = value, ring
                yield best

    def _searched(self, known: tuple[Ring, ...], *, construct: bool) -> Iterator[tuple[_Value, Ring]]:
        """Climb from several rings, then from kicked ones, without an end; give the best one again and again."""
        begins = [*known, *(starts(self._costs, self._lacking, self._max_hosts) if construct else [])]
        ranked: list[tuple[_Value, Ring]] = []
        for ring in begins:
            ranked.append((self._fresh(ring), ring))
            yield min(ranked, key=lambda pair: pair[0])
        ranked.sort(key=lambda pair: pair[0])
        if not ranked:
            return
        current = best = ranked[0]
        for _, ring in ranked[:4]:
            current = best = min(best, self._climb(ring), key=lambda pair: pair[0])
            yield best
        while True:
            found = self._climb(self._kicked(current[1]))
            if found[0][0] < current[0][0] or found[0] <= (current[0][0], current[0][1] * 1.005):
                current = found
            best = min(best, found, key=lambda pair: pair[0])
            yield best
            if current[0] > (best[0][0], best[0][1] * 1.02):
                current = best

    def _result(self, best: tuple[_Value, Ring] | None) -> LocalResult:
        pool = sorted(
            (pair for pair in self._pool.values() if not pair[0][0]), key=lambda pair: (pair[0], pair[1].nodes)
        )
        if pool and (best is None or pool[0][0] < best[0]):
            best = pool[0]
        if not pool and best is not None and not best[0][0]:
            pool = [best]
        if best is None or best[0][0]:
            return LocalResult(
                ring=None,
                value_s=float("inf"),
                pool=(),
                evaluations=self._evaluations,
                was_cut=self._was_cut,
            )
        return LocalResult(
            ring=best[1],
            value_s=best[0][1],
            pool=tuple((value[1], ring) for value, ring in pool),
            evaluations=self._evaluations,
            was_cut=self._was_cut,
        )

    # ---- evaluation -------------------------------------------------------------------------------

    def _fresh(self, ring: Ring) -> _Value:
        self._kept = []
        value = self._evaluated(ring, _WORST)
        if value is None:
            raise _Over
        return value

    def _evaluated(self, ring: Ring, limit: _Value) -> _Value | None:
        """Value of a ring: (missing bytes, job's seconds), the less the better; None if it is not below ``limit``.

        A ring below ``limit`` becomes the current one: its stages are kept for the next evaluation.
        """
        self._evaluations += 1
        if self._evaluations > self._budget.evaluations:
            raise _Over
        if self._evaluations % 64 == 0 and self._budget.now_s() > self._end_s:
            self._was_cut = True
            raise _Over
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
        return value

    def _sum_s(self, rows: Rows, first: int) -> float:
        steps, weights = self._costs.steps_at, self._weights
        if len(weights) == 1:
            return sum(steps[at] * row[0] for at, row in enumerate(rows, start=first) if row)
        return sum(steps[at] * sum(map(float.__mul__, weights, row)) for at, row in enumerate(rows, start=first) if row)

    def _total_s(self, stages: list[_Stage]) -> float:
        """Seconds of all steps, where no step is shorter than the busiest frozen stage below its lowest trained one."""
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
                found = self._evaluated(candidate, (value[0], value[1] * _BETTER))
                if found is not None:
                    ring, value, improved = candidate, found, True
                    self._remember(value, ring)
        self._remember(value, ring)
        return value, ring

    def _free(self, ring: Ring) -> list[int]:
        """List nodes that may come in: the ``_PROMISING`` best ranked ones and ``_OTHERS`` drawn from the rest."""
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
