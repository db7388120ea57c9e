"""``ringtune sim`` and ``ringtune what-if``: predict a plan, and the effect of a change of it, without a run."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringtune import options
from ringtune.plan_keys import PLAN_KEYS

if TYPE_CHECKING:
    from coordinator.api.what_if import Comparison
    from coordinator.planner.what_if import CellResult


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
    lose: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODES",
            help="Lost by a run at once, A+B or 'any two': does it go on, by the recovery of its job or --replan?",
        ),
    ] = None,
    add: Annotated[list[str] | None, typer.Option(metavar="NODE", help="Add a node without data.")] = None,
    like: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="Node with the speed, memory and links of an added one.")
    ] = None,
    replan: Annotated[Path | None, typer.Option(metavar="JOB", help="Plan again for this job.toml.")] = None,
    trace: options.Trace = None,
    seed: options.TraceSeed = 0,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUES", help="Several values: A,B,C or FROM:TO:COUNT; given twice: the grid."),
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="N", help="Workers of a sweep; -1 = one for each core.")] = -1,
    backend: Annotated[str, typer.Option(metavar="loky|dask|ray", help="Library that runs a sweep.")] = "loky",
    cluster: Annotated[str, typer.Option(metavar="ADDRESS", help="A running Dask scheduler or Ray cluster.")] = "",
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the sweep as CSV; replaces only an earlier one.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the sweep as .png or .svg; replaces only an earlier plot.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Predict the effect of a change of nodes, links or plan on training time, idle shares and memory.

    A sweep shows its progress on a terminal; Ctrl-C ends it, and the finished cells are printed and written.
    """
    from coordinator.api import what_if as api
    from coordinator.api.arguments import typed
    from coordinator.api.prediction_text import (
        check_plot,
        comparison_json,
        comparison_lines,
        loss_lines,
        require_sweep_place,
    )
    from coordinator.planner.what_if import difference_text
    from coordinator.screen.progress import WaitNotice
    from ringtune.errors import InterruptedRunError, UsageError
    from ringtune.storage.durable import check_writable

    if lose and (sweep or change or drop or add):
        raise UsageError("--lose is of the plan as it is; give --change, --drop, --add and --sweep in another call")
    if (csv or plot) and not sweep:
        raise UsageError("--csv and --plot are for a --sweep")
    if plot is not None:
        check_plot(plot)
    if csv is not None:
        require_sweep_place(csv)
    for file in filter(None, (csv, plot)):
        check_writable(file)
    if sweep:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    missing = 0

    def watch(cells: Generator[CellResult], count: int) -> Iterator[CellResult]:
        from coordinator.screen.live_tables import shown_cells

        nonlocal missing
        missing = count
        with contextlib.suppress(KeyboardInterrupt), shown_cells(cells, count) as shown:
            for cell in shown:
                missing -= 1
                yield cell

    with contextlib.nullcontext() if sweep else WaitNotice("predicting"):
        comparison = typed(api.what_if)(
            plan,
            change,
            profile=profile,
            drop=drop or (),
            lose=lose or (),
            add=tuple(zip(add or (), _models(add or [], like or []), strict=True)),
            replan=replan,
            trace=trace,
            seed=seed,
            sweep=sweep,
            jobs=jobs,
            backend=backend,
            cluster=cluster,
            watch=watch,
        )
    if comparison.job_changed and not json:
        options.echo(f"{replan} is not the job of the run: {difference_text(comparison.job_changed)}")
    told = {"job_changed": {name: list(values) for name, values in comparison.job_changed.items()}} if replan else {}
    if sweep:
        _show_sweep(comparison, {"is_complete": not missing}, told, csv=csv, plot=plot, json=json)
        if missing:
            done = len(comparison.results)
            raise InterruptedRunError(f"stopped; {done} of {done + missing} cells are done, and they are above")
    elif lose:
        losses = [dict(row) for row in comparison.losses]
        options.show({"event": "losses", "losses": losses, **told}, loss_lines(losses), as_json=json)
    else:
        compared = comparison_json(comparison.before, comparison.after)
        lines = comparison_lines(comparison.before, comparison.after)
        options.show({"event": "what-if", **compared, **told}, lines, as_json=json)


def _models(add: list[str], like: list[str]) -> list[str]:
    """Return for each added node the one that it is like; one name is used for all."""
    from ringtune.errors import UsageError

    if add and len(like) == 1:
        return like * len(add)
    if len(add) != len(like):
        raise UsageError("every --add NODE needs a --like NODE: whose speed, memory and links it has")
    return like


def _show_sweep(
    comparison: Comparison,
    is_complete: Mapping[str, bool],
    told: Mapping[str, object],
    *,
    csv: Path | None,
    plot: Path | None,
    json: bool,
) -> None:
    from coordinator.api.prediction_text import sweep_csv, sweep_lines, write_plot
    from ringtune.storage.durable import write_durably

    axes, before, rows = comparison.axes, comparison.before, [dict(row) for row in comparison.cells]
    value = {"before": before.to_json(), "axes": {axis.key: list(axis.values) for axis in axes}, "cells": rows}
    lines = sweep_lines(axes, before, comparison.results)
    options.show({"event": "sweep", **is_complete, **value, **told}, lines, as_json=json)
    if csv is not None:
        write_durably(csv, sweep_csv(axes, rows).encode())
    if plot is not None:
        course = before.plan.course
        nodes = f"{len(before.plan.nodes)} nodes"
        title = f"{course.method.name}, {course.num_blocks} blocks, {nodes}: predicted training"
        write_plot(plot, axes, before.prediction.wall_s, comparison.results, title=title)


def simulate(
    plan: options.PlanFile,
    profile: options.ProfileFile = None,
    trace: options.Trace = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write prediction.json and trace.json (for Perfetto) there.")
    ] = None,
    seed: options.TraceSeed = 0,
    json: options.Json = False,
) -> None:
    """Predict training time, idle shares, bytes and memory of a plan from measured times.

    With the folder of a finished run its measured figures are shown too.
    """
    from coordinator.api import what_if as api
    from coordinator.api.arguments import typed

    prediction = typed(api.simulate)(plan, profile=profile, trace=trace, out=out, seed=seed)
    options.show({"event": "prediction", **prediction.to_json()}, prediction.lines(), as_json=json)
