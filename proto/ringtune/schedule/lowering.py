"""Way of one micro-batch: the ordered actions of every node; and the parcels (side messages) of its updates.

Engine, simulator and printed table use this lowering of course and placement::

    a [0,2)  b [2,4)   owner c   lowest trained block 3

    c | E  >h0@a                                          <h4@b  H  >g4@b
    a |            <h0@c  f[0,1)  f[1,2)  >h2@b
    b |                                   <h2@a  f[2,3)  F[3,4)  >h4@c   <g4@c  B[3,4)  U[3,4)

With an operation table, the way depends on the micro-batch's pattern. A micro-batch that skips all trained blocks has
no way (``takes_part``). A slice with only skipped blocks is skipped: its predecessor sends straight to its successor;
and a slice without any full block gets no gradient. Skipped blocks at a node that the micro-batch passes are an ``S``,
so that micro-batches pass every unit of a slice in order::

    pattern 1131, lowest trained block 0          pattern 3311

    c | E  >h0@a  ...  <h4@b  H  >g4@b            c | E  >h2@b  ...  <h4@b  H  >g4@b
    a | <h0@c  F[0,2)  >h2@b  <g2@b  B[0,2)       a |
    b | <h2@a  S[2,3)  F[3,4)  >h4@c  ...         b | <h2@c  F[2,4)  >h4@c  <g4@c  B[2,4)

With the activation cache an item may begin at a boundary where its hidden state is stored (``placement.Passage``).

A parcel is one safetensors blob with the key of a tensor. Each kind has its own credits on a link, at boundaries above
the head, which no hidden state enters. A node refuses a parcel that belongs to none of its items.

================ ===================================================== ==============
payload          content                                               waiting a link
================ ===================================================== ==============
``UNIT_GRAD``    gradient of embedding or head, for another owner      2: one a unit
``PAIRS``        inputs and output gradients of adapters, for a helper 2 micro-batches
``WEIGHTS``      updated adapters of a helper, for their host          1 each range
``REPLICA_GRAD`` gradients of adapters, for another host of the stage  2 each range
================ ===================================================== ==============

Each host of a stage adds up the gradients of its own micro-batches. After the last micro-batch of an item it sends the
sum to every other host of the stage. Each host adds all sums up in ring order, so that all hosts compute the same bits,
and updates. Hosts a and b of one stage, micro-batches 0 and 2 at a, 1 at b::

    a | ... B7.0[2,4)  B7.2[2,4)  >r7.0#2@b               <r7.1#2@b  U7[2,4)
    b | ... B7.1[2,4)  >r7.1#2@a             <r7.0#2@a    U7[2,4)

The number after the dot is here the sender's rank among the hosts of the stage. A host without gradients sends an
empty sum, so that no host has to know the operations of the others. A host sends the sum of an item after its update of
the item before, so at most two sums are on a link.

Source: RingAda, sections III-A and III-B.2 (early-stopped backward, terminator).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from ringtune.schedule.actions import Action, Graph, Leg, Op, Payload, TensorKey, message
from ringtune.schedule.course import Course
from ringtune.schedule.operation_tables import FULL, SHORTCUT, block_rows
from ringtune.schedule.placement import WHOLE, Helper, Passage, check_passage, with_cache
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import (
    copy_links,
    hosts_of_lane,
    lane_of,
    lanes,
    num_lanes_of,
    other_owners,
    replica_links,
    replicas,
    replicated_units,
    unit_grad_key,
)
from ringtune.schedule.turns import Item, StartPoint, StepKind, hand_overs, microbatch_rows
from ringtune.schedule.units import EMBEDDING, Range, Units
from ringtune.schedule.versions import trained, updated

WAITING: Final[Mapping[str, int]] = {
    Payload.UNIT_GRAD: 2,
    Payload.PAIRS: 2,
    Payload.WEIGHTS: 1,
    Payload.REPLICA_GRAD: 2,
}
"""Payload -> most parcels that are on a link or wait at its end; see ``max_waiting``."""

PARCELS: Final = frozenset(WAITING)
"""Payloads of parcels."""

_ABOVE_HEAD: Final[Mapping[str, int]] = {payload: at for at, payload in enumerate(WAITING, start=1)}


def credit_boundary(course: Course, payload: str) -> int:
    """Return the boundary of the credits of a kind of parcel, above the head."""
    return course.head + _ABOVE_HEAD[payload]


def weights_key(update: Action) -> TensorKey:
    """Name of the weights that a helper sends after its update and the host needs for its own."""
    return TensorKey(Payload.WEIGHTS, update.seq, -1, update.start)


WAYS_AT_ONCE: Final = 512
"""Cached ways, as operation tables may have any pattern; one of 12 blocks on four nodes takes some 3 kB."""

Legs = tuple[Leg, ...]
Way = Mapping[str, Legs]
"""Node -> legs of a micro-batch there, in the order of the data flow."""


class Segment(NamedTuple):
    """Consecutive blocks that one micro-batch passes at one node."""

    node: str
    start: int
    stop: int


# ---- the way of one micro-batch --------------------------------------------------------------------


def way(plan: Plan, item: Item, micro: int) -> Way:
    """Return the legs of one micro-batch of ``item`` at every node; empty for a checkpoint, or if it takes no part."""
    if item.kind is StepKind.CHECKPOINT or not takes_part(plan.course, item)[micro]:
        return {}
    lowest, pattern = lowest_and_pattern(plan.course, item, micro)
    lane = lane_of(plan.placement, micro)
    return lower(plan.plain, item.owner, lowest, pattern, item.kind.has_update, lane, item.passage)


def legs(plan: Plan, item: Item, node: str) -> tuple[Legs, ...]:
    """Return the legs at ``node`` of every micro-batch of ``item``; empty for one that skips the node.

    Micro-batches with the same way share one object.
    """
    count = num_microbatches(plan.course, item)
    if patterns(plan.course, item) or item.kind is StepKind.CHECKPOINT:
        return tuple(way(plan, item, micro).get(node, ()) for micro in range(count))
    lowest = trained(plan.course, item.kind, item.step).lowest
    by_way: list[Legs] = []
    for micro in range(min(count, num_lanes_of(plan.placement))):  # the others pass as these do
        lane = lane_of(plan.placement, micro)
        on_way = lower(plan.plain, item.owner, lowest, "", item.kind.has_update, lane, item.passage)
        by_way.append(on_way.get(node, ()))
    return tuple(by_way[micro % len(by_way)] for micro in range(count))


def lowest_and_pattern(course: Course, item: Item, micro: int) -> tuple[int, str]:
    """Return the lowest unit with a gradient for a micro-batch, and the micro-batch's operations; empty = all full.

    The unit is the head (N) if only the head gets a gradient, and N + 1 if none does. Example: blocks 1 to 3 of four
    train and the pattern is ``1311``: the lowest unit is 2.
    """
    units = trained(course, item.kind, item.step)
    rows = patterns(course, item)
    pattern = rows[micro] if rows else ""
    if not pattern or pattern == FULL * course.num_blocks:
        return units.lowest, ""
    if not units:
        return units.lowest, pattern
    full = (block for block in units.blocks if pattern[block] == FULL)
    return (EMBEDDING if units.has_embedding else next(full, course.head)), pattern


def takes_part(course: Course, item: Item) -> tuple[bool, ...]:
    """Return for each micro-batch of an item whether it is embedded, passes blocks and enters the head.

    A micro-batch that skips every block that trains at its step does nothing. If these are all micro-batches of the
    item, all take part, so that the head trains.
    """
    count, rows = num_microbatches(course, item), patterns(course, item)[: num_microbatches(course, item)]
    blocks = trained(course, item.kind, item.step).blocks if rows else ()
    return _takes_part(rows, tuple(blocks)) if blocks else (True,) * count


@functools.lru_cache(maxsize=4096)
def _takes_part(rows: tuple[str, ...], blocks: tuple[int, ...]) -> tuple[bool, ...]:
    takes_part = tuple(any(row[block] != SHORTCUT for block in blocks) for row in rows)
    return takes_part if any(takes_part) else (True,) * len(takes_part)


def lowest_units(course: Course, item: Item) -> tuple[int, ...]:
    """Return the lowest unit with a gradient, for each micro-batch of ``item``."""
    count = num_microbatches(course, item)
    if not patterns(course, item):
        return (trained(course, item.kind, item.step).lowest,) * count
    return tuple(lowest_and_pattern(course, item, micro)[0] for micro in range(count))


def patterns(course: Course, item: Item) -> tuple[str, ...]:
    """Return the operations of whole blocks, a row per micro-batch; empty if the item has no table."""
    return course.operations_of(item.owner, item.batch) if item.kind.has_update else ()


def subnet_rows(course: Course, item: Item) -> tuple[str, ...]:
    """Return the operations of all subnets, a row per micro-batch; empty if the item has no table."""
    return course.subnet_operations_of(item.owner, item.batch) if item.kind.has_update else ()


@functools.lru_cache(maxsize=WAYS_AT_ONCE)
def lower(
    plan: Plan, owner: str, lowest: int, pattern: str, has_update: bool = True, lane: int = 0, passage: Passage = WHOLE
) -> dict[str, Legs]:
    """Lower a micro-batch's way to legs at every node.

    Args:
        plan: with the decisions of the item's turn.
        owner: the initiator of the item.
        lowest: lowest unit with a gradient.
        pattern: operations of the blocks; empty = all full.
        has_update: whether weights change after it, so that pairs of adapters are sent to helpers.
        lane: selects the hosts where stages have several; see ``schedule.stages``.
        passage: boundaries where it begins and where it is stored.

    Returns:
        Node -> its legs, totally ordered because a micro-batch is at one place at a time.
    """
    legs_by_node: dict[str, list[Leg]] = {}

    def move(source: str, target: str, boundary: int, payload: Payload) -> None:
        if source != target:
            legs_by_node.setdefault(source, []).append(Leg(Op.SEND, boundary, 0, target, payload))
            legs_by_node.setdefault(target, []).append(Leg(Op.RECEIVE, boundary, 0, source, payload))

    head = plan.course.head
    if passage != WHOLE:
        check_passage(passage, min(lowest, head - 1))
    path = entered(route(plan, owner, lane), passage.enters)
    at = path[0].node if passage.enters else owner
    if not passage.enters:
        legs_by_node.setdefault(owner, []).append(Leg(Op.EMBED, EMBEDDING, EMBEDDING + 1))
    passed: list[tuple[Segment, list[Leg]]] = []
    for segment in path:
        parts = list(_forward(segment, lowest, pattern, plan.placement.private_blocks))
        if passage != WHOLE:
            parts = list(with_cache(parts, passage))
        if has_update and plan.placement.helpers:
            parts = list(_cut_at_helpers(parts, plan.placement.helpers_of(segment.node)))
        if at != segment.node and all(leg.op is Op.SKIP for leg in parts):
            if plan.slice_of(at).start == segment.start and plan.slice_of(at).num_blocks:
                legs_by_node.setdefault(at, []).extend(parts)  # it hosts them too, and keeps all in their order
            continue  # passed by
        move(at, segment.node, segment.start, Payload.HIDDEN)
        at = segment.node
        legs_by_node.setdefault(at, []).extend(parts)
        passed.append((segment, parts))
    move(at, owner, head, Payload.HIDDEN)
    legs_by_node.setdefault(owner, []).append(Leg(Op.HEAD, head, head + 1))
    at = owner
    for segment, parts in reversed(passed):
        graphs = [leg for leg in reversed(parts) if leg.op.graph is Graph.KEEPS]
        if graphs:
            move(at, segment.node, segment.stop, Payload.GRAD)
            at = segment.node
            legs_by_node[at] += [Leg(Op.BACKWARD, leg.start, leg.stop) for leg in graphs]
    if lowest == EMBEDDING:
        move(at, owner, 0, Payload.GRAD)
        legs_by_node[owner].append(Leg(Op.BACKWARD, EMBEDDING, EMBEDDING + 1))
    if has_update and plan.placement.helpers:
        return {node: tuple(_with_ships(plan, parts)) for node, parts in legs_by_node.items()}
    return {node: tuple(parts) for node, parts in legs_by_node.items()}


def _cut_at_helpers(parts: Iterable[Leg], helpers: tuple[Helper, ...]) -> Iterator[Leg]:
    """Yield forward legs; those with a graph are cut at the borders of helpers' blocks.

    So each range has a backward of its own, and its pairs are sent before the backward of the range below.
    """
    for leg in parts:
        if leg.op.graph is Graph.KEEPS:
            yield from (Leg(leg.op, *pair) for pair in _cut((Range(leg.start, leg.stop),), helpers))
        else:
            yield leg


def _with_ships(plan: Plan, parts: Sequence[Leg]) -> Iterator[Leg]:
    """Yield a node's legs with the pairs to ship after each backward; the gradient for the host below is sent first."""
    ships: list[Leg] = []
    for leg in parts:
        if leg.op is not Op.SEND:
            yield from ships
            ships = []
        yield leg
        for helper in reversed(plan.placement.helpers) if leg.op is Op.BACKWARD else ():
            start, stop = max(leg.start, helper.start), min(leg.stop, helper.stop)
            if start < stop:
                ships += [Leg(Op.SHIP, start, stop), Leg(Op.SEND, start, 0, helper.node, Payload.PAIRS)]
    yield from ships


