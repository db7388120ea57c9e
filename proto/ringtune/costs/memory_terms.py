"""Memory of a node as a sum of terms (number of equal things x bytes of each), and the node's share of a placement.

``passing_bytes``: measured by ``python -m tests.support.saving_memory``: saving, loading, sending, taking over and
collecting a head with state of 50 MB takes 0 to 12 MB more, mostly messages of a link (4 MiB each) and buffers.

``has_room_for_heap``: a heap that keeps freed memory saves page faults, but is fragmented, and plans do not count that.
Resident memory above plan and libraries of a node alone, MiniLM, 16 x 128 tokens, AdamW: 10 MiB with a bottleneck, 262
MiB with LoRA on five matrices, where graphs of 344 MiB were planned. At the owner of a decoder in int8 30 MiB, where
graphs of 5 MiB and logits of 16 MiB were planned, and 8 MiB without such a heap. So a node with little memory does
without.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

from ringtune.quantities import format_bytes
from ringtune.schedule.migration import copied_from, head_holders
from ringtune.schedule.placement import CREDITS, Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import merged
from ringtune.schedule.stages import num_assigned, replicas, width
from ringtune.schedule.units import Range
from ringtune.techniques.audit import checked_by, fits_checked_by
from ringtune.techniques.base import Term

PART_WORDS: Final = {
    "weights": "hosted blocks, and an owner's embedding, that do not train, or all that trains in full training",
    "adapters": "the adapters of hosted blocks, with earlier versions of them, and those that are fitted for others",
    "optimizer": "gradients and moments of what trains, without an adapter run's head",
    "activations": "what forwards keep for their backwards, and the work space of a block",
    "head": "an owner's head, and the work space of its loss",
    "data": "an owner's rows and tokenizer, and operation tables",
    "buffers": "tensors that are on their way or wait",
    "device": "what CUDA takes of an accelerator besides tensors: context, code of kernels, work space of cuBLAS",
    "kept": "what trained, as it was at the ends of the last turns, and copies of the host before in the ring",
    "passing": "what is there for a moment: work space of an update, pieces of what is saved or handed over",
}
"""Parts of a node's memory in reports -> meaning."""

