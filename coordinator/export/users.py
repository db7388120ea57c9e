"""Choose whose adapters are taken of a run in which each user has their own.

In collaboration every row goes through the sum of all users' adapters, so that is what the run trained, and what is
taken if no user is named. Adapters that were trained alone are for the rows of one user, so one has to be named.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from coordinator.export.merged import sum_into
from coordinator.run_folder.saved_run import SavedRun
from ringtune.errors import UsageError
from ringtune.jobs.user_adapters import job_of_sum, job_of_user
from ringtune.models.result_files import of_user
from ringtune.schedule.helping.offload import COLLABORATION

_MOST_NAMED: Final = 20


def require_user(run: SavedRun, user: str) -> None:
    """Refuse a user whom the run does not have, and no user where one has to be named.

    Args:
        run: of which an adapter is to be taken.
        user: whose; empty = of all.

    Raises:
        UsageError: lists the users.
    """
    if not run.users:
        if user:
            raise UsageError(
                f"{run.folder} has no adapters of single users, all rows trained the same; leave --user out"
            )
        return
    if user and user not in run.users:
        raise UsageError(f"{run.folder} has no user {user!r}; give --user with one of {_listed(run.users)}")
    if not user and not _adds_up(run):
        raise UsageError(
            f"in {run.folder} each user's adapters were trained alone, for that user's rows; give --user with one of "
            f"{_listed(run.users)}"
        )
    if not user:
        job_of_sum(run.job, run.users)


def as_of(run: SavedRun, user: str) -> SavedRun:
    """Return a run as that of the adapters of one user, or of all added up; as it is where users have none.

    The figures of a run are those of all its users, so one user's adapters have none.
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
    """Give a run with the folder of one adapter, which lasts as long as the context.

    Args:
        run: of which it is taken.
        user: one that ``require_user`` takes.

    Raises:
        RingTuneError: the adapters could not be added up.
    """
    if not run.users or user:
        yield as_of(run, user)
        return
    with tempfile.TemporaryDirectory(prefix="ringtune-") as name:
        sum_into(run, Path(name))
        yield dataclasses.replace(as_of(run, user), saved=Path(name))


def _adds_up(run: SavedRun) -> bool:
    offload = run.plan.course.offload
    return offload is not None and offload.users == COLLABORATION


def _listed(names: Sequence[str]) -> str:
    """List names, of many the first ones."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
