"""``ringtune predict``: predict for new rows with the result of a run."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from ringtune import options


def predict(
    folder: options.RunFolder,
    data: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Rows to predict for, with the job's columns; targets may be missing. They stay on this machine.",
        ),
    ],
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a .csv or .jsonl with the rows' own columns and the predicted ones; another file there is "
            "renamed to FILE.replaced-TIME.",
        ),
    ] = None,
    model: options.ModelFolder = None,
    column: options.Columns = None,
    missing: options.Missing = "",
    user: options.User = "",
    max_new_tokens: options.MaxNewTokens = 50,
    temperature: options.Temperature = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=(1 << 31) - 1, help="Random seed for sampling text.")] = 0,
    coordinator: options.Coordinator = "",
    join_s: options.JoinS = 60.0,
    insecure: options.Insecure = False,
    json: options.Json = False,
) -> None:
    """Predict for rows with the adapter or model of a run: labels with probabilities, answers, or generated text.

    Without --save the rows are printed as csv, each with its prediction. The computation is in one process on this
    machine; with --coordinator a language model writes on the nodes, for a model that no machine holds. Predictions are
    compared with targets of the rows, where they have any; generated texts with those in a column 'answer' by ROUGE-L.
    """
    import functools
    import json as json_module

    from coordinator.api import predict as api
    from coordinator.api.arguments import typed
    from coordinator.cli.columns import parse_columns
    from coordinator.client.saved_run import read_run, with_data

    columns = parse_columns(column or [])
    summary = api.Summary(with_data(read_run(folder), columns, missing, has_references=True).job)
    writer = api.JsonWriter(sys.stdout, "prediction") if json else api.CsvWriter(sys.stdout)

    def take(prediction: api.RowPrediction) -> None:
        if save is None:
            writer.add(prediction)
        summary.add(prediction)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    typed(api.predict)(
        folder,
        data,
        save=save,
        model=model,
        columns=columns,
        missing=missing,
        user=user,
        max_new_tokens=max_new_tokens,
        temperature=temperature or 0.0,
        seed=seed,
        coordinator=coordinator,
        join_s=join_s,
        insecure=insecure,
        tell=functools.partial(options.echo, err=True),
        take=take,
    )
    if json:
        written = {"file": str(save)} if save else {}
        options.echo(json_module.dumps({"event": "predicted", **written, **summary.to_json()}))
        return
    for line in summary.lines():
        options.echo(line, err=save is None)
    if save is not None:
        options.echo(f"wrote {save}")
