"""Errors of a plan that does not fit: the node, the blocks, the bytes that it needs and has."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.planner.even import block_s, split_blocks
from coordinator.planner.fitting.memory_caps import MemoryCaps
from ringtune.costs.memory.terms import MemoryEstimate
from ringtune.costs.profile import NodeFacts
from ringtune.errors import CapacityError, PlanError
from ringtune.quantities import format_bytes


def refusal(
    caps: MemoryCaps,
    node: str,
    start: int,
    stop: int,
    more: str = "",
    *,
    needs: MemoryEstimate | None = None,
    remedy: str = "",
) -> CapacityError:
    """Make the error that ``node`` can't host ``[start, stop)``; it names the bytes needed and the bytes there are.

    Without ``needs`` the least is named: one host above, or none at the top. A ``remedy`` comes before the usual ones.
    """
    has, is_top = caps.facts[node].memory_bytes, stop == caps.draft.course.head
    needs = needs or caps.estimate_of(node, start, stop, 0 if is_top else 1)
    what = f"for blocks [{start}, {stop})" if stop > start else "for embedding and head"
    return CapacityError(
        f"node {node} needs {needs} {what} but has {format_bytes(has)}{more}; {remedy}lower train.batch_size "
        "or train.max_length, or add a node"
    )


def nothing_fits(caps: MemoryCaps, nodes: Sequence[NodeFacts], remedy: str = "") -> CapacityError:
    """Make the error that no split fits; it names one node that lacks memory.

    The node is an owner without room for embedding and head. Else it is the first node without room for its slice in
    the split by speed, or the node with most memory if the method runs all blocks on one. A ``remedy`` comes before the
    usual ones.

    Raises:
        PlanError: every node can do its part; then a plan should have been found.
    """
    draft = caps.draft
    start, stop = draft.private_blocks, draft.course.num_blocks
    for owner in draft.course.owners:
        if not caps.fits_empty(owner.node):
            return refusal(caps, owner.node, stop, stop, remedy=remedy)
    if draft.course.method.max_hosts == 1:
        roomiest = max(nodes, key=lambda node: node.memory_bytes)
        return refusal(caps, roomiest.node, start, stop, ", and no other node has more", remedy=remedy)
    costs = [block_s(node) or 1.0 for node in nodes]
    at = start
    for node, count in zip(nodes, split_blocks(costs, start=start, stop=stop) or (), strict=False):
        above = 0 if at + count == stop else 1
        if count and caps.lacking(node.node, at, at + count, above):
            others = ", and no other split of the blocks fits" if len(nodes) > 1 else ""
            return refusal(caps, node.node, at, at + count, others, remedy=remedy)
        at += count
    raise PlanError("no split was found although one fits; please report it")
