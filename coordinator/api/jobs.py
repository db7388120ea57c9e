"""Read a job that is given as a file, as a mapping, as keywords, or as several of these."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from ringtune.errors import JobError, UsageError
from ringtune.jobs.job import Job, load_job, with_absolute_paths
from ringtune.jobs.misplaced import sections_of

JobLike: TypeAlias = str | PathLike[str] | Mapping[str, Any] | Job | None
"""A job file, its sections as a mapping, a job, or nothing where keywords say it all."""


def read_job(job: JobLike, keys: Mapping[str, object]) -> Job:
    """Make a job from what was given; keywords win.

    Args:
        job: a file, whose relative paths are relative to its folder, or the sections of one as a mapping.
        keys: keywords ``SECTION__KEY``, as ``train__rounds``; relative paths are relative to the current folder.

    Raises:
        JobError: the job is wrong; names the key.
        UsageError: a keyword is neither an option nor a key of a job, or there is no job.
    """
    overrides = {_dotted(name): _plain(value) for name, value in keys.items()}
    if job is None and not overrides:
        raise UsageError("give a job: a file, a mapping of its sections, or keywords such as model__path='DIR'")
    if job is None:
        return with_absolute_paths(Job.from_tables(_nested(overrides)), Path.cwd())
    if isinstance(job, Mapping):
        job = Job.from_tables(_tables(job))
    elif not isinstance(job, Job):
        job = load_job(Path(job))
    return with_absolute_paths(job.with_overrides(overrides), Path.cwd())


def _dotted(keyword: str) -> str:
    """The key of a job that a keyword names: ``train__rounds`` is ``train.rounds``.

    Raises:
        UsageError: it names none; with the nearest that does.
    """
    section, underscores, key = keyword.partition("__")
    if underscores and section and key:
        return f"{section}.{key}"
    near = difflib.get_close_matches(keyword, [name.partition("__")[2] for name in _keywords()], n=1)
    named = next((name for name in _keywords() if near and name.endswith(f"__{near[0]}")), "train__rounds")
    raise UsageError(f"there is no option {keyword!r}; a key of the job is written SECTION__KEY, e.g. {named}")


def _keywords() -> list[str]:
    return [f"{section}__{key}" for section, keys in sections_of(Job).items() for key in sorted(keys)]


def _tables(job: Mapping[str, Any]) -> dict[str, object]:
    """The sections of a mapping with plain values.

    Raises:
        JobError: a section is no mapping.
    """
    found: dict[str, object] = {}
    for section, keys in job.items():
        if not isinstance(keys, Mapping):
            raise JobError(f"{section} has to be a section, e.g. {{'train': {{'rounds': 5}}}}")
        found[str(section)] = {str(key): _plain(value) for key, value in keys.items()}
    return found


def _nested(values: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """The sections that dotted keys make up."""
    tables: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        tables.setdefault(section, {})[key] = value
    return tables


def _plain(value: object) -> object:
    """The value as a TOML reader would give it: a path is text, a tuple a list."""
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return value
