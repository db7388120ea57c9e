"""Stages with several hosts (replicas), copies of embedding and head at owners, and refusals of replicas.

Each micro-batch passes one host of each stage. Hosts alternate in the ratio of their shares, with a period, in
evaluations too. Shares 2 and 1 of a and b below, 1 and 1 of c and d above::

    micro-batch   0   1   2   3   4   5 | 6
    below         a   b   a   a   b   a | a
    above         c   d   c   d   c   d | c
    lane          0   1   0   3   4   3 | 0      the first micro-batch with the same hosts

So a micro-batch's way follows from its number alone.

With a method that trains all parameters, every owner has a copy of embedding and head, and all copies are equal. The
initiator of an item sends the gradients of the trained ones of both units to every other owner. All owners do the same
update with the same optimizer state, so no head is handed over. Two owners c and d, an item that trains the embedding::

    c | ... B12.0[-1,0)  B12.1[-1,0)  >u12#embedding@d  U12[embedding]
    d |                               <u12#embedding@c  U12[embedding]

``schedule.lowering`` bounds the number of these gradients: one of each unit from an owner to another one.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Final

from ringtune.errors import PlanError
from ringtune.schedule.actions import Action, Op, Payload, TensorKey, message
from ringtune.schedule.course import Course
from ringtune.schedule.placement import Placement, Slice
from ringtune.schedule.run_shape import owner_indices, turns_until_repeat
from ringtune.schedule.turns import Item
from ringtune.schedule.units import EMBEDDING, Units
from ringtune.schedule.versions import may_be_stale, trained

MAX_DEALT: Final = 4096
"""Longest period, in micro-batches, of the hosts of all stages."""


@functools.lru_cache(maxsize=256)
def _hosts(placement: Placement) -> tuple[tuple[Slice, ...], ...]:
    """Hosts of each micro-batch of one period, bottom to top."""
    stages, count = placement.stages, _period(placement)
    dealt = [
        [stage[index] for index in itertools.islice(owner_indices([piece.share for piece in stage], 0), count)]
        for stage in stages
    ]
    return tuple(zip(*dealt, strict=True)) if dealt else ((),)


def _period(placement: Placement) -> int:
    shares_of_stages = ([piece.share for piece in stage] for stage in placement.stages if len(stage) > 1)
    return math.lcm(*(turns_until_repeat(shares) for shares in shares_of_stages))


@functools.lru_cache(maxsize=256)
def _lanes(placement: Placement) -> tuple[int, ...]:
    hosts = _hosts(placement)
    first: dict[tuple[Slice, ...], int] = {}
    return tuple(first.setdefault(each, at) for at, each in enumerate(hosts))


def num_lanes_of(placement: Placement) -> int:
    """Period of the hosts in micro-batches; 1 where no stage has replicas."""
    return len(_hosts(placement))


def lane_of(placement: Placement, micro: int) -> int:
    """Return the lane of a micro-batch: the first micro-batch that passes the same hosts."""
    lanes_of_micro = _lanes(placement)
    return lanes_of_micro[micro % len(lanes_of_micro)]


def lanes(placement: Placement) -> tuple[int, ...]:
    """Return every lane, in ascending order."""
    return tuple(sorted(set(_lanes(placement))))


def hosts_of_lane(placement: Placement, lane: int) -> tuple[Slice, ...]:
    """Return the slices that micro-batches of a lane pass, bottom to top."""
    return _hosts(placement)[lane]


def width(placement: Placement) -> int:
    """Largest number of hosts of a stage; 1 where no stage has replicas."""
    return max((len(stage) for stage in placement.stages), default=1)


def num_assigned(placement: Placement, node: str, microbatches: int) -> int:
    """Number of the first ``microbatches`` micro-batches that pass a node; all of them without replicas."""
    stages_of_micro = _hosts(placement)
    return sum(
        any(piece.node == node for piece in stages_of_micro[micro % len(stages_of_micro)])
        for micro in range(microbatches)
    )


@functools.lru_cache(maxsize=1024)
def replicas(placement: Placement, node: str) -> tuple[str, ...]:
    """Return the hosts of a node's stage in ring order, the node among them; empty if it is alone, or hosts nothing."""
    for stage in placement.stages:
        names = tuple(piece.node for piece in stage)
        if node in names and len(names) > 1:
            return names
    return ()


