"""A node's part in a placement, as far as its memory depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from ringtune.schedule.changing_hands.copy_holders import copied_from
from ringtune.schedule.placement import CREDITS, Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages.dealing import num_dealt, replicas, width
from ringtune.schedule.units import Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    """The hosts around a node where stages have several.

    Attributes:
        above, below: hosts of all stages above, and below.
        next_above, next_below: hosts of the stages next to the node's own; 0 where there is none.
        top, bottom: hosts of the highest stage, and of the lowest.
        width: hosts of the stage that has most.
        replicas: other hosts of the node's own stage.
        dealt: micro-batches of a batch that pass the node.
    """

    above: int
    below: int
    next_above: int
    next_below: int
    top: int
    bottom: int
    width: int
    replicas: int
    dealt: int

    @staticmethod
    def of(placement: Placement, node: str, microbatches: int) -> Around | None:
        """The hosts around a node of a placement; None where each stage has one host."""
        if not placement.has_replicas:
            return None
        piece, stages = placement.slice_of(node), placement.stages
        above = [len(stage) for stage in stages if stage[0].start >= piece.stop]
        below = [len(stage) for stage in stages if stage[0].stop <= piece.start]
        return Around(
            above=sum(above),
            below=sum(below),
            next_above=above[0] if above else 0,
            next_below=below[-1] if below else 0,
            top=len(stages[-1]),
            bottom=len(stages[0]),
            width=width(placement),
            replicas=max(0, len(replicas(placement, node)) - 1),
            dealt=num_dealt(placement, node, microbatches),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A node's part in a placement, as far as memory depends on it.

    Attributes:
        is_owner: whether it has data, embedding and head.
        start, stop: the blocks that it hosts; equal if it hosts nothing.
        above: hosts between it and the head.
        below: hosts below it; counts only where an operation table lets slices be passed by.
        private_blocks: that each owner runs itself.
        credits: hidden states in flight per (link, boundary).
        recompute: blocks whose backward runs them again, its own among them.
        state_on_disk: whether the optimizer state of units that rest is in files.
        helped: own blocks whose adapters helpers fit.
        helps: blocks of each other host whose adapters it fits, a tuple a host.
        around: the hosts around it where stages have several; None where each has one.
        copies: ranges of blocks of other hosts of which it keeps copies; None = nothing is kept of the ends of turns.
    """

    is_owner: bool
    start: int
    stop: int
    above: int
    below: int = 0
    private_blocks: int = 0
    credits: int = CREDITS
    recompute: tuple[Range, ...] = ()
    state_on_disk: bool = False
    helped: tuple[Range, ...] = ()
    helps: tuple[tuple[Range, ...], ...] = ()
    around: Around | None = None
    copies: tuple[Range, ...] | None = None

    @staticmethod
    def of(plan: Plan, node: str) -> Share:
        """The share of a node of a plan."""
        placement, piece = plan.placement, plan.slice_of(node)
        above = placement.hosts_above(piece.stop)
        microbatches = len(plan.course.microbatch_sizes())
        return Share(
            is_owner=plan.owner(node) is not None,
            start=piece.start,
            stop=piece.stop,
            above=above,
            below=len(placement.stages) - above - (1 if piece.num_blocks else 0),
            private_blocks=placement.private_blocks,
            credits=placement.credits,
            recompute=placement.recompute,
            state_on_disk=placement.state_on_disk,
            helped=tuple(Range(one.start, one.stop) for one in placement.helpers_of(node)),
            helps=_helps(placement, node),
            around=Around.of(placement, node, microbatches),
            copies=_copies(placement, node) if placement.copies else None,
        )


def _copies(placement: Placement, node: str) -> tuple[Range, ...]:
    return tuple(Range(piece.start, piece.stop) for piece in map(placement.slice_of, copied_from(placement, node)))


def _helps(placement: Placement, node: str) -> tuple[tuple[Range, ...], ...]:
    found: dict[str, list[Range]] = {}
    for one in placement.helped_by(node):
        found.setdefault(placement.host_of(one.start), []).append(Range(one.start, one.stop))
    return tuple(map(tuple, found.values()))
