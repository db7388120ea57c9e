"""Units of a model, in the order in which a hidden state passes them: embedding, blocks, head.

Each unit has a number on one axis, so that "below" and "above" mean the same for all units::

    -1          0 1 2 ... N-1      N
    embedding   blocks             head

The units that train at a step may be any set, not only the top of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

EMBEDDING: Final = -1
"""Unit of the embedding, below all blocks."""


class Range(NamedTuple):
    """Consecutive units ``[start, stop)``."""

    start: int
    stop: int


def head_of(num_blocks: int) -> int:
    """Return the unit of the head, above all blocks: ``num_blocks``."""
    return num_blocks


def unit_name(unit: int, num_blocks: int) -> str:
    """Name a unit: ``embedding``, ``block 3`` or ``head``."""
    if unit == head_of(num_blocks):
        return "head"
    return "embedding" if unit == EMBEDDING else f"block {unit}"


@dataclass(frozen=True, slots=True)
class Units:
    """A set of units of a model, as disjoint ranges in ascending order.

    Attributes:
        num_blocks: number of blocks of the model, N.
        ranges: within ``[-1, N + 1)``; adjacent ranges are joined.

    Example: the two top blocks of four, and the head: ``Units(4, (Range(2, 5),))``.
    """

    num_blocks: int
    ranges: tuple[Range, ...] = ()

    @staticmethod
    def of(num_blocks: int, units: Iterable[int]) -> Units:
        """Return the units with these numbers; raises ``ValueError`` for one outside ``[-1, num_blocks]``."""
        ranges: list[Range] = []
        for unit in sorted(set(units)):
            if not EMBEDDING <= unit <= head_of(num_blocks):
                raise ValueError(f"unit {unit} is not in [-1, {num_blocks}]")
            if ranges and ranges[-1].stop == unit:
                ranges[-1] = Range(ranges[-1].start, unit + 1)
            else:
                ranges.append(Range(unit, unit + 1))
        return Units(num_blocks, tuple(ranges))

    @staticmethod
    def top(num_blocks: int, depth: int) -> Units:
        """Return the head and the ``depth`` blocks below it."""
        return Units(num_blocks, (Range(num_blocks - depth, num_blocks + 1),))

    def __contains__(self, unit: object) -> bool:
        return isinstance(unit, int) and any(start <= unit < stop for start, stop in self.ranges)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(range(start, stop) for start, stop in self.ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    @property
    def has_embedding(self) -> bool:
        """Whether the embedding is in the set."""
        return EMBEDDING in self

    @property
    def has_head(self) -> bool:
        """Whether the head is in the set."""
        return head_of(self.num_blocks) in self

    @property
    def lowest(self) -> int:
        """The lowest unit; ``num_blocks + 1``, one past the head, if the set is empty."""
        return self.ranges[0].start if self.ranges else head_of(self.num_blocks) + 1

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks in the set, ascending."""
        return tuple(self.within(0, self.num_blocks))

    def ranges_within(self, start: int, stop: int) -> tuple[Range, ...]:
        """Return the ranges of the set in ``[start, stop)``.

        Example: of the units [2, 5), the range in [0, 3) is [2, 3).
        """
        cut = (Range(max(start, first), min(stop, last)) for first, last in self.ranges)
        return tuple(piece for piece in cut if piece.start < piece.stop)

    def within(self, start: int, stop: int) -> Units:
        """Return the units of the set in ``[start, stop)``."""
        return Units(self.num_blocks, self.ranges_within(start, stop))


def units_text(units: Units) -> str:
    """Write units in words: ``embedding, blocks 0 to 2``, or ``block 3, head``."""
    named = []
    for start, stop in units.ranges:
        blocks = range(max(0, start), min(stop, units.num_blocks))
        named += [unit_name(EMBEDDING, units.num_blocks)] if start == EMBEDDING else []
        if len(blocks) > 1:
            named.append(f"blocks {blocks[0]} to {blocks[-1]}")
        named += [unit_name(block, units.num_blocks) for block in blocks[:1] if len(blocks) == 1]
        named += [unit_name(units.num_blocks, units.num_blocks)] if stop > units.num_blocks else []
    return ", ".join(named)
