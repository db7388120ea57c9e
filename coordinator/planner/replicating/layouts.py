"""Ways to cut a model into stages of several hosts, ranked by a rough formula; the simulator judges the best few.

Among few nodes every way to put them on up to three stages is looked at, with every cut; nodes that are equally fast
and have room for as many blocks count as alike. Among many the nodes are spread over the stages so that these are about
equally fast.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.planner.predict.ring_costs import RingCosts
from ringtune.schedule.placement import Slice

FEW_NODES: Final = 6
_THREE_STAGES_UP_TO: Final = 4
_DEPTHS: Final = 4
_ALIKE: Final = 0.02
"""Nodes whose blocks take times that differ by no more than this share count as alike."""

Exchange = Callable[[Sequence[int], int], float]
"""(nodes of a stage, blocks) -> seconds in which they exchange the gradients of so many blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of a layout.

    Attributes:
        nodes: indices of its hosts.
        shares: micro-batches of a step that each of them takes.
        count: blocks.
    """

    nodes: tuple[int, ...]
    shares: tuple[int, ...]
    count: int


Layout = tuple[Stage, ...]


def ranked_layouts(
    costs: RingCosts, exchange_s: Exchange, rooms: Sequence[int] = (), classes: Sequence[str] = ()
) -> list[tuple[float, Layout]]:
    """Every layout that is looked at and has a stage with several hosts, by the formula's seconds of some steps.

    Args:
        costs: of the job.
        exchange_s: of gradients.
        rooms: for how many blocks each node has room as their only host, which makes nodes alike or not; empty = all.
            As one of several hosts it keeps less of each block, so that layouts may have more.
        classes: the numeric class of each node: hosts of one stage have the same; empty = all have.
    """
    rooms, classes = rooms or (0,) * costs.num_nodes, classes or ("",) * costs.num_nodes
    depths = _some(costs.depths)
    found = [
        (sum(costs.steps_at[depth] * step_s(costs, layout, depth, exchange_s) for depth in depths), layout)
        for layout in _layouts(costs, rooms, classes)
    ]
    return sorted(found, key=lambda pair: (pair[0], _key(pair[1])))


def neighbours(layout: Layout) -> Iterator[Layout]:
    """Yield the layouts with a block more in one stage and one less beside it, or with two stages' hosts exchanged."""
    for at, (lower, upper) in enumerate(itertools.pairwise(layout)):
        for more in (1, -1):
            counts = lower.count + more, upper.count - more
            if min(counts) > 0:
                moved = (dataclasses.replace(lower, count=counts[0]), dataclasses.replace(upper, count=counts[1]))
                yield (*layout[:at], *moved, *layout[at + 2 :])
        yield (*layout[:at], upper, lower, *layout[at + 2 :])


def slices_of_layout(costs: RingCosts, layout: Layout) -> tuple[Slice, ...]:
    """Return the slices of a layout with their nodes' names and shares."""
    slices, at = list[Slice](), costs.first
    for stage in layout:
        common = math.gcd(*stage.shares)
        for node, share in zip(stage.nodes, stage.shares, strict=True):
            slices.append(Slice(node=costs.names[node], start=at, stop=at + stage.count, share=share // common))
        at += stage.count
    return tuple(slices)


def step_s(costs: RingCosts, layout: Layout, depth: int, exchange_s: Exchange) -> float:
    """Seconds of a step that trains ``depth`` blocks: its busiest host or link, the way of a micro-batch, exchanges.

    While the first and the last micro-batch of a step are on their way, the busiest host waits for the other stages.
    """
    busiest_s = way_s = sums_s = 0.0
    lowest, at = costs.stop - depth, costs.first
    for stage in layout:
        stop = at + stage.count
        trained = max(0, stop - max(at, lowest))
        works = [_work_s(costs, node, stage.count - trained, trained) for node in stage.nodes]
        updates = [trained * costs.update_s[node] for node in stage.nodes]
        hosts = zip(works, stage.shares, updates, strict=True)
        busiest_s = max(busiest_s, *(work_s * share + update_s for work_s, share, update_s in hosts))
        way_s += max(works) if trained else 0.0
        if len(stage.nodes) > 1 and trained:
            sums_s = max(sums_s, exchange_s(stage.nodes, trained))
        at = stop
    last = layout[-1]
    way_s -= max(_work_s(costs, node, 0, min(depth, last.count)) for node in last.nodes) if depth else 0.0
    return max(busiest_s + max(0.0, way_s) + sums_s, _wires_s(costs, layout))


def shares_of(times_s: Sequence[float], count: int) -> tuple[int, ...]:
    """Deal so many micro-batches to hosts so that the last one is done soonest: each to whoever is done with it first.

    Example: 4 to hosts that take 1 s and 2 s each are 3 and 1; with 6 they are 4 and 2.
    """
    found = [0] * len(times_s)
    for _ in range(count):
        index = min(range(len(times_s)), key=lambda at: ((found[at] + 1) * times_s[at], at))
        found[index] += 1
    return tuple(found)


def _work_s(costs: RingCosts, node: int, frozen: int, trained: int) -> float:
    """Seconds of one micro-batch at a host: forwards of frozen blocks, forwards and backwards of those that train."""
    return frozen * costs.forward_s[node] + trained * (costs.graph_s[node] + costs.backward_s[node])


def _wires_s(costs: RingCosts, layout: Layout) -> float:
    """Seconds that the mean owner's uplink is taken by the hidden states of a step that go to other nodes."""
    bottom = layout[0]
    found = 0.0
    for owner in costs.owners:
        own = sum(share for node, share in zip(bottom.nodes, bottom.shares, strict=True) if node == owner.node)
        away = costs.num_micro - own
        found += owner.weight * away * (costs.uplink_s[owner.node] if owner.node >= 0 else 0.0)
    return found


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
    """Yield the nodes of each stage, bottom to top, of one class each; of groups of alike nodes the first."""
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
    """Yield stages that are about equally fast, for each number of them; each class has some by how many nodes it has.

    Example: of six nodes of one class and two of another, three stages are two of three nodes and one of two.
    """
    of_class: dict[str, list[int]] = {}
    for node in nodes:
        of_class.setdefault(classes[node], []).append(node)
    counts = dict.fromkeys(of_class, 1)
    while sum(counts.values()) <= max(len(nodes) // 2, len(of_class)):
        groups = (_balanced(costs, own, counts[name]) for name, own in of_class.items())
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
    """Yield the counts of blocks of the stages: every cut among few nodes, one in proportion to speed among many."""
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
    """Number nodes by their speed; those that are about as fast as the one before have its number."""
    found: dict[int, int] = {}
    last_s, kind = 0.0, -1
    for node in nodes:
        if _block_s(costs, node) > last_s * (1 + _ALIKE):
            last_s, kind = _block_s(costs, node), kind + 1
        found[node] = kind
    return found


def _block_s(costs: RingCosts, node: int) -> float:
    return costs.graph_s[node] + costs.backward_s[node]


def _some(depths: Sequence[int]) -> list[int]:
    step = max(1, len(depths) // _DEPTHS)
    return list(depths[step - 1 :: step])


def _key(layout: Layout) -> tuple[tuple[tuple[int, ...], int], ...]:
    return tuple((stage.nodes, stage.count) for stage in layout)
