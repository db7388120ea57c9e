"""Whether stages with several hosts are faster than the best ring: both are judged by the simulator in the same way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from coordinator.planner.draft import Draft
from coordinator.planner.fitting.memory_caps import MemoryCaps
from coordinator.planner.predict.judge import simulated_steps_s
from coordinator.planner.predict.ring_costs import RingCosts, ring_costs
from coordinator.planner.replicating.layouts import Layout, neighbours, ranked_layouts, slices_of_layout
from coordinator.planner.replicating.reason import ReplicasReason, layout_text
from ringtune.costs.equal_copies import numeric_class
from ringtune.costs.profile import Profile
from ringtune.schedule.plan import Plan
from ringtune.schedule.slice_policy import NONE
from ringtune.schedule.stages.refusals import no_replicas

WORTH: Final = 0.98
"""Stages with several hosts are taken where they need at most this share of the ring's seconds."""

_JUDGED: Final = 8
_TRIED: Final = 200
_CLIMBED: Final = 16
"""Most layouts that are judged on the way from the best of the first few to a better one."""
_ROUGH_DEPTHS: Final = 3
"""At so many depths layouts are judged at first; the best ``_FINALISTS`` then at more, as the ring is."""
_FINALISTS: Final = 2


class _Tables(NamedTuple):
    """A draft with what layouts of it cost in time and memory."""

    draft: Draft
    costs: RingCosts
    caps: MemoryCaps

    def placed(self, layout: Layout) -> Plan | None:
        """The plan of a layout; None if a node has no memory for its part."""
        plan = self.draft.placed(slices_of_layout(self.costs, layout))
        return plan if all(self.caps.holds(plan, node) for node in plan.nodes) else None


class _Option(NamedTuple):
    """A layout that fits, with the formula's seconds."""

    rough_s: float
    layout: Layout
    plan: Plan
    tables: _Tables


def choose_replicas(
    plan: Plan,
    drafts: Sequence[Draft],
    profile: Profile,
    *,
    optimizer: str,
    dtype: str,
    is_over: Callable[[], bool],
) -> tuple[Plan | None, ReplicasReason]:
    """Judge the best layouts that fit the nodes' memory beside the best ring.

    Nearly all seconds of planning are the simulator's, so all layouts are judged roughly, and the best few well.

    Args:
        plan: the best ring.
        drafts: what is to be placed, once per number of micro-batches and wire dtype to be tried.
        profile: nodes with times, and links.
        optimizer: of the job.
        dtype: of the computation.
        is_over: whether the time for planning is used up.

    Returns:
        The plan with replicas if it is worth taking, else None; and the reasons.
    """
    if why_not := _why_not(plan, drafts, profile):
        return None, ReplicasReason(why_not=why_not)
    options = sorted(_options(drafts, profile, optimizer, dtype, is_over), key=lambda one: one.rough_s)
    if not options:
        return None, ReplicasReason(why_not="no node has memory for blocks of another one too")

    def roughly(one: _Option) -> tuple[float, _Option]:
        costs = one.tables.costs
        return simulated_steps_s(one.plan, profile, costs, optimizer=optimizer, most_depths=_ROUGH_DEPTHS), one

    rough = [roughly(one) for one in itertools.takewhile(lambda _: not is_over(), _worth_judging(options))]
    rough += _climbed(rough, roughly, is_over)
    finalists = [one for _, one in sorted(rough, key=lambda pair: pair[0])[:_FINALISTS]]
    judged = [
        (simulated_steps_s(one.plan, profile, one.tables.costs, optimizer=optimizer), one)
        for one in itertools.takewhile(lambda _: not is_over(), finalists)
    ]
    if not judged:
        return None, ReplicasReason(why_not="the time for planning was used up")
    placement = plan.placement
    draft = Draft(course=plan.course, private_blocks=placement.private_blocks, credits=placement.credits)
    ring_s = simulated_steps_s(plan, profile, ring_costs(draft, profile, optimizer=optimizer), optimizer=optimizer)
    judged.sort(key=lambda pair: pair[0])
    best_s, best = judged[0]
    is_taken = best_s <= WORTH * ring_s
    texts = tuple((layout_text(one.plan), seconds) for seconds, one in judged)
    reason = ReplicasReason(ring_s=ring_s, judged=texts, num_rough=len(rough), is_taken=is_taken)
    return best.plan if is_taken else None, reason


