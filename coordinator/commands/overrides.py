"""``--set KEY=VALUE``: values as in the job file, strings also without quotes."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable
from pathlib import Path

from ringtune.errors import UsageError
from ringtune.jobs.job import Job, load_job
from ringtune.jobs.operations.given_table import with_table_read


def changed_job(path: Path, changes: Iterable[str]) -> Job:
    """Read a job file and change it; a file that ``--set operations.table=FILE`` names is read too.

    A model that the job names by its id on a hub is a folder of this machine from here on.

    Raises:
        JobError: of the file, or of a changed value.
        UsageError: a change is not ``KEY=VALUE``.
        ConnectionFailedError: the model is not in the cache and can't be fetched.
    """
    from coordinator.hub.resolve import with_model_here

    job = with_model_here(load_job(path).with_overrides(parse_changes(changes)))
    return dataclasses.replace(job, operations=with_table_read(job.operations, Path.cwd()))


def parse_changes(changes: Iterable[str]) -> dict[str, object]:
    """Split each ``KEY=VALUE`` into a dotted key and its value.

    Raises:
        UsageError: not ``KEY=VALUE``, or a key without a section.
    """
    values: dict[str, object] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key.count(".") != 1:
            raise UsageError(f"--set {change!r} is not SECTION.KEY=VALUE, e.g. train.seed=1")
        values[key.strip()] = _value(text.strip())
    return values


def _value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    except (RecursionError, ValueError) as error:
        raise UsageError(f"--set has a value of {len(text):,} characters that is no text and no number") from error