PARTS: Final = tuple(PART_WORDS)
"""Names of these parts, in the order of a report."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Memory of one node at the fullest moment of a run, as disjoint terms."""

    terms: tuple[Term, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Sum of all terms."""
        return sum(term.number * term.each_bytes for term in self.terms)

    def parts(self) -> dict[str, int]:
        """Return part -> bytes, in the order of ``PARTS``."""
        sums = dict.fromkeys(PARTS, 0)
        for term in self.terms:
            sums[term.part] += term.total_bytes
        return sums

    def __str__(self) -> str:
        """Write the total and its parts: ``4.0 MiB (weights 3.0 MiB, head 1.0 MiB)``."""
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.parts().items() if size)
        return f"{format_bytes(self.total_bytes)} ({parts})"


@dataclass(frozen=True, kw_only=True, slots=True)
class NeighbourHosts:
    """Numbers of hosts around a node where stages have several.

    Attributes:
        above, below: of all stages above, and below.
        next_above, next_below: of the stages next to the node's; 0 where there is none.
        top, bottom: of the highest stage, and of the lowest.
        width: of the stage that has most.
        replicas: of the node's stage, without the node.
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
    def of(placement: Placement, node: str, microbatches: int) -> NeighbourHosts | None:
        """Count the hosts around a node of a placement; None where each stage has one host."""
        if not placement.has_replicas:
            return None
        piece, stages = placement.slice_of(node), placement.stages
        above = [len(stage) for stage in stages if stage[0].start >= piece.stop]
        below = [len(stage) for stage in stages if stage[0].stop <= piece.start]
        return NeighbourHosts(
            above=sum(above),
            below=sum(below),
            next_above=above[0] if above else 0,
            next_below=below[-1] if below else 0,
            top=len(stages[-1]),
            bottom=len(stages[0]),
            width=width(placement),
            replicas=max(0, len(replicas(placement, node)) - 1),
            dealt=num_assigned(placement, node, microbatches),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A node's share of a placement, as far as memory depends on it.

    Attributes:
        is_owner: whether it has data, embedding and head.
        start, stop: the blocks that it hosts; equal if it hosts nothing.
        above: stages between it and the head.
        below: stages below it; matters only where operation tables skip slices.
        credits: hidden states in flight per (link, boundary).
        state_on_disk: whether the optimizer state of units that do not train at a step is in files.
        helped: own blocks with adapters that helpers train.
        helps: blocks with adapters that it trains, a tuple for each of their hosts.
        around: hosts around it where stages have several; None where each has one.
        copies: ranges of blocks that others train, of which it keeps copies; None = no ends of turns are kept.
        keeps_heads: whether it keeps copies of owners' heads.
        audit: share of the cells that are drawn in an audit; 0 = none is.
        again: blocks of another host whose work it repeats in the audit.
        helped_again: blocks of all hosts with adapters that helpers train, in an audit.
        fits_again: number of blocks of which it repeats helpers' work.
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
    around: NeighbourHosts | None = None
    copies: tuple[Range, ...] | None = None
    keeps_heads: bool = False
    audit: float = 0.0
    again: Range | None = None
    helped_again: tuple[Range, ...] = ()
    fits_again: int = 0

    @staticmethod
    def of(plan: Plan, node: str, audit: float = 0.0) -> Share:
        """Return the share of a node of a plan; ``audit`` is the share of cells that are drawn."""
        placement, piece = plan.placement, plan.slice_of(node)
        above = placement.hosts_above(piece.stop)
        microbatches = len(plan.course.microbatch_sizes())
        helps: dict[str, list[Range]] = {}
        for helper in placement.helped_by(node):
            helps.setdefault(placement.host_of(helper.start), []).append(Range(helper.start, helper.stop))
        checked = [plan.slice_of(other) for other in checked_by(placement, node)] if audit else []
        again = max(checked, key=lambda piece: piece.num_blocks, default=None)  # one of them at a time
        copied = itertools.chain(*copied_from(placement, node).values()) if placement.copies else ()
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
            helped=tuple(Range(helper.start, helper.stop) for helper in placement.helpers_of(node)),
            helps=tuple(map(tuple, helps.values())),
            around=NeighbourHosts.of(placement, node, microbatches),
            copies=merged(Range(block, block + 1) for block in copied) if placement.copies else None,
            keeps_heads=placement.copies
            and any(node in head_holders(plan.course, placement, owner.node) for owner in plan.course.owners),
            audit=audit,
            again=Range(again.start, again.stop) if again is not None else None,
            helped_again=tuple(Range(helper.start, helper.stop) for helper in placement.helpers) if audit else (),
            fits_again=len(fits_checked_by(placement, node)) if audit else 0,
        )


_MAX_PASSING_BYTES: Final = 12 << 20


def passing_bytes(moved_bytes: int) -> int:
    """Upper bound of the temporary bytes to save, load, send or take over ``moved_bytes``.

    Example: 12 MiB for a head of 100 MiB; 2 MiB, twice its size, for one of 1 MiB.
    """
    return min(_MAX_PASSING_BYTES, 2 * moved_bytes)


_PIECES: Final = 2
"""Memory for fragments of the heap, as a multiple of activations and work space of the head."""


def has_room_for_heap(needs: MemoryEstimate, memory_bytes: int) -> bool:
    """Whether a node may keep freed memory in its heap: its estimate plus fragments is within ``memory_bytes``.

    Example: 100 MiB of which 30 are activations and 10 the head's may become 180 MiB.
    """
    parts = needs.parts()
    return needs.total_bytes + _PIECES * (parts["activations"] + parts["head"]) <= memory_bytes
