"""What a run that moves needs besides its placements: room for what was trained beside the next slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ringtune.costs.memory.terms import MemoryEstimate, Term
from ringtune.costs.profile import NodeFacts
from ringtune.errors import CapacityError
from ringtune.quantities import format_bytes
from ringtune.schedule.plan import Plan

_KEPT = ("adapters", "optimizer")
_NOT_YET = ("activations", "buffers", "passing")


def fullest(parts: Sequence[Mapping[str, MemoryEstimate]]) -> dict[str, MemoryEstimate]:
    """What each node holds at most in any placement."""
    nodes = dict.fromkeys(node for part in parts for node in part)
    return {
        node: max((part[node] for part in parts if node in part), key=lambda one: one.total_bytes) for node in nodes
    }


def moving_memory(
    before: Mapping[str, MemoryEstimate], after: Mapping[str, MemoryEstimate]
) -> dict[str, MemoryEstimate]:
    """What each node of a placement holds while the run moves to it.

    The next slice is there, with what was trained of the one before; no micro-batch is under way.
    """
    return {node: _while_moving(before.get(node, MemoryEstimate()), here) for node, here in after.items()}


def _while_moving(before: MemoryEstimate, after: MemoryEstimate) -> MemoryEstimate:
    kept = (
        Term(term.part, f"{term.what}, of the slice before", term.number, term.each_bytes)
        for term in before.terms
        if term.part in _KEPT
    )
    return MemoryEstimate((*(term for term in after.terms if term.part not in _NOT_YET), *kept))


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
    pairs = zip(plan.placements[1:], parts, parts[1:], strict=False)
    for placement, before, after in pairs:
        for node, needs in moving_memory(before, after).items():
            if needs.total_bytes > facts[node].memory_bytes:
                raise CapacityError(
                    f"node {node} needs {needs} to move to placement {placement.epoch} but has "
                    f"{format_bytes(facts[node].memory_bytes)}; give the plan one placement, or move fewer blocks"
                )
