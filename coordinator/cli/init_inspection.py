"""Inspection of a folder's files without torch: tables of rows, models, labelled images, tagged texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from coordinator.api.npz_headers import Archive
from coordinator.cli.columns import NAMES, Column, Table, inspect_table, tasks_of
from ringtune.errors import DataError, InvalidInputError, ModelError
from ringtune.job.job import Data
from ringtune.job.rows import account_of, is_plain_text, list_pictures, task_rows
from ringtune.models.families import FAMILIES
from ringtune.models.family import (
    CAUSAL_LM,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    QUESTION_ANSWERING,
    TAGGING,
    TASKS,
    Dimensions,
    head_task,
)
from ringtune.models.folder import CONFIG_FILE, base_tensors, check_files, has_tower, model_dimensions, read_config
from ringtune.models.text_towers import TEXT_ONLY
from ringtune.models.tokenizer import require_tokenizer
from ringtune.storage.arrow_files import PICTURES, arrow_header, is_arrow, split_paths
from ringtune.storage.strict import read_json
from ringtune.storage.tables import CONLL_SUFFIXES, TABLE_SUFFIXES, RowAccount, is_conll, row_place, tagged_rows
from ringtune.storage.text_files import form_suffix, read_text
from ringtune.texts import counted

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

    Raises:
        DataError: no file may have rows, or several may and none is called ``train``.
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
        with path.open("rb") as file:
            return file.read(_FIRST_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
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

    Raises:
        ModelError: the model has a head for none of them.
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

    Raises:
        DataError: there are none, or they are of no known form; describes the content.
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

    Raises:
        DataError: a row is invalid, there are none, or more than ``_MAX_TAGS`` tags; says where.
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
