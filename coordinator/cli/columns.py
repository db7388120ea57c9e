"""Columns of a table of rows: their contents and lengths, and the choice of text, class and question columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ringtune.errors import DataError, UsageError
from ringtune.job.job_reference import ChosenValue
from ringtune.job.rows import CONVERSATION_REMEDY
from ringtune.models.conversations import PREFERENCES_REMEDY, columns_of, form_of, has_preferences
from ringtune.models.family import CAUSAL_LM, CHAT, CLASSIFICATION, PAIR_TASKS, QUESTION_ANSWERING, REGRESSION, TAGGING
from ringtune.storage.arrow_files import is_arrow
from ringtune.storage.tables import RowAccount, row_place, table_rows
from ringtune.storage.text_files import form_suffix
from ringtune.texts import counted

MAX_CLASSES: Final = 1000
"""Most different values that are counted in a column; with more it has no classes."""
_MAX_LENGTHS = 20_000
_MAX_COLUMNS = 1000
_SHOWN_CLASSES = 6
_SHOWN_CHARACTERS = 24


@dataclass(slots=True)
class Column:
    """Statistics of one column of a table.

    Attributes:
        rows: number of rows with a value.
        empty: number of rows with an empty, null or missing value.
        kinds: number of values by kind: text, whole number, number, list or table.
        values: number of rows by value, as text; empty once there are more than ``MAX_CLASSES``.
        has_many: whether there are more than ``MAX_CLASSES`` different values.
    """

    name: str
    rows: int = 0
    empty: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    values: Counter[str] = field(default_factory=Counter)
    characters: list[int] = field(default_factory=list)
    has_many: bool = False

    def add(self, value: object) -> None:
        """Add the value of one row."""
        if value is None or (isinstance(value, str) and not value.strip()):
            self.empty += 1
            return
        self.rows += 1
        self.kinds[_kind(value)] += 1
        text = str(value)
        if len(self.characters) < _MAX_LENGTHS:
            self.characters.append(len(text))
        if not self.has_many:
            self.values[text] += 1
            if len(self.values) > MAX_CLASSES:
                self.has_many, self.values = True, Counter()

    @property
    def kind(self) -> str:
        """The kind of all values; whole numbers with fractions are ``number``, other differing kinds ``mixed``."""
        if set(self.kinds) <= {"whole number", "number"}:
            return "number" if self.kinds["number"] else "whole number"
        return next(iter(self.kinds)) if len(self.kinds) == 1 else "mixed"

    @property
    def mean_characters(self) -> float:
        """Mean length of the values."""
        return sum(self.characters) / max(1, len(self.characters))

    @property
    def has_classes(self) -> bool:
        """Whether the values repeat as class names do: at least two, each twice on average, and none a fraction.

        1.0 is no fraction: spreadsheets and pandas write whole numbers in this way.
        """
        return (
            not self.has_many
            and 2 <= len(self.values) <= self.rows / 2
            and self.kind in ("text", "whole number", "mixed")
            and not self.kinds["list or table"]
        )

    def at_share(self, share: float) -> int:
        """Return the number of characters that this share of the values does not exceed; 0 without values."""
        lengths = sorted(self.characters)
        return lengths[min(len(lengths) - 1, int(share * len(lengths)))] if lengths else 0

    def as_text(self) -> str:
        """Describe the column: ``'label' (2 different values: neg, pos)``."""
        if not self.rows:
            return f"{self.name!r} (empty)"
        if self.has_classes:
            names = [name[:_SHOWN_CHARACTERS] for name in sorted(self.values)]
            more = ", ..." if len(names) > _SHOWN_CLASSES else ""
            return f"{self.name!r} ({len(names)} different values: {', '.join(names[:_SHOWN_CLASSES])}{more})"
        if self.has_many:
            different = f"more than {MAX_CLASSES:,} different values"
        elif len(self.values) in (1, self.rows):
            different = "always the same" if len(self.values) == 1 else "all different"
        else:
            different = f"{len(self.values):,} different values in {self.rows:,} rows"
        kind = "numbers with fractions" if self.kind == "number" else self.kind
        return f"{self.name!r} ({kind}, {self.mean_characters:.0f} characters, {different})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """An inspected table.

    Attributes:
        rows: number of lines with values.
    """

    path: Path
    rows: int
    columns: Mapping[str, Column]

    def as_text(self) -> str:
        """Describe the table for an error message."""
        return f"{self.path} has {counted(self.rows, 'row')} and the columns {', '.join(map(Column.as_text, self.all))}"

    @property
    def all(self) -> list[Column]:
        """The columns in the order of the file."""
        return list(self.columns.values())


def inspect_table(path: Path) -> Table:
    """Read every row of a table once; errors in rows are reported later, when its columns are chosen.

    Raises ``DataError``: it is no table, or has no rows; describes its content.
    """
    columns: dict[str, Column] = {}
    account = RowAccount(path, is_own=True)
    for line, row in table_rows(path, {}, account):
        for name, value in row.items():
            if name not in columns and len(columns) >= _MAX_COLUMNS:
                raise DataError(
                    f"{row_place(path, line)}: there are more than {_MAX_COLUMNS:,} columns; is it a table?"
                )
            columns.setdefault(name, Column(name)).add(value)
    if not account.rows:
        account.check()
        if not account.columns:
            raise DataError(f"{path} is empty; give it a line with the names of the columns, and a line for each row")
        names = ",".join(account.columns)[:_SHOWN_CHARACTERS]
        raise DataError(f"{path} has one line and no rows ({names!r}); give it a header and a line for each row")
    _check_header(path, columns)
    return Table(path=path, rows=account.rows, columns=columns)


def _check_header(path: Path, columns: Mapping[str, Column]) -> None:
    """Refuse a csv file without a header: the name of a column is also a class in that column."""
    has_header = form_suffix(path) not in (".jsonl", ".json") and not is_arrow(path)
    for column in columns.values():
        if has_header and column.has_classes and column.values[column.name]:
            names = ", ".join(repr(name[:_SHOWN_CHARACTERS]) for name in columns)
            raise DataError(
                f"{path}: the first line ({names}) looks like a row and not like names of columns, as "
                f"{column.name!r} is also a value below it; put a line with names at the top, such as text,label"
            )


def _kind(value: object) -> str:
    if isinstance(value, bool | list | dict):
        return "list or table"
    text = str(value).strip()
    try:
        return "whole number" if float(text).is_integer() else "number"
    except ValueError:
        return "text"


NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "text": (
        *("text", "sentence", "review", "content", "comment", "message", "tweet", "document", "body", "utterance"),
        *("description", "query", "input", "prompt", "title"),
    ),
    "label": (
        *("label", "labels", "class", "category", "target", "sentiment", "intent", "topic", "emotion", "rating"),
        *("stars", "y", "tag", "output"),
    ),
    "number": ("score", "label", "labels", "similarity", "similarity_score", "target", "rating", "stars", "value", "y"),
    "words": ("words", "tokens", "word", "token", "text", "sentence"),
    "tags": ("tags", "ner_tags", "pos_tags", "ner", "pos", "labels", "upos", "tag", "label"),
    "question": ("question", "query"),
    "context": ("context", "passage", "paragraph", "document"),
    "answer": ("answer", "answers"),
}
"""Usual names of columns by the key of ``[data]``, the likeliest first; compared in lower case."""

COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    CLASSIFICATION: ("text", "label"),
    REGRESSION: ("text", "label"),
    TAGGING: ("words", "tags"),
    CAUSAL_LM: ("text",),
    CHAT: (),
    QUESTION_ANSWERING: ("question", "context", "answer"),
}
"""The keys of ``[data]`` that name a column, by task."""

PAIR: Final = "text_pair"
"""Key of the second text column, for tasks with pairs of texts."""

_PAIRS: Final = (
    *(("sentence1", "sentence2"), ("text1", "text2"), ("text_a", "text_b"), ("sentence_a", "sentence_b")),
    *(("premise", "hypothesis"), ("question1", "question2"), ("text", "text_pair")),
)
"""Usual names of two text columns that form a pair."""

_MIN_WORDS_CHARACTERS = 8.0
"""Least mean length of a text column without a usual name."""


def tasks_of(table: Table) -> tuple[str, ...]:
    """Return the tasks for which a table has columns, the likeliest first.

    Example: ``question, context, answers``: question answering; ``tokens, ner_tags`` with lists: token classification;
    ``review, mood``: classification, then language modelling of the reviews; ``prompt, completion``: chat alone.
    """
    if form_of(table.columns):
        return (CHAT,)
    likeliest = (QUESTION_ANSWERING, TAGGING, CLASSIFICATION, REGRESSION, CAUSAL_LM)
    return tuple(task for task in likeliest if _find(table, task, {}))


def refuse_conversations(table: Table, task: str, given: Mapping[str, str]) -> None:
    """Refuse preferences; and conversations for another task than chat, unless its columns were given.

    Raises ``DataError``: names the form and a remedy.
    """
    form = form_of(table.columns)
    if has_preferences(table.columns):
        raise DataError(f"{table.path}: {PREFERENCES_REMEDY}")
    if form and task not in ("", CHAT) and not (task in COLUMNS and given.keys() >= set(COLUMNS[task])):
        names = ", ".join(map(repr, table.columns))
        raise DataError(f"{table.path} has {form}, in the columns {names}; {CONVERSATION_REMEDY}")


def text_columns(table: Table, task: str, chosen: Mapping[str, str]) -> list[Column]:
    """Return the columns that become tokens; ``chosen`` are columns by key."""
    if task == CHAT:
        return [table.columns[name] for name in columns_of(table.columns)]
    return [table.columns[name] for key, name in chosen.items() if key not in ("label", "answer")]


def choose_columns(table: Table, task: str, given: Mapping[str, str]) -> dict[str, ChosenValue]:
    """Choose the columns of a task, one of ``COLUMNS``; ``given`` are those that the user named, by key.

    Returns:
        Key of ``[data]`` -> name of the column, with the reason.

    Raises:
        DataError: a named column does not exist, or none fits; describes the table.
    """
    for key, name in given.items():
        known = (*COLUMNS[task], *((PAIR,) if task in PAIR_TASKS else ()))
        if key not in known:
            columns = f"the columns {', '.join(known)}; name one" if known else "columns of fixed names; rename them"
            raise DataError(f"--column {key}={name}: {task} has {columns}")
        if name not in table.columns:
            raise DataError(f"--column {key}={name}: {table.as_text()}; name one of them")
    names = _find(table, task, given)
    if not names and task != CHAT:
        raise DataError(f"can't tell the columns of {task}: {table.as_text()}; {_remedy(table, task)}")
    return {key: ChosenValue(name, _reason(table.columns[name], task, key, given)) for key, name in names.items()}


def _reason(column: Column, task: str, key: str, given: Mapping[str, str]) -> str:
    if key in given:
        return "as was said"
    names = NAMES.get("number" if (task, key) == (REGRESSION, "label") else key, ())
    how = "by its name" if column.name.strip().lower() in names or key == PAIR else ""
    if key == "label" and task == REGRESSION:
        number = "its numbers have fractions" if column.kind == "number" else "its numbers differ too much for classes"
        return f"{how}; {number}" if how else number
    if key == "label":
        many = f"{len(column.values)} different values repeat as classes do"
        numbers = "" if column.kind != "whole number" else f"; --task {REGRESSION} would learn them as numbers"
        return f"{how}; {many}{numbers}" if how else f"its {many}{numbers}"
    return how or "it has the longest texts"


def _remedy(table: Table, task: str) -> str:
    remedy = " ".join(f"--column {key}=NAME" for key in COLUMNS[task])
    numbers = [column.name for column in table.all if column.kind == "number"]
    if task == CLASSIFICATION and numbers:
        return (
            f"a class is a name or a whole number that many rows share, and {numbers[0]!r} has fractions; put them "
            f"into classes, learn the numbers with --task {REGRESSION}, or name the columns: {remedy}"
        )
    return f"name them: {remedy}"


def _find(table: Table, task: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return key -> column of a task; empty if one is missing."""
    if task == CHAT:
        return {}
    if task == QUESTION_ANSWERING:
        columns = {key: given.get(key) or _by_name(table, key, table.all) for key in COLUMNS[task]}
    elif task == TAGGING:
        lists = [column for column in table.all if column.kind == "list or table"]
        columns = {key: given.get(key) or _by_name(table, key, lists) for key in COLUMNS[task]}
    elif task in PAIR_TASKS:
        pair = _pair(table, given)
        texts = {**pair, **given}
        columns = _text_and_label(table, texts) if task == CLASSIFICATION else _text_and_number(table, texts)
        columns |= {key: name for key, name in texts.items() if key == PAIR}
    else:
        columns = {"text": given.get("text") or _text(table, table.all)}
    names = list(columns.values())
    return {} if "" in names or len(set(names)) < len(names) else columns


