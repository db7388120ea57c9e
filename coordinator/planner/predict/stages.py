"""A ring that grows from the top down, one stage at a time, with everything that the step's time needs.

The formulas stand in ``step_time``. They can be kept incrementally in this direction, because at depth d only the
stages above the lowest trainable one are trained whole, and those below it are frozen whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.planner.predict.ring_costs import OwnerCosts, RingCosts

Rows = list[list[float]]


@dataclass(frozen=True, slots=True)
class Above:
    """The stages placed so far, all of them trained whole.

    Attributes:
        node: of the lowest one; -1 if none is placed.
        placed: blocks of all of them.
        path_s: forwards, backwards and transfers of one micro-batch, without what depends on the owner.
        slowest_s: the slowest single action or transfer.
        ends_s: per owner, its head and the way from the top node and back.
        pace_s: per owner, the slowest of these.
        span_s: per owner, most that a node or its links take for all micro-batches, with the way to it and back.
        busy_s: per owner, how long the busiest node or link is taken.
    """

    node: int
    placed: int
    path_s: float
    slowest_s: float
    ends_s: tuple[float, ...]
    pace_s: tuple[float, ...]
    span_s: tuple[float, ...]
    busy_s: tuple[float, ...]


def at_the_head(costs: RingCosts, top: int) -> Above:
    """Nothing is placed yet, but the top stage will be on node ``top``."""
    return Above(
        node=-1,
        placed=0,
        path_s=0.0,
        slowest_s=0.0,
        ends_s=tuple(owner.up_s[top] + owner.head_s + owner.down_s[top] for owner in costs.owners),
        pace_s=tuple(max(owner.head_s, owner.wire_s[top]) for owner in costs.owners),
        span_s=(0.0,) * len(costs.owners),
        busy_s=tuple(_visiting_s(costs, owner, top) for owner in costs.owners),
    )


def place(costs: RingCosts, above: Above, node: int, count: int, *, is_bottom: bool) -> tuple[Rows, Above]:
    """Put ``count`` blocks on ``node`` below what is placed.

    Returns:
        Per number of trained blocks of this stage (1 to ``count``) the seconds of a step per owner, as far as the
        stages below don't take longer, nothing where the job has no such step; and the ring with this stage.
    """
    micro = costs.num_micro
    is_top = above.node < 0
    moves_s, wire_s = (0.0, 0.0) if is_top else _between(costs, node, above.node)
    graph_s, backward_s = costs.graph_s[node], costs.backward_s[node]
    free_s, update_s = micro * costs.forward_s[node], costs.update_s[node]
    traffic = _traffic(costs, node, 1, 2, is_top, is_bottom)
    rows: Rows = []
    for trained in range(1, count + 1):
        if not costs.steps_at[above.placed + trained]:
            rows.append([])
            continue
        forward_s = (trained - 1) * graph_s + costs.graph_lowest_s[node]
        back_s = (trained - 1) * backward_s + costs.backward_lowest_s[node]
        both_s, last_s = micro * (forward_s + back_s), trained * update_s
        work_s = (count - trained) * free_s + both_s + last_s
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
    return rows, _whole(costs, above, node, count, is_bottom, moves_s, wire_s)


def overlapped(costs: RingCosts, busy: Sequence[float], critical: Sequence[float]) -> list[float]:
    """Seconds of a step per owner from its two bounds; PipeAdapter pays the critical path once a turn only."""
    if not costs.stale_steps:
        return list(map(max, busy, critical))
    share = 1 / costs.stale_steps
    return [
        busy_s + share * (critical_s - busy_s) if critical_s > busy_s else busy_s
        for busy_s, critical_s in zip(busy, critical, strict=True)
    ]


def frozen_s(costs: RingCosts, above: Above, node: int, count: int, *, is_bottom: bool) -> list[float]:
    """How busy a stage and the links to it are while all its blocks are frozen, per owner's turn."""
    is_top = above.node < 0
    work_s = costs.num_micro * count * costs.forward_s[node]
    wire_s = 0.0 if is_top else costs.num_micro * costs.hidden_wire_s[node][above.node]
    none = (0.0,) * len(costs.owners)
    busy = _busier(costs, none, node, work_s, wire_s, _traffic(costs, node, 1, 1, is_top, is_bottom))
    if is_bottom:
        return [
            max(busy_s, costs.num_micro * owner.into_s[node]) for busy_s, owner in zip(busy, costs.owners, strict=True)
        ]
    return busy


