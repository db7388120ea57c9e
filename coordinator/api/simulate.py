"""``ringtune.simulate``: predict seconds, idle shares, bytes and memory of a plan, without a run."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from coordinator.api.arguments import RunLike, folder_of, for_python
from coordinator.api.prediction_inputs import (
    MeasuredRun,
    measured_json,
    plan_as_run,
    read_inputs,
    read_measured,
    read_recording,
)
from coordinator.api.prediction_text import check_out, prediction_lines, write_prediction
from coordinator.screen.progress import WaitNotice
from ringtune.schedule.plan import Plan
from sim.prediction import Prediction, check_fits, predict


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