def _text_and_label(table: Table, given: Mapping[str, str]) -> dict[str, str]:
    label = given.get("label") or _by_name(table, "label", [column for column in table.all if column.has_classes])
    others = [column for column in table.all if column.name != label]
    text = given.get("text") or _text(table, others)
    if not label:
        classes = [column for column in table.all if column.has_classes and column.name != text]
        label = min(classes, key=lambda column: len(column.values)).name if classes else ""
    return {"text": text, "label": label}


def _text_and_number(table: Table, given: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of text and number.

    A number column has fractions, or a usual name and too many values for classes.
    """
    numbers = [column for column in table.all if column.kind == "number"]
    many = [column for column in table.all if column.kind == "whole number" and not column.has_classes]
    number = given.get("label") or _by_name(table, "number", [*numbers, *many])
    number = number or (numbers[0].name if len(numbers) == 1 else "")
    return {"text": given.get("text") or _text(table, table.all), "label": number}


def _pair(table: Table, given: Mapping[str, str]) -> dict[str, str]:
    """Return two text columns with usual names of a pair; empty if there are none, or the text column was given."""
    texts = {column.name.strip().lower(): column.name for column in table.all if column.kind in ("text", "mixed")}
    if "text" in given:
        return {}
    return next(({"text": texts[a], PAIR: texts[b]} for a, b in _PAIRS if a in texts and b in texts), {})


def _text(table: Table, columns: Sequence[Column]) -> str:
    """Return the text column: one with a usual name, else that with the longest values."""
    texts = [column for column in columns if column.kind in ("text", "mixed") and not column.kinds["list or table"]]
    named = _by_name(table, "text", texts)
    longest = max(texts, key=lambda column: column.mean_characters, default=None)
    if named or longest is None or longest.mean_characters < _MIN_WORDS_CHARACTERS:
        return named
    return longest.name


def _by_name(table: Table, key: str, columns: Sequence[Column]) -> str:
    by_name = {column.name.strip().lower(): column.name for column in columns}
    return next((by_name[name] for name in NAMES[key] if name in by_name), "")


def parse_columns(words: Sequence[str]) -> dict[str, str]:
    """Read words ``KEY=COLUMN``; raises ``UsageError``."""
    pairs = {word: word.partition("=") for word in words}
    for word, (key, equals, name) in pairs.items():
        if not (key and equals and name):
            raise UsageError(f"--column {word!r} is not KEY=COLUMN, e.g. label=mood")
    return {key: name for key, _, name in pairs.values()}
