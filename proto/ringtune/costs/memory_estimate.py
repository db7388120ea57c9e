"""Memory and disk of a run at a node, in training and in a move, as sums of terms.

Planner, refusals and the simulator's ledger use the same terms. The sum is an upper bound, to be compared with the
node's budget. The memory of interpreter and libraries before a run is not in it, except on an accelerator, where the
budget is the device's memory.

Bounds by the engine's rules:

* ``in_flight`` items at a time keep graphs (one, unless a method is stale on purpose): ``microbatches`` of them per
  block between the lowest unit that ever trains and the top;
* each of those items may use another version of the adapters: ``in_flight - 1`` besides the newest;
* optimizer state stays for every unit that was ever updated;
* credits bound the hidden states of a (link, boundary), whether they wait at the sender or the receiver;
* gradients are sent back for those items only: ``microbatches`` per boundary;
* an owner that hosts the bottom embeds without a credit, but only ``credits`` per segment of its route.

Ends of turns: for recovery a node keeps files with weights and optimizer state of trained blocks, its own and those of
another host or of its helper. A host of blocks [2, 4) that keeps copies for one of [0, 2), all trained, has four files
(``TURNS_KEPT + 1``) of each of the four blocks, of which one is being written or received. An owner keeps its head too;
a host with copies of heads as many.

Moves: besides its next slice a node holds the trained state of its old one, and the state that it receives.

Disk: a host with merged adapters keeps them in a file: one set, or the sum of all users' sets. Shards of adapters are
some megabytes and are counted only with helpers: these adapters may be as large as the matrices, and one for each user.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ringtune.config.optimizers import update_work_bytes
from ringtune.costs.activation_costs import graph_terms, recomputed_blocks
from ringtune.costs.full_parameters_costs import hosted_units, staying_units, step_terms, trained_units, unit_terms
from ringtune.costs.memory_sizes import (
    SCORE_WORK_BYTES,
    MemorySettings,
    Sizes,
    block_scores_bytes,
    gathers_scores,
    needs_gradients,
)
from ringtune.costs.memory_terms import MemoryEstimate, NeighbourHosts, Share, passing_bytes
from ringtune.costs.profile import ModelFacts, NodeFacts
from ringtune.errors import CapacityError
from ringtune.quantities import format_bytes
from ringtune.schedule.course import Course
from ringtune.schedule.migration import TURNS_KEPT
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import overlap
from ringtune.schedule.units import EMBEDDING, Range
from ringtune.schedule.versions import ever_trained, in_flight
from ringtune.techniques import TECHNIQUES
from ringtune.techniques.base import DiskTerm, Term

OWN_TURNS: Final = "trained block, as it was at the end of a turn"
COPIES: Final = "the same of another host"
HEADS: Final = "head, as it was at the end of a turn"
_FILES: Final = TURNS_KEPT + 1


def kept_turn_terms(course: Course, share: Share, sizes: Sizes) -> Iterable[Term]:
    """Yield the terms of copies of ends of turns; none where the placement keeps no copies."""
    if share.copies is None or not course.num_steps or course.method.full_parameters:
        return
    reach = ever_trained(course)
    yield Term("kept", OWN_TURNS, _FILES * _fitted_here(reach.ranges, share), sizes.snapshot_bytes)
    yield Term("kept", COPIES, _FILES * overlap(reach.ranges, share.copies), sizes.snapshot_bytes)
    if (share.is_owner or share.keeps_heads) and reach.has_head:
        yield Term("kept", HEADS, _FILES, sizes.handed_over_bytes)


def end_of_turn_bytes(course: Course, share: Share, sizes: Sizes) -> int:
    """Bytes of weights and optimizer state that a node would copy at the end of each turn."""
    ends = (EMBEDDING, course.head) if share.is_owner else ()
    reach = ever_trained(course)
    ends_bytes = sum(sizes.trained_bytes(unit) + sizes.state_bytes(unit) for unit in ends if unit in reach)
    return ends_bytes + _fitted_here(reach.ranges, share) * math.ceil(sizes.snapshot_bytes)


def _fitted_here(trained: Sequence[Range], share: Share) -> int:
    """Number of blocks that a node trains: its own without those of helpers, and those that it fits for others."""
    hosted = overlap(trained, [Range(share.start, share.stop)]) - overlap(trained, share.helped)
    return hosted + overlap(trained, itertools.chain(*share.helps))


def memory_estimate(course: Course, share: Share, sizes: Sizes) -> MemoryEstimate:
    """Estimate the memory of a node with this share at its fullest moment, for any timing."""
    return MemoryEstimate(tuple(term for term in _terms(course, share, sizes) if term.number and term.each_bytes))


def node_memory(
    plan: Plan,
    node: str,
    model: ModelFacts,
    *,
    optimizer: str,
    activation_token_bytes: float,
    dtype: str = "float32",
    data_bytes: int = 0,
) -> MemoryEstimate:
    """Estimate the memory of ``node`` at its fullest moment in the run of ``plan``; arguments as for ``Sizes``."""
    sizes = Sizes(
        plan.course,
        model,
        optimizer=optimizer,
        dtype=dtype,
        activation_token_bytes=activation_token_bytes,
        data_bytes=data_bytes,
    )
    return memory_estimate(plan.course, Share.of(plan, node), sizes)


def _terms(course: Course, share: Share, sizes: Sizes) -> Iterable[Term]:
    reach, micro = ever_trained(course), course.microbatch_sizes()
    tokens = micro[0] * course.max_length
    num_hosted = share.stop - share.start + (share.private_blocks if share.is_owner else 0)
    num_kept = max(0, share.stop - max(share.start, reach.lowest))
    flying = 1
    if share.start < share.stop:  # by the ring, or by a method with a larger number
        flying = max(course.method.in_flight_below(course, share.above + 1), in_flight(course, share.start))
    tensor = round(sizes.tensor_bytes(tokens))
    dealt = len(micro) if share.around is None else share.around.dealt
    if course.method.full_parameters:
        yield from unit_terms(course, share, sizes)
        yield from step_terms(course, share, sizes)
    else:
        yield from _adapter_terms(course, share, sizes, flying)
        yield from graph_terms(course, share.recompute, (share.stop - num_kept, share.stop), sizes, flying, dealt)
        yield Term("activations", "work space of a block", min(1, num_hosted), round(sizes.work_bytes(tokens)))
        if share.is_owner:
            yield Term("head", "work space of the head", 1, round(sizes.head_work_bytes(tokens)))
    yield from kept_turn_terms(course, share, sizes)
    for technique in TECHNIQUES:
        yield from technique.memory_terms(course, share, sizes)
    if gathers_scores(course):
        yield from _score_terms(course, share, sizes)
    num_masks = flying * dealt if num_kept else 0
    num_masks += share.credits if num_hosted > num_kept else 0
    mask = sizes.mask_bytes(micro[0], course.max_length)
    yield Term("activations", "attention mask of a micro-batch", num_masks, mask)
    if share.is_owner:
        yield Term("data", "rows and tokenizer", 1, sizes.data_bytes)
    yield Term("data", "operation tables", 1, sizes.tables_bytes)
    yield Term("device", "context, kernels and work space of the accelerator", 1, sizes.context_bytes)
    yield Term("buffers", "compiled products in bfloat16", 1, sizes.kernels_bytes)
    yield Term("buffers", "tensor on its way or waiting", _waiting(course, share, reach.lowest, flying), tensor)


def _adapter_terms(course: Course, share: Share, sizes: Sizes, flying: int) -> Iterable[Term]:
    """Yield the terms of frozen weights, adapters and head, with gradients and optimizer state."""
    reach = ever_trained(course)
    num_hosted = share.stop - share.start + (share.private_blocks if share.is_owner else 0)
    num_trained = overlap(reach.ranges, [(share.start, share.stop)])
    yield Term("weights", "frozen block", num_hosted, sizes.block_bytes)
    yield Term("weights", "embedding", int(share.is_owner), sizes.embedding_bytes)
    yield Term("weights", "relative positions", 1, sizes.shared_bytes)
    yield Term("weights", "room for a widened matrix", 1, sizes.widened_bytes(is_owner=share.is_owner))
    helped = sum(stop - start for start, stop in share.helped)
    yield Term("adapters", "adapter of a block", num_hosted - helped, sizes.adapter_bytes)
    yield Term("adapters", "earlier version of an adapter", (flying - 1) * num_trained, sizes.adapter_bytes)
    trained = sizes.adapter_bytes + sizes.adapter_state_bytes
    num_fitted = overlap(reach.ranges, itertools.chain(*share.helps))
    num_own = num_trained - overlap(reach.ranges, share.helped)
    yield Term("optimizer", "gradient and moments of an adapter", num_own, trained)
    if share.is_owner:
        yield Term("head", "head with gradient and moments", 1, 2 * sizes.head_bytes + sizes.head_state_bytes)
    yield Term(
        "passing",
        "work space of an update, or pieces of what is saved or handed over",
        1,
        _passing(sizes, num_trained + num_fitted, has_head=share.is_owner and reach.has_head),
    )


def _score_terms(course: Course, share: Share, sizes: Sizes) -> Iterable[Term]:
    """Yield the terms that a pass with scores adds: whole graphs, inputs of linear layers, and one gradient.

    Such a pass reaches the lowest block that may train, even if a short run never trains it.
    """
    micro, lowest = course.microbatch_sizes(), course.trainable.lowest
    tokens = micro[0] * course.max_length
    scored = max(0, share.stop - max(share.start, lowest))
    trained = max(0, share.stop - max(share.start, ever_trained(course).lowest))
    again = len(recomputed_blocks(share.recompute, (share.stop - scored, share.stop)))
    again_too = len(recomputed_blocks(share.recompute, (share.stop - trained, share.stop)))
    kept = round(sizes.kept_bytes(tokens))
    more = max(0, scored - again - (trained - again_too)) * len(micro)
    yield Term("activations", "block's graph while scores are gathered", more, kept)
    yield Term("data", "block's scores until they are reported", scored, block_scores_bytes(course))
    if scored and needs_gradients(course):
        inputs = round(sizes.kept_for_scores_bytes(tokens))
        watched = (scored - again) * len(micro) + min(1, again)
        yield Term("activations", "inputs of a block's linear layers, for scores", watched, inputs)
        yield Term("passing", "gradient that is reduced to scores", 1, sizes.scored_gradient_bytes + SCORE_WORK_BYTES)


def _passing(sizes: Sizes, num_trained: int, *, has_head: bool) -> int:
    head, adapter = sizes.head_bytes if has_head else 0, sizes.adapter_bytes if num_trained else 0
    moved = sizes.handed_over_bytes if has_head else 0
    moved += num_trained * sizes.snapshot_bytes
    return max(update_work_bytes(max(head, adapter), sizes.optimizer), passing_bytes(moved))


def _waiting(course: Course, share: Share, lowest: int, flying: int) -> int:
    """Most full-size tensors that wait here to be sent or used, and one in the codec."""
    moved = share.credits * _hidden_links(course, share)
    moved += len(course.microbatch_sizes()) * _gradients(course, share, lowest, flying)
    is_bottom = share.start == share.private_blocks and share.start < share.stop
    embeds_ahead = share.credits * (share.above + 1) if share.is_owner and is_bottom else 0
    embeds_ahead *= 1 if share.around is None else share.around.width
    # own micro-batches between the frozen blocks of the top slice and those with a graph; see ``engine.paths``
    feeds_head = share.start < share.stop and (not share.above or course.may_skip)
    below_head = share.credits if share.is_owner and feeds_head and not embeds_ahead else 0
    return moved + (1 if moved else 0) + embeds_ahead + below_head


def _hidden_links(course: Course, share: Share) -> int:
    """Number of links that carry hidden states to or from the node."""
    if share.around is not None:
        return _links_among_replicas(course, share, share.around)
    others = len(course.owners) - share.is_owner
    is_host, is_top = share.start < share.stop, share.above == 0
    is_bottom = share.start == share.private_blocks
    count = 0
    if is_host and course.may_skip:  # any slice may be passed by
        count += share.below + others + share.above + others
    elif is_host:
        count += (others if is_bottom else 1) + (others if is_top else 1)
    if share.is_owner:
        is_alone = not course.may_skip
        count += (0 if is_host and is_bottom and is_alone else 1) + (0 if is_host and is_top and is_alone else 1)
        if course.may_skip:  # the first and the last slice of a micro-batch may be any
            count += 2 * (share.below + share.above)
    return count


def _links_among_replicas(course: Course, share: Share, around: NeighbourHosts) -> int:
    """The same where stages have several hosts."""
    others = len(course.owners) - share.is_owner
    count = 0
    if share.start < share.stop:
        below, above = (around.below, around.above) if course.may_skip else (around.next_below, around.next_above)
        count += below + above
        count += others * ((course.may_skip or not around.below) + (course.may_skip or not around.above))
    if share.is_owner:
        count += (
            2 * (around.below + around.above + 1 + around.replicas) if course.may_skip else around.bottom + around.top
        )
    return count


def _gradients(course: Course, share: Share, lowest: int, flying: int) -> int:
    """Number of items with gradients that wait here, summed over the links.

    Per link these are at most the receiver's items in flight.
    """
    others = len(course.owners) - share.is_owner
    is_host, is_top = share.start < share.stop, share.above == 0

    def below(hosts: int) -> int:
        return course.method.in_flight_below(course, hosts)

    count = 0
    if is_host and share.stop > lowest:
        links = others if is_top else 1
        if course.may_skip:
            links = share.above + others
        count += links * flying
    if is_host and share.start > lowest:
        count += (share.below if course.may_skip else 1) * below(share.above + 2)
    if share.is_owner and course.head > lowest and not (is_host and is_top and not course.may_skip):
        count += below(1)
    if share.is_owner and lowest == EMBEDDING:  # of the hidden state that the embedding made
        count += share.below + share.above if course.may_skip else int(not (is_host and share.start == 0))
    return count


_KEPT = ("adapters", "optimizer")
_NOT_YET = ("activations", "buffers", "passing")


def parts_memory(
    plan: Plan, facts: Mapping[str, NodeFacts], settings: MemorySettings
) -> list[dict[str, MemoryEstimate]]:
    """Estimate the memory of each node in each placement of a plan, at its fullest moment."""
    sizes = {node: Sizes.at(plan.course, facts[node], settings) for node in plan.nodes}
    return [
        {node: memory_estimate(part.course, Share.of(part, node, settings.audit), sizes[node]) for node in part.nodes}
        for part in plan.parts
    ]


def fullest(parts: Sequence[Mapping[str, MemoryEstimate]]) -> dict[str, MemoryEstimate]:
    """Return the largest estimate of each node over some placements."""
    nodes = dict.fromkeys(node for part in parts for node in part)
    return {
        node: max((part[node] for part in parts if node in part), key=lambda estimate: estimate.total_bytes)
        for node in nodes
    }


def max_memory(plan: Plan, parts: Sequence[Mapping[str, MemoryEstimate]]) -> dict[str, MemoryEstimate]:
    """Return the largest estimate of each node over all placements and moves."""
    pairs = zip(itertools.pairwise(plan.placements), itertools.pairwise(parts), strict=True)
    return fullest([*parts, *(moving_memory(placements, *around) for placements, around in pairs)])


def moving_memory(
    placements: tuple[Placement, Placement], before: Mapping[str, MemoryEstimate], after: Mapping[str, MemoryEstimate]
) -> dict[str, MemoryEstimate]:
    """Estimate the memory of each node of a placement while the run moves to it, between micro-batches.

    First the state of newly hosted blocks is received, beside the old slice. Then the next slice is built, with the
    received state and the trained state of the old slice. ``before`` and ``after`` are the estimates in the old and the
    next placement.
    """
    largest = {}
    for node, here in after.items():
        old = before.get(node, MemoryEstimate())
        coming = tuple(_coming(_new_share(*placements, node), here))
        moments = (MemoryEstimate((*_resting(old), *coming)), MemoryEstimate((*_resting(here), *coming, *_kept(old))))
        largest[node] = max(moments, key=lambda estimate: estimate.total_bytes)
    return largest


def _new_share(before: Placement, after: Placement, node: str) -> float:
    """Share of the blocks of a node's next slice that it does not host yet."""
    held, needed = (
        {block for piece in placement.slices if piece.node == node for block in range(piece.start, piece.stop)}
        for placement in (before, after)
    )
    return len(needed - held) / max(1, len(needed))


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
    """Refuse a plan with a move that exceeds the memory of a node; raises ``CapacityError``."""
    moves = zip(itertools.pairwise(plan.placements), itertools.pairwise(parts), strict=True)
    for placements, (before, after) in moves:
        for node, needs in moving_memory(placements, before, after).items():
            if needs.total_bytes > facts[node].memory_bytes:
                raise CapacityError(
                    f"node {node} needs {needs} to move to placement {placements[1].placement_number} but has "
                    f"{format_bytes(facts[node].memory_bytes)}; give the plan one placement, or move fewer blocks"
                )


