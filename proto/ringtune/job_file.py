"""Reading ``job.toml`` strictly: whatever is misspelt, mistyped or not built yet is refused by name."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

from ringtune.errors import JobError
from ringtune.job_values import Job


def load_job(path: str | Path) -> Job:
    """Read a job file; its relative paths are relative to the file's folder and become absolute.

    Raises:
        JobError: the file is not there, not TOML, or breaks a rule; names file and key.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise JobError(f"can't read the job file {path}: {reason}") from error
    return with_absolute_paths(parse_job(text, source=str(path)), path.parent)


def parse_job(text: str, *, source: str) -> Job:
    """Read the text of a job file.

    Args:
        text: TOML.
        source: where it came from, for messages.

    Raises:
        JobError: not TOML, an unknown key, a wrong type, out of range, or not supported yet.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{source}: not valid TOML: {error}") from error
    try:
        return Job.from_tables(tables)
    except JobError as error:
        raise JobError(f"{source}: {error}") from error


def with_absolute_paths(job: Job, folder: Path) -> Job:
    """The job with ``model.path``, ``data.train`` and ``data.eval`` made absolute, relative to ``folder``."""
    model = dataclasses.replace(job.model, path=_absolute(job.model.path, folder))
    train, evaluate = _absolute(job.data.train, folder), _absolute(job.data.eval, folder)
    return dataclasses.replace(job, model=model, data=dataclasses.replace(job.data, train=train, eval=evaluate))


def _absolute(path: str, folder: Path) -> str:
    return str((folder / Path(path).expanduser()).resolve()) if path else path
