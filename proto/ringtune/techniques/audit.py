"""The audit: ``[audit]`` of a job, the work that is drawn to be computed again, and the comparison of the results.

A *cell* is the work of one host on one micro-batch of one item: forward and backward through its slice. Runs are equal
in bits on nodes of one numeric class, so another host can repeat a cell, and the update of its item::

    hidden state in  --.                            .--> hidden state out
    gradient in      --+--> cell (12, micro 3) -----+--> gradient out
    sum of gradients --+    of host b               '--> sum of gradients
    state of item 11 --'
    sum of gradients, state of item 11 --> update of item 12 --> state of item 12

Each node commits itself before it knows what is drawn: with the end of a turn it reports a *trail*, which has digests
of the sum of gradients after each of its cells, and of weights with optimizer state after each item. Of each tensor
that it exchanged it has a *tag*, which costs less: a message authentication code (Poly1305) under a key that nobody
else knows until the trails of all nodes are there. So a neighbour that hands in another tensor does not know which one
fits, and what a node itself could make fit is not with it. The coordinator draws the cells of a turn when it grants the
turn, for each host independently, and tells the neighbours of the host, not the host, which of the tensors that they
exchange with it they have to keep; of these they tell the digest. After the turn the *checker*, the next host in the
ring, repeats the cell. What it says against another node counts if the host after it, the *third*, finds the same.

VeLoRA's vectors change with each forward, so a trail has them after each, and a cell begins with those before it. The
vector on which pairs are projected is computed from the first ones: a trail has those of a block that were *shown* to
its helper with each parcel, and at the beginning of a turn, where they have to be those of the turn before. They change
once, in the first item, of which all micro-batches are drawn as long as no closed turn has them: a host says itself
which of them was the first.

A host that scales its gradients in a turn does so in a cell, after the last cell of an item, or in the update; each
drawn cell is compared with its item's update, and at least one cell of each host is drawn in each turn. So a host of
which all items of a turn are wrong is found in that turn, and one of which each turn is wrong with probability p within
k turns of others with probability 1 - (1 - p)^k (p = 0.05, k = 100: 0.994). Not found, or late: a wrong number in few
cells of one turn (probability ``share`` for one), embedding, head and loss at an owner, whose rows nobody else has, and
two neighbours that agree. Of the head it is compared that each owner begins with what the one before it ended with.

In the turns of an owner that hosts the first or the last blocks too, what its slice gets from its embedding and head
passes no link. The owner commits itself to these tensors as well (``OwnTensor``), keeps all of them until the turn is
checked, and hands in those of drawn cells: its cells are those of a host beside an owner without blocks (``apart``).

Where helpers fit adapters, a host's cell takes their weights as given: host and helper both tell the digest of what the
host *holds* after each of their updates, and before the first one. What a helper does with a micro-batch is a cell of
its own (a *fit*, one for each block): pairs and sums before it, and the state of the block, to the sum after it and the
state that its update gives, which has to be what the host holds. A host that hosts other blocks repeats it::

    pairs 12.3 of block 2 ----.                    .--> sum of gradients of block 2
    sum of gradients ---------+--> fit of helper z-+
    state of block 2 before --'                    '--> state of block 2 after item 12 --> what its host holds

With ``statement`` a node signs what it did in a turn: the ledger of a run (``ringtune audit``) has these statements.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, NamedTuple, TypeVar

from ringtune.config.sections import AUTO_PLACEMENT, MAX_CHOSEN_MICROBATCHES
from ringtune.errors import IntegrityError, JobError, PlanError
from ringtune.models.adapter_config import has_adapter
from ringtune.quantities import format_bytes, format_seconds
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.course import Course
from ringtune.schedule.lowering import Legs, fit_legs, item_updates, legs
from ringtune.schedule.migration import stay_reason
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.saved_activations import VELORA, overlap
from ringtune.schedule.turns import Item, StepKind, Turn, items
from ringtune.schedule.versions import ever_trained, forward_version, updated, weight_version
from ringtune.storage.strict import Bounds, check_fields, read_object
from ringtune.techniques.base import Technique, Term


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditSettings:
    """``[audit]``: hosts repeat a part of each other's work, and one with another result is taken out of the run.

    Attributes:
        share: share of the micro-batches of each turn that the next host in the ring repeats for each host, at least
            one, with the update after it: of turns of 10 steps of 4 micro-batches 0.02 is one of 40.
    """

    share: Annotated[float, Bounds(gt=0, le=1)] = 0.02

    def __post_init__(self) -> None:
        check_fields(self, where="audit", error=JobError)


LEDGER: Final = "ledger.jsonl"
"""File in a run's folder with the statements of each closed turn."""

# ---- what is drawn ---------------------------------------------------------------------------------


class Cell(NamedTuple):
    """The work of a host on one micro-batch of one item, or with ``is_fit`` that of a helper for one block."""

    node: str
    seq: int
    micro: int
    is_fit: bool = False
    block: int = 0


class CellPlace(NamedTuple):
    """A cell in its turn, and the micro-batches whose gradients were added up right before it, and last; -1 = none."""

    turn: int
    seq: int
    micro: int
    before: int = -1
    last: int = -1
    is_fit: bool = False
    block: int = 0


_Drawn = TypeVar("_Drawn")


class Exchange(NamedTuple):
    """A tensor, or a parcel of pairs, that a node exchanges with ``peer`` in a cell; ``comes`` = it receives it.

    ``peer`` is the node itself where it is the owner of the rows, and its slice is next to embedding or head.
    """

    key: TensorKey
    peer: str
    comes: bool


def checkers_of(placement: Placement, node: str) -> tuple[str, ...]:
    """Return the checker and the third of a host's cells: the next two other hosts in the ring; fewer if there are."""
    return placement.hosts_after(node)[:2] if placement.slice_of(node).num_blocks else ()


def checked_by(placement: Placement, node: str) -> tuple[str, ...]:
    """Return the hosts whose cells ``node`` repeats as the checker, and as the third; fewer if there are."""
    hosts = [piece.node for piece in placement.hosts]
    checks = {host: checkers_of(placement, host) for host in hosts}
    return tuple(host for at in (0, 1) for host in hosts if checks[host][at : at + 1] == (node,))


