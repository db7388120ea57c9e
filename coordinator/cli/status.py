"""``ringtune status``: show the run that a coordinator drives, and its nodes."""

from __future__ import annotations

import typer

from ringtune import options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def status(
    coordinator: options.Coordinator = options.DEFAULT_COORDINATOR,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """Show the run of a coordinator (phase, step, loss, helpers) and every node with its state."""
    from coordinator.client.connection import Connection
    from coordinator.screen.listing import status_json, status_lines

    with Connection(coordinator, insecure=insecure) as client:
        found = client.status()
    options.show(status_json(found), status_lines(found, coordinator), as_json=json)
