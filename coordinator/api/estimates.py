"""Facts of nodes that do not exist yet, estimated from the model folder and the data files of a job.

Rows are counted by the reader that nodes use, so an error in a row is found before a node starts. The number of tokens
is not known, because the tokenizer is not loaded: windows of a question's context, blocks of a plain text, and
sequences of packed rows are estimated from characters.

Sizes are read from the model's config and safetensors header. Speeds are assumed equal; bytes that a forward keeps for
its backward are computed, not measured. Of an npz file shapes and labels are read, without the images.
"""

from __future__ import annotations

import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from coordinator.client.local_nodes import LocalSetup, node_name
from ringtune.config.sections import ANSWERS
from ringtune.costs.measurement import job_shape
from ringtune.costs.memory_sizes import data_bytes
from ringtune.costs.model_facts import computed_token_bytes, model_facts
from ringtune.costs.profile import NodeFacts, SkippedRows
from ringtune.errors import DataError
from ringtune.job.job import Job
from ringtune.job.rows import (
    Question,
    account_of,
    count_users,
    input_columns,
    is_plain_text,
    list_pictures,
    read_rows,
    refuse_plain_text,
    target_columns,
    task_rows,
)
from ringtune.models.conversations import Conversation, PlainPair, columns_of, require_template
from ringtune.models.family import CAUSAL_LM, CHAT, IMAGE_CLASSIFICATION, QUESTION_ANSWERING
from ringtune.models.tokenizer import require_tokenizer
from ringtune.schedule.batches import even_share, hold_out, pack_rows, split_rows
from ringtune.storage.arrow_files import is_arrow
from ringtune.storage.text_files import NPZ_REMEDY, check_archive, read_text
from ringtune.techniques.frozen_weights import first_choice

if TYPE_CHECKING:
    import numpy as np

CHARACTERS_PER_TOKEN: Final = 3.8
"""Measured: 4.8 (MiniLM) and 4.1 (a Llama of 32,000 tokens) in SQuAD's contexts, 4.3 and 3.9 in film reviews, 3.8 and
3.0 in Shakespeare's plays. So an estimate is off by up to a third, and by more in other languages than English."""