def fit_legs(plan: Plan, item: Item, node: str) -> tuple[Legs, ...]:
    """Return the legs of ``node`` as a helper for every micro-batch of ``item``, from the top blocks down."""
    count = num_microbatches(plan.course, item)
    if not item.kind.has_update or not plan.placement.helped_by(node):
        return ((),) * count
    return tuple(_fits(way(plan, item, micro), node) for micro in range(count))


def _fits(way: Way, node: str) -> Legs:
    ships = [
        (leg.start, leg.stop, source)
        for source, parts in way.items()
        for leg, after in itertools.pairwise(parts)
        if leg.op is Op.SHIP and after.peer == node
    ]
    pairs = (
        (Leg(Op.RECEIVE, start, 0, source, Payload.PAIRS), Leg(Op.FIT, start, stop))
        for start, stop, source in sorted(ships, reverse=True)
    )
    return tuple(itertools.chain.from_iterable(pairs))


def _forward(segment: Segment, lowest: int, pattern: str, private: int) -> Iterator[Leg]:
    """Yield a segment's forward legs: blocks without a graph one by one, to be interruptible; others in ranges.

    No range crosses the border of the private blocks: above it, micro-batches of several owners are in order.
    """

    def kind_of(block: int) -> tuple[Op, bool]:
        code = pattern[block] if pattern else FULL
        if code == SHORTCUT:
            return Op.SKIP, block < private
        return (Op.FORWARD if code == FULL and block >= lowest else Op.FORWARD_FREE), False

    for (kind, _), group in itertools.groupby(range(segment.start, segment.stop), kind_of):
        blocks = list(group)
        if kind is Op.FORWARD_FREE:
            yield from (Leg(kind, block, block + 1) for block in blocks)
        else:
            yield Leg(kind, blocks[0], blocks[-1] + 1)