_SHARDS: Final = 3
"""Shards on a node's disk: those of the last two checkpoints, and the one that is being written."""


CHECKPOINTS: Final = "checkpoints"
BEST: Final = "best results"
CHECKPOINT_COPIES: Final = "copies of another host's checkpoints"


@dataclass(frozen=True, slots=True)
class DiskNeeds:
    """Disk space of a run in a node's folder, at most."""

    terms: tuple[DiskTerm, ...] = ()

    @staticmethod
    def together(needs: Iterable[DiskNeeds]) -> DiskNeeds:
        """Add the needs of nodes that share a disk."""
        sums: dict[tuple[str, str], int] = {}
        for what, size_bytes, remedy in itertools.chain.from_iterable(need.terms for need in needs):
            sums[what, remedy] = sums.get((what, remedy), 0) + size_bytes
        return DiskNeeds(tuple(DiskTerm(what, size, remedy) for (what, remedy), size in sums.items()))

    @property
    def total_bytes(self) -> int:
        """Sum of all terms."""
        return sum(term.size_bytes for term in self.terms)

    def parts(self) -> dict[str, int]:
        """Return description -> bytes, without empty terms."""
        return {term.what: term.size_bytes for term in self.terms if term.size_bytes}

    def but(self, *without: str) -> DiskNeeds:
        """Return the needs without some terms."""
        return DiskNeeds(tuple(term for term in self.terms if term.what not in without))

    def remedies(self, free_bytes: int) -> list[str]:
        """Return the remedy of each term without which the others fit into ``free_bytes``."""
        most = self.total_bytes - free_bytes
        return [term.remedy for term in self.terms if term.size_bytes and term.size_bytes >= most]


