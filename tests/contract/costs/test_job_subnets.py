"""The subnets of a job's blocks: counted by the model's heads, refused with the model's name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ringtune.costs.model_facts import model_facts
from ringtune.errors import JobError
from ringtune.job.job import Job, Model
from ringtune.schedule.operation_tables import BatchOperations, Operations
from ringtune.techniques.operations import job_subnets
from tests.support.cases import cases
from tests.support.fake_agents import MODEL
from tests.support.model_folder import write_model

FACTS = dataclasses.replace(MODEL, num_heads=12, num_kv_heads=4, intermediate_size=100)
JOB = Job(model=Model(path="m"))


def _job(**values: object) -> Job:
    chosen = {"operations.policy": "two-stage", "operations.compute": 0.6}
    return JOB.with_overrides({**chosen, **{f"operations.{name}": value for name, value in values.items()}})


@cases(
    ("values", "count"), [({"heads": 3}, 4), ({"heads": 6}, 2), ({"heads": 0}, 1), ({"heads": 5, "by_slice": True}, 1)]
)
def test_job_subnets_are_groups_of_whole_heads(values: dict[str, Any], count: int) -> None:
    """Three query heads share a key/value head; whole blocks and slices are one subnet."""
    found = job_subnets(_job(**values), FACTS)
    assert (found.count, found.heads, found.kv_heads, found.inner) == (count, 12, 4, 100)


def test_job_without_operations_has_whole_blocks() -> None:
    """``heads`` means nothing where all is full."""
    assert job_subnets(JOB.with_overrides({"operations.heads": 5}), FACTS).count == 1


@cases(
    ("heads", "message"),
    [
        (5, "operations.heads = 5 does not divide the 12 heads of a block; it can be 3, 6, 12, or 0"),
        (1, "operations.heads = 1 parts the 3 query heads of one key/value head"),
        (24, "operations.heads = 24 does not divide the 12 heads"),
    ],
)
def test_job_subnets_refuse_heads_that_do_not_divide(heads: int, message: str) -> None:
    """The message has the model's name."""
    with pytest.raises(JobError) as caught:
        job_subnets(_job(heads=heads), FACTS)
    assert message in str(caught.value)
    assert str(caught.value).endswith(f"the model is m ({FACTS.model_type})")


def test_model_folder_refuses_heads_that_do_not_divide(tmp_path: Path) -> None:
    """A node says so when it reads the model, with its file."""
    job = _job(heads=3).with_overrides({"train.max_length": 32})
    with pytest.raises(JobError, match=r"does not divide the 2 heads .*the model is .*config.json"):
        model_facts(write_model(tmp_path), job)


def _with_table(subnets: int, job: Job = JOB) -> Job:
    table = Operations(batches=(BatchOperations(owner="a", batch_id=0, rows=("1" * subnets,)),), subnets=subnets)
    return job.with_overrides({"operations.table": json.dumps(table.to_json())})


def test_given_table_has_its_own_subnets() -> None:
    """A table of four subnets fits four key/value heads; one of three is of another model."""
    assert job_subnets(_with_table(4), FACTS).count == 4
    with pytest.raises(JobError, match=r"operations.table is of another model: 3 subnets do not divide 4 key/value"):
        job_subnets(_with_table(3), FACTS)


def test_given_table_of_parts_of_blocks_needs_an_adapter_that_can_be_parted() -> None:
    """As for chosen ones, but known only with the model."""
    job = JOB.with_overrides({"adapter.config": "ia3"})
    assert job_subnets(_with_table(1, job), FACTS).count == 1
    with pytest.raises(JobError, match=r"operations.table has 2 subnets a block: adapter.config 'ia3'"):
        job_subnets(_with_table(2, job), FACTS)
