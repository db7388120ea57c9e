"""Bookkeeping of the engine: a micro-batch's way through one node, and the item that it belongs to.

A :class:`Path` is the precomputed form of one lowering (``schedule.lower``): for each position it knows what the
micro-batch needs to go on, so that the engine decides with a few comparisons.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ringtune.schedule.lowering import (
    Action,
    Leg,
    Op,
    Payload,
    awaited_forward,
    forward_version,
    item_updates,
    num_microbatches,
    weight_version,
)
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item

_FORWARD_OPS = frozenset({Op.EMBED, Op.FORWARD_FREE, Op.FORWARD, Op.SKIP, Op.HEAD})
NO_RANK = 5
_BELOW_ALL = -2
_RANKS = {Op.HEAD: 1, Op.BACKWARD: 2, Op.FORWARD: 3, Op.SKIP: 4, Op.FORWARD_FREE: 4, Op.EMBED: 4}


@dataclass(frozen=True, slots=True)
class Place:
    """What a micro-batch needs at one position to go on.

    Attributes:
        leg: the next compute leg.
        position: of that leg.
        op: of that leg.
        rank: the lower, the sooner it is started; see ``engine``.
        receive: (payload, boundary) of the tensor that has to be here before; None if it needs none.
        end: one past the last block of a forward; earlier micro-batches have to be past it. Below every block for
            head and backward, whose order is kept by counting.
        frontier: where the next forward leg starts (-1: embedding, N: head, inf: none). A later micro-batch must
            not overtake it.
        credit: the (target, boundary) whose credit that leg takes, or None.
    """

    leg: Leg
    position: int
    op: Op
    rank: int
    receive: tuple[str, int] | None
    end: int
    frontier: float
    credit: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Path:
    """The legs of every micro-batch of one item at one node.

    Attributes:
        legs: in the order of the data flow.
        places: per position what comes next; None where that is a send, and at the end.
        num_heads, num_backwards: compute legs of these kinds.
        best_rank: the lowest rank of its places.
    """

    legs: tuple[Leg, ...]
    places: tuple[Place | None, ...]
    num_heads: int
    num_backwards: int
    best_rank: int

    @staticmethod
    def of(legs: tuple[Leg, ...], num_blocks: int, private_blocks: int) -> Path:
        """Precompute a path."""
        credit = _credits(legs, private_blocks)
        places: list[Place | None] = [None]
        frontier = math.inf
        for position in reversed(range(len(legs))):
            leg, after = legs[position], places[-1]
            if leg.op is Op.SEND:
                places.append(None)
            elif leg.op is Op.RECEIVE:
                receive = (leg.payload, leg.start)
                places.append(None if after is None else replace(after, receive=receive))
            else:
                end = _BELOW_ALL
                if leg.op in _FORWARD_OPS:
                    frontier, end = forward_range(leg, num_blocks)
                    end = _BELOW_ALL if leg.op is Op.HEAD else end
                places.append(
                    Place(
                        leg=leg,
                        position=position,
                        op=leg.op,
                        rank=_RANKS[leg.op],
                        receive=None,
                        end=end,
                        frontier=frontier,
                        credit=credit[position],
                    )
                )
        return Path(
            legs=legs,
            places=tuple(reversed(places)),
            num_heads=sum(leg.op is Op.HEAD for leg in legs),
            num_backwards=sum(leg.op is Op.BACKWARD for leg in legs),
            best_rank=min((place.rank for place in places if place is not None), default=NO_RANK),
        )


def forward_range(leg: Leg, num_blocks: int) -> tuple[int, int]:
    """Where a forward leg lies on the axis embedding (-1), blocks (0..N-1), head (N)."""
    if leg.op is Op.EMBED:
        return (-1, 0)
    if leg.op is Op.HEAD:
        return (num_blocks, num_blocks + 1)
    return (leg.start, leg.stop)


def _credits(legs: tuple[Leg, ...], private_blocks: int) -> tuple[tuple[str, int] | None, ...]:
    """Which leg takes the credit of each stretch that ends in sending a hidden state.

    It is the stretch's first leg on hosted blocks: those are passed in order, so credits are taken in order
    too, and an older micro-batch never waits for a credit that a younger one holds. Embedding and private
    blocks are not kept in order with other owners' micro-batches; they take the credit only where no hosted
    block follows, because then all micro-batches of that channel are the owner's own.
    """
    taken: list[tuple[str, int] | None] = [None] * len(legs)
    stretch: list[int] = []
    for position, leg in enumerate(legs):
        if leg.op is Op.RECEIVE:
            stretch = []
        elif leg.op is not Op.SEND:
            stretch.append(position)
        elif leg.payload == Payload.HIDDEN:
            hosted = [at for at in stretch if legs[at].op is not Op.EMBED and legs[at].start >= private_blocks]
            taken[(hosted or stretch)[0]] = (leg.peer, leg.start)
    return tuple(taken)


@dataclass(slots=True)
class ItemState:
    """How far one item is at this node; its slice is updated after the forward of step ``awaited_step``.

    ``plan`` is the plan as it is for the item's turn.
    """

    plan: Plan
    item: Item
    path: Path
    num_micro: int
    updates: list[Action]
    heads_left: int
    backwards_left: int
    flows_left: int
    awaited_step: int
    values: dict[str, float] = field(default_factory=dict)
    versions: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    @staticmethod
    def of(plan: Plan, item: Item, node: str, path: Path) -> ItemState:
        """The state before anything happened."""
        count = num_microbatches(plan, item)
        return ItemState(
            plan=plan,
            item=item,
            path=path,
            num_micro=count,
            updates=list(item_updates(plan, item, node)),
            heads_left=count * path.num_heads,
            backwards_left=count * path.num_backwards,
            flows_left=count if path.legs else 0,
            awaited_step=awaited_forward(plan, plan.slice_of(node).start, item),
        )

    @property
    def is_done(self) -> bool:
        """Whether this node has nothing left to do for the item."""
        return self.flows_left == 0 and not self.updates

    @property
    def next_head(self) -> int:
        """The micro-batch whose head is due: gradients are summed in a fixed order."""
        return self.num_micro - self.heads_left

    @property
    def next_backward(self) -> int:
        """The micro-batch whose backward is due."""
        return self.num_micro - self.backwards_left

    def uses_head(self, num_blocks: int) -> bool:
        """Whether the head is still to be run or updated for this item."""
        return self.heads_left > 0 or any(action.op is Op.SAVE or action.start == num_blocks for action in self.updates)

    def needed_versions(self, place: Place) -> tuple[tuple[int, int], ...]:
        """(block, updates that it must have had, neither more nor fewer) for the leg at ``place``."""
        found = self.versions.get(place.position)
        if found is None:
            leg, item, plan = place.leg, self.item, self.plan
            if leg.op is Op.BACKWARD:
                found = ((leg.start, weight_version(plan, leg.start, item.step)),)
            elif leg.op in (Op.FORWARD, Op.FORWARD_FREE):
                found = tuple((block, forward_version(plan, block, item)) for block in range(leg.start, leg.stop))
            else:
                found = ()
            self.versions[place.position] = found
        return found

    @property
    def holds_graph(self) -> bool:
        """Whether a graph of this item may still be needed, or its update is still to come."""
        return self.backwards_left > 0 or bool(self.updates)

    def ready_update(self, num_blocks: int, forward_step: int) -> Action | None:
        """An update whose micro-batches are all through.

        Args:
            num_blocks: of the model; tells the head's update from the slice's.
            forward_step: the last step whose forward has passed this node's slice.
        """
        for action in self.updates:
            if action.op is Op.SAVE:
                return action
            if action.start == num_blocks:
                if self.heads_left == 0:
                    return action
            elif self.backwards_left == 0 and self.awaited_step <= forward_step:
                return action
        return None


class Flow:
    """One micro-batch at this node: where it stands on its item's path.

    Args:
        state: of its item.
        micro: which micro-batch.
    """

    __slots__ = ("_path", "micro", "place", "position", "seq", "state")

    def __init__(self, state: ItemState, micro: int) -> None:
        self.state, self.micro, self.seq = state, micro, state.item.seq
        self._path = state.path
        self.move(0)

    def move(self, position: int) -> None:
        """Go to a position on the path."""
        self.position = position
        self.place = self._path.places[position]

    @property
    def leg(self) -> Leg | None:
        """The next leg, None if it is through."""
        legs = self._path.legs
        return legs[self.position] if self.position < len(legs) else None
