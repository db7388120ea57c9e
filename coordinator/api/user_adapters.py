"""Adapters of a run with several users: the choice of one user's adapter, or the sum of all.

In collaboration every row passes the sum of all users' adapters, so the sum is the default result. Adapters trained
alone are for the rows of one user, so a user must be named.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from coordinator.client.saved_run import SavedRun, read_run_file
from ringtune.errors import DeadlineError, UsageError
from ringtune.job.job import job_of_sum, job_of_user
from ringtune.machine.process import exit_error
from ringtune.models.adapter_support import generic_refusal, merge_refusal
from ringtune.models.families import family_named
from ringtune.models.result_files import DESCRIPTIONS, of_user
from ringtune.schedule.course import COLLABORATION
from ringtune.texts import listed

MERGE_S: Final = 3600.0
"""Deadline, in seconds, of reading, merging and writing a model."""


def check_can_merge(run: SavedRun) -> None:
    """Refuse a run with an adapter that can't be merged into weight matrices; raises ``UsageError``."""
    adapter = run.job.adapter.config
    if run.result.is_model:
        raise UsageError(f"{run.folder} has a whole model, there is nothing to merge; leave --merge out")
    if problem := merge_refusal(adapter):
        raise UsageError(
            f"adapter.config = {adapter!r} can't be merged: {problem}; leave --merge or --format gguf out, "
            "or train linear or lora"
        )


def merge_into(run: SavedRun, target: Path, *options: str) -> None:
    """Write the merged model of a run, without a card, in a process of its own; raises ``RingTuneError``.

    ``options`` are those of ``edge.model.merge``: another base model, one user in place of the sum of all; or the sum
    of the adapters of all users alone, as the folder of one adapter.
    """
    command = [sys.executable, "-P", "-m", "edge.model.merge", str(run.folder), str(target), *options]
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command, capture_output=True, text=True, timeout=MERGE_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(f"the model is not merged after {MERGE_S:g} s; export on a faster disk") from error
    if done.returncode:
        raise exit_error("merging", done.returncode, done.stderr[-4096:], log=target)


_MAX_NAMED: Final = 20


def require_user(run: SavedRun, user: str) -> None:
    """Refuse an unknown user, and an empty one (all adapters) if a user has to be named; raises ``UsageError``."""
    if not run.users:
        if user:
            raise UsageError(
                f"{run.folder} has no adapters of single users, all rows trained the same; leave --user out"
            )
        return
    if user and user not in run.users:
        raise UsageError(f"{run.folder} has no user {user!r}; give --user with one of {listed(run.users, _MAX_NAMED)}")
    if not user and run.plan.course.helper_settings.users != COLLABORATION:
        raise UsageError(
            f"in {run.folder} each user's adapters were trained alone, for that user's rows; give --user with one of "
            f"{listed(run.users, _MAX_NAMED)}"
        )
    if not user:
        summed, first = job_of_sum(run.job, run.users).adapter.config, run.folder / of_user(run.users[0])
        path = next(first / name for name in DESCRIPTIONS if (first / name).is_file())
        family = family_named(read_run_file(path).get("model_type"), where=str(path))
        if family.generic and generic_refusal(family, summed):
            raise UsageError(
                f"in {run.folder} the sum of the adapters of all users is {summed!r}, which a {family.model_type} "
                f"can't have; give one user with --user, of {listed(run.users, _MAX_NAMED)}"
            )


def as_of(run: SavedRun, user: str) -> SavedRun:
    """Return the run of one user's adapters, or of the sum; unchanged without adapters of users.

    The evaluation figures are of all users, so one user's run has none.
    """
    if not run.users:
        return run
    count = f"{len(run.users)} users with adapters of their own"
    if not user:
        job = job_of_sum(run.job, run.users)
        return dataclasses.replace(run, job=job, whose=f"all {count}, added up")
    report = {name: value for name, value in run.report.items() if name != "eval"}
    job = job_of_user(run.job, user)
    return dataclasses.replace(run, job=job, report=report, saved=run.folder / of_user(user), whose=f"one of {count}")


@contextmanager
def adapter_of(run: SavedRun, user: str) -> Iterator[SavedRun]:
    """Yield the run with the folder of one adapter, valid in the context; ``user`` as ``require_user`` accepts it.

    Raises:
        RingTuneError: the adapters could not be added up.
    """
    if not run.users or user:
        yield as_of(run, user)
        return
    with tempfile.TemporaryDirectory(prefix="ringtune-") as name:
        merge_into(run, Path(name), "--sum")
        yield dataclasses.replace(as_of(run, user), saved=Path(name))
