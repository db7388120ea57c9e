"""The operations that a job is given: read from the file that ``operations.table`` names, and kept in the job as text.

A job goes to machines that do not have the file, and a run's own job has to say everything by itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ringtune.errors import JobError, PlanError
from ringtune.files.strict import check_keys, read_value
from ringtune.jobs.operations import OperationsSettings
from ringtune.schedule.operations.table import Operations

_MOST_BYTES: Final = 64_000_000
_MOST_TEXT: Final = 900_000
"""Most characters of a table in a job, of whose text ``job_text.MAX_BYTES`` are read."""

_REMEDY: Final = "give the operations.json of a run, or the operations of its plan.json"


def with_table_read(settings: OperationsSettings, folder: Path) -> OperationsSettings:
    """Replace the name of a file in ``operations.table`` by what the file says; all else stays.

    Args:
        settings: of the job.
        folder: to which the name is relative.

    Raises:
        JobError: the file can't be read, or has no table.
    """
    if not settings.table or _is_text(settings.table):
        return settings
    path = (folder / Path(settings.table).expanduser()).resolve()
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise JobError(f"operations.table {path} has more than {_MOST_BYTES:,} bytes; {_REMEDY}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise JobError(f"can't read operations.table {path}: {reason}; {_REMEDY}") from error
    tables = [_entry(step, table.to_json()) for step, table in _tables(text, f"operations.table {path}")]
    table = json.dumps({"schema": 1, "tables": tables}, separators=(",", ":"))
    if len(table) > _MOST_TEXT:
        raise JobError(
            f"operations.table {path} is {len(table):,} characters of text, a job has room for {_MOST_TEXT:,}; give it "
            "in a plan, with --plan"
        )
    return dataclasses.replace(settings, table=table)


def given_tables(settings: OperationsSettings) -> tuple[tuple[int, Operations], ...]:
    """The tables that a job is given, each with the step that it holds from; none where it is given none.

    Raises:
        JobError: the job names a file, which nobody has read, or its text is no table.
    """
    if not settings.table:
        return ()
    if not _is_text(settings.table):
        raise JobError(f"operations.table = {settings.table!r} was not read; train with 'ringtune train', which does")
    return _tables(settings.table, "operations.table")


def _is_text(table: str) -> bool:
    return table.lstrip().startswith("{")


def _tables(text: str, where: str) -> tuple[tuple[int, Operations], ...]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise JobError(f"{where} is not JSON: {error}; {_REMEDY}") from error
    entries = value.get("tables") if isinstance(value, Mapping) and "tables" in value else [_entry(0, value)]
    if not isinstance(entries, list) or not entries:
        raise JobError(f"{where} has no table in its list of tables; {_REMEDY}")
    try:
        return tuple(_read_entry(entry, f"{where}.tables[{at}]") for at, entry in enumerate(entries))
    except PlanError as error:
        raise JobError(f"{error}; {_REMEDY}") from error


def _read_entry(entry: object, where: str) -> tuple[int, Operations]:
    if not isinstance(entry, Mapping):
        raise PlanError(f"{where} has to be a table")
    check_keys(entry, ("step", "operations"), where=where, error=PlanError)
    step = read_value(int, entry.get("step"), where=f"{where}.step", error=PlanError)
    return step, Operations.from_json(entry.get("operations"), where=f"{where}.operations")


def _entry(step: int, operations: object) -> dict[str, object]:
    return {"step": step, "operations": operations}
