"""``operations.json``: the operation tables that a run has chosen, each with its step.

The file repeats the run without scores: it may be given as the tables of another one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ringtune.errors import IntegrityError, PlanError
from ringtune.files.durable import storage_errors, write_durably
from ringtune.files.strict import read_object
from ringtune.schedule.operations.given import GivenTable, tables_from_json, tables_to_json

NAME: Final = "operations.json"


class TablesFile:
    """The chosen tables of one run.

    Args:
        run_folder: of the run.
    """

    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / NAME

    def read(self) -> tuple[GivenTable, ...]:
        """Read the tables, in the order of their steps; none if none was chosen.

        Raises:
            IntegrityError: the file is damaged.
        """
        try:
            return tables_from_json(json.loads(self._path.read_text(encoding="utf-8")))
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
        self._write([*self._before(table.step), table])

    def go_back_to(self, step: int) -> None:
        """Drop what was chosen for ``step`` and later ones: a run that goes on there chooses it again."""
        before = self._before(step)
        if before:
            self._write(before)
        else:
            with storage_errors(self._path):
                self._path.unlink(missing_ok=True)

    def _before(self, step: int) -> list[GivenTable]:
        return [table for table in self.read() if table.step < step] if step else []

    def _write(self, tables: Sequence[GivenTable]) -> None:
        write_durably(self._path, (json.dumps(tables_to_json(tables)) + "\n").encode())
