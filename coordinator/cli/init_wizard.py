"""Steps of ``ringtune init``: inspect rows and model without torch, ask, choose settings, write the job.

Settings chosen from rows and model (length of a row, number of steps, unfreezing) are starting values: each is in the
job with its reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import typer

from coordinator.api.estimates import Archive
from coordinator.api.gguf import gguf_refusal
from coordinator.cli.columns import (
    COLUMNS,
    NAMES,
    Column,
    Table,
    choose_columns,
    inspect_table,
    parse_columns,
    refuse_conversations,
    tasks_of,
    text_columns,
)
from coordinator.client.hub import model_folder
from coordinator.screen.progress import WaitNotice
from ringtune.errors import DataError, InvalidInputError, ModelError, UsageError
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
    TASKS,
    Dimensions,
    head_task,
)
from ringtune.models.folder import CONFIG_FILE, base_tensors, check_files, has_tower, model_dimensions, read_config
from ringtune.models.text_towers import TEXT_ONLY
from ringtune.models.tokenizer import require_tokenizer
from ringtune.options import echo
from ringtune.schedule.batches import hold_out
from ringtune.storage.arrow_files import PICTURES, arrow_header, is_arrow, split_paths
from ringtune.storage.strict import read_json, regular
from ringtune.storage.tables import CONLL_SUFFIXES, TABLE_SUFFIXES, RowAccount, is_conll, row_place, tagged_rows
from ringtune.storage.text_files import form_suffix, read_text, resolved
from ringtune.texts import counted, inert, listed

MAX_QUESTIONS: Final = 5


class DefaultAnswers:
    """Answers the questions that the inspection leaves open: takes every default."""

    def choose(self, question: str, default: str, choices: Sequence[str] = ()) -> str:
        """Return an answer, one of ``choices`` if there are any; the default is one of them."""
        return default

    def place(self, question: str, find: Callable[[], str]) -> str:
        """Return a path; ``find`` returns the default.

        Raises ``InvalidInputError``: as ``find``.
        """
        return find()


class TerminalPrompt(DefaultAnswers):
    """Asks on the terminal; an empty line takes the default."""

    def choose(self, question: str, default: str, choices: Sequence[str] = ()) -> str:
        """Ask until the answer is one of the choices."""
        among = f" ({', '.join(choices)})" if choices else ""
        while True:
            answer = _prompt(f"{question}{among}", default)
            if not choices or answer in choices:
                return answer
            echo(f"{answer!r} is none of {', '.join(choices)}", err=True)

    def place(self, question: str, find: Callable[[], str]) -> str:
        """Ask for a path; if ``find`` fails, show its error and ask without a default."""
        try:
            return _prompt(question, find())
        except InvalidInputError as error:
            echo(str(error), err=True)
            return _prompt(question)


def _prompt(question: str, default: str | None = None) -> str:
    """Ask on standard error; a terminal obeys nothing in the question and the default, which have names of columns."""
    text = question if default is None else f"{question} [{default}]"
    return str(typer.prompt(inert(text), default=default, show_default=False, err=True)).strip()


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


ROWS: Final = (*TABLE_SUFFIXES, ".npz", ".txt", *CONLL_SUFFIXES)
TRAIN_NAMES: Final = ("train", "training", "data")
EVAL_NAMES: Final = ("eval", "test", "valid", "validation", "dev", "held_out", "heldout")
_NO_ROWS = ("requirements.txt", "readme.txt", "license.txt", "vocab.txt", "merges.txt")
_SHOWN_NAMES = 12
_FIRST_BYTES = 64


def find_rows(folder: Path) -> tuple[Path, Path | None]:
    """Find the file of training rows, and that of evaluation rows if there is one.

    Example: ``train.csv`` and ``test.csv``; of ``reviews.csv`` alone that and None. A folder of Parquet or Arrow
    files may have both.

    Raises ``DataError``: no file may have rows, or several may and none is called ``train``.
    """
    paths = [path for path in _entries(folder) if _has_rows(path)]
    places = [folder, *(path for path in paths if path.is_dir() and is_arrow(path))]
    paths = [path for path in paths if not is_arrow(path)]
    paths += [path for place in places if is_arrow(place) for path in split_paths(place)]
    held_out = [path for path in paths if _name(path) in EVAL_NAMES]
    others = [path for path in paths if path not in held_out]
    named = [path for name in TRAIN_NAMES for path in others if _name(path) == name]
    chosen = named[:1] or others
    if len(chosen) == 1:
        beside = [path for path in held_out if form_suffix(path) == form_suffix(chosen[0])]
        return chosen[0], next(iter(beside), None)
    raise _none_or_many(DataError, folder, others, "rows", f"--data FILE ({', '.join(ROWS)} or a folder of images)")


def find_model(folder: Path) -> Path:
    """Find the model folder: the folder itself, a folder in it, or one in its ``models``; raises ``ModelError``."""
    places = [folder, *_entries(folder), *_entries(folder / "models")]
    folders = [path for path in places if (path / CONFIG_FILE).is_file()]
    if len(folders) == 1:
        return folders[0]
    how = "--model DIR, a folder with config.json, model.safetensors and the tokenizer, or --model OWNER/NAME of a hub"
    raise _none_or_many(ModelError, folder, folders, "a model", how)


def _none_or_many(
    error: type[InvalidInputError], folder: Path, paths: Sequence[Path], what: str, how: str
) -> InvalidInputError:
    if paths:
        names = ", ".join(str(path.relative_to(folder)) for path in paths[:_SHOWN_NAMES])
        return error(f"{folder} has several that could be {what} ({names}); give one: {how}")
    names = ", ".join(path.name for path in _entries(folder)[:_SHOWN_NAMES]) or "nothing"
    return error(f"nothing in {folder} looks like {what} (it has {names}); give {how}")


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _name(path: Path) -> str:
    return path.name.lower().partition(".")[0]


def _has_rows(path: Path) -> bool:
    if path.is_dir():
        return is_arrow(path) or any(file.suffix.lower() in PICTURES for file in path.glob("*/*"))
    if path.suffix.lower() == ".json":  # most of these are settings
        try:
            with open(path, "rb", opener=regular) as file:
                return file.read(_FIRST_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        except OSError:
            return False
    return form_suffix(path) in ROWS and path.name.lower() not in _NO_ROWS


_MADE_FOR: Final = {
    "ForCausalLM": CAUSAL_LM,
    "LMHeadModel": CAUSAL_LM,
    "ForQuestionAnswering": QUESTION_ANSWERING,
    "ForSequenceClassification": CLASSIFICATION,
    "ForTokenClassification": TAGGING,
    "ForImageClassification": IMAGE_CLASSIFICATION,
}
"""End of the class name in ``architectures`` -> its task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """An inspected model.

    Attributes:
        tasks: for which the family has a head.
        made_for: task of the class that saved it; empty if unknown.
        dimensions: blocks, width, longest row.
        is_tower: whether it is the text part of a model of texts and pictures.
    """

    path: str
    model_type: str
    tasks: tuple[str, ...]
    made_for: str
    dimensions: Dimensions
    config: dict[str, Any]
    is_tower: bool = False

    def as_text(self) -> str:
        """Describe the model."""
        dimensions = self.dimensions
        made = f", made for {self.made_for}" if self.made_for else ""
        made += TEXT_ONLY if self.is_tower else ""
        return f"{self.path}: {self.model_type}, {dimensions.num_blocks} blocks of width {dimensions.hidden}{made}"


