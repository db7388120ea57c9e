"""A placement: who carries a course out, from which turn on, as a value with a digest.

No result depends on it: every split of the blocks among nodes gives the weights that one process would have given.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringtune.errors import PlanError
from ringtune.files.digests import json_digest
from ringtune.files.strict import read_dataclass, with_renamed_key
from ringtune.schedule.helping.helpers import Helper, check_helpers, helpers_from_json, helpers_to_json
from ringtune.schedule.passage import PrefixCache
from ringtune.schedule.saving import check_ranges, in_ranges, ranges_from_json, ranges_to_json
from ringtune.schedule.units import Range

CREDITS = 8
_LEFT_OUT = ("recompute", "state_on_disk", "helpers", "cache", "copies")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """The blocks ``[start, stop)`` that one node hosts; empty if ``start == stop``.

    Attributes:
        node: the host.
        start: the lowest block.
        stop: one past the highest block.
        share: how much of the micro-batches it takes, where its stage has several hosts; see ``stages.dealing``.
    """

    node: str
    start: int
    stop: int
    share: int = 1

    @property
    def num_blocks(self) -> int:
        """How many blocks the slice holds."""
        return self.stop - self.start

    @property
    def text(self) -> str:
        """Which blocks the slice holds, in words: ``[2, 4)``, or ``none``."""
        return f"[{self.start}, {self.stop})" if self.num_blocks else "none"

    def to_json(self) -> dict[str, Any]:
        """Write the slice as a JSON-able table; ``share`` is left out where it is 1, so that digests last."""
        value = dataclasses.asdict(self)
        return value if self.share != 1 else {key: item for key, item in value.items() if key != "share"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Who hosts which blocks, from a turn on.

    Attributes:
        slices: in ring order; they cover ``[private_blocks, N)`` without gaps. Neighbours with the same blocks are
            *replicas*: together they are one stage, and each micro-batch passes one of them.
        private_blocks: blocks ``[0, private_blocks)`` are run by each owner for its own rows; they never train.
        credits: hidden states in flight per (link, boundary).
        placement_number: counts the placements of a run from 0.
        first_turn: the train turn from which on it holds, counted from 0: with turns of 5 steps 3 is step 15.
        recompute: ranges of blocks of which a forward keeps the input only; the backward runs them again.
        state_on_disk: whether the optimizer state of units that rest is in files; only some methods let units rest.
        helpers: nodes that fit adapters of blocks that others host, in ascending order of their blocks.
        cache: how hosts keep hidden states of rows that come again; None = they do not.
        copies: whether hosts keep what they have trained at the ends of the last turns, and a copy for the host before
            them, so that the run goes on without a host that is lost.
    """

    slices: tuple[Slice, ...]
    private_blocks: int = 0
    credits: int = CREDITS
    placement_number: int = 0
    first_turn: int = 0
    recompute: tuple[Range, ...] = ()
    state_on_disk: bool = False
    helpers: tuple[Helper, ...] = ()
    cache: PrefixCache | None = None
    copies: bool = False
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse slices with a gap, an overlap, a share below 1, or two of one node.

        Raises:
            PlanError: names the block.
        """
        _check(self)
        values = (getattr(self, entry.name) for entry in dataclasses.fields(self) if entry.compare)
        object.__setattr__(self, "_hash", hash(tuple(values)))  # it is in the key of many caches

    def __hash__(self) -> int:
        """The hash of all fields, computed once."""
        return self._hash

    @property
    def stop(self) -> int:
        """One past the highest block that is placed."""
        return max((piece.stop for piece in self.slices if piece.num_blocks), default=self.private_blocks)

    @property
    def hosts(self) -> tuple[Slice, ...]:
        """The slices that are not empty, in ring order."""
        return tuple(piece for piece in self.slices if piece.num_blocks)

    def slice_of(self, node: str) -> Slice:
        """The slice of ``node``; an empty one above all blocks if it hosts nothing."""
        for piece in self.slices:
            if piece.node == node:
                return piece
        return Slice(node=node, start=self.stop, stop=self.stop)

    def hosts_above(self, block: int) -> int:
        """How many hosts a micro-batch passes from ``block`` up to the head, the block's own included.

        Example: with the slices [0, 2) and [2, 4) there are 2 for block 1, 1 for block 2, and 0 for the head (4).
        """
        return len({piece.stop for piece in self.slices if piece.num_blocks and piece.stop > block})

    @property
    def stages(self) -> tuple[tuple[Slice, ...], ...]:
        """The slices by stage, from the bottom up: one of each, or several where a stage has replicas."""
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
        """What a node helps with, in ascending order of the blocks."""
        return tuple(helper for helper in self.helpers if helper.node == node)

    def helpers_of(self, node: str) -> tuple[Helper, ...]:
        """Who helps with blocks that a node hosts, in ascending order of the blocks."""
        piece = self.slice_of(node)
        return tuple(helper for helper in self.helpers if piece.start <= helper.start < piece.stop)

    def joined_helpers(self, node: str = "") -> tuple[Helper, ...]:
        """Helpers as people are told of them: neighbouring blocks of one host and helper are one range.

        Args:
            node: which helper; empty = all of them.
        """
        found: list[Helper] = []
        for one in self.helped_by(node) if node else self.helpers:
            last = found[-1] if found else None
            if last and self._ends(last) == (one.node, one.start, self.host_of(one.start)):
                found[-1] = dataclasses.replace(last, stop=one.stop)
            else:
                found.append(one)
        return tuple(found)

    def _ends(self, helper: Helper) -> tuple[str, int, str]:
        return (helper.node, helper.stop, self.host_of(helper.start))

    def host_of(self, block: int) -> str:
        """The node that hosts a block, of replicas the first; empty for a private block."""
        return next((piece.node for piece in self.hosts if piece.start <= block < piece.stop), "")

    def to_json(self) -> dict[str, Any]:
        """Write the placement as a JSON-able table.

        ``recompute``, ``state_on_disk``, ``helpers``, ``cache`` and ``copies`` are left out where they have their
        defaults, so that the digests of placements without them last.
        """
        value = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self) if entry.compare}
        value["slices"] = [piece.to_json() for piece in self.slices]
        value["recompute"] = ranges_to_json(self.recompute)
        value["helpers"] = helpers_to_json(self.helpers)
        value["cache"] = None if self.cache is None else dataclasses.asdict(self.cache)
        return {key: item for key, item in value.items() if item or key not in _LEFT_OUT}

    @staticmethod
    def from_json(value: object, *, where: str = "placement") -> Placement:
        """Read what ``to_json`` or ``to_wire`` wrote.

        Raises:
            PlanError: a field is missing or unknown, or a rule is broken.
        """
        given: dict[str, object] = {}
        if isinstance(value, Mapping):
            value = with_renamed_key(value, "epoch", "placement_number")
        if isinstance(value, Mapping) and "recompute" in value:
            given["recompute"] = ranges_from_json(value["recompute"], where=f"{where}.recompute")
        if isinstance(value, Mapping) and "helpers" in value:
            given["helpers"] = helpers_from_json(value["helpers"], where=f"{where}.helpers")
        return read_dataclass(Placement, value, where=where, error=PlanError, given=given)

    def to_wire(self) -> dict[str, Any]:
        """Write the table with the keys that nodes and digests know: ``placement_number`` is ``epoch`` in it."""
        return with_renamed_key(self.to_json(), "placement_number", "epoch")

    @property
    def digest(self) -> str:
        """SHA-256 of the form for nodes, so that digests of earlier versions hold."""
        return json_digest(self.to_wire())


def _check(placement: Placement) -> None:
    for name, least in (("private_blocks", 0), ("credits", 1), ("placement_number", 0), ("first_turn", 0)):
        if getattr(placement, name) < least:
            raise PlanError(f"{name} is {getattr(placement, name)}, it has to be at least {least}")
    names = [piece.node for piece in placement.slices]
    if len(set(names)) != len(names) or not all(names):
        raise PlanError(f"every slice needs a node of its own, with a name; these have {names}")
    at, stage = placement.private_blocks, (-1, -1)
    for piece in placement.slices:
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
    check_ranges(placement.recompute, where="recompute", stop=placement.stop)
    check_helpers(placement.helpers, ((piece.node, piece.start, piece.stop) for piece in placement.hosts))
