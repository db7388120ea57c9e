"""Pure functions of (plan, step): what trains, where backward stops, which version a forward must see.

Also the *lowering*: the ordered actions that each node carries out for one micro-batch. The engine, the
simulator and the printed table all use this one lowering::

    plan: a [0,2)  b [2,4)   owner c   lowest trainable block 3

    c | E  >h0@a                                          <h4@b  H  >g4@b
    a |            <h0@c  f[0,1)  f[1,2)  >h2@b
    b |                                   <h2@a  f[2,3)  F[3,4)  >h4@c   <g4@c  B[3,4)  U[3,4)

Source: RingAda, sections III-A and III-B.2 (early-stopped backward, terminator).
"""

from __future__ import annotations

import bisect
import enum
import functools
import itertools
from typing import NamedTuple

from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, StepKind


class Op(enum.StrEnum):
    """What an action does."""

    # equal to its letter, so of the same hash; and a fast one, for it is in the key of every lookup of a run
    __hash__ = str.__hash__

    EMBED = "E"  # owner: token ids to hidden state
    FORWARD_FREE = "f"  # forward without graph
    FORWARD = "F"  # forward that keeps a graph
    SKIP = "S"  # blocks that this micro-batch passes by (operation tables)
    HEAD = "H"  # owner: head and loss, and the head's backward
    BACKWARD = "B"  # backward through what F kept
    UPDATE = "U"  # one optimizer step of a slice's trainable blocks, or of the head
    SAVE = "K"  # checkpoint: what this node trained, with its optimizer state
    SHIP = "C"  # (input, gradient) to a helper (ColA)
    SEND = ">"
    RECEIVE = "<"


class Payload(enum.StrEnum):
    """What a send or receive carries."""

    __hash__ = str.__hash__

    HIDDEN = "h"
    GRAD = "g"
    HEAD = "t"  # head, moments and step counts, at a hand-over


class Action(NamedTuple):
    """One thing that one node does.

    ``micro`` is -1 where the action belongs to the whole item. For a block range ``start < stop``. For a
    tensor, ``start`` is the *boundary*: the index of the block that the hidden state enters (N: the
    head). For the head's update ``start == stop == N``. A hand-over has the turn index in ``start``.
    """

    op: Op
    seq: int
    micro: int = -1
    start: int = 0
    stop: int = 0
    peer: str = ""
    payload: str = ""


class Leg(NamedTuple):
    """An action of a micro-batch's way through one node, not yet bound to (seq, micro)."""

    op: Op
    start: int = 0
    stop: int = 0
    peer: str = ""
    payload: str = ""

    def bind(self, seq: int, micro: int) -> Action:
        """The action for one micro-batch."""
        op, start, stop, peer, payload = self
        # what Action(...) does in the end, in a third of the time: this is every action of every node
        return tuple.__new__(Action, (op, seq, micro, start, stop, peer, payload))


def max_depth(plan: Plan) -> int:
    """The deepest unfreezing that the run can reach; private blocks stay frozen."""
    return plan.num_blocks - plan.private_blocks


