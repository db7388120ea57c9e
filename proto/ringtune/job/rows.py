"""Reader of data rows for each task, shared by init, plan, owners and predictions; without torch.

A row that can't be used is recorded with its line in the file's ``RowAccount``. Lengths in tokens are not checked here.
Of the users in ``data.user`` only names and numbers of rows leave a node.

Class names that differ only in spaces or capitals stay two classes, because capitals may matter (letters, say), and are
reported.

Pictures are in one folder per class, or in a column of Parquet or Arrow. Files and folders with a name that begins with
a dot are no data: ``.ipynb_checkpoints`` of Jupyter has copies of pictures, ``._cat.png`` of macOS contains none.
Pillow, an optional package, reads all but arrays; of animations only the first frame is data, and the others are
counted.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import io
import os
import warnings
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from ringtune.config.sections import SKIP, Data
from ringtune.errors import DataError, PlanError
from ringtune.models.conversations import (
    PREFERENCES,
    PREFERENCES_REMEDY,
    PlainPair,
    conversation_of,
    form_of,
    has_preferences,
)
from ringtune.models.family import (
    CAUSAL_LM,
    CHAT,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
)
from ringtune.schedule.run_shape import USER_NAMES, UserRows, check_user_name
from ringtune.storage.arrow_files import PICTURES, is_arrow
from ringtune.storage.tables import (
    Problem,
    Record,
    RowAccount,
    RowError,
    class_of,
    is_conll,
    number_of,
    row_place,
    table_rows,
    tagged_rows,
    text_of,
)
from ringtune.storage.text_files import form_suffix, read_text


def look_alikes(labels: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Group names that are equal but for spaces and capitals: ``x``, `` x`` and ``y`` give one group, of two."""
    groups: dict[str, list[str]] = {}
    for label in sorted(labels):
        groups.setdefault(" ".join(label.casefold().split()), []).append(label)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def look_alike_lines(labels: Iterable[str]) -> list[str]:
    """Write a warning for each group of names that differ only in spaces or capitals."""
    return [
        f"{' and '.join(map(repr, group))} are different classes, though they differ in spaces or capitals only; "
        "correct the rows?"
        for group in look_alikes(labels)
    ]


