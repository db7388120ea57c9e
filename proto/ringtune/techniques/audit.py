"""The audit: ``[audit]`` of a job, the work that is drawn to be computed again, and the comparison of the results.

A *cell* is the work of one host on one micro-batch of one item: forward and backward through its slice. Runs are equal
in bits on nodes of one numeric class, so another host can repeat a cell, and the update of its item::

    hidden state in  --.                            .--> hidden state out
    gradient in      --+--> cell (12, micro 3) -----+--> gradient out
    sum of gradients --+    of host b               '--> sum of gradients
    state of item 11 --'
    sum of gradients, state of item 11 --> update of item 12 --> state of item 12

Each node commits itself before it knows what is drawn: with the end of a turn it reports a *trail*, which has a digest
of each tensor that it sent or got, of the sum of gradients after each of its cells, and of weights with optimizer state
after each item. Tensors between nodes are in the trails of both ends. The coordinator draws the cells of a turn when it
grants the turn, for each host independently, and tells the neighbours of the host, not the host, which of the tensors
that they exchange with it they have to keep. After the turn the next host in the ring repeats the cell.

A host that scales its gradients in a turn does so in a cell, after the last cell of an item, or in the update; each
drawn cell is compared with its item's update, so one cell per turn finds all three, if all items of the turn are wrong.
With ``share`` s and n cells in a turn, s * n cells are drawn: with s = 0.02, 10 items and 4 micro-batches 0.8 cells.
``detection`` has the probability. What is not found, or late: a wrong number in few cells of one turn (probability s
for one), anything that an owner does in its own turns, whose rows nobody else has, and two neighbours that agree.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

from ringtune.errors import IntegrityError, JobError, PlanError
from ringtune.schedule.actions import Op, Payload, TensorKey
from ringtune.schedule.lowering import Legs, legs
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, StepKind, Turn, items
from ringtune.storage.strict import Bounds, check_fields
from ringtune.techniques.base import Technique


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditSettings:
    """``[audit]``: hosts repeat a part of each other's work, and one with another result is taken out of the run.

    Attributes:
        share: share of the micro-batches of each turn that the next host in the ring repeats for each host, with the
            update after it. One that all updates of a turn are wrong is found if at least one is drawn.
    """

    share: Annotated[float, Bounds(gt=0, le=1)] = 0.02

    def __post_init__(self) -> None:
        """Refuse a share out of range."""
        check_fields(self, where="audit", error=JobError)


# ---- what is drawn ---------------------------------------------------------------------------------


class Cell(NamedTuple):
    """The work of a host on one micro-batch of one item."""

    node: str
    seq: int
    micro: int


class CellPlace(NamedTuple):
    """A cell in its turn, and the micro-batches whose gradients were added up right before it, and last; -1 = none."""

    turn: int
    seq: int
    micro: int
    before: int = -1
    last: int = -1


class Exchange(NamedTuple):
    """A tensor that a host exchanges with ``peer`` in a cell; ``comes`` = the host receives it."""

    key: TensorKey
    peer: str
    comes: bool


def checker_of(placement: Placement, node: str) -> str:
    """Return the host that repeats the cells of ``node``: the next other one in the ring; empty if there is none."""
    hosts = [piece.node for piece in placement.hosts]
    if node not in hosts:
        return ""
    at = hosts.index(node)
    return next((name for name in (*hosts[at + 1 :], *hosts[:at]) if name != node), "")


def checked_by(placement: Placement, node: str) -> str:
    """Return the host whose cells ``node`` repeats; empty if there is none."""
    return next((piece.node for piece in placement.hosts if checker_of(placement, piece.node) == node), "")


def exchanges(way: Legs, cell: Cell) -> tuple[Exchange, ...]:
    """Return the tensors that a host exchanges with others in a cell, from its legs."""
    return tuple(
        Exchange(TensorKey(leg.payload, cell.seq, cell.micro, leg.start), leg.peer, leg.op is Op.RECEIVE)
        for leg in way
        if leg.op in (Op.SEND, Op.RECEIVE) and leg.payload in (Payload.HIDDEN, Payload.GRAD)
    )


def cells(plan: Plan, turn: Turn, node: str) -> tuple[Cell, ...]:
    """Return the cells of a host in a train turn that can be repeated; ``plan`` is the part of one placement.

    One whose hidden state or gradient comes from the host itself, as the owner of the rows, can't be.
    """
    if turn.kind is not StepKind.TRAIN or not plan.slice_of(node).num_blocks or node == turn.owner:
        return ()
    now = turn.settled(plan)
    return tuple(
        Cell(node, item.seq, micro)
        for item in items(now.course, turn)
        for micro, way in enumerate(legs(now, item, node))
        if way
    )


def item_of(plan: Plan, turn: Turn, seq: int) -> tuple[Plan, Item]:
    """Return the plan with the decisions of a turn, and the turn's item ``seq``; raises ``IntegrityError``."""
    now = turn.settled(plan)
    found = next((item for item in items(now.course, turn) if item.seq == seq), None)
    if found is None:
        raise IntegrityError(f"item {seq} is not in turn {turn.index}; use one version on all machines")
    return now, found