def depth(plan: Plan, step: int) -> int:
    """How many blocks train at ``step``, counted from the top.

    Where the run decides (``plan.is_auto``), ask the plan as it is for a turn: ``plan.unfrozen_at``.

    Source: RingAda, section IV: one more block, top-down, every k steps; the other methods train all.
    """
    if plan.method != "ringada":
        return max_depth(plan)
    if plan.unfreeze == "every":
        return min(max_depth(plan), 1 + step // plan.every_steps)
    return 1 + bisect.bisect_right(plan.unfreeze_at, step) if step >= 0 else 0


def lowest_trainable(plan: Plan, step: int) -> int:
    """The lowest block whose adapter trains at ``step``; backward stops there."""
    return plan.num_blocks - depth(plan, step)


def first_trained_step(plan: Plan, block: int) -> int | None:
    """The first step at which ``block`` trains; None if it never does."""
    needed = plan.num_blocks - block
    if needed > max_depth(plan):
        return None
    if plan.method != "ringada" or needed == 1:
        return 0
    if plan.unfreeze == "every":
        return (needed - 1) * plan.every_steps
    return plan.unfreeze_at[needed - 2] if needed - 2 < len(plan.unfreeze_at) else None


def unfreezing_steps(plan: Plan) -> tuple[int, ...]:
    """The steps of the run at which one more block begins to train; as ``unfreeze.at`` they give the same run."""
    if plan.method != "ringada":
        return ()
    first = (first_trained_step(plan, block) for block in reversed(range(plan.num_blocks - 1)))
    return tuple(step for step in first if step is not None and step < plan.num_steps)


def weight_version(plan: Plan, block: int, step: int) -> int:
    """Updates that ``block`` has had when all steps before ``step`` are done; ``block == N`` means the head."""
    if block == plan.num_blocks:
        return step
    first = first_trained_step(plan, block)
    return 0 if first is None else max(0, step - first)


def hosts_above(plan: Plan, block: int) -> int:
    """Hosts that a micro-batch passes from ``block`` to the head, the block's own included; 0 for the head."""
    return sum(1 for piece in plan.slices if piece.num_blocks and piece.stop > block)


def warm_up(plan: Plan, block: int) -> int:
    """How many train items the host of ``block`` may have between forward and update.

    1 (no weight is ever stale) except for PipeAdapter: there host p of P, bottom to top, has P - p, and the
    head 1. A turn ends with everything updated, so it is never more than the steps of a turn.

    Source: RingAda, section IV, baseline PipeAdapter (1F1B across batches with stale weights).
    """
    if plan.method != "pipeadapter":
        return 1
    return max(1, min(hosts_above(plan, block), plan.local_iterations))


def forward_version(plan: Plan, block: int, item: Item) -> int:
    """Updates of ``block`` that a forward of ``item`` must see, neither more nor fewer.

    All earlier ones, except for PipeAdapter: item k = 0, 1, ... of a turn sees ``max(0, k - w + 1)`` updates of
    that turn, w = ``warm_up``.
    """
    stale = 0
    if plan.method == "pipeadapter" and item.kind.has_update:
        stale = min(item.step % plan.local_iterations, warm_up(plan, block) - 1)
    return weight_version(plan, block, item.step - stale)


def awaited_forward(plan: Plan, block: int, item: Item) -> int:
    """The step whose forward has to have passed ``block`` before the update of ``item`` there.

    It is the last one that must not see this update, so that no timing changes what a forward sees.
    """
    end_of_turn = min(plan.num_steps, (item.step // plan.local_iterations + 1) * plan.local_iterations)
    return min(item.step + warm_up(plan, block), end_of_turn) - 1


def lowest_with_graph(plan: Plan, kind: StepKind, step: int) -> int:
    """The lowest block that keeps a graph in an item of this kind; N if none does."""
    if not kind.has_backward:
        return plan.num_blocks
    return plan.private_blocks if kind is StepKind.SCORE else lowest_trainable(plan, step)


class Segment(NamedTuple):
    """Consecutive blocks that one micro-batch passes at one node."""

    node: str
    start: int
    stop: int


@functools.lru_cache(maxsize=4096)
def route(plan: Plan, owner: str) -> tuple[Segment, ...]:
    """The segments that a micro-batch of ``owner`` passes, bottom to top; neighbours on one node merge."""
    pieces = [Segment(owner, 0, plan.private_blocks)]
    pieces += [Segment(piece.node, piece.start, piece.stop) for piece in plan.slices]
    merged: list[Segment] = []
    for piece in pieces:
        if piece.start == piece.stop:
            continue
        if merged and merged[-1].node == piece.node:
            merged[-1] = Segment(piece.node, merged[-1].start, piece.stop)
        else:
            merged.append(piece)
    return tuple(merged)


@functools.lru_cache(maxsize=4096)
def lower(plan: Plan, owner: str, kind: StepKind, lowest: int) -> dict[str, tuple[Leg, ...]]:
    """The legs of one micro-batch, per node, in the order of the data flow.

    Args:
        plan: the plan.
        owner: the initiator of the item.
        kind: of the item.
        lowest: the lowest block that keeps a graph (``lowest_with_graph``).

    Returns:
        For every node that takes part its legs; each node's legs are totally ordered because a
        micro-batch is at one place at a time.
    """
    legs: dict[str, list[Leg]] = {}

    def move(source: str, target: str, boundary: int, payload: Payload) -> None:
        if source != target:
            legs.setdefault(source, []).append(Leg(Op.SEND, boundary, 0, target, payload))
            legs.setdefault(target, []).append(Leg(Op.RECEIVE, boundary, 0, source, payload))

    legs.setdefault(owner, []).append(Leg(Op.EMBED))
    at = owner
    path = route(plan, owner)
    for segment in path:
        move(at, segment.node, segment.start, Payload.HIDDEN)
        at = segment.node
        legs.setdefault(at, []).extend(_forward_legs(segment, lowest))
    move(at, owner, plan.num_blocks, Payload.HIDDEN)
    legs[owner].append(Leg(Op.HEAD))
    at = owner
    for segment in reversed(path):
        if segment.stop <= lowest:
            break
        move(at, segment.node, segment.stop, Payload.GRAD)
        at = segment.node
        legs[at].append(Leg(Op.BACKWARD, max(segment.start, lowest), segment.stop))
    return {node: tuple(parts) for node, parts in legs.items()}


def _forward_legs(segment: Segment, lowest: int) -> list[Leg]:
    """Frozen blocks one by one, so that they can be interrupted; trainable ones as one range."""
    frozen = range(segment.start, min(segment.stop, lowest))
    legs = [Leg(Op.FORWARD_FREE, block, block + 1) for block in frozen]
    if segment.stop > lowest:
        legs.append(Leg(Op.FORWARD, max(segment.start, lowest), segment.stop))
    return legs


def item_legs(plan: Plan, item: Item, node: str) -> tuple[Leg, ...]:
    """The legs of one micro-batch of ``item`` at ``node``; empty if it does not pass there."""
    if item.kind is StepKind.CHECKPOINT:
        return ()
    lowest = lowest_with_graph(plan, item.kind, item.step)
    return lower(plan, item.owner, item.kind, lowest).get(node, ())


def item_updates(plan: Plan, item: Item, node: str) -> tuple[Action, ...]:
    """What ``node`` does after the last micro-batch of ``item``: update its trainable blocks, the head; or save."""
    if item.kind is StepKind.CHECKPOINT:
        return (Action(Op.SAVE, item.seq),)
    if not item.kind.has_update:
        return ()
    updates = []
    piece = plan.slice_of(node)
    lowest = lowest_trainable(plan, item.step)
    if piece.stop > lowest and piece.num_blocks:
        updates.append(Action(Op.UPDATE, item.seq, -1, max(piece.start, lowest), piece.stop))
    if node == item.owner:
        updates.append(Action(Op.UPDATE, item.seq, -1, plan.num_blocks, plan.num_blocks))
    return tuple(updates)


def num_microbatches(plan: Plan, item: Item) -> int:
    """Micro-batches of an item; a short evaluation batch may have fewer."""
    return len(plan.microbatch_sizes(item.rows))


def links(plan: Plan) -> frozenset[tuple[str, str]]:
    """Every directed pair of nodes between which the run sends tensors or hands over the head."""
    pairs = set()
    owners = [owner.node for owner in plan.owners]
    for owner in owners:
        stops = [owner, *(segment.node for segment in route(plan, owner)), owner]
        for source, target in itertools.pairwise(stops):
            pairs |= {(source, target), (target, source)}
        pairs |= {(owner, other) for other in owners}
    return frozenset((source, target) for source, target in pairs if source != target)
