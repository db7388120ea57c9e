"""Predictions of runs that choose their operations: with the expected table, and with those that a real run chose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.prediction_text import write_prediction
from ringtune.schedule.operation_tables import BatchOperations, Choice, Operations, ScheduledTable
from ringtune.schedule.turns import StartPoint
from ringtune.techniques.operations import expected_table
from sim.prediction import predict
from sim.ring import ExpectedTables
from tests.support.choosing import make_choice
from tests.support.plans import changed
from tests.support.predictions import PLAN, PROFILE, ringtune, write_run

CHOOSING = changed(PLAN, choice=make_choice(subnets=1, refresh_steps=4))


def table(code: str) -> Operations:
    """A table in which all blocks of all micro-batches have one operation, but for the highest block."""
    rows = (code * 3 + "1",) * 2
    return Operations(
        batches=tuple(
            BatchOperations(owner=owner.node, batch_id=at, rows=rows) for owner in PLAN.course.owners for at in range(3)
        )
    )


TABLES = (ScheduledTable(step=0, operations=table("3")), ScheduledTable(step=4, operations=table("1")))


def predicted(folder: Path) -> dict[str, Any]:
    """The JSON line of a prediction."""
    result = ringtune("sim", folder, "--json")
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def test_prediction_expects_a_table_where_the_run_chooses_one() -> None:
    """Scores take time, which is no time of steps; steps take what the expected table leaves of them."""
    once = changed(PLAN, choice=make_choice(subnets=1))
    fixed = predict(changed(PLAN, operations=expected_table(once.course)), PROFILE)
    found, full = predict(once, PROFILE), predict(PLAN, PROFILE)
    assert found.train_s == pytest.approx(fixed.train_s)
    assert found.train_s < full.train_s
    assert found.evaluation_s > 2 * fixed.evaluation_s


def test_prediction_takes_the_tables_that_are_known() -> None:
    """In place of expected ones, at their steps; the expected one where none is known."""
    chooser = ExpectedTables(CHOOSING, TABLES)
    assert [chooser.table(step, ()) for step in (0, 4)] == [table("3"), table("1")]
    assert chooser.table(6, ()) == expected_table(CHOOSING.course)
    less = predict(CHOOSING, PROFILE, tables=TABLES[:1])
    more = predict(CHOOSING, PROFILE, tables=TABLES[1:])
    assert less.train_s < predict(CHOOSING, PROFILE).train_s < more.train_s


def test_sim_of_a_run_that_chose_does_as_the_run_did(tmp_path: Path) -> None:
    """The tables of operations.json, step by step."""
    real = write_run(tmp_path, plan=CHOOSING, tables=TABLES)
    value = predicted(tmp_path)
    assert value["wall_s"] == real.wall_s != predict(CHOOSING, PROFILE).wall_s
    assert abs(value["measured"]["error_share"]) < 1e-5


@pytest.mark.parametrize("tables", [TABLES, ()])
def test_sim_of_a_resumed_run_that_chose_has_its_tables(tmp_path: Path, tables: tuple[ScheduledTable, ...]) -> None:
    """The last four steps, from a step where a table is due; without the file the expected tables stand for them."""
    start = StartPoint.of(CHOOSING.course, step=4, holder="bob", operations=table("3"))
    real = predict(CHOOSING, PROFILE, start=start, keep_spans=True, tables=tables)
    write_run(tmp_path, plan=CHOOSING, tables=tables)
    write_prediction(tmp_path, CHOOSING, real, {})
    value = predicted(tmp_path)
    assert value["measured"]["steps"] == 4
    assert value["wall_s"] == pytest.approx(real.wall_s)


def test_sim_of_a_run_with_a_damaged_file_of_tables_names_it(tmp_path: Path) -> None:
    """One sentence, no trace."""
    write_run(tmp_path, plan=CHOOSING, tables=TABLES)
    (tmp_path / "operations.json").write_text("{")
    result = ringtune("sim", tmp_path)
    assert result.exit_code != 0 and "operations.json can't be read" in result.output


def test_sim_of_a_run_with_given_tables_needs_no_scores() -> None:
    """A run that repeats tables has them in its plan."""
    choice = Choice.given(TABLES)
    given = predict(changed(PLAN, choice=choice), PROFILE)
    chosen = predict(CHOOSING, PROFILE, tables=TABLES)
    assert given.train_s == pytest.approx(chosen.train_s, rel=0.01)  # frozen blocks work ahead where nothing is scored
    assert given.num_steps == chosen.num_steps
    assert given.evaluation_s < chosen.evaluation_s