def disk_needs(course: Course, share: Share, sizes: Sizes, *, keeps_best: bool = False) -> DiskNeeds:
    """Estimate the disk space of a run in the folder of a node, without headers of files.

    With ``keeps_best`` nodes keep their part of the best result so far, and of that at each checkpoint. Where all
    parameters train, copies of another host's blocks are of checkpoints too.

    Example: AdamW on a node with units of 10 MB: state on disk takes 20 MB, a checkpoint 30 MB, a best result 10 MB.
    """
    at_once = min(_SHARDS, _num_checkpoints(course))
    if not course.method.full_parameters:
        num_fitted = sum(stop - start for start, stop in share.helped)
        merged = DiskTerm(
            "merged adapters",
            sizes.helped.sent * num_fitted if course.helper_settings.merged else 0,
            "set offload.merged = false, with which offload.users can't be 'collaboration'",
        )
        return DiskNeeds((_checkpoints(at_once * _fitted_bytes(share, sizes)), merged))
    trained = trained_units(course, share)
    state = sum(map(sizes.state_bytes, trained))
    saved = sum(map(sizes.state_bytes, staying_units(course, share))) if course.method.drops_state else state
    weights = sum(map(sizes.trained_bytes, hosted_units(course, share)))
    num_best = min(at_once + 1, course.num_steps // course.eval_every) if keeps_best and course.eval_every else 0
    best = DiskTerm(BEST, num_best * weights, "set train.keep_best = false")
    on_disk = DiskTerm("optimizer state", state if share.state_on_disk else 0, "set hift.state = 'memory'")
    copied = [block for blocks in share.copies or () for block in range(*blocks)]
    state = (
        0 if course.method.drops_state else sum(sizes.state_bytes(at) for at in copied if at in ever_trained(course))
    )
    copies = DiskTerm(
        CHECKPOINT_COPIES,
        (at_once + (at_once > 0)) * (state + sum(map(sizes.trained_bytes, copied))),  # one is arriving
        "set recovery.copies = 'none'",
    )
    return DiskNeeds((on_disk, _checkpoints(at_once * (saved + weights)), best, copies))


def _checkpoints(size_bytes: int) -> DiskTerm:
    return DiskTerm(CHECKPOINTS, size_bytes, "set train.checkpoint_every = 0")


def _fitted_bytes(share: Share, sizes: Sizes) -> int:
    """Bytes of adapters in a shard: with optimizer state if trained here for others, without if trained by helpers."""
    fitted = sum(stop - start for ranges in share.helps for start, stop in ranges)
    num_fitted = sum(stop - start for start, stop in share.helped)
    return fitted * sizes.shard_bytes + num_fitted * (sizes.helped.hosted or sizes.helped.sent)


def _num_checkpoints(course: Course) -> int:
    """Most checkpoints of a run; each is at the end of a turn."""
    if not course.checkpoint_every:
        return 0
    return math.ceil(course.num_steps / max(course.checkpoint_every, course.local_iterations))
