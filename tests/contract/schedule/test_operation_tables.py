"""Tests of ``ringtune.schedule.operation_tables``: given, table text, lookups."""

from __future__ import annotations

import dataclasses
import json
import random
import tracemalloc
from typing import Any

import pytest

from ringtune.errors import PlanError
from ringtune.schedule.course import Course
from ringtune.schedule.lowering import lower
from ringtune.schedule.operation_tables import (
    BatchOperations,
    BlockCapacity,
    Choice,
    Operations,
    ScheduledTable,
    patterns_of,
    tables_from_json,
    tables_to_json,
)
from tests.support.cases import cases
from tests.support.choosing import make_choice, table_of
from tests.support.plans import changed, make_plan

PLAN = make_plan([("a", 0, 4)], ["a", "b"])
TABLES = tuple(
    ScheduledTable(step=step, operations=table_of(changed(PLAN, choice=make_choice()).course, step)) for step in (0, 4)
)


def test_given_tables_come_back() -> None:
    """What ``operations.json`` holds is what was chosen."""
    assert tables_from_json(json.loads(json.dumps(tables_to_json(TABLES)))) == TABLES


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


@cases(
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


@cases("value", [None, 3, "table", ["tables"]])
def test_given_tables_that_are_no_object_are_refused(value: object) -> None:
    """A file with something else in it."""
    with pytest.raises(PlanError, match="JSON object"):
        tables_from_json(value)


def test_given_tables_have_to_fit_the_course() -> None:
    """A table of another run: within a turn, for other batches, for other micro-batches."""
    within = (TABLES[0], ScheduledTable(step=3, operations=TABLES[1].operations))
    with pytest.raises(PlanError, match="step 3 is within a turn of 2 steps"):
        changed(PLAN, choice=Choice.given(within))
    with pytest.raises(PlanError, match="no batch of this run"):
        changed(make_plan([("a", 0, 4)], ["a"]), choice=Choice.given(TABLES))
    with pytest.raises(PlanError, match="micro-batches"):
        changed(PLAN, choice=Choice.given(TABLES), microbatches=1)


def _of_origin(course: Course) -> tuple[ScheduledTable, ...]:
    return tuple(dataclasses.replace(table, origin=course.table_origin) for table in TABLES)


def test_given_tables_keep_their_origin() -> None:
    """The values themselves are in the file, so that a message can say which differ."""
    tables = _of_origin(PLAN.course)
    assert tables_from_json(json.loads(json.dumps(tables_to_json(tables)))) == tables
    assert changed(PLAN, choice=Choice.given(tables)).course.choice == Choice.given(tables)


@cases(
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


@cases("origin", [5, {}, {"owners": {"a": "3"}}, {"owners": {}}])
def test_given_table_with_an_origin_that_is_none_is_refused(origin: object) -> None:
    """Each value has its type."""
    value = {**TABLES[0].to_json(), "origin": origin}
    with pytest.raises(PlanError, match="origin"):
        ScheduledTable.from_json(value)


ROW, OTHER = "1131" * 18, "1211" * 18


def table(*rows: tuple[str, ...]) -> Operations:
    """A table of one batch for each entry."""
    return Operations(batches=tuple(BatchOperations(owner="a", batch_id=at, rows=each) for at, each in enumerate(rows)))


def text_of(operations: Operations) -> str:
    """As it travels."""
    return json.dumps(operations.to_json(), separators=(",", ":"))


def test_batches_that_do_alike_are_written_once() -> None:
    """A table of pruned subnets has the same rows for all batches: nine thousand characters, not fifty-eight."""
    pruned = table(*[(ROW,) * 4] * 600)
    assert len(text_of(pruned)) < 9_000
    again = Operations.from_json(json.loads(text_of(pruned)))
    assert again == pruned
    assert len({id(row) for batch in again.batches for row in batch.rows}) == 1


def test_rows_stand_in_the_order_of_first_use() -> None:
    """Equal tables are equal text, and have one digest."""
    mixed = table((OTHER, ROW), (ROW, ROW), (OTHER, ROW))
    assert [at for _, _, at in mixed.to_json()["batches"]] == [0, 1, 0]
    again = Operations.from_json(json.loads(text_of(mixed)))
    assert (again, text_of(again), again.digest) == (mixed, text_of(mixed), mixed.digest)
    assert len({id(row) for batch in again.batches for row in batch.rows}) == 2


def test_passes_come_back() -> None:
    """A batch of a later pass has its number; a table that repeats at once is written as before."""
    (batch,) = table((ROW, OTHER)).batches
    two = Operations(batches=(batch, dataclasses.replace(batch, rows=(OTHER, ROW), of_pass=1)), passes=2)
    assert two.to_json()["batches"] == [["a", 0, 0], ["a", 0, 1, 1]]
    assert Operations.from_json(json.loads(text_of(two))) == two != dataclasses.replace(two, passes=3)
    assert [two.rows_of("a", 0, at)[0] for at in range(4)] == [ROW, OTHER, ROW, OTHER]
    assert "passes" not in table((ROW, OTHER)).to_json()


@cases(
    ("passes", "of_pass", "message"),
    [(0, 0, "repeat after 0 passes, it has to be 1 to 2"), (3, 0, "after 3 passes"), (2, 2, "are of pass 2"),
     (2, -1, "are of pass -1"), (2, 0, "stand twice")],
)  # fmt: skip
def test_passes_that_no_table_has_are_refused(passes: int, of_pass: int, message: str) -> None:
    """As many as micro-batches at most; each batch once in each."""
    (batch,) = table((ROW, OTHER)).batches
    spoiled = Operations(batches=(batch, dataclasses.replace(batch, of_pass=of_pass)), passes=passes)
    with pytest.raises(PlanError, match=message):
        spoiled.check(num_blocks=72, microbatches=2, batches={"a": 1})


@cases(
    ("name", "value", "message"),
    [
        ("batches", [["a", 0, 0, 0]], r"batches\[0\] is not"),
        ("batches", [["a", 0, 0, True]], r"batches\[0\] is not"),
        ("passes", True, "passes"),
        ("batches", [["a", 0, 1], ["a", 1, 0]], "in the order in which batches use them"),
        ("batches", [["a", 0, 0]], "in the order in which batches use them"),
        ("batches", [["a", 0, 0], ["a", 1, 2]], r"batches\[1\] is not \[owner, batch id, place in rows\], of 2"),
        ("batches", [["a", 0, -1]], r"batches\[0\] is not"),
        ("batches", [["a", 0, 4, 72, "text"]], r"batches\[0\] is not"),
        ("rows", [[2, 72]], r"rows\[0\] is not"),
        ("rows", None, "rows has to be a list"),
    ],
)
def test_rows_that_no_table_writes_are_refused(name: str, value: Any, message: str) -> None:
    """Rows that none uses, another order, a place that is not there, and the form of older versions."""
    spoiled = table((ROW, ROW), (ROW, OTHER)).to_json()
    spoiled[name] = value
    with pytest.raises(PlanError, match=message):
        Operations.from_json(spoiled)


def test_rows_that_stand_twice_are_refused() -> None:
    """One table has one text."""
    spoiled = table((ROW, ROW), (ROW, OTHER)).to_json()
    spoiled["rows"][1] = spoiled["rows"][0]
    with pytest.raises(PlanError, match="distinct"):
        Operations.from_json(spoiled)


def test_true_is_no_number_of_a_table() -> None:
    """JSON's ``true`` is no batch, no place in the rows, and no number of micro-batches."""
    table = Operations(batches=(BatchOperations(owner="a", batch_id=1, rows=("1",)),))
    assert Operations.from_json(table.to_json()) == table
    for change in (["a", True, 0], ["a", 1, False]):
        with pytest.raises(PlanError, match=r"is not \[owner, batch id, place in rows\]"):
            Operations.from_json({**table.to_json(), "batches": [change]})
    packed = table.to_json()["rows"][0][2]
    with pytest.raises(PlanError, match="codes of each, packed codes"):
        Operations.from_json({**table.to_json(), "rows": [[True, 1, packed]]})


def course() -> Course:
    """A course with a table of its own, equal to any other one's."""
    plan = make_plan([("a", 0, 4)], ["a"], train_rows=8, batch_size=4, microbatches=2)
    batches = tuple(BatchOperations(owner="a", batch_id=batch, rows=("1113", "2111")) for batch in range(2))
    return dataclasses.replace(plan.course, operations=Operations(batches=batches))


def test_patterns_of_a_row_are_those_of_its_blocks() -> None:
    """Of four blocks with two subnets; an empty row has none, which is all full."""
    assert patterns_of("11122233", 1, 3, 2) == ("12", "22")
    assert patterns_of("1123", 0, 2, 1) == ("1", "1")
    assert patterns_of("", 0, 2, 2) == ()


@pytest.mark.promise("7 bounded memory")
def test_ways_of_many_rows_take_little_memory() -> None:
    """Tables of whole blocks may bring any row; every node looks its ways up, so it keeps some of them only."""
    plan = make_plan([(f"n{at}", 3 * at, 3 * at + 3) for at in range(4)], ["n0"], method="all", num_blocks=12)
    rng = random.Random(0)
    rows = ["".join(rng.choice("123") for _ in range(12)) for _ in range(2000)]
    lower.cache_clear()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for row in rows:
            lower(plan, "n0", 0, row)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        lower.cache_clear()
    assert taken < 3_000_000
