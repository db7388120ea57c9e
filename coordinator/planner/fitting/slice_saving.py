"""How a slice saves activations, chosen so that it fits its node's memory and its steps take the least time.

A job names one policy for all slices, or leaves the choice to the planner (``auto``). Then a slice keeps everything
where that fits. Where it does not, the cheapest of these that fits is taken::

    velora               projections for inputs of linear layers: soon done, but gradients change; only if allowed
    recompute r blocks   the lowest r blocks that train run again: a forward more for each; as few as needed
    both                 projections, and as few blocks as needed run again

The lowest blocks run again because they train at the fewest steps where a run unfreezes from the top down. The very
lowest that trains is passed over where that does: with adapters its graph begins inside it, so that it frees little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from ringtune.costs.profile import NodeFacts
from ringtune.costs.times.saving_seconds import VELORA_EXTRA
from ringtune.jobs.parts.memory import AUTO
from ringtune.schedule.plan import Plan
from ringtune.schedule.slice_policy import BOTH, NONE, RECOMPUTE, VELORA, SlicePolicy
from ringtune.schedule.units import Range

_FORWARD_SHARE: Final = 1 / 3
"""A forward over forward and backward together, where nobody measured them."""


class SliceSaving(NamedTuple):
    """What the trained blocks of one slice keep.

    Attributes:
        start: first of the blocks that run again.
        stop: one past the last; none where it is ``start``.
        is_projected: whether linear layers keep projections of their inputs.
    """

    start: int = 0
    stop: int = 0
    is_projected: bool = False

    @property
    def recomputed(self) -> int:
        """How many blocks run again."""
        return self.stop - self.start

    @property
    def policy(self) -> str:
        """The policy in a word, as a job names it."""
        if self.recomputed:
            return BOTH if self.is_projected else RECOMPUTE
        return VELORA if self.is_projected else NONE


KEEPS_ALL: Final = SliceSaving()

Needs = Callable[[SliceSaving], int]
"""Bytes that a node needs for a slice with this saving."""


def slice_saving(
    activations: str,
    kept: Range,
    needs: Needs,
    facts: NodeFacts,
    *,
    may_project: bool = False,
    gain: float = 0.0,
    first_is_small: bool = False,
) -> SliceSaving:
    """How a slice saves activations under a job's policy.

    Args:
        activations: ``memory.activations`` of the job.
        kept: the blocks of the slice that keep something for their backward.
        needs: bytes for a saving.
        facts: of the node: its memory and times.
        may_project: whether ``auto`` may choose VeLoRA.
        gain: what VeLoRA takes off, as for ``extra_share``.
        first_is_small: whether the first of these blocks keeps less than the others.

    Returns:
        With ``auto`` the cheapest saving that fits; where none does, the one that needs least.
    """
    if kept.start >= kept.stop or activations == NONE:
        return KEEPS_ALL
    if activations != AUTO:
        stop = kept.stop if activations in (RECOMPUTE, BOTH) else kept.start
        return SliceSaving(kept.start, stop, activations in (VELORA, BOTH))
    if needs(KEEPS_ALL) <= facts.memory_bytes:
        return KEEPS_ALL
    both = (False, True) if may_project else (False,)
    begins = [kept, *([Range(kept.start + 1, kept.stop)] if first_is_small and kept.stop - kept.start > 1 else [])]
    ways = [_fewest(some, needs, facts.memory_bytes, is_projected=way) for way in both for some in begins]
    fitting = [way for way in ways if needs(way) <= facts.memory_bytes]
    if not fitting:
        return min(ways, key=needs)
    return min(fitting, key=lambda way: (extra_share(way, kept, facts, gain=gain), way.is_projected, way.start))


def extra_share(saving: SliceSaving, kept: Range, facts: NodeFacts, *, gain: float = 0.0) -> float:
    """The time that a saving adds, over that of the slice's forwards with graph and backwards; below 0 if it saves.

    Example: 2 of 6 blocks run again and a forward takes a third of both directions: 1/9.

    Args:
        saving: of the slice.
        kept: its blocks that keep something for their backward.
        facts: of the node.
        gain: what VeLoRA takes off each of their backwards, over a forward (``saving_seconds.projected_gain``).
    """
    if kept.start >= kept.stop:
        return 0.0
    both_s = facts.block_graph_s + facts.block_backward_s
    forward = facts.block_graph_s / both_s if both_s > 0 else _FORWARD_SHARE
    projected = VELORA_EXTRA - gain * forward if saving.is_projected else 0.0
    return forward * saving.recomputed / (kept.stop - kept.start) + projected


def _fewest(kept: Range, needs: Needs, has_bytes: int, *, is_projected: bool) -> SliceSaving:
    """The saving with the fewest blocks that run again and still fits; with all of them where none fits."""

    def saving(count: int) -> SliceSaving:
        return SliceSaving(kept.start, kept.start + count, is_projected)

    if needs(saving(0)) <= has_bytes:
        return saving(0)
    few, many = 0, kept.stop - kept.start
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if needs(saving(middle)) <= has_bytes else (middle, many)
    return saving(many)


def planned_saving(plan: Plan, start: int, stop: int) -> SliceSaving:
    """How a plan's slice [start, stop) saves activations.

    Where its blocks that run again are no neighbours, as in a plan by hand, they count as if they were.
    """
    policy = SlicePolicy.of(plan, start, stop)
    if policy.name == NONE:
        return KEEPS_ALL
    again = policy.recomputed
    first = again[0].start if again else start
    return SliceSaving(first, first + sum(last - one for one, last in again), bool(policy.projected))
