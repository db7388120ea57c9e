"""``ringtune measure``: time the work of a job on the nodes, and the links between them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from ringtune import options


def measure(
    job: options.JobFile,
    coordinator: options.CoordinatorOrLocal = "",
    local: options.Local = 0,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the profile there, for --profile of 'ringtune train'; replaces only an earlier profile.",
        ),
    ] = None,
    nodes: options.Nodes = 0,
    join_s: options.JoinS = 60.0,
    no_links: Annotated[bool, typer.Option("--no-links", help="Don't measure links.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore times that nodes have cached.")] = False,
    busy: Annotated[
        bool,
        typer.Option(
            "--busy/--one-by-one", help="Measure nodes of one machine all at once, as in a run, or one after another."
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
    """Measure every kind of work of a job on the nodes, and the links; nodes cache their times.

    Measured are the job's model and adapter with its micro-batch and length. At the end the nodes train some steps
    together, which are discarded; the times are corrected to match a whole ring.
    """
    from coordinator.api import train as api
    from coordinator.api.arguments import parse_changes, typed
    from coordinator.api.output import make_progress

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    profile = typed(api.measure)(
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
    saved = [f"the profile is in {save}"] if save is not None else []
    options.show({"event": "profile", "profile": profile.to_json()}, [*profile.lines(), *saved], as_json=json)
