"""A run's model with its adapter merged into the weights, made by a process that has torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from coordinator.run_folder.saved_run import SavedRun
from ringtune.errors import DeadlineError, UsageError
from ringtune.machine.exit_errors import exit_error
from ringtune.models.adapters.merge_support import merge_refusal

MERGE_S: Final = 3600.0
"""Most seconds that reading, merging and writing a model may take."""


def check_can_merge(run: SavedRun) -> None:
    """Refuse a run whose adapter is no change of matrices.

    Raises:
        UsageError: says why, and what can be done.
    """
    adapter = run.job.adapter.config
    if run.result.is_model:
        raise UsageError(f"{run.folder} has a whole model, there is nothing to merge; leave --merge out")
    if problem := merge_refusal(adapter):
        raise UsageError(
            f"adapter.config = {adapter!r} can't be merged: {problem}; leave --merge out, or train linear or lora"
        )


def merge_into(run: SavedRun, target: Path, *, model: Path | None, user: str = "") -> None:
    """Write the merged model of a run, without a card.

    Args:
        run: one that ``check_can_merge`` takes.
        target: folder that takes the files.
        model: folder of the base model; None = the run's own.
        user: whose adapters, where each user has their own; empty = those of all added up.

    Raises:
        RingTuneError: what went wrong in the process.
        DeadlineError: it took too long.
    """
    _start(run, target, [*(["--model", str(model)] if model is not None else []), *(["--user", user] if user else [])])


def sum_into(run: SavedRun, target: Path) -> None:
    """Write the adapters of all users of a run added up, as the folder of one adapter.

    Raises:
        RingTuneError: what went wrong in the process.
        DeadlineError: it took too long.
    """
    _start(run, target, ["--sum"])


def _start(run: SavedRun, target: Path, more: Sequence[str]) -> None:
    command = [sys.executable, "-P", "-m", "edge.merge", str(run.folder), str(target), *more]
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command, capture_output=True, text=True, timeout=MERGE_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(f"the model is not merged after {MERGE_S:g} s; export on a faster disk") from error
    if done.returncode:
        raise exit_error("merging", done.returncode, done.stderr[-4096:], log=target)