_SPECIAL_TOKENS = 3
_MIN_BLOCK_TOKENS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCounts:
    """The rows of one file, in file order.

    Attributes:
        examples: number of examples that each row becomes.
        labels: class name of each row; empty for a task without classes.
        users: user of each row; empty without a column of users.
        tags: names of the tags of each row, each once; empty for a task without tags.
        tokens: estimated length of each row, cut; empty unless rows are packed.
        left_out: reason -> number of rows left out.
        notes: sentences on how the file was read.
        left_out_lines: sentences on ``left_out``, with the first line numbers.
    """

    examples: tuple[int, ...]
    labels: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    tags: tuple[frozenset[str], ...] = ()
    tokens: tuple[int, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left_out_lines: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All classes or tags, sorted."""
        return tuple(sorted({*self.labels, *(name for names in self.tags for name in names)}))

    def taken(self, rows: Sequence[int]) -> RowCounts:
        """Return the counts of these rows alone, by index."""
        per_row = ("examples", "labels", "users", "tags", "tokens")
        chosen = {name: tuple(values[row] for row in rows) for name in per_row if (values := getattr(self, name))}
        return RowCounts(**{"examples": (), **chosen})  # type: ignore[arg-type]

    @property
    def by_user(self) -> list[tuple[str, int]]:
        """(user, number of examples) of each row; empty without a column of users."""
        return list(zip(self.users, self.examples, strict=True)) if self.users else []


def count_rows(file: str, job: Job) -> RowCounts:
    """Count the rows of a file as the job's task reads it.

    Raises:
        DataError: the file is missing, unreadable or of another form, lacks a column, has invalid rows, or none.
        ModelError: conversations, and no template for them.
    """
    path, task = Path(file), job.model.task
    if task == IMAGE_CLASSIFICATION:
        counts = (_count_encoded_images if is_arrow(path) else _count_images)(path, job)
    elif task == CAUSAL_LM and is_plain_text(path):
        counts = _count_blocks(path, job)
    else:
        rows = read_rows(path, task, job.data, is_own=True)
        if any(isinstance(row, Conversation) for row in rows.rows):
            require_template(Path(job.model.path), job.data.template)
        counts = RowCounts(
            examples=tuple(_num_windows(row, job) if isinstance(row, Question) else 1 for row in rows.rows),
            labels=rows.labels,
            users=rows.users,
            tags=tuple(map(frozenset, rows.tags)),
            tokens=tuple(_row_tokens(row, job) for row in rows.rows) if job.train.packing else (),
            left_out=rows.left_out,
            columns=rows.columns,
            notes=rows.notes,
            left_out_lines=rows.left_out_lines,
        )
    if not sum(counts.examples):
        raise DataError(f"{path} has no rows")
    return counts


def rows_text(counts: Sequence[RowCounts], job: Job) -> list[str]:
    """Return sentences on the rows: columns used and unused, rows left out, notes."""
    task, data = job.model.task, job.data
    if task == IMAGE_CLASSIFICATION:
        lines = [f"{task} of pictures"]
    else:
        columns = input_columns(task, data) | target_columns(task, data)
        named = [f"{key.removeprefix('data.')} = {name!r}" for key, name in columns.items()]
        has_columns = any(count.columns for count in counts)
        named = named or ["answers" if job.train.loss_on == ANSWERS else "all tokens"]
        lines = [f"{task}: {', '.join(named)}" if has_columns else f"{task} of plain text"]
        used = {*columns.values(), *(name for count in counts for name in columns_of(count.columns) if task == CHAT)}
        unused = dict.fromkeys(name for count in counts for name in count.columns if name not in used)
        lines += [f"columns not used: {', '.join(map(repr, unused))}"] if unused else []
    told = [line for count in counts for line in (*count.notes, *count.left_out_lines)]
    return [*lines, *dict.fromkeys(told)]


def estimate_note(job: Job) -> str:
    """Return a sentence on counts that are estimates; empty if every row is counted."""
    what = ""
    if job.model.task == QUESTION_ANSWERING:
        what = "windows of the questions' contexts"
    elif job.model.task == CAUSAL_LM and any(is_plain_text(Path(file)) for file in (job.data.train, job.data.eval)):
        what = "blocks of plain text"
    elif job.train.packing:
        what = "sequences of packed rows"
    if not what:
        return ""
    return (
        f"rows are an estimate: {what}, at {CHARACTERS_PER_TOKEN:g} characters a token; a node counts them with the "
        "tokenizer, and the number of steps follows that"
    )


def _count_blocks(path: Path, job: Job) -> RowCounts:
    """Estimate the blocks of ``max_length`` tokens; a shorter rest counts if it has at least two tokens.

    Example: 3,800 characters are 1,000 tokens, which are 8 blocks of at most 128.
    """
    refuse_plain_text(path, job.data)
    text, note = read_text(path, job.data.encoding)
    whole, rest = divmod(round(len(text) / CHARACTERS_PER_TOKEN), job.train.max_length)
    return RowCounts(examples=(1,) * (whole + (rest >= _MIN_BLOCK_TOKENS)), notes=(note,) if note else ())


def _row_tokens(row: str | PlainPair | Conversation, job: Job) -> int:
    """Estimated number of tokens of a row of a language model; of a conversation with the marks of its roles."""
    if isinstance(row, Conversation):
        text = row.messages
    else:
        text = row if isinstance(row, str) else row.prompt + row.completion
    return min(job.train.max_length, max(_MIN_BLOCK_TOKENS, round(len(text) / CHARACTERS_PER_TOKEN)))


def _num_windows(row: Question, job: Job) -> int:
    """Estimated number of windows; each holds the question, cut to half a window, and a piece of its context.

    Pieces overlap by the stride. Example: windows of 128 tokens, stride 42, question 10 tokens, context 200. A piece
    has 128 - 10 - 3 = 115 tokens and begins 73 after the one before, so there are 3 windows.
    """
    longest = job.train.max_length
    question = min(round(len(row.question) / CHARACTERS_PER_TOKEN), longest // 2)
    room = max(1, longest - question - _SPECIAL_TOKENS)
    step = room - min(job.data.stride or longest // 3, room - 1)
    beyond = round(len(row.context) / CHARACTERS_PER_TOKEN) - room
    return 1 + max(0, -(-beyond // step))


def _count_images(path: Path, job: Job) -> RowCounts:
    if not path.is_dir():
        labels = _labels_of_archive(path, job)
        return RowCounts(examples=(1,) * len(labels), labels=tuple(labels))
    pictures = list_pictures(path)
    return RowCounts(
        examples=(1,) * len(pictures.files),
        labels=pictures.labels,
        left_out=pictures.left_out,
        left_out_lines=tuple(pictures.lines_left_out()),
    )


def _count_encoded_images(path: Path, job: Job) -> RowCounts:
    """Count the pictures in a column, one after the other: they need not fit into memory together."""
    account = account_of(path, job.data, is_own=True)
    rows = [(row.target, row.user) for row in task_rows(path, IMAGE_CLASSIFICATION, job.data, account)]
    account.check()
    return RowCounts(
        examples=(1,) * len(rows),
        labels=tuple(label for label, _ in rows),
        users=tuple(user for _, user in rows) if job.data.user else (),
        left_out=account.left_out,
        columns=account.columns,
        notes=tuple(account.notes),
        left_out_lines=tuple(account.lines_left_out()),
    )


def _labels_of_archive(path: Path, job: Job) -> list[str]:
    if path.suffix.lower() != ".npz":
        raise DataError(f"{path} ends in {path.suffix!r}; images are read from .npz or a folder per class")
    with Archive(path) as arrays:
        for key, name in (("data.image", job.data.image), ("data.label", job.data.label)):
            if name not in arrays.names:
                raise DataError(f"{path} has no array {name!r}; it has {', '.join(arrays.names)}; set {key}")
        shape, _ = arrays.header(job.data.image)
        labels = arrays.labels(job.data.label)
    if shape[:1] != (len(labels),):
        raise DataError(f"{path} has images of shape {shape} and {len(labels)} labels")
    return labels


_DEFAULT_NODES = 2


class Estimated(NamedTuple):
    """Estimated facts of nodes.

    Attributes:
        rows: sentences on the rows of all files.
        notes: those of them on how the files were read.
    """

    facts: dict[str, NodeFacts]
    rows: list[str]
    notes: list[str]


def estimate(job: Job, num_nodes: int, *, memory_bytes: int = 0) -> Estimated:
    """Estimate the facts of equal nodes, as ``--local N`` would start them.

    ``num_nodes`` = 0: the number of owners in the job, or two. ``memory_bytes`` = 0: a share of this machine.

    Raises ``ModelError``, ``DataError``, ``JobError``, ``CapacityError``: as training would.
    """
    num_nodes = num_nodes or job.data.owners or _DEFAULT_NODES
    available = num_nodes * memory_bytes if memory_bytes else None
    setup = LocalSetup.of(job, num_nodes, available_bytes=available, base_bytes=0 if memory_bytes else None)
    model = model_facts(job.model.path, job)
    if job.model.task != IMAGE_CLASSIFICATION:
        require_tokenizer(Path(job.model.path))
    token_bytes = computed_token_bytes(model, job)
    files = [file for file in (job.data.train, job.data.eval) if file]
    counted, problems = list[RowCounts](), list[str]()
    for file in files:
        try:
            counted.append(count_rows(file, job))
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("; ".join(dict.fromkeys(problems)))
    train, held_out = counted[0], counted[-1]
    if not job.data.eval:
        kept, out = hold_out(len(train.examples), share=job.data.held_out, seed=job.train.seed)
        train, held_out = train.taken(kept), train.taken(out)
    facts: dict[str, NodeFacts] = {}
    for index in range(num_nodes):
        trains, evaluates = _share(job, train, held_out, index, setup.num_owners)
        left_out = _left_out(counted, index, setup.num_owners)
        name, num_eval = node_name(index, num_nodes), sum(evaluates.examples)
        num_train = len(pack_rows(trains.tokens, job.train.max_length)) if trains.tokens else sum(trains.examples)
        facts[name] = NodeFacts(
            node=name,
            train_rows=num_train,
            eval_rows=num_eval,
            users=count_users(trains.by_user, evaluates.by_user),
            skipped_rows=sum(each.rows for each in left_out),
            left_out=left_out,
            labels=trains.names,
            eval_labels=evaluates.names,
            memory_bytes=setup.memory_bytes,
            threads=setup.threads,
            device="cpu",
            block_forward_s=0.0,
            block_graph_s=0.0,
            block_backward_s=0.0,
            activation_token_bytes=token_bytes,
            model=model,
            shape=job_shape(job, fixed_tokens=model.fixed_tokens, frozen=first_choice(job, model)),
            data_bytes=data_bytes(
                model,
                tuple(map(Path, files)),
                num_owners=setup.num_owners,
                rows=num_train + num_eval,
                max_length=job.train.max_length,
                packed_rows=len(trains.tokens),
            )
            if trains.examples
            else 0,
        )
    notes = list(dict.fromkeys(note for counts in counted for note in counts.notes))
    return Estimated(facts, rows_text(counted, job), notes)


def _left_out(counted: Sequence[RowCounts], index: int, num_owners: int) -> tuple[SkippedRows, ...]:
    """Return a node's share of the rows left out."""
    if index >= num_owners:
        return ()
    total = sum((Counter(counts.left_out) for counts in counted), Counter[str]())
    shares = {why: len(even_share(rows, num_owners=num_owners, share=index)) for why, rows in sorted(total.items())}
    return tuple(SkippedRows(why=why, rows=rows) for why, rows in shares.items())


def _share(job: Job, train: RowCounts, held_out: RowCounts, index: int, num_owners: int) -> tuple[RowCounts, RowCounts]:
    if index >= num_owners:
        return RowCounts(examples=()), RowCounts(examples=())
    mine = split_rows(
        len(train.examples),
        num_owners=num_owners,
        share=index,
        seed=job.train.seed,
        split=job.data.split,
        labels=train.labels or None,
    )
    theirs = even_share(len(held_out.examples), num_owners=num_owners, share=index)
    return train.taken(mine), held_out.taken(theirs)


T = TypeVar("T")
_UNREADABLE: Final = (OSError, ValueError, EOFError, MemoryError, KeyError, NotImplementedError, zlib.error)


class Archive:
    """An open npz file, as a context manager; raises ``DataError``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            check_archive(path, NPZ_REMEDY)
            self._zip = zipfile.ZipFile(path)
        except OSError as error:
            raise DataError(f"can't read {path}: {error.strerror}; set data.train and data.eval") from error
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise self._damaged(error) from error

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(name.removesuffix(".npy") for name in self._zip.namelist())

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Read shape and type of an array; raises ``DataError``."""
        return self._read(name, _header)

    def labels(self, name: str) -> list[str]:
        """Read a one-dimensional array of integers or names as text: 3 and 1 are "3" and "1".

        Raises ``DataError``: there is no such array, it is damaged, or of another type or shape.
        """
        shape, kind = self.header(name)
        if len(shape) != 1 or kind.kind not in "iuU":
            raise DataError(f"{self.path}: labels are of type {kind.kind} and shape {list(shape)}; give a row")
        from numpy.lib import format as npy

        labels = self._read(name, lambda file: npy.read_array(file, allow_pickle=False))
        return [str(label) for label in labels.tolist()]

    def _read(self, name: str, read: Callable[[IO[bytes]], T]) -> T:
        if name not in self.names:
            raise DataError(f"{self.path} has no array {name!r}; it has {', '.join(self.names)}")
        try:
            with self._zip.open(f"{name}.npy") as file:
                return read(file)
        except (*_UNREADABLE, zipfile.BadZipFile) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> DataError:
        return DataError(f"{self.path} is no readable npz file ({error}); write it with numpy.savez")


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    from numpy.lib import format as npy

    is_first = npy.read_magic(file) == (1, 0)
    shape, _, kind = (npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0)(file)
    if kind.hasobject:
        raise ValueError("an array of objects, which is a pickle")
    return shape, kind
