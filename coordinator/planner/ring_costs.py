"""Tables of a job's seconds for the planner's formulas: one row per node, one column per peer, by depth.

All numbers are from ``ringtune.costs.action_costs``, at the mean size of the owners' micro-batches: times are linear in
the size, so their mean over the owners' turns is exact.

The formulas count equal blocks. So an operation table becomes the mean seconds of a block on each node, a weight of
each block against that mean, and the share of micro-batches that visit a slice at all::

    table of two micro-batches      weights of the blocks      visits of [0, 2)   of [2, 4)
    11 13 33 33                     1.78 0.44 0.89 0.89        1.0                0.5
    11 33 11 11

Before scores are known the table is the expected one.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from coordinator.planner.draft import Draft
from ringtune.costs.action_costs import CourseCosts, NodeCosts, TopShare
from ringtune.costs.activation_costs import mean_gain, projected_gains
from ringtune.costs.profile import Profile
from ringtune.schedule.actions import Op, Payload
from ringtune.schedule.batches import num_batches
from ringtune.schedule.course import Course
from ringtune.schedule.operation_tables import FORWARD_ONLY, FULL, SHORTCUT, block_code, block_row, patterns_of
from ringtune.schedule.run_shape import shares
from ringtune.schedule.turns import StepKind
from ringtune.schedule.units import EMBEDDING, Units
from ringtune.schedule.versions import may_be_stale
from ringtune.techniques.activation_checkpointing import KEEPS_ALL, VELORA_EXTRA, SliceSaving
from ringtune.techniques.operations import expected_table


def steps_by_depth(course: Course) -> tuple[int, ...]:
    """Number of training steps at each depth; the index is the depth.

    Steps of one depth count as alike, whatever trains above their lowest block. An evaluation without training counts
    as one step of the first depth.
    """
    counts = Counter({depth: count for depth, (count, _) in step_kinds(course).items()})
    return tuple(counts[at] for at in range(course.num_blocks - course.frozen_blocks + 1))


def step_kinds(course: Course) -> dict[int, tuple[int, Units]]:
    """Return depth -> (number of steps, units that train at the first of them)."""
    method = course.method.expected()
    kinds: dict[int, tuple[int, Units]] = {}
    for step in range(course.num_steps) or range(1):
        units = method.trained(course, step)
        depth = depth_of(units)
        count, first = kinds.get(depth, (0, units))
        kinds[depth] = (count + 1, first)
    return kinds


def depth_of(units: Units) -> int:
    """Number of blocks from the lowest one that gets a gradient; all blocks if the embedding trains."""
    return min(units.num_blocks, max(0, units.num_blocks - units.lowest))


def trained_shares(course: Course) -> tuple[float, float]:
    """Share of the blocks passed by the backward that train, and the share of those above the lowest of them.

    Both are 1 unless all parameters train, a group at a time. Example: four blocks, groups of one unit: of 0 to 4
    blocks, 14 in a sweep, 4 train, and none of them above the lowest.
    """
    if not course.method.full_parameters:
        return 1.0, 1.0
    kinds = [course.method.trained(course, step) for step in range(course.method.period(course)) or range(1)]
    passed, trained = sum(map(depth_of, kinds)), sum(len(units.blocks) for units in kinds)
    above = sum(max(0, depth_of(units) - 1) for units in kinds)
    trained_above = sum(max(0, len(units.blocks) - 1) for units in kinds)
    return trained / max(1, passed), trained_above / max(1, above)


Visits = tuple[tuple[float, ...], ...]


class PatternShares(NamedTuple):
    """Shares of patterns in a run.

    Attributes:
        patterns: pattern -> its share of all micro-batches of all blocks that are not private; "" = all full.
        of_blocks: the same for each of these blocks.
        visits: ``[start][stop]``: share of micro-batches that do something in these blocks; empty if all do.
        active: share of micro-batches that take part (``lowering.takes_part``).
    """

    patterns: Mapping[str, float]
    of_blocks: tuple[Mapping[str, float], ...]
    visits: Visits
    active: float

    def mean_s(self, seconds: Callable[[str], float]) -> float:
        """Mean seconds of a pattern, over all micro-batches and blocks."""
        return sum(share * seconds(pattern) for pattern, share in self.patterns.items())

    def weights(self, seconds: Callable[[str], float]) -> tuple[float, ...]:
        """Cumulative sums, from 0, of each block's seconds over those of the mean block; empty if all are alike."""
        mean_s = self.mean_s(seconds)
        weights_of = [
            sum(share * seconds(pattern) for pattern, share in of_block.items()) / mean_s if mean_s > 0 else 1.0
            for of_block in self.of_blocks
        ]
        if max(weights_of) - min(weights_of) < _ALIKE:
            return ()
        sums = [0.0]
        for weight in weights_of:
            sums.append(sums[-1] + weight)
        return tuple(sums)


