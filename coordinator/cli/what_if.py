"""``ringtune what-if``: predict the effect of a faster board, a slower link or another batch, without a run."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringtune import options
from ringtune.plan_keys import PLAN_KEYS

if TYPE_CHECKING:
    from coordinator.planner.what_if import CellResult, WhatIf

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command("what-if")
def what_if(
    plan: options.PlanFile,
    profile: options.ProfileFile = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--change",
            metavar="KEY=VALUE",
            help="NODE.compute (0.5 = half as fast), NODE.memory, link.A.B.rate (100Mbit, 5MB/s), link.A.B.latency "
            f"(seconds), or a key of the plan: {', '.join(PLAN_KEYS)}; * = every node.",
        ),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE", help="Leave a node out; without --replan the host before it takes its blocks."),
    ] = None,
    add: Annotated[list[str] | None, typer.Option(metavar="NODE", help="Add a node without data.")] = None,
    like: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="Whose speed, memory and links an added node has.")
    ] = None,
    replan: Annotated[Path | None, typer.Option(metavar="JOB", help="Plan anew for this job.toml.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="TRACE|RUN", help="Take times from a recorded run, stragglers included, not medians."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed for sampling recorded times if the plan was changed.")] = 0,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUES", help="Several values: A,B,C or FROM:TO:COUNT; given twice: the grid."),
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="N", help="Workers of a sweep; -1 = one for each core.")] = -1,
    backend: Annotated[str, typer.Option(metavar="loky|dask|ray", help="What runs the cells of a sweep.")] = "loky",
    cluster: Annotated[str, typer.Option(metavar="ADDRESS", help="Of a running Dask scheduler or Ray cluster.")] = "",
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the sweep as CSV; over an earlier one only.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the sweep as .png or .svg; over an earlier one only.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Predict what a change of nodes, links or plan does to the time of training, idle shares and memory.

    A sweep shows on a terminal how far it is; Ctrl-C ends it, and what is done is printed and written.
    """
    import json as json_module

    from coordinator.api.prediction_text import comparison_json, comparison_lines
    from coordinator.api.what_if import make_question
    from coordinator.planner.what_if import difference_text
    from coordinator.screen.progress import Waiting
    from ringtune.errors import UsageError
    from ringtune.job.job import load_job

    if not (change or drop or add or replan or sweep):
        raise UsageError("nothing changes; give --change, --sweep, --drop, --add or --replan")
    if (csv or plot) and not sweep:
        raise UsageError("--csv and --plot are for a --sweep")
    asked = load_job(replan) if replan else None
    question, other = make_question(
        plan,
        profile,
        changes=change or (),
        drop=drop or (),
        add=tuple(zip(add or (), _models(add or [], like or []), strict=True)),
        job=asked,
        trace=trace,
        seed=seed,
    )
    if other and not json:
        typer.echo(f"{replan} is not the job of the run: {difference_text(other)}")
    told = {"job_changed": {name: list(values) for name, values in other.items()}} if asked else {}
    if sweep:
        _sweep(question, sweep, jobs=jobs, backend=backend, cluster=cluster, csv=csv, plot=plot, json=json, told=told)
        return
    with Waiting("predicting"):
        before, after = question.before(), question.after()
    if json:
        typer.echo(json_module.dumps({"event": "what-if", **comparison_json(before, after), **told}))
        return
    for line in comparison_lines(before, after):
        typer.echo(line)


def _models(add: list[str], like: list[str]) -> list[str]:
    """Name the node that each added node is like; one name stands for all.

    Raises:
        UsageError: another number of names.
    """
    from ringtune.errors import UsageError

    if add and len(like) == 1:
        return like * len(add)
    if len(add) != len(like):
        raise UsageError("every --add NODE needs a --like NODE: whose speed, memory and links it has")
    return like


def _sweep(
    question: WhatIf,
    sweep: list[str],
    *,
    jobs: int,
    backend: str,
    cluster: str,
    csv: Path | None,
    plot: Path | None,
    json: bool,
    told: Mapping[str, object],
) -> None:
    """Run the cells, then print and write them; after a Ctrl-C those that are done.

    Raises:
        InterruptedRunError: Ctrl-C, once everything is printed and written.
    """
    import json as json_module
    import sys

    from coordinator.api.prediction_text import (
        check_plot,
        require_sweep_place,
        sweep_csv,
        sweep_lines,
        sweep_rows,
        write_plot,
    )
    from coordinator.screen.progress import shown_cells
    from ringtune.errors import InterruptedRunError
    from ringtune.storage.durable import check_writable, write_durably
    from sim.sweep import check_workers, each_cell, grid, parse_axis

    axes = [parse_axis(text) for text in sweep]
    cells = grid(axes)
    check_workers(jobs, backend, cluster)
    if plot is not None:
        check_plot(plot)
    if csv is not None:
        require_sweep_place(csv)
    question.check(cells)
    for file in filter(None, (csv, plot)):
        check_writable(file)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    before, is_stopped = question.before(), False
    found: list[CellResult] = []
    try:
        running = each_cell(question, cells, jobs=jobs, backend=backend, cluster=cluster)
        with contextlib.closing(running), contextlib.closing(shown_cells(running, len(cells), sys.stderr)) as shown:
            found.extend(shown)  # what came before a Ctrl-C stays
    except KeyboardInterrupt:
        is_stopped = True
    rows = sweep_rows(axes, before, found)
    if json:
        value = {
            "before": before.to_json(),
            "axes": {axis.key: list(axis.values) for axis in axes},
            "cells": rows,
            **told,
        }
        typer.echo(json_module.dumps({"event": "sweep", "is_complete": not is_stopped, **value}))
    else:
        for line in sweep_lines(axes, before, found):
            typer.echo(line)
    if csv is not None:
        write_durably(csv, sweep_csv(axes, rows).encode())
    if plot is not None:
        course = question.plan.course
        title = (
            f"{course.method.name}, {course.num_blocks} blocks, {len(question.plan.nodes)} nodes: predicted training"
        )
        write_plot(plot, axes, before.prediction.wall_s, found, title=title)
    if is_stopped:
        raise InterruptedRunError(f"stopped; {len(found)} of {len(cells)} cells are done, and they are above")
