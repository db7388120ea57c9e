"""Rows of an owner: its share of the files, cut into batches of tensors, and their digest.

Raw rows, token ids and labels stay in ``OwnerDataset``; a run only gets embedded batches.

A resumed run compares the digest of the rows in their order, which stays on the owner. The digest is keyed with the
run's id: nobody who reads a node's disk can tell from two runs that their rows were equal, or find a row by digests of
likely ones computed once for all runs.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import statistics
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from edge.data.conversations import Conversations
from edge.data.examples import Examples, PackedExamples, Source, SummedScores, TextExamples, Values
from edge.data.images import ImageFile, Images
from edge.data.prompts import PackedPrompts, Prompt, PromptReader
from edge.data.questions import Questions
from edge.data.tagged import TaggedTexts
from edge.data.texts import LabelledTexts, Language, next_tokens
from edge.data.tokens import Batch, Padder, RowFaultError, TokenRow
from ringtune.config.sections import Data
from ringtune.costs.profile import PackedRows
from ringtune.errors import DataError
from ringtune.job.job import Job
from ringtune.job.rows import Rows, count_users, look_alikes, sorted_by_user
from ringtune.models.family import (
    CAUSAL_LM,
    CHAT,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
)
from ringtune.models.folder import model_dimensions, read_config
from ringtune.run_control.evaluation import MAX_CLASSES, MIN_ROWS
from ringtune.schedule.batches import BatchStream, RandomStream, eval_rows, even_share, hold_out, split_rows
from ringtune.schedule.course import Course
from ringtune.schedule.run_shape import UserRows
from ringtune.schedule.turns import Item, StepKind
from ringtune.storage.tables import row_place

_LOG = logging.getLogger(__name__)
TOKENS_BUDGET_S = 5.0
SOURCES: Mapping[str, Callable[[Job, Path], Source]] = {
    CLASSIFICATION: LabelledTexts,
    REGRESSION: LabelledTexts,
    TAGGING: TaggedTexts,
    QUESTION_ANSWERING: Questions,
    CAUSAL_LM: Language,
    CHAT: Conversations,
    IMAGE_CLASSIFICATION: Images,
}


class Place(NamedTuple):
    """The file and lines of the rows behind examples, for errors.

    Attributes:
        lines: line number of each row; empty where rows have none.
    """

    path: Path
    lines: Sequence[int] = ()

    @contextmanager
    def named(self) -> Iterator[None]:
        """Turn ``RowFaultError`` into an error with file and line; raises ``DataError``."""
        try:
            yield
        except RowFaultError as error:
            place = row_place(self.path, self.lines[error.row]) if self.lines else str(self.path)
            raise DataError(f"{place}: {error.what}") from error


class MeanTokens(NamedTuple):
    """Mean padded lengths of batches, in tokens; 0 = there are none."""

    train: float
    evaluation: float


NO_TOKENS = MeanTokens(0.0, 0.0)


class OwnerDataset:
    """The rows that one owner trains and evaluates on.

    Args:
        left_out: reason -> number of rows of the files that are left out; this owner's share of them.
        places: of the training rows, and of the evaluation rows.
        users: number of examples of each user.

    Attributes:
        labels: class names in its training rows, sorted; none for a task without classes.
        eval_labels: class names in its evaluation rows, sorted.
        left_out: as the argument; the shares of all owners add up to the number of the file.
        users: number of examples of each user, in their order; none where the job names no column of users.
        prompts: texts to be written at each evaluation; none without ``[generation]``.
        prompt_tokens: as of ``NodeFacts``.
    """

    def __init__(
        self,
        train: Examples,
        evaluation: Examples | None,
        *,
        labels: Sequence[str] = (),
        eval_labels: Sequence[str] = (),
        left_out: Mapping[str, int] | None = None,
        places: tuple[Place, Place] = (Place(Path("data")), Place(Path("data"))),
        digest: RowsDigest | None = None,
        users: tuple[UserRows, ...] = (),
        hides_counts: bool = True,
        prompts: Sequence[Prompt] = (),
        prompt_tokens: int = 0,
    ) -> None:
        self._train, self._evaluation = train, evaluation
        self._places, self._source = places, str(places[0].path)
        self._digest = digest or RowsDigest()
        self._targets: Mapping[str, int] = {}
        self._streams: dict[tuple[int, int, str], BatchStream] = {}
        self.labels = tuple(sorted(set(labels)))
        self.eval_labels = tuple(sorted(set(eval_labels)))
        self.left_out = dict(left_out or {})
        self.users, self.prompts, self._hides_counts = users, prompts, hides_counts
        self.prompt_tokens = prompt_tokens
        self._scores = None if evaluation is None else evaluation.scores
        if isinstance(self._scores, SummedScores) and not hides_counts:
            self._scores.min_rows = 1

    @staticmethod
    def load(
        job: Job,
        path: Path,
        eval_path: Path | None,
        *,
        share: int = 0,
        num_owners: int = 1,
        tokenizer_folder: Path,
        hides_counts: bool = True,
    ) -> OwnerDataset:
        """Read the files and keep one share of their rows, sorted by user where the job names a column of users.

        Evaluation rows are always shared evenly; an owner may get none of a short file.

        Args:
            job: task, names of the columns, the split and the seed.
            path: training rows, in a format of the task.
            eval_path: evaluation rows; None = the share of the training rows that the job holds out.
            share: index of the share, in ``[0, num_owners)``.
            num_owners: number of shares; the split depends on (seed, number, rule) only.
            tokenizer_folder: the model's folder.
            hides_counts: whether counts by class are withheld for few rows, and before the evaluation after the last
                step, and columns refused whose values are no names.

        Raises:
            DataError: no file, no such column, no rows, a row that can't be used, or a column of names that are none.
            ModelError: the folder has no tokenizer.
        """
        generation = job.generation
        if generation is not None and not generation.loss:
            return _only_prompts(job, path, tokenizer_folder, share, num_owners, generation.max_new_tokens)
        source = SOURCES[job.model.task](job, tokenizer_folder)
        trained = source.read(path)
        if hides_counts:
            require_names(path, trained, job.data)
        held_out_share = job.data.held_out if eval_path is None else 0.0
        kept, held_out_rows = hold_out(len(trained.rows), share=held_out_share, seed=job.train.seed)
        mine = split_rows(
            len(kept),
            num_owners=num_owners,
            share=share,
            seed=job.train.seed,
            split=job.data.split,
            labels=[trained.labels[row] for row in kept] if trained.labels else None,
        )
        digest = RowsDigest()
        train_place, eval_place = Place(path), Place(path if eval_path is None else eval_path)
        train, labels, users, train_place = _take(source, trained, [kept[at] for at in mine], digest, train_place)
        if train.left_out and not len(train):
            why = ", ".join(train.left_out)
            remedy = "raise train.max_length, shorten them, or change the template"
            raise DataError(f"{path}: none of its rows can be used ({why}); {remedy}")
        if job.train.packing:
            with train_place.named():
                train = PackedExamples(train, job.train.max_length)
        evaluation: Examples | None = None
        eval_labels: tuple[str, ...] = ()
        eval_users: tuple[tuple[str, int], ...] = ()
        left_out = Counter(trained.left_out)
        judged = trained
        if eval_path is not None:
            judged = source.read(eval_path)
            if hides_counts:
                require_names(eval_path, judged, job.data, known=trained)
            left_out.update(judged.left_out)
            held_out_rows = tuple(range(len(judged.rows)))
        if held_out_rows:
            share_of_it = even_share(len(held_out_rows), num_owners=num_owners, share=share)
            chosen = [held_out_rows[at] for at in share_of_it]
            evaluation, eval_labels, eval_users, eval_place = _take(source, judged, chosen, digest, eval_place)
        prompts: Sequence[Prompt] = ()
        if generation is not None and evaluation is not None and len(evaluation):
            lines = frozenset(eval_place.lines)
            prompts = PromptReader(job, tokenizer_folder).answered(eval_place.path, lines, generation.rows)
        unusable = Counter(train.left_out) + Counter({} if evaluation is None else evaluation.left_out)
        for note in dict.fromkeys((*trained.notes, *judged.notes)):
            _LOG.warning("%s", note)
        return OwnerDataset(
            train,
            evaluation,
            labels=labels,
            eval_labels=eval_labels,
            left_out={
                why: len(even_share(count, num_owners=num_owners, share=share)) for why, count in left_out.items()
            }
            | unusable,
            places=(train_place, eval_place),
            digest=digest,
            users=count_users(users, eval_users),
            hides_counts=hides_counts,
            prompts=prompts,
        )

    @property
    def train_rows(self) -> int:
        """Number of examples, or packed sequences, that the owner trains on."""
        return len(self._train)

    @property
    def num_packed(self) -> int:
        """Number of rows in packed sequences; 0 without."""
        return len(self._train.rows) if isinstance(self._train, PackedExamples) else 0

    @property
    def eval_rows(self) -> int:
        """Number of examples that the owner evaluates on."""
        return 0 if self._evaluation is None else len(self._evaluation)

    @property
    def cut_rows(self) -> int:
        """Number of examples cut at ``train.max_length``, among those encoded so far."""
        return self._train.cut_rows + (0 if self._evaluation is None else self._evaluation.cut_rows)

    def digest(self, run_id: str) -> str:
        """Return the digest of rows, order and classes, keyed with ``run_id``."""
        return self._digest.keyed(run_id)

    def set_labels(self, labels: Sequence[str]) -> None:
        """Set the classes of a new run; the index of a name is its target; raises ``DataError``."""
        unknown = sorted({*self.labels, *self.eval_labels} - set(labels))
        if unknown:
            alike = [name for group in look_alikes((unknown[0], *labels)) if unknown[0] in group for name in group]
            if len(alike) > 1:
                raise DataError(
                    f"{self._source} has rows of class {unknown[0]!r}, which differs in spaces or capitals only from "
                    f"{', '.join(repr(name) for name in alike if name != unknown[0])} of the run; correct the rows"
                )
            raise DataError(
                f"{self._source} has rows of class {unknown[0]!r}, the run has {', '.join(labels)}; "
                "add the class to data.labels or correct the rows"
            )
        self._targets = {label: index for index, label in enumerate(labels)}
        if self._scores is not None:
            self._scores.forget()

    def batch(self, course: Course, item: Item) -> Batch:
        """Make the whole batch of an item of this owner, padded to its longest row."""
        if item.kind is StepKind.EVALUATE:
            if self._evaluation is None:
                raise DataError(f"{self._source} comes without evaluation rows; plan anew")
            rows = eval_rows(self.eval_rows, course.batch_size, item.batch)
            with self._places[1].named():
                return self._evaluation.batch(rows, self._targets)
        key = (course.batch_size, course.seed, item.owner)
        if key not in self._streams:
            self._streams[key] = BatchStream(self.train_rows, course.batch_size, course.seed, item.owner)
        with self._places[0].named():
            return self._train.batch(self._streams[key].rows(item.batch), self._targets)

    def mean_tokens(self, batch_size: int, seed: int, owner: str, *, budget_s: float = TOKENS_BUDGET_S) -> MeanTokens:
        """Mean padded length of the owner's batches, over one pass of the training rows and an evaluation.

        Texts are encoded and stay encoded for the run. When ``budget_s`` seconds of a pass are used up, its mean is
        over the batches so far, a random sample: both passes are in random order.
        """
        stream = BatchStream(self.train_rows, batch_size, seed, owner)
        with self._places[0].named():
            train = _mean_width(self._train, map(stream.rows, range(stream.num_batches)), budget_s)
        if self._evaluation is None or not self.eval_rows:
            return MeanTokens(train, 0.0)
        order = RandomStream("widths", seed, owner).permutation(-(-self.eval_rows // batch_size))
        batches = (eval_rows(self.eval_rows, batch_size, index) for index in order)
        with self._places[1].named():
            return MeanTokens(train, _mean_width(self._evaluation, batches, budget_s))

    def packed_rows(self, batch_size: int, seed: int, owner: str) -> PackedRows | None:
        """Count the rows in packed sequences, and the padded length that batches of them would have; None without."""
        if not isinstance(self._train, PackedExamples):
            return None
        rows = self._train.rows
        stream = BatchStream(len(rows), batch_size, seed, owner)
        width = _mean_width(rows, map(stream.rows, range(stream.num_batches)), TOKENS_BUDGET_S)
        return PackedRows(rows=len(rows), tokens=self._train.num_tokens, row_tokens=width)

    def score(self, course: Course, item: Item, batch: Batch, predictions: torch.Tensor | None) -> Values:
        """Score an evaluation's predictions, if there are any, row by row, beyond the head's own numbers.

        Sums over all rows leave the node, so they are made only in the evaluation after the last step; in every
        evaluation if counts need not be hidden.
        """
        if predictions is None or self._scores is None:
            return ()
        if isinstance(self._scores, SummedScores) and self._hides_counts and item.step < course.num_steps:
            return ()
        return self._scores.add(batch, predictions, item.turn)


def require_names(path: Path, rows: Rows, data: Data, *, known: Rows | None = None) -> None:
    """Refuse a column of classes, tags or users of which most values differ, as those of a column of texts do.

    Names of classes, tags and users leave the node, and whoever submits a job says which columns have them. Those in
    ``data.labels`` the submitter knows already; those of ``known`` rows were permitted before. Few names always are.

    Raises ``DataError``: it has the column, and none of its values.
    """
    given = (data.labels, _tags_of(known), known.labels if known else ()), (known.users if known else (),)
    for key, names, told, few, least in (
        ("label", rows.labels, given[0], MIN_ROWS, 2),
        ("tags", _tags_of(rows), given[0], MAX_CLASSES, 10),
        ("user", rows.users, given[1], MIN_ROWS, 2),
    ):
        others = len(set(names).difference(*told))
        if others > max(few, len(names) // least):
            remedy = "list all classes in data.labels" if key != "user" else "leave out users with a single row"
            raise DataError(
                f"{path}: column {getattr(data, key)!r} (data.{key}) has {others:,} different names among "
                f"{len(names):,}, as a column of texts has, and names leave this node; name another column, or {remedy}"
            )


def _tags_of(rows: Rows | None) -> list[str]:
    return [name for tags in rows.tags for name in tags] if rows else []


class _CutPrompts(Sequence[TokenRow]):
    """The newest tokens of prompts, as rows."""

    def __init__(self, prompts: Sequence[Prompt], max_length: int) -> None:
        self._prompts, self._max_length = prompts, max_length

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: Any) -> Any:
        ids = array("i", self._prompts[index].ids[-self._max_length :])
        return TokenRow(ids, array("i", bytes(ids.itemsize * len(ids))))


def _only_prompts(job: Job, path: Path, folder: Path, share: int, num_owners: int, max_new_tokens: int) -> OwnerDataset:
    """Read a share of the prompts of a file as rows without targets, which are continued and neither train nor count.

    Raises ``DataError``: a row can't be used, or there is none.
    """
    reader = PromptReader(job, folder)
    every = PackedPrompts(reader.all(path))
    prompts = PackedPrompts(every[row] for row in even_share(len(every), num_owners=num_owners, share=share))
    if not prompts:
        raise DataError(f"{path} has no rows; give it rows to predict for")
    digest = RowsDigest()
    digest.add(tuple(prompt.ids) for prompt in prompts)
    rows = _CutPrompts(prompts, job.train.max_length)
    examples = TextExamples(rows, next_tokens, Padder(reader.tokenizer))
    room = max(1, model_dimensions(read_config(folder)).longest - max_new_tokens)
    places, most = (Place(path), Place(path)), min(room, prompts.most_tokens)
    return OwnerDataset(examples, examples, places=places, digest=digest, prompts=prompts, prompt_tokens=most)


def _mean_width(examples: Examples, batches: Iterable[Sequence[int]], budget_s: float) -> float:
    started_s = time.monotonic()
    widths: list[int] = []
    for rows in batches:
        widths.append(examples.width(rows))
        if time.monotonic() - started_s > budget_s:
            _LOG.info("padded lengths: the mean of the first %d batches stands for all", len(widths))
            break
    return statistics.fmean(widths)


def _take(
    source: Source, rows: Rows, chosen: Sequence[int], digest: RowsDigest, place: Place
) -> tuple[Examples, tuple[str, ...], tuple[tuple[str, int], ...], Place]:
    """Make examples of chosen rows; return them with class or tag names, users with numbers of examples, and place."""
    indices = sorted_by_user(chosen, rows.users)
    targets = tuple(rows.targets[index] for index in indices) if rows.targets else ()
    names = targets if rows.labels else tuple({name for tags in targets for name in tags} if rows.tags else ())
    users = tuple(rows.users[index] for index in indices) if rows.users else ()
    taken = [rows.rows[index] for index in indices]
    digest.add(taken)
    digest.add(targets)
    if users:
        digest.add(users)
    place = place._replace(lines=array("q", (rows.lines[index] for index in indices)) if rows.lines else ())
    with place.named():
        examples = source.examples(taken, targets)
    return examples, names, tuple(zip(users, examples.of_rows, strict=True)) if users else (), place


class RowsDigest:
    """Digest of rows; their order and their cut into rows count."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, rows: Iterable[Any]) -> None:
        """Add rows: texts, tuples of texts and numbers, arrays, images in a column, or paths of files."""
        for row in rows:
            self._add(row)
        self._put(b"end", b"")

    def keyed(self, run_id: str) -> str:
        """Return the hex digest, keyed with ``run_id``."""
        return hmac.new(run_id.encode(), self._digest.digest(), hashlib.sha256).hexdigest()

    def _add(self, value: Any) -> None:
        if isinstance(value, str):
            self._put(b"text", value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, ImageFile) and value.row:
            self._put(b"image", value.content)
        elif isinstance(value, ImageFile):
            self._add((value.path,))
        elif isinstance(value, Path):  # a picture: to read all files would take minutes on a board
            self._put(b"file", f"{value.parent.name}/{value.name} {value.stat().st_size}".encode(errors="replace"))
        elif isinstance(value, tuple | list):
            self._put(b"row", str(len(value)).encode())
            for part in value:
                self._add(part)
        elif isinstance(value, bool | int | float | None):
            self._put(b"number", repr(value).encode())
        else:
            array = np.ascontiguousarray(value)
            content: Any = array.reshape(-1).view(np.uint8)
            self._put(f"array {array.dtype} {array.shape}".encode(), memoryview(content))

    def _put(self, kind: bytes, content: bytes | memoryview) -> None:
        size_bytes = content.nbytes if isinstance(content, memoryview) else len(content)
        self._digest.update(b"%s %d:" % (kind, size_bytes))
        self._digest.update(content)
