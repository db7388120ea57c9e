"""Placement: the nodes that carry a course out, from a turn on, as a value with a digest; helpers and activation cache.

No result depends on it: every split of the blocks among nodes gives the weights of one process.

``Passage``: the boundary where the micro-batches of an item enter the ring, and the one where their hidden state is
stored for a later visit::

    slices a [0,2)  b [2,4)  c [4,6)   owner o   the blocks [0, 5) are frozen

    first visit, keeps 4    o | E  >h0@a      a | <h0 f f >h2@b    b | <h2 f f >h4@c    c | <h4  W  f F >h6@o
    later visit, enters 4   o |               a |                  b |                  c | R  f F >h6@o

The coordinator decides it when it grants a turn, and the turn has it for each of its items. So a host that lost its
cache is not used from the next turn on.

``Helper`` (ColA): the host of the blocks computes forward and backward, except the gradients of its adapters: it sends
each adapter's input with the gradient of its output. The helper computes the gradient from these *pairs*, keeps the
optimizer state, updates the adapters and sends them back. Blocks [0, 2) of host a, helper z::

    a | ... B12.0[0,2)  C12.0[0,2)  >c12.0#0@z                              <w12#0@z  U12[0,2)
    z |                                         <c12.0#0@a  A12.0[0,2)  U12[0,2)  >w12#0@a

Source: ColA, section 3.2 and Proposition 1.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NamedTuple

from ringtune.errors import PlanError
from ringtune.schedule.actions import Leg, Op
from ringtune.schedule.saved_activations import check_ranges, in_ranges
from ringtune.schedule.units import Range
from ringtune.storage.strict import (
    LATER,
    Bounds,
    OneOf,
    check_fields,
    json_digest,
    read_dataclass,
    to_table,
    with_renamed_key,
)

EXACT: Final = "float32"
ROUNDED: Final = "bfloat16"
ITEM_BYTES: Final = {"float64": 8, EXACT: 4, ROUNDED: 2}
"""Type of cached hidden states -> bytes of a number."""

DEFAULT_MAX_BYTES: Final = 1 << 30


class Passage(NamedTuple):
    """Boundaries where micro-batches of an item enter the ring and are stored; 0 = at the embedding, and nowhere.

    Attributes:
        enters: boundary at which its host reads the stored hidden state.
        keeps: boundary at which its host stores the hidden state.
    """

    enters: int = 0
    keeps: int = 0


WHOLE: Final = Passage()
"""Passage from the embedding on, without storing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationCacheSettings:
    """Settings of hosts that store hidden states of rows with later visits.

    Attributes:
        max_bytes: most bytes stored at a host.
        dtype: of stored states, one of ``ITEM_BYTES``; the type of the computation changes no result.
    """

    max_bytes: Annotated[int, Bounds(ge=0)] = DEFAULT_MAX_BYTES
    dtype: Annotated[str, OneOf(ITEM_BYTES)] = EXACT

    def __post_init__(self) -> None:
        check_fields(self, where="cache", error=PlanError)


def check_passage(passage: Passage, highest: int) -> None:
    """Refuse a passage that no coordinator decides; raises ``PlanError``.

    ``highest`` is the highest boundary with only blocks without gradient below it, and a block above it.
    """
    if not (0 <= passage.enters <= highest and 0 <= passage.keeps <= highest) or (passage.enters and passage.keeps):
        raise PlanError(
            f"an item enters at block {passage.enters} and is kept at block {passage.keeps}, but the frozen blocks of "
            f"its way end at {highest}; use one version on all machines"
        )


def with_cache(parts: Iterable[Leg], passage: Passage) -> Iterator[Leg]:
    """Yield a segment's forward legs, with those that read or store the input of one block."""
    for leg in parts:
        for op, boundary in ((Op.READ, passage.enters), (Op.KEEP, passage.keeps)):
            if boundary and leg.start == boundary:
                yield Leg(op, boundary, boundary + 1)
        yield leg


@dataclass(frozen=True, kw_only=True, slots=True)
class Helper:
    """A node that trains the adapters of the blocks ``[start, stop)``, which another node hosts."""

    node: str
    start: int
    stop: int

    def has_block(self, block: int) -> bool:
        """Whether the helper trains the adapters of a block."""
        return self.start <= block < self.stop

    @property
    def text(self) -> str:
        """The blocks in words: ``[2, 4)``."""
        return f"[{self.start}, {self.stop})"


def check_helpers(helpers: Sequence[Helper], slices: Iterable[tuple[str, int, int]]) -> None:
    """Refuse helpers that are not in ascending order, or do not fit the slices; raises ``PlanError``.

    ``slices`` are (node, start, stop).
    """
    at = 0
    hosts = tuple(slices)
    for helper in helpers:
        if not helper.node or helper.start >= helper.stop or helper.start < at:
            raise PlanError(
                f"helper {helper.node!r} has the blocks {helper.text}; helpers need names and ascending ranges that "
                "don't overlap"
            )
        host = next((node for node, start, stop in hosts if start <= helper.start and helper.stop <= stop), "")
        if not host:
            raise PlanError(f"helper {helper.node} has the blocks {helper.text}, which no single node hosts")
        if host == helper.node:
            raise PlanError(f"node {host} hosts the blocks {helper.text}, so it can't be their helper; name another")
        at = helper.stop


