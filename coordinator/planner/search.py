"""Search of the ring, the number of micro-batches, the wire dtype and the credits of a job.

Each pair of micro-batches and wire dtype is searched by itself, with fewer credits, which need less memory, if no ring
fits. The simulator then ranks the best few rings of all searches.

Nodes that are alike get even slices in the order of their names: measured times of equal machines differ by some
percent from start to start, and a plan made from them would differ each time without gain. If no link was measured,
nodes count as alike if they report the same hardware, or if the seconds of their blocks differ by at most a factor
``ALIKE``; all get the times of the middle one, and the median overhead of an action (of two the lower). The even
split is taken unless another, with the same micro-batches and wire dtype, is predicted to be faster by more than a
factor ``WORTH``.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.planner.draft import Draft
from coordinator.planner.judge import Ranking, simulated_job_s
from coordinator.planner.limits import Effort, PlanningClock
from coordinator.planner.local_search import Budget, LocalResult, search_local
from coordinator.planner.memory import MemoryCaps
from coordinator.planner.ring_costs import RingCosts, ring_costs, with_fewer_depths, with_mean_owner
from coordinator.planner.step_time import Ring, job_s
from ringtune.costs.profile import NodeFacts, Profile, WorkTime
from ringtune.errors import DeadlineError
from ringtune.schedule.course import Course
from ringtune.schedule.placement import Slice
from ringtune.schedule.plan import Plan
from ringtune.techniques.activation_checkpointing import AUTO, KEEPS_ALL, NONE, SliceSaving

ALIKE = 1.15
WORTH = 1.15
_TOLERANCE = 1.15


def as_alike(nodes: Sequence[NodeFacts]) -> tuple[NodeFacts, ...] | None:
    """Give all nodes equal times if they are alike; return None if they differ.

    Nodes are alike if they report the same hardware, threads and device, or if the slowest block takes at most
    ``ALIKE`` times the fastest. If any node was not measured all count as alike, with times of 1, or 2 for the backward
    of a block with all parameters trained. What an action takes besides its work is the lower median of the nodes:
    another process may have held one of them up while it measured.
    """
    if any(not block_s(node) > 0 for node in nodes):
        backward_s = 1.0 if nodes[0].model.block_bytes else 2.0
        return _with_times(nodes, (), (1.0, 1.0, backward_s), tokens=0.0, handling_s=0.0)
    ranked = sorted(nodes, key=lambda node: (block_s(node), node.node))
    machines = {(node.hardware, node.threads, node.device) for node in nodes}
    same = len(machines) == 1 and nodes[0].hardware
    if not same and block_s(ranked[-1]) > ALIKE * block_s(ranked[0]):
        return None
    middle = ranked[len(ranked) // 2]
    tokens = [node.train_tokens for node in nodes if node.train_rows]
    mean_tokens = sum(tokens) / len(tokens) if tokens and all(tokens) else 0.0
    block_times_s = middle.block_forward_s, middle.block_graph_s, middle.block_backward_s
    handling_s = statistics.median_low(node.handling_s for node in nodes)
    return _with_times(nodes, _points(ranked), block_times_s, tokens=mean_tokens, handling_s=handling_s)


def _with_times(
    nodes: Sequence[NodeFacts],
    points: tuple[WorkTime, ...],
    block_times_s: tuple[float, float, float],
    *,
    tokens: float,
    handling_s: float,
) -> tuple[NodeFacts, ...]:
    """Give all nodes the same times of works, of a block (forward, graph, backward), and mean tokens of rows."""
    forward_s, graph_s, backward_s = block_times_s
    return tuple(
        dataclasses.replace(
            node,
            work_times=points,
            block_forward_s=forward_s,
            block_graph_s=graph_s,
            block_backward_s=backward_s,
            train_tokens=tokens,
            handling_s=handling_s,
        )
        for node in nodes
    )


def _points(ranked: Sequence[NodeFacts]) -> tuple[WorkTime, ...]:
    """Return for every work the points of the middle node, by block seconds, among the nodes that measured it.

    Only owners measure embedding and head.
    """
    points: list[WorkTime] = []
    for work in sorted({str(point.work) for node in ranked for point in node.work_times}):
        of_nodes = [[point for point in node.work_times if point.work == work] for node in ranked]
        of_nodes = list(filter(None, of_nodes))
        points += of_nodes[len(of_nodes) // 2]
    return tuple(points)


def block_s(node: NodeFacts) -> float:
    """Seconds of one block's forward with graph and backward for one micro-batch; 0 if the node was not measured.

    If only a forward without graph was measured, the seconds of that.
    """
    return node.block_graph_s + node.block_backward_s or node.block_forward_s


def split_blocks(
    costs: Sequence[float], *, start: int, stop: int, longest: Callable[[int, int], int] | None = None
) -> tuple[int, ...] | None:
    """Split blocks into contiguous slices: the slowest slice is fast, and the counts are even.

    Of the splits with a slowest slice at most 15 % slower than the best one, the most even is taken. Remaining blocks
    go to earlier nodes, which train last: 10 blocks on four equal nodes are 3, 3, 2, 2.

    ``costs`` are of one block on each node, in ring order, in any unit. ``longest``: (index, first) -> largest end
    of a slice of that node that begins at ``first``; -1 if not even an empty one fits. By default there is no
    limit.

    Returns:
        Counts in ring order; None if no split fits.
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
    """Return the best contiguous split, by dynamic programming from the last node to the first.

    Without ``weight`` it minimises the slowest slice, with it the sum of weights; no slice costs more than ``limit``.
    Among equals, earlier nodes get more.
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


_FEW_NODES, _FEW_BLOCKS = 8, 24
_EVALUATIONS_EACH = 32
"""Most rings evaluated among few nodes, per node and block; with fewer the best ring is missed more often."""
FEWER_CREDITS = (4, 2, 1)
_COARSE_DEPTHS = 12
_BETTER = 1e-3


class SearchTask(NamedTuple):
    """Profile and limits of a search."""

    profile: Profile
    effort: Effort
    clock: PlanningClock

    def within(self, share: float) -> SearchTask:
        """Return the task with a share of the time left."""
        return self._replace(clock=self.clock.part(share))

    def search(
        self,
        caps: MemoryCaps,
        costs: RingCosts,
        evaluations: int,
        *,
        share: float = 1.0,
        known: tuple[Ring, ...] = (),
        construct: bool = True,
    ) -> LocalResult:
        """Search locally within a share of the time left; note it if the clock ended the search."""
        local = search_local(
            costs,
            lambda node, *where: caps.lacking(costs.names[node], *where),
            Budget(evaluations=evaluations, seconds=share * self.clock.left_s(), now_s=self.clock.now_s),
            seed=self.effort.seed,
            known=known,
            max_hosts=caps.draft.course.method.max_hosts,
            construct=construct,
        )
        self.effort.counts["layouts"] += local.evaluations
        if local.was_cut:
            self.clock.note_cut()
        return local


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The rings found for a draft.

    Attributes:
        caps: of the draft with the credits that fit.
        pool: (predicted seconds of the job, ring), best first.
        proven: whether every ring was evaluated, so that none is better by the formula.
    """

    costs: RingCosts
    caps: MemoryCaps
    pool: tuple[tuple[float, Ring], ...]
    proven: bool = False

    @property
    def draft(self) -> Draft:
        """The draft, with the credits that fit."""
        return self.caps.draft