_ALIKE = 1e-3


def pattern_s(node: NodeCosts, op: Op, pattern: str, *, size: float, lowest: bool) -> float:
    """Seconds of ``op`` on a block with a pattern on a node.

    0 for a block that is passed by. A block without a full subnet runs a forward without graph, and no backward.
    """
    code = block_code(pattern) if pattern else FULL
    if code == SHORTCUT or (code == FORWARD_ONLY and op is Op.BACKWARD):
        return 0.0
    op = Op.FORWARD_FREE if code == FORWARD_ONLY else op
    start = 0 if lowest else 1
    return node.seconds(op, start, start + 1, size=size, lowest=0, kind=StepKind.TRAIN, patterns=(pattern,))


@functools.lru_cache(maxsize=64)
def loads_of(course: Course, first: int) -> PatternShares | None:
    """Return the shares of patterns in blocks [first, N) of a run; None if everything is full.

    Owners count by their shares of the steps, batches of an owner alike.
    """
    table = expected_table(course) if course.may_skip else None
    if table is None or not table.batches:
        return None
    rows = _rows_by_share(course)
    nothing = SHORTCUT * (course.num_blocks * table.subnets)
    blocks = range(first, course.num_blocks)
    of_blocks = tuple(Counter[str]() for _ in blocks)
    for row, share in rows.items():
        patterns = patterns_of(row, first, course.num_blocks, table.subnets) or ("",) * len(blocks)
        for counts, pattern in zip(of_blocks, patterns, strict=True):
            counts["" if pattern.strip(FULL) == "" else pattern] += share  # type: ignore[assignment]
    everywhere: dict[str, float] = {}
    for counts in of_blocks:
        for pattern, share in counts.items():
            everywhere[pattern] = everywhere.get(pattern, 0.0) + share / len(of_blocks)
    if set(everywhere) == {""}:
        return None
    return PatternShares(
        patterns=everywhere,
        of_blocks=of_blocks,
        visits=_visits(rows, table.subnets, course.num_blocks),
        active=1 - rows.get(nothing, 0.0),
    )


def _rows_by_share(course: Course) -> dict[str, float]:
    """Return every row of the expected table with its share of all micro-batches of the run; "" is all full.

    The row of a micro-batch that takes no part has shortcuts in blocks that never train, too.
    """
    table, by_row = expected_table(course), dict[str, float]()
    idle = SHORTCUT * (len(course.trainable.blocks) * table.subnets)
    weights = dict(zip((owner.node for owner in course.owners), shares(course.owners, course.turns), strict=True))
    batches = {owner.node: num_batches(owner.train_rows, course.batch_size) for owner in course.owners}
    for entry in table.batches:
        each = weights[entry.owner] / (batches[entry.owner] * table.passes * len(entry.rows))
        for row in entry.rows:
            known = SHORTCUT * len(row) if row.endswith(idle) else row
            by_row[known] = by_row.get(known, 0.0) + each
    left = 1.0 - sum(by_row.values())
    if left > _ALIKE:
        by_row[""] = left
    return by_row