def fit_checkers_of(placement: Placement, block: int) -> tuple[str, ...]:
    """Return the checker and the third of a helper's work for a block: the next hosts after that of the block.

    The host itself is last, as it hands in the pairs; the helper is none of them.
    """
    host, helper = placement.host_of(block), placement.trainer_of(block)
    return tuple(node for node in (*placement.hosts_after(host), host) if node != helper)[:2]


def checkers_of_cell(placement: Placement, cell: Cell) -> tuple[str, ...]:
    """Return the checker and the third of a cell; fewer if there are."""
    return fit_checkers_of(placement, cell.block) if cell.is_fit else checkers_of(placement, cell.node)


def fits_checked_by(placement: Placement, node: str) -> tuple[int, ...]:
    """Return the blocks whose helper's work ``node`` repeats as the checker or as the third, ascending."""
    return tuple(helper.start for helper in placement.helpers if node in fit_checkers_of(placement, helper.start))


def exchanges(way: Legs, seq: int, micro: int) -> tuple[Exchange, ...]:
    """Return what a node exchanges with others for a micro-batch, from its legs."""
    return tuple(
        Exchange(TensorKey(leg.payload, seq, micro, leg.start), leg.peer, leg.op is Op.RECEIVE)
        for leg in way
        if leg.op in (Op.SEND, Op.RECEIVE) and leg.payload in (Payload.HIDDEN, Payload.GRAD, Payload.PAIRS)
    )


@functools.lru_cache(maxsize=64)
def apart(plan: Plan, node: str) -> tuple[Plan, str]:
    """Return a plan of one placement with the slice of a host at another node, without rows, and that node's name."""
    alias = f"{node}.again"
    slices = (replace(piece, node=alias) if piece.node == node else piece for piece in plan.placement.slices)
    return Plan(plan.course, (replace(plan.placement, slices=tuple(slices)),)), alias


@functools.lru_cache(maxsize=64)
def fitting_apart(plan: Plan, node: str) -> tuple[Plan, str]:
    """Return a plan of one placement in which another node fits what ``node`` checks of helpers, and its name."""
    alias, blocks = f"{node}.fits", fits_checked_by(plan.placement, node)
    helpers = tuple(replace(each, node=alias) if each.start in blocks else each for each in plan.placement.helpers)
    return Plan(plan.course, (replace(plan.placement, helpers=helpers),)), alias


def fit_cells(plan: Plan, turn: Turn, node: str) -> tuple[Cell, ...]:
    """Return the cells of a helper in a train turn, in their order; ``plan`` is the part of one placement."""
    if turn.kind is not StepKind.TRAIN or not plan.placement.helped_by(node):
        return ()
    now = turn.settled(plan)
    return tuple(
        Cell(node, item.seq, micro, True, leg.start)
        for item in items(now.course, turn)
        for micro, way in enumerate(fit_legs(now, item, node))
        for leg in way
        if leg.op is Op.FIT
    )


def cells(plan: Plan, turn: Turn, node: str) -> tuple[Cell, ...]:
    """Return the cells of a host in a train turn; ``plan`` is the part of one placement."""
    if turn.kind is not StepKind.TRAIN or not plan.slice_of(node).num_blocks:
        return ()
    again, alias = apart(plan, node)
    now = turn.settled(again)
    return tuple(
        Cell(node, item.seq, micro)
        for item in items(now.course, turn)
        for micro, way in enumerate(legs(now, item, alias))
        if way
    )


class OwnTensor(NamedTuple):
    """A tensor between the slice of an owner and its embedding or head, and the action after which it is there."""

    key: TensorKey
    after: Action


def own_tensors(plan: Plan, turn: Turn, node: str) -> tuple[OwnTensor, ...]:
    """Return the tensors of a train turn that a host exchanges with itself, as the owner of the rows.

    Example: host of blocks [0, 2) of four: the hidden state 0, after the embedding. Host of [2, 4): the hidden state 4,
    after its last forward, and the gradient 4, after the head.
    """
    if turn.kind is not StepKind.TRAIN or node != turn.owner or not plan.slice_of(node).num_blocks:
        return ()
    (again, alias), tensors = apart(plan, node), list[OwnTensor]()
    there, here = turn.settled(again), turn.settled(plan)
    for item in items(here.course, turn):
        for micro, (way, whole) in enumerate(zip(legs(there, item, alias), legs(here, item, node), strict=True)):
            for at, leg in enumerate(way):
                if leg.op in (Op.SEND, Op.RECEIVE) and leg.peer == node:
                    before = way[at - 1] if leg.op is Op.SEND else whole[whole.index(way[at + 1]) - 1]
                    key = TensorKey(leg.payload, item.seq, micro, leg.start)
                    tensors.append(OwnTensor(key, before.bind(item.seq, micro)))
    return tuple(tensors)


def item_of(plan: Plan, turn: Turn, seq: int) -> tuple[Plan, Item]:
    """Return the plan with the decisions of a turn, and the turn's item ``seq``; raises ``IntegrityError``."""
    now = turn.settled(plan)
    item_of_turn = next((item for item in items(now.course, turn) if item.seq == seq), None)
    if item_of_turn is None:
        raise IntegrityError(f"item {seq} is not in turn {turn.index}; use one version on all machines")
    return now, item_of_turn


def draw(
    plan: Plan, turn: Turn, share: float, source: random.Random, *, shown: Collection[int] = ()
) -> tuple[Cell, ...]:
    """Draw the cells of a turn: for each host ``share`` of its cells in the mean, at least one, ascending.

    And for each helper of its micro-batches, with all blocks of these. Example: of 40 cells with share 0.02 one, with
    0.03 one with probability 0.8 and two with 0.2. ``source`` has to be one that no node can predict. Where pairs are
    projected, all cells of the first item of each block that is not among the ``shown`` ones are drawn too.
    """
    sample: list[Cell] = []

    def drawn(candidates: Sequence[_Drawn]) -> list[_Drawn]:
        number, rest = divmod(share * len(candidates), 1.0)
        count = max(1, int(number) + (source.random() < rest))
        return source.sample(candidates, min(count, len(candidates)))

    for piece in plan.placement.hosts:
        if checkers_of(plan.placement, piece.node):
            host_cells = cells(plan, turn, piece.node)
            first = {block: cell.seq for cell in reversed(host_cells) for block in ships_of(plan, turn, cell)}
            new = {seq for block, seq in first.items() if block not in shown}
            sample += sorted({*drawn(host_cells), *(cell for cell in host_cells if cell.seq in new)})
    for node in dict.fromkeys(helper.node for helper in plan.placement.helpers):
        fits = fit_cells(plan, turn, node)
        micros = {*drawn([*dict.fromkeys((cell.seq, cell.micro) for cell in fits)])}
        known = (cell for cell in fits if (cell.seq, cell.micro) in micros)
        sample += sorted(cell for cell in known if fit_checkers_of(plan.placement, cell.block))
    return tuple(sample)


