"""The units of a model, in the order in which a hidden state passes them: embedding, blocks, head.

A unit is a number on one axis, so that "before" and "above" mean the same for all of them::

    -1          0 1 2 ... N-1      N
    embedding   blocks             head

What trains at a step is a set of units; nothing assumes that it is the top of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

EMBEDDING: Final = -1
"""The unit below all blocks."""


class Range(NamedTuple):
    """Consecutive units ``[start, stop)``."""

    start: int
    stop: int


def head_of(num_blocks: int) -> int:
    """The unit of the head, the one above all blocks: ``num_blocks``."""
    return num_blocks


def unit_name(unit: int, num_blocks: int) -> str:
    """Name a unit for people: ``embedding``, ``block 3`` or ``head``."""
    if unit == head_of(num_blocks):
        return "head"
    return "embedding" if unit == EMBEDDING else f"block {unit}"


@dataclass(frozen=True, slots=True)
class Units:
    """Some units of a model, as disjoint ranges in ascending order.

    Attributes:
        num_blocks: of the model, N.
        ranges: within ``[-1, N + 1)``; none touches the next one.

    Example: the two top blocks of four, and the head: ``Units(4, (Range(2, 5),))``.
    """

    num_blocks: int
    ranges: tuple[Range, ...] = ()

    @staticmethod
    def of(num_blocks: int, units: Iterable[int]) -> Units:
        """The units with these numbers.

        Raises:
            ValueError: a number is outside ``[-1, num_blocks]``.
        """
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
        """The head and the ``depth`` blocks below it."""
        return Units(num_blocks, (Range(num_blocks - depth, num_blocks + 1),))

    def __contains__(self, unit: object) -> bool:
        """Whether ``unit`` is one of these units."""
        return isinstance(unit, int) and any(start <= unit < stop for start, stop in self.ranges)

    def __iter__(self) -> Iterator[int]:
        """Yield these units in ascending order."""
        return itertools.chain.from_iterable(range(start, stop) for start, stop in self.ranges)

    def __bool__(self) -> bool:
        """Whether there is any unit."""
        return bool(self.ranges)

    @property
    def has_embedding(self) -> bool:
        """Whether the embedding is one of these units."""
        return EMBEDDING in self

    @property
    def has_head(self) -> bool:
        """Whether the head is one of these units."""
        return head_of(self.num_blocks) in self

    @property
    def lowest(self) -> int:
        """The lowest of these units; one past the head, ``num_blocks + 1``, if there is none."""
        return self.ranges[0].start if self.ranges else head_of(self.num_blocks) + 1

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks among these units, ascending."""
        return tuple(self.within(0, self.num_blocks))

    def ranges_within(self, start: int, stop: int) -> tuple[Range, ...]:
        """The ranges of these units in ``[start, stop)``.

        Example: of the units [2, 5), the range in [0, 3) is [2, 3).
        """
        cut = (Range(max(start, first), min(stop, last)) for first, last in self.ranges)
        return tuple(piece for piece in cut if piece.start < piece.stop)

    def within(self, start: int, stop: int) -> Units:
        """These units as far as they are in ``[start, stop)``."""
        return Units(self.num_blocks, self.ranges_within(start, stop))


def units_text(units: Units) -> str:
    """Name units for people: ``embedding, blocks 0 to 2``, or ``block 3, head``."""
    named = []
    for start, stop in units.ranges:
        blocks = range(max(0, start), min(stop, units.num_blocks))
        named += [unit_name(EMBEDDING, units.num_blocks)] if start == EMBEDDING else []
        if len(blocks) > 1:
            named.append(f"blocks {blocks[0]} to {blocks[-1]}")
        named += [unit_name(block, units.num_blocks) for block in blocks[:1] if len(blocks) == 1]
        named += [unit_name(units.num_blocks, units.num_blocks)] if stop > units.num_blocks else []
    return ", ".join(named)
