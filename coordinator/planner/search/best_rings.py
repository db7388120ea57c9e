"""Search the best rings for one draft: exactly among few nodes, with many starts among many.

If no ring fits with the draft's credits, fewer are tried, which need less memory.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.planner.draft import Draft
from coordinator.planner.effort import Effort, PlanningClock
from coordinator.planner.fitting.memory_caps import MemoryCaps
from coordinator.planner.fitting.slice_saving import KEEPS_ALL
from coordinator.planner.predict.ring_costs import RingCosts, ring_costs, with_fewer_depths, with_mean_owner
from coordinator.planner.predict.step_time import Ring, job_s
from coordinator.planner.search.exact import search_exact
from coordinator.planner.search.local_search import Budget, LocalResult, search_local
from ringtune.costs.profile import Profile
from ringtune.jobs.parts.memory import AUTO
from ringtune.schedule.slice_policy import NONE

EXACT_NODES, EXACT_BLOCKS = 8, 24
FEWER_CREDITS = (4, 2, 1)
_COARSE_DEPTHS = 12
_BETTER = 1e-3


class Task(NamedTuple):
    """The profile and the job's settings to plan with, and how hard to look."""

    profile: Profile
    optimizer: str
    dtype: str
    effort: Effort
    clock: PlanningClock


class _Places(NamedTuple):
    """A draft with what its rings cost in time and memory, and the clock of its search."""

    draft: Draft
    costs: RingCosts
    caps: MemoryCaps
    clock: PlanningClock
    counts: Counter[str]

    def lacking(self, node: int, start: int, stop: int, above: int) -> int:
        """Bytes that a node lacks for a slice."""
        return self.caps.lacking(self.costs.names[node], start, stop, above)


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """The rings that were found for a draft, best first.

    Attributes:
        draft: with the credits that fit.
        costs: tables of the draft.
        caps: memory of the draft.
        pool: (predicted seconds of the job, ring).
        proven: whether the formula knows nothing better.
        lower_s: no ring is faster by the formula; 0 if not known.
    """

    draft: Draft
    costs: RingCosts
    caps: MemoryCaps
    pool: tuple[tuple[float, Ring], ...]
    proven: bool = False
    lower_s: float = 0.0


def searched(
    draft: Draft, task: Task, clock: PlanningClock, *, exact: bool, known: Searched | None = None
) -> Searched | None:
    """Search rings with the draft's credits; if none fits, with 4, 2 and 1 credits, which need less memory.

    With ``known``, which an earlier search found for this draft, the exact search begins where that one ended.

    Fewer credits cost less time than running blocks again. So where slices of the best ring save activations, fewer
    credits are tried too, and the fastest ring of all is taken.

    Returns:
        None if no ring fits with any number of credits.
    """
    best: Searched | None = None
    costs = ring_costs(draft, task.profile, optimizer=task.optimizer)
    for credits_each in (draft.credits, *(fewer for fewer in FEWER_CREDITS if fewer < draft.credits)):
        narrowed = dataclasses.replace(draft, credits=credits_each)
        caps = MemoryCaps(narrowed, task.profile.by_name, optimizer=task.optimizer, dtype=task.dtype)
        if not all(caps.fits_empty(owner.node) for owner in draft.course.owners):
            continue
        saving = with_saving(costs, caps)
        found = _search(
            _Places(narrowed, saving, caps, clock, task.effort.counts), task.effort, exact=exact, known=known
        )
        if found.pool and (best is None or found.pool[0][0] < best.pool[0][0] * (1 - _BETTER)):
            best = found
        if best is not None and not _saves(best):
            return best
    return best


def _saves(found: Searched) -> bool:
    """Whether a slice of the best ring that was found saves activations although the job left that to the planner."""
    if found.draft.activations != AUTO:
        return False
    ring, stop = found.pool[0][1], found.costs.first
    for index, (node, count) in enumerate(zip(ring.nodes, ring.counts, strict=True)):
        start, stop = stop, stop + count
        if found.costs.saving_of(node, start, stop, len(ring.nodes) - 1 - index) != KEEPS_ALL:
            return True
    return False


