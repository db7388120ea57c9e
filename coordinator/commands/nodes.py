"""``ringtune nodes``: who has joined a coordinator."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def nodes(
    coordinator: Annotated[str, typer.Option(metavar="HOST:PORT", help="Whom to ask.")] = "127.0.0.1:7070",
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow another machine, without encryption.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON line a node.")] = False,
) -> None:
    """List the nodes of a coordinator."""
    from coordinator.screen.node_list import node_lines, node_table
    from coordinator.submit.client import Client

    with Client(coordinator, insecure=insecure) as client:
        members = client.nodes()
    for line in node_lines(members) if json else node_table(members, coordinator):
        typer.echo(line)
