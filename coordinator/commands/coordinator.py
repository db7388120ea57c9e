"""stub."""

import typer

app = typer.Typer()


@app.command()
def coordinator() -> None:
    """Do coordinator."""
