"""Bytes and seconds of each policy for activations (``[memory] activations`` of a job), and the blocks that have it.

============= ================================================================= ===================================
policy        kept for each micro-batch of a block                              once for each node
============= ================================================================= ===================================
none          its graph
velora        its graph, with projections for the inputs of its linear layers
recompute     its input, and the masks of its dropout                           the graph of one block
both          the same                                                          the graph of one block, projected
============= ================================================================= ===================================

VeLoRA is off in passes that gather scores, so a run with such passes saves no bytes by it. It saves only inputs of
trained linear layers (``models.kept_inputs``): with a frozen base there are few.

A block that is recomputed runs its first forward with a graph too, which is dropped at once, so that both forwards give
the same bits. VeLoRA lengthens work with a graph by the share e, and shortens the gradients of a block's own weights,
which take as long as its forward, by the share g (``projected_gains``)::

              none      recompute               velora                         both
    F         GRAPH     GRAPH                   GRAPH (1 + e)                  GRAPH (1 + e)
    B         BACKWARD  GRAPH + BACKWARD        BACKWARD (1 + e) - g GRAPH     (GRAPH + BACKWARD) (1 + e) - g GRAPH
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ringtune.costs.memory_sizes import SavedGraphs, Sizes, gathers_scores, kept_graphs, of_blocks
from ringtune.costs.profile import ModelFacts, Work
from ringtune.models.kept_inputs import KeptInput
from ringtune.schedule.actions import Action, Graph, Op
from ringtune.schedule.course import Course
from ringtune.schedule.saved_activations import Velora, in_ranges, merged, overlap, within
from ringtune.schedule.units import Range, Units
from ringtune.schedule.versions import ever_trained
from ringtune.techniques.activation_checkpointing import VELORA_EXTRA
from ringtune.techniques.base import Term

_PART = "activations"
_GRAPH = "block's graph of a micro-batch"
_INPUT = "input of a micro-batch's graph"


def graph_terms(
    course: Course,
    recompute: Sequence[Range],
    blocks: tuple[int, int],
    sizes: Sizes,
    flying: int,
    dealt: int | None = None,
) -> Iterable[Term]:
    """Yield the memory terms of graphs and recomputed inputs at the fullest moment.

    ``blocks`` [start, stop) of the node keep activations. ``flying`` items are in flight; ``dealt`` micro-batches
    of each pass the node, None = all.
    """
    (start, stop), graphs = blocks, kept_graphs(course)
    count = len(course.microbatch_sizes()) if dealt is None else dealt
    tokens = course.microbatch_sizes()[0] * course.max_length
    tensor, again = round(sizes.tensor_bytes(tokens)), recomputed_blocks(recompute, blocks)
    run_again = round(sizes.run_again_bytes(tokens))
    kept = [block for block in range(start, stop) if block not in again]
    begin = _beginning(course, kept, sizes) if graphs is None else []
    projected = [block for block in projected_blocks(course, kept) if block not in begin]
    whole = [block for block in kept if block not in projected and block not in begin]
    if begin:
        is_projected = bool(projected_blocks(course, begin))
        least = sizes.projected_bytes(tokens, begin[0]) if is_projected else sizes.kept_bytes(tokens)
        lowest = round(min(least, tokens * sizes.lowest_token_bytes))
        yield Term(_PART, f"lowest {_GRAPH}", flying * _micros(count, graphs, begin), lowest)
    yield from _whole_terms(course, count, graphs, whole, sizes, flying)
    each_bytes = {block: round(sizes.projected_bytes(tokens, block)) for block in projected}
    for size_bytes in sorted({*each_bytes.values()}):
        alike = [block for block in projected if each_bytes[block] == size_bytes]
        yield Term(_PART, f"{_GRAPH}, with projections", flying * _micros(count, graphs, alike), size_bytes)
    runs = merged(Range(block, block + 1) for block in kept)  # a graph keeps one input for each
    inputs = sum(count if graphs is None else graphs.inputs(first, last, count) for first, last in runs)
    yield Term(_PART, _INPUT, flying * inputs, tensor)
    yield Term(_PART, "input of a block that is run again", flying * _micros(count, graphs, again), run_again)
    if again:
        both = projected_blocks(course, again)
        each = (sizes.projected_bytes(tokens, block) if block in both else sizes.kept_bytes(tokens) for block in again)
        yield Term(_PART, "graph of the block that is run again", 1, round(max(each)))


def _beginning(course: Course, blocks: Sequence[int], sizes: Sizes) -> list[int]:
    """The lowest block that ever trains, if it is among these: every graph of it begins inside it.

    Not in runs that gather scores: there a graph may begin below it.
    """
    if not sizes.lowest_token_bytes or gathers_scores(course):
        return []
    return [block for block in blocks if block == ever_trained(course).lowest]


def recomputed_blocks(recompute: Sequence[Range], blocks: tuple[int, int]) -> tuple[int, ...]:
    """Return the blocks of [start, stop) that keep their input only."""
    return tuple(block for block in range(*blocks) if in_ranges(block, recompute))


def projected_blocks(course: Course, blocks: Sequence[int]) -> tuple[int, ...]:
    """Return those of some blocks that keep projections."""
    return () if gathers_scores(course) else tuple(block for block in blocks if in_ranges(block, course.projected))


def _whole_terms(
    course: Course, count: int, graphs: SavedGraphs | None, blocks: Sequence[int], sizes: Sizes, flying: int
) -> Iterable[Term]:
    """Yield the terms of graphs without projections; of active subnets only, where tables bound them."""
    tokens = course.microbatch_sizes()[0] * course.max_length
    kept, micros = round(sizes.kept_bytes(tokens)), _micros(count, graphs, blocks)
    if graphs is None:
        yield Term(_PART, _GRAPH, flying * micros, kept)
        return
    of_subnets, shares = sizes.kept_in_subnets_bytes(tokens), sum(graphs.shares[block] for block in blocks)
    yield Term(_PART, f"{_GRAPH}, without its subnets", flying * micros, round(kept - of_subnets))
    yield Term(_PART, "all blocks' active subnets in the graphs of an item", flying, round(shares * of_subnets))


def _micros(count: int, graphs: SavedGraphs | None, blocks: Sequence[int]) -> int:
    """Micro-batches with a graph of a block, summed over the blocks; ``count`` of them pass the node."""
    if graphs is None:
        return len(blocks) * count
    return sum(graphs.micros[block] for block in blocks)


_MATRIX_SHARE: Final = 0.77
"""Share of the linear layers in a block's forward time, and of their weights' gradients in its backward.

