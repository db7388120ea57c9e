"""A run with operation tables on the virtual clock takes what its subnets take, added up by hand."""

from __future__ import annotations

import dataclasses
import random

import pytest

from ringtune.costs.memory.operations import tables_bytes
from ringtune.costs.profile import Profile
from ringtune.costs.work_times import Work
from ringtune.schedule.actions import Op
from ringtune.schedule.operations.choice import BlockCapacity, Choice
from ringtune.schedule.operations.codes import share
from ringtune.schedule.operations.table import BatchOperations, Operations
from ringtune.schedule.plan import Plan
from ringtune.schedule.spreading.expected import expected_table
from sim.prediction import Prediction, predict
from sim.what_ifs.changes import change_profile
from tests.support.plans import changed, make_plan, random_operations
from tests.support.profiles import TIMES, all_pairs, part, profile_of

ENDS_S = TIMES[Work.EMBED] + TIMES[Work.HEAD]
LAST_S = TIMES[Work.UPDATE_HEAD]
HALF = {Work.FORWARD: 1.2, Work.GRAPH: 2.4, Work.GRAPH_LOWEST: 1.9, Work.BACKWARD: 2.8, Work.BACKWARD_LOWEST: 3.5}


def one_step(rows: tuple[str, ...], *, subnets: int, owner: str = "o", method: str = "all") -> Plan:
    """One step of an owner that hosts nothing, on two hosts of two blocks each."""
    plan = make_plan(
        [("a", 0, 2), ("b", 2, 4)],
        [owner],
        num_steps=1,
        local_iterations=1,
        microbatches=len(rows),
        train_rows=4,
        eval_rows=0,
        method=method,
    )
    batches = (BatchOperations(owner=owner, batch_id=0, rows=rows),)
    return changed(plan, operations=Operations(batches=batches, subnets=subnets))


def profile(plan: Plan, *, parts: bool = True) -> Profile:
    """Nodes with the times of whole and half blocks, without links."""
    found = profile_of(plan)
    more = tuple(part(work, seconds, share=0.5) for work, seconds in HALF.items()) if parts else ()
    nodes = (dataclasses.replace(facts, work_times=facts.work_times + more) for facts in found.nodes)
    return Profile(nodes=tuple(nodes))


def busy(found: Prediction, node: str) -> float:
    """Seconds that a node computes."""
    return next(each.busy_s for each in found.nodes if each.node == node)


def test_all_full_tables_take_what_a_run_without_tables_takes() -> None:
    """The same time, the same actions, the same bytes, and the same memory but that of the table."""
    plan = one_step(("1111" * 2,) * 2, subnets=2)
    found, without = (predict(each, profile(plan)) for each in (plan, changed(plan, operations=None)))
    nodes = [
        dataclasses.replace(
            node,
            needed_bytes=other.needed_bytes,
            peak_memory_bytes=node.peak_memory_bytes - tables_bytes(plan.course),
        )
        for node, other in zip(found.nodes, without.nodes, strict=True)
    ]
    assert dataclasses.replace(found, nodes=tuple(nodes)) == without


def test_one_micro_batch_takes_the_sum_of_its_parts() -> None:
    """Blocks: half full; one full, one forward-only; all forward-only; passed by."""
    plan = one_step(("13122233",), subnets=2)
    found = predict(plan, profile(plan))
    a_s = (1.9 + 3.5) + (2.4 + 0.8) + 2.8  # block 0 is the lowest: its backward takes 3.5 s whatever is active
    b_s = 2.0
    assert busy(found, "a") == pytest.approx(a_s + 2 * TIMES[Work.UPDATE])
    assert busy(found, "b") == pytest.approx(b_s + 2 * TIMES[Work.UPDATE])
    assert found.wall_s == pytest.approx(ENDS_S + a_s + b_s + 2 * TIMES[Work.UPDATE])


def test_a_profile_without_parts_takes_blocks_in_proportion() -> None:
    """Half of every block's subnets are half of its time."""
    plan = one_step(("13" * 4,), subnets=2)
    found = predict(plan, profile(plan, parts=False))
    above = TIMES[Work.GRAPH] + TIMES[Work.BACKWARD]
    lowest = TIMES[Work.GRAPH_LOWEST] + TIMES[Work.BACKWARD_LOWEST]
    assert found.wall_s == pytest.approx(ENDS_S + (3 * above + lowest) / 2 + 2 * TIMES[Work.UPDATE])


def test_a_slice_that_is_passed_by_takes_no_time_and_no_bytes() -> None:
    """Its predecessor sends straight to its successor; only its update is left."""
    plan = one_step(("33331111",), subnets=2)
    links = all_pairs(plan.nodes, 1e6, 0.0)
    timed = profile_of(plan, links=links)
    found = predict(plan, timed)
    assert busy(found, "a") == pytest.approx(2 * TIMES[Work.UPDATE])
    sent = {(link.source, link.target): link.sent_bytes for link in found.links}
    assert set(sent) == {("o", "b"), ("b", "o")}
    full = predict(changed(plan, operations=None), timed)
    hidden, grad = 64 * (32 * 4 + 1), 64 * 32 * 4  # a hidden state that enters a block has its mask
    assert sent == {("o", "b"): hidden + grad, ("b", "o"): grad}
    assert sum(link.sent_bytes for link in full.links) == sum(sent.values()) + hidden + grad