def ships_of(plan: Plan, turn: Turn, cell: Cell) -> tuple[int, ...]:
    """Return the blocks of which a host ships projected pairs in a cell; raises ``IntegrityError`` as ``item_of``."""
    if plan.course.helper_settings.pairs != VELORA:
        return ()
    now, item = item_of(plan, turn, cell.seq)
    return tuple(leg.start for leg in legs(now, item, cell.node)[cell.micro] if leg.op is Op.SHIP)


def keys_to_keep(plan: Plan, turn: Turn, drawn: tuple[Cell, ...]) -> dict[str, tuple[TensorKey, ...]]:
    """Return by node the tensors that it has to keep of a turn, as the neighbour of a host with a drawn cell.

    And all tensors that such a host exchanges with itself: it must not know which of its cells are drawn.
    """
    keys_of: dict[str, list[TensorKey]] = {}
    for node in dict.fromkeys(cell.node for cell in drawn if not cell.is_fit):
        if tensors := own_tensors(plan, turn, node):
            keys_of[node] = [tensor.key for tensor in tensors]
    for cell in drawn:
        for exchange in cell_exchanges(plan, turn, cell):
            if exchange.peer != cell.node:
                keys_of.setdefault(exchange.peer, []).append(exchange.key)
    return {node: tuple(keys) for node, keys in keys_of.items()}


def cell_exchanges(plan: Plan, turn: Turn, cell: Cell) -> tuple[Exchange, ...]:
    """Return the tensors that a node exchanges in a cell; raises ``IntegrityError`` as ``item_of``."""
    if cell.is_fit:
        key = TensorKey(Payload.PAIRS, cell.seq, cell.micro, cell.block)
        return (Exchange(key, plan.placement.host_of(cell.block), True),)
    again, alias = apart(plan, cell.node)
    now, item = item_of(again, turn, cell.seq)
    return exchanges(legs(now, item, alias)[cell.micro], cell.seq, cell.micro)


def own_updates(now: Plan, item: Item, node: str) -> list[Action]:
    """Return the updates that a node computes of its own slice after an item."""
    piece = now.slice_of(node)
    trained = {*range(piece.start, piece.stop)} & {*now.placement.trained_at(node)}
    return [action for action in item_updates(now, item, node) if action.start in trained]


def noted_after(now: Plan, item: Item, node: str) -> Action | None:
    """Return the action of an item after which a node notes the state of its slice; None if it does not.

    It is the last update, or where gradients are added up over several items the last backward.
    """
    if updates := own_updates(now, item, node):
        return updates[-1]
    if now.course.helper_settings.interval == 1:
        return None
    trained = {*now.placement.trained_at(node)}
    noted = None
    for micro, way in enumerate(legs(now, item, node)):
        for leg in way:
            if leg.op is Op.BACKWARD and leg.start in trained:
                noted = leg.bind(item.seq, micro)
    return noted


def fits_noted_after(now: Plan, item: Item, node: str) -> dict[Action, int]:
    """Return the actions of an item after which a helper notes the state of a block, with the block.

    They are the updates, and where gradients are added up over several items the last fits of other blocks.
    """
    blocks = {helper.start for helper in now.placement.helped_by(node)}
    actions = {action.start: action for action in item_updates(now, item, node) if action.start in blocks}
    if now.course.helper_settings.interval > 1:
        for micro, way in enumerate(fit_legs(now, item, node)):
            fits = [leg.bind(item.seq, micro) for leg in way if leg.op is Op.FIT]
            actions |= {fit.start: fit for fit in fits if actions.get(fit.start, fit).op is Op.FIT}
    return {action: block for block, action in actions.items()}


def installs(now: Plan, item: Item, node: str) -> dict[Action, int]:
    """Return the actions of an item with which a host installs what a helper has updated, with the block."""
    lent = {block for helper in now.placement.helpers_of(node) for block in range(helper.start, helper.stop)}
    return {action: action.start for action in item_updates(now, item, node) if action.start in lent}


def held_since(now: Plan, turn: Turn, item: Item, block: int) -> int:
    """Return the item after which a host holds the weights of a helper with which it computes ``item``.

    -1 = those at the beginning of the turn. With overlap they are those of the item before the last.
    """
    version, last = forward_version(now.course, block, item), -1
    for each in items(now.course, turn):
        if (
            block in updated(now.course, each.kind, each.step).blocks
            and weight_version(now.course, block, each.step + 1) <= version
        ):
            last = each.seq
    return last


# ---- trails ----------------------------------------------------------------------------------------

Trail = Mapping[str, str]
"""Name of what a node exchanged or computed in a turn -> SHA-256, hex, or tag; sums in the order of computing."""


def tensor_name(key: TensorKey) -> str:
    """Name of a tensor between two nodes in their trails."""
    return f"{key.payload} {key.seq}.{key.micro} {key.boundary}"


def sum_name(seq: int, micro: int) -> str:
    """Name of the sum of gradients after the cell of a micro-batch."""
    return f"sum {seq}.{micro}"


def vectors_name(seq: int, micro: int) -> str:
    """Name of VeLoRA's vectors after the forward of a micro-batch whose gradients are added up."""
    return f"vectors {seq}.{micro}"


def vectors_around(micros: Iterable[int], micro: int) -> tuple[int, int]:
    """Return the micro-batches of an item before ``micro``, whose vectors its forward begins with, and last; -1 = none.

    ``micros`` are those with vectors; forwards are in ascending order.
    """
    known = sorted(micros)
    return max((each for each in known if each < micro), default=-1), max(known, default=-1)


def shown_name(seq: int, micro: int, block: int) -> str:
    """Name of the vectors of a block after the pairs of a micro-batch were projected on them.

    ``seq`` -1 = at the beginning of a turn.
    """
    return f"shown {'begin' if seq < 0 else f'{seq}.{micro}'} {block}"


NOTHING: Final = hashlib.sha256().hexdigest()
"""Digest of no tensors at all."""


