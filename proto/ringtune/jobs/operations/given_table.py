"""The operations that a job is given: read from the file that ``operations.table`` names, and kept in the job as text.

A job goes to machines that do not have the file, and a run's own job has to say everything by itself.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Final

from ringtune.errors import JobError, PlanError
from ringtune.files.given_files import read_given
from ringtune.jobs.operations.settings import OperationsSettings
from ringtune.schedule.operations.given import GivenTable, tables_from_json, tables_to_json

_MOST_BYTES: Final = 64_000_000
_MOST_TEXT: Final = 3_000_000
"""Most characters of tables in a job: with the plan, which has them too, it goes to a node in one message of 8 MiB."""

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
    try:
        path = (folder / Path(settings.table).expanduser()).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise JobError(f"operations.table = {settings.table!r} is no path: {error}; {_REMEDY}") from error
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise JobError(f"operations.table {path} has more than {_MOST_BYTES:,} bytes; {_REMEDY}")
        text = read_given(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise JobError(f"can't read operations.table {path}: {reason}; {_REMEDY}") from error
    table = json.dumps(tables_to_json(_tables(text, f"operations.table {path}")), separators=(",", ":"))
    if len(table) > _MOST_TEXT:
        raise JobError(
            f"operations.table {path} is {len(table):,} characters of text, a job has room for {_MOST_TEXT:,}; repeat "
            "that run by its own job.toml and --plan with its plan.json, which choose the same tables again"
        )
    return dataclasses.replace(settings, table=table)


def given_tables(settings: OperationsSettings) -> tuple[GivenTable, ...]:
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


def _tables(text: str, where: str) -> tuple[GivenTable, ...]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JobError(f"{where} is not JSON: {error}; {_REMEDY}") from error
    if isinstance(value, dict) and "course" in value:
        raise JobError(f"{where} is a plan; give the operations.json beside it, or the plan itself with --plan")
    try:
        return tables_from_json(value)
    except PlanError as error:
        raise JobError(f"{where}: {str(error).removesuffix('; plan anew')}; {_REMEDY}") from error
