"""Tables that a run has chosen: what is written comes back, and what no run wrote is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from ringtune.errors import PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.operations.choice import BlockCapacity, Choice
from ringtune.schedule.operations.given import GivenTable, tables_from_json, tables_to_json
from ringtune.schedule.operations.table import Operations
from tests.support.choosing import make_choice, table_of
from tests.support.plans import changed, make_plan

PLAN = make_plan([("a", 0, 4)], ["a", "b"])
TABLES = tuple(
    GivenTable(step=step, operations=table_of(changed(PLAN, choice=make_choice()).course, step)) for step in (0, 4)
)


def test_given_tables_come_back() -> None:
    """What ``operations.json`` holds is what was chosen."""
    assert tables_from_json(json.loads(json.dumps(tables_to_json(TABLES)))) == TABLES


def test_given_bare_table_holds_from_the_start() -> None:
    """A table as a plan has it is one for the whole run."""
    table = TABLES[1].operations
    assert tables_from_json(json.loads(json.dumps(table.to_json()))) == (GivenTable(step=0, operations=table),)


def test_given_choice_comes_back_with_its_course() -> None:
    """A course that repeats tables has them, scores nothing, and keeps its digest through a file."""
    course = changed(PLAN, choice=Choice.given(TABLES)).course
    again = Course.from_json(json.loads(json.dumps(course.to_json())))
    assert again == course and again.digest == course.digest
    assert again.choice is not None and again.choice.scores == ()
    assert again.choice.given_at(4) == TABLES[1].operations and again.choice.given_at(2) is None


def test_choice_without_given_tables_comes_back() -> None:
    """A course that chooses keeps its choice, and says nothing of tables."""
    course = changed(PLAN, choice=make_choice("joint", refresh_steps=3, score_scale=0.5)).course
    assert "tables" not in course.to_json()["choice"]
    assert Course.from_json(json.loads(json.dumps(course.to_json()))) == course


def test_choice_of_whole_numbers_keeps_its_digest() -> None:
    """A capacity of 0 is read back as 0.0, and both are one course."""
    capacity = BlockCapacity(full=3, forward_only=0, forward=1, backward=2)
    choice = Choice(policy="magnitude", subnets=1, capacities=(capacity,), score_scale=1)
    course = changed(PLAN, choice=choice).course
    assert Course.from_json(json.loads(json.dumps(course.to_json()))).digest == course.digest


def _without_first(value: dict[str, Any]) -> None:
    del value["tables"][0]


def _turned_around(value: dict[str, Any]) -> None:
    value["tables"].reverse()


def _other_subnets(value: dict[str, Any]) -> None:
    value["tables"][1]["operations"] = Operations(subnets=1).to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_first, "begin at step 0"),
        (_turned_around, "begin at step 0"),
        (_other_subnets, "different numbers of subnets"),
        (lambda value: value.update(schema=2), "schema 2"),
        (lambda value: value.update(tables=[]), "the list has no table"),
        (lambda value: value.update(tables={}), "not a list"),
        (lambda value: value["tables"].append(3), "an object with step and operations"),
        (lambda value: value["tables"][0].update(step="0"), r"tables\[0\].step"),
        (lambda value: value["tables"][0].update(turn=0), "unknown key"),
        (lambda value: value["tables"][0]["operations"].update(rows=[[1, 3, "!"]]), "not readable"),
    ],
)
def test_given_tables_that_no_run_wrote_are_refused(change: Any, message: str) -> None:
    """One sentence says what is wrong."""
    value = json.loads(json.dumps(tables_to_json(TABLES)))
    change(value)
    with pytest.raises(PlanError, match=message):
        tables_from_json(value)


@pytest.mark.parametrize("value", [None, 3, "table", ["tables"]])
def test_given_tables_that_are_no_object_are_refused(value: object) -> None:
    """A file with something else in it."""
    with pytest.raises(PlanError, match="JSON object"):
        tables_from_json(value)


def test_given_tables_have_to_fit_the_course() -> None:
    """A table of another run: within a turn, for other batches, for other micro-batches."""
    within = (TABLES[0], GivenTable(step=3, operations=TABLES[1].operations))
    with pytest.raises(PlanError, match="step 3 is within a turn of 2 steps"):
        changed(PLAN, choice=Choice.given(within))
    with pytest.raises(PlanError, match="no batch of this run"):
        changed(make_plan([("a", 0, 4)], ["a"]), choice=Choice.given(TABLES))
    with pytest.raises(PlanError, match="micro-batches"):
        changed(PLAN, choice=Choice.given(TABLES), microbatches=1)


def _of_origin(course: Course) -> tuple[GivenTable, ...]:
    return tuple(dataclasses.replace(table, origin=course.table_origin) for table in TABLES)


def test_given_tables_keep_their_origin() -> None:
    """The values themselves are in the file, so that a message can say which differ."""
    tables = _of_origin(PLAN.course)
    assert tables_from_json(json.loads(json.dumps(tables_to_json(tables)))) == tables
    assert changed(PLAN, choice=Choice.given(tables)).course.choice == Choice.given(tables)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 77}, f"a run with seed {PLAN.course.seed}, not 77: its batches have other rows"),
        (
            {"owners": (dataclasses.replace(PLAN.course.owners[0], train_rows=PLAN.course.owners[0].train_rows - 1),)},
            "train rows of owner a .*; train rows of owner b .*, not none",
        ),
        ({"batch_size": PLAN.course.batch_size + 1}, "a run with batch_size .*, not"),
    ],
)
def test_given_tables_of_other_rows_are_refused(changes: dict[str, Any], message: str) -> None:
    """Their shape may fit: which rows a batch id means depends on seed, owners, rows and batch size."""
    with pytest.raises(PlanError, match=message):
        changed(PLAN, choice=Choice.given(_of_origin(PLAN.course)), **changes)


@pytest.mark.parametrize("origin", [None, {}, {"owners": {"a": "3"}}, {"owners": {}}])
def test_given_table_with_an_origin_that_is_none_is_refused(origin: object) -> None:
    """Each value has its type."""
    value = {**TABLES[0].to_json(), "origin": origin}
    with pytest.raises(PlanError, match="origin"):
        GivenTable.from_json(value)
