"""Choose the ring, the number of micro-batches, the wire dtype and the credits of a job.

Each pair of micro-batches and wire dtype is searched on its own, with fewer credits if no ring fits. The simulator then
ranks the best few rings of all searches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.planner.draft import Draft
from coordinator.planner.effort import Effort
from coordinator.planner.even import WORTH, split_blocks
from coordinator.planner.fitting.memory_caps import MemoryCaps
from coordinator.planner.fitting.slice_saving import SliceSaving
from coordinator.planner.predict.judge import simulated_job_s
from coordinator.planner.predict.ring_costs import RingCosts, ring_costs
from coordinator.planner.predict.step_time import Ring, job_s
from coordinator.planner.search.best_rings import Searched, Task, searched
from ringtune.costs.profile import Profile
from ringtune.errors import DeadlineError
from ringtune.schedule.placement import Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.saving import merged, within
from ringtune.schedule.units import Range

_CANDIDATES = 5
_FINALISTS = 3
_NEAR = 1.25  # the formula's largest error is some twenty percent: tests/bench/planner.py, part formula
_SHARE_OF_SEARCHES = 0.7


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A ring for a draft, with the predicted seconds of the job.

    Attributes:
        ring: hosts and counts.
        draft: micro-batches, credits and wire dtype that it was planned with.
        job_s: seconds of all steps, by the formula.
        simulated_s: by the simulator; None if it was not asked.
    """

    ring: Ring
    draft: Draft
    job_s: float
    simulated_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """The chosen ring, judged again with the operations that were settled with its slices.

    Attributes:
        best: with those operations.
        costs: tables with them.
        equal: with equal counts for all nodes; None without ``operations.balance``.
    """

    best: Candidate
    costs: RingCosts
    equal: Candidate | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The ring that was chosen and the rings that it was preferred to.

    Attributes:
        best: the chosen one.
        others: the runners-up, best first.
        costs: tables of the chosen micro-batches and dtype.
        caps: memory of the chosen credits.
        proven: whether the formula knows nothing better for these micro-batches.
        lower_s: no ring is faster by the formula; 0 if not known.
        even: whether alike nodes got even slices.
        cut_after_s: the seconds after which the clock ended the planning; None if it did not.
        settled: what was judged again; None where no operations depend on the slices.
        too_large: ways of holding frozen weights for which no plan fits, in the order in which they were tried, and
            why; None where there was nothing to choose.
    """

    best: Candidate
    others: tuple[Candidate, ...]
    costs: RingCosts
    caps: MemoryCaps
    proven: bool
    lower_s: float
    even: bool = False
    cut_after_s: float | None = None
    settled: Settled | None = None
    too_large: tuple[tuple[str, str], ...] | None = None

    @property
    def runs(self) -> Candidate:
        """The chosen ring with the operations that a run carries out."""
        return self.settled.best if self.settled is not None else self.best


def choose_plan(
    drafts: Sequence[Draft],
    profile: Profile,
    *,
    optimizer: str,
    dtype: str,
    effort: Effort,
    alike: bool = False,
) -> Choice | None:
    """Choose one of ``drafts`` and a ring for it, so that the job takes the least predicted time.

    Args:
        drafts: what is to be placed, once per number of micro-batches and wire dtype to be tried.
        profile: nodes with times, and links.
        optimizer: of the job.
        dtype: of the computation.
        effort: how hard to look.
        alike: prefer the even split in name order, unless it is predicted to be much slower.

    Returns:
        None if nothing fits the nodes' memory.

    Raises:
        DeadlineError: the time was used up before any ring was found that fits.
        InterruptedRunError: nobody waits for the plan any more.
    """
    clock = effort.clock()
    choice = _chosen(drafts, Task(profile, optimizer, dtype, effort, clock), alike=alike)
    if choice is None and clock.was_cut:
        raise DeadlineError(
            f"planning found nothing that fits the nodes' memory within {effort.seconds:g} s; raise runtime.plan_s"
        )
    cut_after_s = effort.seconds if clock.was_cut else None
    return choice and dataclasses.replace(choice, cut_after_s=cut_after_s)


def _chosen(drafts: Sequence[Draft], task: Task, *, alike: bool) -> Choice | None:
    is_single, share = len(drafts) == 1, _SHARE_OF_SEARCHES / len(drafts)
    tried = [searched(draft, task, task.clock.part(share), exact=is_single) for draft in drafts]
    found = [each for each in tried if each is not None]
    if not found:
        return None
    choice = _best_of(found, task, alike=alike)
    if is_single or choice.even:
        return choice
    best = choice.best
    known = next(each for each in found if each.draft is best.draft)
    closer = searched(best.draft, task, task.clock.part(_SHARE_OF_SEARCHES), exact=True, known=known)
    if closer is None or closer.pool[0][0] >= best.job_s * (1 - 1e-9):
        return choice
    return _best_of([each for each in found if each.draft is not best.draft] + [closer], task, alike=alike)


def _best_of(found: Sequence[Searched], task: Task, *, alike: bool) -> Choice:
    """Choose the best ring of all searches, or the even one of the best ring's own draft where that is worth it."""
    candidates = _candidates(found)
    evens = [even for each in found if (even := _even(each)) is not None] if alike else []
    pairs = [(even.ring, even.draft) for even in evens]
    candidates = sorted([*evens, *(one for one in candidates if (one.ring, one.draft) not in pairs)], key=_by_formula)
    if task.effort.judged_actions:
        candidates = _judged(candidates, found, task)
    best = candidates[0]
    even = next((one for one in candidates if one.draft is best.draft and (one.ring, one.draft) in pairs), None)
    is_even = even is not None and _is_worth_taking(even, best)
    chosen = even if even is not None and is_even else best
    return _choice(chosen, tuple(one for one in candidates if one is not chosen), found, is_even=is_even)


