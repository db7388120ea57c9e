"""Memory of a run in which all parameters train, a group of units at a time: weights, graphs, gradients and state.

What is trained is held once. A node has gradients of one step's group only. Of optimizer state it has all, or, where
units rest on disk or forget it, that of one group and what is read ahead for the next. An owner has copies of embedding
and head like any other unit, and their gradients on their way.

A step has two full moments, and the fuller one counts::

    while graphs are kept   graphs, gradients of blocks and head                        the embedding's are rows as yet
    at the update           gradients of the group, and its state where state rests     all graphs are gone

The graphs are gone by then because backward comes before the update, and no graph of the next item is begun before it.
At an owner with others this holds for blocks only: a copy may be updated while graphs of the next item are kept.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ringtune.costs.memory.passing import passing_bytes
from ringtune.costs.memory.saving import projected_blocks, recomputed_blocks
from ringtune.costs.memory.share import Share
from ringtune.costs.memory.sizes import Sizes
from ringtune.costs.memory.terms import Term
from ringtune.costs.memory.unit_state import update_work_bytes
from ringtune.schedule.course import Course
from ringtune.schedule.plan import Plan
from ringtune.schedule.units import EMBEDDING, Units

_EMBEDDING_TENSORS = 3
"""Hidden states that the graph of an embedding keeps: its output, the input of its norm, a mask of dropout."""


def unit_terms(course: Course, share: Share, sizes: Sizes) -> Iterator[Term]:
    """Yield the terms of weights, of what is there for a moment, and of gradients that go to other owners."""
    yield Term("weights", "block", share.stop - share.start, sizes.adapter_bytes)
    if share.is_owner:
        yield Term("weights", "embedding", 1, sizes.trained_bytes(EMBEDDING))
        yield Term("head", "head", 1, sizes.trained_bytes(course.head))
    yield Term("passing", "work space of an update, or pieces of what is saved", 1, _passing(course, share, sizes))
    others = len(course.owners) - 1 if share.is_owner else 0
    for unit in _local(_reach(course), course, share) if others else ():
        if unit in (EMBEDDING, course.head):  # one from each, and one to all
            name = "embedding" if unit == EMBEDDING else "head"
            yield Term("buffers", f"gradient of the {name} on its way", others + 1, sizes.unit_grad_bytes(unit))


def step_terms(course: Course, share: Share, sizes: Sizes) -> Iterator[Term]:
    """Yield the terms of graphs, gradients and optimizer state at the fullest moment of a step.

    A block whose weights do not train at a step keeps no inputs of its linear layers; one that is run again keeps its
    input. A node alone goes back through each micro-batch before it begins the next one.
    """
    is_alone = share.is_owner and len(course.owners) == 1 and (share.start, share.stop) == (0, course.head)
    micro = 1 if is_alone else len(course.microbatch_sizes())
    kinds, each = _kinds(course), _graph_bytes(course, sizes)
    counts = [_graphs_of(units, course, share) for units in kinds]
    graphs = [
        micro * (sum(map(operator.mul, count, each)) + min(1, sum(count[:3])) * each.again)
        + min(1, count.again) * each.whole
        for count in counts
    ]
    beside = [_beside_graphs(units, course, share, sizes) for units in kinds]
    fullest = max(range(len(kinds)), key=lambda at: graphs[at] + beside[at])
    most = counts[fullest]
    for what, count, size in zip(_GRAPHS, most, each, strict=True):
        yield Term("activations", what, count * micro, size)
    yield Term("activations", "input of a micro-batch's graph", min(1, sum(most[:3])) * micro, each.again)
    yield Term("activations", "graph of the block that is run again", min(1, most.again), each.whole)
    if share.is_owner and EMBEDDING in _reach(course):
        number = micro * (_EMBEDDING_TENSORS + 1)
        yield Term("activations", "graph of the embedding, and rows of its gradient", number, each.again)
    yield Term("optimizer", "gradients while graphs are kept", 1, beside[fullest])
    yield Term("optimizer", "optimizer state that stays", 1, sum(map(sizes.state_bytes, _staying(course, share))))
    updates = max(
        _at_update(units, following, course, share, sizes)
        for units, following in zip(kinds, (*kinds[1:], kinds[0]), strict=True)
    )
    more = max(0, updates - graphs[fullest] - beside[fullest])
    yield Term("optimizer", "gradients and state of an update, beyond what graphs took", 1, more)


def _graph_bytes(course: Course, sizes: Sizes) -> _Graphs:
    """Bytes that a block keeps of one micro-batch, by kind; what is run again keeps its input."""
    tokens = course.microbatch_sizes()[0] * course.max_length
    return _Graphs(
        round(sizes.kept_bytes(tokens)),
        round(sizes.projected_bytes(tokens)),
        round(sizes.kept_passing_bytes(tokens)),
        round(sizes.tensor_bytes(tokens)),
    )


class _Graphs(NamedTuple):
    """Blocks, or bytes of one: that train, that train with projections, that pass gradients on, that are run again."""

    whole: int
    projected: int
    passing: int
    again: int


_GRAPHS = (
    "graph of a block that trains",
    "graph of a block that trains, with projections",
    "graph of a block that passes gradients on",
    "input of a block that is run again",
)


def _graphs_of(units: Units, course: Course, share: Share) -> _Graphs:
    """Count the blocks of a node by what they keep at a step that trains these units."""
    blocks = range(max(share.start, units.lowest), share.stop)
    again = recomputed_blocks(course, share.recompute, (blocks.start, blocks.stop))
    kept = [block for block in blocks if block not in again]
    trained = [block for block in kept if block in units]
    projected = len(projected_blocks(course, trained))
    return _Graphs(len(trained) - projected, projected, len(kept) - len(trained), len(again))


def resting_units(plan: Plan) -> frozenset[int]:
    """The units of which a node holds optimizer state for their own steps only, because it is on disk or forgotten."""
    course = plan.course
    if not course.method.full_parameters or not (plan.placement.state_on_disk or course.method.drops_state):
        return frozenset()
    kinds = _kinds(course)
    return frozenset(unit for unit in _reach(course) if not all(unit in units for units in kinds))


def _beside_graphs(units: Units, course: Course, share: Share, sizes: Sizes) -> int:
    """Bytes of gradients, and of state that rests otherwise, while the graphs of a step are kept."""
    active, ends = _local(units, course, share), (EMBEDDING, course.head)
    if share.is_owner and len(course.owners) > 1:
        early = [unit for unit in _local(_reach(course), course, share) if unit in ends]
    else:  # the head is updated before the backward of the blocks; a table that is tied to it has a whole gradient
        early = [unit for unit in active if unit == course.head or (unit == EMBEDDING and sizes.is_tied)]
    gradients = sum(map(sizes.trained_bytes, [*early, *(unit for unit in active if unit not in ends)]))
    staying = _staying(course, share)
    return gradients + sum(sizes.state_bytes(unit) for unit in early if unit not in staying)


def _at_update(units: Units, following: Units, course: Course, share: Share, sizes: Sizes) -> int:
    """Bytes of a group's gradients, of its state where state rests, and of what is read ahead for the next group."""
    active, staying = _local(units, course, share), _staying(course, share)
    ahead = [unit for unit in _local(following, course, share) if share.state_on_disk and unit not in active]
    moved = [unit for unit in (*active, *ahead) if unit not in staying]
    return sum(map(sizes.trained_bytes, active)) + sum(map(sizes.state_bytes, moved))


