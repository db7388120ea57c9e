"""What operation tables leave of graphs, and what tables and scores take, by hand."""

from __future__ import annotations

import dataclasses
import tracemalloc

from ringtune.costs.memory_estimate import memory_estimate
from ringtune.costs.memory_sizes import (
    SCORE_WORK_BYTES,
    MemorySettings,
    SavedGraphs,
    Sizes,
    block_scores_bytes,
    kept_graphs,
    tables_bytes,
)
from ringtune.costs.memory_terms import MemoryEstimate, Share
from ringtune.schedule.course import TABLES_AT_ONCE, Course
from ringtune.schedule.operation_tables import (
    BatchOperations,
    BlockCapacity,
    Choice,
    Operations,
    ScheduledTable,
    block_row,
)
from tests.support.cases import cases
from tests.support.plans import make_plan
from tests.support.profiles import node

PLAN = make_plan([("a", 0, 4)], ["a"], microbatches=2, batch_size=4, train_rows=8, method="all", num_steps=8)
TOKENS = 2 * 16
GRAPH = 20_000 * TOKENS
ADAPTER = node(PLAN, "a").model.adapter_block_bytes


def with_rows(*batches: tuple[str, ...], subnets: int = 1) -> Course:
    """The plan's course with a table of its two batches."""
    entries = tuple(BatchOperations(owner="a", batch_id=at, rows=rows) for at, rows in enumerate(batches))
    return dataclasses.replace(PLAN.course, operations=Operations(batches=entries, subnets=subnets))


def with_choice(policy: str, *, full: float, subnets: int = 2, **changes: object) -> Course:
    """The plan's course, which chooses tables with so many full rows a batch for each subnet."""
    capacity = BlockCapacity(full=2 * full, forward_only=0.0, forward=1.0, backward=1.0)
    choice = Choice(policy=policy, subnets=subnets, capacities=(capacity,), **changes)  # type: ignore[arg-type]
    return dataclasses.replace(PLAN.course, choice=choice)


def estimate(course: Course, *, start: int = 0, stop: int = 4, adapter: str = "seq_bn") -> MemoryEstimate:
    """What a node that hosts [start, stop) and owns nothing needs."""
    facts = node(PLAN, "a")
    facts = dataclasses.replace(facts, shape=dataclasses.replace(facts.shape, adapter=adapter))
    sizes = Sizes.at(course, facts, MemorySettings("sgd"))
    return memory_estimate(course, Share(is_owner=False, start=start, stop=stop, above=4 - stop), sizes)


def terms(found: MemoryEstimate) -> dict[str, int]:
    """Bytes by what they are."""
    return {term.what: term.total_bytes for term in found.terms}


def test_without_tables_graphs_may_be_whole() -> None:
    """So they may where batches are left out, and where scores have to be gathered first."""
    assert kept_graphs(PLAN.course) is None
    assert kept_graphs(with_rows(("1133", "3311"))) is None, "batch 1 is all full"
    assert kept_graphs(with_choice("two-stage", full=1)) is None
    assert kept_graphs(with_choice("magnitude", full=1)) is None
    assert kept_graphs(with_choice("standard", full=1)) is None


def test_a_table_keeps_the_most_that_any_batch_keeps() -> None:
    """Per block: micro-batches with a graph, shares of subnets in them, and where graphs begin."""
    course = with_rows(("11132233", "33111131"), ("13332211",) * 2, subnets=2)
    assert kept_graphs(course) == SavedGraphs((2, 2, 1, 2), (1.0, 1.5, 1.0, 2.0), (2, 1, 0, 2))


def test_a_graph_has_an_input_for_each_run_of_blocks() -> None:
    """At most one of two neighbours begins one; a slice begins one wherever its lowest block has a graph."""
    graphs = SavedGraphs((2, 2, 1, 2), (1.0, 1.5, 1.0, 2.0), (2, 1, 0, 2))
    assert [graphs.inputs(start, stop, 2) for start, stop in ((0, 4), (0, 1), (2, 4), (1, 3), (3, 3))] == [
        4,
        2,
        2,
        2,
        0,
    ]


def test_drawn_tables_keep_what_capacities_allow() -> None:
    """One micro-batch of two rows fits each subnet: another one for each of the two subnets at worst."""
    assert kept_graphs(with_choice("random", full=2)) == SavedGraphs((2,) * 4, (1.0,) * 4, (2,) * 4)
    assert kept_graphs(with_choice("random", full=2, subnets=1)) == SavedGraphs((1,) * 4, (1.0,) * 4, (1,) * 4)
    assert kept_graphs(with_choice("random", full=1)) == kept_graphs(with_choice("random", full=2)), "at least one"
    assert kept_graphs(with_choice("random", full=4)) == SavedGraphs((2,) * 4, (2.0,) * 4, (2,) * 4)


def test_given_tables_keep_the_most_of_all() -> None:
    """A run that repeats another one's decisions knows them."""
    each = [with_rows((rows,) * 2, (rows,) * 2).operations for rows in ("1133", "1311")]
    assert each[0] is not None and each[1] is not None
    choice = Choice.given([ScheduledTable(step=0, operations=each[0]), ScheduledTable(step=4, operations=each[1])])
    found = kept_graphs(dataclasses.replace(PLAN.course, choice=choice))
    assert found == SavedGraphs((2,) * 4, (2.0,) * 4, (2, 0, 2, 0))


