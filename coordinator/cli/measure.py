"""``ringtune measure``: time the work of a job on the nodes, and the links between them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from ringtune import options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def measure(
    job: options.JobFile,
    coordinator: options.CoordinatorOrLocal = "",
    local: options.Local = 0,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the profile there, for --profile of 'ringtune train'; over an earlier one only."
        ),
    ] = None,
    nodes: options.Nodes = 0,
    join_s: options.JoinS = 60.0,
    no_links: Annotated[bool, typer.Option("--no-links", help="Only the nodes themselves.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew what nodes remember.")] = False,
    busy: Annotated[
        bool,
        typer.Option(
            "--busy/--one-by-one",
            help="Nodes of one machine all at once, as they compute in a run, or one after another.",
        ),
    ] = True,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse/--no-rehearsal", help="End with some steps of the job, and correct times by them."),
    ] = True,
    change: options.Changes = None,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """Let the nodes time every kind of work of a job, and their links; a node remembers its part.

    The job's model, adapter, micro-batch and length are what is timed. In the end the nodes train some steps of the
    job together and throw away what they trained: the times are corrected by what a whole ring takes.
    """
    from coordinator.api import measure as api
    from coordinator.api.arguments import parse_changes, typed
    from coordinator.api.output import make_progress
    from coordinator.screen.tables import profile_json

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    found = typed(api.measure)(
        job,
        local=local,
        coordinator=coordinator,
        save=save,
        progress=make_progress(as_json=False, live=False, stream=sys.stderr if json else sys.stdout),
        links=not no_links,
        fresh=fresh,
        busy=busy,
        rehearse=rehearse,
        nodes=nodes,
        join_s=join_s,
        insecure=insecure,
        **parse_changes(change or []),
    )
    for line in [profile_json(found.profile)] if json else found.lines():
        typer.echo(line)
    if save is not None and not json:
        typer.echo(f"the profile is in {save}")
