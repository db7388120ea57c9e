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
    harness: Annotated[
        str,
        typer.Option(
            "--harness",
            metavar="TASKS",
            help="In place of rows: tasks of lm-eval for a language model, with commas between them, such as piqa "
            "(extra [harness]).",
        ),
    ] = "",
    harness_data: Annotated[
        Path | None,
        typer.Option(
            "--harness-data",
            metavar="DIR",
            help="Folder with tasks of your own for --harness, and the files that they name; a task may have code, "
            "which is run.",
        ),
    ] = None,
    apply_chat_template: Annotated[
        bool,
        typer.Option(
            "--apply-chat-template",
            help="Write contexts of --harness as conversations in the run's chat template, as lm-eval's option does.",
        ),
    ] = False,
    join_s: options.JoinS = 60.0,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """Evaluate the adapter or model of a run on a file: accuracy, loss and the number of rows.

    With --harness a language model is evaluated by tasks of lm-eval instead, in one process on this machine.
    """
    import functools

    from coordinator.api import run as api
    from coordinator.api.arguments import typed
    from coordinator.cli.columns import parse_columns
    from coordinator.run.run_text import all_figures
    from coordinator.screen.tables import class_lines

    if harness or harness_data is not None or apply_chat_template:
        refuse_other_rows(context, harness)
        run_harness = functools.partial(_harness, data=harness_data, is_chat=apply_chat_template)
        typer.echo(run_harness(folder, harness, model=model, user=user, json=json))
        return
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


def refuse_other_rows(context: typer.Context, harness: str) -> None:
    """Refuse options of rows beside --harness, and options of lm-eval without it.

    Raises:
        UsageError: one was typed.
    """
    from ringtune.errors import UsageError

    if not harness:
        raise UsageError(
            "--harness-data and --apply-chat-template are for --harness; name tasks with it, or leave it out"
        )
    options_of_rows = {"--data": "data", "--coordinator": "coordinator", "--column": "column", "--missing": "missing"}
    for option, name in options_of_rows.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--harness brings its own rows and computes on this machine; leave {option} out")


def _harness(
    folder: Path, tasks: str, *, data: Path | None, is_chat: bool, model: Path | None, user: str, json: bool
) -> str:
    import functools
    import json as json_module

    from coordinator.api.harness import harness, lines_of
    from coordinator.client.saved_run import read_run

    names = [name.strip() for name in tasks.split(",")]
    tell = functools.partial(typer.echo, err=True)
    found = harness(read_run(folder), names, data=data, model=model, user=user, apply_chat_template=is_chat, tell=tell)
    return json_module.dumps({"event": "harness", "tasks": found}) if json else "\n".join(lines_of(found))


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
