"""Steps of ``ringtune init``: inspect rows and model, ask open questions, choose settings, write the job.

Settings chosen from rows and model (length of a row, number of steps, unfreezing) are starting values: each is in the
job with its reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer

from coordinator.api.gguf import gguf_refusal
from coordinator.cli.columns import (
    COLUMNS,
    Column,
    Table,
    choose_columns,
    parse_columns,
    refuse_conversations,
    text_columns,
)
from coordinator.cli.init_inspection import (
    Model,
    Rows,
    choose_task,
    find_model,
    find_rows,
    inspect_model,
    inspect_rows,
    inspect_tagged,
)
from coordinator.client.hub import model_folder
from coordinator.screen.progress import WaitNotice
from ringtune.errors import DataError, InvalidInputError, UsageError
from ringtune.job.job import Data, Job, parse_job
from ringtune.job.job_reference import LANGUAGE_ADAPTER, ChosenValue, job_template
from ringtune.job.rows import account_of, is_plain_text, list_pictures, look_alike_lines, task_rows
from ringtune.models.conversations import columns_of, fitting_template, has_chat_template
from ringtune.models.families import FAMILIES
from ringtune.models.family import (
    CAUSAL_LM,
    CHAT,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    LANGUAGE_TASKS,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
    Dimensions,
)
from ringtune.models.folder import read_config
from ringtune.schedule.batches import hold_out
from ringtune.storage.arrow_files import is_arrow
from ringtune.storage.tables import RowAccount
from ringtune.storage.text_files import resolved
from ringtune.texts import counted, listed

MAX_QUESTIONS: Final = 5


class DefaultAnswers:
    """Answers the questions that the inspection leaves open: takes every default."""

    def choose(self, question: str, default: str, choices: Sequence[str] = ()) -> str:
        """Return an answer, one of ``choices`` if there are any; the default is one of them."""
        return default

    def place(self, question: str, find: Callable[[], str]) -> str:
        """Return a path; ``find`` returns the default.

        Raises:
            InvalidInputError: as ``find``.
        """
        return find()


class TerminalPrompt(DefaultAnswers):
    """Asks on the terminal; an empty line takes the default."""

    def choose(self, question: str, default: str, choices: Sequence[str] = ()) -> str:
        """Ask until the answer is one of the choices."""
        among = f" ({', '.join(choices)})" if choices else ""
        while True:
            answer = str(typer.prompt(f"{question}{among}", default=default, err=True)).strip()
            if not choices or answer in choices:
                return answer
            typer.echo(f"{answer!r} is none of {', '.join(choices)}", err=True)

    def place(self, question: str, find: Callable[[], str]) -> str:
        """Ask for a path; if ``find`` fails, show its error and ask without a default."""
        try:
            return str(typer.prompt(question, default=find(), err=True)).strip()
        except InvalidInputError as error:
            typer.echo(str(error), err=True)
            return str(typer.prompt(question, err=True)).strip()


LENGTHS: Final = {"quick": 0.5, "normal": 1.0, "thorough": 2.5}
"""Answer to the question for the length of the run -> factor of the number of steps."""

_CHARACTERS_PER_TOKEN = 3.5
_SPECIAL_TOKENS = 3
_TEMPLATE_TOKENS = 40  # around a question and its answer; many templates have a system message of their own
_COVERED = 0.95
_MIN_TOKENS, _MAX_TOKENS, _STEP_TOKENS = 32, 256, 16
_MAX_CHAT_TOKENS = 1024
_LONG_TOKENS = 160
_PASSES = 4.0
_MIN_STEPS, _MAX_STEPS = 80, 600
_WIDE = 1024
_HELD_OUT = 0.1
_EVALUATIONS = 8
_MIN_ROWS_TO_HOLD_OUT = 20


def choose_settings(
    task: str, rows: int, texts: Sequence[Column], model: Dimensions, length: str, *, has_eval: bool
) -> dict[str, ChosenValue]:
    """Choose the values of a job's keys, each with its reason.

    Args:
        task: of the job.
        rows: number of training rows, before any is held out.
        texts: columns that become tokens; empty for images and plain text.
        model: blocks, width and longest row.
        length: one of ``LENGTHS``.
        has_eval: whether there is a file of evaluation rows.
    """
    chosen: dict[str, ChosenValue] = {}
    tokens, reason = _max_length(task, texts, 0 if model.fixed else model.longest)
    if task != IMAGE_CLASSIFICATION:
        chosen["train.max_length"] = ChosenValue(tokens, reason)
    usual = 8 if tokens > _LONG_TOKENS or task in LANGUAGE_TASKS else 16
    size = min(usual, 1 << max(0, (rows // 8).bit_length() - 1))
    chosen["train.batch_size"] = ChosenValue(size, "few rows" if size < usual else "")
    chosen["train.microbatches"] = ChosenValue(min(4, size), "")
    bounded = min(max(_PASSES * rows / size, _MIN_STEPS), _MAX_STEPS)
    steps = max(20, round(bounded * LENGTHS[length] / 10) * 10)
    holds_out = not has_eval and rows >= _MIN_ROWS_TO_HOLD_OUT
    trained = len(hold_out(rows, share=_HELD_OUT, seed=0)[0]) if holds_out else rows
    chosen["train.max_steps"] = ChosenValue(steps, f"{steps * size / trained:.1f} epochs of {counted(trained, 'row')}")
    rate = 1e-3 if model.hidden < _WIDE else 5e-4
    chosen["train.learning_rate"] = ChosenValue(rate, f"usual for adapters of a model of width {model.hidden}")
    chosen["train.lr_schedule"] = ChosenValue("linear", "")
    every = max(1, steps // (2 * max(1, model.num_blocks - 1)))
    chosen["unfreeze.every_steps"] = ChosenValue(every, f"all {model.num_blocks} blocks train after half of the steps")
    if holds_out:
        chosen["data.held_out"] = ChosenValue(_HELD_OUT, "there is no file of rows to evaluate on")
    if has_eval or "data.held_out" in chosen:
        between = max(10, steps // (10 * _EVALUATIONS) * 10)
        chosen["train.eval_every"] = ChosenValue(
            between, f"{steps // between} evaluations show whether it still learns"
        )
        chosen["train.keep_best"] = ChosenValue(True, "the result is that of the evaluation with the lowest loss")
    return chosen


def _max_length(task: str, texts: Sequence[Column], longest: int) -> tuple[int, str]:
    """Tokens for nearly all rows, estimated by their characters, and the reason; ``longest`` = 0: no limit."""
    limit = _MAX_CHAT_TOKENS if task == CHAT else _MAX_TOKENS
    most = min(longest or limit, limit)
    if not texts:
        return min(most, 128), ""
    characters = sum(column.at_share(_COVERED) for column in texts)
    around = _TEMPLATE_TOKENS if task == CHAT else _SPECIAL_TOKENS
    tokens = math.ceil(characters / _CHARACTERS_PER_TOKEN) + around
    rounded = -(-tokens // _STEP_TOKENS) * _STEP_TOKENS
    value = min(max(rounded, _MIN_TOKENS), most)
    share = f"{_COVERED:.0%} of the rows have at most {characters:,} characters, some {tokens:,} tokens"
    cut = f"; rows of more than {value:,} tokens are cut"
    cut = "; longer contexts become windows" if task == QUESTION_ANSWERING else cut
    return value, share + (cut if tokens > value else "")


_NORMAL = "normal"
_SHOWN_COLUMNS = 12
_SIGNS: Final = {
    CLASSIFICATION: "texts with values that repeat as classes do",
    REGRESSION: "texts with numbers",
    TAGGING: "lists of words and tags",
    QUESTION_ANSWERING: "questions with contexts and answers",
    CAUSAL_LM: "texts",
    CHAT: "conversations",
    IMAGE_CLASSIFICATION: "pictures of several classes",
}
"""Task -> the property of the rows that suggests it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WizardOptions:
    """Options of the command; empty ones are found, asked or chosen.

    Attributes:
        folder: of the job file, to which its paths are relative.
    """

    folder: Path
    task: str = ""
    model: str = ""
    data: Path | None = None
    eval_data: Path | None = None
    columns: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenJob:
    """A written job.

    Attributes:
        saw: lines on rows, model, task and unused columns.
        chosen: values with their reasons, by key.
        rows: number of training rows.
        problems: the error that training would raise for invalid rows; empty if all are valid.
    """

    text: str
    task: str
    saw: tuple[str, ...]
    chosen: Mapping[str, ChosenValue]
    rows: int
    problems: str = ""