def slices_of(costs: RingCosts, ring: Ring) -> tuple[Slice, ...]:
    """Return a ring's slices with their nodes' names: counts 2 and 3 from block 1 on are [1, 3), [3, 6)."""
    slices, at = [], costs.first
    for node, count in zip(ring.nodes, ring.counts, strict=True):
        slices.append(Slice(node=costs.names[node], start=at, stop=at + count))
        at += count
    return tuple(slices)


def plan_of(draft: Draft, costs: RingCosts, ring: Ring) -> Plan:
    """Make the plan that places ``draft`` on ``ring``, with what its slices do to save activations."""
    slices = slices_of(costs, ring)
    savings = savings_of(costs, ring)
    projecting = [piece for piece in slices if savings[piece.node].is_projected]
    allowed = draft.velora.blocks if draft.velora is not None and draft.may_project else ()
    return draft.placed(
        slices,
        recompute=merged(Range(saving.start, saving.stop) for saving in savings.values() if saving.recomputed),
        projected=merged(cut for piece in projecting for cut in within(allowed, piece.start, piece.stop)),
    )


def savings_of(costs: RingCosts, ring: Ring) -> dict[str, SliceSaving]:
    """How each host of a ring saves activations."""
    slices = slices_of(costs, ring)
    return {
        piece.node: costs.saving_of(node, piece.start, piece.stop, len(slices) - 1 - index)
        for index, (node, piece) in enumerate(zip(ring.nodes, slices, strict=True))
    }


def _candidates(found: Sequence[Searched]) -> list[Candidate]:
    """Take from every search its ``_CANDIDATES`` fastest rings that fit the nodes' memory; sort by predicted time.

    Searches know nothing of the room of helpers. If no ring fits, the fastest one is taken, and refused afterwards by
    what it lacks.
    """
    candidates = []
    for each in found:
        kept = 0
        for seconds, ring in each.pool:
            if kept < _CANDIDATES and _fits(each, ring):
                candidates.append(Candidate(ring=ring, draft=each.draft, job_s=seconds))
                kept += 1
    if not candidates:
        fastest = min(found, key=lambda each: each.pool[0][0])
        seconds, ring = fastest.pool[0]
        candidates.append(Candidate(ring=ring, draft=fastest.draft, job_s=seconds))
    return sorted(candidates, key=_by_formula)


def _by_formula(one: Candidate) -> tuple[float, tuple[int, ...], tuple[int, ...], int]:
    return one.job_s, one.ring.nodes, one.ring.counts, one.draft.course.microbatches


