"""stub."""

import typer

app = typer.Typer()


@app.command()
def nodes() -> None:
    """Do nodes."""