def searched(draft: Draft, task: SearchTask, *, is_thorough: bool, known: tuple[Ring, ...] = ()) -> SearchResult | None:
    """Search rings with the draft's credits; if none fits, with fewer (``FEWER_CREDITS``), which need less memory.

    The search begins with the ``known`` rings too; with few nodes it is short unless ``is_thorough``. Fewer credits
    cost less time than recomputing blocks, so they are also tried if slices of the best ring save activations.

    Returns:
        None if no ring fits with any number of credits.
    """
    best: SearchResult | None = None
    costs = ring_costs(draft, task.profile)
    for credits_each in (draft.credits, *(fewer for fewer in FEWER_CREDITS if fewer < draft.credits)):
        caps = MemoryCaps(dataclasses.replace(draft, credits=credits_each), task.profile.by_name)
        if not all(caps.fits_empty(owner.node) for owner in draft.course.owners):
            continue
        result = _search(caps, with_saving(costs, caps), task, is_thorough=is_thorough, known=known)
        if result.pool and (best is None or result.pool[0][0] < best.pool[0][0] * (1 - _BETTER)):
            best = result
        if best is not None and not _saves(best):
            return best
    return best


def _saves(result: SearchResult) -> bool:
    """Whether ``auto`` makes a slice of the best ring save activations."""
    if result.draft.saving.name != AUTO:
        return False
    return any(saving != KEEPS_ALL for saving in _savings(result.costs, result.pool[0][1]).values())


