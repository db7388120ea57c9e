"""One account of a file's rows: those that can't be used with their lines, those left out, and what else is told.

Readers go on after a bad row, so that all of a file's problems are told at once. Messages go to the coordinator and to
its users, so they have no cell of a row in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from ringtune.errors import DataError

_SHOWN_LINES: Final = 5
_SHOWN_PROBLEMS: Final = 8
_MOST_PROBLEMS: Final = 100


class Problem(NamedTuple):
    """Why a row can't be used.

    Attributes:
        what: is wrong, without the line and without a cell of the row.
        remedy: what to do.
        is_missing: whether something is not there, so that ``data.missing = "skip"`` leaves the row out.
    """

    what: str
    remedy: str = "correct or remove the row"
    is_missing: bool = False


class RowError(Exception):
    """A row can't be used; readers catch it and note its problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.what)
        self.problem = problem


@dataclass(slots=True)
class _Lines:
    """Rows with the same problem: how many, and the first few lines."""

    count: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, line: int) -> None:
        self.count += 1
        if len(self.first) < _SHOWN_LINES:
            self.first.append(line)

    def __str__(self) -> str:
        more = f" and {self.count - len(self.first):,} more" if self.count > len(self.first) else ""
        return f"line{'s' if self.count > 1 else ''} {', '.join(map(str, self.first))}{more}"


class RowAccount:
    """The account of one file, filled by its readers.

    Args:
        path: of the file.
        skips_missing: whether rows with an empty or missing cell are left out (``data.missing = "skip"``).
        is_own: whether messages stay with whoever has the file, so that they may name all of its columns.

    Attributes:
        rows: rows that were read, with those that have a value missing.
        columns: of the file, in their order; empty where it has none.
        notes: what a person has to know of how the file was read.
    """

    def __init__(self, path: Path, *, skips_missing: bool = False, is_own: bool = False) -> None:
        self.path = path
        self.is_own = is_own
        self.rows = 0
        self.columns: tuple[str, ...] = ()
        self.notes: list[str] = []
        self._skips_missing = skips_missing
        self._bad: dict[Problem, _Lines] = {}
        self._left_out: dict[str, _Lines] = {}

    def bad(self, line: int, problem: Problem) -> None:
        """Note a row that can't be used."""
        if problem not in self._bad and len(self._bad) >= _MOST_PROBLEMS:
            problem = Problem("has another problem")
        self._bad.setdefault(problem, _Lines()).add(line)

    def leave_out(self, line: int, what: str) -> None:
        """Note a row that no task could use and that is left out, whatever the job says."""
        self._left_out.setdefault(what, _Lines()).add(line)

    @property
    def left_out(self) -> Mapping[str, int]:
        """Rows that are left out, by why: with ``data.missing = "skip"`` also those with an empty cell."""
        found = {what: lines.count for what, lines in self._left_out.items()}
        missing = self._of_kind(is_missing=True) if self._skips_missing else {}
        return found | {problem.what: lines.count for problem, lines in missing.items()}

    def lines_left_out(self) -> list[str]:
        """Say which rows are left out, a sentence for each reason."""
        missing = self._of_kind(is_missing=True) if self._skips_missing else {}
        reasons = {**self._left_out, **{problem.what: lines for problem, lines in missing.items()}}
        return [
            f"{lines.count:,} row{'s are' if lines.count > 1 else ' is'} left out: {what} ({lines})"
            for what, lines in reasons.items()
        ]

    def problems(self) -> str:
        """Say in one sentence what can't be used and what to do; empty where all can, or is left out."""
        bad = self._of_kind(is_missing=False) if self._skips_missing else self._bad
        if not bad:
            return ""
        missing = sum(lines.count for problem, lines in bad.items() if problem.is_missing)
        total = sum(lines.count for lines in bad.values())
        skip = "set data.missing = 'skip' (in predict and eval --missing=skip) to leave out"
        if total == 1:
            (problem, lines), *_ = bad.items()
            return f"{self.path}, {lines}: {problem.what}; {problem.remedy}" + (
                f", or {skip} the row" if missing else ""
            )
        shown = [f"{problem.what} in {lines}" for problem, lines in list(bad.items())[:_SHOWN_PROBLEMS]]
        shown += [f"and {len(bad) - len(shown)} other problems"] if len(bad) > len(shown) else []
        remedies = list(dict.fromkeys(problem.remedy for problem in bad))
        remedy = remedies[0] if len(remedies) == 1 else "correct or remove them"
        which = "these rows" if missing == total else f"the {missing:,} with an empty cell"
        return f"{self.path}: {total:,} rows can't be used: {'; '.join(shown)}; {remedy}" + (
            f", or {skip} {which}" if missing else ""
        )

    def check(self) -> None:
        """Refuse the file if rows can't be used.

        Raises:
            DataError: all of them, with their lines.
        """
        if found := self.problems():
            raise DataError(found)

    def _of_kind(self, *, is_missing: bool) -> dict[Problem, _Lines]:
        return {problem: lines for problem, lines in self._bad.items() if problem.is_missing is is_missing}