def _climbed(
    judged: Sequence[tuple[float, _Option]],
    judge: Callable[[_Option], tuple[float, _Option]],
    is_over: Callable[[], bool],
) -> list[tuple[float, _Option]]:
    """Go on from the best layout of each number of stages to faster ones beside it, the best of them first."""
    found: list[tuple[float, _Option]] = []
    seen = {one.plan for _, one in judged}
    ordered = sorted(judged, key=lambda pair: pair[0])
    firsts = {len(pair[1].layout): pair for pair in reversed(ordered)}
    for start_s, start in sorted(firsts.values(), key=lambda pair: pair[0]):
        best_s, best = start_s, start
        while True:
            steps: list[tuple[float, _Option]] = []
            for layout in neighbours(best.layout):
                plan = best.tables.placed(layout)
                if plan is None or plan in seen or is_over() or len(found) + len(steps) >= _CLIMBED:
                    continue
                seen.add(plan)
                steps.append(judge(_Option(best.rough_s, layout, plan, best.tables)))
            found += steps
            if not steps or min(steps, key=lambda pair: pair[0])[0] >= best_s:
                break
            best_s, best = min(steps, key=lambda pair: pair[0])
    return found


def _options(
    drafts: Sequence[Draft], profile: Profile, optimizer: str, dtype: str, is_over: Callable[[], bool]
) -> Iterator[_Option]:
    """Yield layouts of each draft that fit the nodes' memory: the first few by the formula, the first of each depth."""
    for draft in drafts:
        costs = ring_costs(draft, profile, optimizer=optimizer)
        tables = _Tables(draft, costs, MemoryCaps(draft, profile.by_name, optimizer=optimizer, dtype=dtype))
        block_bytes = profile.nodes[0].model.adapter_block_bytes

        def exchange_s(nodes: Sequence[int], blocks: int) -> float:
            return _exchange_s(profile, [costs.names[node] for node in nodes], blocks * block_bytes)  # noqa: B023

        rooms = [tables.caps.most_blocks(name) for name in costs.names]
        classes = [numeric_class(profile.by_name[name]) for name in costs.names]
        ranked = ranked_layouts(costs, exchange_s, rooms, classes) if costs.num_micro > 1 else []
        fitting = (
            _Option(rough_s, layout, found, tables)
            for rough_s, layout in _of_interest(ranked)
            if (found := tables.placed(layout)) is not None
        )
        yield from itertools.islice(itertools.takewhile(lambda _: not is_over(), fitting), _JUDGED)


def _of_interest(ranked: Sequence[tuple[float, Layout]]) -> list[tuple[float, Layout]]:
    """Take the first of each number of stages, which the formula compares badly, then the others in their order."""
    firsts = {len(pair[1]): pair for pair in reversed(ranked)}
    others = (pair for pair in ranked if pair is not firsts[len(pair[1])])
    return [*sorted(firsts.values(), key=lambda pair: pair[0]), *itertools.islice(others, _TRIED)]


def _worth_judging(options: Sequence[_Option]) -> list[_Option]:
    """Take the first ``_JUDGED`` options, among them the first of each draft and of each number of stages."""
    firsts: dict[tuple[str, int, str], _Option] = {}
    for one in options:
        course = one.plan.course
        firsts.setdefault(("draft", course.microbatches, course.wire_dtype), one)
        firsts.setdefault(("stages", len(one.layout), ""), one)
    chosen = list({id(one): one for one in firsts.values()}.values())
    more = [one for one in options if not any(one is first for first in chosen)]
    return chosen + more[: max(0, _JUDGED - len(chosen))]


def _why_not(plan: Plan, drafts: Sequence[Draft], profile: Profile) -> str:
    if reason := no_replicas(plan.course):
        return reason
    if plan.placement.helpers:
        return "helpers fit adapters of one host"
    if plan.course.method.max_hosts == 1:
        return "the method runs all blocks on one node"
    if any(draft.activations != NONE for draft in drafts):
        return "memory.activations is decided for slices of their own"
    if plan.course.may_skip:
        return "operation tables are balanced over the hosts of a ring"
    if len(profile.nodes) < 2:
        return "there is one node"
    if all(len(draft.course.microbatch_sizes()) < 2 for draft in drafts):
        return "a step has one micro-batch"
    classes = {node.node: numeric_class(node) for node in profile.nodes}
    if len(set(classes.values())) == len(classes):
        told = "; ".join(f"{name}: {found}" for name, found in classes.items())
        return f"copies have to be equal in every bit, and no two nodes compute alike ({told})"
    return ""


def _exchange_s(profile: Profile, names: Sequence[str], num_bytes: float) -> float:
    """Seconds in which each of some nodes sends so many bytes to every other one, one after the other."""
    longest_s = 0.0
    for source in names:
        links = (profile.link_by_pair.get((source, target)) for target in names if target != source)
        longest_s = max(longest_s, sum(link.seconds(num_bytes) for link in links if link is not None))
    return longest_s