@functools.lru_cache(maxsize=4096)
def route(plan: Plan, owner: str, lane: int = 0) -> tuple[Segment, ...]:
    """Return the segments of an owner's micro-batches of a lane, bottom to top; neighbours are of different nodes."""
    placement = plan.placement
    pieces = [Segment(owner, 0, placement.private_blocks)]
    pieces += [Segment(piece.node, piece.start, piece.stop) for piece in hosts_of_lane(placement, lane)]
    merged: list[Segment] = []
    for piece in pieces:
        if piece.start == piece.stop:
            continue
        if merged and merged[-1].node == piece.node:
            merged[-1] = Segment(piece.node, merged[-1].start, piece.stop)
        else:
            merged.append(piece)
    return tuple(merged)


def entered(path: tuple[Segment, ...], boundary: int) -> tuple[Segment, ...]:
    """Return the segments of a way that begins with the block at a boundary; 0 = the whole way."""
    above = [part for part in path if part.stop > boundary]
    return (above[0]._replace(start=max(boundary, above[0].start)), *above[1:]) if boundary else path


class Arrival(NamedTuple):
    """A tensor that a node receives: sender, boundary, payload."""

    source: str
    boundary: int
    payload: str


@functools.lru_cache(maxsize=256)
def possible_arrivals(plan: Plan, owner: str, node: str) -> frozenset[Arrival]:
    """Return the tensors that a node may receive for a train item of an owner, for any operation table.

    Any nodes between may be skipped. Example: of nodes a, b and c in this order, c may get a hidden state from b, from
    a, or from the owner.
    """
    path = route(plan, owner)
    names = [part.node for part in path]
    arrivals = {Arrival(name, plan.course.head, Payload.HIDDEN) for name in names if node == owner}
    if plan.course.invertible and node == owner:
        arrivals |= {Arrival(name, 0, Payload.GRAD) for name in names}
    for at, part in enumerate(path):
        if part.node == node:
            arrivals |= {Arrival(name, part.start, Payload.HIDDEN) for name in (owner, *names[:at])}
            arrivals |= {Arrival(name, part.stop, Payload.GRAD) for name in (owner, *names[at + 1 :])}
    return frozenset(arrival for arrival in arrivals if arrival.source != node)