def _visits(rows: Mapping[str, float], subnets: int, num_blocks: int) -> Visits:
    """Share of micro-batches that do something in [start, stop), for every range of blocks; empty if all do."""
    passed = [(block_row(row, subnets), share) for row, share in rows.items() if row]
    passed = [(row, share) for row, share in passed if SHORTCUT in row]
    if not passed:
        return ()
    visits = [[1.0] * (num_blocks + 1) for _ in range(num_blocks)]
    for row, share in passed:
        for start in range(num_blocks):
            stop = start
            while stop < num_blocks and row[stop] == SHORTCUT:
                stop += 1
                visits[start][stop] -= share
    return tuple(tuple(max(0.0, value) for value in line) for line in visits)


Row = tuple[float, ...]
SavingOf = Callable[[int, int, int, int], SliceSaving]
"""(node, start, stop, hosts above) -> how that slice saves activations."""
_BEHIND = 0.5
"""Part of an embedding's seconds on the uplink for which a gradient of the head waits on average.

Fitted so that the formula meets the simulator: ``tests/bench/planner.py``, part ``formula``.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerCosts:
    """Seconds that an owner's turn adds to the ring.

    Attributes:
        node: index of the owner; -1 stands for the mean of all.
        embed_s: embedding of one micro-batch, private blocks included.
        head_s: head, loss and the head's backward of one micro-batch.
        update_s: optimizer step of the head.
        up_s: from each node to the owner's head: one hidden state, first byte to last.
        down_s: from the owner's head to each node: one gradient, and its wait for embeddings on the uplink.
        wire_s: per top node, seconds that a micro-batch takes on the busier of the two links.
        into_s: per bottom node, seconds that an embedding takes on the link to it.
    """

    node: int
    weight: float
    embed_s: float
    head_s: float
    update_s: float
    up_s: Row
    down_s: Row
    wire_s: Row
    into_s: Row


@dataclass(frozen=True, kw_only=True, slots=True)
class RingCosts:
    """Tables of one job on all candidate nodes.

    Seconds of blocks are those of one block and one micro-batch.

    Attributes:
        first: lowest block that is not private.
        stale_steps: steps of a turn if they overlap (PipeAdapter); 0 if weights are never stale.
        forward_s: per node, without graph.
        graph_s: with graph; ``graph_lowest_s`` of the lowest trainable block.
        backward_s: its backward; ``backward_lowest_s`` of the lowest trainable block.
        projected_back_s: its backward where linear layers keep projections; ``projected_back_lowest_s`` likewise.
        update_s: optimizer step of one block, once a step.
        hidden_s: ``[source][target]``: a hidden state, first byte to last; ``grad_s`` a gradient.
        hidden_wire_s: ``[source][target]``: seconds that it takes on the link; ``grad_wire_s`` a gradient.
        uplink_s: per node, seconds that one tensor takes on its uplink; ``downlink_s`` on its downlink.
        sending_s: per node, compute seconds lost by sending a tensor if no core is left for it; ``receiving_s``
            likewise.
        weights: cumulative block weights as of ``PatternShares.weights``, from block ``first`` on; empty: all are
            alike.
        visits: ``[start][stop]``: share of micro-batches that do something in these blocks; empty: all do.
        saving: how a node saves activations for a slice; None: it keeps everything.
    """

    names: tuple[str, ...]
    optimizer: str
    first: int
    stop: int
    num_micro: int
    stale_steps: int
    steps_at: tuple[int, ...]
    forward_s: Row
    graph_s: Row
    graph_lowest_s: Row
    backward_s: Row
    backward_lowest_s: Row
    projected_back_s: Row
    projected_back_lowest_s: Row
    update_s: Row
    hidden_s: tuple[Row, ...]
    grad_s: tuple[Row, ...]
    hidden_wire_s: tuple[Row, ...]
    grad_wire_s: tuple[Row, ...]
    uplink_s: Row
    downlink_s: Row
    sending_s: Row
    receiving_s: Row
    owners: tuple[OwnerCosts, ...]
    owner_of: Mapping[int, int]
    weights: Row = ()
    visits: Visits = ()
    saving: SavingOf | None = None

    def weight(self, start: int, stop: int) -> float:
        """Return the blocks [start, stop) as a number of mean blocks."""
        first, sums = self.first, self.weights
        return sums[stop - first] - sums[start - first] if sums else stop - start

    def saving_of(self, node: int, start: int, stop: int, above: int) -> SliceSaving:
        """Return how a node saves activations for blocks [start, stop) with ``above`` hosts above it."""
        return KEEPS_ALL if self.saving is None else self.saving(node, start, stop, above)

    def visit(self, start: int, stop: int) -> float:
        """Share of micro-batches that do something in [start, stop); 1 without operation tables."""
        return self.visits[start][stop] if self.visits else 1.0

    @property
    def num_nodes(self) -> int:
        """Number of candidate nodes."""
        return len(self.names)

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths that have steps, ascending."""
        return tuple(at for at, steps in enumerate(self.steps_at) if steps)


