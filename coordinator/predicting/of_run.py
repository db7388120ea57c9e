"""Predictions by the result of a run: what the command and the Python API have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from coordinator.export.users import adapter_of, require_user
from coordinator.predicting.process import Predicted, Sampling, predict
from coordinator.run_folder.saved_run import SavedRun
from ringtune.errors import DataError, UsageError
from ringtune.files.pictures import list_pictures
from ringtune.files.text_files import read_text
from ringtune.jobs.job import Job
from ringtune.jobs.rows import account_of, is_plain_text, task_rows
from ringtune.models.family import CAUSAL_LM, IMAGE_CLASSIFICATION

MOST_NEW_TOKENS: Final = 4096
MOST_TEMPERATURE: Final = 100.0


def check_request(run: SavedRun, data: Path, how: Sampling, user: str) -> list[str]:
    """Refuse what can't be predicted, before anything is started.

    Returns:
        What is to be known of how the file was read, and of rows that are left out.

    Raises:
        UsageError: the run has no such user, or a number is out of range.
        DataError: there are no rows, or some that can't be used: all of them at once.
    """
    require_user(run, user)
    if not data.exists():
        raise DataError(f"{data} is not there; give --data a file with the columns of the run's data.train")
    if not 1 <= how.max_new_tokens <= MOST_NEW_TOKENS:
        raise UsageError(f"max_new_tokens is {how.max_new_tokens}, it has to be in [1, {MOST_NEW_TOKENS}]")
    if not 0 <= how.temperature <= MOST_TEMPERATURE:
        raise UsageError(f"temperature is {how.temperature:g}, it has to be in [0, {MOST_TEMPERATURE:g}]")
    if not 0 <= how.seed < 1 << 31:
        raise UsageError(f"seed is {how.seed}, it has to be at least 0 and below {1 << 31}")
    return _check_rows(data, run.job)


def _check_rows(path: Path, job: Job) -> list[str]:
    """Read a file once as the process that predicts will, so that all of its problems are told before it starts."""
    if job.model.task == IMAGE_CLASSIFICATION:
        if not path.is_dir():
            return []
        passed = list_pictures(path, has_classes=False).passed_over
        return [f"{count:,} left out in {path}: {why}" for why, count in passed.items()]
    if job.model.task == CAUSAL_LM and is_plain_text(path):
        text, note = read_text(path, job.data.encoding)
        blank = sum(not line.strip() for line in text.splitlines())
        return [note] * bool(note) + [f"{blank:,} blank lines of {path} are left out"] * bool(blank)
    account = account_of(path, job.data, is_own=True)
    usable = sum(1 for _ in task_rows(path, job.model.task, job.data, account, with_targets=False))
    account.check()
    if not usable:
        raise DataError(f"{path} has no rows; give it rows to predict for")
    return [*account.notes, *account.lines_left_out()]


def predict_rows(
    run: SavedRun,
    data: Path,
    how: Sampling,
    *,
    model: Path | None = None,
    user: str = "",
    tell: Callable[[str], object] = str,
) -> Iterator[Predicted]:
    """Yield every row of a file with what the result of a run predicts for it.

    Args:
        run: whose adapter or model.
        data: rows, with the columns that the job names, but for those of targets.
        how: for a language model.
        model: folder that replaces the job's.
        user: whose adapters, where each user has their own.
        tell: gets a sentence on rows that were cut.

    Raises:
        RingTuneError: what went wrong in the process that predicts.
    """
    with adapter_of(run, user) as chosen:
        yield from predict(chosen, data, how, model=model, tell=tell)
