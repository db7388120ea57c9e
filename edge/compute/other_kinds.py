"""The hosted blocks with the adapters of users whose kind is not the job's own, for the result of a run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from edge.compute.helping.adapter_modules import AdapterModules
from edge.compute.hosting import Hosted
from edge.model.skeleton import Skeleton
from edge.model.slice import Empty
from ringtune.jobs.job import Job
from ringtune.jobs.user_adapters import job_of, kinds_of


def other_kinds(
    hosted: Hosted, job: Job, folder: Path, *, users: Collection[str], fitted: Collection[int]
) -> dict[str, Skeleton]:
    """Return the hosted blocks with the adapters of each user of another kind than the job's own.

    Adapters that are merged or train nowhere are made anew, with their initial values; blocks that helpers fit have
    none then, as their sets come from elsewhere.

    Args:
        hosted: blocks of a node.
        job: of the run.
        folder: of the model; only its configuration is read.
        users: with adapters of their own.
        fitted: hosted blocks whose adapters helpers fit.
    """
    found: dict[str, Skeleton] = {}
    there = {one.kind.number: one.skeleton for one in hosted.kinds}
    own = [index for index, block in enumerate(hosted.skeleton.blocks) if not isinstance(block, Empty)]
    for kind in kinds_of(job, tuple(users))[1:]:
        skeleton = there.get(kind.number)
        if skeleton is None:
            units = [index for index in own if index not in fitted]
            skeleton = AdapterModules(folder, job_of(job, kind.config), units, hosted.dtype, hosted.device).skeleton
        found |= dict.fromkeys(kind.users, skeleton)
    return found