ARRAY: Final = ".npy"
HIDDEN: Final = "hidden files, whose name or folder begins with a dot"
NO_PICTURE: Final = "files that are no pictures"
LINKED: Final = "links to folders inside of other folders, which are not followed"
NO_CLASS: Final = "pictures that lie in no folder of a class, or deeper than it"
FRAMES: Final = "further frames of moving pictures and pages of documents, of which the first is taken"
_MOVING: Final = ("GIF", "PNG", "TIFF", "WEBP")
_FORMATS: Final = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""What a picture may be, whatever its suffix; for EPS, Pillow starts Ghostscript, which runs the file as a program."""


@dataclass(frozen=True, slots=True)
class PictureFolder:
    """Pictures below a folder. ``left_out``: reason -> number of other files, or of further frames."""

    folder: Path
    files: tuple[Path, ...]
    left_out: Mapping[str, int]
    suffixes: Mapping[str, int]

    @property
    def labels(self) -> tuple[str, ...]:
        """Class of each picture: the name of its folder."""
        return tuple(file.parent.name for file in self.files)

    def lines_left_out(self) -> list[str]:
        """Write a sentence for each reason in ``left_out``."""
        return [f"{count:,} left out in {self.folder}: {why}" for why, count in self.left_out.items()]


def list_pictures(folder: Path, *, has_classes: bool = True) -> PictureFolder:
    """List pictures below a folder, with ``has_classes`` in one folder per class; raises ``DataError``."""
    files: list[Path] = []
    left_out, suffixes = Counter[str](), Counter[str]()
    for file in _files_below(folder):
        parts = file.relative_to(folder).parts
        if any(part.startswith(".") for part in parts):
            left_out[HIDDEN] += 1
            continue
        if file.is_dir():
            left_out[LINKED] += 1
            continue
        suffixes[file.suffix.lower() or "no suffix"] += 1
        if file.suffix.lower() not in PICTURES or (file.exists() and not file.is_file()):  # a pipe, or a terminal
            left_out[NO_PICTURE] += 1
        elif has_classes and len(parts) != 2:
            left_out[NO_CLASS] += 1
        else:
            files.append(file)
            left_out[FRAMES] += further_frames(file)
    return PictureFolder(folder, tuple(files), dict(+left_out), dict(suffixes))


def _files_below(folder: Path) -> list[Path]:
    """Sort the files below a folder, and links to folders; those in the folder itself, of a class say, are followed."""

    def refuse(error: OSError) -> None:
        raise DataError(f"can't read {error.filename}: {error.strerror}; permit it, or move it away") from error

    if not os.access(folder, os.R_OK | os.X_OK):
        refuse(PermissionError(errno.EACCES, "it may not be listed", str(folder)))

    files, links = list[Path](), list[Path]()
    for top in (folder, *(path for path in folder.iterdir() if path.is_symlink() and path.is_dir())):
        for place, folders, names in os.walk(top, onerror=refuse):
            files += [Path(place, name) for name in names]
            if place != str(folder):
                links += [path for path in map(Path(place).joinpath, folders) if path.is_symlink()]
    return sorted(files + links)


def further_frames(path: Path, content: bytes = b"") -> int:
    """Count the frames or pages of a picture after the first; arguments and errors as of ``opened_picture``.

    Other pictures in a phone's photo (MPO), such as its preview, are no frames; an array has none.
    """
    if path.suffix.lower() == ARRAY:
        return 0
    with opened_picture(path, content) as picture:
        return int(getattr(picture, "n_frames", 1)) - 1 if picture.format in _MOVING else 0


@contextmanager
def opened_picture(path: Path, content: bytes = b"") -> Iterator[Any]:
    """Open a picture with Pillow, which reads the header; errors in the body of the ``with`` are translated too.

    ``content`` has its bytes where they are in no file of its own; then ``path`` is for messages.
    """
    try:
        library: Any = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise DataError(f"{path} needs the package 'pillow' to be read; install it, or give .npy or .npz") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", library.DecompressionBombWarning)
            library.init()
            formats = [name for name in _FORMATS if name in library.OPEN]
            with library.open(io.BytesIO(content) if content else path, formats=formats) as picture:
                yield picture
    except library.DecompressionBombError as error:
        raise DataError(f"{path} is too large a picture ({error}); scale it down or remove it") from error
    except (OSError, ValueError, SyntaxError, TypeError, EOFError) as error:
        raise DataError(f"{path} is no readable picture ({error}); remove it") from error


def user_column(data: Data) -> dict[str, str]:
    """Return key and column of a job's users, as ``table_rows`` takes them; empty without ``data.user``."""
    return {"data.user": data.user} if data.user else {}


def user_of(record: Record, column: str) -> str:
    """Return the user of a row, a text or whole number without blanks around it; raises ``RowError``."""
    value = record[1][column]
    where = f"column {column!r} (data.user)"
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError(Problem(f"{where} is not a user name but a {type(value).__name__}", "give a text"))
    try:
        return check_user_name(str(value).strip())
    except PlanError as error:  # which has the value; this text leaves the node
        raise RowError(Problem(f"{where} is no name of a user", USER_NAMES)) from error


def refuse_plain_text(path: Path, data: Data) -> None:
    """Refuse ``data.user`` for a plain text, which has no columns; raises ``DataError``."""
    if data.user:
        raise DataError(
            f"{path} is a plain text without columns, so data.user = {data.user!r} can't say whose a row is; give a "
            ".csv or .jsonl file, or remove data.user"
        )


def sorted_by_user(chosen: Iterable[int], users: Sequence[str]) -> list[int]:
    """Sort rows by user name; rows of one user stay in the order of the file.

    Example: rows 0, 2, 3 of the users ben, anna, ben, anna become 3, 0, 2. ``users`` has one for every row of the file;
    empty = the order stays.
    """
    return sorted(chosen, key=users.__getitem__) if users else list(chosen)


def count_users(train: Iterable[tuple[str, int]], evaluation: Iterable[tuple[str, int]] = ()) -> tuple[UserRows, ...]:
    """Count the examples of each user, given (user, examples) of each row; sorted by name."""
    counted, held_out = Counter[str](), Counter[str]()
    for counter, rows in ((counted, train), (held_out, evaluation)):
        for user, examples in rows:
            counter[user] += examples
    counts = (
        UserRows(name=name, train_rows=counted[name], eval_rows=held_out[name])
        for name in sorted({*counted, *held_out})
    )
    return tuple(user for user in counts if user.train_rows + user.eval_rows)


