"""``ringtune.evaluate``: how good what a run has trained is on a file."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from coordinator.api.folders import RunLike, folder_of, python_words
from ringtune.trust.speaking import speaker, speaking_as


def evaluate(
    run: RunLike,
    data: str | PathLike[str] | None = None,
    *,
    coordinator: str = "",
    model: str | PathLike[str] | None = None,
    columns: Mapping[str, str] | None = None,
    missing: str = "",
    user: str = "",
    join_s: float = 60.0,
    insecure: bool = False,
) -> dict[str, Any]:
    """Evaluate the adapter or model of a run as ``ringtune eval`` does.

    Args:
        run: a run, or its folder.
        data: rows; they stay on this machine. None = the job's ``data.eval``, or with a coordinator what its nodes
            have for evaluation.
        coordinator: evaluate on the nodes of this one, ``host:port``; empty = in one process on this machine.
        model: folder of the base model on this machine; None = the job's ``model.path``.
        columns: names of columns by key of ``[data]``, where the file has others than the job.
        missing: ``skip`` leaves rows with an empty cell out, ``error`` refuses them; empty = as the job has it.
        user: whose adapters, where each user has their own.
        join_s: how long the process that is started here may take to join, in seconds.
        insecure: whether the coordinator may be on another machine, without encryption.

    Returns:
        ``count``, ``loss``, ``accuracy`` and whatever else the task counts.

    Raises:
        RingTuneError: whatever it failed with.
    """
    from coordinator.export.users import adapter_of, require_user
    from coordinator.run_folder.saved_run import read_run, with_data
    from coordinator.screen.progress import Progress
    from coordinator.submit.evaluation import evaluate_alone, evaluate_on_ring, rows_to_evaluate

    with python_words():
        saved = with_data(read_run(folder_of(run)), columns or {}, missing)
        require_user(saved, user)
        given = Path(data) if data is not None else None
        rows = rows_to_evaluate(given, saved.job.data, on_ring=bool(coordinator))
    base = Path(model) if model is not None else None
    with python_words(), speaking_as(speaker() if coordinator else None), adapter_of(saved, user) as chosen:
        if not coordinator:
            return evaluate_alone(chosen, rows or Path(), progress=Progress(), join_s=join_s, model=base)
        return evaluate_on_ring(
            chosen, rows, coordinator, progress=Progress(), join_s=join_s, model=base, insecure=insecure
        )
