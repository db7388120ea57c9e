"""Stages with several hosts: layouts ranked by a formula, the best of them judged by the simulator.

With at most ``FEW_NODES`` nodes every layout of up to three stages (two with more than four nodes) is ranked, with
every cut; equally fast nodes with room for equally many blocks count as alike. With more, nodes are spread over stages
of about equal speed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from coordinator.planner.draft import Draft
from coordinator.planner.judge import Ranking, simulated_steps_s
from coordinator.planner.memory import MemoryCaps
from coordinator.planner.ring_costs import RingCosts, ring_costs
from coordinator.planner.step_time import Exchange, Layout, Stage, layout_step_s, shares_of
from ringtune.costs.measurement import numeric_class
from ringtune.costs.profile import Profile
from ringtune.schedule.placement import Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import no_replicas
from ringtune.techniques.activation_checkpointing import NONE

_TOLD: Final = 5
"""Most other layouts that are printed; the ring of single hosts is always one of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicasReason:
    """The planner's judgement of stages with several hosts.

    Attributes:
        ring_s: seconds of all steps on the best ring, by the simulator.
        judged: (slices in words, seconds) of each finalist, fastest first.
        num_rough: number of layouts that were simulated at few depths, finalists included.
        why_not: why none was judged; empty if some were.
    """

    ring_s: float = 0.0
    judged: tuple[tuple[str, float], ...] = ()
    num_rough: int = 0
    is_taken: bool = False
    why_not: str = ""

    @property
    def best_s(self) -> float | None:
        """Seconds of all steps of the plan that was taken; None if nothing was judged."""
        return None if not self.judged else self.judged[0][1] if self.is_taken else self.ring_s

    def lines(self, seconds: Callable[[float], str]) -> list[str]:
        """Write the judgement as lines."""
        if self.why_not:
            return [f"  each block has one host: {self.why_not}"]
        ring = ("one host for each block", self.ring_s)
        first, *others = sorted([*self.judged, ring], key=lambda pair: pair[1])
        if not self.is_taken:
            return [
                f"  placement.replicas: {_told(self.judged[0], seconds)}, not much faster than {_told(ring, seconds)}"
            ]
        lines = [f"  all steps: {seconds(first[1])} by the simulator"]
        told = others[:_TOLD] if ring in others[:_TOLD] else [*others[: _TOLD - 1], ring]
        lines += [f"  {'second best' if layout is others[0] else 'other'}: {_told(layout, seconds)}" for layout in told]
        more = self.num_rough + 1 - len(told) - 1
        return lines + ([f"  {more} more were simulated"] if more > 0 else [])


def layout_text(plan: Plan) -> str:
    """Name stages and micro-batches: ``[0, 6) on a, b; [6, 12) on c with 8 micro-batches``, with shares if unequal."""
    parts = []
    for stage in plan.placement.stages:
        has_shares = len({piece.share for piece in stage}) > 1
        names = (f"{piece.node} x{piece.share}" if has_shares else piece.node for piece in stage)
        parts.append(f"{stage[0].text} on {', '.join(names)}")
    return f"{'; '.join(parts)} with {plan.course.microbatches} micro-batches"


def _told(layout: tuple[str, float], seconds: Callable[[float], str]) -> str:
    return f"{layout[0]}: {seconds(layout[1])}"


FEW_NODES: Final = 6
_THREE_STAGES_UP_TO: Final = 4
_DEPTHS: Final = 4
_ALIKE: Final = 0.02
"""Nodes count as equally fast if the seconds of their blocks differ by at most this share."""


