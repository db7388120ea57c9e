"""``ringtune init``: inspect rows and a model, and write a commented job for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from ringtune import options

_NODES: Final = 2


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The job file to write.")] = Path("job.toml"),
    task: Annotated[
        str,
        typer.Option(
            metavar="TASK",
            help="Task: sequence-classification, regression, token-classification, question-answering, causal-lm, "
            "chat or image-classification. Default: one for which the rows have columns and the model a head.",
        ),
    ] = "",
    model: Annotated[
        str, typer.Option(metavar="DIR", help="Folder of the base model, for model.path. Default: the one beside FILE.")
    ] = "",
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Training rows, for data.train. Default: those beside FILE.")
    ] = None,
    eval_data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Evaluation rows, for data.eval. Default: test, eval or valid beside the training rows; else a tenth "
            "of these is held out.",
        ),
    ] = None,
    column: options.Columns = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask no questions; take the defaults.")] = False,
    template: Annotated[
        bool, typer.Option("--template", help="Inspect no files; write the common keys of --task, to be filled in.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Inspect rows (a table, conll, npz, text, a folder of images) and a model folder, and write a commented job.

    On a terminal at most five questions are asked, each with a default; elsewhere none. No file is overwritten.
    """
    from coordinator.cli.columns import parse_columns
    from coordinator.cli.init_wizard import DefaultAnswers, TerminalPrompt, WizardOptions, WrittenJob, begin
    from ringtune.errors import UsageError
    from ringtune.hints import hint
    from ringtune.job.job_reference import job_template, toml_value
    from ringtune.models.family import CLASSIFICATION, TASKS
    from ringtune.storage.durable import require_absent, write_durably
    from ringtune.storage.strict import nearest

    if task and task not in TASKS:
        raise UsageError(f"--task {task!r} is not known; {nearest(task, TASKS)}")
    require_absent(file)
    if template:
        if column:
            raise UsageError("--template looks at no rows, so --column has no meaning; leave one of them out")
        task = task or CLASSIFICATION
        model, train = model or "models/all-MiniLM-L6-v2", str(data or "train.csv")
        text = job_template(task, model=model, train=train, evaluate=str(eval_data or ""))
        written = WrittenJob(text=text, task=task, saw=(), chosen={}, rows=_NODES)
    else:
        wizard_options = WizardOptions(
            folder=file.parent,
            task=task,
            model=model,
            data=data,
            eval_data=eval_data,
            columns=parse_columns(column or []),
        )
        asks = not (yes or json) and sys.stdin.isatty()
        written = begin(wizard_options, TerminalPrompt() if asks else DefaultAnswers())
    write_durably(file, written.text.encode())
    values = {name: choice.value for name, choice in written.chosen.items()}
    event = {"event": "init", "file": str(file), "task": written.task, "chosen": values, "problems": written.problems}
    reasons = (
        f"  {name} = {toml_value(choice.value)}: {choice.reason}"
        for name, choice in written.chosen.items()
        if choice.reason
    )
    nodes = str(min(_NODES, written.rows))  # each owns a row at least
    lines = [
        *(*written.saw, *reasons),
        *([f"training will refuse these rows: {written.problems}"] if written.problems else []),
        f"wrote {file}; change it, then see what would happen, and train:",
        f"  {hint('plan', str(file), '--assume', nodes)}",
        f"  {hint('train', str(file), '--local', nodes, '--out', 'run')}",
    ]
    options.show(event, lines, as_json=json)
