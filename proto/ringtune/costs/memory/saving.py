"""What blocks keep of a forward for their backward, under each policy for activations.

============= ================================================================= ===================================
policy        each micro-batch of a block keeps                                 besides, once for a node
============= ================================================================= ===================================
none          its graph
velora        its graph, with projections for the inputs of its linear layers
recompute     its input, and the masks of its dropout                           the graph of one block
both          the same                                                          the graph of one block, projected
============= ================================================================= ===================================

VeLoRA does nothing in passes that gather scores, so a run that has some counts on nothing of it. How much it saves
follows from the inputs that are kept only for linear layers that train (``models.kept_inputs``): with a frozen base few
are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ringtune.costs.memory.operations import KeptGraphs, gathers_scores, kept_graphs
from ringtune.costs.memory.sizes import Sizes
from ringtune.costs.memory.terms import Term
from ringtune.schedule.course import Course
from ringtune.schedule.saving import in_ranges
from ringtune.schedule.turns.versions import ever_trained
from ringtune.schedule.units import Range

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
    """The graphs that a node's trained blocks keep at most, and what comes besides where some are run again.

    Args:
        course: the run.
        recompute: blocks whose backward runs them again.
        blocks: those of the node that keep something, [start, stop).
        sizes: of one of them.
        flying: items at a time.
        dealt: micro-batches of an item that pass the node; None = all.
    """
    (start, stop), graphs = blocks, kept_graphs(course)
    count = len(course.microbatch_sizes()) if dealt is None else dealt
    tokens = course.microbatch_sizes()[0] * course.max_length
    tensor, again = round(sizes.tensor_bytes(tokens)), recomputed_blocks(course, recompute, blocks)
    run_again = round(sizes.run_again_bytes(tokens))
    kept = [block for block in range(start, stop) if block not in again]
    begin = _beginning(course, kept, sizes) if graphs is None else []
    projected = [block for block in projected_blocks(course, kept) if block not in begin]
    whole = [block for block in kept if block not in projected and block not in begin]
    if begin:
        least = sizes.projected_bytes(tokens) if projected_blocks(course, begin) else sizes.kept_bytes(tokens)
        lowest = round(min(least, tokens * sizes.lowest_token_bytes))
        yield Term(_PART, f"lowest {_GRAPH}", flying * _micros(count, graphs, begin), lowest)
    yield from _whole_terms(course, count, graphs, whole, sizes, flying)
    yield Term(
        _PART,
        f"{_GRAPH}, with projections",
        flying * _micros(count, graphs, projected),
        round(sizes.projected_bytes(tokens)),
    )
    yield Term(_PART, _INPUT, flying * _inputs(count, graphs, kept), tensor)
    yield Term(_PART, "input of a block that is run again", flying * _micros(count, graphs, again), run_again)
    if again:
        is_projected = len(projected_blocks(course, again)) == len(again)
        block_bytes = sizes.projected_bytes(tokens) if is_projected else sizes.kept_bytes(tokens)
        yield Term(_PART, "graph of the block that is run again", 1, round(block_bytes))


def _beginning(course: Course, blocks: Sequence[int], sizes: Sizes) -> list[int]:
    """The lowest block that ever trains, if it is among these: its graph begins inside it whenever it has one.

    A pass that gathers scores may have one below it.
    """
    if not sizes.lowest_token_bytes or gathers_scores(course):
        return []
    return [block for block in blocks if block == ever_trained(course).lowest]


def recomputed_blocks(course: Course, recompute: Sequence[Range], blocks: tuple[int, int]) -> tuple[int, ...]:
    """The blocks of [start, stop) that keep their input only."""
    return tuple(block for block in range(*blocks) if in_ranges(block, recompute))


def projected_blocks(course: Course, blocks: Sequence[int]) -> tuple[int, ...]:
    """Those of some blocks whose linear layers keep projections."""
    velora = course.velora
    if velora is None or gathers_scores(course):
        return ()
    return tuple(block for block in blocks if velora.has_block(block))


def _whole_terms(
    course: Course, count: int, graphs: KeptGraphs | None, blocks: Sequence[int], sizes: Sizes, flying: int
) -> Iterable[Term]:
    """The graphs of blocks that keep everything; where tables are sure to leave some of them out, only the rest."""
    tokens = course.microbatch_sizes()[0] * course.max_length
    kept, micros = round(sizes.kept_bytes(tokens)), _micros(count, graphs, blocks)
    if graphs is None:
        yield Term(_PART, _GRAPH, flying * micros, kept)
        return
    of_subnets, shares = sizes.kept_in_subnets_bytes(tokens), sum(graphs.shares[block] for block in blocks)
    yield Term(_PART, f"{_GRAPH}, without its subnets", flying * micros, round(kept - of_subnets))
    yield Term(_PART, "all blocks' active subnets in the graphs of an item", flying, round(shares * of_subnets))


def _micros(count: int, graphs: KeptGraphs | None, blocks: Sequence[int]) -> int:
    """Micro-batches for which blocks keep something, added up over the blocks; of ``count`` that pass the node."""
    if graphs is None:
        return len(blocks) * count
    return sum(graphs.micros[block] for block in blocks)


def _inputs(micro: int, graphs: KeptGraphs | None, blocks: Sequence[int]) -> int:
    """Inputs that the graphs of blocks keep: one for each micro-batch of each run of neighbours."""
    runs = _runs(blocks)
    return sum(micro if graphs is None else graphs.inputs(first, last, micro) for first, last in runs)


def _runs(blocks: Sequence[int]) -> tuple[Range, ...]:
    """Neighbouring blocks as ranges: 0, 1 and 3 are [0, 2) and [3, 4)."""
    found: list[Range] = []
    for block in blocks:
        if found and found[-1].stop == block:
            found[-1] = Range(found[-1].start, block + 1)
        else:
            found.append(Range(block, block + 1))
    return tuple(found)