def with_saving(costs: RingCosts, caps: MemoryCaps) -> RingCosts:
    """Give the tables of a draft what its slices do to save activations; the same tables where they keep everything."""
    if caps.draft.activations == NONE:
        return costs
    return dataclasses.replace(costs, saving=lambda node, *where: caps.saving_of(costs.names[node], *where))


def _search(places: _Places, effort: Effort, *, exact: bool, known: Searched | None) -> Searched:
    draft, costs, caps, clock, _ = places
    is_small = costs.num_nodes <= EXACT_NODES and costs.stop - costs.first <= EXACT_BLOCKS
    few = max(1, effort.evaluations // 10)
    if not is_small:
        return _search_many(places, effort, () if known is None else (known.pool[0][1],))
    if known is not None and known.draft == draft:
        pool = known.pool
    else:
        pool = _local(places, costs, few, 0.5, seed=effort.seed, known=()).pool
    if not exact:
        return Searched(draft=draft, costs=costs, caps=caps, pool=pool)
    done = search_exact(
        costs,
        lambda *where: not places.lacking(*where),
        known=pool[0][1] if pool else None,
        max_hosts=draft.course.method.max_hosts,
        max_expanded=effort.expanded,
        is_over=clock.is_over,
    )
    pool = _merged(done.others, pool)
    return Searched(draft=draft, costs=costs, caps=caps, pool=pool, proven=done.proven, lower_s=done.lower_s)


def _search_many(places: _Places, effort: Effort, begins: tuple[Ring, ...]) -> Searched:
    """Search among so many nodes or blocks that no exact search would end: with the mean owner, then with all."""
    draft, costs, caps, *_ = places
    coarse = with_mean_owner(with_fewer_depths(costs, _COARSE_DEPTHS))
    local = _local(places, coarse, effort.evaluations, 0.75, seed=effort.seed, known=begins)
    exact_pool = sorted(((job_s(costs, ring), ring) for _, ring in local.pool[:20]), key=_by_time)
    first = tuple(ring for _, ring in exact_pool[:2])
    finer = with_fewer_depths(costs, 2 * _COARSE_DEPTHS)
    few = max(1, effort.evaluations // 10)
    polished = _local(places, finer, few, 1.0, seed=effort.seed, known=first, construct=not first)
    more = tuple((job_s(costs, ring), ring) for _, ring in polished.pool[:20])
    return Searched(draft=draft, costs=costs, caps=caps, pool=_merged(tuple(exact_pool), more))


def _local(
    places: _Places,
    costs: RingCosts,
    evaluations: int,
    share: float,
    *,
    seed: int,
    known: tuple[Ring, ...],
    construct: bool = True,
) -> LocalResult:
    """Search locally within a share of the time that is left, and note it if the clock ended the search."""
    clock = places.clock
    found = search_local(
        costs,
        places.lacking,
        Budget(evaluations=evaluations, seconds=share * clock.left_s(), now_s=clock.now_s),
        seed=seed,
        known=known,
        max_hosts=places.draft.course.method.max_hosts,
        construct=construct,
    )
    places.counts["layouts"] += found.evaluations
    if found.was_cut:
        clock.note_cut()
    return found


def _merged(*pools: Sequence[tuple[float, Ring]]) -> tuple[tuple[float, Ring], ...]:
    best: dict[Ring, float] = {}
    for pool in pools:
        for seconds, ring in pool:
            best[ring] = min(seconds, best.get(ring, seconds))
    return tuple(sorted(((seconds, ring) for ring, seconds in best.items()), key=_by_time))


def _by_time(pair: tuple[float, Ring]) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    return pair[0], pair[1].nodes, pair[1].counts
