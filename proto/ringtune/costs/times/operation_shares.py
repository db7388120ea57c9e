"""What operations leave to be done of an item: shares by node, seconds of blocks, and what travels, beside all full.

The paper counts a forward-only operation as 40 % of the compute and half of the communication of a full one, and a
shortcut as none of either. In a ring a hidden state travels on unless a whole slice is passed by, so bytes are counted
by the messages of the item's way.

Source: D2FT, section IV-A (costs of operations in compute and in communication).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ringtune.costs.times.seconds import CourseCosts
from ringtune.schedule.actions import Leg, Op
from ringtune.schedule.lowering import lowest_units, subnet_rows, way
from ringtune.schedule.operations.codes import FORWARD_ONLY, FULL, SHORTCUT, pattern_of, share
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns.turns import Item

FORWARD_COMPUTE: Final = 0.4
"""What a forward-only operation counts of a full one's compute."""

FORWARD_SENT: Final = 0.5
"""What a forward-only operation counts of a full one's communication."""

_BLOCK_OPS = (Op.FORWARD, Op.FORWARD_FREE, Op.BACKWARD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What one node did, or would have done; sums of items can be added.

    Attributes:
        full: rows of blocks with forward and backward, counted by their subnets.
        forward_only: rows of blocks with the forward only.
        skipped: rows of blocks that were passed by.
        work_s: seconds of forwards and backwards of blocks, by the profile; 0 without one.
        sent_bytes: of hidden states and gradients, by the profile's mean lengths; without one rows that were sent.
    """

    full: float = 0.0
    forward_only: float = 0.0
    skipped: float = 0.0
    work_s: float = 0.0
    sent_bytes: float = 0.0

    def __add__(self, other: Done) -> Done:
        """Add what was done for other items."""
        return Done(
            **{entry.name: getattr(self, entry.name) + getattr(other, entry.name) for entry in dataclasses.fields(Done)}
        )

    def times(self, count: float) -> Done:
        """What is done for so many items that are alike."""
        return Done(**{entry.name: count * getattr(self, entry.name) for entry in dataclasses.fields(Done)})

    @property
    def paper_compute(self) -> float:
        """Compute by the paper's count, in full operations."""
        return self.full + FORWARD_COMPUTE * self.forward_only

    @property
    def paper_sent(self) -> float:
        """Communication by the paper's count, in full operations."""
        return self.full + FORWARD_SENT * self.forward_only

    def shares(self) -> dict[str, float]:
        """The shares of full, forward-only and skipped operations."""
        total = (self.full + self.forward_only + self.skipped) or 1.0
        counts = {"full": self.full, "forward_only": self.forward_only, "skipped": self.skipped}
        return {name: count / total for name, count in counts.items()}


def total(parts: Iterable[Done]) -> Done:
    """Add up what was done."""
    return sum(parts, Done())


def all_full(plan: Plan) -> Plan:
    """The plan in which everything is full: no tables, and none to be chosen."""
    return _all_full(plan)


@functools.lru_cache(maxsize=64)
def _all_full(plan: Plan) -> Plan:
    return Plan(dataclasses.replace(plan.course, operations=None, choice=None), plan.placements)


def done_of(plan: Plan, item: Item, costs: CourseCosts | None = None) -> dict[str, Done]:
    """What each host does for a train item.

    Args:
        plan: as decided for the item's turn.
        item: of a train turn.
        costs: of the course, for seconds and bytes; None = seconds are 0, and bytes are rows.
    """
    found = {node: Done() for node in plan.nodes}
    course, rows, lowest = plan.course, subnet_rows(plan.course, item), lowest_units(plan.course, item)
    subnets = course.operations.subnets if course.operations else 1
    for micro, size in enumerate(course.microbatch_sizes(item.rows)):
        row, legs = rows[micro] if rows else "", way(plan, item, micro)
        tokens = costs.size(item.owner, size, item.kind) if costs else float(size)
        for node in found:
            mine = legs.get(node, ())
            found[node] += _operations(plan, node, mine, row, subnets, size)
            found[node] += Done(
                work_s=sum(_work_s(costs, node, leg, item, tokens, lowest[micro], row, subnets) for leg in mine),
                sent_bytes=sum(_sent(costs, leg, tokens) for leg in mine if leg.op is Op.SEND),
            )
    return found


def _operations(plan: Plan, node: str, legs: Iterable[Leg], row: str, subnets: int, rows: int) -> Done:
    """Count the operations of a node's blocks for one micro-batch; 1 is forward-only where no graph is kept."""
    op_of = {block: leg.op for leg in legs if leg.op in _BLOCK_OPS[:2] for block in range(leg.start, leg.stop)}
    full = forward_only = skipped = 0.0
    for block in range(plan.slice_of(node).start, plan.slice_of(node).stop):
        pattern, op = pattern_of(row, block, subnets), op_of.get(block)
        if op is None:
            skipped += rows
            continue
        active = share(pattern, FULL)
        full += rows * active if op is Op.FORWARD else 0.0
        forward_only += rows * (share(pattern, FORWARD_ONLY) + (0.0 if op is Op.FORWARD else active))
        skipped += rows * share(pattern, SHORTCUT)
    return Done(full=full, forward_only=forward_only, skipped=skipped)


def _work_s(
    costs: CourseCosts | None, node: str, leg: Leg, item: Item, tokens: float, lowest: int, row: str, subnets: int
) -> float:
    if costs is None or leg.op not in _BLOCK_OPS:
        return 0.0
    patterns = tuple(pattern_of(row, block, subnets) for block in range(leg.start, leg.stop)) if row else ()
    action = leg.bind(item.seq, 0)
    return costs.action_s(node, action, size=tokens, lowest=lowest, kind=item.kind, patterns=patterns)


def _sent(costs: CourseCosts | None, leg: Leg, tokens: float) -> float:
    return costs.message_bytes(leg.payload, leg.start, tokens) if costs else tokens
