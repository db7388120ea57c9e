"""``ringtune nodes``: who has joined a coordinator."""

from __future__ import annotations

import typer

from ringtune import options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def nodes(
    coordinator: options.Coordinator = options.DEFAULT_COORDINATOR,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """List the nodes of a coordinator."""
    from coordinator.screen.node_list import node_lines, node_table
    from coordinator.submit.connection import Connection

    with Connection(coordinator, insecure=insecure) as client:
        members = client.nodes()
    for line in node_lines(members) if json else node_table(members, coordinator):
        typer.echo(line)