def ring_costs(draft: Draft, profile: Profile) -> RingCosts:
    """Compute the tables of a job on all nodes of a profile; raises ``PlanError``.

    ``profile`` has measured times of every node, and every link between them or none.
    """
    names = tuple(sorted(node.node for node in profile.nodes))
    course = draft.course
    costs = CourseCosts(course, profile, optimizer=draft.settings.optimizer)
    num_micro, weights = len(course.microbatch_sizes()), shares(course.owners, course.turns)
    rows = [course.batch_rows(owner) / num_micro for owner in course.owners]
    sizes = [costs.size(owner.node, 1, StepKind.TRAIN) * each for owner, each in zip(course.owners, rows, strict=True)]
    size = sum(weight * owner_size for weight, owner_size in zip(weights, sizes, strict=True))

    loads = loads_of(course, draft.private_blocks)

    updated, trained_above = trained_shares(course)

    def backward(name: str) -> float:
        whole_s = _mean_s(costs.nodes[name], Op.BACKWARD, loads, size=size, lowest=False)
        if trained_above == 1:
            return whole_s
        passing_s = costs.nodes[name].seconds(Op.BACKWARD, 1, 2, size=size, lowest=0, kind=StepKind.TRAIN, passing=1)
        return trained_above * whole_s + (1 - trained_above) * passing_s

    def update(name: str) -> float:
        return updated * pattern_s(costs.nodes[name], Op.UPDATE, "", size=size, lowest=False)

    def block(op: Op, *, lowest: bool) -> Row:
        return tuple(_mean_s(costs.nodes[name], op, loads, size=size, lowest=lowest) for name in names)

    graph, graph_lowest = block(Op.FORWARD, lowest=False), block(Op.FORWARD, lowest=True)
    back, back_lowest = tuple(map(backward, names)), block(Op.BACKWARD, lowest=True)
    middle = course.num_blocks // 2  # boundaries may differ in width; the judge of rings knows each
    gains = projected_gains(draft.saving.projected(course), profile.by_name[names[0]].model)
    gain = mean_gain(gains, draft.private_blocks, course.num_blocks)
    projected = _projected(graph, back, trained_above * gain)
    projected_lowest = _projected(graph_lowest, back_lowest, gain)
    hidden, grad = (_pairs(costs, names, payload, middle, size) for payload in (Payload.HIDDEN, Payload.GRAD))
    up, down = _ends(costs, profile, names, size)
    taken = _taken(costs, names, size)
    return RingCosts(
        names=names,
        optimizer=draft.settings.optimizer,
        first=draft.private_blocks,
        stop=course.num_blocks,
        num_micro=num_micro,
        stale_steps=course.local_iterations if may_be_stale(course) else 0,
        steps_at=steps_by_depth(course),
        forward_s=block(Op.FORWARD_FREE, lowest=False),
        graph_s=graph,
        graph_lowest_s=graph_lowest,
        backward_s=back,
        backward_lowest_s=back_lowest,
        projected_back_s=projected,
        projected_back_lowest_s=projected_lowest,
        update_s=tuple(map(update, names)),
        hidden_s=hidden[0],
        grad_s=grad[0],
        hidden_wire_s=hidden[1],
        grad_wire_s=grad[1],
        uplink_s=up,
        downlink_s=down,
        sending_s=taken[0],
        receiving_s=taken[1],
        owners=tuple(
            _owner(
                costs, draft, names, owner.node, at, up[names.index(owner.node)], weight, loads.active if loads else 1
            )
            for owner, at, weight in zip(course.owners, sizes, weights, strict=True)
        ),
        owner_of={names.index(owner.node): index for index, owner in enumerate(course.owners)},
        weights=_weights(costs.nodes[names[0]], loads, size) if loads else _top_weights(draft, profile, size),
        visits=loads.visits if loads else (),
    )


