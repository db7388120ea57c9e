"""The items that are under way on the virtual clock: kind and sizes of each."""

from __future__ import annotations

from typing import NamedTuple

from ringtune.costs.times.seconds import CourseCosts
from ringtune.schedule.lowering import lowest_units, subnet_rows
from ringtune.schedule.operations.codes import patterns_of
from ringtune.schedule.turns.turns import StepKind, Turn, items
from ringtune.schedule.turns.versions import trained
from ringtune.schedule.units import Units


class ItemKind(NamedTuple):
    """What time and memory of an item's actions depend on, besides the action itself.

    Items of one turn have equal kinds if depth, rows, operations and the lowest units with a gradient are equal.

    Attributes:
        number: of its own for each kind that occurs, so that it is quick to look up by.
        kind: of the item.
        trained: the units whose weights get a gradient.
        lowest: per micro-batch the lowest unit that gets a gradient.
        sizes: padded tokens of each micro-batch.
        rows: per micro-batch the operations of all subnets; empty = everything is full.
        subnets: of each block.
    """

    number: int
    kind: StepKind
    trained: Units
    lowest: tuple[int, ...]
    sizes: tuple[float, ...]
    rows: tuple[str, ...] = ()
    subnets: int = 1

    def patterns(self, micro: int, start: int, stop: int) -> tuple[str, ...]:
        """The patterns of blocks [start, stop) for a micro-batch; none where everything is full."""
        return patterns_of(self.rows[micro], start, stop, self.subnets) if self.rows else ()


class Items:
    """Kind and sizes of every item that was granted and is not done.

    Args:
        costs: of the plan.

    Attributes:
        by_seq: the kind of each; asked for every action and message, so it is looked up without a call.
    """

    def __init__(self, costs: CourseCosts) -> None:
        self._costs = costs
        self._course = costs.course
        self.by_seq: dict[int, ItemKind] = {}
        self._known: dict[tuple[str, StepKind, Units, tuple[int, ...], int, tuple[str, ...], int], ItemKind] = {}

    def granted(self, turn: Turn) -> None:
        """Note the items of a turn."""
        course = self._course.decided(turn.unfreeze_at, turn.operations)
        subnets = course.operations.subnets if course.operations else 1
        for item in items(course, turn):
            units, lowest = trained(course, item.kind, item.step), lowest_units(course, item)
            table = subnet_rows(course, item)
            key = (item.owner, item.kind, units, lowest, item.rows, table, subnets)
            if key not in self._known:
                parts = () if item.kind is StepKind.CHECKPOINT else course.microbatch_sizes(item.rows)
                sizes = tuple(self._costs.size(item.owner, count, item.kind) for count in parts)
                self._known[key] = ItemKind(len(self._known), item.kind, units, lowest, sizes, table, subnets)
            self.by_seq[item.seq] = self._known[key]

    def forget(self, turn: Turn) -> None:
        """Drop the items of a turn that is done."""
        for seq in range(turn.first_seq, turn.end_seq):
            self.by_seq.pop(seq, None)