def inspect_model(folder: Path, path: str) -> Model:
    """Inspect a model folder: its config, and that there are weights; ``path`` is its name in the job.

    Raises:
        ModelError: it can't be used; gives the reason.
        IntegrityError: a weight file is damaged.
    """
    config = read_config(folder)
    base_tensors(folder, config)
    check_files(folder, config)
    if model_dimensions(config).vocab:
        require_tokenizer(folder)
    values = read_json(folder / CONFIG_FILE)
    named = values.get("architectures") if isinstance(values, dict) else None
    classes = [str(name) for name in named] if isinstance(named, list) else []
    family = FAMILIES[config["model_type"]]
    made_for = (task for name in classes for end, task in _MADE_FOR.items() if name.endswith(end))
    return Model(
        path=path,
        model_type=family.model_type,
        tasks=tuple(task for task in TASKS if head_task(task) in family.tasks),
        made_for=next(made_for, ""),
        dimensions=model_dimensions(config),
        config=config,
        is_tower=has_tower(folder),
    )


def choose_task(model: Model, possible: tuple[str, ...], saw: str) -> str:
    """Return the first of the rows' tasks (``possible``) for which the model has a head; ``saw`` describes the rows.

    Raises ``ModelError``: the model has a head for none of them.
    """
    fitting = [task for task in possible if task in model.tasks]
    if not fitting:
        fits = ", ".join(possible) or "no task"
        raise ModelError(
            f"{saw}; that fits {fits}, and a model of type {model.model_type!r} has heads for "
            f"{', '.join(model.tasks)}; give another --model, other rows, or --task"
        )
    return fitting[0]