def draw(plan: Plan, turn: Turn, share: float, source: random.Random) -> tuple[Cell, ...]:
    """Draw the cells of a turn: for each host ``share`` of its cells in the mean, ascending.

    Example: of 40 cells with share 0.02 none with probability 0.2, one with 0.8. ``source`` has to be one that no node
    can predict.
    """
    found: list[Cell] = []
    for piece in plan.placement.hosts:
        if not checker_of(plan.placement, piece.node):
            continue
        own = cells(plan, turn, piece.node)
        number, rest = divmod(share * len(own), 1.0)
        count = int(number) + (source.random() < rest)
        found += sorted(source.sample(own, min(count, len(own))))
    return tuple(found)


def keys_to_keep(plan: Plan, turn: Turn, drawn: tuple[Cell, ...]) -> dict[str, tuple[TensorKey, ...]]:
    """Return by node the tensors that it has to keep of a turn, as the neighbour of a host with a drawn cell."""
    found: dict[str, list[TensorKey]] = {}
    for cell in drawn:
        for one in exchanges(way_of(plan, turn, cell), cell):
            found.setdefault(one.peer, []).append(one.key)
    return {node: tuple(keys) for node, keys in found.items()}


def way_of(plan: Plan, turn: Turn, cell: Cell) -> Legs:
    """Return the legs of a host in a cell."""
    now, item = item_of(plan, turn, cell.seq)
    return legs(now, item, cell.node)[cell.micro]


def detection(share: float, num_cells: int, wrong_turns: int) -> float:
    """Probability that a host is found whose updates are wrong in so many turns of ``num_cells`` cells each.

    Example: share 0.02, 40 cells, 5 turns: at least one of 5 turns with a drawn cell, 1 - 0.2^5 = 0.9997.
    """
    return 1.0 - max(0.0, 1.0 - share * num_cells) ** wrong_turns


# ---- trails ----------------------------------------------------------------------------------------

Trail = Mapping[str, str]
"""Name of what a node sent, got or computed in a turn -> SHA-256, hex; sums in the order of computing."""

MAX_TRAIL: Final = 1 << 17
"""Most entries of a trail: those of a turn of a hundred items of 64 micro-batches have a fifth of it."""
_SUM: Final = re.compile(r"sum [0-9]{1,9}\.[0-9]{1,9}")


def tensor_name(key: TensorKey) -> str:
    """Name of a tensor between two nodes in their trails."""
    return f"{key.payload} {key.seq}.{key.micro} {key.boundary}"


def sum_name(seq: int, micro: int) -> str:
    """Name of the sum of gradients after the cell of a micro-batch."""
    return f"sum {seq}.{micro}"


def state_name(seq: int, block: int) -> str:
    """Name of weights and optimizer state of a block after the update of an item."""
    return f"state {seq} {block}"


def begin_name(block: int) -> str:
    """Name of weights and optimizer state of a block at the beginning of a turn."""
    return f"begin {block}"


def micro_order(trail: Trail, seq: int) -> tuple[int, ...]:
    """Return the micro-batches of an item in the order in which a host added up their gradients."""
    prefix = f"sum {seq}."
    return tuple(int(name.removeprefix(prefix)) for name in trail if name.startswith(prefix))