def shown_order(trail: Trail, block: int) -> tuple[str, ...]:
    """Return the names of the vectors of a block that a host has shown in a turn, in this order, from the beginning."""
    begin, end = shown_name(-1, 0, block), f" {block}"
    names = (name for name in trail if name.startswith("shown ") and name.endswith(end) and name != begin)
    return (begin, *names)


def fit_name(seq: int, micro: int, block: int) -> str:
    """Name of the sum of gradients of a block at its helper after the fit of a micro-batch."""
    return f"fit {seq}.{micro} {block}"


def held_name(seq: int, block: int) -> str:
    """Name of the weights of a block that its host holds after a helper's update of an item.

    ``seq`` -1 = at the beginning of a turn.
    """
    return f"held {'begin' if seq < 0 else seq} {block}"


def state_name(seq: int, block: int) -> str:
    """Name of weights and optimizer state of a block after the update of an item."""
    return f"state {seq} {block}"


def begin_name(block: int) -> str:
    """Name of weights and optimizer state of a block, or of the weights of the head, at the beginning of a turn."""
    return f"begin {block}"


def end_names(block: int) -> tuple[str, str]:
    """Names of the weights and of the optimizer state of a block at the end of a turn."""
    return f"weights {block}", f"rest {block}"


TAG_KEY: Final = "key"
"""Name of what a node derives the key of its tags from, drawn anew for each turn."""
_TAG: Final = "tag "


def tag_name(name: str) -> str:
    """Name of the tag of a received tensor in the question for a cell, and in its answer."""
    return f"{_TAG}{name}"


def tag_key(secret: str) -> bytes:
    """Return the key of the tags of a turn: 32 bytes."""
    return hashlib.blake2b(secret.encode(), digest_size=32).digest()


def tag_nonce(name: str) -> bytes:
    """Return the number of a tensor's tag under the key of its turn: 12 bytes."""
    return hashlib.blake2b(name.encode(), digest_size=12).digest()


def tag_text(tag: bytes) -> str:
    """Return a tag as the receiver's trail has it, in the place of the digest."""
    return f"{_TAG}{tag.hex()}"


def is_tag(value: str) -> bool:
    """Whether an entry of a trail is a tag."""
    return value.startswith(_TAG)


def state_digest(weights: str, rest: str) -> str:
    """Return the digest of a block's state from those of its weights and its optimizer state."""
    return hashlib.sha256(f"{weights} {rest}".encode()).hexdigest()


def micro_order(trail: Trail, seq: int) -> tuple[int, ...]:
    """Return the micro-batches of an item in the order in which a host added up their gradients."""
    prefix = f"sum {seq}."
    return tuple(int(name.removeprefix(prefix)) for name in trail if name.startswith(prefix))


def fit_order(trail: Trail, seq: int, block: int) -> tuple[int, ...]:
    """Return the micro-batches of an item in the order in which a helper added up their gradients of a block."""
    words = (name.split() for name in trail if name.startswith(f"fit {seq}."))
    return tuple(int(place.partition(".")[2]) for _, place, of in words if of == str(block))


def read_trail(text: str, node: str) -> Trail:
    """Parse a node's trail; raises ``IntegrityError``."""
    trail = read_object(text, f"what node {node} did in a turn")
    if not all(isinstance(value, str) and len(value) <= 64 and value.isascii() for value in trail.values()):
        raise IntegrityError(f"node {node} reports a trail that can't be read; use one version on all machines")
    return dict(trail)


class Work(NamedTuple):
    """What a node does in a turn.

    Attributes:
        peers: name of each tensor that it exchanges -> the other node, or itself (``own_tensors``).
        sums: names of its sums of gradients, and of VeLoRA's vectors, also of those of pairs.
        updates: items after which the states of its slice are noted: those of which blocks are updated, ascending.
        has_head: whether it updates the head, as the owner of the turn.
        fits: names of the sums of what it fits as a helper.
        fitted: block that it fits -> items after which its state is noted, ascending.
        held: block that it fits, or of which it holds what another node fits -> items after which it is updated.
    """

    peers: Mapping[str, str]
    sums: frozenset[str]
    updates: tuple[int, ...]
    has_head: bool
    fits: frozenset[str] = frozenset()
    fitted: Mapping[int, tuple[int, ...]] = {}
    held: Mapping[int, tuple[int, ...]] = {}

    @property
    def held_names(self) -> set[str]:
        """Names of the weights that a host holds of a helper."""
        return {held_name(seq, block) for block, seqs in self.held.items() for seq in (-1, *seqs)}


def work_of(plan: Plan, turn: Turn, node: str) -> Work:
    """Return what a node of a placement does in a train turn; ``plan`` is the part of the placement."""
    now, piece, peers, sums, updates = turn.settled(plan), plan.slice_of(node), dict[str, str](), set[str](), []
    has_vectors = plan.course.velora is not None
    for item in items(now.course, turn):
        for micro, way in enumerate(legs(now, item, node)):
            peers |= {tensor_name(exchange.key): exchange.peer for exchange in exchanges(way, item.seq, micro)}
            if any(leg.op is Op.BACKWARD and piece.start <= leg.start < piece.stop for leg in way):
                sums |= {name(item.seq, micro) for name in (sum_name, *([vectors_name] if has_vectors else []))}
        if noted_after(now, item, node) is not None:
            updates.append(item.seq)
    peers |= {tensor_name(tensor.key): node for tensor in own_tensors(plan, turn, node)}
    has_head = head_update(plan, turn, node) is not None
    if not plan.placement.helpers:
        return Work(peers, frozenset(sums), tuple(updates), has_head)
    here = (*plan.placement.helped_by(node), *plan.placement.helpers_of(node))
    fitted: dict[int, list[int]] = {helper.start: [] for helper in plan.placement.helped_by(node)}
    held: dict[int, list[int]] = {helper.start: [] for helper in here}
    if plan.course.helper_settings.pairs == VELORA:
        sums |= {shown_name(-1, 0, helper.start) for helper in plan.placement.helpers_of(node)}
    for item in items(now.course, turn):
        if plan.course.helper_settings.pairs == VELORA:
            ways = enumerate(legs(now, item, node))
            sums |= {shown_name(item.seq, at, leg.start) for at, way in ways for leg in way if leg.op is Op.SHIP}
        for micro, way in enumerate(fit_legs(now, item, node)):
            peers |= {tensor_name(exchange.key): exchange.peer for exchange in exchanges(way, item.seq, micro)}
        for block in fits_noted_after(now, item, node).values():
            fitted[block].append(item.seq)
        for block in updated(now.course, item.kind, item.step).blocks:
            if block in held:
                held[block].append(item.seq)
    return Work(
        peers,
        frozenset(sums),
        tuple(updates),
        has_head,
        frozenset(fit_name(cell.seq, cell.micro, cell.block) for cell in fit_cells(plan, turn, node)),
        {block: tuple(seqs) for block, seqs in fitted.items()},
        {block: tuple(seqs) for block, seqs in held.items()},
    )


