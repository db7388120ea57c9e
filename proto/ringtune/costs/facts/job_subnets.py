"""The subnets that a job divides each block of its model into; known once the model's sizes are."""

from __future__ import annotations

from ringtune.costs.profile import ModelFacts
from ringtune.errors import JobError, PlanError
from ringtune.jobs.job import Job
from ringtune.jobs.operations.given_table import given_tables
from ringtune.models.adapters.head_group_support import refusal
from ringtune.models.family import Dimensions
from ringtune.schedule.operations.subnets import Subnets, subnets_of


def job_subnets(job: Job, model: ModelFacts) -> Subnets:
    """The subnets of each block; where nothing may be less than full, a whole block is one.

    Raises:
        JobError: ``operations.heads`` or the given tables do not divide the model's heads; names the model.
    """
    kv_heads, where = model.num_kv_heads or model.num_heads, f"{job.model.path} ({model.model_type})"
    return _subnets(job, heads=model.num_heads, kv_heads=kv_heads, inner=model.intermediate_size, where=where)


def check_subnets(job: Job, dimensions: Dimensions, *, where: str) -> None:
    """Refuse a job whose subnets do not divide a model.

    Args:
        job: what is wanted.
        dimensions: of the model.
        where: its file.

    Raises:
        JobError: as ``job_subnets``.
    """
    heads = dimensions.num_heads
    _subnets(job, heads=heads, kv_heads=dimensions.kv_heads or heads, inner=dimensions.inner, where=where)


def _subnets(job: Job, *, heads: int, kv_heads: int, inner: int, where: str) -> Subnets:
    given = given_tables(job.operations)
    try:
        if given:
            return _given(job, Subnets(heads=heads, kv_heads=kv_heads, inner=inner, count=given[0].operations.subnets))
        heads_each = job.operations.heads if job.operations.is_chosen and not job.operations.by_slice else 0
        return subnets_of(heads=heads, kv_heads=kv_heads, inner=inner, heads_each=heads_each)
    except PlanError as error:
        what = "operations.table is of another model: " if given else ""
        raise JobError(f"{what}{error}; the model is {where}") from error


def _given(job: Job, subnets: Subnets) -> Subnets:
    """Refuse given tables of parts of blocks where the job's adapter or dropout needs whole ones."""
    heads = subnets.heads_each if subnets.count > 1 else 0
    if problem := refusal(job.adapter.config, dropout=job.train.dropout, heads=heads):
        raise JobError(f"operations.table has {subnets.count} subnets a block: {problem}")
    return subnets
