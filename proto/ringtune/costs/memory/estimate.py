"""How much memory a run takes on a node: terms of so many things of so many bytes each.

Terms are pure functions of measured sizes.

The planner, its refusals and the simulator's ledger add these terms up, each in its own way. The sum is an upper bound
that is compared with the node's budget; what the interpreter and the libraries take before a run is not in it. Of an
accelerator it is: there the budget is a device's memory, and tools show a process's whole part of it.

What the engine's rules bound, and where it shows here:

* ``in_flight`` items at a time keep graphs (one, unless a method is stale on purpose): ``microbatches`` of them per
  block between the lowest unit that ever trains and the top;
* each of those items may see another version of the adapters: ``in_flight - 1`` besides the newest;
* moments stay for every unit that was ever updated;
* credits bound the hidden states of a (link, boundary), whether they wait at the sender or the receiver;
* gradients come back for those items only: ``microbatches`` of each per boundary;
* an owner that hosts the bottom embeds without a credit, but only ``credits`` per segment of its route.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from ringtune.costs.memory.by_method.full_parameters import step_terms, unit_terms
from ringtune.costs.memory.by_method.kept_turns import kept_turn_terms
from ringtune.costs.memory.by_method.offload import offload_terms
from ringtune.costs.memory.operations import (
    SCORE_WORK_BYTES,
    block_scores_bytes,
    gathers_scores,
    needs_gradients,
)
from ringtune.costs.memory.passing import passing_bytes
from ringtune.costs.memory.saving import graph_terms, recomputed_blocks
from ringtune.costs.memory.share import Around, Share
from ringtune.costs.memory.sizes import Sizes
from ringtune.costs.memory.terms import MemoryEstimate, Term
from ringtune.costs.memory.units.unit_state import update_work_bytes
from ringtune.costs.profile import ModelFacts
from ringtune.schedule.actions import Payload
from ringtune.schedule.course import Course
from ringtune.schedule.exchanges.parcels import WAITING
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.versions import ever_trained, in_flight
from ringtune.schedule.units import EMBEDDING


def memory_estimate(course: Course, share: Share, sizes: Sizes) -> MemoryEstimate:
    """Estimate what a node with this share holds at most during the whole run, whatever the timing."""
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
    """Estimate what ``node`` holds at most during the run of ``plan``; arguments as for ``Sizes``."""
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
    flying = _in_flight(course, share)
    kept, tensor = round(sizes.kept_bytes(tokens)), round(sizes.tensor_bytes(tokens))
    dealt = len(micro) if share.around is None else share.around.dealt
    if course.method.full_parameters:
        yield from unit_terms(course, share, sizes)
        yield from step_terms(course, share, sizes)
    else:
        yield from _adapter_terms(course, share, sizes, flying)
        yield from graph_terms(course, share.recompute, (share.stop - num_kept, share.stop), sizes, flying, dealt)
        yield Term("activations", "work space of a block", min(1, num_hosted), kept)
        if share.is_owner:
            yield Term("head", "work space of the head", 1, round(sizes.head_work_bytes(tokens)))
    yield from kept_turn_terms(course, share, sizes)
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
    yield Term("buffers", "tensor on its way or waiting", _waiting(course, share, reach.lowest, flying), tensor)


def _adapter_terms(course: Course, share: Share, sizes: Sizes, flying: int) -> Iterable[Term]:
    """The terms of frozen weights, and of adapters and head with what trains them."""
    reach = ever_trained(course)
    num_hosted = share.stop - share.start + (share.private_blocks if share.is_owner else 0)
    num_trained = _overlap(reach.ranges, share.start, share.stop)
    yield Term("weights", "frozen block", num_hosted, sizes.block_bytes)
    yield Term("weights", "embedding", int(share.is_owner), sizes.embedding_bytes)
    yield Term("weights", "room for a widened matrix", 1, sizes.widened_bytes(is_owner=share.is_owner))
    helped = sum(stop - start for start, stop in share.helped)
    yield Term("adapters", "adapter of a block", num_hosted - helped, sizes.adapter_bytes)
    yield Term("adapters", "earlier version of an adapter", (flying - 1) * num_trained, sizes.adapter_bytes)
    trained = sizes.adapter_bytes + sizes.adapter_state_bytes
    num_fitted = sum(_overlap(reach.ranges, *one) for one in itertools.chain(*share.helps))
    own = num_trained - sum(_overlap(reach.ranges, *one) for one in share.helped)
    yield Term("optimizer", "gradient and moments of an adapter", own, trained)
    yield from offload_terms(course, share, sizes)
    if share.around is not None and share.around.replicas:
        grads = num_trained * (WAITING[Payload.REPLICA_GRAD] * share.around.replicas + 1)
        yield Term("buffers", "gradient of an adapter, from another host of the blocks", grads, sizes.adapter_bytes)
    if share.is_owner:
        yield Term("head", "head with gradient and moments", 1, 2 * sizes.head_bytes + sizes.head_state_bytes)
    yield Term(
        "passing",
        "work space of an update, or pieces of what is saved or handed over",
        1,
        _passing(sizes, num_trained + num_fitted, has_head=share.is_owner and reach.has_head),
    )


def _score_terms(course: Course, share: Share, sizes: Sizes) -> Iterable[Term]:
    """What a pass that gathers scores holds besides: whole graphs, inputs of linear layers, and one gradient.

    It goes down to the lowest block that may train, although a short run may never train that.
    """
    micro, lowest = course.microbatch_sizes(), course.trainable.lowest
    tokens = micro[0] * course.max_length
    scored = max(0, share.stop - max(share.start, lowest))
    trained = max(0, share.stop - max(share.start, ever_trained(course).lowest))
    again = len(recomputed_blocks(course, share.recompute, (share.stop - scored, share.stop)))
    again_too = len(recomputed_blocks(course, share.recompute, (share.stop - trained, share.stop)))
    kept = round(sizes.kept_bytes(tokens))
    more = max(0, scored - again - (trained - again_too)) * len(micro)
    yield Term("activations", "block's graph while scores are gathered", more, kept)
    yield Term("data", "block's scores until they are reported", scored, block_scores_bytes(course))
    if scored and needs_gradients(course):
        inputs = round(sizes.kept_for_scores_bytes(tokens))
        watched = (scored - again) * len(micro) + min(1, again)
        yield Term("activations", "inputs of a block's linear layers, for scores", watched, inputs)
        yield Term("passing", "gradient that is reduced to scores", 1, sizes.gradient_bytes + SCORE_WORK_BYTES)


def _passing(sizes: Sizes, num_trained: int, *, has_head: bool) -> int:
    """Bytes that are there for a moment: at an update, or while trained tensors are saved, loaded or handed over."""
    head, adapter = sizes.head_bytes if has_head else 0, sizes.adapter_bytes if num_trained else 0
    moved = sizes.head_bytes + sizes.head_state_bytes if has_head else 0
    moved += num_trained * (sizes.adapter_bytes + sizes.adapter_state_bytes)
    return max(update_work_bytes(max(head, adapter), sizes.optimizer), passing_bytes(moved))


def _in_flight(course: Course, share: Share) -> int:
    """How many items may be in flight at the slice: by the ring, and by a method that was fitted to another one."""
    if share.start == share.stop:
        return 1
    return max(course.method.in_flight_below(course, share.above + 1), in_flight(course, share.start))


def _overlap(ranges: Iterable[tuple[int, int]], start: int, stop: int) -> int:
    return sum(max(0, min(stop, last) - max(start, first)) for first, last in ranges)


def _waiting(course: Course, share: Share, lowest: int, flying: int) -> int:
    """How many full-size tensors can wait here to leave or to be used, plus one in the codec."""
    moved = share.credits * _hidden_links(course, share)
    moved += len(course.microbatch_sizes()) * _gradients(course, share, lowest, flying)
    is_bottom = share.start == share.private_blocks and share.start < share.stop
    embeds_ahead = share.credits * (share.above + 1) if share.is_owner and is_bottom else 0
    embeds_ahead *= 1 if share.around is None else share.around.width
    # own micro-batches between the frozen blocks of the top slice and those with a graph; see ``engine.flows``
    feeds_head = share.start < share.stop and (not share.above or course.may_skip)
    below_head = share.credits if share.is_owner and feeds_head and not embeds_ahead else 0
    return moved + (1 if moved else 0) + embeds_ahead + below_head


def _hidden_links(course: Course, share: Share) -> int:
    """How many links carry hidden states to or from the node."""
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


def _links_among_replicas(course: Course, share: Share, around: Around) -> int:
    """How many links carry hidden states to or from the node where stages have several hosts."""
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
    """How many items' gradients may wait here, summed over the links.

    No more of them wait on a link than its receiver may have items in flight.
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
    if share.is_owner and lowest == EMBEDDING and not (is_host and share.start == 0):
        count += 1  # of the hidden state that the embedding made
    return count