def _projected(forward_s: Row, back_s: Row, gain: float) -> Row:
    """Seconds of backwards per node if linear layers keep projections."""
    return tuple(
        max(0.0, (1 + VELORA_EXTRA) * one_s - gain * there_s) for there_s, one_s in zip(forward_s, back_s, strict=True)
    )


def with_mean_owner(costs: RingCosts) -> RingCosts:
    """Replace the owners by one with their mean times that hosts no blocks, so that rings are cheap to evaluate."""
    weights = [owner.weight for owner in costs.owners]

    means: dict[str, Any] = {
        name: sum(map(operator.mul, weights, (getattr(owner, name) for owner in costs.owners)))
        for name in ("embed_s", "head_s", "update_s")
    }
    for name in ("up_s", "down_s", "wire_s", "into_s"):
        columns = zip(*(getattr(owner, name) for owner in costs.owners), strict=True)
        means[name] = tuple(sum(map(operator.mul, weights, column)) for column in columns)
    return dataclasses.replace(costs, owners=(OwnerCosts(node=-1, weight=1.0, **means),), owner_of={})


def with_fewer_depths(costs: RingCosts, most: int) -> RingCosts:
    """Merge neighbouring depths until at most ``most`` remain, so that rings are cheap to evaluate.

    All steps of a group count at its middle depth; the last depth stays alone.
    """
    depths = costs.depths
    if len(depths) <= most:
        return costs
    steps = [0] * len(costs.steps_at)
    inner, last = depths[:-1], depths[-1]
    groups = most - 1
    for index in range(groups):
        group = inner[index * len(inner) // groups : (index + 1) * len(inner) // groups]
        steps[group[len(group) // 2]] += sum(costs.steps_at[at] for at in group)
    steps[last] += costs.steps_at[last]
    return dataclasses.replace(costs, steps_at=tuple(steps))


def _mean_s(node: NodeCosts, op: Op, loads: PatternShares | None, *, size: float, lowest: bool) -> float:
    if loads is None:
        return pattern_s(node, op, "", size=size, lowest=lowest)
    return loads.mean_s(lambda pattern: pattern_s(node, op, pattern, size=size, lowest=lowest))


def _weights(node: NodeCosts, loads: PatternShares, size: float) -> Row:
    """Weights of the blocks, by forward with graph and backward on one node."""
    return loads.weights(
        lambda pattern: sum(pattern_s(node, op, pattern, size=size, lowest=False) for op in (Op.FORWARD, Op.BACKWARD))
    )


def _top_weights(draft: Draft, profile: Profile, size: float) -> Row:
    """Weights of the blocks if the last one computes only the tokens that the head reads; empty if it computes all."""
    course, first = draft.course, draft.private_blocks
    if not course.top_tokens:
        return ()
    whole = course.num_blocks - first - 1
    left = TopShare(course, profile.nodes[0].model).of(size)
    return (*map(float, range(whole + 1)), whole + left)


def _transfer(
    costs: CourseCosts, source: str, target: str, payload: str, boundary: int, size: float
) -> tuple[float, float]:
    """Seconds of a tensor from first byte to last, and seconds on the link; 0 within a node."""
    if source == target:
        return 0.0, 0.0
    around_s = costs.around_message_s(source, target, payload, costs.sent_size(boundary, size))
    link = costs.link(source, target)
    if link is None:
        return around_s, 0.0
    wire_s = costs.message_bytes(payload, boundary, size) / link.rate_bytes_per_s
    return around_s + link.latency_s + wire_s, wire_s


def _pairs(
    costs: CourseCosts, names: Sequence[str], payload: str, boundary: int, size: float
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    table = [[_transfer(costs, source, target, payload, boundary, size) for target in names] for source in names]
    return (
        tuple(tuple(total for total, _ in row) for row in table),
        tuple(tuple(wire for _, wire in row) for row in table),
    )


def _ends(costs: CourseCosts, profile: Profile, names: Sequence[str], size: float) -> tuple[Row, Row]:
    """Seconds that one hidden state takes on each node's uplink and downlink, at the rate of its fastest link."""
    num_bytes = costs.message_bytes(Payload.HIDDEN, 0, size)
    up, down = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for link in profile.links:
        up[link.source] = max(up[link.source], link.rate_bytes_per_s)
        down[link.target] = max(down[link.target], link.rate_bytes_per_s)
    return (
        tuple(num_bytes / up[name] if up[name] else 0.0 for name in names),
        tuple(num_bytes / down[name] if down[name] else 0.0 for name in names),
    )


def _taken(costs: CourseCosts, names: Sequence[str], size: float) -> tuple[Row, Row]:
    """Compute seconds that one hidden state costs each node as sender and as receiver, mean over its peers."""
    num_bytes = costs.message_bytes(Payload.HIDDEN, 0, size)
    sending, receiving = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    share = 1 / max(1, len(names) - 1)
    for source in names:
        for target in names:
            if source != target:
                from_source_s, from_target_s = costs.taken_s(source, target, Payload.HIDDEN, num_bytes, size)
                sending[source] += share * from_source_s
                receiving[target] += share * from_target_s
    return tuple(sending.values()), tuple(receiving.values())


def _owner(
    costs: CourseCosts,
    draft: Draft,
    names: Sequence[str],
    owner: str,
    size: float,
    uplink_s: float,
    weight: float,
    active: float,
) -> OwnerCosts:
    """The seconds of an owner; ``active`` is the share of its micro-batches that take part."""
    node, top, kind = costs.nodes[owner], draft.course.head, StepKind.TRAIN

    def seconds(op: Op, start: int, stop: int) -> float:
        return node.seconds(op, start, stop, size=size, lowest=top, kind=kind)

    up = [_transfer(costs, name, owner, Payload.HIDDEN, top, size) for name in names]
    down = [_transfer(costs, owner, name, Payload.GRAD, top, size) for name in names]
    into = [_transfer(costs, owner, name, Payload.HIDDEN, 0, size) for name in names]
    embeddings_s = [0.0 if name == owner else _BEHIND * uplink_s for name in names]
    private_s = draft.private_blocks * seconds(Op.FORWARD_FREE, 0, 1)
    return OwnerCosts(
        node=names.index(owner),
        weight=weight,
        embed_s=active * (seconds(Op.EMBED, EMBEDDING, EMBEDDING + 1) + private_s),
        head_s=active * seconds(Op.HEAD, top, top + 1),
        update_s=seconds(Op.UPDATE, top, top + 1),
        up_s=tuple(total for total, _ in up),
        down_s=tuple(total + behind_s for (total, _), behind_s in zip(down, embeddings_s, strict=True)),
        wire_s=tuple(
            max(first, second) + behind_s
            for (_, first), (_, second), behind_s in zip(up, down, embeddings_s, strict=True)
        ),
        into_s=tuple(wire for _, wire in into),
    )