def read_trail(text: str, node: str) -> Trail:
    """Parse a node's trail; raises ``IntegrityError``."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    is_trail = isinstance(found, dict) and len(found) <= MAX_TRAIL
    if not is_trail or not all(
        isinstance(value, str) and len(value) <= 64 and (not name.startswith("sum ") or _SUM.fullmatch(name))
        for name, value in found.items()
    ):
        raise IntegrityError(f"node {node} reports a trail that can't be read; use one version on all machines")
    return dict(found)


def ends(plan: Plan, turn: Turn, trail: Trail, node: str) -> Iterator[tuple[int, str, str]]:
    """Yield block, digest at the beginning and digest at the end of a turn, of each block that a host may train."""
    last = turn.end_seq - 1
    for block in plan.placement.trained_at(node):
        begin = trail.get(begin_name(block), "")
        states = (
            trail[name] for seq in range(last, turn.first_seq - 1, -1) if (name := state_name(seq, block)) in trail
        )
        yield block, begin, next(states, begin)


# ---- comparison ------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """One entry of a trail, as the host that repeats a cell has it.

    Attributes:
        given: digest of what it was given by the node that has it.
        found: digest of what it computed; empty = it was an input.
        distance: relative distance of both, at most 1.
    """

    given: str
    found: str = ""
    distance: float = 0.0


class Finding(NamedTuple):
    """What is wrong, and with which nodes: one, or two of which one lies about what it sent or got."""

    nodes: tuple[str, ...]
    text: str


TOLERANCE: Final[Mapping[str, float]] = {"float32": 2e-5, "float64": 1e-12}
"""By ``model.dtype``: relative distance of results of nodes of different numeric classes or numbers of threads."""


def tolerance(dtype: str, first: tuple[str, int], second: tuple[str, int]) -> float:
    """Return the permitted distance of two hosts' results: 0 = equal bits; each is (numeric class, threads)."""
    return 0.0 if first == second else TOLERANCE[dtype]


def judge(
    cell: Cell,
    peers: Mapping[str, str],
    trails: Mapping[str, Trail],
    results: Mapping[str, Compared],
    permitted: float,
) -> Finding | None:
    """Compare a repeated cell with the trails of the host and its neighbours; None = all is right.

    Args:
        cell: that was repeated.
        peers: name of a tensor -> the neighbour that exchanged it with the host.
        trails: by node.
        results: by name of the entry.
        permitted: relative distance of what the host and the one that repeated it computed.
    """
    where = f"item {cell.seq}, micro-batch {cell.micro}"
    own = trails.get(cell.node, {})
    for name, result in results.items():
        told = own.get(name, "")
        if peer := peers.get(name):
            theirs = trails.get(peer, {}).get(name, "")
            if told != theirs:
                return Finding((cell.node, peer), f"nodes {cell.node} and {peer} say different things of {name}")
            if result.given != theirs:
                return Finding((peer,), f"node {peer} hands in another tensor than the one that it told of, {name}")
        elif result.given != told:
            return Finding((cell.node,), f"node {cell.node} hands in something else than what it told of, {name}")
        if result.found and result.found != told and not result.distance <= permitted:
            return Finding(
                (cell.node,),
                f"node {cell.node} computed another result than it should have in {where} ({name}, relative distance "
                f"{result.distance:.1e})",
            )
    return None


# ---- jobs ------------------------------------------------------------------------------------------

_LEAVE = "leave [audit] out"


def check_job(job: Any) -> None:
    """Refuse an audit of what can't be repeated from one cell, or not be taken back; raises ``JobError``."""
    if job.audit is None:
        return
    if why := refusal(job):
        raise JobError(f"[audit] {why}, or {_LEAVE}")


def refusal(job: Any) -> str:
    """Say why a job can't be audited, with the remedy; empty if it can."""
    if job.recovery.copies == "none":
        return "goes back to the last turn that was agreed on; leave recovery.copies = 'none' out"
    if job.offload.mode != "off":
        return "has no digests of what helpers fit; set offload.mode = 'off'"
    if job.operations.policy != "standard":
        return "repeats whole blocks; use operations.policy = 'standard'"
    if job.cache.prefix != "off":
        return "repeats a cell from what a neighbour sent, not from a file of the host; set cache.prefix = 'off'"
    if job.memory.activations in ("velora", "both", "auto"):
        return "has no digests of VeLoRA's vectors; set memory.activations to 'none' or 'recompute'"
    if job.wire.dtype in ("int8", "float16"):
        return (
            f"compares what both ends of a link have, and wire.dtype = {job.wire.dtype!r} rounds at one of them; use "
            "bfloat16 or float32"
        )
    return ""


def check_plan(job: Any, plan: Plan) -> None:
    """Refuse a given plan with sums of several hosts, of which the planner makes none; raises ``PlanError``."""
    if job.audit is not None and any(one.has_replicas for one in plan.placements):
        raise PlanError(f"[audit] compares the work of single hosts, and the plan has replicas; plan anew, or {_LEAVE}")


TECHNIQUE: Final = Technique(name="audit", check_job=check_job, check_plan=check_plan)
