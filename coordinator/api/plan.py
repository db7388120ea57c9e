"""``ringtune.plan``: who would host what, what it needs and how long it would take, without training."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from coordinator.api.folders import python_words
from coordinator.api.jobs import JobLike, read_job
from coordinator.api.planning import PlannedJob, plan_assumed, plan_measured, plan_there
from coordinator.planner.alternatives import read_choices
from ringtune.errors import UsageError
from ringtune.trust.speaking import speaker, speaking_as


def plan(
    job: JobLike = None,
    *,
    assume: int = 0,
    memory: str = "",
    coordinator: str = "",
    profile: str | PathLike[str] | None = None,
    explain: bool = False,
    microbatches: str = "",
    wire: str = "",
    nodes: int = 0,
    join_s: float = 60.0,
    insecure: bool = False,
    **keys: Any,
) -> PlannedJob:
    """Plan a job as ``ringtune plan`` does; ``print()`` of the result shows it.

    Example: ``ringtune.plan("job.toml", assume=3, memory="512MiB", train__batch_size=32)``.

    Args:
        job: a job file, a mapping of its sections, or nothing where keywords say it all.
        assume: plan for so many equal nodes that are not there; 0 = as many as the job has owners.
        memory: budget of each assumed node, such as ``512MiB``; empty = they share what is free here.
        coordinator: ``host:port`` of one whose nodes are asked.
        profile: file of times that were measured before.
        explain: whether the reasons are wanted too.
        microbatches: numbers for the planner to choose from in place of the job's, such as ``2,4`` or ``auto``.
        wire: types for the planner to choose from in place of the job's, such as ``float32,bfloat16``.
        nodes: wait until so many nodes have joined the coordinator; 0 = take those that are there.
        join_s: how long to wait for them, in seconds.
        insecure: whether the coordinator may be on another machine, without encryption.
        keys: keys of the job, ``train__rounds=5`` for ``train.rounds``; they win over ``job``.

    Raises:
        RingTuneError: the job is wrong, or can't be planned for these nodes.
    """
    with python_words():
        wanted = read_job(job, keys)
        choices = read_choices(microbatches, wire, batch_size=wanted.train.batch_size)
        if bool(coordinator) + (profile is not None) + bool(assume or memory) > 1:
            raise UsageError("give one of coordinator=, profile= and assume= with memory=: they name the nodes")
        if nodes and not coordinator:
            raise UsageError(f"nodes= is for coordinator=; for nodes that are not there: assume={nodes}")
        if profile is not None:
            return plan_measured(wanted, Path(profile), choices=choices, why=explain)
        if not coordinator:
            return plan_assumed(wanted, assume, memory, choices=choices, why=explain)
        with speaking_as(speaker()):
            return plan_there(
                wanted, coordinator, insecure=insecure, num_nodes=nodes, join_s=join_s, choices=choices, why=explain
            )