def test_each_micro_batch_takes_its_own_row() -> None:
    """Two micro-batches with different rows: a node is busy for the sum of both."""
    plan = one_step(("11113333", "33331111"), subnets=2)
    found = predict(plan, profile(plan))
    whole = 2 * (TIMES[Work.GRAPH] + TIMES[Work.BACKWARD])
    lowest = TIMES[Work.GRAPH] - TIMES[Work.GRAPH_LOWEST] + TIMES[Work.BACKWARD] - TIMES[Work.BACKWARD_LOWEST]
    for node in ("a", "b"):  # each has the lowest full block of one micro-batch
        assert busy(found, node) == pytest.approx(whole - lowest + 2 * TIMES[Work.UPDATE])


@pytest.mark.parametrize("seed", range(4))
def test_less_work_never_takes_longer(seed: int) -> None:
    """Random tables are busy for less than all-full ones, at every node."""
    rng = random.Random(seed)
    plan = make_plan([("a", 0, 2), ("b", 2, 3), ("c", 3, 4)], ["a", "b"], microbatches=4, num_steps=12)
    table = random_operations(rng, plan.course, subnets=4)
    full, less = (predict(each, profile(plan)) for each in (plan, changed(plan, operations=table)))
    for node in plan.nodes:
        assert busy(less, node) < busy(full, node)
    assert sum(each.busy_by_op_s.get(str(Op.UPDATE), 0.0) for each in less.nodes) > 0


# ---- runs that choose -------------------------------------------------------------------------------


def choosing(policy: str, *, full: float, refresh_steps: int = 0, num_steps: int = 4) -> Plan:
    """Two hosts, an owner of two batches in two micro-batches of two rows, and a capacity of ``full`` rows a batch."""
    plan = make_plan(
        [("a", 0, 2), ("b", 2, 4)], ["o"], num_steps=num_steps, local_iterations=2, microbatches=2, train_rows=8,
        eval_rows=0, method="all",
    )  # fmt: skip
    capacity = BlockCapacity(full=2 * full, forward_only=0.0, forward=1.0, backward=1.0)
    choice = Choice(
        policy=policy, subnets=2, capacities=(capacity,), refresh_steps=refresh_steps, backward_score="fisher"
    )
    return changed(plan, choice=choice)


def test_a_run_that_chooses_takes_its_scores_and_then_its_table() -> None:
    """Every batch is scored once, with the gradients of frozen weights; then half of each block is computed."""
    plan = choosing("two-stage", full=2)
    found = predict(plan, profile(plan, parts=False))
    table = expected_table(plan.course)
    assert {share(row, "1") for entry in table.batches for row in entry.rows} == {0.5}
    score_s = 2 * (TIMES[Work.GRAPH] + TIMES[Work.BACKWARD] + TIMES[Work.FORWARD])
    by_op = {node.node: node.busy_by_op_s for node in found.nodes}
    steps = 4 * 2 * 2 / 2  # steps, micro-batches, blocks, of which half is computed
    assert sum(by_op["b"].get(op, 0.0) for op in "FB") == pytest.approx(
        2 * 2 * score_s + steps * (TIMES[Work.GRAPH] + TIMES[Work.BACKWARD])
    )
    assert by_op["o"]["H"] == (2 + 4) * 2 * TIMES[Work.HEAD]
    without = predict(choosing("random", full=2), profile(plan, parts=False))
    assert found.wall_s - without.wall_s > 2 * 2 * score_s
    assert found.evaluation_s > 2 * score_s and without.evaluation_s < score_s


def test_steps_after_scores_take_what_their_table_takes() -> None:
    """The last backward of a scoring is no part of the first step; it once made the steps of short runs too long."""
    plan = choosing("two-stage", full=2)
    static = changed(plan, choice=None, operations=expected_table(plan.course))
    found, wanted = (predict(each, profile(plan)) for each in (plan, static))
    assert found.train_s == pytest.approx(wanted.train_s)
    assert found.depths[0].step_s == pytest.approx(wanted.depths[0].step_s)
    assert found.evaluation_s > wanted.evaluation_s + 1


def test_standard_and_random_gather_no_scores() -> None:
    """All-full tables that a run chooses take what no tables take; a random one takes half of the blocks."""
    plan = choosing("standard", full=4)
    assert predict(plan, profile(plan)).wall_s == predict(changed(plan, choice=None), profile(plan)).wall_s
    half = choosing("random", full=2)
    assert predict(half, profile(half)).wall_s < 0.85 * predict(plan, profile(plan)).wall_s


def test_scores_that_are_refreshed_take_their_time_again() -> None:
    """Once a turn of two steps: two scorings in a run of four steps."""
    once, twice = (choosing("two-stage", full=2, refresh_steps=every) for every in (0, 2))
    found = [predict(plan, profile(plan)).evaluation_s for plan in (once, twice)]
    assert found[1] == pytest.approx(2 * found[0], rel=0.05)


def test_a_faster_node_computes_parts_faster_too() -> None:
    """What-if a node were twice as fast: it is busy for half the time, with parts of blocks as with whole ones."""
    plan = one_step(("13121122", "22131311"), subnets=2)
    before, after = (predict(plan, found) for found in (profile(plan), change_profile(profile(plan), "a.compute", "2")))
    assert busy(after, "a") == pytest.approx(busy(before, "a") / 2)
    assert busy(after, "b") == pytest.approx(busy(before, "b"))
