"""Make the question of a what-if from what the user gave."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from coordinator.what_if.differences import job_differences
from coordinator.what_if.prediction_inputs import read_inputs, read_recorded
from coordinator.what_if.what_if import WhatIf
from ringtune.jobs.job import Job


class Asked(NamedTuple):
    """A question, and how the job that is planned anew differs from that of the run: key -> both values."""

    question: WhatIf
    job_changed: dict[str, tuple[str, str]]


def make_question(
    plan: Path,
    profile: Path | None,
    *,
    changes: Sequence[str],
    drop: Sequence[str],
    add: Sequence[tuple[str, str]],
    job: Job | None,
    trace: Path | None,
    seed: int,
) -> Asked:
    """Read a plan with its profile, and make the question; it is checked.

    Args:
        plan: ``plan.json``, or a run's folder.
        profile: ``profile.json``; None = that of the run.
        changes: ``KEY=VALUE``.
        drop: nodes that leave.
        add: (name, like) of nodes that join.
        job: plan anew for it; None = keep the plan.
        trace: of a recorded run whose times count; None = those of the profile.
        seed: of draws from recorded times.

    Raises:
        RingTuneError: something can't be read, or a change makes no sense.
    """
    given = read_inputs(plan, profile)
    question = WhatIf(
        plan=given.plan,
        profile=given.profile,
        optimizer=given.optimizer,
        dtype=given.dtype,
        shape=given.shape,
        changes=tuple(changes),
        drop=tuple(drop),
        add=tuple(add),
        job=job,
        move_s=given.move_s,
        recorded=read_recorded(trace, given.plan, seed=seed) if trace else None,
    )
    question.check([()])
    return Asked(question, job_differences(given.job, job) if given.job and job else {})