def ranked_layouts(
    costs: RingCosts, exchange_s: Exchange, rooms: Sequence[int] = (), classes: Sequence[str] = ()
) -> list[tuple[float, Layout]]:
    """Return the layouts with at least one stage of several hosts, sorted by the formula's seconds of some steps.

    ``rooms``: for how many blocks each node has room as their only host; nodes are alike only if equal. As one of
    several hosts it keeps less of each block, so that layouts may give it more. ``classes``: the numeric class of
    each node; hosts of one stage have the same. Empty = all equal.
    """
    rooms, classes = rooms or (0,) * costs.num_nodes, classes or ("",) * costs.num_nodes
    step = max(1, len(costs.depths) // _DEPTHS)
    depths = list(costs.depths[step - 1 :: step])
    layouts_s = [
        (sum(costs.steps_at[depth] * layout_step_s(costs, layout, depth, exchange_s) for depth in depths), layout)
        for layout in _layouts(costs, rooms, classes)
    ]
    return sorted(layouts_s, key=lambda pair: (pair[0], [(stage.nodes, stage.count) for stage in pair[1]]))


def neighbours(layout: Layout) -> Iterator[Layout]:
    """Yield the layouts with one block moved to the next stage, or with two adjacent stages' hosts exchanged."""
    for at, (lower, upper) in enumerate(itertools.pairwise(layout)):
        for more in (1, -1):
            counts = lower.count + more, upper.count - more
            if min(counts) > 0:
                moved = (dataclasses.replace(lower, count=counts[0]), dataclasses.replace(upper, count=counts[1]))
                yield (*layout[:at], *moved, *layout[at + 2 :])
        yield (*layout[:at], upper, lower, *layout[at + 2 :])


def slices_of_layout(costs: RingCosts, layout: Layout) -> tuple[Slice, ...]:
    """Return the slices of a layout, with names of nodes and shares."""
    slices, at = list[Slice](), costs.first
    for stage in layout:
        common = math.gcd(*stage.shares)
        for node, share in zip(stage.nodes, stage.shares, strict=True):
            slices.append(Slice(node=costs.names[node], start=at, stop=at + stage.count, share=share // common))
        at += stage.count
    return tuple(slices)


def _layouts(costs: RingCosts, rooms: Sequence[int], classes: Sequence[str]) -> Iterator[Layout]:
    blocks = costs.stop - costs.first
    for groups in _groups(costs, rooms, classes):
        for counts in _cuts(costs, groups, blocks):
            layout = tuple(_stage(costs, nodes, count) for nodes, count in zip(groups, counts, strict=True))
            if all(min(stage.shares) for stage in layout) and any(len(stage.nodes) > 1 for stage in layout):
                yield layout


def _stage(costs: RingCosts, nodes: tuple[int, ...], count: int) -> Stage:
    times_s = [costs.forward_s[node] + costs.graph_s[node] + costs.backward_s[node] for node in nodes]
    return Stage(nodes=nodes, shares=shares_of(times_s, costs.num_micro), count=count)


def _groups(costs: RingCosts, rooms: Sequence[int], classes: Sequence[str]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield the nodes of each stage, bottom to top, of one class each; one of several equivalent groupings."""
    nodes = sorted(range(costs.num_nodes), key=lambda node: (_block_s(costs, node), node))
    if len(nodes) > FEW_NODES:
        yield from _balanced_groups(costs, nodes, classes)
        return
    kind_of = _kinds(costs, nodes)
    seen = set()
    for num_stages in range(1, 4 if len(nodes) <= _THREE_STAGES_UP_TO else 3):
        for places in itertools.product(range(num_stages + 1), repeat=len(nodes)):
            pairs = list(zip(nodes, places, strict=True))
            groups = tuple(tuple(node for node, place in pairs if place == at) for at in range(1, num_stages + 1))
            key = tuple(
                tuple(sorted((kind_of[node], rooms[node], classes[node]) for node in group)) for group in groups
            )
            if all(len({classes[node] for node in group}) == 1 for group in groups) and key not in seen:
                seen.add(key)
                yield groups


def _balanced_groups(
    costs: RingCosts, nodes: Sequence[int], classes: Sequence[str]
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield stages of about equal speed, for each number of stages; classes get stages in proportion to their nodes.

    Example: of six nodes of one class and two of another, three stages are two of three nodes and one of two.
    """
    of_class: dict[str, list[int]] = {}
    for node in nodes:
        of_class.setdefault(classes[node], []).append(node)
    counts = dict.fromkeys(of_class, 1)
    while sum(counts.values()) <= max(len(nodes) // 2, len(of_class)):
        groups = (_balanced(costs, members, counts[name]) for name, members in of_class.items())
        yield tuple(itertools.chain.from_iterable(groups))
        counts[max(counts, key=lambda name: len(of_class[name]) / counts[name])] += 1


def _balanced(costs: RingCosts, nodes: Sequence[int], num_stages: int) -> tuple[tuple[int, ...], ...]:
    groups: list[list[int]] = [[] for _ in range(num_stages)]
    rates = [0.0] * num_stages
    for node in nodes:
        at = min(range(num_stages), key=lambda index: rates[index])
        groups[at].append(node)
        rates[at] += 1 / max(1e-12, _block_s(costs, node))
    return tuple(map(tuple, groups))


def _cuts(costs: RingCosts, groups: Sequence[Sequence[int]], blocks: int) -> Iterator[tuple[int, ...]]:
    """Yield the blocks of each stage: every cut with few nodes, else one in proportion to speed."""
    if costs.num_nodes <= FEW_NODES:
        for inner in itertools.combinations(range(1, blocks), len(groups) - 1):
            yield tuple(after - before for before, after in itertools.pairwise((0, *inner, blocks)))
        return
    if len(groups) > blocks:
        return
    rates = [sum(1 / max(1e-12, _block_s(costs, node)) for node in group) for group in groups]
    counts = [1] * len(groups)
    for _ in range(blocks - len(groups)):
        counts[min(range(len(groups)), key=lambda at: (counts[at] + 1) / rates[at])] += 1
    yield tuple(counts)


def _kinds(costs: RingCosts, nodes: Sequence[int]) -> dict[int, int]:
    """Number nodes by speed: those within ``_ALIKE`` of a kind's first node have its number."""
    kinds: dict[int, int] = {}
    last_s, kind = 0.0, -1
    for node in nodes:
        if _block_s(costs, node) > last_s * (1 + _ALIKE):
            last_s, kind = _block_s(costs, node), kind + 1
        kinds[node] = kind
    return kinds


def _block_s(costs: RingCosts, node: int) -> float:
    return costs.graph_s[node] + costs.backward_s[node]


WORTH: Final = 0.98
"""Stages with several hosts are taken if they need at most this share of the ring's seconds."""

_JUDGED: Final = 8
_TRIED: Final = 200
_CLIMBED: Final = 16
"""Most neighbours that are judged in the search from the best layouts."""
_ROUGH_DEPTHS: Final = 3
"""Number of depths at which all layouts are judged; the best ``_FINALISTS`` are then judged at more."""
_FINALISTS: Final = 2


class _Tables(NamedTuple):
    draft: Draft
    costs: RingCosts
    caps: MemoryCaps

    def placed(self, layout: Layout) -> Plan | None:
        """Return the plan of a layout; None if a node has no memory for its part."""
        plan = self.draft.placed(slices_of_layout(self.costs, layout))
        return plan if all(self.caps.holds(plan, node) for node in plan.nodes) else None


class _Option(NamedTuple):
    """A layout that fits, with the formula's seconds."""

    rough_s: float
    layout: Layout
    plan: Plan
    tables: _Tables


def choose_replicas(
    plan: Plan, drafts: Sequence[Draft], profile: Profile, *, is_over: Callable[[], bool]
) -> tuple[Plan | None, ReplicasReason]:
    """Judge the best layouts that fit the nodes' memory, against the best ring.

    Nearly all seconds of planning are the simulator's, so all layouts are judged at few depths, and the best few at
    more.

    ``plan`` is the best ring; there is a draft for each number of micro-batches and wire dtype.

    Returns:
        The plan with replicas, None if it is not enough faster (``WORTH``); and the reasons.
    """
    if why_not := _refusal_reason(plan, drafts, profile):
        return None, ReplicasReason(why_not=why_not)
    options = sorted(_options(drafts, profile, is_over), key=lambda option: option.rough_s)
    if not options:
        return None, ReplicasReason(why_not="no node has memory for blocks of another one too")
    rough = Ranking[_Option](
        lambda option: simulated_steps_s(option.plan, profile, option.tables.costs, max_depths=_ROUGH_DEPTHS), is_over
    ).judge_all(_worth_judging(options))
    _climb(rough)
    final = Ranking[_Option](lambda option: simulated_steps_s(option.plan, profile, option.tables.costs), is_over)
    judged = final.judge_all(option for _, option in rough.ranked[:_FINALISTS]).ranked
    if not judged:
        return None, ReplicasReason(why_not="the time for planning was used up")
    costs = ring_costs(dataclasses.replace(Draft.of(plan), settings=drafts[0].settings), profile)
    ring_s = simulated_steps_s(plan, profile, costs)
    best_s, best = judged[0]
    is_taken = best_s <= WORTH * ring_s
    texts = tuple((layout_text(option.plan), seconds) for seconds, option in judged)
    reason = ReplicasReason(ring_s=ring_s, judged=texts, num_rough=len(rough.judged), is_taken=is_taken)
    return best.plan if is_taken else None, reason


def _climb(rough: Ranking[_Option]) -> None:
    """From the best layout of each number of stages, go to its fastest neighbour until none is faster."""
    seen, most = {option.plan for _, option in rough.judged}, len(rough.judged) + _CLIMBED
    firsts = {len(pair[1].layout): pair for pair in reversed(rough.ranked)}
    for best_s, best in sorted(firsts.values(), key=lambda pair: pair[0]):
        while True:
            beside = Ranking(rough.seconds, rough.is_over)
            for layout in neighbours(best.layout):
                plan = best.tables.placed(layout)
                if plan is None or plan in seen or len(rough.judged) + len(beside.judged) >= most:
                    continue
                seen.add(plan)
                beside.judge(best._replace(layout=layout, plan=plan))
            rough.judged += beside.judged
            if not beside.judged or beside.ranked[0][0] >= best_s:
                break
            best_s, best = beside.ranked[0]


def _options(drafts: Sequence[Draft], profile: Profile, is_over: Callable[[], bool]) -> Iterator[_Option]:
    """Yield up to ``_JUDGED`` layouts of each draft that fit the nodes' memory, in the order of ``_of_interest``."""
    links = profile.link_by_pair
    for draft in drafts:
        costs = ring_costs(draft, profile)
        tables = _Tables(draft, costs, MemoryCaps(draft, profile.by_name))
        block_bytes = profile.nodes[0].model.adapter_block_bytes

        @functools.cache
        def exchange_s(nodes: Sequence[int], blocks: int) -> float:
            """Seconds in which the slowest node sends its sums to every other one, one after the other."""
            names = [costs.names[node] for node in nodes]  # noqa: B023
            sent = ([links.get((name, other)) for other in names if other != name] for name in names)
            return max(sum(link.seconds(blocks * block_bytes) for link in row if link) for row in sent)  # noqa: B023

        rooms = [tables.caps.max_blocks(name) for name in costs.names]
        classes = [numeric_class(profile.by_name[name], draft.course) for name in costs.names]
        ranked = ranked_layouts(costs, exchange_s, rooms, classes) if costs.num_micro > 1 else []
        fitting = (
            _Option(rough_s, layout, placed, tables)
            for rough_s, layout in _of_interest(ranked)
            if (placed := tables.placed(layout)) is not None
        )
        yield from itertools.islice(itertools.takewhile(lambda _: not is_over(), fitting), _JUDGED)


def _of_interest(ranked: Sequence[tuple[float, Layout]]) -> list[tuple[float, Layout]]:
    """Return the first layout of each number of stages, then up to ``_TRIED`` others.

    The formula compares layouts of different numbers of stages badly.
    """
    firsts = {len(pair[1]): pair for pair in reversed(ranked)}
    others = (pair for pair in ranked if pair is not firsts[len(pair[1])])
    return [*sorted(firsts.values(), key=lambda pair: pair[0]), *itertools.islice(others, _TRIED)]


def _worth_judging(options: Sequence[_Option]) -> list[_Option]:
    """Return the first option of each draft and of each number of stages, and others up to ``_JUDGED``."""
    firsts: dict[tuple[str, int, str], _Option] = {}
    for option in options:
        course = option.plan.course
        firsts.setdefault(("draft", course.microbatches, course.wire_dtype), option)
        firsts.setdefault(("stages", len(option.layout), ""), option)
    chosen = list({id(option): option for option in firsts.values()}.values())
    more = [option for option in options if not any(option is first for first in chosen)]
    return chosen + more[: max(0, _JUDGED - len(chosen))]


def _refusal_reason(plan: Plan, drafts: Sequence[Draft], profile: Profile) -> str:
    if reason := no_replicas(plan.course):
        return reason
    if plan.placement.helpers:
        return "helpers fit adapters of one host"
    if plan.course.method.max_hosts == 1:
        return "the method runs all blocks on one node"
    if any(draft.saving.name != NONE for draft in drafts):
        return "memory.activations is decided for slices of their own"
    if plan.course.may_skip:
        return "operation tables are balanced over the hosts of a ring"
    if len(profile.nodes) < 2:
        return "there is one node"
    if all(len(draft.course.microbatch_sizes()) < 2 for draft in drafts):
        return "a step has one micro-batch"
    classes = {node.node: numeric_class(node, plan.course) for node in profile.nodes}
    if len(set(classes.values())) == len(classes):
        told = "; ".join(f"{name}: {problem}" for name, problem in classes.items())
        return f"copies have to be equal in every bit, and no two nodes compute alike ({told})"
    return ""