def begin(wizard_options: WizardOptions, ask: DefaultAnswers) -> WrittenJob:
    """Inspect rows and model, ask at most five questions, and write the job.

    Raises:
        DataError: the rows fit no task; describes them.
        ModelError: the model can't be used, or not for these rows.
        ConnectionFailedError: a model of a hub is not in the cache and can't be fetched.
        UsageError: a column is named for rows without columns.
    """
    data, evaluate = _choose_rows(wizard_options, ask)
    place = wizard_options.model or ask.place("Folder of the model", lambda: str(find_model(wizard_options.folder)))
    here = model_folder(place)
    model = inspect_model(here, written(here, wizard_options.folder) if str(here) == str(Path(place)) else place)
    with WaitNotice(f"reading {data}"):
        rows = inspect_rows(data)
    if rows.table is not None:
        refuse_conversations(rows.table, wizard_options.task, wizard_options.columns or {})
    task = wizard_options.task or _choose_task(model, rows, ask)
    chosen_columns = _choose_columns(rows, task, wizard_options.columns or {}, ask)
    columns = {key: str(choice.value) for key, choice in chosen_columns.items()}
    choose_task(model, (task,), rows.words)
    length = ask.choose("How long shall it train", _NORMAL, tuple(LENGTHS))
    if task == TAGGING and not rows.tags:
        tagged = inspect_tagged(data, words=columns["words"], tags=columns["tags"])
        rows = dataclasses.replace(tagged, tasks=rows.tasks, table=rows.table)
    texts = [rows.text] if rows.text else text_columns(rows.table, task, columns) if rows.table else []
    chosen = {f"data.{key}": choice for key, choice in chosen_columns.items()}
    chosen |= choose_settings(task, rows.rows, texts, model.dimensions, length, has_eval=evaluate is not None)
    if task in LANGUAGE_TASKS:
        also = "" if gguf_refusal(read_config(here)) else ", and GGUF too"
        chosen |= {key: ChosenValue(value, reason + also) for key, (value, reason) in LANGUAGE_ADAPTER.items()}
    elif "bottleneck" not in FAMILIES[model.model_type].methods:
        chosen["adapter.config"] = ChosenValue("lora", f"a {model.model_type} has no bottlenecks")
    if task == CHAT and not has_chat_template(here):
        chosen["data.template"] = ChosenValue(*fitting_template(here))
    labels: Sequence[str] = rows.tags
    if rows.tags:  # a rare tag may occur in evaluation rows only
        chosen["data.labels"] = ChosenValue(list(rows.tags), "the tags of all rows")
    elif rows.table and task == CLASSIFICATION:
        labels = tuple(rows.table.columns[columns["label"]].values)
    evaluated = written(evaluate, wizard_options.folder) if evaluate else ""

    def job_text(saw: Sequence[str]) -> str:
        train = written(data, wizard_options.folder)
        return job_template(task, model=model.path, train=train, evaluate=evaluated, chosen=chosen, saw=saw)

    job = parse_job(job_text(()), source="the job that init wrote")
    accounts = [_account(path, job) for path in (data, evaluate) if path is not None]
    saw = (
        f"Rows: {rows.words}.",
        f"Model: {model.as_text()}.",
        *_task_lines(task, wizard_options, rows, model),
        *_unused(rows.table, task, columns),
        *(f"{note}." for note in (*rows.notes, *_pictures_left_out(evaluate))),
        *(f"{note}." for account in accounts if account for note in (*account.notes, *account.lines_left_out())),
        *(f"{line}." for line in look_alike_lines(labels)),
    )
    problems = "; ".join(account.problems() for account in accounts if account and account.problems())
    return WrittenJob(text=job_text(saw), task=task, saw=saw, chosen=chosen, rows=rows.rows, problems=problems)