def head_update(plan: Plan, turn: Turn, node: str) -> Action | None:
    """Return the last update of the head in a train turn, at its owner; None if there is none."""
    now, update = turn.settled(plan), None
    for item in items(now.course, turn) if node == turn.owner else ():
        updates = (each for each in item_updates(now, item, node) if each.start == plan.course.head)
        update = next(updates, update)
    return update


def blocks_of(plan: Plan, trail: Trail, node: str) -> tuple[int, ...]:
    """Return the blocks that a node trains of which a trail has states."""
    return tuple(block for block in plan.placement.trained_at(node) if begin_name(block) in trail)


def blocks_with_state(placement: Placement, node: str, adapters: Collection[str]) -> list[int]:
    """Return the blocks that a node trains in which any of these configurations has weights."""
    return [block for block in placement.trained_at(node) if any(has_adapter(config, block) for config in adapters)]


def ends_of(plan: Plan, trail: Trail, node: str) -> tuple[int, ...]:
    """Return the blocks, and the head as the one above them, of which a trail has both ends of the turn."""
    return (*blocks_of(plan, trail, node), *([plan.course.head] if begin_name(plan.course.head) in trail else []))


def trail_problem(
    plan: Plan, work: Work, trail: Trail, node: str, *, adapters: Collection[str], kept: Collection[str] = ()
) -> str:
    """Say what a node's trail lacks, has too much, or contradicts; empty if it is that of its work.

    ``adapters`` are the configurations, which say what blocks have a state: each that it trains with weights to train.
    ``kept`` are the names of the tensors that the node was told to keep, of which it knows the digests.
    """
    blocks = blocks_with_state(plan.placement, node, adapters)
    noted = {block: work.fitted.get(block, work.updates) for block in blocks}
    names = {*work.peers, *work.sums, *map(begin_name, blocks), *([TAG_KEY] if {*work.peers.values()} - {node} else [])}
    names |= {name for block in blocks for name in end_names(block)}
    names |= {state_name(seq, block) for block, seqs in noted.items() for seq in seqs} | work.fits | work.held_names
    if work.has_head:
        names |= {begin_name(plan.course.head), *end_names(plan.course.head)}
    if odd := sorted(names ^ trail.keys()):
        return f"node {node} reports {'no ' if odd[0] in names else ''}{odd[0][:60]!r}, against the plan"
    tagged = (name for name in trail if is_tag(trail[name]))
    if odd := sorted(name for name in tagged if work.peers.get(name, node) == node or name in kept):
        return f"node {node} reports no digest of {odd[0]!r}"
    if len(adapters) == 1 and (problem := _shown_problem(work, trail, node)):
        return problem
    for block, begin, end in ends(plan, trail, node):
        is_head = block == plan.course.head
        if not is_head and end != (trail[state_name(noted[block][-1], block)] if noted[block] else begin):
            return f"node {node} reports two states of block {block} at the end of a turn"
    return ""


def _shown_problem(work: Work, trail: Trail, node: str) -> str:
    """Say where vectors of pairs change but in the first item; each kind of adapters has its own, so of one alone."""
    places = [name.split() for name in work.sums if name.startswith("shown ")]
    for block in sorted({int(block) for _, _, block in places}):
        order = shown_order(trail, block)
        first = min(
            (int(at.partition(".")[0]) for _, at, unit in places if unit == str(block) and at != "begin"), default=0
        )
        for before, name in itertools.pairwise(order):
            may_change = trail[before] == NOTHING and name.startswith(f"shown {first}.")
            if trail[before] != trail[name] and not may_change:
                return f"node {node} has other vectors of the pairs of block {block} after {name!r} than before"
    return ""


def ends(plan: Plan, trail: Trail, node: str) -> Iterator[tuple[int, str, str]]:
    """Yield block, digest at the beginning and at the end of a turn, of each block with a state, and of the head."""
    for block in ends_of(plan, trail, node):
        weights, rest = (trail[name] for name in end_names(block))
        yield block, trail[begin_name(block)], state_digest(weights, rest)


def ends_differ(works: Mapping[str, Work], trails: Mapping[str, Trail]) -> Finding | None:
    """Return the first link whose two ends have different digests of a tensor; None if there is none.

    A tag is compared where the tensor is that of a drawn cell (``judge``).
    """
    for node, work in works.items():
        for name, peer in work.peers.items():
            told = trails[node][name], trails[peer].get(name, "")
            if told[0] != told[1] and not any(map(is_tag, told)):
                return Finding((node, peer), f"nodes {node} and {peer} say different things of {name}")
    return None


def held_differ(
    placement: Placement, works: Mapping[str, Work], trails: Mapping[str, Trail], *, but_begin: Collection[int] = ()
) -> Finding | None:
    """Return the first weights of a helper of which it and their host say different things; None if there are none.

    Of the blocks ``but_begin`` those at the beginning of the turn are not compared: until the first update in a
    placement a host has a sum of users as it or the helper before computed it, perhaps in another numeric class.
    """
    for helper in placement.helpers:
        host, seqs = placement.host_of(helper.start), works[helper.node].held[helper.start]
        for name in (held_name(seq, helper.start) for seq in (*seqs, *([] if helper.start in but_begin else [-1]))):
            if trails[host][name] != trails[helper.node][name]:
                return Finding((helper.node, host), f"nodes {helper.node} and {host} say different things of {name}")
    return None


