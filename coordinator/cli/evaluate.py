"""``ringtune eval``: evaluate the adapter or model of a run on a file."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringtune import options

if TYPE_CHECKING:
    pass

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
            "what its nodes have for evaluation.",
        ),
    ] = None,
    coordinator: options.Coordinator = "",
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Model folder on this machine; replaces the run's model.path.")
    ] = None,
    column: options.Columns = None,
    missing: options.Missing = "",
    user: options.User = "",
    join_s: options.JoinS = 60.0,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """Evaluate the adapter or model of a run on a file: accuracy, loss and the number of rows."""
    import json as json_module

    from coordinator.api.evaluation import evaluate_alone, evaluate_on_ring, rows_to_evaluate
    from coordinator.api.user_adapters import adapter_of, require_user
    from coordinator.cli.columns import parse_columns
    from coordinator.client.saved_run import read_run, with_data
    from coordinator.run.run_text import all_figures
    from coordinator.screen.progress import Progress
    from coordinator.screen.tables import class_lines

    if coordinator and data is None:
        refuse_options_of_the_node_here(context)
    run = with_data(read_run(folder), parse_columns(column or []), missing)
    require_user(run, user)
    rows = rows_to_evaluate(data, run.job.data, on_ring=bool(coordinator))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    progress = Progress()
    where = f"the nodes of {coordinator}" if coordinator else "this machine"
    whose = f", user {user}," if user else ""
    theirs = "the rows of the nodes" if coordinator else f"the held-out rows of {run.job.data.train}"
    typer.echo(f"evaluating {folder}{whose} on {rows or theirs}, with {where} ...", err=True)
    with adapter_of(run, user) as chosen:
        if coordinator:
            found = evaluate_on_ring(
                chosen, rows, coordinator, progress=progress, join_s=join_s, model=model, insecure=insecure
            )
        else:
            found = evaluate_alone(chosen, rows, progress=progress, join_s=join_s, model=model)
    if json:
        typer.echo(json_module.dumps({"event": "evaluation", **found}))
        return
    for line in (*all_figures(found), *class_lines(found)):
        typer.echo(line)


def refuse_options_of_the_node_here(context: typer.Context) -> None:
    """Refuse options of the node that is started here, in an evaluation on the rows of other nodes that needs none.

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
