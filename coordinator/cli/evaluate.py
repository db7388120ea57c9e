"""``ringtune eval``: evaluate the adapter or model of a run on a file."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from ringtune import options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command("eval")
def evaluate(
    context: typer.Context,
    folder: options.RunFolder,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Rows to evaluate on; they stay on this machine. Default: those of the job, or with --coordinator "
            "the evaluation rows of its nodes.",
        ),
    ] = None,
    coordinator: options.Coordinator = "",
    model: options.ModelFolder = None,
    column: options.Columns = None,
    missing: options.Missing = "",
    user: options.User = "",
    join_s: options.JoinS = 60.0,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """Evaluate the adapter or model of a run on a file: accuracy, loss and the number of rows."""
    import functools

    from coordinator.api import run as api
    from coordinator.api.arguments import typed
    from coordinator.cli.columns import parse_columns
    from coordinator.run.run_text import all_figures
    from coordinator.screen.tables import class_lines

    if coordinator and data is None:
        refuse_local_node_options(context)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    found = typed(api.evaluate)(
        folder,
        data,
        coordinator=coordinator,
        model=model,
        columns=parse_columns(column or []),
        missing=missing,
        user=user,
        join_s=join_s,
        insecure=insecure,
        tell=functools.partial(typer.echo, err=True),
    )
    options.show({"event": "evaluation", **found}, (*all_figures(found), *class_lines(found)), as_json=json)


def refuse_local_node_options(context: typer.Context) -> None:
    """Refuse options of the node on this machine if the evaluation is on the rows of other nodes.

    Raises:
        UsageError: one was typed.
    """
    from ringtune.errors import UsageError

    typed = [
        option
        for option, name in (("--model", "model"), ("--join-s", "join_s"))
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    ]
    if typed:
        words = " and ".join(typed)
        raise UsageError(f"{words} would be for a node here that has the rows; give --data FILE, or leave out {words}")