def collected_blocks(placement: Placement, node: str) -> range:
    """Return the blocks that a node sends at the end: its slice; of replicas only the first one sends them."""
    piece, others = placement.slice_of(node), replicas(placement, node)
    return range(piece.start, piece.stop) if not others or others[0] == node else range(0)


def replica_links(placement: Placement) -> frozenset[tuple[str, str]]:
    """Return every ordered pair of replicas of one stage."""
    names = ([piece.node for piece in stage] for stage in placement.stages)
    return frozenset(itertools.chain.from_iterable(itertools.permutations(each, 2) for each in names))


def replicated_units(course: Course, item: Item) -> tuple[int, ...]:
    """Return the units with copies that an item trains: embedding, head, both or none; none with adapters."""
    if not course.method.full_parameters or not item.kind.has_update:
        return ()
    return _replicated(trained(course, item.kind, item.step))


@functools.lru_cache(maxsize=4096)
def _replicated(units: Units) -> tuple[int, ...]:
    return tuple(unit for unit in (EMBEDDING, units.num_blocks) if unit in units)


@functools.lru_cache(maxsize=1024)
def other_owners(course: Course, owner: str) -> tuple[str, ...]:
    """Return the other owners, with copies of the same units, in the order of their turns; empty with adapters."""
    if not course.method.full_parameters:
        return ()
    return tuple(other.node for other in course.owners if other.node != owner)


def copy_links(course: Course) -> frozenset[tuple[str, str]]:
    """Return every ordered pair of owners, the first of which sends unit gradients; empty with adapters."""
    if not course.method.full_parameters:
        return frozenset()
    return frozenset(itertools.permutations((owner.node for owner in course.owners), 2))


def saves_head(course: Course, node: str, holder: str) -> bool:
    """Whether a node's part of a checkpoint has the head: at its ``holder``, or with full parameters at every owner.

    So a run continues without a transfer between owners.
    """
    return course.owner(node) is not None if course.method.full_parameters else node == holder


def unit_grad_key(seq: int, unit: int) -> TensorKey:
    """Name of an item's gradient of one unit."""
    return TensorKey(Payload.UNIT_GRAD, seq, -1, unit)


def copy_messages(course: Course, item: Item, node: str, unit: int) -> tuple[Action, ...]:
    """Return the messages before the update of ``unit`` at ``node``: the initiator sends, another owner receives."""
    if unit not in replicated_units(course, item):
        return ()
    key = unit_grad_key(item.seq, unit)
    if node != item.owner:
        return (message(Op.RECEIVE, key, item.owner),)
    return tuple(message(Op.SEND, key, other) for other in other_owners(course, node))


def check_replicas(course: Course, placement: Placement) -> None:
    """Refuse several hosts for the same blocks, with ``PlanError``, where ``no_replicas`` has a reason."""
    if not placement.has_replicas:
        return
    period = _period(placement)
    if period > MAX_DEALT:
        raise PlanError(
            f"the shares of replicas repeat themselves after {period} micro-batches, at most {MAX_DEALT} are taken; "
            "use small shares, such as 1, 2 and 3"
        )
    reason = no_replicas(course) or ("helpers fit adapters of one host" if placement.helpers else "")
    if reason:
        stage = next(stage for stage in placement.stages if len(stage) > 1)
        names = ", ".join(piece.node for piece in stage)
        raise PlanError(f"nodes {names} host the same blocks {stage[0].text}, but {reason}; give each other blocks")


def no_replicas(course: Course) -> str:
    """Say why no stage may have several hosts in such a run; empty if it may."""
    name = course.method.name
    if course.method.full_parameters:
        return f"{name} trains all parameters, whose gradients are as large as the model"
    if may_be_stale(course):
        return f"{name} keeps several versions of weights, which replicas would not have alike"
    if course.offload is not None:
        return "helpers fit adapters of one host"
    if course.choice is not None:
        return "the run chooses operations by scores, which each host would have of its micro-batches only"
    if course.velora is not None:
        return "velora projects on vectors of the first micro-batch, which replicas would not have alike"
    return ""