def _account(path: Path, job: Job) -> RowAccount | None:
    """Read a file as training would; None for images and plain text, which have no cells."""
    if (job.model.task == IMAGE_CLASSIFICATION and not is_arrow(path)) or is_plain_text(path):
        return None
    account = account_of(path, job.data, is_own=True)
    for _ in task_rows(path, job.model.task, job.data, account):
        pass
    return account


def _pictures_left_out(evaluate: Path | None) -> list[str]:
    is_folder = evaluate is not None and evaluate.is_dir() and not is_arrow(evaluate)
    return list_pictures(evaluate).lines_left_out() if evaluate is not None and is_folder else []


def _task_lines(task: str, wizard_options: WizardOptions, rows: Rows, model: Model) -> list[str]:
    """Return the task with its reason, and other possible tasks."""
    others = [name for name in rows.tasks if name != task and name in model.tasks]
    else_ = f"; the rows would also do for {', '.join(others)}: --task says so" if others else ""
    return [f"Task: {task}, {'as was said' if wizard_options.task else f'by {_SIGNS[task]}{else_}'}."]


def _unused(table: Table | None, task: str, columns: Mapping[str, str]) -> list[str]:
    used = columns_of(table.columns) if table and task == CHAT else columns.values()
    names = [repr(name) for name in table.columns if name not in used] if table else []
    return [f"Columns not used: {listed(names, _SHOWN_COLUMNS)}."] if names else []


