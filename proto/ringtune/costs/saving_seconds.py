"""How much longer an action takes where blocks save activations.

A block that runs again goes forward with a graph, which is dropped at once, and again before its backward: so it gives
the same bits both times. VeLoRA makes the work with a graph a little longer, wherever it is done::

              none      recompute               velora               both
    F         GRAPH     GRAPH                   GRAPH (1 + e)        GRAPH (1 + e)
    B         BACKWARD  GRAPH + BACKWARD        BACKWARD (1 + e)     (GRAPH + BACKWARD) (1 + e)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ringtune.costs.work_times import Work
from ringtune.schedule.actions import Action, Graph, Op
from ringtune.schedule.saving import in_ranges, within
from ringtune.schedule.units import Range

VELORA_EXTRA: Final = 0.01
"""What VeLoRA adds to a block's work with a graph, e: ``make bench-memory``, part ``saved``.

Measured: nothing with adapters, within the noise; with own weights it takes 15 to 25 % off, which is not counted on.
"""

Seconds = Callable[[Op, int, int], float]
"""Seconds of an op over the blocks [start, stop), where they keep everything."""


def saving_s(
    op: Op, start: int, stop: int, recompute: Sequence[Range], projected: Sequence[Range], seconds: Seconds
) -> float:
    """Seconds that an action over blocks [start, stop) takes longer than one that keeps everything.

    Args:
        op: what the action does.
        start: first block.
        stop: one past the last.
        recompute: blocks that run again.
        projected: blocks with VeLoRA.
        seconds: of an op over some of these blocks.
    """
    if op.graph is Graph.NONE:
        return 0.0

    def total(of: Op, ranges: Iterable[Range]) -> float:
        return sum(seconds(of, first, last) for first, last in within(ranges, start, stop))

    if op.graph is Graph.KEEPS:
        return VELORA_EXTRA * total(Op.FORWARD, projected)
    both = [cut for first, last in projected for cut in within(recompute, first, last)]
    return total(Op.FORWARD, recompute) + VELORA_EXTRA * (total(Op.FORWARD, both) + total(Op.BACKWARD, projected))


def again_works(action: Action, recompute: Sequence[Range], lowest: int) -> dict[Work, int]:
    """The works that an action is made of, each with its number, where some of its blocks run again; else none.

    Example: the backward of blocks [2, 4), both of which run again, is two forwards with graph and two backwards.

    Args:
        action: of any op.
        recompute: blocks that run again.
        lowest: the lowest unit that gets a gradient.
    """
    op, start, stop = action.op, action.start, action.stop
    if op.graph is not Graph.FREES or not (again := count_within(recompute, action)):
        return {}
    found: Counter[Work] = Counter()
    has_lowest = start <= lowest
    lowest_again = has_lowest and in_ranges(start, recompute)
    found[Work.BACKWARD], found[Work.BACKWARD_LOWEST] = stop - start - has_lowest, int(has_lowest)
    found[Work.GRAPH], found[Work.GRAPH_LOWEST] = again - lowest_again, int(lowest_again)
    return {work: count for work, count in found.items() if count}


def count_within(ranges: Sequence[Range], action: Action) -> int:
    """How many blocks of an action are in some ranges."""
    return sum(last - first for first, last in within(ranges, action.start, action.stop))