PLAIN_TEXT: Final = ".txt"

MAX_ANSWERS: Final = 4096
"""Most answers to a question: each is searched in the whole context."""

NO_ANSWER: Final = "questions without an answer"
NOT_IN_CONTEXT: Final = "questions whose answer is not in their context"

_HALVES: Final = ("prompt", "completion", "instruction", "input", "output", "response")
_PLAIN: Final = ", which are learned as they are, without a chat template"
CONVERSATION_REMEDY: Final = f"set model.task = {CHAT!r} (in init --task {CHAT}), which learns the answers"


class Question(NamedTuple):
    """One question with its context and answers.

    Attributes:
        answers: right answers; empty in predictions.
        start: index in ``context`` of the first character of the first answer found there.
        stop: index after its last character.
    """

    question: str
    context: str
    answers: tuple[str, ...]
    start: int
    stop: int


class Row(NamedTuple):
    """One usable row.

    Attributes:
        record: line number and columns in the file.
        value: a text, a pair of texts, words, a ``Question``, a ``Conversation``, a ``PlainPair`` or the bytes of a
            picture.
        target: class name, number or tags of the words; None where the value contains the target.
    """

    record: Record
    value: Any
    target: Any
    user: str


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one file, in its order.

    Attributes:
        rows: texts, pairs of texts, words, questions, bytes of pictures, or the values of a task's own reader.
        labels: class name of each row; empty for a task without classes.
        tags: of each row, one for each word; empty for a task without tags.
        numbers: target of each row in regression; else empty.
        left_out: reason -> number of rows that are left out.
        notes: on how the file was read, for the user.
        left_out_lines: sentences on ``left_out``, with the first line numbers.
    """

    rows: Sequence[Any]
    labels: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    tags: tuple[tuple[str, ...], ...] = ()
    numbers: tuple[float, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left_out_lines: tuple[str, ...] = ()
    lines: Sequence[int] = ()

    @property
    def targets(self) -> Sequence[Any]:
        """Labels, tags or numbers of the rows; empty where the rows contain their targets."""
        return self.labels or self.tags or self.numbers


def account_of(path: Path, data: Data, *, is_own: bool = False) -> RowAccount:
    """Open the account of a file, with the job's rule for missing values."""
    return RowAccount(path, skips_missing=data.missing == SKIP, is_own=is_own)


def read_rows(path: Path, task: str, data: Data, *, is_own: bool = False) -> Rows:
    """Read all rows of a table, for token-classification also of CoNLL; raises ``DataError``.

    ``is_own``: whether messages stay with the owner of the file.
    """
    account = account_of(path, data, is_own=is_own)
    # other columns are not kept: a short row has empty ones for all columns of the header
    rows = [row._replace(record=(row.record[0], {})) for row in task_rows(path, task, data, account, is_whole=False)]
    account.check()
    if not rows:
        left_out = "; ".join(account.lines_left_out())
        raise DataError(f"{path} has no rows{f' that can be used: {left_out}' if left_out else ''}; give it data")
    targets = tuple(row.target for row in rows)
    return Rows(
        rows=[row.value for row in rows],
        labels=targets if task in (CLASSIFICATION, IMAGE_CLASSIFICATION) else (),
        tags=targets if task == TAGGING else (),
        numbers=targets if task == REGRESSION else (),
        users=tuple(row.user for row in rows) if data.user else (),
        left_out=account.left_out,
        columns=account.columns,
        notes=tuple(account.notes),
        left_out_lines=tuple(account.lines_left_out()),
        lines=array("q", (row.record[0] for row in rows)),
    )