def with_saving(costs: RingCosts, caps: MemoryCaps) -> RingCosts:
    """Add to the tables how slices of the draft save activations; unchanged if they keep everything."""
    if caps.draft.saving.name == NONE:
        return costs
    return dataclasses.replace(costs, saving=lambda node, *where: caps.saving_of(costs.names[node], *where))


def _search(
    caps: MemoryCaps, costs: RingCosts, task: SearchTask, *, is_thorough: bool, known: tuple[Ring, ...]
) -> SearchResult:
    """Search few nodes and blocks with all owners; many with the mean owner, then with all."""
    most, num_blocks = task.effort.evaluations, costs.stop - costs.first
    few = max(1, most // 10)
    if costs.num_nodes <= _FEW_NODES and num_blocks <= _FEW_BLOCKS:
        evaluations = min(max(1, most // 2) if is_thorough else few, _EVALUATIONS_EACH * costs.num_nodes * num_blocks)
        rings = task.search(caps, costs, evaluations, known=known)
        return SearchResult(costs=costs, caps=caps, pool=rings.pool, proven=rings.is_complete)
    coarse = with_mean_owner(with_fewer_depths(costs, _COARSE_DEPTHS))
    local = task.search(caps, coarse, most, share=0.75, known=known)
    whole = sorted(((job_s(costs, ring), ring) for _, ring in local.pool[:20]), key=_by_time)
    first = tuple(ring for _, ring in whole[:2])
    finer = with_fewer_depths(costs, 2 * _COARSE_DEPTHS)
    polished = task.search(caps, finer, few, known=first, construct=not first)
    more = ((job_s(costs, ring), ring) for _, ring in polished.pool[:20])
    return SearchResult(costs=costs, caps=caps, pool=tuple(sorted({*whole, *more}, key=_by_time)))


def _by_time(pair: tuple[float, Ring]) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    return pair[0], pair[1].nodes, pair[1].counts


_CANDIDATES = 5
_FINALISTS = 3
_NEAR = 1.25  # the formula's largest error is some twenty percent: tests/bench/planner.py, part formula
_SHARE_OF_SEARCHES = 0.7


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A ring for a draft, with the predicted seconds of the job.

    ``job_s`` is by the formula, ``simulated_s`` by the simulator, None if it was not simulated.
    """

    ring: Ring
    draft: Draft
    job_s: float
    simulated_s: float | None = None

    @property
    def key(self) -> tuple[Ring, Draft]:
        """What the seconds are of."""
        return self.ring, self.draft


@dataclass(frozen=True, kw_only=True, slots=True)
class SettledRing:
    """The chosen ring, judged again with the counts settled for its slices.

    ``equal`` has equal counts for all nodes; None where nodes have none of their own.
    """

    best: Candidate
    costs: RingCosts
    equal: Candidate | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RingChoice:
    """The chosen ring and its runners-up.

    Attributes:
        proven: whether no ring with these micro-batches is faster by the formula.
        cut_after_s: seconds after which the clock ended the planning; None if it did not.
        settled: None if nothing of the course depends on the slices.
        too_large: variants of the course that did not fit, in the order of trial, with the reason; None without
            variants.
    """

    best: Candidate
    others: tuple[Candidate, ...]
    costs: RingCosts
    caps: MemoryCaps
    proven: bool
    even: bool = False
    cut_after_s: float | None = None
    settled: SettledRing | None = None
    too_large: tuple[tuple[Course, str], ...] | None = None

    @property
    def runs(self) -> Candidate:
        """The chosen ring as the run carries it out."""
        return self.settled.best if self.settled is not None else self.best


def choose_plan(drafts: Sequence[Draft], profile: Profile, *, effort: Effort, alike: bool = False) -> RingChoice | None:
    """Choose one of ``drafts`` and a ring for it, for the least predicted seconds of the job.

    There is a draft for each number of micro-batches and wire dtype. With ``alike`` the even split in name order is
    taken unless it is predicted to be much slower.

    Returns:
        None if nothing fits the nodes' memory.

    Raises:
        DeadlineError: the time was used up before any ring was found that fits.
        InterruptedRunError: the caller no longer waits for the plan.
    """
    clock = effort.clock()
    choice = _chosen(drafts, SearchTask(profile, effort, clock), alike=alike)
    if choice is None and clock.was_cut:
        raise DeadlineError(
            f"planning found nothing that fits the nodes' memory within {effort.seconds:g} s; raise runtime.plan_s"
        )
    cut_after_s = effort.seconds if clock.was_cut else None
    return choice and dataclasses.replace(choice, cut_after_s=cut_after_s)


def _chosen(drafts: Sequence[Draft], task: SearchTask, *, alike: bool) -> RingChoice | None:
    """Search each draft briefly, then the best one thoroughly from its ring on, unless every ring was evaluated."""
    is_single, share = len(drafts) == 1, _SHARE_OF_SEARCHES / len(drafts)
    tried = [searched(draft, task.within(share), is_thorough=is_single) for draft in drafts]
    results = [each for each in tried if each is not None]
    if not results:
        return None
    choice = _best_of(results, task, alike=alike)
    best = choice.best
    if is_single or choice.even or choice.proven:
        return choice
    closer = searched(best.draft, task.within(_SHARE_OF_SEARCHES), is_thorough=True, known=(best.ring,))
    if closer is None or closer.pool[0][0] >= best.job_s * (1 - 1e-9):
        return choice
    return _best_of([each for each in results if each.draft is not best.draft] + [closer], task, alike=alike)


def _best_of(results: Sequence[SearchResult], task: SearchTask, *, alike: bool) -> RingChoice:
    """Choose the best ring of all searches, or the even ring of its draft if that is hardly slower."""
    candidates = _candidates(results)
    evens = [even for each in results if (even := _even(each)) is not None] if alike else []
    keys = [even.key for even in evens]
    candidates = sorted([*evens, *(each for each in candidates if each.key not in keys)], key=_by_formula)
    if task.effort.judged_actions:
        candidates = _judged(candidates, results, task)
    best = candidates[0]
    even = next((each for each in candidates if each.draft is best.draft and each.key in keys), None)
    chosen = best
    if even is not None:
        even_s, best_s = both_seconds(even, best)
        chosen = even if even_s <= WORTH * best_s else best
    result = next(each for each in results if each.draft is chosen.draft)
    return RingChoice(
        best=chosen,
        others=tuple(each for each in candidates if each is not chosen),
        costs=result.costs,
        caps=result.caps,
        proven=result.proven and chosen.job_s <= result.pool[0][0] * (1 + 1e-9),
        even=chosen is even,
    )


def slices_of(costs: RingCosts, ring: Ring) -> tuple[Slice, ...]:
    """Return the slices of a ring, with names of nodes: counts 2 and 3 from block 1 on are [1, 3), [3, 6)."""
    slices, at = [], costs.first
    for node, count in zip(ring.nodes, ring.counts, strict=True):
        slices.append(Slice(node=costs.names[node], start=at, stop=at + count))
        at += count
    return tuple(slices)


def plan_of(draft: Draft, costs: RingCosts, ring: Ring) -> Plan:
    """Make the plan that places ``draft`` on ``ring``, with its saved activations."""
    return draft.placed(slices_of(costs, ring), _savings(costs, ring))


def _savings(costs: RingCosts, ring: Ring) -> dict[str, SliceSaving]:
    """Return how each host of a ring saves activations, by name."""
    tops = zip(ring.nodes[::-1], slices_of(costs, ring)[::-1], strict=True)
    return {
        piece.node: costs.saving_of(node, piece.start, piece.stop, above) for above, (node, piece) in enumerate(tops)
    }


def _candidates(results: Sequence[SearchResult]) -> list[Candidate]:
    """Return the ``_CANDIDATES`` fastest rings of every search that fit the nodes' memory, sorted by predicted seconds.

    Searches do not check the memory of helpers. If no ring fits, the fastest one is returned, and refused later by what
    it lacks.
    """
    candidates = []
    for each in results:
        kept = 0
        for seconds, ring in each.pool:
            if kept < _CANDIDATES and _fits(each, ring):
                candidates.append(Candidate(ring=ring, draft=each.draft, job_s=seconds))
                kept += 1
    if not candidates:
        fastest = min(results, key=lambda each: each.pool[0][0])
        seconds, ring = fastest.pool[0]
        candidates.append(Candidate(ring=ring, draft=fastest.draft, job_s=seconds))
    return sorted(candidates, key=_by_formula)


def _by_formula(candidate: Candidate) -> tuple[float, tuple[int, ...], tuple[int, ...], int]:
    return candidate.job_s, candidate.ring.nodes, candidate.ring.counts, candidate.draft.course.microbatches


def both_seconds(first: Candidate, second: Candidate) -> tuple[float, float]:
    """Return the seconds of two candidates: by the simulator if both were simulated, else by the formula."""
    if first.simulated_s is not None and second.simulated_s is not None:
        return first.simulated_s, second.simulated_s
    return first.job_s, second.job_s


def _fits(each: SearchResult, ring: Ring) -> bool:
    plan = plan_of(each.draft, each.costs, ring)
    return all(each.caps.holds(plan, node) for node in plan.nodes)


def _even(each: SearchResult) -> Candidate | None:
    """Return the ring of the most even slices that memory allows, on the nodes by name; None if none fits.

    Example: 12 blocks on four large nodes are 3 each; a node with room for one block gets one.
    """
    costs, caps = each.costs, each.caps
    if each.draft.course.method.max_hosts == 1:
        return None
    last = costs.num_nodes - 1

    def longest(index: int, first: int) -> int:
        stop = first
        for end in range(first + 1, costs.stop + 1):
            above = 0 if end == costs.stop else min(max(1, last - index), costs.stop - end)
            if caps.lacking(costs.names[index], first, end, above) == 0:
                stop = end
        return stop

    counts = split_blocks([1.0] * costs.num_nodes, start=costs.first, stop=costs.stop, longest=longest)
    if counts is None:
        return None
    hosts = [node for node, count in enumerate(counts) if count]
    ring = Ring(nodes=tuple(hosts), counts=tuple(counts[node] for node in hosts))
    return Candidate(ring=ring, draft=each.draft, job_s=job_s(costs, ring)) if _fits(each, ring) else None


def _judged(candidates: list[Candidate], results: Sequence[SearchResult], task: SearchTask) -> list[Candidate]:
    """Sort the best few candidates by the simulator; the others follow in their order.

    All are simulated at few depths, then the best ``_FINALISTS`` at more. If actions or time do not suffice for all,
    the order stays that of the formula.
    """
    near = _worth_judging(candidates)
    share = task.effort.judged_actions // max(1, len(near))

    def simulated(some: Sequence[Candidate], *, is_rough: bool) -> list[Candidate]:
        def seconds(candidate: Candidate) -> float | None:
            costs = next(each.costs for each in results if each.draft is candidate.draft)
            return simulated_job_s(
                plan_of(candidate.draft, costs, candidate.ring),
                task.profile,
                costs,
                candidate.ring,
                max_actions=share,
                is_rough=is_rough,
                is_over=task.clock.is_over,
            )

        ranking = Ranking(seconds).judge_all(some)
        judged = [dataclasses.replace(candidate, simulated_s=s) for s, candidate in ranking.ranked]
        return [] if ranking.is_cut else judged

    finalists = [each.key for each in simulated(near, is_rough=True)[:_FINALISTS]]
    judged = simulated([each for each in near if each.key in finalists], is_rough=False)
    return judged + [each for each in candidates if each.key not in finalists] if judged else candidates


def judged_again(
    candidate: Candidate, draft: Draft, profile: Profile, before: RingCosts, *, effort: Effort
) -> tuple[Candidate, RingCosts]:
    """Judge a candidate's ring for a draft settled since; by the simulator if the candidate was simulated.

    Returns:
        The candidate, and the tables of its draft; its slices save activations as before.
    """
    costs = dataclasses.replace(ring_costs(draft, profile), saving=before.saving)
    seconds = None
    if candidate.simulated_s is not None:
        seconds = simulated_job_s(
            plan_of(draft, costs, candidate.ring),
            profile,
            costs,
            candidate.ring,
            max_actions=effort.judged_actions // _CANDIDATES,
            is_over=effort.is_cancelled,
        )
    return Candidate(ring=candidate.ring, draft=draft, job_s=job_s(costs, candidate.ring), simulated_s=seconds), costs


def _worth_judging(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return ``_CANDIDATES`` candidates within ``_NEAR`` of the best predicted seconds, or more for more kinds.

    A kind is a pair of micro-batches and wire dtype; the best candidate of each kind is always returned.
    """
    near = [each for each in candidates if each.job_s <= _NEAR * candidates[0].job_s]
    by_kind: dict[tuple[int, str], Candidate] = {}
    for each in near:
        by_kind.setdefault((each.draft.course.microbatches, each.draft.course.wire_dtype), each)
    firsts = list(by_kind.values())
    chosen = firsts + [each for each in near if each not in firsts][: max(0, _CANDIDATES - len(firsts))]
    return [each for each in near if each in chosen]