def written(path: Path, folder: Path) -> str:
    """Return a path as a job in ``folder`` names it: relative if it is inside, else absolute."""
    full, base = resolved(path), folder.resolve()
    return str(full.relative_to(base)) if full.is_relative_to(base) and full != base else str(full)


def _choose_rows(wizard_options: WizardOptions, ask: DefaultAnswers) -> tuple[Path, Path | None]:
    """Return training rows and evaluation rows; the latter are only looked for if both are in the job's folder."""
    if wizard_options.data is not None:
        return wizard_options.data, wizard_options.eval_data
    given = Path(ask.place("File or folder of rows", lambda: str(find_rows(wizard_options.folder)[0])))
    beside = None
    if wizard_options.eval_data is None:
        with contextlib.suppress(DataError):
            files = find_rows(wizard_options.folder)
            beside = files[1] if files[0].resolve() == given.resolve() else None
    return given, wizard_options.eval_data or beside


def _choose_task(model: Model, rows: Rows, ask: DefaultAnswers) -> str:
    if not rows.tasks and rows.table is not None:
        raise DataError(
            f"can't tell what is to be learned: {rows.words}; init looks for texts with classes or numbers "
            "(text, label), questions (question, context, answer), lists of words with tags (words, tags) or texts "
            "alone (text); rename the columns, or give --task and --column text=NAME"
        )
    task = choose_task(model, rows.tasks, rows.words)
    fitting = [name for name in rows.tasks if name in model.tasks]
    return ask.choose("What shall be learned", task, fitting) if len(fitting) > 1 else task


def _choose_columns(rows: Rows, task: str, given: Mapping[str, str], ask: DefaultAnswers) -> dict[str, ChosenValue]:
    if rows.table is None:
        if given:
            raise UsageError(f"--column names a column of a table, and {rows.words}; leave it out")
        if task not in rows.tasks:
            raise DataError(f"{rows.words}, which is for {', '.join(rows.tasks)}; --task {task} needs other rows")
        usual = Data()
        return {key: ChosenValue(name, "") for key, name in rows.columns.items() if name != getattr(usual, key)}
    if task not in COLUMNS:
        raise DataError(f"{rows.words}; --task {task} needs an npz file or a folder of images, or Parquet with them")
    columns = choose_columns(rows.table, task, given)
    if not columns or given.keys() >= set(COLUMNS[task]):
        return columns
    words = " ".join(f"{key}={choice.value}" for key, choice in columns.items())
    answer = ask.choose("Columns", words)
    return columns if answer == words else choose_columns(rows.table, task, parse_columns(answer.split()))
