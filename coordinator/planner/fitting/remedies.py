"""Say which other settings of a job would let it fit in the nodes' memory; only what helps is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ringtune.errors import CapacityError, DeadlineError, JobError, PlanError, StorageError
from ringtune.jobs.job import Job
from ringtune.jobs.parts.frozen import why_not_small
from ringtune.jobs.parts.memory import AUTO
from ringtune.schedule.frozen_weights import AS_COMPUTED
from ringtune.schedule.methods.hift import DISK, MEMORY
from ringtune.schedule.slice_policy import NONE, VELORA


def memory_remedy(job: Job, planned: Callable[[Job], object]) -> str:
    """List the settings of which each alone would let a job fit; empty where none would.

    Args:
        job: that does not fit.
        planned: plans a job, or raises an error.
    """
    found = [key_value for key_value in _other_settings(job) if _fits(job, key_value, planned)]
    words = [f"{key} = {value!r}" for key, value in found]
    return f"{' or '.join(words)} would fit; or " if words else ""


def _fits(job: Job, setting: tuple[str, Any], planned: Callable[[Job], object]) -> bool:
    try:
        planned(job.with_overrides(dict([setting])))
    except (CapacityError, DeadlineError, JobError, PlanError, StorageError):
        return False
    return True


def _other_settings(job: Job) -> Iterator[tuple[str, Any]]:
    """Settings that take less memory than the job's, the mildest of each kind first."""
    if job.memory.activations in (NONE, VELORA):
        yield "memory.activations", AUTO
    if job.runtime.frozen == AS_COMPUTED and not why_not_small(job):
        yield "runtime.frozen", "bfloat16"
    if job.runtime.frozen in (AS_COMPUTED, "bfloat16") and not why_not_small(job):
        yield "runtime.frozen", "int8"
    if job.hift is not None and job.hift.state == MEMORY:
        yield "hift.state", DISK
    if job.hift is not None and job.hift.group_size > 1:
        yield "hift.group_size", 1
