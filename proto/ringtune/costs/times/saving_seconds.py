"""How much longer an action takes where blocks save activations.

A block that runs again goes forward with a graph, which is dropped at once, and again before its backward: so it gives
the same bits both times. VeLoRA makes the work with a graph a little longer, wherever it is done, and the gradients of
a block's own weights shorter, which take as long as its forward: by the part g of it (``projected_gain``)::

              none      recompute               velora                         both
    F         GRAPH     GRAPH                   GRAPH (1 + e)                  GRAPH (1 + e)
    B         BACKWARD  GRAPH + BACKWARD        BACKWARD (1 + e) - g GRAPH     (GRAPH + BACKWARD) (1 + e) - g GRAPH
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ringtune.costs.profile import ModelFacts
from ringtune.costs.work_times import Work
from ringtune.models.adapters.kept_inputs import ADAPTER_DOWN
from ringtune.schedule.actions import Action, Graph, Op
from ringtune.schedule.course import Course
from ringtune.schedule.saving import Velora, in_ranges, num_subtokens, within
from ringtune.schedule.units import Range, Units

VELORA_EXTRA: Final = 0.01
"""What VeLoRA adds to a block's work with a graph, e: ``make bench-memory``, part ``saved``.

Measured: nothing in forwards, nor in backwards with adapters, within the noise.
"""

_MATRIX_SHARE: Final = 0.77
"""The linear layers' share of a block's forward, which the gradients of their weights take too.

Measured with own weights, 16 x 128 tokens at width 384: backwards take 0.77 of the time with projections for query,
key, value and down, 0.62 for all layers. They take 1.88 times a forward with a graph. Of the multiplications for the
gradients of weights 0.56 and 0.94 are left out.
"""

_WIDE: Final = ("up", "gate")

Seconds = Callable[[Op, int, int], float]
"""Seconds of an op over the blocks [start, stop), where they keep everything."""


def projected_gain(velora: Velora | None, model: ModelFacts) -> float:
    """What VeLoRA takes off a block's backward, over its forward with a graph: g.

    The gradient of a weight from P numbers of a token instead of D inputs takes P / D of the multiplications. With
    adapters it is 0: their own matrices take next to no time. Keys and values count as wide as queries.

    Example: query, key, value and down of a BERT block of width 384 are 7/12 of its multiplications, of which 32 / 384
    and 32 / 1,536 stay: 0.56 of a forward's, and these are 0.77 of its time, so 0.43.

    Args:
        velora: of the course; None without.
        model: whose ``kept_inputs`` say which layers train.
    """
    own = [kept for kept in model.kept_inputs if ADAPTER_DOWN not in kept.layers]
    if velora is None or not own:
        return 0.0
    all_products = chosen = 0.0
    for kept in own:
        for layer in kept.layers:
            products = kept.width * (model.intermediate_size if layer in _WIDE else model.hidden_size)
            all_products += products
            if layer in velora.layers:
                chosen += products * max(0.0, 1 - num_subtokens(kept.width, velora.parts) / kept.width)
    return _MATRIX_SHARE * chosen / all_products if all_products else 0.0


def saving_s(
    op: Op,
    start: int,
    stop: int,
    recompute: Sequence[Range],
    projected: Sequence[Range],
    seconds: Seconds,
    *,
    gain: float = 0.0,
) -> float:
    """Seconds that an action over blocks [start, stop) takes longer than one that keeps everything; below 0 if shorter.

    Args:
        op: what the action does.
        start: first block.
        stop: one past the last.
        recompute: blocks that run again.
        projected: blocks with VeLoRA.
        seconds: of an op over some of these blocks.
        gain: from ``projected_gain``.
    """
    if op.graph is Graph.NONE:
        return 0.0

    def total(of: Op, ranges: Iterable[Range]) -> float:
        return sum(seconds(of, first, last) for first, last in within(ranges, start, stop))

    if op.graph is Graph.KEEPS:
        return VELORA_EXTRA * total(Op.FORWARD, projected)
    both = [cut for first, last in projected for cut in within(recompute, first, last)]
    longer_s = VELORA_EXTRA * (total(Op.FORWARD, both) + total(Op.BACKWARD, projected))
    shorter_s = min(gain * total(Op.FORWARD, projected), total(Op.BACKWARD, projected))
    return total(Op.FORWARD, recompute) + longer_s - shorter_s


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


def trained_parts(course: Course, projected: Sequence[Range], trained: Units | None) -> Sequence[Range]:
    """The parts of ranges with VeLoRA whose weights get a gradient; of the others nothing is projected.

    Args:
        course: the run.
        projected: blocks with VeLoRA.
        trained: units of an item that get one; it counts only where all parameters train, a group at a time.
    """
    if trained is None or not course.method.full_parameters:
        return projected
    return [cut for one in trained.ranges for cut in within(projected, *one)]


def count_within(ranges: Sequence[Range], action: Action) -> int:
    """How many blocks of an action are in some ranges."""
    return sum(last - first for first, last in within(ranges, action.start, action.stop))
