"""``ringtune audit``: check a run from its ledger."""

from __future__ import annotations

import typer

from ringtune import options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def audit(folder: options.RunFolder, json: options.Json = False) -> None:
    """Check the ledger of a run with [audit]: signatures, links, nodes of the plan, states of turns, and the result.

    A run that was killed is checked as far as it went. The exit code is 7 if something is wrong.
    """
    import json as json_module

    from coordinator.api.audit import audit_run, sentences
    from ringtune.errors import IntegrityError

    found = audit_run(folder)
    if json:
        typer.echo(json_module.dumps({"event": "audit", **found._asdict()}))
    else:
        for line in sentences(found):
            typer.echo(line)
    if found.problems:
        raise typer.Exit(IntegrityError.exit_code)
