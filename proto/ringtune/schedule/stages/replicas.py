"""Copies of embedding and head: with a method that trains all parameters, every owner has one of each, always equal.

The initiator of an item has the gradients of both units. It sends those of the units that train to every other owner.
All owners do the same update with the same optimizer state, so no head is handed over. Two owners c and d, an item that
trains the embedding::

    c | ... B12.0[-1,0)  B12.1[-1,0)  >u12#embedding@d  U12[embedding]
    d |                               <u12#embedding@c  U12[embedding]

Few gradients are under way (``schedule.parcels``): one of each unit from an owner to another one.
"""

from __future__ import annotations

import functools
import itertools

from ringtune.schedule.actions import Action, Op, Payload, TensorKey, message
from ringtune.schedule.course import Course
from ringtune.schedule.turns.turns import Item
from ringtune.schedule.turns.versions import trained
from ringtune.schedule.units import EMBEDDING, Units


def replicated_units(course: Course, item: Item) -> tuple[int, ...]:
    """The units with copies that an item trains: embedding, head, both or none; always none with adapters."""
    if not course.method.full_parameters or not item.kind.has_update:
        return ()
    return _replicated(trained(course, item.kind, item.step))


@functools.lru_cache(maxsize=4096)
def _replicated(units: Units) -> tuple[int, ...]:
    return tuple(unit for unit in (EMBEDDING, units.num_blocks) if unit in units)


@functools.lru_cache(maxsize=1024)
def other_owners(course: Course, owner: str) -> tuple[str, ...]:
    """The owners with copies of what ``owner`` has, in the order of their turns; none with adapters."""
    if not course.method.full_parameters:
        return ()
    return tuple(other.node for other in course.owners if other.node != owner)


def copy_links(course: Course) -> frozenset[tuple[str, str]]:
    """Every pair of owners of which the first sends unit gradients to the second."""
    if not course.method.full_parameters:
        return frozenset()
    return frozenset(itertools.permutations((owner.node for owner in course.owners), 2))


def saves_head(course: Course, node: str, holder: str) -> bool:
    """Whether the head is in a node's part of a checkpoint: at its holder, and copies at every owner.

    So a run goes on without a transfer between owners.

    Args:
        course: of the run.
        node: whose part.
        holder: the owner that has the head at that step.
    """
    return course.owner(node) is not None if course.method.full_parameters else node == holder


def unit_grad_key(seq: int, unit: int) -> TensorKey:
    """The name of an item's gradient of one unit."""
    return TensorKey(Payload.UNIT_GRAD, seq, -1, unit)


def unit_grad(op: Op, seq: int, unit: int, peer: str) -> Action:
    """The sending or receiving of an item's gradient of one unit."""
    return message(op, unit_grad_key(seq, unit), peer)


def copy_messages(course: Course, item: Item, node: str, unit: int) -> tuple[Action, ...]:
    """The messages right before the update of ``unit`` at ``node``: the initiator sends, another owner receives."""
    if unit not in replicated_units(course, item):
        return ()
    if node != item.owner:
        return (unit_grad(Op.RECEIVE, item.seq, unit, item.owner),)
    return tuple(unit_grad(Op.SEND, item.seq, unit, other) for other in other_owners(course, node))
