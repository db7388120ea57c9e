"""What blocks keep under each policy for activations, against sums written out by hand."""

from __future__ import annotations

import dataclasses

from ringtune.costs.memory_estimate import memory_estimate
from ringtune.costs.memory_sizes import MemorySettings, Sizes
from ringtune.costs.memory_terms import Share
from ringtune.models.kept_inputs import KeptInput
from ringtune.schedule import operation_tables
from ringtune.schedule.course import Course
from ringtune.schedule.methods import Hift
from ringtune.schedule.saved_activations import Velora
from ringtune.schedule.units import Range
from tests.support.cases import cases
from tests.support.plans import make_plan
from tests.support.profiles import node

PLAN = make_plan([("a", 0, 4)], ["a"], microbatches=2, batch_size=4, train_rows=8, method="all", num_steps=8)
TOKENS = 2 * 16
GRAPH, TENSOR = 20_000 * TOKENS, 32 * 4 * TOKENS
INPUTS = (
    KeptInput(layers=("query", "key", "value"), width=32, readers=3),
    KeptInput(layers=("attention_out",), width=32, kept_anyway=True),
    KeptInput(layers=("up",), width=32),
    KeptInput(layers=("down",), width=128),
)
SAVED = ((32 - 8) + (128 - 8)) * 4 * TOKENS  # of value's and down's inputs 8 numbers each are kept


def velora(*blocks: tuple[int, int]) -> Course:
    """The plan's course with VeLoRA in these blocks, 8 numbers of an input."""
    ranges = tuple(Range(*block) for block in blocks)
    return dataclasses.replace(
        PLAN.course, velora=Velora(blocks=ranges, layers=("query", "key", "value", "down"), parts=8)
    )


def terms(
    course: Course,
    *recompute: tuple[int, int],
    unlike: tuple[tuple[KeptInput, ...], ...] = (),
    start: int = 0,
    stop: int = 4,
    lowest_token_bytes: float = 0.0,
    dropout: float = 0.0,
) -> dict[str, int]:
    """Bytes of activations of a node that hosts [start, stop) and owns nothing, by what they are."""
    facts = node(PLAN, "a")
    model = dataclasses.replace(facts.model, kept_inputs=INPUTS, unlike_inputs=unlike)
    shape = dataclasses.replace(facts.shape, dropout=dropout)
    facts = dataclasses.replace(facts, model=model, lowest_token_bytes=lowest_token_bytes, shape=shape)
    share = Share(
        is_owner=False, start=start, stop=stop, above=4 - stop, recompute=tuple(Range(*one) for one in recompute)
    )
    found = memory_estimate(course, share, Sizes.at(course, facts, MemorySettings("sgd")))
    return {
        term.what: term.total_bytes
        for term in found.terms
        if term.part == "activations" and "mask" not in term.what and "work space" not in term.what
    }


def test_blocks_that_run_again_keep_the_masks_of_their_dropout() -> None:
    """A bit for every attention probability of 4 heads and 16 tokens, and for four hidden states of width 32."""
    assert node(PLAN, "a").model.num_heads == 4
    found = terms(PLAN.course, (0, 4), dropout=0.1)
    assert found["input of a block that is run again"] == 8 * (TENSOR + TOKENS * (4 * 16 + 4 * 32) // 8)
    assert terms(PLAN.course, dropout=0.1) == terms(PLAN.course)


def test_random_vectors_keep_a_projection_for_each_layer() -> None:
    """Three layers read one tensor: 24 numbers in place of its 32 values."""
    course = velora((0, 4))
    assert course.velora is not None
    course = dataclasses.replace(course, velora=dataclasses.replace(course.velora, init="random"))
    saved = ((32 - 3 * 8) + (128 - 8)) * 4 * TOKENS
    assert terms(course)["block's graph of a micro-batch, with projections"] == 8 * (GRAPH - saved)


def test_both_keep_inputs_and_one_graph_with_projections() -> None:
    """The block that runs again keeps projections while it does; a whole graph counts where one has none."""
    again = {"input of a block that is run again": 8 * TENSOR}
    assert terms(velora((0, 4)), (0, 4)) == {**again, "graph of the block that is run again": GRAPH - SAVED}
    assert terms(velora((0, 3)), (0, 4)) == {**again, "graph of the block that is run again": GRAPH}


def test_each_of_unlike_blocks_saves_what_it_reads() -> None:
    """The first two blocks save nothing: not their graphs, and not the one that runs again."""
    unlike, again = ((), (), INPUTS, INPUTS), "graph of the block that is run again"
    assert terms(velora((0, 4)), (0, 4), unlike=unlike)[again] == GRAPH
    assert terms(velora((0, 4)), (2, 4), unlike=unlike)[again] == GRAPH - SAVED
    course = dataclasses.replace(velora((0, 4)), method=Hift(group_size=6))
    found = terms(course, unlike=unlike)
    assert found["graph of a block that trains, with projections"] == 4 * 2 * (GRAPH - SAVED // 2)


@cases(("blocks", "stop"), [((0, 2), 2), ((2, 4), 4)])
def test_what_runs_again_never_needs_more(blocks: tuple[int, int], stop: int) -> None:
    """With two blocks and two micro-batches, whichever blocks these are."""
    before, after = (sum(terms(PLAN.course, *ranges, start=stop - 2, stop=stop).values()) for ranges in ((), (blocks,)))
    assert after < before


def test_lowest_block_that_trains_keeps_less_where_that_was_measured() -> None:
    """Its graph begins at its adapter; a block that runs again keeps its input, whatever it would keep else."""
    found = terms(PLAN.course, lowest_token_bytes=3000)
    assert found["lowest block's graph of a micro-batch"] == 2 * 3000 * TOKENS
    assert found["block's graph of a micro-batch"] == 6 * GRAPH
    assert terms(PLAN.course, start=2, lowest_token_bytes=3000) == terms(PLAN.course, start=2)
    assert terms(PLAN.course, (0, 1), lowest_token_bytes=3000) == terms(PLAN.course, (0, 1))
    assert terms(velora((0, 4)), lowest_token_bytes=3000)["lowest block's graph of a micro-batch"] == 2 * 3000 * TOKENS
    assert terms(velora((0, 4)), lowest_token_bytes=1e9)["lowest block's graph of a micro-batch"] == 2 * (GRAPH - SAVED)


def test_a_run_that_gathers_scores_counts_on_no_projections() -> None:
    """In such a pass whole inputs are kept; blocks run again there too."""
    capacity = operation_tables.BlockCapacity(full=2.0, forward_only=1.0, forward=1.0, backward=1.0)
    choice = operation_tables.Choice(policy="two-stage", subnets=1, capacities=(capacity,))
    scoring = dataclasses.replace(velora((0, 4)), choice=choice)
    whole, again = terms(scoring), terms(scoring, (0, 4))
    assert whole["block's graph of a micro-batch"] == 8 * GRAPH
    assert again["graph of the block that is run again"] == GRAPH
    inputs = "inputs of a block's linear layers, for scores"
    assert again[inputs] * 8 == whole[inputs]