# ---- what belongs to a whole item ------------------------------------------------------------------


def item_updates(plan: Plan, item: Item, node: str) -> tuple[Action, ...]:
    """Return the actions of ``node`` after the last micro-batch of ``item``: updates of trained units, or a save."""
    if item.kind is StepKind.CHECKPOINT:
        return (Action(Op.SAVE, item.seq),)
    if not item.kind.has_update:
        return ()
    has_copies = plan.course.method.full_parameters and plan.owner(node) is not None
    units = updated(plan.course, item.kind, item.step)
    ranges = _updated(plan.plain, node, units, node == item.owner or has_copies)
    return tuple(Action(Op.UPDATE, item.seq, -1, start, stop) for start, stop in ranges)


@functools.lru_cache(maxsize=4096)
def _updated(plan: Plan, node: str, units: Units, has_ends: bool) -> tuple[Range, ...]:
    """Return the ranges that a node updates: of its slice, of helped blocks, with ``has_ends`` embedding and head.

    The blocks of one helper are one range also at their host, which installs the helper's weights.
    """
    piece, head, placement = plan.slice_of(node), plan.course.head, plan.placement
    ranges = tuple(_cut(units.ranges_within(piece.start, piece.stop), placement.helpers_of(node)))
    for helper in placement.helped_by(node):
        ranges += units.ranges_within(helper.start, helper.stop)
    return ranges + units.ranges_within(EMBEDDING, 0) + units.ranges_within(head, head + 1) if has_ends else ranges


