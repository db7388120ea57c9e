"""Look at the columns of a table: what is in them, how long, how different; nothing is kept of a row but samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ringtune.errors import DataError
from ringtune.files.row_account import RowAccount
from ringtune.files.tables import table_rows
from ringtune.files.text_files import form_suffix

MOST_CLASSES: Final = 1000
"""Most different values that are told apart in a column; beyond them it has no classes."""
_MOST_LENGTHS = 20_000
_MOST_COLUMNS = 1000
_SHOWN_CLASSES = 6
_SHOWN_CHARACTERS = 24


@dataclass(slots=True)
class Column:
    """What is in one column of a table.

    Attributes:
        name: of the column.
        rows: rows that have a value in it.
        empty: rows whose value is empty, null or missing.
        kinds: how many values are text, whole numbers, fractions, or lists and tables.
        values: how often each short value is there, as text; empty once there are more than ``MOST_CLASSES``.
        characters: lengths of the first texts.
        has_many: whether there are more different values than are told apart.
    """

    name: str
    rows: int = 0
    empty: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    values: Counter[str] = field(default_factory=Counter)
    characters: list[int] = field(default_factory=list)
    has_many: bool = False

    def add(self, value: object) -> None:
        """Take the value of one row."""
        if value is None or (isinstance(value, str) and not value.strip()):
            self.empty += 1
            return
        self.rows += 1
        self.kinds[_kind(value)] += 1
        text = str(value)
        if len(self.characters) < _MOST_LENGTHS:
            self.characters.append(len(text))
        if not self.has_many:
            self.values[text] += 1
            if len(self.values) > MOST_CLASSES:
                self.has_many, self.values = True, Counter()

    @property
    def kind(self) -> str:
        """The kind that all values have; ``mixed`` where they differ, whole numbers counting as numbers."""
        if set(self.kinds) <= {"whole number", "number"}:
            return "number" if self.kinds["number"] else "whole number"
        return next(iter(self.kinds)) if len(self.kinds) == 1 else "mixed"

    @property
    def mean_characters(self) -> float:
        """Mean length of its values."""
        return sum(self.characters) / max(1, len(self.characters))

    @property
    def has_classes(self) -> bool:
        """Whether its values repeat as class names do: two at least, each twice on average, and none is a fraction.

        1.0 is no fraction: spreadsheets and pandas write whole numbers so.
        """
        return (
            not self.has_many
            and 2 <= len(self.values) <= self.rows / 2
            and self.kind in ("text", "whole number", "mixed")
            and not self.kinds["list or table"]
        )

    def at_share(self, share: float) -> int:
        """Characters that so large a share of the values has at most; of none 0."""
        lengths = sorted(self.characters)
        return lengths[min(len(lengths) - 1, int(share * len(lengths)))] if lengths else 0

    def in_words(self) -> str:
        """Describe the column: ``'label' (2 classes: neg, pos)``."""
        if not self.rows:
            return f"{self.name!r} (empty)"
        if self.has_classes:
            names = [name[:_SHOWN_CHARACTERS] for name in sorted(self.values)]
            more = ", ..." if len(names) > _SHOWN_CLASSES else ""
            return f"{self.name!r} ({len(names)} different values: {', '.join(names[:_SHOWN_CLASSES])}{more})"
        if self.has_many:
            different = f"more than {MOST_CLASSES:,} different values"
        elif len(self.values) in (1, self.rows):
            different = "always the same" if len(self.values) == 1 else "all different"
        else:
            different = f"{len(self.values):,} different values in {self.rows:,} rows"
        kind = "numbers with fractions" if self.kind == "number" else self.kind
        return f"{self.name!r} ({kind}, {self.mean_characters:.0f} characters, {different})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table that was looked at.

    Attributes:
        path: of the file.
        rows: lines with values.
        columns: by name, in the order of the file.
    """

    path: Path
    rows: int
    columns: Mapping[str, Column]

    def in_words(self) -> str:
        """Describe the table for whoever has to find out why it makes no sense."""
        return f"{self.path} has {self.rows:,} rows and the columns {', '.join(map(Column.in_words, self.all))}"

    @property
    def all(self) -> list[Column]:
        """The columns in the order of the file."""
        return list(self.columns.values())


def look_at_table(path: Path) -> Table:
    """Look at every row of a table once; what is wrong in a row is told when its columns are chosen.

    Raises:
        DataError: it is no such table, or it has no rows; says what was seen.
    """
    columns: dict[str, Column] = {}
    account = RowAccount(path, is_own=True)
    for line, found in table_rows(path, {}, account):
        for name, value in found.items():
            if name not in columns and len(columns) >= _MOST_COLUMNS:
                raise DataError(f"{path}, line {line}: there are more than {_MOST_COLUMNS:,} columns; is it a table?")
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
    """Refuse a csv file whose first line is a row: a name of a column that stands in that column, as a class."""
    for column in columns.values():
        if form_suffix(path) != ".jsonl" and column.has_classes and column.values[column.name]:
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
