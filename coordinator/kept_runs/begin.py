"""Begin the record of a run from what was asked for."""

from __future__ import annotations

from pathlib import PurePath

from coordinator.drive.requests import RunRequest
from coordinator.kept_runs.record import RunRecord
from ringtune.models.hub import name_of_folder


def record_of(run_id: str, request: RunRequest, now_unix_s: float, *, takes_up: str = "") -> RunRecord:
    """Make the record of a run that begins; ``takes_up`` is the interrupted one that it goes on with, if any."""
    return RunRecord(
        run_id=run_id,
        first_run=request.resume.run_id if request.resume else run_id,
        model=name_of_folder(PurePath(request.job.model.path)),
        method=request.job.train.method,
        submitted_by=request.submitted_by,
        started_unix_s=now_unix_s,
        saved_step=request.resume.saved_step if request.resume else -1,
        kept_step=request.resume.manifests[0].step if request.resume else -1,
        takes_up=takes_up,
        submission=request.submission,
    )