def test_all_full_tables_keep_what_no_tables_keep() -> None:
    """The same bytes, whatever the number of subnets."""
    for subnets in (1, 4):
        course = with_rows(*(("1" * 4 * subnets,) * 2,) * 2, subnets=subnets)
        assert estimate(course).parts()["activations"] == estimate(PLAN.course).parts()["activations"]


def test_scores_keep_inputs_and_one_gradient() -> None:
    """A linear layer whose weights get a gradient keeps its input; own weights that train do so anyway."""
    chosen, more = (
        with_choice("two-stage", full=1, backward_score="fisher"),
        "inputs of a block's linear layers, for scores",
    )
    reduced = 4 * 32 * 32 * 4 + SCORE_WORK_BYTES
    found = terms(estimate(chosen))
    assert found[more] == 2 * 4 * (3 * 32 + 4 * 32) * 4 * TOKENS
    assert found["gradient that is reduced to scores"] == reduced
    assert found["block's graph of a micro-batch"] == 2 * 4 * GRAPH
    assert more not in terms(estimate(chosen, adapter="full"))
    assert more not in terms(estimate(with_choice("magnitude", full=1)))
    assert more not in terms(estimate(with_choice("random", full=1)))
    assert more not in terms(estimate(chosen, start=4))
    # Of adapters: no such inputs, and one gradient of an adapter's size at most
    adapters = with_choice("two-stage", full=1, backward_score="fisher", scored_weights="adapter")
    found = terms(estimate(adapters))
    assert more not in found
    assert found["gradient that is reduced to scores"] == ADAPTER + SCORE_WORK_BYTES < reduced
    assert found["block's graph of a micro-batch"] == 2 * 4 * GRAPH


def test_scores_go_down_to_blocks_that_a_short_run_never_trains() -> None:
    """Two steps train the two upper blocks; scores are gathered of all four."""
    plan = make_plan([("a", 0, 4)], ["a"], every_steps=1, num_steps=2, batch_size=4, train_rows=8)
    choice = with_choice("two-stage", full=1).choice
    found = terms(estimate(dataclasses.replace(plan.course, choice=choice)))
    assert found["block's graph of a micro-batch"] == found["block's graph while scores are gathered"] == 2 * 2 * GRAPH


def test_scores_of_all_batches_are_counted_for_every_block_that_is_scored() -> None:
    """As many as there are batches, micro-batches, scores and subnets; a policy without scores has none."""
    chosen = with_choice("two-stage", full=1, backward_score="fisher")
    what = "block's scores until they are reported"
    one = block_scores_bytes(chosen)
    assert terms(estimate(chosen))[what] == 4 * one
    assert terms(estimate(chosen, start=3))[what] == one > 2 * 2 * 2 * 2 * 8
    longer = dataclasses.replace(chosen, owners=(dataclasses.replace(chosen.owners[0], train_rows=80),))
    assert block_scores_bytes(longer) == 10 * one
    assert block_scores_bytes(with_choice("two-stage", full=1, subnets=4, backward_score="fisher")) > one
    assert block_scores_bytes(with_choice("magnitude", full=1)) < one
    assert block_scores_bytes(with_choice("random", full=1)) == block_scores_bytes(PLAN.course) == 0


def test_tables_are_counted_for_every_decision_that_a_node_may_hold() -> None:
    """One that holds throughout, one a refresh, at most so many as are kept at all."""
    one = tables_bytes(with_choice("random", full=1))
    assert tables_bytes(PLAN.course) == 0 and one > 0
    assert tables_bytes(with_choice("random", full=1, refresh_steps=2)) == 5 * one
    long = dataclasses.replace(with_choice("random", full=1, refresh_steps=2), num_steps=100_000)
    assert tables_bytes(long) == TABLES_AT_ONCE * one
    assert terms(estimate(with_rows(*(("1133",) * 2,) * 2)))["operation tables"] == tables_bytes(
        with_rows(*(("1133",) * 2,) * 2)
    )


@cases(("subnets", "num_batches"), [(1, 50), (6, 200)])
def test_tables_take_at_most_what_is_counted(subnets: int, num_batches: int) -> None:
    """A table with other rows for every batch, with all that is looked up in it."""
    plan = make_plan([("a", 0, 12)], ["a"], num_blocks=12, microbatches=4, batch_size=4, train_rows=4 * num_batches)
    length = 12 * subnets
    block_row.cache_clear()  # a full cache would take new rows in place of old ones, whose bytes are not traced
    tracemalloc.start()
    try:
        entries = tuple(
            BatchOperations(
                owner="a",
                batch_id=batch,
                rows=tuple(f"{4 * batch + micro:0{length}b}".replace("0", "3")[-length:] for micro in range(4)),
            )
            for batch in range(num_batches)
        )
        course = dataclasses.replace(plan.course, operations=Operations(batches=entries, subnets=subnets))
        found = [course.operations_of("a", batch) for batch in range(num_batches)]
        of_here = [tracemalloc.Filter(True, name) for name in (__file__, "<string>", "*/ringtune/*")]
        taken = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(of_here).traces)
    finally:
        tracemalloc.stop()
    assert len(found) == num_batches
    assert 0.3 * tables_bytes(course) < taken <= tables_bytes(course)
