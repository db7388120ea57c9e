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
    import json as json_module

    from coordinator.api.arguments import job_here, parse_changes
    from coordinator.api.output import make_progress
    from coordinator.api.train import local_ring, require_place
    from coordinator.client.submit import Client
    from coordinator.planner.given_plan import require_profile_place
    from coordinator.screen.tables import profile_json, profile_text
    from ringtune.storage.durable import check_writable, write_durably

    require_place(local, coordinator, nodes)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    wanted = job_here(job, parse_changes(change or []))
    if save is not None:
        require_profile_place(save)
        check_writable(save)
    told = sys.stderr if json else sys.stdout  # JSON is alone on the standard output
    with (
        make_progress(as_json=False, live=False, stream=told) as progress,
        local_ring(wanted, local, progress) if local else Client(coordinator, insecure=insecure) as client,
    ):
        found = client.measure(
            wanted,
            progress=progress,
            num_nodes=local or nodes,
            join_s=join_s,
            with_links=not no_links,
            is_fresh=fresh,
            one_by_one=not busy,
        )
        if rehearse and not no_links:
            found = client.rehearse(wanted, found, progress=progress, num_nodes=local or nodes, join_s=join_s)
    if save is not None:
        write_durably(save, (json_module.dumps(found.to_json(), indent=1) + "\n").encode())
    for line in [profile_json(found)] if json else profile_text(found):
        typer.echo(line)
    if save is not None and not json:
        typer.echo(f"the profile is in {save}")