def statement(run_id: str, plan: Plan, turn: Turn, node: str, trail: Trail) -> str:
    """Return what a node signs of a turn, as JSON: its peers, and digests of the states at both ends and of the trail.

    The end of a block has the digests of weights and of optimizer state. A statement of a node with three blocks has
    some 1 kB.
    """
    blocks = ends_of(plan, trail, node)
    table = {
        "run": run_id,
        "node": node,
        "placement": plan.placement.placement_number,
        "turn": turn.index,
        "steps": [turn.first_step, turn.end_step],
        "peers": sorted({*work_of(plan, turn, node).peers.values()} - {node}),
        "begin": {str(block): trail[begin_name(block)] for block in blocks},
        "end": {str(block): [trail[name] for name in end_names(block)] for block in blocks},
        "trail": hashlib.sha256(json.dumps([*trail.items()]).encode()).hexdigest(),
    }
    return json.dumps(table, sort_keys=True, separators=(",", ":"))


# ---- comparison ------------------------------------------------------------------------------------


class RepeatTask(NamedTuple):
    """What is asked of a host that repeats a cell.

    Attributes:
        given: digest of what others hand in, by name in the trail, and the secret of tags.
        told: digest of what the host of the cell has computed, by name, of tensors as who got them tells it; and its
            tags (``tag_name``).
        peers: name of a tensor -> the node that exchanged it with the host, or the host itself, which hands it in.
    """

    cell: Cell
    place: CellPlace
    given: Mapping[str, str]
    told: Mapping[str, str]
    peers: Mapping[str, str]


def question(plan: Plan, turn: Turn, cell: Cell, work: Work, trails: Mapping[str, Trail]) -> RepeatTask:
    """Make the question for a cell from the trails of all nodes, which have no problem."""
    seq, tensors, trail = cell.seq, cell_exchanges(plan, turn, cell), trails[cell.node]
    is_fit, block_of_fit = cell.is_fit, cell.block
    peers = {tensor_name(exchange.key): exchange.peer for exchange in tensors}
    kept = {name: trails[peer][name] for name, peer in peers.items()}
    tagged = [name for name in peers if is_tag(trail[name])]
    known, noted = blocks_of(plan, trail, cell.node), work.updates
    name_of: Callable[[int, int], str] = sum_name
    if is_fit:
        blocks, noted = tuple(block for block in known if block == block_of_fit), work.fitted[block_of_fit]
        name_of, order = functools.partial(fit_name, block=block_of_fit), fit_order(trail, seq, block_of_fit)
    else:
        blocks = tuple(block for block in known if block not in work.fitted)
        order = micro_order(trail, seq)
    earlier = [item for item in noted if item < seq]
    given = [state_name(earlier[-1], block) if earlier else begin_name(block) for block in blocks]
    given += (held := _held_names(plan, turn, cell, work))
    told, before, last = held if is_fit else [], -1, -1
    if not is_fit:
        for block in ships_of(plan, turn, cell):
            order_of, name = shown_order(trail, block), shown_name(seq, cell.micro, block)
            given += [order_of[order_of.index(name) - 1], name]
            told.append(name)
    if cell.micro in order:
        at, last = order.index(cell.micro), order[-1]
        before = order[at - 1] if at else -1
        computed = [name_of(seq, cell.micro), *(state_name(seq, block) for block in blocks if seq in noted)]
        told += computed
        given += [*computed, name_of(seq, last), *([name_of(seq, before)] if at else [])]
        if plan.course.velora is not None and not is_fit:
            around = (*vectors_around(order, cell.micro), cell.micro)
            told.append(vectors_name(seq, cell.micro))
            given += [vectors_name(seq, micro) for micro in dict.fromkeys(around) if micro >= 0]
    return RepeatTask(
        cell,
        CellPlace(turn.index, seq, cell.micro, before, last, is_fit, block_of_fit),
        {name: trail[name] for name in [*given, *([TAG_KEY] if tagged else [])]} | kept,
        {
            **{name: trail[name] for name in told},
            **{name: kept[name] for name, exchange in zip(peers, tensors, strict=True) if not exchange.comes},
            **{tag_name(name): trail[name] for name in tagged},
        },
        peers,
    )


def _held_names(plan: Plan, turn: Turn, cell: Cell, work: Work) -> list[str]:
    """Return the names of the weights that a host holds for a cell; of a helper those before and after its update."""
    if cell.is_fit:
        seqs = [-1, *work.held[cell.block]]
        before = max(seq for seq in seqs if seq < cell.seq)
        return [held_name(seq, cell.block) for seq in (before, cell.seq) if seq in seqs]
    now, item = item_of(plan, turn, cell.seq)
    lent = (block for block in work.held if block not in work.fitted)
    return [held_name(held_since(now, turn, item, block), block) for block in lent]


_MAX_NAME: Final = 40
"""Characters of an entry of a trail: the longest is ``vectors 123456789.65535``, or its tag."""


class RepeatResult(NamedTuple):
    """What a host that repeats a cell has computed: its digest, and the relative distance to what was handed in."""

    found: str
    distance: float = 0.0


def read_results(text: str, node: str, task: RepeatTask) -> dict[str, RepeatResult]:
    """Parse what a host has repeated; raises ``IntegrityError`` unless it has a digest of all that was asked.

    It may have more, as of a block of which the host told no state; names stand in messages.
    """
    results: dict[str, RepeatResult] = {}
    for name, value in read_object(text, f"what node {node} has repeated").items():
        is_result = isinstance(value, list) and [type(part) for part in value] == [str, float]
        if not is_result or not 0.0 <= value[1] <= 1.0 or len(name) > _MAX_NAME or not name.isprintable():
            raise IntegrityError(f"node {node} answers {name[:60]!r} with no digest and distance")
        results[name] = RepeatResult(*value)
    if missing := [name for name in task.told if name not in results]:
        raise IntegrityError(f"node {node} has not repeated {missing[0]} of node {task.cell.node}")
    return results


class Finding(NamedTuple):
    """What is wrong, and with which nodes: one, or several of which one lies.

    Attributes:
        nodes: none = nothing is wrong with the result, but ``text`` is worth a note.
        is_computed: whether a node has computed otherwise, from what both agree on.
    """

    nodes: tuple[str, ...]
    text: str
    is_computed: bool = False


class Tolerance(NamedTuple):
    """Permitted relative distances of what a node told and another one computed: tensors, sums, states, pairs."""

    tensors: float
    sums: float
    states: float
    pairs: float = 0.0

    def of(self, name: str) -> float:
        """Return that of an entry of a trail."""
        kind = name.partition(" ")[0]
        if kind == Payload.PAIRS:
            return self.pairs
        return self.sums if kind in ("sum", "fit") else self.states if kind in ("state", "held") else self.tensors