Measured with own weights, 16 x 128 tokens at width 384: backwards take 0.77 of the time with projections for query,
key, value and down, 0.62 for all layers, where 0.56 and 0.94 of the multiplications for the gradients of weights are
saved. Without projections they take 1.88 times a forward with a graph.
"""

_WIDE: Final = ("up", "gate")

Seconds = Callable[[Op, int, int], float]
"""(op, start, stop) -> seconds over the blocks [start, stop) with policy none."""


def projected_gains(course: Course, model: ModelFacts) -> tuple[float, ...]:
    """Share g of each block's forward with a graph that VeLoRA saves in its backward.

    The gradient of a weight from P numbers per token instead of D inputs takes P / D of the multiplications. With
    adapters g is 0: their matrices take little time. Keys and values count as wide as queries.

    Example: query, key, value and down of a BERT block of width 384 are 7/12 of its multiplications, of which 32 / 384
    and 32 / 1,536 remain: 0.56 of a forward's are saved, and with 0.77 of its time g is 0.43.
    """
    velora = course.velora
    if velora is None:
        return (0.0,) * model.num_blocks
    return of_blocks([_gain(velora, inputs, model) for inputs in model.block_inputs], model.num_blocks)


def mean_gain(gains: Sequence[float], start: int, stop: int) -> float:
    """Mean share over the blocks [start, stop), of ``projected_gains``; that of each block where all are equal."""
    least, most = min(gains[start:stop], default=0.0), max(gains[start:stop], default=0.0)
    return least if least == most else sum(gains[start:stop]) / (stop - start)


def _gain(velora: Velora, inputs: Sequence[KeptInput], model: ModelFacts) -> float:
    without_adapter = [kept for kept in inputs if not kept.is_adapter]
    all_products = chosen = 0.0
    for kept in without_adapter:
        for layer in kept.layers:
            products = kept.width * (model.intermediate_size if layer in _WIDE else model.hidden_size)
            all_products += products
            if layer in velora.layers:
                chosen += products * max(0.0, 1 - velora.num_subtokens(kept.width) / kept.width)
    return _MATRIX_SHARE * chosen / all_products if all_products else 0.0


def saving_s(
    op: Op,
    start: int,
    stop: int,
    recompute: Sequence[Range],
    projected: Sequence[Range],
    seconds: Seconds,
    *,
    gains: Sequence[float],
) -> float:
    """Additional seconds of an action over blocks [start, stop), compared with policy none; negative if it is shorter.

    ``seconds`` are of an op over some of these blocks, ``gains`` are those of ``projected_gains``.
    """
    if op.graph is Graph.NONE:
        return 0.0

    def total(of: Op, ranges: Iterable[Range]) -> float:
        return sum(seconds(of, first, last) for first, last in within(ranges, start, stop))

    if op.graph is Graph.KEEPS:
        return VELORA_EXTRA * total(Op.FORWARD, projected)
    both = [cut for first, last in projected for cut in within(recompute, first, last)]
    longer_s = VELORA_EXTRA * (total(Op.FORWARD, both) + total(Op.BACKWARD, projected))
    gained_s = sum(mean_gain(gains, *cut) * seconds(Op.FORWARD, *cut) for cut in within(projected, start, stop))
    shorter_s = min(gained_s, total(Op.BACKWARD, projected))
    return total(Op.FORWARD, recompute) + longer_s - shorter_s


def again_works(action: Action, recompute: Sequence[Range], lowest: int) -> dict[Work, int]:
    """Number of each work in a backward with recomputed blocks; empty for another action.

    Example: the backward of blocks [2, 4), both recomputed, is two forwards with graph and two backwards.
    """
    op, start, stop = action.op, action.start, action.stop
    if op.graph is not Graph.FREES or not (again := overlap(recompute, [(start, stop)])):
        return {}
    counts: Counter[Work] = Counter()
    has_lowest = start <= lowest
    lowest_again = has_lowest and in_ranges(start, recompute)
    counts[Work.BACKWARD], counts[Work.BACKWARD_LOWEST] = stop - start - has_lowest, int(has_lowest)
    counts[Work.GRAPH], counts[Work.GRAPH_LOWEST] = again - lowest_again, int(lowest_again)
    return {work: count for work, count in counts.items() if count}


def trained_parts(course: Course, projected: Sequence[Range], trained: Units | None) -> Sequence[Range]:
    """Return the parts of ``projected`` ranges with a gradient of their weights; other parts are not projected.

    ``trained`` are the units with a gradient; they matter only where all parameters train, a group at a time.
    """
    if trained is None or not course.method.full_parameters:
        return projected
    return [cut for part in trained.ranges for cut in within(projected, *part)]
