"""``ringtune init``: a job file to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ringtune import options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The job file to write.")] = Path("job.toml"),
    task: Annotated[
        str,
        typer.Option(
            metavar="TASK",
            help="What is learned: sequence-classification, question-answering, causal-lm or image-classification.",
        ),
    ] = "sequence-classification",
    model: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the base model, for model.path.")] = Path(
        "models/all-MiniLM-L6-v2"
    ),
    data: Annotated[Path, typer.Option(metavar="FILE", help="Training rows, for data.train.")] = Path("train.csv"),
    eval_data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Evaluation rows, for data.eval. Default: none.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Write a job file with the common keys of a task, each with what it does; nothing is asked or overwritten."""
    import json as json_module

    from ringtune.errors import UsageError
    from ringtune.files.durable import write_durably
    from ringtune.files.strict import nearest
    from ringtune.hints import hint
    from ringtune.jobs.template import job_template
    from ringtune.models.family import TASKS

    if task not in TASKS:
        raise UsageError(f"--task {task!r} is not known; {nearest(task, TASKS)}")
    if file.exists():
        raise UsageError(f"{file} is there already; give another name, or remove it")
    text = job_template(task, model=str(model), train=str(data), evaluate=str(eval_data or ""))
    write_durably(file, text.encode())
    if json:
        typer.echo(json_module.dumps({"event": "init", "file": str(file), "task": task}))
        return
    if not (file.parent / model).is_dir():
        typer.echo(
            f"{model} is not there yet: model.path has to be a folder with config.json, model.safetensors and the "
            "tokenizer; 'ringtune demo' fetches one, and the job.toml that it writes names the folder",
            err=True,
        )
    typer.echo(f"wrote {file}; change it, then see what would happen, and train:")
    typer.echo(f"  {hint('plan', str(file), '--assume', '2')}")
    typer.echo(f"  {hint('train', str(file), '--local', '2', '--out', 'run')}")
