"""``python -m edge.merge RUN OUT``: write the model of a run with its adapter merged; ``ringtune export --merge`` does.

Where each user has adapters of their own, it merges those of one user, or all of them added up.

It is a process of its own, because what is exported is put together without torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ringtune.errors import InvalidInputError, RingTuneError, UsageError
from ringtune.files.durable import write_pieces_durably
from ringtune.jobs.job import Job, load_job
from ringtune.jobs.result import result_of
from ringtune.jobs.user_adapters import config_of, job_of_sum, job_of_user, kinds_of
from ringtune.models.result_files import of_user
from ringtune.schedule.course import Course
from ringtune.schedule.plan import Plan
from ringtune.schedule.whose_rows.users import user_sets


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the run, merge, write; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m edge.merge", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("out", type=Path, help="folder to write; it has to be there")
    parser.add_argument("--model", type=Path, help="folder of the base model; replaces the run's model.path")
    parser.add_argument("--user", default="", help="whose adapters, where each user has their own; default: all")
    parser.add_argument("--sum", action="store_true", help="write the adapters of all users added up, and no model")
    given = parser.parse_args(arguments)
    try:
        if given.sum:
            sum_run(given.run, given.out)
        else:
            merge_run(given.run, given.out, model=given.model, user=given.user)
    except RingTuneError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def merge_run(run: Path, out: Path, *, model: Path | None, user: str = "") -> None:
    """Write the merged model of a run.

    Args:
        run: its folder.
        out: folder that takes the files.
        model: of the base model; None = the run's own.
        user: whose adapters, where each user has their own; empty = those of all added up.

    Raises:
        RingTuneError: see ``edge.model.result.merged.merged_files``.
    """
    job, course = _read(run)
    base = model or Path(job.model.path)
    if not base.is_dir():
        raise InvalidInputError(f"the base model {base} is not there; name its folder with --model")

    from edge.model.result.merged import merged_files

    users = user_sets(course)
    with tempfile.TemporaryDirectory(prefix="ringtune-") as summed:
        saved = run / (of_user(user) if user else result_of(job).folder)
        job = job_of_user(job, user) if user else job
        if users and not user:
            saved = Path(summed)
            sum_run(run, saved)
            job = job_of_sum(job, users)
        for name, content in merged_files(job, base, saved, course.labels).items():
            write_pieces_durably(out / name, content)


def sum_run(run: Path, out: Path) -> None:
    """Write the adapters of all users of a run added up, as the folder of one adapter.

    Raises:
        RingTuneError: see ``summed_files`` and ``summed_kinds_files`` of ``edge.model.result``.
    """
    from edge.model.result.summed import summed_files
    from edge.model.result.summed_kinds import OfUser, summed_kinds_files

    job, course = _read(run)
    folders = {user: run / of_user(user) for user in user_sets(course)}
    if course.offload is None or not folders:
        raise UsageError(f"{run} has no users with adapters of their own; there is nothing to add up")
    is_own = course.offload.has_block
    if len(kinds_of(job, tuple(folders))) == 1:
        files = summed_files(list(folders.values()), result_of(job).files, is_own=is_own)
    else:
        own = [OfUser(folder, config_of(job, user)) for user, folder in folders.items()]
        files = summed_kinds_files(own, is_own=is_own)
    for name, content in files.items():
        write_pieces_durably(out / name, content)


def _read(run: Path) -> tuple[Job, Course]:
    plan = Plan.from_json(json.loads((run / "plan.json").read_text(encoding="utf-8")))
    return load_job(run / "job.toml"), plan.course


if __name__ == "__main__":
    sys.exit(main())
