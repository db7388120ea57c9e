"""Show what a run said: the events that a coordinator keeps, or the file into which a detached local run prints."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from coordinator.run_folder.folder import LOG
from coordinator.run_folder.place import RunPlace, is_running
from coordinator.screen.progress import Progress
from coordinator.submit.connection import Connection
from coordinator.submit.outcome import Outcome
from coordinator.submit.shown_events import ShownEvents
from ringtune.errors import UsageError
from ringtune.jobs.job import parse_job

_POLL_S = 0.5
_PIECE_BYTES = 1 << 16


def show_events(client: Connection, run_id: str, *, follow: bool, progress: Progress) -> Outcome | None:
    """Show the events of a run as the command shows them that follows it from its start.

    Args:
        client: of the coordinator.
        run_id: of the run.
        follow: until the run is over; else those that are there.
        progress: where they are shown.

    Returns:
        What has come of the run so far; None if it has not begun.

    Raises:
        RingTuneError: there is no such run, or the connection is lost.
    """
    outcome: Outcome | None = None
    for event in client.events(run_id, wait=follow, whole=False, with_files=False):
        if event.WhichOneof("event") == "job_toml":
            outcome = Outcome(parse_job(event.job_toml, source=f"run {run_id}"))
        if outcome is not None:
            outcome(event)
            ShownEvents(progress, outcome)(event)
    if outcome is not None and outcome.error is not None:
        progress.note(f"the run ended: {outcome.error}")
    return outcome


def show_file(folder: Path, place: RunPlace, *, follow: bool) -> None:
    """Show what a detached local run printed.

    Args:
        folder: of the run.
        place: which process prints.
        follow: until the process has ended; else what is there.

    Raises:
        UsageError: the run was not detached.
    """
    path = folder / LOG
    if not path.is_file():
        raise UsageError(f"{path} is not there: the run was not detached, so it speaks in its own terminal")
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            goes_on = follow and is_running(place.pid)
            while piece := file.read(_PIECE_BYTES):
                typer.echo(piece, nl=False)
            if not goes_on:
                return
            time.sleep(_POLL_S)
