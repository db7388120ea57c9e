"""Time this node for a job, or take the timings that it remembers."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from edge.data.rows import OwnerDataset
from edge.measuring.cache import ProfileCache, cache_key
from edge.measuring.laps import CpuClock, Timer, window_of
from edge.measuring.measured_work import MeasuredWork
from edge.measuring.timing_request import TimingRequest
from edge.measuring.works import Bench
from ringtune.costs.facts.job_subnets import job_subnets
from ringtune.costs.measured.measuring import job_shape
from ringtune.costs.profile import ModelFacts
from ringtune.costs.work_times import Work
from ringtune.jobs.job import Job
from ringtune.machine.cores import cpu_quota

_LOG = logging.getLogger(__name__)


def timings(
    job: Job,
    model: ModelFacts,
    dataset: OwnerDataset | None,
    *,
    device: str,
    hardware: str,
    state: Path | None,
    timing: TimingRequest,
    memory_bytes: int,
) -> MeasuredWork:
    """Time every kind of work at this node, or find the timings of an earlier measurement.

    Args:
        job: with the model's folder on this machine.
        model: what the folder holds.
        dataset: the node's rows; None = it is no owner.
        device: torch device.
        hardware: processor and what may be used of it.
        state: the node's folder; None = nothing is remembered, and it can't save.
        timing: budget, neighbours, and whether to measure anew.
        memory_bytes: that the measurement may use.

    Raises:
        ModelError: the model folder can't be used.
        JobError: the adapter configuration can't be split, or the operations do not divide the model's heads.
        CapacityError: one block with micro-batches of the job's size does not fit here.
    """
    subnets = job_subnets(job, model).count
    key = cache_key(
        model=model.digest,
        hardware=hardware,
        shape=job_shape(job, fixed_tokens=model.fixed_tokens, subnets=subnets, frozen=timing.frozen),
        batch=(job.train.batch_size, job.train.microbatches),
        classes=len({*job.data.labels, *dataset.labels}) if dataset else -1,
        neighbours=timing.neighbours,
        torch=torch.__version__,
    )
    cache = ProfileCache(state) if state is not None else None
    found = cache.find(key, budget_s=timing.budget_s) if cache and not timing.is_fresh else None
    if found is not None:
        return found
    started_s = time.monotonic()
    folder = Path(job.model.path)
    bench = Bench(
        folder,
        job,
        dataset,
        model=model,
        memory_bytes=memory_bytes,
        device=device,
        subnets=subnets,
        frozen=timing.frozen,
    )
    quota = cpu_quota()
    cpu = CpuClock.of(quota, torch.get_num_threads()) if device == "cpu" else None
    timer = Timer(window_s=window_of(quota), settle=bench.settle(), cpu=cpu)
    found = bench.measure(timer, budget_s=timing.budget_s, disk=state)
    _LOG.info("measured %d points in %.1f s", len(found.work_times), time.monotonic() - started_s)
    if cache is not None:
        cache.put(key, found, budget_s=timing.budget_s)
    return found


def full_size_s(measured: MeasuredWork, work: Work) -> float:
    """Median seconds of a work at the largest measured size; 0 if it was not measured."""
    points = [point for point in measured.work_times if point.work == work]
    return max(points, key=lambda point: point.size).median_s if points else 0.0
