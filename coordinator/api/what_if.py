"""``ringtune.what_if``: predict the effect of a faster board, a slower link or another batch, without a run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from coordinator.api.arguments import JobLike, RunLike, folder_of, read_job
from coordinator.api.output import Table
from coordinator.api.prediction_inputs import read_inputs, read_recorded
from coordinator.api.prediction_text import comparison_json, comparison_lines, sweep_rows
from coordinator.planner.what_if import PredictedPlan, WhatIf, job_differences
from ringtune.errors import UsageError
from ringtune.job.job import Job


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
        trace: of a recorded run, the source of the times; None = those of the profile.
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


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Comparison:
    """What a plan does before and after a change.

    Attributes:
        before: the plan as it is, with its prediction.
        after: the plan with the change.
        cells: a row for each combination of a sweep's values, with ``wall_s`` and what else it does; else no rows.
    """

    before: PredictedPlan
    after: PredictedPlan
    cells: Table

    @property
    def ratio(self) -> float:
        """Time of training after over that before: 0.5 is half of the time."""
        return self.after.prediction.wall_s / self.before.prediction.wall_s

    def to_json(self) -> dict[str, Any]:
        """Return what ``ringtune what-if --json`` prints, with the cells."""
        return {**comparison_json(self.before, self.after), "cells": [dict(row) for row in self.cells]}

    def __repr__(self) -> str:
        lines = comparison_lines(self.before, self.after)
        return "\n".join([*lines, *([repr(self.cells)] if len(self.cells) else [])])


def what_if(
    plan: RunLike,
    change: Mapping[str, object] | None = None,
    *,
    profile: str | PathLike[str] | None = None,
    drop: Sequence[str] = (),
    add: Mapping[str, str] | None = None,
    replan: JobLike = None,
    trace: RunLike | None = None,
    seed: int = 0,
    sweep: Mapping[str, Sequence[object] | str] | None = None,
    jobs: int = -1,
) -> Comparison:
    """Predict what a change of nodes, links or plan does to the time of training, idle shares and memory.

    Example: ``print(ringtune.what_if(run, {"node-1.compute": 0.5, "microbatches": 8}))``.

    Args:
        plan: a run, its folder, or a ``plan.json`` with ``profile``.
        change: what changes, key -> value, with the keys of ``ringtune what-if --change``.
        profile: file of measured times; None = that of the run.
        drop: nodes that leave.
        add: nodes that join: name -> the node that each is like; with ``replan``.
        replan: plan anew for this job.
        trace: take times from this recorded run, stragglers included, not medians.
        seed: of draws from recorded times, where the plan is another.
        sweep: several values: key -> a list of them, or ``FROM:TO:COUNT``; with two keys the grid.
        jobs: workers of a sweep; -1 = one for each core.

    Raises:
        RingTuneError: something can't be read, a change makes no sense, or its result does not fit.
    """
    if not (change or drop or add or replan or sweep):
        raise UsageError("nothing changes; give change=, sweep=, drop=, add= or replan=")
    question, _ = make_question(
        folder_of(plan),
        Path(profile) if profile is not None else None,
        changes=[f"{key}={value}" for key, value in (change or {}).items()],
        drop=drop,
        add=tuple((add or {}).items()),
        job=read_job(replan, {}) if replan is not None else None,
        trace=folder_of(trace) if trace is not None else None,
        seed=seed,
    )
    before = question.before()
    cells = _cells(question, before, sweep, jobs) if sweep else Table([])
    return Comparison(before=before, after=question.after(), cells=cells)


def _cells(question: WhatIf, before: PredictedPlan, sweep: Mapping[str, Sequence[object] | str], jobs: int) -> Table:
    from sim.sweep import check_workers, each_cell, grid, parse_axis

    axes = [
        parse_axis(f"{key}={values if isinstance(values, str) else ','.join(map(str, values))}")
        for key, values in sweep.items()
    ]
    cells = grid(axes)
    check_workers(jobs, "loky", "")
    question.check(cells)
    with contextlib.closing(each_cell(question, cells, jobs=jobs)) as running:
        return Table(sweep_rows(axes, before, list(running)))