def check_rows(task: str, data: Data) -> list[str]:
    """Read the job's own files before any node is started, as the nodes will do; pictures are not read."""
    notes, problems = dict[str, None](), list[str]()
    for path in map(Path, filter(None, dict.fromkeys((data.train, data.eval)))):
        try:
            if task == CAUSAL_LM and is_plain_text(path):
                refuse_plain_text(path, data)
                notes.update(dict.fromkeys(filter(None, read_text(path, data.encoding)[1:])))
            elif task != IMAGE_CLASSIFICATION or is_arrow(path):
                notes.update(dict.fromkeys(read_rows(path, task, data, is_own=True).notes))
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("; ".join(problems))
    return list(notes)


def task_rows(
    path: Path, task: str, data: Data, account: RowAccount, *, with_targets: bool = True, is_whole: bool = True
) -> Iterator[Row]:
    """Yield the usable rows of a file; the others are recorded in the account; raises ``DataError``.

    ``is_whole``: records have also columns that the job does not name.
    """
    if task in (TAGGING, CHAT):
        read = _tagged if task == TAGGING else _conversations
        yield from read(path, data, account, with_targets=with_targets)
        return
    columns = input_columns(task, data) | (target_columns(task, data) if with_targets else {})
    records = table_rows(
        path, columns, account, encoding=data.encoding, may_be_empty=("data.answer",), only_needed=not is_whole
    )
    for record in records:
        try:
            if task == IMAGE_CLASSIFICATION:
                _check_picture(record, data.image, account)
            value, target = _value_and_target(record, task, data, with_targets=with_targets)
            if task == CAUSAL_LM and with_targets:
                names = account.columns if is_arrow(path) else record[1].keys()
                _refuse_half_a_conversation(path, names, data)
            user = user_of(record, data.user) if with_targets and data.user else ""
        except RowError as error:
            if error.problem.what in (NO_ANSWER, NOT_IN_CONTEXT):
                account.leave_out(record[0], error.problem.what)
            else:
                account.bad(record[0], error.problem)
        else:
            yield Row(record, value, target, user)


def input_columns(task: str, data: Data) -> dict[str, str]:
    """Return job key -> column of each input: texts, words, question and context, or a picture; none of chat."""
    if task == CHAT:
        return {}
    if task == IMAGE_CLASSIFICATION:
        return {"data.image": data.image}
    if task == QUESTION_ANSWERING:
        return {"data.question": data.question, "data.context": data.context}
    if task == TAGGING:
        return {"data.words": data.words}
    return {"data.text": data.text, **({"data.text_pair": data.text_pair} if data.text_pair else {})}


def target_columns(task: str, data: Data) -> dict[str, str]:
    """Return job key -> column of each target, and of users."""
    targets = {
        CLASSIFICATION: {"data.label": data.label},
        IMAGE_CLASSIFICATION: {"data.label": data.label},
        REGRESSION: {"data.label": data.label},
        TAGGING: {"data.tags": data.tags},
        QUESTION_ANSWERING: {"data.answer": data.answer},
    }
    return targets.get(task, {}) | user_column(data)


def _value_and_target(record: Record, task: str, data: Data, *, with_targets: bool) -> tuple[Any, Any]:
    if task == QUESTION_ANSWERING:
        return _question(record, data, with_answers=with_targets), None
    if task == IMAGE_CLASSIFICATION:
        return record[1][data.image], class_of(record, data.label) if with_targets else None
    first = text_of(record, data.text)
    value = (first, text_of(record, data.text_pair)) if data.text_pair else first
    if not with_targets or task == CAUSAL_LM:
        return value, None
    return value, class_of(record, data.label) if task == CLASSIFICATION else number_of(record, data.label)


def _check_picture(record: Record, column: str, account: RowAccount) -> None:
    """Refuse bytes that are no picture, and count further frames."""
    content = record[1][column]
    if not isinstance(content, bytes):
        raise RowError(Problem(f"column {column!r} has no bytes of a picture"))
    try:
        for _ in range(further_frames(account.path, content)):
            account.leave_out(record[0], FRAMES)
    except DataError as error:
        if importlib.util.find_spec("PIL") is None:
            raise
        what = str(error).removeprefix(f"{account.path} ").partition(" (")[0]
        raise RowError(Problem(f"column {column!r} {what}", "remove the row")) from error


