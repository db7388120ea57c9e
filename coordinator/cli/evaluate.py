"""``ringtune eval``: evaluate the adapter or model of a run on a file."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from ringtune import options


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
            help="In place of rows: tasks of lm-eval for a language model, with commas between them, such as piqa; "
            "it needs the extra harness.",
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
    from ringtune.errors import UsageError

    tell = functools.partial(options.echo, err=True)
    if harness or harness_data is not None or apply_chat_template:
        from coordinator.api.evaluation import harness as measured
        from coordinator.api.evaluation import lines_of
        from coordinator.client.saved_run import read_run

        refuse_other_rows(context, harness)
        figures = measured(
            read_run(folder),
            [name.strip() for name in harness.split(",")],
            data=harness_data,
            model=model,
            user=user,
            apply_chat_template=apply_chat_template,
            tell=tell,
        )
        options.show({"event": "harness", "tasks": figures}, lines_of(figures), as_json=json)
        return
    if coordinator and data is None and (words := " and ".join(_typed(context, "--model", "--join-s"))):
        raise UsageError(f"{words} would be for a node here that has the rows; give --data FILE, or leave out {words}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    evaluation = typed(api.evaluate)(
        folder,
        data,
        coordinator=coordinator,
        model=model,
        columns=parse_columns(column or []),
        missing=missing,
        user=user,
        join_s=join_s,
        insecure=insecure,
        tell=tell,
    )
    options.show(
        {"event": "evaluation", **evaluation}, (*all_figures(evaluation), *class_lines(evaluation)), as_json=json
    )


def refuse_other_rows(context: typer.Context, harness: str) -> None:
    """Refuse options of rows beside --harness, and options of lm-eval without it; raises ``UsageError``."""
    from ringtune.errors import UsageError

    if not harness:
        raise UsageError(
            "--harness-data and --apply-chat-template are for --harness; name tasks with it, or leave it out"
        )
    for option in _typed(context, "--data", "--coordinator", "--column", "--missing"):
        raise UsageError(f"--harness brings its own rows and computes on this machine; leave {option} out")


def _typed(context: typer.Context, *options_: str) -> list[str]:
    """Return those of the options that stand on the command line."""
    sources = {option: context.get_parameter_source(option.removeprefix("--").replace("-", "_")) for option in options_}
    return [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