def _whole(
    costs: RingCosts,
    above: Above,
    node: int,
    count: int,
    is_bottom: bool,
    moves_s: float,
    wire_s: float,
) -> Above:
    forward_s, back_s = count * costs.graph_s[node], count * costs.backward_s[node]
    both_s = costs.num_micro * (forward_s + back_s)
    work_s = both_s + count * costs.update_s[node]
    traffic = _traffic(costs, node, 2, 2, above.node < 0, is_bottom)
    segment_s = forward_s + back_s + moves_s
    return Above(
        node=node,
        placed=above.placed + count,
        path_s=above.path_s + segment_s,
        slowest_s=max(above.slowest_s, forward_s, back_s, wire_s),
        ends_s=above.ends_s,
        pace_s=above.pace_s,
        span_s=tuple(_wider(costs, above.span_s, node, segment_s, both_s, traffic)),
        busy_s=tuple(_busier(costs, above.busy_s, node, work_s, costs.num_micro * wire_s, traffic)),
    )


def _between(costs: RingCosts, node: int, upper: int) -> tuple[float, float]:
    """A hidden state up and its gradient down: both on their way, and how long the busier link is taken."""
    moves_s = costs.hidden_s[node][upper] + costs.grad_s[upper][node]
    return moves_s, max(costs.hidden_wire_s[node][upper], costs.grad_wire_s[upper][node])


class _MessageTimes(NamedTuple):
    """What a host's messages take in a step, in others' turns and in its own."""

    wires_s: float
    own_wires_s: float
    taken_s: float
    own_taken_s: float


def _traffic(costs: RingCosts, node: int, ups: int, downs: int, is_top: bool, is_bottom: bool) -> _MessageTimes:
    """How long a host's uplink or downlink is taken in a step, and what that takes from its computing.

    As the owner it also sends embeddings and the head's gradients, and takes the top's hidden states; what would go
    from itself to itself does not travel.
    """
    micro = costs.num_micro
    up_s, down_s = micro * costs.uplink_s[node], micro * costs.downlink_s[node]
    sending_s, receiving_s = micro * costs.sending_s[node], micro * costs.receiving_s[node]
    own_ups = ups + (0 if is_bottom else 1) + (-1 if is_top else 1)
    own_downs = downs + (-1 if is_bottom else 0) + (-min(1, downs - 1) if is_top else 1)
    return _MessageTimes(
        max(ups * up_s, downs * down_s),
        max(own_ups * up_s, own_downs * down_s),
        ups * sending_s + downs * receiving_s,
        own_ups * sending_s + own_downs * receiving_s,
    )


def _busier(
    costs: RingCosts, before: Sequence[float], node: int, work_s: float, wire_s: float, traffic: _MessageTimes
) -> list[float]:
    """Per owner's turn the busiest so far, or this host: its computing, its links, and the link to the stage above."""
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
    """Per owner's turn the longest span so far, which now begins lower, or this host's, which begins here."""
    common_s = max(both_s, traffic.wires_s)
    span = [max(span_s + segment_s, common_s) for span_s in before]
    index = costs.owner_of.get(node)
    if index is not None:
        head_s = costs.num_micro * costs.owners[index].head_s
        span[index] = max(before[index] + segment_s, both_s + head_s, traffic.own_wires_s)
    return span


def _visiting_s(costs: RingCosts, owner: OwnerCosts, top: int) -> float:
    """How busy an owner that hosts nothing is in its own turn; its links go to and from the top, and to the bottom."""
    micro = costs.num_micro
    work_s = micro * (owner.embed_s + owner.head_s) + owner.update_s
    if owner.node < 0 or owner.node == top:
        return work_s if owner.node >= 0 else 0.0
    wires_s = max(2 * costs.uplink_s[owner.node], costs.downlink_s[owner.node], owner.wire_s[top])
    work_s += micro * (2 * costs.sending_s[owner.node] + costs.receiving_s[owner.node])
    return max(work_s, micro * wires_s)
