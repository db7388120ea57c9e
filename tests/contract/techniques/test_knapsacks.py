"""A run's table from what its nodes reported: every policy, uneven micro-batches, every kind of wrong score."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

from ringtune.errors import PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.operation_tables import BlockCapacity, Operations
from ringtune.schedule.placement import Slice
from ringtune.techniques.knapsacks import choose_table
from ringtune.techniques.operation_capacities import choice_of
from ringtune.techniques.operations import OperationsSettings, choosers_of, expected_table
from tests.contract.techniques.knapsack_reference import knapsack_scheduling
from tests.support.cases import cases
from tests.support.choosing import choosing_course, made_scores, random_scores


def columns(table: Operations) -> list[str]:
    """The codes of each subnet for the micro-batches of each batch."""
    return ["".join(column) for batch in table.batches for column in zip(*batch.rows, strict=True)]


@cases("rotate", [False, True])
@cases("kind", ["taylor", "weight-magnitude"])
@cases("size", [2, 3])
def test_two_stage_table_equals_reference(size: int, kind: str, rotate: bool) -> None:
    """Each subnet of each batch has the codes of Algorithm 1, also with micro-batches of unequal rows.

    A further pass hands its micro-batches to Algorithm 1 from the next one on, which decides where scores tie.
    """
    course = choosing_course(
        full=2, forward_only=1, microbatches=4, subnets=2, num_blocks=3, size=size, owners=2, forward_score="fisher",
        backward_score=kind, rotate=rotate,
    )  # fmt: skip
    course = dataclasses.replace(course, batch_size=4 * size - size // 3)
    lots, ties_at = random.Random(0), 0 if kind == "weight-magnitude" else None
    scores = made_scores(course, lambda _entry, score, _subnet: 1.0 if score == ties_at else lots.random())
    table, sizes = choose_table(course, scores), course.microbatch_sizes()
    assert table.passes == (4 if rotate else 1)
    for owner, batch_id, of_pass in itertools.product(course.owners, range(2), range(table.passes)):
        batch = (owner.node, batch_id)
        values = {(each.micro, each.block): each.values for each in scores if each[:2] == batch}
        for chooser in choosers_of(course):
            order = [(chooser.first + batch_id + of_pass + at) % 4 for at in range(4)]
            backward, forward = (
                [Fraction(values[micro, chooser.start][score][chooser.subnet]) for micro in order] for score in (0, 1)
            )
            rows = [sizes[micro] for micro in order]
            codes = knapsack_scheduling(backward, forward, (rows, rows), (chooser.full_rows(), chooser.forward_rows()))
            at = chooser.start * 2 + chooser.subnet
            assert "".join(table.rows_of(*batch, of_pass)[micro][at] for micro in order) == codes


@cases(("policy", "repeats_after"), [("two-stage", 5), ("joint", 5), ("random", 1), ("magnitude", 1)])
def test_rotation_trains_all_rows_alike(policy: str, repeats_after: int) -> None:
    """As many passes as micro-batches make every subnet full for every one equally often; the first pass is as without.

    What is chosen by lot, or passed by for good, has no ties to turn.
    """
    course = choosing_course(full=3, microbatches=5, num_blocks=3, subnets=2, policy=policy, ties="together")
    assert course.choice is not None
    turned = dataclasses.replace(course, choice=dataclasses.replace(course.choice, rotate=True))
    plain, table = (choose_table(each, made_scores(each, lambda *_: 1.0)) for each in (course, turned))
    assert (plain.passes, table.passes) == (1, repeats_after)
    decided, owner = turned.decided((), table), course.owners[0].node
    counts, seen = Counter[tuple[int, int, int]](), dict[int, set[tuple[str, ...]]]()
    for at in range(2 * 10):  # ten passes over two batches
        batch, rows = decided.batch_id(owner, at), decided.subnet_operations_of(owner, at)
        assert at >= 2 or rows == plain.rows_of(owner, batch)
        seen.setdefault(batch, set()).add(rows)
        counts.update(
            (batch, micro, place) for micro, row in enumerate(rows) for place, code in enumerate(row) if code == "1"
        )
    assert {len(found) for found in seen.values()} == {repeats_after}
    assert repeats_after == 1 or (len(set(counts.values())), len(counts)) == (1, 2 * 5 * 6)


@cases("policy", ["two-stage", "random"])
def test_counts_of_every_subnet_hold(policy: str) -> None:
    """Three full and one forward-only of five are just that, at every subnet and whatever the scores."""
    course = choosing_course(full=3, forward_only=1, microbatches=5, subnets=6, num_blocks=4, owners=2, policy=policy)
    scores = random_scores(course) if policy == "two-stage" else ()
    table = choose_table(course, scores)
    assert len(table.batches) == 4
    assert {"".join(sorted(column)) for column in columns(table)} == {"11123"}


def test_joint_prefers_what_counts_more() -> None:
    """With a larger scale forward-only operations win, with a small one full ones; the capacity is one."""
    counts = {}
    for scale in (0.01, 0.5):
        course = choosing_course(
            full=2, forward_only=1, microbatches=5, subnets=2, num_blocks=2, policy="joint", score_scale=scale,
            backward_score="taylor",
        )  # fmt: skip
        table = choose_table(course, random_scores(course))
        counts[scale] = {"".join(sorted(column)) for column in columns(table)}
    assert counts == {0.01: {"11233"}, 0.5: {"11233", "12223"}}


@cases(
    ("scale", "message"),
    [
        (100.0, r"nothing would train; lower operations.score_scale, which is 100"),  # forward-only ones win everywhere
        (1.7e308, r"operations.score_scale = 1.7e\+308"),  # its product with a forward score is no number any more
    ],
)
def test_joint_with_too_large_a_scale_is_refused(scale: float, message: str) -> None:
    """The key is named."""
    course = choosing_course(
        full=2, forward_only=1, microbatches=5, subnets=2, num_blocks=2, policy="joint", score_scale=scale,
        backward_score="taylor",
    )  # fmt: skip
    with pytest.raises(PlanError, match=message):
        choose_table(course, random_scores(course))


def test_scores_of_a_new_lora_that_are_zero_are_ties() -> None:
    """Taylor is zero while B is: the first micro-batches are full, or with joint Fisher in its place is advised."""

    def chosen(policy: str) -> Operations:
        course = choosing_course(
            full=2, forward_only=1, microbatches=4, num_blocks=2, policy=policy, scored_weights="adapter",
            backward_score="taylor", ties="together",
        )  # fmt: skip
        return choose_table(course, made_scores(course, lambda entry, score, _: float(score * (1 + entry.micro))))

    assert chosen("two-stage").batches[0].rows == ("11", "11", "33", "22")
    with pytest.raises(PlanError, match=r"nothing would train; set operations.backward_score = 'fisher', as a new"):
        chosen("joint")


@cases("units", [1e-30, 1e-6, 1e6, 1e300])
def test_joint_does_not_depend_on_the_units_of_scores(units: float) -> None:
    """Weights are sums of thousands and Fisher information of millionths: each counts in parts of its mean."""
    course = choosing_course(full=2, forward_only=1, microbatches=5, subnets=2, num_blocks=2, policy="joint",
                             score_scale=0.25, backward_score="taylor")  # fmt: skip
    scores = random_scores(course)
    other = [
        each._replace(values=(each.values[0], tuple(units * value for value in each.values[1]))) for each in scores
    ]
    assert choose_table(course, other) == choose_table(course, scores)


def test_joint_with_all_of_the_compute_is_all_full() -> None:
    """Where all that is full fits, no forward-only operation is preferred to it, whatever it counts."""
    course = choosing_course(full=5, microbatches=5, subnets=2, num_blocks=2, policy="joint", score_scale=100.0,
                             backward_score="taylor")  # fmt: skip
    assert set("".join(columns(choose_table(course, random_scores(course))))) == {"1"}


def test_only_scores_that_are_used_are_gathered() -> None:
    """Without forward-only operations there is no forward score, and of weights alone one batch is enough."""
    alone = choosing_course(full=3, microbatches=5, subnets=3, num_blocks=4, owners=2)
    both = choosing_course(full=3, forward_only=1, microbatches=5, num_blocks=4, owners=2)
    assert alone.choice is not None and both.choice is not None
    assert [str(score) for score in alone.choice.scores] == ["weight-magnitude"]
    assert [str(score) for score in both.choice.scores] == ["weight-magnitude", "fisher"]
    assert [course.num_scored(owner) for course in (alone, both) for owner in course.owners] == [1, 1, 2, 2]
    scores = made_scores(alone, lambda entry, *_: 1.0 + entry.block)
    scored = {owner.node: alone.batch_id(owner.node, 0) for owner in alone.owners}
    of_one = [each for each in scores if each.batch_id == scored[each.owner]]
    assert choose_table(alone, of_one) == choose_table(alone, scores) == expected_table(alone)


def test_joint_keeps_counts_at_odd_costs() -> None:
    """Where no small unit makes a forward whole, capacities still hold what they were meant for."""
    course = choosing_course(full=3, microbatches=5, subnets=2, num_blocks=2, policy="joint", score_scale=1e-3)
    capacity = BlockCapacity(full=30.0, forward_only=2 * 4.12345, forward=4.12345 / 1, backward=10 / 2 - 4.12345)
    assert course.choice is not None
    course = dataclasses.replace(course, choice=dataclasses.replace(course.choice, capacities=(capacity,)))
    assert {"".join(sorted(column)) for column in columns(choose_table(course, random_scores(course)))} == {"11123"}


def test_random_is_drawn_anew_by_seed_owner_batch_and_step() -> None:
    """The same seed and step give the same table; another seed, owner, batch or step gives another one."""
    course = choosing_course(full=3, microbatches=5, subnets=6, num_blocks=4, owners=2, policy="random")
    table = choose_table(course, (), 16)
    assert table == choose_table(course, (), 16)
    assert len({batch.rows for batch in table.batches}) == 4
    assert len(set(columns(table))) == 10  # all ways of being full for 3 of 5
    assert choose_table(course, (), 32) != table != choose_table(dataclasses.replace(course, seed=1), (), 16)


def test_random_does_not_depend_on_the_version_of_numpy() -> None:
    """The lots are raw words of a named generator, so that this table stays."""
    course = choosing_course(full=1, microbatches=4, subnets=1, num_blocks=4, policy="random")
    assert choose_table(course, (), 0).batches[0].rows == ("1333", "3333", "3313", "3131")


@cases("policy", ["magnitude", "magnitude-gradient"])
def test_pruning_passes_the_least_by(policy: str) -> None:
    """The budget is over all subnets: those that count least do nothing for any micro-batch."""
    course = choosing_course(full=3, microbatches=5, subnets=5, num_blocks=2, policy=policy)
    table = choose_table(course, made_scores(course, lambda entry, _, subnet: 1.0 + entry.block + 0.1 * subnet))
    assert {row for batch in table.batches for row in batch.rows} == {"3333111111"}


def test_pruning_needs_the_scored_batch_only() -> None:
    """Pruning scores one batch of each owner; its table is of all batches."""
    course = choosing_course(full=3, microbatches=5, subnets=5, num_blocks=2, policy="magnitude", owners=2)
    scored = {owner.node: course.batch_id(owner.node, 0) for owner in course.owners}
    scores = [each for each in random_scores(course) if each.batch_id == scored[each.owner]]
    assert len(choose_table(course, scores).batches) == 4


def test_magnitude_gradient_adds_shares() -> None:
    """A subnet with small weights and a large gradient stays: both count as shares of their means."""
    course = choosing_course(full=1, microbatches=2, subnets=2, num_blocks=1, policy="magnitude-gradient")
    values = ((100.0, 120.0), (0.03, 0.01))  # shares 0.91 + 1.5 and 1.09 + 0.5
    table = choose_table(course, made_scores(course, lambda _, score, subnet: values[score][subnet]))
    assert table.batches[0].rows == ("13", "13")


def test_blocks_that_never_train_are_full() -> None:
    """A frozen block has no scores and is always active."""
    course = choosing_course(full=1, microbatches=2, num_blocks=3, frozen_blocks=2)
    assert choose_table(course, random_scores(course)).batches[0].rows in (("111", "113"), ("113", "111"))


def test_batch_of_fewer_rows_than_micro_batches() -> None:
    """An owner of three rows has three micro-batches of four; the table has a full row for the fourth."""
    course = choosing_course(full=2, microbatches=4, num_blocks=2, size=2, train_rows=3)
    rows = choose_table(course, random_scores(course)).batches[0].rows
    assert len(rows) == 4 and rows[3] == "11"
    assert Counter("".join(rows[:3])) == {"1": 2, "3": 4}


def test_order_of_scores_does_not_matter() -> None:
    """Whoever reports first, the table is the same."""
    course: Course = choosing_course(full=2, forward_only=1, microbatches=4, subnets=2, num_blocks=3, owners=2)
    scores = random_scores(course)
    assert choose_table(course, scores) == choose_table(course, scores[::-1])


POLICIES = ("two-stage", "joint", "random")


def uneven_course(
    policy: str, *, batch_size: int = 10, microbatches: int = 4, train_rows: int = 20, subnets: int = 2, **settings: Any
) -> Course:
    """A course with micro-batches of unequal rows, whose capacities are those of a job."""
    course = choosing_course(
        full=1, microbatches=microbatches, subnets=subnets, num_blocks=3, size=3, train_rows=train_rows
    )
    course = dataclasses.replace(course, batch_size=batch_size)
    made = choice_of(
        OperationsSettings(policy=policy, backward_score="taylor", score_scale=0.1, **settings),
        course,
        subnets=subnets,
        hosts=(Slice(node="a", start=0, stop=3),),
        costs={"a": (0.4, 0.6)},
    )
    return dataclasses.replace(course, choice=made)


@cases("policy", POLICIES)
@cases("batch_size", [10, 11])
@cases("compute", [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_compute_is_never_exceeded(policy: str, batch_size: int, compute: float) -> None:
    """A share of the compute is one of rows, whichever micro-batches are taken."""
    course = uneven_course(policy, batch_size=batch_size, train_rows=2 * batch_size, compute=compute)
    work = {"1": 1.0, "2": 0.4, "3": 0.0}
    for table in (choose_table(course, random_scores(course)), expected_table(course)):
        for column in columns(table):
            done = sum(work[code] * rows for code, rows in zip(column, course.microbatch_sizes(), strict=True))
            assert done <= compute * batch_size + 1e-9


@cases("batch_size", [10, 11, 12, 13])
@cases("subnets", [1, 2, 6])
@cases("settings", [{"full": 2, "forward_only": 1, "rotate": True}, {"full": 3}, {"compute": 0.5}, {"compute": 0.7}])
def test_expected_table_is_what_equal_scores_give(batch_size: int, subnets: int, settings: dict[str, Any]) -> None:
    """Predictions assume the very table that weight magnitudes lead to."""
    course = uneven_course("two-stage", batch_size=batch_size, train_rows=2 * batch_size, subnets=subnets, **settings)
    assert choose_table(course, made_scores(course, lambda *_: 1.0)) == expected_table(course)


@cases("policy", ["two-stage", "random"])
@cases("settings", [{"full": 3}, {"compute": 0.6}])
@cases("rows", [1, 2, 3])
def test_owner_of_few_rows_trains(policy: str, settings: dict[str, Any], rows: int) -> None:
    """Every subnet of every batch has at least one full micro-batch, however few rows there are."""
    course = uneven_course(policy, microbatches=5, train_rows=rows, **settings)
    for table in (choose_table(course, random_scores(course)), expected_table(course)):
        assert all("1" in column[:rows] for column in columns(table))