def _refuse_half_a_conversation(path: Path, names: Collection[str], data: Data) -> None:
    """Refuse a table of conversations, by the names of its columns, if ``data.text`` is only one side of them."""
    form = form_of(names)
    if (form or has_preferences(names)) and data.text.strip().lower() in (*_HALVES, *PREFERENCES):
        remedy = CONVERSATION_REMEDY if form and not has_preferences(names) else PREFERENCES_REMEDY
        raise DataError(
            f"{path} has {form or 'preferences'}, and data.text = {data.text!r} is a part of it: the model would learn "
            f"that part alone; {remedy}"
        )


def _conversations(path: Path, data: Data, account: RowAccount, *, with_targets: bool) -> Iterator[Row]:
    """Yield the conversations of a table; all rows have to be of the form of the first one that can be used."""
    form, first = "", 0
    for record in table_rows(path, user_column(data) if with_targets else {}, account, encoding=data.encoding):
        if has_preferences(record[1]):
            raise DataError(f"{row_place(path, record[0])}: {PREFERENCES_REMEDY}")
        try:
            value, record_form = conversation_of(record, with_answer=with_targets)
            if form and record_form != form:
                what = f"it has {record_form}, and {row_place(path, first).rpartition(', ')[2]} has {form}"
                raise RowError(Problem(what, "put rows of one form into a file"))
            user = user_of(record, data.user) if with_targets and data.user else ""
        except RowError as error:
            account.bad(record[0], error.problem)
        else:
            if not form:
                form, first = record_form, record[0]
                account.notes.append(f"{path} has {form}{_PLAIN if isinstance(value, PlainPair) else ''}")
            yield Row(record, value, None, user)


def _tagged(path: Path, data: Data, account: RowAccount, *, with_targets: bool) -> Iterator[Row]:
    if is_conll(path):
        refuse_plain_text(path, data)
    tags, more = (data.tags, user_column(data)) if with_targets else ("", {})
    tagged = tagged_rows(
        path, account, words=data.words, tags=tags, more=more, known_tags=data.tags, encoding=data.encoding
    )
    for row in tagged:
        try:
            user = user_of(row.record, data.user) if more else ""
        except RowError as error:
            account.bad(row.record[0], error.problem)
        else:
            yield Row(row.record, row.words, row.tags, user)


def _question(record: Record, data: Data, *, with_answers: bool) -> Question:
    question, context = text_of(record, data.question).strip(), text_of(record, data.context)
    if not with_answers:
        return Question(question, context, (), 0, 0)
    answers, starts = _answers(record, data.answer)
    if not any(answer.strip() for answer in answers):
        raise RowError(Problem(NO_ANSWER))
    for answer, start in zip(answers, starts, strict=True):
        at = start if start >= 0 and context[start : start + len(answer)] == answer else context.find(answer)
        if answer.strip() and at >= 0:
            return Question(question, context, answers, at, at + len(answer))
    raise RowError(Problem(NOT_IN_CONTEXT))


def answers_of(value: object) -> tuple[str, ...]:
    """Read the texts of an answer that are not blank, as ``data.answer`` may give them; none of another value."""
    texts: Any = value.get("text") if isinstance(value, Mapping) else value
    listed = [texts] if isinstance(texts, str) else texts if isinstance(texts, list) else []
    return tuple(text for text in listed if isinstance(text, str) and text.strip())


def _answers(record: Record, column: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Read right answers, and the index of each one's first character in the context; -1 = not given."""
    value: Any = record[1].get(column) or ""
    texts, starts = value, None
    if isinstance(value, Mapping):
        texts, starts = value.get("text"), value.get("answer_start")
    texts = [texts] if isinstance(texts, str) else texts
    starts = [starts] if isinstance(starts, int) else starts
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RowError(Problem(f"column {column!r} is no answer", "give a text or a list of texts"))
    if len(texts) > MAX_ANSWERS:
        raise RowError(Problem(f"column {column!r} has more than {MAX_ANSWERS:,} answers", "keep the first ones"))
    if starts is None:
        starts = [-1] * len(texts)
    if not isinstance(starts, list) or [type(start) for start in starts] != [int] * len(texts):
        raise RowError(Problem(f"column {column!r} has no answer_start for each of its texts"))
    return tuple(texts), tuple(starts)


def is_plain_text(path: Path) -> bool:
    """Whether a file is one plain text, by its suffix."""
    return form_suffix(path) == PLAIN_TEXT
