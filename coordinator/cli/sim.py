"""``ringtune sim``: predict seconds, idle shares, bytes and memory of a plan, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ringtune import options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command("sim")
def simulate(
    plan: options.PlanFile,
    profile: options.ProfileFile = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="TRACE|RUN", help="Take times from a recorded run, stragglers included, not medians."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write prediction.json and trace.json (for Perfetto) there.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed for sampling recorded times if the plan was changed.")] = 0,
    json: options.Json = False,
) -> None:
    """Predict the time of training, idle shares, bytes and memory of a plan from measured times.

    With the folder of a finished run, what it really took stands beside.
    """
    import json as json_module

    from coordinator.api.prediction_inputs import plan_as_run, read_inputs, read_measured, read_recording
    from coordinator.api.prediction_text import check_out, prediction_json, prediction_lines, write_prediction
    from coordinator.screen.progress import WaitNotice
    from sim.prediction import check_fits, predict

    if out is not None:
        check_out(out)
    given = read_inputs(plan, profile)
    check_fits(given.plan, given.profile, optimizer=given.optimizer, dtype=given.dtype, shape=given.shape)
    recording, same_run = read_recording(trace, given.plan) if trace is not None else (None, False)
    measured = read_measured(given)
    wanted = plan_as_run(given.plan, measured)
    with WaitNotice("predicting"):
        found = predict(
            wanted,
            given.profile,
            optimizer=given.optimizer,
            dtype=given.dtype,
            samples=recording.samples if recording else None,
            same_run=same_run,
            start=measured.start if measured else None,
            tables=measured.tables if measured else (),
            keep_spans=out is not None,
            seed=seed,
            move_s=given.move_s,
        )
    value = prediction_json(given.plan, found, measured)
    if out is not None:
        write_prediction(out, given.plan, found, value)
    if json:
        typer.echo(json_module.dumps({"event": "prediction", **value}))
        return
    for line in prediction_lines(wanted, found, measured):
        typer.echo(line)
