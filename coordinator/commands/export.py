"""``ringtune export``: a run's adapter as a folder to give away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a finished run.")],
    to: Annotated[Path, typer.Option(metavar="DIR2", help="Folder to write; absent or empty.")],
    base_model: Annotated[
        str, typer.Option(metavar="ID", help="Id of the base model, NAME or OWNER/NAME. Default: its folder's name.")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
) -> None:
    """Write the adapter of a run as an AdapterHub folder with a model card, checked, with no local path in it."""
    import json as json_module

    from coordinator.export.export import export_run

    digests = export_run(folder, to, base_model=base_model)
    if json:
        typer.echo(json_module.dumps({"event": "export", "folder": str(to), "sha256": digests}))
        return
    for name, digest in sorted(digests.items()):
        typer.echo(f"{digest}  {name}")
    typer.echo(f"exported to {to}; load it with model.load_adapter({str(to)!r}, use_safetensors=True, set_active=True)")