def _staying(course: Course, share: Share) -> tuple[int, ...]:
    """The units of a node whose optimizer state stays in memory: all, or those that every step trains."""
    local = _local(_reach(course), course, share)
    if not (share.state_on_disk or course.method.drops_state):
        return local
    return tuple(unit for unit in local if all(unit in units for units in _kinds(course)))


def _passing(course: Course, share: Share, sizes: Sizes) -> int:
    """Bytes that are there for a moment: at an update, or while everything trained is saved or loaded."""
    units = _local(_reach(course), course, share)
    moved = sum(sizes.trained_bytes(unit) + sizes.state_bytes(unit) for unit in units)
    largest = max(map(sizes.largest_tensor_bytes, units), default=0)
    return max(update_work_bytes(largest, sizes.optimizer), passing_bytes(moved))


def _local(units: Units, course: Course, share: Share) -> tuple[int, ...]:
    """The units that a node updates: blocks of its slice, and an owner's copies of embedding and head."""
    ends = (EMBEDDING, course.head) if share.is_owner else ()
    return tuple(unit for unit in units if share.start <= unit < share.stop or unit in ends)


@functools.lru_cache(maxsize=256)
def _kinds(course: Course) -> tuple[Units, ...]:
    """What trains at the steps of the run, as far as they differ, in their order; an evaluation trains nothing."""
    steps = range(min(course.num_steps, course.method.period(course)))
    return tuple(course.method.trained(course, step) for step in steps) or (Units(course.num_blocks),)


def _reach(course: Course) -> Units:
    return Units.of(course.num_blocks, _all(_kinds(course)))


def _all(kinds: Iterable[Units]) -> Iterator[int]:
    for units in kinds:
        yield from units
