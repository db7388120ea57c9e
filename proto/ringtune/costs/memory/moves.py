"""What a run that moves needs besides its placements: room for what was trained, and for what comes, beside a slice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from ringtune.costs.memory.terms import MemoryEstimate, Term
from ringtune.costs.profile import NodeFacts
from ringtune.errors import CapacityError
from ringtune.quantities import format_bytes
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan

_KEPT = ("adapters", "optimizer")
_NOT_YET = ("activations", "buffers", "passing")


def fullest(parts: Sequence[Mapping[str, MemoryEstimate]]) -> dict[str, MemoryEstimate]:
    """What each node holds at most in any placement."""
    nodes = dict.fromkeys(node for part in parts for node in part)
    return {
        node: max((part[node] for part in parts if node in part), key=lambda one: one.total_bytes) for node in nodes
    }


def most_memory(
    plan: Plan, parts: Sequence[Mapping[str, MemoryEstimate]]
) -> tuple[dict[str, MemoryEstimate], dict[str, MemoryEstimate]]:
    """What each node holds at most in any placement, and during any move; the second has no node that never moves."""
    moving: dict[str, MemoryEstimate] = {}
    for placements, (before, after) in zip(itertools.pairwise(plan.placements), itertools.pairwise(parts), strict=True):
        moving = fullest([moving, moving_memory(placements, before, after)])
    return fullest(parts), moving


def moving_memory(
    placements: tuple[Placement, Placement], before: Mapping[str, MemoryEstimate], after: Mapping[str, MemoryEstimate]
) -> dict[str, MemoryEstimate]:
    """What each node of a placement holds at most while the run moves to it; no micro-batch is under way.

    First what others trained of its blocks comes, beside the old slice. Then the next slice is there, with what came
    and with what was trained of the old one.

    Args:
        placements: the one that the run leaves, and the next one.
        before: what nodes need in the first one.
        after: what nodes need in the second one.
    """
    found = {}
    for node, here in after.items():
        old = before.get(node, MemoryEstimate())
        coming = tuple(_coming(_new_share(*placements, node), here))
        moments = (
            MemoryEstimate((*_resting(old), *coming)),
            MemoryEstimate((*_resting(here), *coming, *_kept(old))),
        )
        found[node] = max(moments, key=lambda one: one.total_bytes)
    return found


def _new_share(before: Placement, after: Placement, node: str) -> float:
    """The share of the blocks of a node's next slice that it does not host yet."""
    held, wanted = (
        {block for one in placement.slices if one.node == node for block in range(one.start, one.stop)}
        for placement in (before, after)
    )
    return len(wanted - held) / max(1, len(wanted))


def _resting(estimate: MemoryEstimate) -> Iterator[Term]:
    return (term for term in estimate.terms if term.part not in _NOT_YET)


def _kept(before: MemoryEstimate) -> Iterator[Term]:
    for term in before.terms:
        if term.part in _KEPT:
            yield term._replace(what=f"{term.what}, of the slice before")


def _coming(share: float, after: MemoryEstimate) -> Iterator[Term]:
    for term in after.terms:
        if term.part in _KEPT and share:
            yield Term(term.part, f"{term.what}, as others send it", 1, math.ceil(share * term.total_bytes))


def refuse_full_moves(
    plan: Plan, parts: Sequence[Mapping[str, MemoryEstimate]], facts: Mapping[str, NodeFacts]
) -> None:
    """Refuse a plan with a move for which a node has no room.

    Args:
        plan: that moves.
        parts: what the nodes of each placement need, in their order.
        facts: of every node.

    Raises:
        CapacityError: names the node, the move, and both numbers.
    """
    moves = zip(itertools.pairwise(plan.placements), itertools.pairwise(parts), strict=True)
    for placements, (before, after) in moves:
        for node, needs in moving_memory(placements, before, after).items():
            if needs.total_bytes > facts[node].memory_bytes:
                raise CapacityError(
                    f"node {node} needs {needs} to move to placement {placements[1].placement_number} but has "
                    f"{format_bytes(facts[node].memory_bytes)}; give the plan one placement, or move fewer blocks"
                )
