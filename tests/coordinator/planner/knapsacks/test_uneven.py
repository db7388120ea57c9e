"""Micro-batches of unequal rows, and owners of few rows: counts are exact, a share of compute is never exceeded."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coordinator.planner.knapsacks.capacities import choice_of
from coordinator.planner.knapsacks.choose import choose_table
from ringtune.jobs.operations.settings import OperationsSettings
from ringtune.schedule.course import Course
from ringtune.schedule.operations.table import Operations
from ringtune.schedule.placement import Slice
from ringtune.schedule.spreading.expected import expected_table
from tests.support.operation_choices import choosing_course, made_scores, random_scores

POLICIES = ("two-stage", "joint", "random")


def uneven_course(
    policy: str, *, batch_size: int = 10, microbatches: int = 4, train_rows: int = 20, **settings: Any
) -> Course:
    """A course with micro-batches of unequal rows, whose capacities are those of a job."""
    course = choosing_course(full=1, microbatches=microbatches, subnets=2, num_blocks=3, size=3, train_rows=train_rows)
    course = dataclasses.replace(course, batch_size=batch_size)
    made = choice_of(
        OperationsSettings(policy=policy, backward_score="taylor", score_scale=0.1, **settings),
        subnets=2,
        microbatch_sizes=course.microbatch_sizes(),
        hosts=(Slice(node="a", start=0, stop=3),),
        costs={"a": (0.4, 0.6)},
        num_blocks=3,
        local_iterations=1,
        owners=1,
    )
    return dataclasses.replace(course, choice=made)


def columns(table: Operations) -> list[str]:
    """The codes of each subnet for the micro-batches of each batch."""
    return ["".join(column) for batch in table.batches for column in zip(*batch.rows, strict=True)]


@pytest.mark.parametrize("policy", ["two-stage", "random"])
@pytest.mark.parametrize(("full", "forward_only"), [(1, 1), (2, 0), (3, 0), (3, 2), (5, 1), (6, 0)])
def test_counts_are_exact(policy: str, full: int, forward_only: int) -> None:
    """Of micro-batches of 2, 2, 2, 2, 1 and 1 rows just so many are full and forward-only."""
    course = uneven_course(policy, microbatches=6, full=full, forward_only=forward_only)
    expected = {"1" * full + "2" * forward_only + "3" * (6 - full - forward_only)}
    for table in (choose_table(course, random_scores(course)), expected_table(course)):
        assert {"".join(sorted(column)) for column in columns(table)} == expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batch_size", [10, 11])
@pytest.mark.parametrize("compute", [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_compute_is_never_exceeded(policy: str, batch_size: int, compute: float) -> None:
    """A share of the compute is one of rows, whichever micro-batches are taken."""
    course = uneven_course(policy, batch_size=batch_size, train_rows=2 * batch_size, compute=compute)
    work = {"1": 1.0, "2": 0.4, "3": 0.0}
    for table in (choose_table(course, random_scores(course)), expected_table(course)):
        for column in columns(table):
            done = sum(work[code] * rows for code, rows in zip(column, course.microbatch_sizes(), strict=True))
            assert done <= compute * batch_size + 1e-9


@pytest.mark.parametrize("batch_size", [10, 11, 13])
@pytest.mark.parametrize("settings", [{"full": 2, "forward_only": 1}, {"compute": 0.5}, {"compute": 0.7}], ids=str)
def test_expected_table_is_what_equal_scores_give(batch_size: int, settings: dict[str, Any]) -> None:
    """Predictions assume the very table that weight magnitudes lead to."""
    course = uneven_course("two-stage", batch_size=batch_size, train_rows=2 * batch_size, **settings)
    assert choose_table(course, made_scores(course, lambda *_: 1.0)) == expected_table(course)


@pytest.mark.parametrize("policy", ["two-stage", "random"])
@pytest.mark.parametrize("settings", [{"full": 3}, {"compute": 0.6}], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_owner_of_few_rows_trains(policy: str, settings: dict[str, Any], rows: int) -> None:
    """Every subnet of every batch has at least one full micro-batch, however few rows there are."""
    course = uneven_course(policy, microbatches=5, train_rows=rows, **settings)
    for table in (choose_table(course, random_scores(course)), expected_table(course)):
        assert all("1" in column[:rows] for column in columns(table))
