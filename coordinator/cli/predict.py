"""``ringtune predict``: predict for new rows with the result of a run."""

from __future__ import annotations

import itertools
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from ringtune import options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def predict(
    folder: options.RunFolder,
    data: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Rows to predict for, as the job's columns name them; targets may be missing. They stay on this "
            "machine.",
        ),
    ],
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a .csv or .jsonl with the rows' own columns and the predicted ones; another file there is kept "
            "as FILE.replaced-TIME.",
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Model folder on this machine; replaces the run's model.path.")
    ] = None,
    column: options.Columns = None,
    missing: options.Missing = "",
    user: options.User = "",
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens", metavar="N", min=1, max=4096, help="Most tokens that a language model generates."
        ),
    ] = 50,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            metavar="NUMBER",
            min=0.0,
            max=100.0,
            help="How freely a language model draws the next token; 0 = always the likeliest.",
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=(1 << 31) - 1, help="Random seed for sampling text.")] = 0,
    json: options.Json = False,
) -> None:
    """Predict for rows with the adapter or model of a run: labels with probabilities, answers, or generated text.

    Without --save the rows are printed as csv, each with its prediction. All runs in one process on this machine.
    """
    import json as json_module

    from coordinator.api.predict import (
        CsvWriter,
        JsonWriter,
        Sampling,
        Summary,
        Writer,
        check_request,
        predict_rows,
        writer_to,
    )
    from coordinator.cli.columns import parse_columns
    from coordinator.client.saved_run import read_run, with_data
    from coordinator.screen.progress import Waiting

    run = with_data(read_run(folder), parse_columns(column or []), missing)
    how = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)

    def tell(line: str) -> None:
        typer.echo(line, err=True)

    for note in check_request(run, data, how, user):
        tell(note)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C
    summary = Summary(run.job)

    def write(writer: Writer) -> None:
        every = predict_rows(run, data, how, model=model, user=user, tell=tell)
        with Waiting(f"loading the model of {folder}"):
            first = list(itertools.islice(every, 1))
        for found in itertools.chain(first, every):
            writer.add(found)
            summary.add(found)

    if save is None:
        write(JsonWriter(sys.stdout, "prediction") if json else CsvWriter(sys.stdout))
    else:
        with writer_to(save, data, tell) as writer:
            write(writer)
    if json:
        written = {"file": str(save)} if save else {}
        typer.echo(json_module.dumps({"event": "predicted", **written, **summary.to_json()}))
        return
    for line in summary.lines():
        typer.echo(line, err=save is None)
    if save is not None:
        typer.echo(f"wrote {save}")
