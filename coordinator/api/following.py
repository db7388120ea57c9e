"""Follow a run that goes on by itself, tell how it stands, and stop it.

::

    a local run        a process of its own: its folder grows, and its coordinator answers as long as it lives
    any other run      a coordinator keeps it: its events are heard, its files are fetched at the end
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coordinator.api.showing import choose_progress
from coordinator.kept_runs.taking_up import last_of
from coordinator.records.step_lines import STEP_KIND
from coordinator.run_folder.folder import LOG
from coordinator.run_folder.metrics_lines import read_metrics
from coordinator.run_folder.place import PLACE, RunPlace, is_running, read_place
from coordinator.run_folder.saved_run import read_json
from coordinator.screen.progress import Progress
from coordinator.submit.connection import Connection
from coordinator.submit.detached import ended_error
from coordinator.submit.fetching import fetch_run, kept_record
from coordinator.submit.run_log import show_events
from coordinator.submit.shown_events import show_step
from coordinator.submit.stopping import stop_run
from ringtune.errors import ConnectionFailedError, DeadlineError, UsageError
from ringtune.schedule.plan import Plan
from ringtune.trust.speaking import speaker, speaking_as

if TYPE_CHECKING:
    import subprocess

DONE, RUNNING, STOPPED = "done", "running", "stopped"
_POLL_S: Final = 0.2
_SHOWN: Final = (STEP_KIND, "evaluation", "unfreeze", "operations")
_UNKNOWN_CODE: Final = 1


@dataclass(slots=True)
class Left:
    """A run that may go on by itself.

    Attributes:
        folder: of the run.
        insecure: whether its coordinator may be on another machine, without encryption.
        process: that trains, where this one has started it.
    """

    folder: Path
    insecure: bool = False
    process: subprocess.Popen[bytes] | None = None

    @property
    def report(self) -> dict[str, Any]:
        """The totals of a run that is done; empty before."""
        path = self.folder / "report.json"
        return read_json(path) if path.is_file() else {}

    @property
    def place(self) -> RunPlace:
        """Where the run is driven.

        Raises:
            UsageError: the folder does not tell.
        """
        place = read_place(self.folder)
        if place is None:
            raise UsageError(f"{self.folder} does not tell where its run is driven; it has not begun, or is old")
        return place

    @property
    def has_place(self) -> bool:
        """Whether the folder tells where the run is driven; one of 0.1 does not."""
        return (self.folder / PLACE).is_file()


def state_of(run: Left) -> str:
    """Tell whether a run is ``running``, ``done`` or ``stopped``.

    Raises:
        RingTuneError: its coordinator can't be asked.
    """
    if not run.has_place:
        return DONE if run.report else STOPPED
    place = run.place
    if _is_done(run, place):
        return DONE
    if place.is_local and not is_running(place.pid):
        return STOPPED
    with _connected(run, place) as client:
        if client is None:
            return STOPPED
        status = client.status().run
        return RUNNING if status.run_id == place.run_id and not status.is_over else STOPPED


def follow(run: Left, *, progress: bool) -> None:
    """Wait for the end of a run, and show what it does.

    Raises:
        RingTuneError: whatever it ended with.
    """
    if not run.has_place and run.report:
        return
    place = run.place
    if _is_done(run, place):
        return
    with choose_progress(progress) as shown:
        if place.is_local:
            _follow_process(run, place, shown)
        else:
            _follow_kept(run, place, shown)


def stop(run: Left, *, now: bool, wait_s: float) -> None:
    """Stop a run, and wait until its files are written.

    Raises:
        UsageError: it is not under way.
        DeadlineError: it goes on for longer than ``wait_s`` seconds.
    """
    place, deadline_s = run.place, time.monotonic() + wait_s
    with _connected(run, place) as client:
        if client is None:
            raise UsageError(f"the run in {run.folder} is not under way")
        stop_run(client, place.run_id, now=now, wait_s=wait_s)
        if not place.is_local:
            fetch_run(client, kept_record(client, place.run_id), run.folder, replace=True)
            return
    while place.pid != os.getpid() and _code_of(run, place) is None:
        if time.monotonic() >= deadline_s:
            raise DeadlineError(f"process {place.pid} of the run in {run.folder} has not ended within {wait_s:g} s")
        time.sleep(_POLL_S)


def _is_done(run: Left, place: RunPlace) -> bool:
    """Whether the report in the folder is that of the run; one of an earlier part of it is another's."""
    return run.report.get("run_id") == place.run_id


def _follow_process(run: Left, place: RunPlace, shown: Progress) -> None:
    """Show what a local run adds to its metrics, until its process has ended."""
    plan = Plan.from_json(read_json(run.folder / "plan.json"))
    shown.plan(plan, {})
    num_shown, code = 0, None
    while code is None:
        code = _code_of(run, place)
        lines = read_metrics(run.folder)
        for line in lines[num_shown:]:
            if line.get("kind") in _SHOWN:
                show_step(shown, {"num_steps": plan.course.num_steps, "kind": STEP_KIND, **line})
        num_shown = len(lines)
        if code is None:
            time.sleep(_POLL_S)
    if not _is_done(run, place):
        raise ended_error(code or _UNKNOWN_CODE, run.folder / LOG)
    shown.report(run.report)


def _code_of(run: Left, place: RunPlace) -> int | None:
    """Exit code of a local run's process; None while it runs. Of a process that is not ours it is not known."""
    if run.process is not None:
        return run.process.poll()
    return None if is_running(place.pid) else _UNKNOWN_CODE


def _follow_kept(run: Left, place: RunPlace, shown: Progress) -> None:
    with _connected(run, place) as client:
        if client is None:
            raise ConnectionFailedError(
                f"coordinator {place.coordinator} does not answer; its run may go on: wait again"
            )
        run_id = last_of({record.run_id: record for record in client.runs()}, place.run_id)
        outcome = show_events(client, run_id, follow=True, progress=shown)
        fetch_run(client, kept_record(client, run_id), run.folder, replace=True)
    if outcome is not None:
        outcome.require_end()


@contextmanager
def _connected(run: Left, place: RunPlace) -> Iterator[Connection | None]:
    """Connect to the coordinator of a run; None if a local one has ended."""
    with speaking_as(None if place.is_local else speaker()):
        try:
            client = Connection(place.coordinator, insecure=None if place.is_local else run.insecure)
        except ConnectionFailedError:
            if not place.is_local:
                raise
            yield None
            return
        with client:
            yield client
