"""``operations.json``: the operation tables that a run has chosen, each with its step.

The file repeats the run without scores: it may be given as the tables of another one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from ringtune.errors import IntegrityError, PlanError
from ringtune.files.durable import storage_errors, write_durably
from ringtune.files.given_files import read_json
from ringtune.files.strict import read_object
from ringtune.schedule.operations.given import GivenTable, tables_from_json, tables_text

NAME: Final = "operations.json"


class TablesFile:
    """The chosen tables of one run.

    Args:
        run_folder: of the run.
    """

    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / NAME
        self._texts: dict[int, str] | None = None  # what is in the file, each table by its step; None = not read yet

    def read(self) -> tuple[GivenTable, ...]:
        """Read the tables, in the order of their steps; none if none was chosen.

        Raises:
            IntegrityError: the file is damaged.
        """
        try:
            return tables_from_json(read_json(self._path))
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, PlanError) as error:
            raise IntegrityError(f"{self._path} can't be read ({error}); remove it, the run chooses again") from error

    def add(self, text: str) -> None:
        """Add a table, as the event of the run tells it; what was chosen for its step or later ones goes.

        Raises:
            IntegrityError: the text is no table, or the file is damaged.
            StorageError: no room.
        """
        try:
            table = GivenTable.from_json(read_object(text, "the table that was chosen"))
        except PlanError as error:
            raise IntegrityError(f"the table that was chosen is not readable: {error}; use one version") from error
        self._write({**self._before(table.step), table.step: json.dumps(table.to_json())})

    def go_back_to(self, step: int) -> None:
        """Drop what was chosen for ``step`` and later ones: a run that goes on there chooses it again."""
        before = self._before(step)
        if before:
            self._write(before)
        else:
            with storage_errors(self._path):
                self._path.unlink(missing_ok=True)
            self._texts = {}

    def _before(self, step: int) -> dict[int, str]:
        """The texts of the tables before a step; the file is read once, then only this object writes it."""
        if not step:
            return {}
        if self._texts is None:
            self._texts = {table.step: json.dumps(table.to_json()) for table in self.read()}
        return {at: text for at, text in self._texts.items() if at < step}

    def _write(self, texts: dict[int, str]) -> None:
        write_durably(self._path, (tables_text(list(texts.values())) + "\n").encode())
        self._texts = texts
