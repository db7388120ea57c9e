"""Write a job from what lies in a folder: look at rows and model, ask what is left open, choose the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.hub.resolve import model_folder
from coordinator.looking.columns import COLUMNS, choose_columns, parse_columns, refuse_conversations, tasks_of
from coordinator.looking.find import find_model, find_rows
from coordinator.looking.images import look_at_images
from coordinator.looking.model import Model, choose_task, look_at_model
from coordinator.looking.questions import Ask
from coordinator.looking.settings import LENGTHS, Seen, choose_settings
from coordinator.looking.table import Column, Table, look_at_table
from coordinator.looking.tagged import Tagged, look_at_tagged
from coordinator.screen.waiting import Waiting
from ringtune.errors import DataError, UsageError
from ringtune.files.row_account import RowAccount
from ringtune.files.tagged import is_conll
from ringtune.files.text_files import form_suffix, read_text
from ringtune.jobs.job import Data, Job, parse_job
from ringtune.jobs.labels import look_alike_lines
from ringtune.jobs.rows import account_of, is_plain_text, task_rows
from ringtune.jobs.template import Chosen, job_template
from ringtune.models.family import (
    CAUSAL_LM,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
)

_NORMAL = "normal"
_SHOWN_COLUMNS = 12
_SIGNS: Final = {
    CLASSIFICATION: "texts with values that repeat as classes do",
    REGRESSION: "texts with numbers",
    TAGGING: "lists of words and tags",
    QUESTION_ANSWERING: "questions with contexts and answers",
    CAUSAL_LM: "texts",
    IMAGE_CLASSIFICATION: "pictures of several classes",
}
"""Task -> what of the rows tells it."""
_CHARACTERS_PER_ROW = 450  # a plain text of which some 128 tokens are a row


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What was typed; whatever is empty is found, asked or chosen.

    Attributes:
        folder: of the job file, from which its paths count.
        task: what is learned.
        model: folder, or id on a hub.
        data: file or folder of rows.
        eval_data: the same for evaluation.
        columns: key of ``[data]`` -> column.
    """

    folder: Path
    task: str = ""
    model: str = ""
    data: Path | None = None
    eval_data: Path | None = None
    columns: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """A job that was written.

    Attributes:
        text: of the job file.
        task: what is learned.
        saw: rows, model, task and what is not used, a line each.
        chosen: values with their reasons, by key.
        problems: what of the rows can't be used, as training would say it; empty if all can.
    """

    text: str
    task: str
    saw: tuple[str, ...]
    chosen: Mapping[str, Chosen]
    problems: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Rows that were looked at: what they are, how many, for which tasks; a table or CoNLL only where they are one."""

    words: str
    rows: int
    tasks: tuple[str, ...]
    table: Table | None = None
    columns: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()
    tagged: Tagged | None = None


def begin(wishes: Wishes, ask: Ask) -> Begun:
    """Look, ask at most five questions, and write the job.

    Raises:
        DataError: the rows make no sense; says what was seen.
        ModelError: the model can't be used, or not for these rows.
        ConnectionFailedError: it is the id of a hub, not in the cache, and can't be fetched.
        UsageError: a column is named that the rows don't have the form for.
    """
    data, evaluate = _choose_rows(wishes, ask)
    place = wishes.model or ask.place("Folder of the model", lambda: str(find_model(wishes.folder)))
    here = model_folder(place)
    model = look_at_model(here, written(here, wishes.folder) if str(here) == str(Path(place)) else place)
    with Waiting(f"reading {data}"):
        rows = _look(data)
    if rows.table is not None:
        refuse_conversations(rows.table, wishes.task, wishes.columns or {})
    task = wishes.task or _choose_task(model, rows, ask)
    chosen_columns = _choose_columns(rows, task, wishes.columns or {}, ask)
    columns = {key: str(found.value) for key, found in chosen_columns.items()}
    choose_task(model, (task,), rows.words)
    length = ask.choose("How long shall it train", _NORMAL, tuple(LENGTHS))
    tagged = _look_at_tagged(data, rows, columns) if task == TAGGING else None
    texts: Sequence[Column] = ()
    if tagged is not None:
        texts = [tagged.text]
    elif rows.table is not None:
        texts = [rows.table.columns[name] for key, name in columns.items() if key not in ("label", "answer")]
    seen = Seen(
        task=task,
        rows=rows.rows,
        texts=texts,
        longest=0 if model.dimensions.fixed else model.dimensions.longest,
        blocks=model.dimensions.num_blocks,
        hidden=model.dimensions.hidden,
        has_eval=evaluate is not None,
    )
    chosen = {f"data.{key}": found for key, found in chosen_columns.items()} | choose_settings(seen, length)
    if tagged is not None:  # a rare one may be in rows alone that are evaluated
        chosen["data.labels"] = Chosen(list(tagged.tags), "the tags of all rows")
    labels = _labels(rows, task, columns, tagged)
    evaluated = written(evaluate, wishes.folder) if evaluate else ""

    def job_text(saw: Sequence[str]) -> str:
        train = written(data, wishes.folder)
        return job_template(task, model=model.path, train=train, evaluate=evaluated, chosen=chosen, saw=saw)

    job = parse_job(job_text(()), source="the job that init wrote")
    accounts = [_account(path, job) for path in (data, evaluate) if path is not None]
    saw = (
        f"Rows: {tagged.in_words() if tagged else rows.words}.",
        f"Model: {model.in_words()}.",
        *_task_lines(task, wishes, rows, model),
        *_unused(rows.table, columns),
        *(f"{note}." for note in rows.notes),
        *(f"{note}." for account in accounts if account for note in (*account.notes, *account.lines_left_out())),
        *(f"{line}." for line in look_alike_lines(labels)),
    )
    problems = "; ".join(account.problems() for account in accounts if account and account.problems())
    return Begun(text=job_text(saw), task=task, saw=saw, chosen=chosen, problems=problems)


def _labels(rows: _Rows, task: str, columns: Mapping[str, str], tagged: Tagged | None) -> Sequence[str]:
    """The names of classes or tags that were seen."""
    if tagged is not None:
        return tagged.tags
    return tuple(rows.table.columns[columns["label"]].values) if rows.table and task == CLASSIFICATION else ()


def _account(path: Path, job: Job) -> RowAccount | None:
    """Read a file as training would; None where it has no rows that could miss a value."""
    if job.model.task == IMAGE_CLASSIFICATION or is_plain_text(path):
        return None
    account = account_of(path, job.data, is_own=True)
    for _ in task_rows(path, job.model.task, job.data, account):
        pass
    return account


def _task_lines(task: str, wishes: Wishes, rows: _Rows, model: Model) -> list[str]:
    """Say what is learned, and what else the rows could be for."""
    others = [name for name in rows.tasks if name != task and name in model.tasks]
    else_ = f"; the rows would also do for {', '.join(others)}: --task says so" if others else ""
    return [f"Task: {task}, {'as was said' if wishes.task else f'by {_SIGNS[task]}{else_}'}."]


def _unused(table: Table | None, columns: Mapping[str, str]) -> list[str]:
    """Name the columns that the job does not read."""
    names = [repr(name) for name in table.columns if name not in columns.values()] if table else []
    more = f" and {len(names) - _SHOWN_COLUMNS} more" if len(names) > _SHOWN_COLUMNS else ""
    return [f"Columns not used: {', '.join(names[:_SHOWN_COLUMNS])}{more}."] if names else []


def written(path: Path, folder: Path) -> str:
    """Write a path as a job in ``folder`` names it: relative where it lies in it, else absolute."""
    full, base = path.resolve(), folder.resolve()
    return str(full.relative_to(base)) if full.is_relative_to(base) and full != base else str(full)


def _choose_rows(wishes: Wishes, ask: Ask) -> tuple[Path, Path | None]:
    """The rows to train on, and those to evaluate on; a file for them is taken from the folder with the others only."""
    if wishes.data is not None:
        return wishes.data, wishes.eval_data
    given = Path(ask.place("File or folder of rows", lambda: str(find_rows(wishes.folder)[0])))
    beside = None
    if wishes.eval_data is None and given.parent.resolve() == wishes.folder.resolve():
        found = find_rows(wishes.folder)
        beside = found[1] if found[0].resolve() == given.resolve() else None
    return given, wishes.eval_data or beside


def _look(path: Path) -> _Rows:
    if path.is_dir() or form_suffix(path) == ".npz":
        images = look_at_images(path)
        notes = tuple(f"{count:,} are passed over: {why}" for why, count in images.passed_over.items())
        tasks = (IMAGE_CLASSIFICATION,)
        return _Rows(words=images.in_words(), rows=images.rows, tasks=tasks, columns=images.columns, notes=notes)
    if is_plain_text(path):
        text, note = read_text(path)
        rows = max(1, len(text) // _CHARACTERS_PER_ROW)
        words = f"{path} is a plain text of {len(text):,} characters"
        return _Rows(words=words, rows=rows, tasks=(CAUSAL_LM,), notes=(note,) if note else ())
    if is_conll(path):
        found = look_at_tagged(path, words="", tags="tags")
        return _Rows(words=found.in_words(), rows=found.rows, tasks=(TAGGING,), tagged=found)
    table = look_at_table(path)
    return _Rows(words=table.in_words(), rows=table.rows, tasks=tasks_of(table), table=table)


def _look_at_tagged(path: Path, rows: _Rows, columns: Mapping[str, str]) -> Tagged:
    return rows.tagged or look_at_tagged(path, words=columns["words"], tags=columns["tags"])


def _choose_task(model: Model, rows: _Rows, ask: Ask) -> str:
    if not rows.tasks and rows.table is not None:
        raise DataError(
            f"can't tell what is to be learned: {rows.words}; init looks for texts with classes or numbers "
            "(text, label), questions (question, context, answer), lists of words with tags (words, tags) or texts "
            "alone (text); rename the columns, or give --task and --column text=NAME"
        )
    task = choose_task(model, rows.tasks, rows.words)
    fitting = [name for name in rows.tasks if name in model.tasks]
    return ask.choose("What shall be learned", task, fitting) if len(fitting) > 1 else task


def _choose_columns(rows: _Rows, task: str, given: Mapping[str, str], ask: Ask) -> dict[str, Chosen]:
    if rows.table is None:
        if given:
            raise UsageError(f"--column names a column of a table, and {rows.words}; leave it out")
        if task not in rows.tasks:
            raise DataError(f"{rows.words}, which is for {', '.join(rows.tasks)}; --task {task} needs other rows")
        usual = Data()
        return {key: Chosen(name, "") for key, name in (rows.columns or {}).items() if name != getattr(usual, key)}
    if task not in COLUMNS:
        raise DataError(f"{rows.words}; --task {task} needs an npz file or a folder of images")
    found = choose_columns(rows.table, task, given)
    if given.keys() >= set(COLUMNS[task]):
        return found
    words = " ".join(f"{key}={choice.value}" for key, choice in found.items())
    answer = ask.choose("Columns", words)
    return found if answer == words else choose_columns(rows.table, task, parse_columns(answer.split()))
