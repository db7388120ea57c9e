"""The command ``ringtune doctor``, which checks this machine as a node or coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ringtune import options


def doctor(
    role: Annotated[str, typer.Option(help="Role of this machine: node or coordinator.")] = "node",
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="Check this model folder too.")] = None,
    coordinator: options.Coordinator = "",
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to serve at. Default: any port, a coordinator's is 7070.")
    ] = "",
    disk: Annotated[Path, typer.Option(metavar="DIR", help="Folder for runs and models.")] = Path(),
    insecure: options.Insecure = False,
    trust: options.Trust = None,
    json: options.Json = False,
) -> None:
    """Check this machine: each line has PASS, WARN or FAIL and a remedy. Exit code 1 if anything fails."""
    from edge.doctor import Level, all_lines, examine
    from ringtune import __version__

    checks = examine(role, model=model, coordinator=coordinator, bind=bind, disk=disk, insecure=insecure, trust=trust)
    is_fit = all(check.level is not Level.FAIL for check in checks)
    report = {"version": __version__, "is_fit": is_fit, "checks": [check.as_json() for check in checks]}
    options.show(report, all_lines(checks), as_json=json)
    if not is_fit:
        raise typer.Exit(1)
