"""stub."""

import typer

app = typer.Typer()


@app.command()
def plan() -> None:
    """Do plan."""
