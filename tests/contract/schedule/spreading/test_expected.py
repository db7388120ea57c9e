"""The table of a prediction: counts as the capacities allow, evenly spread."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from ringtune.errors import PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.operations.choice import BlockCapacity, Choice
from ringtune.schedule.operations.given import GivenTable
from ringtune.schedule.spreading.choosers import choosers_of
from ringtune.schedule.spreading.expected import expected_table
from tests.support.operation_choices import choosing_course
from tests.support.plans import make_plan


def test_expected_table_as_drawn() -> None:
    """Three subnets a block, full for 3 of 5 micro-batches and forward-only for one: the table of the docstring."""
    table = expected_table(choosing_course(full=3, forward_only=1, microbatches=5, subnets=3, num_blocks=2))
    assert table.subnets == 3
    assert table.batches[0].rows == ("131321", "112131", "113112", "211113", "321211")
    assert table.batches[1].rows == ("321211", "131321", "112131", "113112", "211113")


@pytest.mark.parametrize("microbatches", [2, 3, 4, 5, 8, 10, 20])
@pytest.mark.parametrize("subnets", [1, 2, 3, 5, 6, 12])
def test_full_operations_are_spread_evenly(microbatches: int, subnets: int) -> None:
    """Each subnet has its counts; all micro-batches have nearly as many full subnets; none passes all blocks by."""
    for full in range(1, microbatches + 1):
        course = choosing_course(full=full, microbatches=microbatches, subnets=subnets, num_blocks=12)
        rows = expected_table(course).batches[1].rows
        assert {Counter(column)["1"] for column in zip(*rows, strict=True)} == {full}
        totals = [row.count("1") for row in rows]
        assert max(totals) - min(totals) <= 2
        assert min(totals) > 0 or full * subnets * 12 < microbatches


def test_ties_together_leave_whole_micro_batches_out() -> None:
    """Every subnet of every block has the same micro-batches; each batch begins one later."""
    course = choosing_course(full=2, microbatches=3, subnets=3, num_blocks=2, train_rows=6, size=1, ties="together")
    assert [entry.rows for entry in expected_table(course).batches] == [
        ("111111", "111111", "333333"),
        ("333333", "111111", "111111"),
    ]


def test_blocks_of_a_group_share_one_code() -> None:
    """With groups, whole slices are passed by; the next one takes the micro-batches that the last one left."""
    course = choosing_course(full=2, microbatches=4, num_blocks=4, groups=((0, 2), (2, 4)))
    assert expected_table(course).batches[0].rows == ("1133", "1133", "3311", "3311")


def test_blocks_that_never_train_are_full() -> None:
    """Frozen blocks have no chooser: their operations are not chosen."""
    course = choosing_course(full=1, microbatches=2, num_blocks=4, frozen_blocks=2)
    assert [chooser.start for chooser in choosers_of(course)] == [2, 3]
    assert expected_table(course).batches[0].rows == ("1113", "1131")


def test_pruning_keeps_whole_subnets() -> None:
    """The expected table of a pruning policy has so many whole subnets; each is full for all micro-batches."""
    course = choosing_course(full=3, microbatches=5, subnets=5, num_blocks=4, policy="magnitude")
    rows = expected_table(course).batches[0].rows
    assert set(rows) == {rows[0]}
    assert Counter(rows[0]) == {"1": 12, "3": 8}


def test_unequal_micro_batches_stay_within_capacity() -> None:
    """A batch of 10 rows in 4 micro-batches: capacities are in rows, whatever the micro-batches are."""
    course = dataclasses.replace(choosing_course(full=2, microbatches=4, num_blocks=3, size=3), batch_size=10)
    for batch in expected_table(course).batches:
        for column in zip(*batch.rows, strict=True):
            assert sum(rows for code, rows in zip(column, (3, 3, 2, 2), strict=True) if code == "1") <= 6


def test_small_batch_has_its_share_of_capacity() -> None:
    """An owner of fewer rows than a batch has capacities in the same share."""
    course = choosing_course(full=2, microbatches=4, num_blocks=2, size=2, train_rows=4)
    assert all(row.count("1") == 1 for row in expected_table(course).batches[0].rows)


def test_course_without_choice_has_an_empty_table() -> None:
    """Everything is full where nothing is chosen, and with the policy standard."""
    course = choosing_course(full=1, microbatches=2, num_blocks=2)
    assert expected_table(dataclasses.replace(course, choice=None)).batches == ()
    assert expected_table(choosing_course(full=2, microbatches=2, num_blocks=2, policy="standard")).batches == ()


def test_given_tables_are_expected() -> None:
    """Where tables are given, the first one is what comes, and nobody chooses."""
    course = choosing_course(full=1, microbatches=2, num_blocks=2)
    table = expected_table(course)
    given = dataclasses.replace(course, choice=Choice.given([GivenTable(step=0, operations=table)]))
    assert expected_table(given) == table
    assert choosers_of(given) == ()


def test_groups_survive_json() -> None:
    """A choice with groups is read as it was written."""
    course = choosing_course(full=2, microbatches=4, num_blocks=4, groups=((0, 2), (2, 4)))
    assert Course.from_json(json.loads(json.dumps(course.to_json()))) == course


@pytest.mark.parametrize("groups", [((0, 2), (1, 4)), ((2, 2),), ((0, 1, 2),), ((0, 5),)])
def test_wrong_groups_are_refused(groups: tuple[tuple[int, ...], ...]) -> None:
    """Groups are ascending ranges of the blocks of the model."""
    with pytest.raises(PlanError, match="groups"):
        choosing_course(full=2, microbatches=4, num_blocks=4, groups=groups)


def test_groups_of_subnets_are_refused() -> None:
    """A group is one subnet."""
    with pytest.raises(PlanError, match="1 subnet"):
        Choice(
            policy="two-stage",
            subnets=2,
            groups=((0, 2),),
            capacities=(BlockCapacity(full=1, forward_only=0, forward=1, backward=1),),
        )


def test_length_of_a_run_does_not_change_its_operations() -> None:
    """Blocks that train only in a longer run choose from the start, so that a longer run has the same table."""
    course = choosing_course(full=2, microbatches=4, num_blocks=6)
    plan = make_plan([("a", 0, 6)], ["a"], num_blocks=6, num_steps=4, every_steps=2)
    short = dataclasses.replace(plan.course, choice=course.choice)
    longer = dataclasses.replace(short, num_steps=40)
    assert len(choosers_of(short)) == 6
    assert choosers_of(short) == choosers_of(longer)
    assert expected_table(short) == expected_table(longer)
