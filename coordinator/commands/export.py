"""``ringtune export``: a run's adapter or model as a folder to give away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ringtune import options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def export(
    folder: options.RunFolder,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; absent or empty.")],
    base_model: Annotated[
        str, typer.Option(metavar="ID", help="Id of the base model, NAME or OWNER/NAME. Default: its folder's name.")
    ] = "",
    json: options.Json = False,
) -> None:
    """Write the adapter or model of a run as a folder with a model card, checked, with no local path in it."""
    import json as json_module

    from coordinator.export.export import export_run

    digests = export_run(folder, out, base_model=base_model)
    if json:
        typer.echo(json_module.dumps({"event": "export", "folder": str(out), "sha256": digests}))
        return
    for name, digest in sorted(digests.items()):
        typer.echo(f"{digest}  {name}")
    as_adapter = f"model.load_adapter({str(out)!r}, use_safetensors=True, set_active=True)"
    as_model = f"AutoModel.from_pretrained({str(out)!r}), as its README.md says"
    typer.echo(f"exported to {out}; load it with {as_model if 'config.json' in digests else as_adapter}")
