"""``ringtune.simulate`` and ``ringtune.what_if``: predict a plan, and the effect of a change of it, without a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from coordinator.api.arguments import JobLike, RunLike, folder_of, for_python, read_job, with_initial_digest
from coordinator.api.output import Table
from coordinator.api.prediction_inputs import (
    MeasuredRun,
    measured_json,
    plan_as_run,
    read_inputs,
    read_measured,
    read_recording,
)
from coordinator.api.prediction_text import (
    check_out,
    comparison_json,
    comparison_lines,
    prediction_lines,
    sweep_rows,
    write_prediction,
)
from coordinator.planner.what_if import (
    CellResult,
    PredictedPlan,
    RunRecording,
    WhatIf,
    job_differences,
    loss_result,
    lost_nodes,
)
from coordinator.screen.progress import WaitNotice
from ringtune.errors import UsageError
from ringtune.schedule.plan import Plan
from sim.prediction import Prediction, check_fits, predict
from sim.sweep import Axis, check_workers, each_cell, grid, parse_axis

Changes: TypeAlias = Mapping[str, object] | Iterable[str] | None
"""Values by key, or texts ``KEY=VALUE``."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """Predictions of a plan before and after a change.

    Attributes:
        before: the unchanged plan, with its prediction.
        cells: a row for each combination of a sweep's values, with ``wall_s`` and further figures; empty without a
            sweep.
        job_changed: key -> both values, where the job to plan for differs from that of the run.
        losses: a row for each set of nodes that are lost at once, with ``outcome`` (goes on, waits or ends), ``why``,
            ``layout`` and ``seconds``.
    """

    question: WhatIf
    before: PredictedPlan
    cells: Table
    results: Sequence[CellResult]
    axes: Sequence[Axis]
    job_changed: dict[str, tuple[str, str]]
    losses: Table

    @cached_property
    def after(self) -> PredictedPlan:
        """The plan with the change."""
        return self.question.after()

    @property
    def ratio(self) -> float:
        """Training time after over before: 0.5 is half of the time."""
        return self.after.prediction.wall_s / self.before.prediction.wall_s

    def to_json(self) -> dict[str, Any]:
        """Return the output of ``ringtune what-if --json``, with the cells."""
        rows = {"cells": [dict(row) for row in self.cells], "losses": [dict(row) for row in self.losses]}
        return {**comparison_json(self.before, self.after), **rows}

    def __repr__(self) -> str:
        lines = comparison_lines(self.before, self.after)
        return "\n".join([*lines, *(repr(table) for table in (self.cells, self.losses) if len(table))])


@for_python
def what_if(
    plan: RunLike,
    change: Changes = (),
    *,
    profile: str | PathLike[str] | None = None,
    drop: Sequence[str] = (),
    lose: Sequence[str] = (),
    add: Mapping[str, str] | Iterable[tuple[str, str]] | None = None,
    replan: JobLike = None,
    trace: RunLike | None = None,
    seed: int = 0,
    sweep: Changes = (),
    jobs: int = -1,
    backend: str = "loky",
    cluster: str = "",
    watch: Callable[[Generator[CellResult], int], Iterable[CellResult]] = lambda cells, count: cells,
) -> Comparison:
    """Predict the effect of a change of nodes, links or plan on training time, idle shares and memory.

    Example: ``print(ringtune.what_if(run, {"node-1.compute": 0.5, "microbatches": 8}))``.

    Args:
        plan: a run, its folder, or a ``plan.json`` with ``profile``.
        change: key -> value, with the keys of ``ringtune what-if --change``.
        profile: file of measured times; None = that of the run.
        drop: nodes that leave.
        lose: nodes that a run loses at once, ``NODE+NODE``, or ``any two`` for every pair; of a run's folder, or with
            ``replan``.
        add: name of a new node -> the node that it is like; with ``replan``.
        replan: job to plan again for.
        trace: draw times from this recorded run, stragglers included, instead of medians.
        seed: of draws from recorded times of another plan.
        sweep: key -> a list of values, or ``FROM:TO:COUNT``; with two keys the grid.
        jobs: workers of a sweep; -1 = one for each core.
        backend: runs the cells of a sweep: ``loky``, ``dask`` or ``ray``.
        cluster: address of a running Dask scheduler or Ray cluster; empty = none.
        watch: wraps the iterator of a sweep's results; also gets their number.

    Raises:
        RingTuneError: a file can't be read, a change is invalid, or its result does not fit.
    """
    if not (change or drop or lose or add or replan is not None or sweep):
        raise UsageError("nothing changes; give --change, --sweep, --drop, --lose, --add or --replan")
    job = with_initial_digest(read_job(replan, {})) if replan is not None else None
    given = read_inputs(folder_of(plan), Path(profile) if profile is not None else None)
    recorded = None
    if trace is not None:
        recording, is_of_plan = read_recording(folder_of(trace), given.plan)
        recorded = RunRecording(recording=recording, plan=given.plan, is_of_plan=is_of_plan, seed=seed)
    question = WhatIf(
        plan=given.plan,
        profile=given.profile,
        settings=given.settings,
        shape=given.shape,
        changes=_texts(change),
        drop=tuple(drop),
        add=tuple(add.items() if isinstance(add, Mapping) else add or ()),
        job=job,
        move_s=given.move_s,
        recorded=recorded,
    )
    question.check([()])
    losses, rules = [nodes for text in lose for nodes in lost_nodes(given.plan.parts[-1].nodes, text)], job or given.job
    if losses and rules is None:
        raise UsageError("--lose asks for [recovery] of a job; give a run's folder, or --replan JOB")
    axes = [parse_axis(text) for text in _texts(sweep)]
    cells = grid(axes) if axes else []
    if axes:
        check_workers(jobs, backend, cluster)
        question.check(cells)
    before, results = question.before(), list[CellResult]()
    if axes:
        with contextlib.closing(each_cell(question, cells, jobs=jobs, backend=backend, cluster=cluster)) as running:
            results.extend(watch(running, len(cells)))
    comparison = Comparison(
        question=question,
        before=before,
        cells=Table(sweep_rows(axes, before, results)),
        results=results,
        axes=axes,
        job_changed=job_differences(given.job, job) if given.job and job else {},
        losses=Table([loss_result(given.plan, given.profile, rules, nodes).to_json() for nodes in losses if rules]),
    )
    if not axes and not losses:
        _ = comparison.after  # raises an error if the result does not fit
    return comparison


def _texts(changes: Changes) -> tuple[str, ...]:
    """Return changes as ``KEY=VALUE``, several values with commas."""
    if not isinstance(changes, Mapping):
        return tuple(changes or ())
    return tuple(
        f"{key}={value if isinstance(value, str) or not isinstance(value, Iterable) else ','.join(map(str, value))}"
        for key, value in changes.items()
    )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class SimulatedPlan:
    """A plan and its prediction.

    Attributes:
        as_run: the plan as the run in its folder carried it out; else ``plan``.
        measured: of that run; None without one, or if it has not ended.
    """

    plan: Plan
    as_run: Plan
    prediction: Prediction
    measured: MeasuredRun | None

    def lines(self) -> list[str]:
        """Return the whole run, then tables of nodes, links and depths."""
        return prediction_lines(self.as_run, self.prediction, self.measured)

    def to_json(self) -> dict[str, Any]:
        """Return the output of ``ringtune sim --json``."""
        head = {"plan_digest": self.plan.digest, "method": self.plan.course.method.name}
        measured = {"measured": measured_json(self.measured, self.prediction)} if self.measured is not None else {}
        return {**head, **self.prediction.to_json(), **measured}

    def __repr__(self) -> str:
        return "\n".join(self.lines())


@for_python
def simulate(
    plan: RunLike,
    *,
    profile: str | PathLike[str] | None = None,
    trace: RunLike | None = None,
    out: str | PathLike[str] | None = None,
    seed: int = 0,
) -> SimulatedPlan:
    """Predict training time, idle shares, bytes and memory of a plan from measured times.

    With the folder of a finished run its measured figures are shown too.

    Example: ``print(ringtune.simulate("plan.json", profile="profile.json"))``.

    Args:
        plan: a run, its folder, or a ``plan.json`` with ``profile``.
        profile: file of measured times; None = that of the run.
        trace: draw times from this recorded run, stragglers included, instead of medians.
        out: folder for ``prediction.json`` and ``trace.json`` (for Perfetto).
        seed: of draws from recorded times of another plan.

    Raises:
        RingTuneError: a file can't be read or written, or the profile is not of the plan.
    """
    if out is not None:
        check_out(Path(out))
    given = read_inputs(folder_of(plan), Path(profile) if profile is not None else None)
    check_fits(given.plan, given.profile, given.settings, shape=given.shape)
    recording, same_run = read_recording(folder_of(trace), given.plan) if trace is not None else (None, False)
    measured = read_measured(given)
    as_run = plan_as_run(given.plan, measured)
    with WaitNotice("predicting"):
        prediction = predict(
            as_run,
            given.profile,
            given.settings,
            samples=recording.samples if recording else None,
            same_run=same_run,
            start=measured.start if measured else None,
            tables=measured.tables if measured else (),
            keep_spans=out is not None,
            seed=seed,
            move_s=given.move_s,
        )
    simulated = SimulatedPlan(plan=given.plan, as_run=as_run, prediction=prediction, measured=measured)
    if out is not None:
        write_prediction(Path(out), given.plan, prediction, simulated.to_json())
    return simulated
