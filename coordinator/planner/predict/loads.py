"""What operation tables leave of the work and of the messages of each block, for the planner's formulas.

The formulas count equal blocks. So a table becomes the mean time of a block on each node, a weight of each block
against that mean, and the share of micro-batches that visit a slice at all::

    table of two micro-batches      weights of the blocks      visits of [0, 2)   of [2, 4)
    11 13 33 33                     1.78 0.44 0.89 0.89        1.0                0.5
    11 33 11 11

Before scores are known the table is the expected one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ringtune.costs.times.seconds import NodeCosts
from ringtune.schedule.actions import Op
from ringtune.schedule.course import Course
from ringtune.schedule.operations.codes import FORWARD_ONLY, FULL, SHORTCUT, block_code, block_row, patterns_of
from ringtune.schedule.owner_turns import shares
from ringtune.schedule.rows.batches import num_batches
from ringtune.schedule.spreading.expected import expected_table
from ringtune.schedule.turns.turns import StepKind

Visits = tuple[tuple[float, ...], ...]


class Loads(NamedTuple):
    """How often which pattern comes in a run.

    Attributes:
        patterns: pattern -> its share of all micro-batches of all blocks that are shared out; "" = all full.
        of_blocks: the same of each block that is shared out.
        visits: ``[start][stop]``: the share of micro-batches that have something to do in these blocks; empty if all.
    """

    patterns: Mapping[str, float]
    of_blocks: tuple[Mapping[str, float], ...]
    visits: Visits

    def mean_s(self, seconds: Callable[[str], float]) -> float:
        """Mean of what a pattern takes, over all micro-batches and blocks."""
        return sum(share * seconds(pattern) for pattern, share in self.patterns.items())

    def weights(self, seconds: Callable[[str], float]) -> tuple[float, ...]:
        """What each block takes over the mean block, added up from the first block on; empty if all are alike."""
        mean_s = self.mean_s(seconds)
        found = [
            sum(share * seconds(pattern) for pattern, share in of_block.items()) / mean_s if mean_s > 0 else 1.0
            for of_block in self.of_blocks
        ]
        if max(found) - min(found) < _ALIKE:
            return ()
        sums = [0.0]
        for weight in found:
            sums.append(sums[-1] + weight)
        return tuple(sums)


_ALIKE = 1e-3


def pattern_s(node: NodeCosts, op: Op, pattern: str, *, size: float, lowest: bool) -> float:
    """Seconds of a block with a pattern on a node, where a whole one would do ``op``.

    A block that is passed by takes nothing; one without a full subnet has a forward without a graph and no backward.
    """
    code = block_code(pattern) if pattern else FULL
    if code == SHORTCUT or (code == FORWARD_ONLY and op is Op.BACKWARD):
        return 0.0
    op = Op.FORWARD_FREE if code == FORWARD_ONLY else op
    start = 0 if lowest else 1
    return node.seconds(op, start, start + 1, size=size, lowest=0, kind=StepKind.TRAIN, patterns=(pattern,))


@functools.lru_cache(maxsize=64)
def loads_of(course: Course, first: int) -> Loads | None:
    """How often which pattern comes in blocks [first, N) of a run; None if everything is full.

    Owners count by their shares of the steps, batches of an owner alike.
    """
    table = expected_table(course) if course.may_skip else None
    if table is None or not table.batches:
        return None
    rows = _rows_by_share(course)
    blocks = range(first, course.num_blocks)
    of_blocks = tuple(Counter[str]() for _ in blocks)
    for row, share in rows.items():
        patterns = patterns_of(row, first, course.num_blocks, table.subnets) or ("",) * len(blocks)
        for counts, pattern in zip(of_blocks, patterns, strict=True):
            counts["" if pattern.strip(FULL) == "" else pattern] += share  # type: ignore[assignment]
    everywhere: dict[str, float] = {}
    for counts in of_blocks:
        for pattern, share in counts.items():
            everywhere[pattern] = everywhere.get(pattern, 0.0) + share / len(of_blocks)
    if set(everywhere) == {""}:
        return None
    return Loads(patterns=everywhere, of_blocks=of_blocks, visits=_visits(rows, table.subnets, course.num_blocks))


def _rows_by_share(course: Course) -> dict[str, float]:
    """Every row of the expected table with its share of all micro-batches of the run; "" is all full."""
    table, found = expected_table(course), dict[str, float]()
    weights = dict(zip((owner.node for owner in course.owners), shares(course.owners, course.turns), strict=True))
    batches = {owner.node: num_batches(owner.train_rows, course.batch_size) for owner in course.owners}
    for entry in table.batches:
        each = weights[entry.owner] / (batches[entry.owner] * len(entry.rows))
        for row in entry.rows:
            found[row] = found.get(row, 0.0) + each
    left = 1.0 - sum(found.values())
    if left > _ALIKE:
        found[""] = left
    return found


def _visits(rows: Mapping[str, float], subnets: int, num_blocks: int) -> Visits:
    """The share of micro-batches that do something in [start, stop), for every range of blocks."""
    passed = [(block_row(row, subnets), share) for row, share in rows.items() if row]
    passed = [(row, share) for row, share in passed if SHORTCUT in row]
    if not passed:
        return ()
    found = [[1.0] * (num_blocks + 1) for _ in range(num_blocks)]
    for row, share in passed:
        for start in range(num_blocks):
            stop = start
            while stop < num_blocks and row[stop] == SHORTCUT:
                stop += 1
                found[start][stop] -= share
    return tuple(tuple(max(0.0, value) for value in line) for line in found)
