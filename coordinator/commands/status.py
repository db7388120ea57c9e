"""``ringtune status``: what a coordinator does now."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def status(
    coordinator: Annotated[str, typer.Option(metavar="HOST:PORT", help="Whom to ask.")] = "127.0.0.1:7070",
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow another machine, without encryption.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
) -> None:
    """Show the run that a coordinator drives: phase, step, loss, and every node with its state."""
    from coordinator.screen.status_text import status_json, status_lines
    from coordinator.submit.client import Client

    with Client(coordinator, insecure=insecure) as client:
        found = client.status()
    for line in [status_json(found)] if json else status_lines(found):
        typer.echo(line)
