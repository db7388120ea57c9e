"""Operations at planning: given tables, how a run chooses its own, and plans that were made with other ones."""

from __future__ import annotations

import json

import pytest

from coordinator.planner.given_plan import GivenPlan, accept_plan
from coordinator.planner.make_plan import make_plan
from ringtune.errors import JobError, PlanError
from ringtune.jobs.job import Job
from ringtune.schedule.operations.table import BatchOperations, Operations
from tests.support.fake_agents import MODEL, facts, job

FACTS = {name: facts(name) for name in "ab"}
COURSE = make_plan(job(), FACTS).plan.course


def table(subnets: int = 1, *, owner: str = "a", microbatches: int = 0, blocks: int = 0) -> Operations:
    """The operations of one batch, of which the lowest block skips."""
    row = "3" * subnets + "1" * subnets * ((blocks or COURSE.num_blocks) - 1)
    rows = (row,) * (microbatches or COURSE.microbatches)
    return Operations(batches=(BatchOperations(owner=owner, batch_id=0, rows=rows),), subnets=subnets)


def with_table(operations: Operations, wanted: Job | None = None) -> Job:
    """A job that is given a table."""
    return (wanted or job()).with_overrides({"operations.table": json.dumps(operations.to_json())})


def test_given_table_is_the_courses() -> None:
    """It stands in the plan, and an evaluation runs every block."""
    wanted = with_table(table())
    assert make_plan(wanted, FACTS).plan.course.operations == table()
    assert make_plan(wanted, FACTS, evaluation_only=True).plan.course.operations is None
    assert make_plan(job(), FACTS).plan.course.operations is None


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        (table(owner="c"), "operations.table does not fit this run: operations of batch 0 of owner c are of no batch"),
        (table(microbatches=9), "operations.table does not fit this run: operations of batch 0 of owner a are for 9"),
        (table(blocks=9), "operations.table does not fit this run: operations of batch 0 of owner a have a row"),
    ],
)
def test_given_table_of_another_plan_is_refused(operations: Operations, message: str) -> None:
    """Another owner, number of micro-batches or number of blocks."""
    with pytest.raises(PlanError) as caught:
        make_plan(with_table(operations), FACTS)
    assert message in str(caught.value)


def test_given_table_of_another_models_subnets_is_refused() -> None:
    """The message has the model's name."""
    with pytest.raises(JobError, match=rf"operations.table is of another model: 5 subnets .*{MODEL.model_type}"):
        make_plan(with_table(table(subnets=5)), FACTS)


# ---- plans that are given --------------------------------------------------------------------------


def accepted(plan_job: Job, run_job: Job) -> Operations | None:
    """The operations of a plan made for one job, accepted for another."""
    plan = make_plan(plan_job, FACTS).plan
    return accept_plan(GivenPlan(plan=plan), run_job, FACTS).plan.course.operations


def test_given_plan_may_have_a_table_that_the_job_does_not_name() -> None:
    """A static table in a plan file trains as well."""
    assert accepted(with_table(table()), job()) == table()
    assert accepted(with_table(table()), with_table(table())) == table()


def test_given_plan_without_the_jobs_table_is_refused() -> None:
    """What the job says goes before."""
    with pytest.raises(PlanError, match=r"the plan has other operations than the job's operations.table"):
        accepted(job(), with_table(table()))
