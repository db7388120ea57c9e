"""Formulas of the seconds of a job on a ring, one stage at a time from the top down.

In this direction they can be kept incrementally: at depth d the stages above the lowest trainable one are trained
whole, and those below it are frozen whole. Where operation tables leave work out, blocks count by their weights, and
messages by the share of micro-batches that visit a slice.

At depth d a step takes the larger of

a. *busy*: for every node what it computes in a step (frozen forward, trainable forward and backward, update, and as
   the owner embedding and head), and for every link, uplink and downlink how long its bytes take: frozen stages work
   for later steps meanwhile, so no step is shorter than the busiest resource needs;
b. *critical*: the trainable part is strictly sequential between steps. M micro-batches pass from the lowest trainable
   stage up to the head and back. One of them takes the *path* (all forwards, backwards, transfers and the head), the
   others follow at the pace of the slowest single action: ``path + (M - 1) * slowest``. And a node that does both
   directions needs ``below + M * (forward + backward)``, where *below* is the way from the lowest stage to it and back.
   Then the lowest stage updates.

::

    depth 3 of 4 blocks, slices a [0,2) b [2,4), M = 2, head at o

    a | F0 F1 .  .  .  .  B0 B1 U |      path: F0 of a, F0 of b, H0, B0 of b, B0 of a
    b | .  F0 F1 .  B0 B1 .  .  . |      below b: F and B of a, and both transfers
    o | .  .  H0 H1 .  .  .  .  . |

PipeAdapter's batches overlap everywhere within a turn, so it pays (b) once a turn only. The job is the sum over
depths of steps times the step's time, averaged over the owners' turns. Hand-overs of the head, evaluations and the
first filling of the ring are left out: they hardly depend on the slices.

Stages with several hosts have a rougher formula of their own, ``layout_step_s``: it only ranks layouts.

Source: RingAda, section III-B.2 (which parts overlap); the bounds are those of re-entrant flow shops (one job's path,
and a machine with head and tail).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.planner.ring_costs import OwnerCosts, RingCosts
from ringtune.techniques.activation_checkpointing import KEEPS_ALL, VELORA_EXTRA, SliceSaving

Rows = list[list[float]]


class PlacedStages(NamedTuple):
    """The stages placed so far, from the top down, all of them trained whole.

    Attributes:
        node: of the lowest one; -1 if none is placed.
        path_s: forwards, backwards and transfers of one micro-batch, without what depends on the owner.
        ends_s: per owner, its head and the transfers from and to the top node.
        span_s: per owner, longest span of a node or its links; see ``_wider``.
        busy_s: per owner, seconds that the busiest node or link works in a step.
    """

    node: int
    placed: int
    hosts: int
    path_s: float
    slowest_s: float
    ends_s: tuple[float, ...]
    pace_s: tuple[float, ...]
    span_s: tuple[float, ...]
    busy_s: tuple[float, ...]


def at_the_head(costs: RingCosts, top: int) -> PlacedStages:
    """Return the figures before any stage is placed, for a ring with ``top`` as its top node."""
    return PlacedStages(
        node=-1,
        placed=0,
        hosts=0,
        path_s=0.0,
        slowest_s=0.0,
        ends_s=tuple(owner.up_s[top] + owner.head_s + owner.down_s[top] for owner in costs.owners),
        pace_s=tuple(max(owner.head_s, owner.wire_s[top]) for owner in costs.owners),
        span_s=(0.0,) * len(costs.owners),
        busy_s=tuple(_visiting_s(costs, owner, top) for owner in costs.owners),
    )


def place(
    costs: RingCosts, above: PlacedStages, node: int, count: int, *, is_bottom: bool
) -> tuple[Rows, PlacedStages]:
    """Put ``count`` blocks on ``node`` below the placed stages.

    Returns:
        Rows and the ring with this stage. Row ``k - 1`` has per owner the seconds of a step that trains the upper ``k``
        blocks of this stage, if no stage below takes longer; it is empty if the job has no such step.
    """
    micro = costs.num_micro
    is_top = above.node < 0
    stop = costs.stop - above.placed
    start = stop - count
    visit = costs.visit(start, stop)
    moves_s, wire_s = (0.0, 0.0) if is_top else _between(costs, node, above.node, visit)
    graph_s, backward_s = costs.graph_s[node], costs.backward_s[node]
    free_s, update_s = micro * costs.forward_s[node], costs.update_s[node]
    saving = costs.saving_of(node, start, stop, above.hosts)
    traffic = _traffic(costs, node, 1, 2, is_top, is_bottom, visit)
    rows: Rows = []
    for trained in range(1, count + 1):
        if not costs.steps_at[above.placed + trained]:
            rows.append([])
            continue
        low = stop - trained
        upper, lowest = costs.weight(low + 1, stop), costs.weight(low, low + 1)
        forward_s = upper * graph_s + lowest * costs.graph_lowest_s[node]
        back_s = upper * backward_s + lowest * costs.backward_lowest_s[node]
        if saving is not KEEPS_ALL:
            forward_s, back_s = _saved(costs, node, (low, stop), saving, (forward_s, back_s))
        both_s, last_s = micro * (forward_s + back_s), trained * update_s
        work_s = costs.weight(start, low) * free_s + both_s + last_s
        busy = _busier(costs, above.busy_s, node, work_s, micro * wire_s, traffic)
        if is_bottom:
            busy = [max(busy_s, micro * owner.into_s[node]) for busy_s, owner in zip(busy, costs.owners, strict=True)]
        segment_s = forward_s + back_s + moves_s
        span = _wider(costs, above.span_s, node, segment_s, both_s, traffic)
        path_s, slowest_s = above.path_s + segment_s, max(above.slowest_s, forward_s, back_s, wire_s)
        critical = [
            last_s + max(span_s, path_s + end_s + (micro - 1) * max(slowest_s, pace_s))
            for span_s, end_s, pace_s in zip(span, above.ends_s, above.pace_s, strict=True)
        ]
        rows.append(overlapped(costs, busy, critical))
    return rows, _whole(costs, above, node, (start, stop), is_bottom, moves_s, wire_s)


def overlapped(costs: RingCosts, busy: Sequence[float], critical: Sequence[float]) -> list[float]:
    """Seconds of a step per owner: the larger of its busy and its critical bound.

    PipeAdapter pays the critical bound once a turn: with turns of 10 steps, busy 2 s and critical 5 s give 2.3 s.
    """
    if not costs.stale_steps:
        return list(map(max, busy, critical))
    share = 1 / costs.stale_steps
    return [
        busy_s + share * (critical_s - busy_s) if critical_s > busy_s else busy_s
        for busy_s, critical_s in zip(busy, critical, strict=True)
    ]


def frozen_s(costs: RingCosts, above: PlacedStages, node: int, count: int, *, is_bottom: bool) -> list[float]:
    """Seconds per owner that a stage of frozen blocks, or its busiest link, works in a step."""
    is_top = above.node < 0
    stop = costs.stop - above.placed
    visit = costs.visit(stop - count, stop)
    work_s = costs.num_micro * costs.weight(stop - count, stop) * costs.forward_s[node]
    wire_s = 0.0 if is_top else visit * costs.num_micro * costs.hidden_wire_s[node][above.node]
    none = (0.0,) * len(costs.owners)
    busy = _busier(costs, none, node, work_s, wire_s, _traffic(costs, node, 1, 1, is_top, is_bottom, visit))
    if is_bottom:
        return [
            max(busy_s, costs.num_micro * owner.into_s[node]) for busy_s, owner in zip(busy, costs.owners, strict=True)
        ]
    return busy


def _whole(
    costs: RingCosts,
    above: PlacedStages,
    node: int,
    blocks: tuple[int, int],
    is_bottom: bool,
    moves_s: float,
    wire_s: float,
) -> PlacedStages:
    weight, count = costs.weight(*blocks), blocks[1] - blocks[0]
    forward_s, back_s = weight * costs.graph_s[node], weight * costs.backward_s[node]
    saving = costs.saving_of(node, *blocks, above.hosts)
    if saving is not KEEPS_ALL:
        forward_s, back_s = _saved(costs, node, blocks, saving, (forward_s, back_s), is_lowest=False)
    both_s = costs.num_micro * (forward_s + back_s)
    work_s = both_s + count * costs.update_s[node]
    traffic = _traffic(costs, node, 2, 2, above.node < 0, is_bottom, costs.visit(*blocks))
    segment_s = forward_s + back_s + moves_s
    return PlacedStages(
        node=node,
        placed=above.placed + count,
        hosts=above.hosts + 1,
        path_s=above.path_s + segment_s,
        slowest_s=max(above.slowest_s, forward_s, back_s, wire_s),
        ends_s=above.ends_s,
        pace_s=above.pace_s,
        span_s=tuple(_wider(costs, above.span_s, node, segment_s, both_s, traffic)),
        busy_s=tuple(_busier(costs, above.busy_s, node, work_s, costs.num_micro * wire_s, traffic)),
    )


def _saved(
    costs: RingCosts,
    node: int,
    trained: tuple[int, int],
    saving: SliceSaving,
    times_s: tuple[float, float],
    *,
    is_lowest: bool = True,
) -> tuple[float, float]:
    """Seconds of a stage's forwards and backwards if it saves activations.

    Blocks that run again add a forward with graph to their backward; see ``ringtune.costs.activation_costs``.

    ``trained`` are its trained blocks [first, stop), ``times_s`` its forwards and backwards if it keeps everything.
    With ``is_lowest`` the first of these blocks is the lowest trained one of the run.
    """
    longer = 1 + VELORA_EXTRA * saving.is_projected
    forward_s, back_s = longer * times_s[0], times_s[1]
    if saving.is_projected:
        second = trained[0] + is_lowest
        back_s = costs.weight(second, trained[1]) * costs.projected_back_s[node]
        back_s += costs.weight(trained[0], second) * costs.projected_back_lowest_s[node]
    first, last = max(trained[0], saving.start), min(trained[1], saving.stop)
    if first >= last:
        return forward_s, back_s
    has_lowest = is_lowest and first == trained[0]
    above = first + 1 if has_lowest else first
    graph_s = longer * costs.weight(above, last) * costs.graph_s[node]
    graph_s += longer * costs.weight(first, above) * costs.graph_lowest_s[node]
    return forward_s, back_s + graph_s


def _between(costs: RingCosts, node: int, upper: int, visit: float) -> tuple[float, float]:
    """Seconds of a hidden state up and its gradient down together, and seconds on the busier of the two links.

    Both are means over all micro-batches, of which only the share ``visit`` has something to do on the node.
    """
    moves_s = costs.hidden_s[node][upper] + costs.grad_s[upper][node]
    return visit * moves_s, visit * max(costs.hidden_wire_s[node][upper], costs.grad_wire_s[upper][node])


class _MessageTimes(NamedTuple):
    """Seconds of a host's messages in a step, in other owners' turns and in its own.

    ``wires_s`` is of the busier of uplink and downlink, ``taken_s`` of the host's computing.
    """

    wires_s: float
    own_wires_s: float
    taken_s: float
    own_taken_s: float


def _traffic(
    costs: RingCosts, node: int, ups: int, downs: int, is_top: bool, is_bottom: bool, visit: float
) -> _MessageTimes:
    """Seconds that a host's messages in a step take from its links and its computing.

    Each micro-batch of the share ``visit`` that visits the host has ``ups`` tensors on the uplink and ``downs`` on the
    downlink. In its own turn the host also sends embeddings and the head's gradients, and receives the top's hidden
    states; tensors to itself do not travel.
    """
    micro = costs.num_micro
    up_s, down_s = micro * costs.uplink_s[node], micro * costs.downlink_s[node]
    sending_s, receiving_s = micro * costs.sending_s[node], micro * costs.receiving_s[node]
    own_ups = visit * (ups + (0 if is_bottom else 1) + (-1 if is_top else 1)) + (1 - visit) * 2
    own_downs = visit * (downs + (-1 if is_bottom else 0) + (-min(1, downs - 1) if is_top else 1)) + (1 - visit)
    return _MessageTimes(
        visit * max(ups * up_s, downs * down_s),
        max(own_ups * up_s, own_downs * down_s),
        visit * (ups * sending_s + downs * receiving_s),
        own_ups * sending_s + own_downs * receiving_s,
    )


def _busier(
    costs: RingCosts, before: Sequence[float], node: int, work_s: float, wire_s: float, traffic: _MessageTimes
) -> list[float]:
    """Seconds per owner of the busiest resource: of ``before``, this host's computing, links and ``wire_s``.

    Only in its own turn does the host add embedding, head and the head's update.
    """
    common_s = max(work_s + traffic.taken_s, wire_s, traffic.wires_s)
    busy = [max(busy_s, common_s) for busy_s in before]
    index = costs.owner_of.get(node)
    if index is not None:
        owner = costs.owners[index]
        own_s = work_s + traffic.own_taken_s + costs.num_micro * (owner.embed_s + owner.head_s) + owner.update_s
        busy[index] = max(before[index], own_s, wire_s, traffic.own_wires_s)
    return busy


def _wider(
    costs: RingCosts, before: Sequence[float], node: int, segment_s: float, both_s: float, traffic: _MessageTimes
) -> list[float]:
    """Longest span per owner, after this host was placed below the others.

    A span is one host's forwards and backwards of a step, with the way from the lowest stage to that host and back.
    This host's segment lengthens the way to all hosts above it. Example: a span of 5 s above and a segment of 2 s are 7
    s; this host's own span of 6 s is shorter, so the result is 7 s.
    """
    common_s = max(both_s, traffic.wires_s)
    span = [max(span_s + segment_s, common_s) for span_s in before]
    index = costs.owner_of.get(node)
    if index is not None:
        head_s = costs.num_micro * costs.owners[index].head_s
        span[index] = max(before[index] + segment_s, both_s + head_s, traffic.own_wires_s)
    return span


def _visiting_s(costs: RingCosts, owner: OwnerCosts, top: int) -> float:
    """Seconds that an owner without blocks works in a step of its own turn: embedding, head, update and messages.

    Without messages if the owner is the top host; 0 for the mean owner.
    """
    micro = costs.num_micro
    work_s = micro * (owner.embed_s + owner.head_s) + owner.update_s
    if owner.node < 0 or owner.node == top:
        return work_s if owner.node >= 0 else 0.0
    wires_s = max(2 * costs.uplink_s[owner.node], costs.downlink_s[owner.node], owner.wire_s[top])
    work_s += micro * (2 * costs.sending_s[owner.node] + costs.receiving_s[owner.node])
    return max(work_s, micro * wires_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """The hosts in ring order, each with its number of blocks. ``nodes``: indices into ``RingCosts.names``."""

    nodes: tuple[int, ...]
    counts: tuple[int, ...]


def job_s(costs: RingCosts, ring: Ring) -> float:
    """Predicted seconds of the whole job."""
    times = step_times(costs, ring)
    return sum(costs.steps_at[at] * times[at] for at in costs.depths)


def step_times(costs: RingCosts, ring: Ring) -> dict[int, float]:
    """Predicted seconds of a step at every depth of the job, averaged over the owners by their weights."""
    above = at_the_head(costs, ring.nodes[-1])
    num_owners = len(costs.owners)
    stage_rows: list[list[list[float]]] = []
    frozen: list[list[float]] = []
    for index in range(len(ring.nodes) - 1, -1, -1):
        node, count = ring.nodes[index], ring.counts[index]
        frozen.append(frozen_s(costs, above, node, count, is_bottom=index == 0))
        rows, above = place(costs, above, node, count, is_bottom=index == 0)
        stage_rows.append(rows)
    below = [0.0] * num_owners
    at = costs.stop - costs.first
    times: dict[int, float] = {}
    weights = [owner.weight for owner in costs.owners]
    for rows, busy in zip(reversed(stage_rows), reversed(frozen), strict=True):
        for row in reversed(rows):
            if row:
                times[at] = sum(weight * max(up, down) for weight, up, down in zip(weights, row, below, strict=True))
            at -= 1
        below = list(map(max, below, busy))
    if costs.steps_at[0]:  # only the head trains: no backward through blocks, so all of them work ahead
        heads = (costs.num_micro * (owner.embed_s + owner.head_s) + owner.update_s for owner in costs.owners)
        times[0] = sum(weight * max(up, down) for weight, up, down in zip(weights, below, heads, strict=True))
    return times


Exchange = Callable[[Sequence[int], int], float]
"""(nodes of a stage, number of blocks) -> seconds in which they exchange the gradients of these blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of a layout. ``nodes`` are indices of its hosts, ``shares`` the micro-batches of a step of each."""

    nodes: tuple[int, ...]
    shares: tuple[int, ...]
    count: int


Layout = tuple[Stage, ...]


def layout_step_s(costs: RingCosts, layout: Layout, depth: int, exchange_s: Exchange) -> float:
    """Seconds of a step that trains ``depth`` blocks: busiest host or link, a micro-batch's way, exchange of gradients.

    While the first and the last micro-batch of a step are on their way, the busiest host waits for the other stages.
    """
    busiest_s = way_s = sums_s = 0.0
    lowest, at = costs.stop - depth, costs.first
    for stage in layout:
        stop = at + stage.count
        trained = max(0, stop - max(at, lowest))
        works = [_micro_s(costs, node, stage.count - trained, trained) for node in stage.nodes]
        updates = [trained * costs.update_s[node] for node in stage.nodes]
        hosts = zip(works, stage.shares, updates, strict=True)
        busiest_s = max(busiest_s, *(work_s * share + update_s for work_s, share, update_s in hosts))
        way_s += max(works) if trained else 0.0
        if len(stage.nodes) > 1 and trained:
            sums_s = max(sums_s, exchange_s(stage.nodes, trained))
        at = stop
    last = layout[-1]
    way_s -= max(_micro_s(costs, node, 0, min(depth, last.count)) for node in last.nodes) if depth else 0.0
    return max(busiest_s + max(0.0, way_s) + sums_s, _bottom_wires_s(costs, layout))


def shares_of(times_s: Sequence[float], count: int) -> tuple[int, ...]:
    """Deal micro-batches to hosts, each to the host that would finish it first.

    Example: 4 to hosts that take 1 s and 2 s each are 3 and 1; 6 are 4 and 2.
    """
    shares = [0] * len(times_s)
    for _ in range(count):
        index = min(range(len(times_s)), key=lambda at: ((shares[at] + 1) * times_s[at], at))
        shares[index] += 1
    return tuple(shares)


def _micro_s(costs: RingCosts, node: int, frozen: int, trained: int) -> float:
    """Seconds of one micro-batch at a host: forwards of frozen blocks, forwards and backwards of those that train."""
    return frozen * costs.forward_s[node] + trained * (costs.graph_s[node] + costs.backward_s[node])


def _bottom_wires_s(costs: RingCosts, layout: Layout) -> float:
    """Seconds that the mean owner's uplink takes for the hidden states of a step to other nodes."""
    bottom = layout[0]
    seconds = 0.0
    for owner in costs.owners:
        own_share = sum(share for node, share in zip(bottom.nodes, bottom.shares, strict=True) if node == owner.node)
        away = costs.num_micro - own_share
        seconds += owner.weight * away * (costs.uplink_s[owner.node] if owner.node >= 0 else 0.0)
    return seconds
