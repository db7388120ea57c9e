"""``ringtune status``, ``runs``, ``logs``, ``fetch`` and ``stop``: runs that a coordinator drives and stores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ringtune import options

_RUN = "Id of the run, or its folder. Default: the only run."
Run = Annotated[str, typer.Argument(metavar="RUN", help=_RUN, show_default=False)]


def status(
    coordinator: options.Coordinator = options.DEFAULT_COORDINATOR,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """Show the run of a coordinator (phase, step, loss, helpers) and every node with its state."""
    from coordinator.client.connection import Connection
    from coordinator.screen.listing import status_json, status_lines

    with Connection(coordinator, insecure=insecure) as client:
        answer = client.status()
    options.show(status_json(answer), status_lines(answer, coordinator), as_json=json)


def runs(
    coordinator: options.Coordinator = options.DEFAULT_COORDINATOR,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """List the runs that a coordinator stores: state, steps, step of the newest checkpoint, and submitter."""
    from coordinator.client.connection import Connection
    from coordinator.screen.listing import run_table, runs_json

    with Connection(coordinator, insecure=insecure) as client:
        records = client.runs()
    options.show(runs_json(records), run_table(records), as_json=json)


def logs(
    run: Run = "",
    follow: Annotated[bool, typer.Option("--follow", help="Continue until the run is over.")] = False,
    coordinator: options.Coordinator = options.DEFAULT_COORDINATOR,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """Show the output of a run so far, and with --follow until it is over.

    Ctrl-C ends this command, not the run.
    """
    from coordinator.api.output import make_progress
    from coordinator.client.detached_runs import find_run, only_run
    from coordinator.client.follow import show_events, show_file
    from coordinator.server.restart import last_of

    named = find_run(run, coordinator)
    if named.place is not None and named.folder is not None and named.place.is_local:
        show_file(named.folder, named.place, follow=follow)
        return
    with named.connect(insecure=insecure) as client:
        records = client.records()
        run_id = last_of(records, named.run_id or only_run(records, lambda _: True, "run").run_id)
        with make_progress(as_json=json, live=False) as progress:
            show_events(client, run_id, follow=follow, progress=progress)


def fetch(
    run: Run = "",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the run's files. Default: the folder, or one named by the id."),
    ] = None,
    replace: options.Replace = False,
    coordinator: options.Coordinator = options.DEFAULT_COORDINATOR,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """Write the files of a stored run: job, plan, metrics, report, trace, adapter, checkpoints.

    The folder is the same as that of 'ringtune train': the run can be evaluated, exported and resumed.
    """
    import dataclasses

    from coordinator.client.detached_runs import fetch_run, find_run, kept_record
    from ringtune.errors import UsageError

    named = find_run(run, coordinator)
    if named.is_local:
        raise UsageError(f"{run} is the folder of a local run: its files are there already")
    with named.connect(insecure=insecure) as client:
        record = kept_record(client, named.run_id)
        target = out or named.folder or Path(named.run_id or record.run_id)
        say = (lambda line: None) if json else options.echo
        fetch_run(client, record, target, replace=replace or target == named.folder, say=say)
    line = f"run {record.run_id} ({record.state}, {record.steps_done} steps) is in {target}"
    options.show({"event": "fetched", **dataclasses.asdict(record), "out": str(target)}, [line], as_json=json)


def stop(
    run: Run = "",
    now: Annotated[bool, typer.Option("--now", help="At once, without a further checkpoint.")] = False,
    wait_s: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long to wait for its end, in seconds.")
    ] = 300.0,
    coordinator: options.Coordinator = options.DEFAULT_COORDINATOR,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """Stop a run after the granted turns, with a checkpoint from which it can be resumed."""
    from coordinator.client.detached_runs import find_run, stop_run
    from ringtune.errors import ConnectionFailedError, UsageError

    named = find_run(run, coordinator)
    try:
        with named.connect(insecure=insecure) as client:
            ended = stop_run(client, named.run_id, now=now, wait_s=wait_s)
    except ConnectionFailedError as error:
        if not named.is_local:
            raise
        raise UsageError(f"the run in {run} is not under way; 'ringtune logs {run}' tells how it ended") from error
    options.show({"event": "stopped", "text": ended}, [ended], as_json=json)
