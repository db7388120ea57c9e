"""The path of a micro-batch through one node, its progress, and the credits of the node's links.

A :class:`Path` is a lowering (``schedule.lowering``) as a chain of places. A place is a compute action with its message
before, its send after and its credit, so that the engine decides with a few comparisons::

    legs     <h2@a      f[2,3)   F[3,4)  >h4@c     <g4@c  B[3,4)
    places   |__ f[2,3) __| -> |_ F[3,4) __| ->  |___ B[3,4) ___|

Credits bound the hidden states in transit and in inboxes, for each target and boundary.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from typing import Final

from ringtune.engine.events import ParcelArrived, TensorArrived
from ringtune.schedule.actions import Action, Graph, Leg, Op, Payload
from ringtune.schedule.lowering import WAITING, item_updates, route
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import replicated_units, width
from ringtune.schedule.turns import Item, follows_token
from ringtune.schedule.units import EMBEDDING
from ringtune.schedule.versions import (
    awaited_forward,
    awaits_next_backward,
    backward_version,
    forward_version,
    head_version,
    in_flight,
    weight_version,
)


class Channel:
    """Credits for hidden states to one node for one boundary.

    Args:
        target: the receiving node.
        boundary: the unit that the hidden states enter there.
        most: limit of hidden states in transit and in the target's inbox.

    Attributes:
        left: number of hidden states that may be sent now.
    """

    def __init__(self, target: str, boundary: int, most: int) -> None:
        self.target, self.boundary = target, boundary
        self.most = self.left = most

    def return_credit(self) -> bool:
        """Take one credit back; return False if none is missing."""
        is_missing = self.left < self.most
        self.left += is_missing
        return is_missing


class Credits:
    """The channels of one node."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.known: dict[tuple[str, int], Channel] = {}

    def channel(self, target: str, boundary: int, most: int = 0) -> Channel:
        """Return the channel to a node for a boundary, always the same object; ``most`` 0 = the default."""
        channel = self.known.get((target, boundary))
        if channel is None:
            channel = self.known[target, boundary] = Channel(target, boundary, most or self._most)
        return channel


def max_embeds(plan: Plan, node: str) -> int:
    """Limit of an owner's micro-batches between embedding and end of head; 0 for other nodes.

    It is the number of their credits at all hosts of the ring, replicas included.
    """
    if plan.owner(node) is None:
        return 0
    return plan.placement.credits * max(1, len(route(plan, node))) * width(plan.placement)


Message = tuple[str, int, str]
"""Payload, boundary, and the node at the other end."""


class PathAction:
    """One compute action on the way of a micro-batch, with its message before and its send after.

    Attributes:
        start, stop: its units.
        rank: the lowest ready one is started first; see ``node_engine``.
        receive: the tensor that it needs; None = no tensor.
        awaits: the next tensor that its micro-batch takes from this place on; None = no further one.
        send: the tensor that leaves after it; None = no tensor.
        is_upward: whether earlier micro-batches must have passed its units.
        keeps_graph: whether it keeps a graph for a backward.
        is_downward: whether it is ordered among the backwards.
        is_of_embedding: whether its unit is the embedding.
        frontier: its first unit if upward, which a later micro-batch must not overtake; infinity otherwise. READ has
            the embedding as frontier, so that nothing overtakes it and credits are taken in order.
        goes_on: whether it and the next place are one forward with a graph, cut at the blocks of a helper.
        has_version: whether it needs the right version of its units.
        credit: the channel of which it takes a credit; None = it takes none.
        next: the next place; None = it is the last one.
        too_early: payload and boundary of tensors that can't exist before this place or a later one has sent another.
    """

    def __init__(self, leg: Leg, receive: Message | None, send: Message | None, credit: Channel | None) -> None:
        self.op = op = leg.op
        self.start, self.stop = leg.start, leg.stop
        self.rank = op.rank
        self.receive, self.send, self.credit = receive, send, credit
        self.awaits = receive
        self.is_upward = op.is_forward and op is not Op.HEAD
        self.keeps_graph, self.is_downward = op.graph is Graph.KEEPS, op.is_downward
        self.is_of_embedding = leg.start == EMBEDDING
        self.frontier = (EMBEDDING if op is Op.READ else leg.start) if self.is_upward else math.inf
        self.goes_on = False
        self.has_version = op is not Op.SKIP and not op.is_of_cache
        self.next: PathAction | None = None
        self.too_early: frozenset[tuple[str, int]] = frozenset()


