"""Sizes and memory of a run in which all parameters train, a group of units at a time.

A tensor that embedding and head share belongs to the embedding. The norm after the last block, and a decoder with
weights of its own, belong to the head; modules that nobody hosts (a pooler) are not counted.

Weights that train are held once, gradients for one step's group only, and optimizer state for all units, or for one
group where it is on disk or dropped between the group's steps. An owner has copies of embedding and head like other
units, and buffers for their gradients of other owners.

A step has three moments of high memory; the estimate takes the maximum::

    a block or the head runs     graphs, work space, gradients of blocks and head; the embedding's has rows of the batch
    only
    the head is updated          graphs, gradients of blocks, gradient of the head, its state where state is not kept
    another unit is updated      gradients of the group, and its state where state is not kept; all graphs are freed

Before a large update the node returns the memory of graphs and work space to the system. Before a smaller one it stays
resident for the next allocations, and state of one tensor that is mapped from disk is added to it.

Graphs are freed at an update because backward precedes it, and no graph of the next item begins before it. An owner's
copy of the embedding is updated then too (``engine.exchange``); the head's copy may be updated at any step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from ringtune.config.optimizers import STATE_GIVEN_BACK_BYTES, TABLE_GIVEN_BACK_BYTES, factor_numbers, update_work_bytes
from ringtune.costs.activation_costs import projected_blocks, recomputed_blocks
from ringtune.costs.memory_sizes import Sizes
from ringtune.costs.memory_terms import Share, passing_bytes
from ringtune.costs.profile import ModelFacts
from ringtune.models.family import LANGUAGE_TASKS, Family
from ringtune.models.folder import StoredTensor
from ringtune.schedule.course import Course
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import EMBEDDING, Units
from ringtune.techniques.base import Term


def with_full_parameters(
    facts: ModelFacts,
    family: Family,
    tensors: Mapping[str, StoredTensor],
    *,
    block: Collection[tuple[int, ...]],
    task: str,
    buffer_bytes: int,
    item_bytes: int,
) -> ModelFacts:
    """Convert the facts of a model with adapters to those of a model in which all parameters train.

    ``tensors`` are by name in the base model, with a decoder that is not tied to the token table; those of ``block``
    are the largest block's. What all hosts read, such as relative positions, stays frozen.
    """
    shapes = {name: stored.shape for name, stored in tensors.items()}
    in_head = (*(f"{path}." for path in family.head_paths), f"{family.head}.")
    left_out = (family.block_prefix, *(f"{path}." for path in (*family.unused_paths, *family.shared_paths)))
    head = [shape for name, shape in shapes.items() if name.startswith(in_head)]
    embedding = [shape for name, shape in shapes.items() if not name.startswith((*left_out, *in_head))]
    table = next((shape for shape in embedding if facts.vocab_size and shape[0] == facts.vocab_size), (0,))
    return dataclasses.replace(
        facts,
        block_bytes=buffer_bytes,
        adapter_block_bytes=_bytes(block, item_bytes),
        adapter_block_factor_bytes=factor_numbers(block) * item_bytes,
        embedding_bytes=0,
        embedding_train_bytes=_bytes(embedding, item_bytes),
        embedding_factor_bytes=factor_numbers(embedding) * item_bytes,
        token_table_bytes=math.prod(table) * item_bytes,
        is_tied=task in LANGUAGE_TASKS and f"{family.head}.weight" not in shapes,
        head_bytes=facts.head_bytes + _bytes(head, item_bytes),
        head_factor_bytes=facts.head_factor_bytes + factor_numbers(head) * item_bytes,
        block_matrix_params=0,
        block_matrix_rows=0,
        embedding_matrix_params=0,
        embedding_matrix_rows=0,
        largest_matrix_params=0,
    )


def _bytes(shapes: Iterable[tuple[int, ...]], item_bytes: int) -> int:
    return sum(math.prod(shape) for shape in shapes) * item_bytes


_EMBEDDING_TENSORS = 3
"""Tensors that the graph of an embedding keeps: its output, the input of its norm, a mask of dropout."""


def unit_terms(course: Course, share: Share, sizes: Sizes) -> Iterator[Term]:
    """Yield the terms of weights, of pieces that are saved or updated, and of gradients for other owners."""
    num_hosted = share.stop - share.start + (share.private_blocks if share.is_owner else 0)
    yield Term("weights", "block", num_hosted, sizes.block_bytes + sizes.adapter_bytes)
    yield Term("weights", "relative positions", 1, sizes.shared_bytes)
    if share.is_owner:
        yield Term("weights", "embedding", 1, sizes.trained_bytes(EMBEDDING))
        yield Term("head", "head", 1, sizes.trained_bytes(course.head))
    yield Term("passing", "work space of an update, or pieces of what is saved", 1, _passing(course, share, sizes))
    others = len(course.owners) - 1 if share.is_owner else 0
    for unit in trained_units(course, share) if others else ():
        if unit in (EMBEDDING, course.head):  # one from each, and one to all
            name = "embedding" if unit == EMBEDDING else "head"
            yield Term("buffers", f"gradient of the {name} on its way", others + 1, sizes.unit_grad_bytes(unit))


def step_terms(course: Course, share: Share, sizes: Sizes) -> Iterator[Term]:
    """Yield the terms of graphs, gradients and optimizer state at the fullest moment of a step.

    A block that does not train at a step keeps no inputs of its linear layers; a recomputed one keeps its input. A node
    that is the whole ring does the backward of each micro-batch before the next forward.
    """
    is_alone = share.is_owner and len(course.owners) == 1 and (share.start, share.stop) == (0, course.head)
    micro = 1 if is_alone else len(course.microbatch_sizes())
    kinds = _kinds(course)
    tensor = round(sizes.tensor_bytes(course.microbatch_sizes()[0] * course.max_length))
    counts, bytes_of = zip(*(_graphs_of(units, course, share, sizes) for units in kinds), strict=True)
    graphs = [
        micro * (sum(map(operator.mul, count, each)) + min(1, sum(count[:3])) * tensor)
        for count, each in zip(counts, bytes_of, strict=True)
    ]
    spaces = [
        _work_spaces(units, count, each, course, share, sizes)
        for units, count, each in zip(kinds, counts, bytes_of, strict=True)
    ]
    gradients = [_beside_graphs(units, course, share, sizes) for units in kinds]
    running = [kept + sum(space) + size for kept, space, size in zip(graphs, spaces, gradients, strict=True)]
    fullest = max(range(len(kinds)), key=running.__getitem__)
    for what, count, size in zip(_GRAPHS, counts[fullest], bytes_of[fullest], strict=True):
        yield Term("activations", what, count * micro, size)
    yield Term("activations", "input of a micro-batch's graph", min(1, sum(counts[fullest][:3])) * micro, tensor)
    for what, size in zip(_SPACES, spaces[fullest], strict=True):
        yield Term("activations", what, 1, size)
    if share.is_owner and EMBEDDING in _reach(course):
        yield Term("activations", "graph of the embedding", micro * _EMBEDDING_TENSORS, tensor)
        yield Term("activations", "rows of the embedding's gradient", 1, sizes.embedding_rows_bytes)
    yield Term("optimizer", "gradients while a block or the head runs", 1, gradients[fullest])
    yield Term("optimizer", "optimizer state that stays", 1, sum(map(sizes.state_bytes, staying_units(course, share))))
    early = [
        kept + size + _early_state(units, course, share, sizes)
        for units, kept, size in zip(kinds, graphs, gradients, strict=True)
    ]
    on_top = [size + _mapped_on_top(units, course, share, sizes) for units, size in zip(kinds, running, strict=True)]
    late = [_at_update(units, course, share, sizes) for units in kinds]
    more = max(0, *early, *on_top, *late) - running[fullest]
    yield Term("optimizer", "gradients and state of an update, beyond what a running block took", 1, max(0, more))


def _work_spaces(
    units: Units, count: _Graphs, each: _Graphs, course: Course, share: Share, sizes: Sizes
) -> tuple[int, int, int]:
    """Bytes of work space: of a recomputed block, of a block, of the head beyond these. One action runs at a time.

    If a decoder trains, the gradient of one micro-batch is held until it is added to that of the earlier ones.
    """
    tokens = course.microbatch_sizes()[0] * course.max_length
    again = min(1, count.again) * each.whole
    block = min(1, share.stop - share.start) * round(sizes.work_bytes(tokens))
    head = round(sizes.head_work_bytes(tokens)) if share.is_owner else 0
    if share.is_owner and len(course.microbatch_sizes()) > 1 and (EMBEDDING if sizes.is_tied else course.head) in units:
        head += sizes.decoder_bytes
    return again, block, max(0, head - again - block)


class _Graphs(NamedTuple):
    """Numbers of blocks, or bytes of one: trained, trained with projections, passing gradients on, recomputed."""

    whole: int
    projected: int
    passing: int
    again: int


_SPACES = ("graph of the block that is run again", "work space of a block", "work space of the head, beyond a block's")
_GRAPHS = (
    "graph of a block that trains",
    "graph of a block that trains, with projections",
    "graph of a block that passes gradients on",
    "input of a block that is run again",
)


def _graphs_of(units: Units, course: Course, share: Share, sizes: Sizes) -> tuple[_Graphs, _Graphs]:
    """Count the blocks of a node by kind of graph at a step that trains these units, with the mean bytes of a kind."""
    blocks = range(max(share.start, units.lowest), share.stop)
    again = recomputed_blocks(share.recompute, (blocks.start, blocks.stop))
    kept = [block for block in blocks if block not in again]
    trained = [block for block in kept if block in units]
    projected, tokens = projected_blocks(course, trained), course.microbatch_sizes()[0] * course.max_length
    saving = sum(round(sizes.projected_bytes(tokens, block)) for block in projected)
    each = _Graphs(
        round(sizes.kept_bytes(tokens)),
        math.ceil(saving / max(1, len(projected))),
        round(sizes.kept_passing_bytes(tokens)),
        round(sizes.run_again_bytes(tokens)),
    )
    return _Graphs(len(trained) - len(projected), len(projected), len(kept) - len(trained), len(again)), each


def resting_units(plan: Plan) -> frozenset[int]:
    """Return the units with optimizer state that a node holds in memory for part of the run only.

    With state on disk it is resident for an update, a tensor at a time; with a method that drops state, for the unit's
    own steps.
    """
    course = plan.course
    if not course.method.full_parameters or not (plan.placement.state_on_disk or course.method.drops_state):
        return frozenset()
    if plan.placement.state_on_disk:
        return frozenset(_reach(course))
    kinds = _kinds(course)
    return frozenset(unit for unit in _reach(course) if not all(unit in units for units in kinds))


def _beside_graphs(units: Units, course: Course, share: Share, sizes: Sizes) -> int:
    """Bytes of gradients while the graphs of a step are kept."""
    active, ends = _local(units, course, share), (EMBEDDING, course.head)
    blocks = [unit for unit in active if unit not in ends]
    tied = [unit for unit in active if unit == EMBEDDING and sizes.is_tied]  # dense from the head's backward on
    return sum(map(sizes.trained_bytes, [*_early(units, course, share), *blocks, *tied]))


def _early(units: Units, course: Course, share: Share) -> tuple[int, ...]:
    """The head, if it may be updated while graphs are kept; else empty.

    The head of an item is updated before the backward of its blocks; with several owners its copy may be updated in a
    later step.
    """
    if not share.is_owner:
        return ()
    trained = _reach(course) if len(course.owners) > 1 else units
    return (course.head,) if course.head in trained else ()


def _early_state(units: Units, course: Course, share: Share, sizes: Sizes) -> int:
    """Bytes of the head's state at updates beside graphs, unless it stays in memory; if it is on disk, one tensor's."""
    staying = staying_units(course, share)
    if share.state_on_disk:
        return sum(map(sizes.largest_state_bytes, _early(units, course, share)))
    return sum(sizes.state_bytes(unit) for unit in _early(units, course, share) if unit not in staying)


def _at_update(units: Units, course: Course, share: Share, sizes: Sizes) -> int:
    """Bytes of a group's gradients, and of its state if it is not kept in memory; on disk one tensor at a time.

    State that is read ahead for the next group is page cache, which the kernel drops where memory is short.
    """
    active, staying = _local(units, course, share), staying_units(course, share)
    moved = [unit for unit in active if unit not in staying]
    gradients = sum(map(sizes.trained_bytes, active))
    if share.state_on_disk:
        return gradients + max(map(sizes.largest_state_bytes, moved), default=0)
    return gradients + sum(map(sizes.state_bytes, moved))


def _mapped_on_top(units: Units, course: Course, share: Share, sizes: Sizes) -> int:
    """Bytes of state of one tensor that is mapped while the memory of graphs is still resident.

    That memory is resident for units with less state than ``STATE_GIVEN_BACK_BYTES``, except before a large table's
    gradient becomes dense.
    """
    if not share.state_on_disk:
        return 0
    most_bytes = 0
    for unit in _local(units, course, share):
        has_given_back = unit == EMBEDDING and not sizes.is_tied and sizes.trained_bytes(unit) >= TABLE_GIVEN_BACK_BYTES
        size = sizes.state_bytes(unit)
        if unit != course.head and size < STATE_GIVEN_BACK_BYTES and not has_given_back:
            most_bytes = max(most_bytes, sizes.largest_state_bytes(unit))
    return most_bytes


def staying_units(course: Course, share: Share) -> tuple[int, ...]:
    """Return the units of a node with optimizer state in memory: all, none on disk, or those that every step trains."""
    local = trained_units(course, share)
    if share.state_on_disk:
        return ()
    if not course.method.drops_state:
        return local
    return tuple(unit for unit in local if all(unit in units for units in _kinds(course)))


def _passing(course: Course, share: Share, sizes: Sizes) -> int:
    units = trained_units(course, share)
    moved = sum(sizes.trained_bytes(unit) + sizes.state_bytes(unit) for unit in units)
    largest = max(map(sizes.largest_tensor_bytes, units), default=0)
    return max(update_work_bytes(largest, sizes.optimizer), passing_bytes(moved))


def trained_units(course: Course, share: Share) -> tuple[int, ...]:
    """Return the units of a node that train in the run."""
    return _local(_reach(course), course, share)


def hosted_units(course: Course, share: Share) -> tuple[int, ...]:
    """Return all units of a node."""
    return _local(Units.of(course.num_blocks, range(EMBEDDING, course.head + 1)), course, share)


def _local(units: Units, course: Course, share: Share) -> tuple[int, ...]:
    """The units that a node updates: blocks of its slice, and an owner's copies of embedding and head."""
    ends = (EMBEDDING, course.head) if share.is_owner else ()
    return tuple(unit for unit in units if share.start <= unit < share.stop or unit in ends)


@functools.lru_cache(maxsize=256)
def _kinds(course: Course) -> tuple[Units, ...]:
    """Distinct sets of units that train at the steps of the run, in order; one empty set in an evaluation."""
    steps = range(min(course.num_steps, course.method.period(course)))
    return tuple(course.method.trained(course, step) for step in steps) or (Units(course.num_blocks),)


@functools.lru_cache(maxsize=256)
def _reach(course: Course) -> Units:
    return Units.of(course.num_blocks, itertools.chain.from_iterable(_kinds(course)))