def _cut(ranges: Iterable[Range], helpers: tuple[Helper, ...]) -> Iterator[Range]:
    """Yield ranges, cut at the borders of helpers' blocks.

    Example: [0, 6) with a helper for [2, 4) gives [0, 2), [2, 4) and [4, 6).
    """
    borders = {border for helper in helpers for border in (helper.start, helper.stop)}
    for start, stop in ranges:
        inner = sorted(border for border in borders if start < border < stop)
        yield from (Range(*pair) for pair in itertools.pairwise((start, *inner, stop)))


def num_microbatches(course: Course, item: Item) -> int:
    """Number of micro-batches of an item: fewer in a short evaluation batch, none in a checkpoint."""
    return len(microbatch_rows(course, item))


# ---- which links there are -------------------------------------------------------------------------


def neighbours(plan: Plan, node: str) -> frozenset[str]:
    """Return the nodes that have a link with one."""
    return frozenset(source for source, target in links(plan) if target == node)


@functools.lru_cache(maxsize=256)
def links(plan: Plan, start: StartPoint | None = None) -> frozenset[tuple[str, str]]:
    """Return every directed pair of nodes with a link, for tensors, heads, parcels, or returning credits.

    ``start`` is the point where the run continues; None = its beginning.
    """
    pairs: set[tuple[str, str]] = set()
    for owner, lane in itertools.product((each.node for each in plan.course.owners), lanes(plan.placement)):
        path = route(plan, owner, lane)
        if plan.course.choice is not None:  # a table that is not chosen yet may pass any slices by
            nodes = [owner, *(part.node for part in path)]
            pairs.update((source, target) for source in nodes for target in nodes)
        rows = block_rows(plan.course.operations) if plan.course.operations else frozenset()
        for row in {FULL * plan.course.num_blocks, *(row for name, row in rows if name == owner)}:
            up = [part.node for part in path if set(row[part.start : part.stop]) != {SHORTCUT}]
            down = [part.node for part in path if FULL in row[part.start : part.stop]]
            pairs.update(itertools.pairwise([owner, *up, owner]))
            pairs.update(itertools.pairwise([owner, *reversed(down), *[owner] * plan.course.invertible]))
    # credits and acknowledgements return on the same link; anything else needs a link in each direction
    both = pairs | {(target, source) for source, target in pairs}
    for helper in plan.placement.helpers:
        host = plan.placement.host_of(helper.start)
        both |= {(host, helper.node), (helper.node, host)}
    both |= replica_links(plan.placement)
    both |= copy_links(plan.course) or hand_overs(plan.course, start or StartPoint.of(plan.course))
    return frozenset((source, target) for source, target in both if source != target)


