"""Counts of operations for each board, such that all are busy for nearly the same time in a step.

All boards together do as much as equal counts would let them. Example: two boards with equal slices, one twice as
fast, 8 micro-batches, 60 % of the compute, a forward is 0.4 of full::

    board    full   forward-only   busy, in full operations of the slow board
    slow     2      3              3.2
    fast     6      1              3.2
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.planner.knapsacks.counts import Counts
from ringtune.errors import JobError
from ringtune.schedule.spreading.choosers import whole

LEAST_SHARE: Final = 0.95
"""How much of the compute that could be done has to be done, for the sake of equal times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """One host: its blocks, and what one micro-batch takes it at all of them.

    Attributes:
        node: its name.
        blocks: that it hosts.
        full_s: of a full operation of all its blocks.
        forward_s: of a forward-only one.
    """

    node: str
    blocks: int
    full_s: float
    forward_s: float

    def busy_s(self, counts: Counts) -> float:
        """Seconds of so many operations."""
        return counts.full * self.full_s + counts.forward_only * self.forward_s

    def within(self, limit_s: float, microbatches: int) -> Counts | None:
        """The counts that fill a time best; at most one full operation is given up for forward-only ones.

        None if not even one full operation fits.
        """
        most = min(microbatches, whole(limit_s, self.full_s))
        found = []
        for full in (most, most - 1):
            rest = whole(limit_s - full * self.full_s, self.forward_s)
            found.append(Counts(full, min(microbatches - full, max(0, rest))))
        return max(
            (each for each in found if each.full > 0), key=lambda each: (self.busy_s(each), each.full), default=None
        )


def balanced(boards: Sequence[Board], microbatches: int, most: float) -> dict[str, Counts]:
    """Counts of each board: of all that do nearly ``most``, those with the smallest spread of busy seconds.

    Exact: whichever board is busy longest, all others get what fills that time best.

    Args:
        boards: with blocks.
        microbatches: of a batch.
        most: full operations of one block for a micro-batch that all boards may do together, or their equivalent.

    Raises:
        JobError: not every board could do one full operation.
    """
    limits = sorted(
        {
            board.busy_s(Counts(full, forward_only))
            for board in boards
            for full in range(1, microbatches + 1)
            for forward_only in range(microbatches - full + 1)
        }
    )
    stop = bisect.bisect_right(limits, most * (1 + 1e-9), key=lambda limit: _compute(boards, microbatches, limit))
    fitting = [limit for limit in limits[:stop] if _counts(boards, microbatches, limit)]
    if not fitting:
        raise JobError(
            f"operations.balance can't give each of {len(boards)} nodes one full micro-batch of {microbatches}; raise "
            "operations.compute or operations.full, or leave operations.balance out"
        )
    least = LEAST_SHARE * _compute(boards, microbatches, fitting[-1])
    near = [limit for limit in fitting if _compute(boards, microbatches, limit) >= least]
    best = min(near, key=lambda limit: (math.ceil(100 * spread(boards, _counts(boards, microbatches, limit))), -limit))
    return _counts(boards, microbatches, best)


def spread(boards: Sequence[Board], counts: dict[str, Counts]) -> float:
    """How far busy seconds lie apart, as a share of the longest ones."""
    busy = [board.busy_s(counts[board.node]) for board in boards]
    return (max(busy) - min(busy)) / max(busy)


def _counts(boards: Sequence[Board], microbatches: int, limit_s: float) -> dict[str, Counts]:
    """The counts of all boards within a time; empty if one board could do nothing in full."""
    found = {}
    for board in boards:
        counts = board.within(limit_s, microbatches)
        if counts is None:
            return {}
        found[board.node] = counts
    return found


def _compute(boards: Sequence[Board], microbatches: int, limit_s: float) -> float:
    counts = _counts(boards, microbatches, limit_s)
    return (
        math.fsum(board.blocks * board.busy_s(counts[board.node]) / board.full_s for board in boards) if counts else 0
    )