class Path:
    """The way of a micro-batch at one node, as a chain of places.

    Attributes:
        first: the first place.
        goes_backward: whether it has a backward of blocks here.
        trains_embedding: whether it ends with a backward of the embedding here.
        has_head: whether the head runs here.
        has_embedding: whether it begins with the embedding here.
        head_room: the channel of which a credit returns after the head; None where a message feeds the head.
    """

    def __init__(self, legs: Sequence[Leg], private_blocks: int, room: Credits, pairs_boundary: int = 0) -> None:
        credits_at = _credits(legs, private_blocks, room, pairs_boundary)
        places: list[PathAction] = []
        receive: Message | None = None
        for at, leg in enumerate(legs):
            if leg.op is Op.RECEIVE:
                receive = _message(leg)
            elif leg.op is not Op.SEND:
                after = legs[at + 1] if at + 1 < len(legs) else None
                send = _message(after) if after is not None and after.op is Op.SEND else None
                places.append(PathAction(leg, receive, send, credits_at[at]))
                receive = None
        received: set[tuple[str, int]] = set()
        for following, place in itertools.pairwise(reversed(places)):
            place.next = following
            if following.receive is not None:
                received.add(following.receive[:2])
            is_needed = place.send is not None and place.op is not Op.SHIP  # no tensor follows from pairs
            place.too_early = frozenset(received) if is_needed else following.too_early
            place.awaits = place.receive or following.awaits
            place.goes_on = place.keeps_graph and following.keeps_graph and following.receive is None
        self.first = places[0]
        self.goes_backward = any(place.is_downward and not place.is_of_embedding for place in places)
        self.trains_embedding = places[-1].is_downward and places[-1].is_of_embedding
        self.has_head = any(place.op is Op.HEAD for place in places)
        self.has_embedding = self.first.op is Op.EMBED
        head = next((place.start for place in places if place.op is Op.HEAD and place.receive is None), None)
        self.head_room = None if head is None else room.channel(_HERE, head)


_HERE: Final = ""
"""The target of a channel that leads to this node's own head."""


def _message(leg: Leg) -> Message:
    return (leg.payload, leg.start, leg.peer)


def _credits(legs: Sequence[Leg], private_blocks: int, room: Credits, pairs_boundary: int) -> list[Channel | None]:
    """Assign to legs the channels of which they take a credit; pairs take one where they ship.

    A stretch that ends in the send of a hidden state takes one at its first leg on hosted blocks. Those are passed in
    order, so credits are taken in order, and an older micro-batch never waits for a credit that a younger one holds.
    Embedding and private blocks are not ordered with other owners' micro-batches; they take the credit only where no
    hosted block follows: then all micro-batches of that channel are the owner's own.

    A stretch of hosted blocks that ends in the head takes one of a channel to this node: else any number of own
    micro-batches could wait between the frozen blocks of the top slice and those with a graph.
    """
    taken: list[Channel | None] = [None] * len(legs)
    stretch: list[int] = []
    for position, leg in enumerate(legs):
        if leg.op is Op.RECEIVE:
            stretch = []
        elif leg.op is Op.HEAD:
            hosted = [at for at in stretch if legs[at].op is not Op.EMBED and legs[at].start >= private_blocks]
            if hosted:
                taken[hosted[0]] = room.channel(_HERE, leg.start)
            stretch = []
        elif leg.op is not Op.SEND:
            stretch.append(position)
        elif leg.payload == Payload.HIDDEN:
            hosted = [at for at in stretch if legs[at].op is not Op.EMBED and legs[at].start >= private_blocks]
            taken[(hosted or stretch)[0]] = room.channel(leg.peer, leg.start)
        elif leg.payload == Payload.PAIRS:
            taken[position - 1] = room.channel(leg.peer, pairs_boundary, WAITING[Payload.PAIRS])
    return taken


class MicroBatchState:
    """The progress of one micro-batch at this node."""

    def __init__(self, state: ItemState, micro: int, path: Path) -> None:
        self.state, self.seq, self.micro, self.path = state, state.item.seq, micro, path
        self.place: PathAction | None = path.first
        self.arrived: TensorArrived | ParcelArrived | None = None


_NONE: Final[deque[MicroBatchState]] = deque(maxlen=0)


def _waiting(flows: Sequence[MicroBatchState]) -> deque[MicroBatchState]:
    """Return a queue, from which flows are only taken; an empty one is shared, as each has room for 64 flows.

    A granted evaluation may have 262,144 items, of which a host has four queues each.
    """
    return deque(flows) if flows else _NONE