EQUAL_BITS: Final = Tolerance(0.0, 0.0, 0.0)
_ACROSS: Final[Mapping[str, Tolerance]] = {
    "float32": Tolerance(tensors=2e-5, sums=5e-5, states=2e-5, pairs=2e-5),
    "float64": Tolerance(tensors=1e-12, sums=1e-12, states=1e-12, pairs=1e-12),
}
"""By ``model.dtype``, of nodes of different numeric classes or numbers of threads; measured: record 0122."""
_ROUNDED: Final[Mapping[str, float]] = {"bfloat16": 3e-4, "float16": 1e-4, "int8": 1e-3}
"""By ``wire.dtype``, of tensors: where two results differ in the last bits, some elements round to the other side."""
_ROUNDED_PAIRS: Final[Mapping[str, float]] = {"bfloat16": 6e-4}
"""By ``offload.pairs``; with products in another order 1.2e-6 of exact pairs, 2.2e-4 of rounded ones."""
_PRODUCTS: Final = Tolerance(tensors=3e-2, sums=0.15, states=2e-5, pairs=3e-2)
"""Where products are rounded to bfloat16, which each block does again; measured: record 0137."""


def smallest_norm(course: Course) -> float:
    """Return the least norm by which a difference of gradients is divided, as a share of that of all of them.

    The gradient of a key's bias is zero, and what is computed for it is rounding alone.
    """
    return 1.0 if course.rounds_products else 1e-2


def tolerance(dtype: str, course: Course, first: tuple[str, int], second: tuple[str, int]) -> Tolerance:
    """Return the permitted distances of two hosts' results, each (numeric class, threads)."""
    if first == second:
        return EQUAL_BITS
    if course.rounds_products:
        return _PRODUCTS
    across = _ACROSS[dtype]
    return across._replace(
        tensors=max(across.tensors, _ROUNDED.get(course.wire_dtype, 0.0)),
        pairs=max(across.pairs, _ROUNDED_PAIRS.get(course.helper_settings.pairs, 0.0)),
    )


def judge(task: RepeatTask, results: Mapping[str, RepeatResult], permitted: Tolerance) -> Finding | None:
    """Compare a repeated cell with what its host told; None = all is right."""
    cell = task.cell
    for name, peer in task.peers.items():  # before what follows from it
        if (tag := tag_name(name)) in task.told and results[tag].found != task.told[tag]:
            return Finding((cell.node, peer), f"nodes {cell.node} and {peer} say different things of {name}")
    for name, (digest, distance) in results.items():
        if is_tag(name):
            continue
        if digest != task.told.get(name) and distance > permitted.of(name):
            text = (
                f"node {cell.node} computed another result than it should have in item {cell.seq}, micro-batch "
                f"{cell.micro} ({name}, relative distance {distance:.1e})"
            )
            return Finding((cell.node,), text, is_computed=True)
    return None


def settle(first: Finding, second: Finding | None, checker: str) -> Finding:
    """Decide between what a checker says, and what the third finds in the same cell.

    Two that say the same are believed. If the third finds nothing, a checker that says that a host computed otherwise
    has lied: both had the same digests of what goes in. What somebody hands in to one node and not to another one
    proves nothing, and the third has repeated the cell: nobody is named.
    """
    if second is None and first.is_computed:
        return Finding((checker,), f"node {checker} says that {first.text}; a third node finds the same as the host")
    if second is None:
        return Finding((), f"node {checker} says that {first.text}; a third node got it and finds nothing wrong")
    if second.nodes in (first.nodes, (checker,)):
        return second
    return Finding(tuple(dict.fromkeys((*first.nodes, checker, *second.nodes))), f"{first.text}; {second.text}")


MAX_TRAIL_BYTES: Final = 6 << 20
"""Most bytes of a trail as JSON: it goes in one report, and a message has 8 MiB."""
_ENTRY_BYTES: Final = 100
"""Most bytes of an entry: a name of up to 29 (``vectors 123456789.65535``), a digest of 64 digits, six signs."""


def longest_trail_bytes(course: Course, num_items: int, *, has_helpers: bool) -> int:
    """Return the most bytes that a node's trail of a turn of so many items has, wherever the blocks are.

    Example: six blocks, four micro-batches, 10 items: 10 x (4 x 9 + 6) + 42 entries of 100 bytes, 46 kB.
    """
    blocks, projects = course.num_blocks, course.helper_settings.pairs == VELORA
    micro = 9 + 2 * bool(course.invertible) + (course.velora is not None)
    micro += (2 + projects) * blocks * has_helpers
    per_item = course.microbatches * micro + blocks * (1 + has_helpers)
    return _ENTRY_BYTES * (num_items * per_item + 6 * (blocks + 1))


# ---- jobs ------------------------------------------------------------------------------------------

_LEAVE = "leave [audit] out"


def check_job(job: Any) -> None:
    """Refuse an audit of what can't be repeated from one cell, or not be taken back; raises ``JobError``."""
    if job.audit is None:
        return
    if job.recovery.copies == "none":
        raise JobError(
            f"[audit] goes back to the last turn that was agreed on; leave recovery.copies = 'none' out, or {_LEAVE}"
        )


def check_course(job: Any, course: Course, _: Any) -> None:
    """Refuse a course whose run can't go back to the end of a turn, or with too long turns; raises ``PlanError``."""
    if job.audit is None:
        return
    if why := stay_reason(course):
        raise PlanError(f"[audit] goes back to the last turn that was agreed on, which can't be: {why}; {_LEAVE}")
    if job.placement.microbatches == AUTO_PLACEMENT:
        most = max(course.microbatches, min(MAX_CHOSEN_MICROBATCHES, course.batch_size))
        course = replace(course, microbatches=most)
    has_helpers, num_items = job.offload.is_on, min(course.local_iterations, course.num_steps)
    fixed, size = (longest_trail_bytes(course, items, has_helpers=has_helpers) for items in (0, num_items))
    if size > MAX_TRAIL_BYTES:
        items = (MAX_TRAIL_BYTES - fixed) * num_items // (size - fixed)
        remedy = f"set train.local_iterations to {items:,} at most" if items > 0 else "lower train.microbatches"
        raise PlanError(
            f"[audit]: what a node reports of a turn of {num_items:,} steps takes {format_bytes(size)}, one report has "
            f"room for {format_bytes(MAX_TRAIL_BYTES)}; {remedy}, or {_LEAVE}"
        )


