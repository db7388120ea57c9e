"""``ringtune audit``: check a run from its ledger."""

from __future__ import annotations

import typer

from ringtune import options


def audit(folder: options.RunFolder, json: options.Json = False) -> None:
    """Check the ledger of an audited run: signatures, links, nodes of the plan, states of turns, and the result.

    A run that was killed is checked as far as it went. The exit code is 7 if something is wrong.
    """
    from coordinator.api.audit import audit_run, sentences
    from ringtune.errors import IntegrityError

    outcome = audit_run(folder)
    options.show({"event": "audit", **outcome._asdict()}, sentences(outcome), as_json=json)
    if outcome.problems:
        raise typer.Exit(IntegrityError.exit_code)
