"""Count rows, class names and examples of a task's files without a node.

A table's rows and images are counted. How long a text is in tokens only its tokenizer knows, which is not here; where
the number of examples depends on it (windows of a question's context, blocks of a plain text) it is estimated from
characters. The files' own rules are those of a node; what is wrong inside a row is left for it to find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coordinator.estimates.npy_headers import Archive
from ringtune.errors import DataError
from ringtune.files.tables import table_rows
from ringtune.files.tagged import is_conll, tagged_rows
from ringtune.jobs.job import Job
from ringtune.jobs.parts.users import refuse_plain_text, user_column, users_of_table
from ringtune.models.family import (
    CAUSAL_LM,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
)

CHARACTERS_PER_TOKEN: Final = 3.8
"""Measured: 4.8 (MiniLM) and 4.1 (a Llama of 32,000 tokens) in SQuAD's contexts, 4.3 and 3.9 in film reviews, 3.8 and
3.0 in Shakespeare's plays. So an estimate is off by up to a third, and by more in other languages than English."""

_SPECIAL_TOKENS = 3
_LEAST_BLOCK_TOKENS = 2
_IMAGES = (".npy", ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCounts:
    """The rows of one file, in file order.

    Attributes:
        examples: how many examples each row becomes.
        labels: class name of each; empty for a task without classes.
        users: whose each is; empty where the job names no column of users.
        tags: names of the tags of each, each name once; empty for a task without tags.
    """

    examples: tuple[int, ...]
    labels: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    tags: tuple[frozenset[str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all classes or tags, sorted."""
        return tuple(sorted({*self.labels, *(name for names in self.tags for name in names)}))

    def taken(self, rows: Iterable[int]) -> RowCounts:
        """Count these rows alone."""
        chosen = list(rows)
        return RowCounts(
            examples=tuple(self.examples[row] for row in chosen),
            labels=tuple(self.labels[row] for row in chosen) if self.labels else (),
            users=tuple(self.users[row] for row in chosen) if self.users else (),
            tags=tuple(self.tags[row] for row in chosen) if self.tags else (),
        )

    @property
    def by_user(self) -> list[tuple[str, int]]:
        """User and number of examples of each row; none where the job names no column of users."""
        return list(zip(self.users, self.examples, strict=True)) if self.users else []


def count_rows(file: str, job: Job) -> RowCounts:
    """Count the rows of a file as the job's task reads it.

    Raises:
        DataError: there is no such file, it is not readable, has another form, lacks a column, or has no rows.
    """
    path = Path(file)
    counts = _COUNTERS[job.model.task](path, job)
    if not sum(counts.examples):
        raise DataError(f"{path} has no rows")
    return counts


def estimate_note(job: Job) -> str:
    """Say in words which counts are only estimates; empty if every row is counted."""
    what = ""
    if job.model.task == QUESTION_ANSWERING:
        what = "windows of the questions' contexts"
    elif job.model.task == CAUSAL_LM and ".txt" in (Path(job.data.train).suffix, Path(job.data.eval).suffix):
        what = "blocks of plain text"
    if not what:
        return ""
    return (
        f"rows are an estimate: {what}, at {CHARACTERS_PER_TOKEN:g} characters a token; a node counts them with the "
        "tokenizer, and the number of steps follows that"
    )


def _count_labelled(path: Path, job: Job) -> RowCounts:
    records = list(table_rows(path, _labelled_columns(job)))
    labels = tuple(str(row[job.data.label]) for _, row in records)
    return RowCounts(examples=(1,) * len(labels), labels=labels, users=users_of_table(path, records, job.data))


def _labelled_columns(job: Job) -> dict[str, str]:
    data = job.data
    pair = {"data.text_pair": data.text_pair} if data.text_pair else {}
    return {"data.text": data.text, **pair, "data.label": data.label, **user_column(data)}


def _count_numbered(path: Path, job: Job) -> RowCounts:
    records = list(table_rows(path, _labelled_columns(job)))
    return RowCounts(examples=(1,) * len(records), users=users_of_table(path, records, job.data))


def _count_tagged(path: Path, job: Job) -> RowCounts:
    data = job.data
    if is_conll(path):
        refuse_plain_text(path, data)
    found = list(tagged_rows(path, words=data.words, tags=data.tags, more=user_column(data)))
    return RowCounts(
        examples=(1,) * len(found),
        users=users_of_table(path, (row.record for row in found), data),
        tags=tuple(frozenset(row.tags) for row in found),
    )


def _count_texts(path: Path, job: Job) -> RowCounts:
    if path.suffix.lower() == ".txt":
        refuse_plain_text(path, job.data)
        return RowCounts(examples=(1,) * _num_blocks(path, job.train.max_length))
    records = list(table_rows(path, {"data.text": job.data.text, **user_column(job.data)}))
    return RowCounts(examples=(1,) * len(records), users=users_of_table(path, records, job.data))


def _num_blocks(path: Path, max_length: int) -> int:
    """Estimated number of blocks of ``max_length`` tokens, with the rest as one more if it has two tokens at least.

    Example: 3,800 characters are 1,000 tokens, which are 8 blocks of at most 128.
    """
    try:
        tokens = round(len(path.read_text(encoding="utf-8-sig")) / CHARACTERS_PER_TOKEN)
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}; set data.train and data.eval") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}); convert it") from error
    whole, rest = divmod(tokens, max_length)
    return whole + (rest >= _LEAST_BLOCK_TOKENS)


def _count_questions(path: Path, job: Job) -> RowCounts:
    data = job.data
    needed = {"data.question": data.question, "data.context": data.context, "data.answer": data.answer}
    records = table_rows(path, {**needed, **user_column(data)})
    usable = [(line, row) for line, row in records if _has_answer(row[data.answer], str(row[data.context]))]
    return RowCounts(
        examples=tuple(
            _num_windows(len(str(row[data.question])), len(str(row[data.context])), job) for _, row in usable
        ),
        users=users_of_table(path, usable, data),
    )


def _has_answer(answer: Any, context: str) -> bool:
    """Whether a node could use the row: one of its answers is not blank and stands in the context."""
    texts = answer.get("text") if isinstance(answer, Mapping) else answer
    return any(str(text).strip() and str(text) in context for text in (texts if isinstance(texts, list) else [texts]))


def _num_windows(question_characters: int, context_characters: int, job: Job) -> int:
    """Estimated number of windows; each holds the question, cut to half a window, and a piece of its context.

    Pieces overlap by the stride. Example: windows of 128 tokens, stride 42, question 10 tokens, context 200. A piece
    has 128 - 10 - 3 = 115 tokens and begins 73 after the one before, so there are 3 windows.
    """
    longest = job.train.max_length
    question = min(round(question_characters / CHARACTERS_PER_TOKEN), longest // 2)
    room = max(1, longest - question - _SPECIAL_TOKENS)
    step = room - min(job.data.stride or longest // 3, room - 1)
    beyond = round(context_characters / CHARACTERS_PER_TOKEN) - room
    return 1 + max(0, -(-beyond // step))


def _count_images(path: Path, job: Job) -> RowCounts:
    labels = _labels_of_folder(path) if path.is_dir() else _labels_of_archive(path, job)
    return RowCounts(examples=(1,) * len(labels), labels=tuple(labels))


def _labels_of_folder(path: Path) -> list[str]:
    folders = sorted(child for child in path.iterdir() if child.is_dir())
    return [folder.name for folder in folders for file in folder.iterdir() if file.suffix.lower() in _IMAGES]


def _labels_of_archive(path: Path, job: Job) -> list[str]:
    if path.suffix.lower() != ".npz":
        raise DataError(f"{path} ends in {path.suffix!r}; images are read from .npz or a folder per class")
    with Archive(path) as arrays:
        for key, name in (("data.image", job.data.image), ("data.label", job.data.label)):
            if name not in arrays.names:
                raise DataError(f"{path} has no array {name!r}; it has {', '.join(arrays.names)}; set {key}")
        shape = arrays.header(job.data.image).shape
        labels = arrays.labels(job.data.label)
    if shape[:1] != (len(labels),):
        raise DataError(f"{path} has images of shape {shape} and {len(labels)} labels")
    return labels


_COUNTERS: Mapping[str, Callable[[Path, Job], RowCounts]] = {
    CLASSIFICATION: _count_labelled,
    REGRESSION: _count_numbered,
    TAGGING: _count_tagged,
    QUESTION_ANSWERING: _count_questions,
    CAUSAL_LM: _count_texts,
    IMAGE_CLASSIFICATION: _count_images,
}