CREDITS = 8


class Rack(NamedTuple):
    """The board, machine or switch with which a node is lost; nodes of one ``rack`` may be lost at once."""

    node: str
    rack: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Blocks ``[start, stop)`` that one node hosts; empty if ``start == stop``.

    Attributes:
        share: weight of the host in the division of micro-batches among replicas; see ``schedule.stages``.
    """

    node: str
    start: int
    stop: int
    share: Annotated[int, LATER] = 1

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.stop - self.start

    @property
    def text(self) -> str:
        """The blocks in words: ``[2, 4)``, or ``none``."""
        return f"[{self.start}, {self.stop})" if self.num_blocks else "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Hosts of all blocks, from a turn on.

    Attributes:
        slices: in ring order; they cover ``[private_blocks, N)`` without gaps. Adjacent slices with the same blocks are
            *replicas*, one stage; each micro-batch passes one of them.
        private_blocks: number p of blocks ``[0, p)`` that each owner runs for its own rows; they never train.
        credits: hidden states in flight per (link, boundary).
        placement_number: counts the placements of a run from 0.
        first_turn: first train turn in it, counted from 0: with turns of 5 steps 3 is step 15.
        recompute: ranges of blocks with forwards that keep only the input; the backward runs them again.
        state_on_disk: whether the optimizer state of units that do not train at a step is in files (HiFT).
        helpers: nodes that train adapters of others' blocks, in ascending order of blocks.
        copies: whether hosts keep their trained state of the last ends of turns, and a copy for the host before them,
            so that the run continues without a lost host.
        num_copies: with ``copies``, so many copies of each block and of the head, on other racks as far as there are
            any; 0 = one, at the next host, and at the next owner, wherever they are.
        racks: of nodes, sorted; a node that is not named shares none.
    """

    slices: tuple[Slice, ...]
    private_blocks: Annotated[int, Bounds(ge=0)] = 0
    credits: Annotated[int, Bounds(ge=1)] = CREDITS
    placement_number: Annotated[int, Bounds(ge=0)] = 0
    first_turn: Annotated[int, Bounds(ge=0)] = 0
    recompute: Annotated[tuple[Range, ...], LATER] = ()
    state_on_disk: Annotated[bool, LATER] = False
    helpers: Annotated[tuple[Helper, ...], LATER] = ()
    cache: Annotated[ActivationCacheSettings | None, LATER] = None
    copies: Annotated[bool, LATER] = False
    num_copies: Annotated[int, Bounds(ge=0), LATER] = 0
    racks: Annotated[tuple[Rack, ...], LATER] = ()
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse slices with a gap, an overlap, a share below 1, or two of one node; raises ``PlanError``."""
        check_fields(self, where="", error=PlanError)
        names = [piece.node for piece in self.slices]
        if len(set(names)) != len(names) or not all(names):
            raise PlanError(f"every slice needs a node of its own, with a name; these have {names}")
        at, stage = self.private_blocks, (-1, -1)
        for piece in self.slices:
            if piece.num_blocks < 0:
                raise PlanError(f"node {piece.node} has the reversed range [{piece.start}, {piece.stop})")
            if piece.share < 1:
                raise PlanError(f"the share of node {piece.node} is {piece.share}, it has to be at least 1")
            if piece.num_blocks and (piece.start, piece.stop) == stage:
                continue  # a replica
            stage = (piece.start, piece.stop) if piece.num_blocks else stage
            if piece.num_blocks and piece.start != at:
                kind = "gap" if piece.start > at else "overlap"
                raise PlanError(f"{kind} before block {piece.start} of node {piece.node}: expected block {at}")
            at = piece.stop if piece.num_blocks else at
        check_ranges(self.recompute, where="recompute", stop=self.stop)
        check_helpers(self.helpers, ((piece.node, piece.start, piece.stop) for piece in self.hosts))
        values = (getattr(self, entry.name) for entry in dataclasses.fields(self) if entry.compare)
        object.__setattr__(self, "_hash", hash(tuple(values)))  # a placement is in the key of many caches

    def __hash__(self) -> int:
        return self._hash

    @property
    def stop(self) -> int:
        """One past the highest block with a host."""
        return max((piece.stop for piece in self.slices if piece.num_blocks), default=self.private_blocks)

    @property
    def hosts(self) -> tuple[Slice, ...]:
        """Slices that are not empty, in ring order."""
        return tuple(piece for piece in self.slices if piece.num_blocks)

    def hosts_after(self, node: str) -> tuple[str, ...]:
        """Return the other hosts, from the one after a host in the ring on."""
        hosts = [piece.node for piece in self.hosts]
        at = hosts.index(node)
        return (*hosts[at + 1 :], *hosts[:at])

    def slice_of(self, node: str) -> Slice:
        """Return the slice of ``node``; an empty one above all blocks if it hosts nothing."""
        for piece in self.slices:
            if piece.node == node:
                return piece
        return Slice(node=node, start=self.stop, stop=self.stop)

    def hosts_above(self, block: int) -> int:
        """Number of hosts that a micro-batch passes from ``block`` up to the head, with the block's own.

        Example: with the slices [0, 2) and [2, 4) it is 2 for block 1, 1 for block 2, and 0 for the head (4).
        """
        return len({piece.stop for piece in self.slices if piece.num_blocks and piece.stop > block})

    @property
    def stages(self) -> tuple[tuple[Slice, ...], ...]:
        """Slices by stage, bottom to top; one slice each, several where a stage has replicas."""
        groups = itertools.groupby(self.hosts, key=lambda piece: piece.start)
        return tuple(tuple(group) for _, group in groups)

    @property
    def has_replicas(self) -> bool:
        """Whether some stage has several hosts."""
        return len(self.hosts) > len({piece.start for piece in self.hosts})

    def is_recomputed(self, block: int) -> bool:
        """Whether the backward of a block runs it again."""
        return in_ranges(block, self.recompute)

    def helped_by(self, node: str) -> tuple[Helper, ...]:
        """Return the entries of ``helpers`` of a helper, in ascending order of blocks."""
        return tuple(helper for helper in self.helpers if helper.node == node)

    def helpers_of(self, node: str) -> tuple[Helper, ...]:
        """Return the helpers of a host's blocks, in ascending order of blocks."""
        piece = self.slice_of(node)
        return tuple(helper for helper in self.helpers if piece.start <= helper.start < piece.stop)

    def trainer_of(self, block: int) -> str:
        """Return the node that updates a block's adapters: its helper, else its host."""
        return next((helper.node for helper in self.helpers if helper.has_block(block)), self.host_of(block))

    def trained_at(self, node: str) -> tuple[int, ...]:
        """Return the blocks that a node updates where they train, ascending: its own without a helper, and helped ones.

        Example: with the slices a [0, 2) and b [2, 4), and z as the helper of block 1: a 0; b 2 and 3; z 1.
        """
        piece = self.slice_of(node)
        lent = {block for helper in self.helpers_of(node) for block in range(helper.start, helper.stop)}
        fitted = (block for helper in self.helped_by(node) for block in range(helper.start, helper.stop))
        return tuple(sorted({*range(piece.start, piece.stop), *fitted} - lent))

    def held_at(self, node: str) -> tuple[int, ...]:
        """Return the blocks with adapters at a node, ascending: of its slice, and helped ones."""
        piece = self.slice_of(node)
        return tuple(sorted({*range(piece.start, piece.stop), *self.trained_at(node)}))

    @property
    def members(self) -> tuple[str, ...]:
        """The nodes with adapters: hosts in ring order, then helpers that host nothing."""
        return tuple(dict.fromkeys((*(piece.node for piece in self.hosts), *(helper.node for helper in self.helpers))))

    def joined_helpers(self, node: str = "") -> tuple[Helper, ...]:
        """Return helpers, of ``node`` or all, with adjacent blocks of one host and helper joined, for messages."""
        joined: list[Helper] = []
        for helper in self.helped_by(node) if node else self.helpers:
            last, key = joined[-1] if joined else None, (helper.node, helper.start, self.host_of(helper.start))
            if last and (last.node, last.stop, self.host_of(last.start)) == key:
                joined[-1] = dataclasses.replace(last, stop=helper.stop)
            else:
                joined.append(helper)
        return tuple(joined)

    def host_of(self, block: int) -> str:
        """Return the node that hosts a block, the first of replicas; empty for a private block."""
        return next((piece.node for piece in self.hosts if piece.start <= block < piece.stop), "")

    def to_json(self) -> dict[str, Any]:
        """Write as a JSON-compatible table."""
        return to_table(self)

    @staticmethod
    def from_json(value: object, *, where: str = "placement") -> Placement:
        """Parse the table of ``to_json`` or ``to_wire``; raises ``PlanError`` for fields that are not valid."""
        if isinstance(value, Mapping):
            value = with_renamed_key(value, "epoch", "placement_number")
        return read_dataclass(Placement, value, where=where, error=PlanError)

    def to_wire(self) -> dict[str, Any]:
        """Write as a table with the keys of nodes and digests: ``placement_number`` is ``epoch`` there."""
        return with_renamed_key(self.to_json(), "placement_number", "epoch")

    @property
    def digest(self) -> str:
        """SHA-256 of ``to_wire``, so that digests of earlier versions stay valid."""
        return json_digest(self.to_wire())