def is_replicated(plan: Plan, node: str, update: Action) -> bool:
    """Whether other hosts do the same update of the same blocks."""
    if not replicas(plan.placement, node) or update.op is not Op.UPDATE:
        return False
    return EMBEDDING < update.start < plan.course.head


def replica_grad_key(update: Action, rank: int) -> TensorKey:
    """Name of the gradients that the host of rank ``rank`` in a stage sends for an update."""
    return TensorKey(Payload.REPLICA_GRAD, update.seq, rank, update.start)


def replica_grads(plan: Plan, item: Item, source: str, target: str) -> tuple[TensorKey, ...]:
    """Return the gradients that ``source`` sends to ``target`` for an item; empty if they are not replicas."""
    names = replicas(plan.placement, target)
    if source not in names or source == target:
        return ()
    updates = (update for update in item_updates(plan, item, target) if is_replicated(plan, target, update))
    return tuple(replica_grad_key(update, names.index(source)) for update in updates)


def replica_messages(plan: Plan, node: str, update: Action) -> tuple[Action, ...]:
    """Return the messages before an update: own gradients to every other replica, then theirs, in ring order."""
    if not is_replicated(plan, node, update):
        return ()
    names = replicas(plan.placement, node)
    own_key = replica_grad_key(update, names.index(node))
    others = [(rank, name) for rank, name in enumerate(names) if name != node]
    sends = [message(Op.SEND, own_key, name) for _, name in others]
    return (*sends, *(message(Op.RECEIVE, replica_grad_key(update, rank), name) for rank, name in others))


@functools.lru_cache(maxsize=256)
def parcels(plan: Plan, item: Item, source: str, target: str) -> frozenset[TensorKey]:
    """Return every parcel that ``source`` sends to ``target`` for an item: gradients, pairs and weights."""
    keys = set(replica_grads(plan, item, source, target))
    if item.owner == source and target in other_owners(plan.course, source):
        keys |= {unit_grad_key(item.seq, unit) for unit in replicated_units(plan.course, item)}
    if not plan.placement.helpers:
        return frozenset(keys)
    for micro, way in enumerate(fit_legs(plan, item, target)):
        receives = (leg for leg in way if leg.op is Op.RECEIVE and leg.peer == source)
        keys |= {TensorKey(leg.payload, item.seq, micro, leg.start) for leg in receives}
    updates = (update for update in item_updates(plan, item, target) if update.op is Op.UPDATE)
    helpers = [helper for helper in plan.placement.helpers_of(target) if helper.node == source]
    helped = (update for update in updates if any(helper.has_block(update.start) for helper in helpers))
    return frozenset(keys | {weights_key(update) for update in helped})


def max_waiting(plan: Plan, payload: str, source: str, target: str) -> int:
    """Most parcels of a kind that are on a link or wait at its end."""
    if payload == Payload.REPLICA_GRAD:
        return WAITING[payload] * max(1, -(-plan.slice_of(target).num_blocks // 2))
    if payload != Payload.WEIGHTS:
        return WAITING[payload]
    ranges = sum(helper.node == source for helper in plan.placement.helpers_of(target))
    return WAITING[payload] * ranges * (2 if plan.course.helper_settings.overlap else 1)