class ItemState:
    """The progress of one item at this node.

    Attributes:
        is_own: whether this node is its initiator.
        updates: updates and saves that are not done, except ``helped`` and ``copies``.
        helped: updates that are not done, of blocks that this node helps with.
        copies: updates that are not done, of this node's embedding and head for an item of another owner.
        fits: micro-batches with pairs that are not fitted, in order.
        flows: its micro-batches here, in order.
        flows_left: number of them that are not through.
        heads: micro-batches without their head, in order: gradients are summed in a fixed order.
        backwards: micro-batches before their last backward of blocks here, in order.
        embedding_backwards: micro-batches before their backward of the embedding here, in order.
        head_version: version of head and invertible adapter that the item needs, see ``head_version``.
        embedding_version: version of the embedding that the item needs.
        awaited_seq: the last item that must have passed this slice in forward before this item's update.
        forward_versions: hosted unit -> version that a forward needs; empty if all are 0. A unit never has a higher
            version then: no update precedes the last forward that must not see it.
        backward_versions: the same for a backward.
        lagging: updates that wait for forward and backward of the next item.
        follows_token: whether its embeddings need the tokens that the item before has chosen.
        values: numbers for the report, summed over micro-batches.
    """

    def __init__(
        self, plan: Plan, item: Item, node: str, paths: Sequence[Path | None], fits: Sequence[Path | None]
    ) -> None:
        course, piece = plan.course, plan.slice_of(node)
        self.item = item
        self.is_own = item.owner == node
        self.updates = list(item_updates(plan, item, node))
        self.copies: list[Action] = []
        if not self.is_own and course.method.full_parameters:
            self.copies = [update for update in self.updates if update.start in replicated_units(course, item)]
            self.updates = [update for update in self.updates if update not in self.copies]
        helped = [helper.has_block for helper in plan.placement.helped_by(node)]
        self.helped = [
            update for update in self.updates if update.op is Op.UPDATE and any(has(update.start) for has in helped)
        ]
        self.updates = [update for update in self.updates if update not in self.helped]
        self.fits = _waiting(
            [MicroBatchState(self, micro, path) for micro, path in enumerate(fits) if path is not None]
        )
        self.flows = [MicroBatchState(self, micro, path) for micro, path in enumerate(paths) if path is not None]
        self.flows_left = len(self.flows)
        self.heads = _waiting([flow for flow in self.flows if flow.path.has_head])
        self.backwards = _waiting([flow for flow in self.flows if flow.path.goes_backward])
        self.embedding_backwards = _waiting([flow for flow in self.flows if flow.path.trains_embedding])
        self.head_version = head_version(course, item.step)
        self.embedding_version = weight_version(course, EMBEDDING, item.step)
        self.awaited_seq = item.seq
        if item.kind.has_update:
            self.awaited_seq += awaited_forward(course, piece.start, item) - item.step
        hosted = range(piece.start, piece.stop)
        versions = {unit: forward_version(course, unit, item) for unit in hosted}
        self.forward_versions = self.backward_versions = versions if any(versions.values()) else {}
        if item.kind.has_update and in_flight(course, piece.start) > 1:
            self.backward_versions = {unit: backward_version(course, unit, item) for unit in hosted}
        self.lagging = tuple(update for update in self.updates if awaits_next_backward(course, update.start, item))
        self.follows_token = follows_token(course, item)
        self.values: dict[str, float] = {}

    @property
    def is_done(self) -> bool:
        """Whether this node has done the item."""
        return not (self.flows_left or self.updates or self.copies or self.fits or self.helped)

    @property
    def goes_backward(self) -> bool:
        """Whether a micro-batch still goes backward here."""
        return bool(self.backwards) or bool(self.embedding_backwards)

    @property
    def holds_graph(self) -> bool:
        """Whether a backward or an update of this item is not done."""
        return bool(self.updates) or self.goes_backward

    @property
    def takes_room(self) -> bool:
        """Whether this item blocks further graphs: a backward, or an update that does not lag, is not done."""
        return self.goes_backward or any(update not in self.lagging for update in self.updates)

    def uses_head(self, head: int) -> bool:
        """Whether the head is still to run, be updated or saved for this item."""
        return bool(self.heads) or any(action.op is Op.SAVE or action.start == head for action in self.updates)