_SHOWN = 6
_MIN_AXES = 3
_MAX_TAGS: Final = 1000
_SHOWN_TAGS: Final = 12
_CHARACTERS_PER_ROW = 450  # of a plain text, about 128 tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Inspected rows.

    Attributes:
        words: a description, for messages.
        rows: number of rows; of a plain text estimated.
        tasks: for which they have columns, the likeliest first.
        columns: key of ``[data]`` -> name, of pictures in arrays or columns.
        notes: sentences on how they were read, and on files left out.
        table: of rows in a table.
        text: lengths of tagged texts, words joined by blanks.
        tags: names of the tags, sorted.
    """

    words: str
    rows: int
    tasks: tuple[str, ...]
    columns: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    table: Table | None = None
    text: Column | None = None
    tags: tuple[str, ...] = ()


def inspect_rows(path: Path) -> Rows:
    """Read every row of a file or folder once.

    Raises ``DataError``: there are none, or they are of no known form; describes the content.
    """
    if encoded_images(path) if is_arrow(path) else path.is_dir() or form_suffix(path) == ".npz":
        return _inspect_images(path)
    if is_plain_text(path):
        text, note = read_text(path)
        words, rows = f"{path} is a plain text of {len(text):,} characters", max(1, len(text) // _CHARACTERS_PER_ROW)
        return Rows(words=words, rows=rows, tasks=(CAUSAL_LM,), notes=(note,) if note else ())
    if is_conll(path):
        return inspect_tagged(path, words="", tags="tags")
    table = inspect_table(path)
    return Rows(words=table.as_text(), rows=table.rows, tasks=tasks_of(table), table=table)


def encoded_images(path: Path) -> dict[str, str]:
    """Return the columns of pictures and of their classes in Parquet or Arrow files, by key; empty without either."""
    header, usual = arrow_header(path), Data()
    named = [name for key in NAMES["label"] for name in header.columns if name.lower() == key]
    label = next(iter([*header.classes, *named]), "")
    if not header.pictures or not label:
        return {}
    image = usual.image if usual.image in header.pictures else header.pictures[0]
    return {"image": image, "label": usual.label if usual.label in (*header.classes, *named) else label}


def _inspect_images(path: Path) -> Rows:
    """Count the images of each class; raises ``DataError``."""
    read = _read_encoded if is_arrow(path) else _read_folder if path.is_dir() else _read_archive
    labels, columns, notes = read(path)
    names = sorted({*labels})
    more = ", ..." if len(names) > _SHOWN else ""
    classes = f"{len(names)} class{'es' * (len(names) != 1)} ({', '.join(names[:_SHOWN])}{more})"
    words = f"{path} has {counted(len(labels), 'image')} of {classes}"
    if len(names) < 2:
        raise DataError(f"{words}; give it two classes or more")
    return Rows(words=words, rows=len(labels), tasks=(IMAGE_CLASSIFICATION,), columns=columns, notes=notes)


_Images = tuple[Sequence[str], dict[str, str], Sequence[str]]
"""Class of each image, columns as of ``Rows``, and notes."""


def _read_folder(path: Path) -> _Images:
    pictures = list_pictures(path)
    if not pictures.files:
        most = sorted(pictures.suffixes.items(), key=lambda item: -item[1])[:_SHOWN]
        ends = ", ".join(f"{count} of {name}" for name, count in most) or "none"
        raise DataError(
            f"{path} is a folder without images in folders below it (files there: {ends}); give a folder for each "
            f"class with {', '.join(PICTURES)}, or a .csv or .jsonl file"
        )
    return pictures.labels, {}, pictures.lines_left_out()


def _read_encoded(path: Path) -> _Images:
    columns = encoded_images(path)
    data = Data(image=columns["image"], label=columns["label"])
    account = account_of(path, data, is_own=True)
    return [row.target for row in task_rows(path, IMAGE_CLASSIFICATION, data, account)], columns, ()


def _read_archive(path: Path) -> _Images:
    """Find the arrays of images and labels: by their usual names, else by their shapes."""
    with Archive(path) as arrays:
        headers = {name: arrays.header(name) for name in arrays.names}
        images = [name for name, (shape, _) in headers.items() if len(shape) >= _MIN_AXES]
        labels = [name for name, (shape, kind) in headers.items() if len(shape) == 1 and kind.kind in "iuU"]
        usual = Data()
        image = usual.image if usual.image in images else next(iter(images), "")
        label = usual.label if usual.label in labels else next(iter(labels), "")
        if not image or not label or headers[image][0][:1] != headers[label][0]:
            shapes = ", ".join(f"{name!r} {list(shape)}" for name, (shape, _) in headers.items())
            raise DataError(
                f"{path} has the arrays {shapes or 'none'}; images are an array with three axes or more, and labels "
                "one of as many whole numbers or names; write it with numpy.savez(FILE, image=..., label=...)"
            )
        return arrays.labels(label), {"image": image, "label": label}, ()


def inspect_tagged(path: Path, *, words: str, tags: str) -> Rows:
    """Read every text of a jsonl or CoNLL file once.

    ``words`` and ``tags`` are names of columns; CoNLL has no column of words.

    Raises ``DataError``: a row is invalid, there are none, or more than ``_MAX_TAGS`` tags; says where.
    """
    account = RowAccount(path, is_own=True)
    text, tag_names, rows, num_words = Column(words), set[str](), 0, 0
    for row in tagged_rows(path, account, words=words, tags=tags):
        rows, num_words = rows + 1, num_words + len(row.words)
        text.add(" ".join(row.words))
        tag_names.update(row.tags)
        if len(tag_names) > _MAX_TAGS:
            raise DataError(
                f"{row_place(path, row.record[0])}: there are more than {_MAX_TAGS:,} tags; name the right column with "
                "--column tags=NAME"
            )
    if not rows:
        account.check()
        raise DataError(f"{path} has no rows; give it a text, or another file with --data")
    names = tuple(sorted(tag_names))
    shown = ", ".join(names[:_SHOWN_TAGS]) + (", ..." if len(names) > _SHOWN_TAGS else "")
    told = f"{path} has {counted(rows, 'text')} with {counted(num_words, 'word')} and the tags {shown}"
    return Rows(words=told, rows=rows, tasks=(TAGGING,), text=text, tags=names)