def check_plan(job: Any, plan: Plan, model: Any) -> None:
    """Refuse a given plan with what the planner leaves out of an audited run; raises ``PlanError``."""
    if job.audit is None:
        return
    check_course(job, plan.course, model)
    if any(placement.has_replicas for placement in plan.placements):
        raise PlanError(f"[audit] compares the work of single hosts, and the plan has replicas; plan anew, or {_LEAVE}")
    if any(placement.cache is not None for placement in plan.placements):
        raise PlanError(f"[audit] repeats work from what a neighbour sent, and the plan has a cache; {_LEAVE}")
    if any(helper.stop - helper.start > 1 for each in plan.placements for helper in each.helpers):
        raise PlanError(f"[audit] repeats a helper's work block by block; plan anew, or {_LEAVE}")


AGAIN: Final = "block of another host, whose work is repeated"
_OPEN: Final = 2
"""Turns that are open at once where a run can go back."""


def memory_terms(course: Course, share: Any, sizes: Any) -> Iterable[Term]:
    """Yield the terms of an audit: a slice of another host, and what is kept of two turns until they are checked."""
    if not share.audit:
        return
    yield from _audit_terms_of_helpers(course, share, sizes)
    micro, items = course.microbatch_sizes(), course.local_iterations
    tokens, reach = micro[0] * course.max_length, ever_trained(course)
    num_own, hosted = overlap(reach.ranges, [(share.start, share.stop)]), share.stop - share.start
    noted = (_OPEN * items + 1) * (hosted - sum(stop - start for start, stop in share.helped))
    yield Term("buffers", "states of a block after the items of two turns", noted, sizes.snapshot_bytes)
    summed = _OPEN * items * len(micro) * (num_own - overlap(reach.ranges, share.helped))
    yield Term("buffers", "sums of gradients of a block", summed, sizes.adapter_bytes)
    if course.velora is not None:
        yield Term("buffers", "VeLoRA's vectors of a block", _OPEN * items * len(micro) * hosted, sizes.vectors_bytes)
    drawn = math.ceil(share.audit * items * len(micro))
    ends = 2 * (bool(hosted) + share.is_owner)
    yield Term("buffers", "tensors of drawn micro-batches", _OPEN * drawn * ends, round(sizes.tensor_bytes(tokens)))
    if hosted and share.is_owner:
        turns, top = _OPEN if len(course.owners) == 1 else 1, course.sent_tokens(course.head, course.max_length)
        down = bool(course.invertible and not share.start)
        for ends, width in (
            ((share.start == share.private_blocks) + down, tokens),
            (2 * (share.stop == course.head), micro[0] * top),
        ):
            number, size = turns * items * len(micro) * ends, round(sizes.tensor_bytes(width))
            yield Term("buffers", "tensors between own blocks and embedding or head", number, size)
    if share.again is None:
        return
    count, trained = share.again.stop - share.again.start, overlap(reach.ranges, [share.again])
    yield Term("weights", AGAIN, count, sizes.block_bytes)
    yield Term("adapters", AGAIN, count, sizes.adapter_bytes)
    yield Term("optimizer", AGAIN, trained, sizes.adapter_bytes + sizes.adapter_state_bytes)
    yield Term("activations", AGAIN, max(1, trained), round(sizes.kept_bytes(tokens)))
    yield Term("buffers", "states of such a block before and after", 2 * count, sizes.snapshot_bytes)
    yield Term("buffers", "sums of gradients of such a block", 3 * trained, sizes.adapter_bytes)
    yield Term("buffers", "tensors of a repeated micro-batch", 4, round(sizes.tensor_bytes(tokens)))


def _audit_terms_of_helpers(course: Course, share: Any, sizes: Any) -> Iterable[Term]:
    """Yield the terms of an audit with helpers: what a host holds, a helper fits, and a host repeats of helpers."""
    micro, items, reach = course.microbatch_sizes(), course.local_iterations, ever_trained(course)
    pair, drawn = round(sizes.pair_bytes(micro[0] * course.max_length)), math.ceil(share.audit * items * len(micro))
    lent, fitted = overlap(reach.ranges, share.helped), overlap(reach.ranges, itertools.chain(*share.helps))
    noted = _OPEN * items + 1
    yield Term("buffers", "adapter that is held of a helper in two turns", noted * (lent + fitted), sizes.helped.sent)
    yield Term("buffers", "states of a block that is fitted in two turns", noted * fitted, sizes.snapshot_bytes)
    sums = _OPEN * items * len(micro) * fitted
    yield Term("buffers", "sums of gradients of a block that is fitted", sums, sizes.helped.gradients)
    yield Term("buffers", "pairs of drawn micro-batches", _OPEN * drawn * (lent + fitted), pair)
    again = 0 if share.again is None else overlap(share.helped_again, [share.again])
    yield Term("buffers", "pairs of a repeated micro-batch", 2 * again, pair)
    yield Term("adapters", "adapter of a block of another host that a helper fits", again, sizes.helped.hosted)
    if not share.fits_again:
        return
    of_fit = "adapter of a helper, whose work is repeated"
    yield Term("adapters", of_fit, share.fits_again, sizes.helped.held)
    both = sizes.helped.gradients + sizes.sets_state_bytes
    yield Term("optimizer", of_fit, share.fits_again, both)
    yield Term("buffers", "states of a repeated fit before and after", 3, sizes.snapshot_bytes)
    yield Term("buffers", "sums of gradients of a repeated fit", 4, sizes.helped.gradients)
    yield Term("buffers", "pairs of a repeated fit", 3, pair)


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Say how much of the work was repeated, and with which result."""
    figures = report.get("audit")
    if not figures:
        return []
    return [
        f"audit: {figures['checked']} of {figures['drawn']} drawn micro-batches repeated by other hosts, "
        f"{figures['disagreed']} with another result; turns waited {format_seconds(figures['seconds'])} for it"
    ]


TECHNIQUE: Final = Technique(
    name="audit",
    evaluation_sections={"audit": None},  # without turns of training nothing is repeated
    check_job=check_job,
    check_course=check_course,
    check_plan=check_plan,
    memory_terms=memory_terms,
    report_lines=report_lines,
)
