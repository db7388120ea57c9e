"""What the result of a job is: an adapter, the blocks' own weights, or a whole model."""

from __future__ import annotations

from ringtune.jobs.job import Job
from ringtune.jobs.user_adapters import config_of
from ringtune.models.result_files import Result, adapter_result, model_result


def result_of(job: Job) -> Result:
    """Return what a run of ``job`` leaves behind: a model where all parameters train, else what its adapter leaves."""
    return model_result() if job.method.full_parameters else adapter_result(job.model.task, job.adapter.config)


def result_of_user(job: Job, user: str) -> Result:
    """Return what a run of ``job`` leaves of a user who has adapters of their own, of the user's kind."""
    return adapter_result(job.model.task, config_of(job, user))