def _is_worth_taking(even: Candidate, best: Candidate) -> bool:
    """Whether the even split is predicted to be at most ``WORTH`` times slower than the best ring.

    The simulator says so if it was asked about both, otherwise the formula.
    """
    if even.simulated_s is not None and best.simulated_s is not None:
        return even.simulated_s <= WORTH * best.simulated_s
    return even.job_s <= WORTH * best.job_s


def _fits(each: Searched, ring: Ring) -> bool:
    plan = plan_of(each.draft, each.costs, ring)
    return all(each.caps.holds(plan, node) for node in plan.nodes)


def _even(each: Searched) -> Candidate | None:
    """Cut the blocks into slices as even as memory allows, on the nodes by name; None if none fits.

    Example: 12 blocks on four roomy nodes are 3 each; a node with room for one block gets one.
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


def _judged(candidates: list[Candidate], found: Sequence[Searched], task: Task) -> list[Candidate]:
    """Rank the best few candidates by the simulator; candidates that were not simulated follow in their order.

    All are judged roughly, the best ``_FINALISTS`` then well. The order stays that of the formula if actions or time do
    not suffice to probe each.
    """
    near = _worth_judging(candidates)
    share = task.effort.judged_actions // max(1, len(near))

    def simulated(some: Sequence[Candidate], *, is_rough: bool) -> list[Candidate]:
        judged = []
        for one in some:
            costs = next(each.costs for each in found if each.draft is one.draft)
            seconds = simulated_job_s(
                plan_of(one.draft, costs, one.ring),
                task.profile,
                costs,
                one.ring,
                optimizer=task.optimizer,
                most_actions=share,
                is_rough=is_rough,
                is_over=task.clock.is_over,
            )
            if seconds is None:
                return []
            judged.append(dataclasses.replace(one, simulated_s=seconds))
        return sorted(judged, key=lambda one: (one.simulated_s, one.job_s, one.ring.nodes, one.ring.counts))

    finalists = [(one.ring, one.draft) for one in simulated(near, is_rough=True)[:_FINALISTS]]
    judged = simulated([one for one in near if (one.ring, one.draft) in finalists], is_rough=False)
    return judged + [one for one in candidates if (one.ring, one.draft) not in finalists] if judged else candidates


def judged_again(
    one: Candidate, draft: Draft, profile: Profile, before: RingCosts, *, optimizer: str, effort: Effort
) -> tuple[Candidate, RingCosts]:
    """Judge a candidate's ring for a draft that was settled since; by the simulator if the candidate was.

    Returns:
        The candidate, and the tables of its draft; its slices save activations as they did before.
    """
    costs = dataclasses.replace(ring_costs(draft, profile, optimizer=optimizer), saving=before.saving)
    seconds = None
    if one.simulated_s is not None:
        seconds = simulated_job_s(
            plan_of(draft, costs, one.ring),
            profile,
            costs,
            one.ring,
            optimizer=optimizer,
            most_actions=effort.judged_actions // _CANDIDATES,
            is_over=effort.is_cancelled,
        )
    return Candidate(ring=one.ring, draft=draft, job_s=job_s(costs, one.ring), simulated_s=seconds), costs


def _worth_judging(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Take at most ``_CANDIDATES`` candidates within ``_NEAR`` of the best predicted time, the best of each kind first.

    A kind is a pair of micro-batches and wire dtype; with more kinds than ``_CANDIDATES`` each gives its best one.
    """
    near = [one for one in candidates if one.job_s <= _NEAR * candidates[0].job_s]
    kinds = list(dict.fromkeys((one.draft.course.microbatches, one.draft.course.wire_dtype) for one in near))
    firsts = [
        next(one for one in near if (one.draft.course.microbatches, one.draft.course.wire_dtype) == kind)
        for kind in kinds
    ]
    chosen = firsts + [one for one in near if one not in firsts][: max(0, _CANDIDATES - len(firsts))]
    return [one for one in near if one in chosen]


def _choice(best: Candidate, others: tuple[Candidate, ...], found: Sequence[Searched], *, is_even: bool) -> Choice:
    each = next(each for each in found if each.draft is best.draft)
    return Choice(
        best=best,
        others=others,
        costs=each.costs,
        caps=each.caps,
        proven=each.proven and best.job_s <= each.lower_s * (1 + 1e-9),
        lower_s=each.lower_s,
        even=is_even,
    )
