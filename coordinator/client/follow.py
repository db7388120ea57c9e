"""Followers of a run's events: its outcome, its steps on the screen, and the return to a lost coordinator.

::

    the stream of events breaks --> ask until the coordinator answers, for ``wait_s`` at most
        the run continues, or is over   --> read the missing events, and continue
        the run was interrupted         --> read the missing events, then those of the run that resumes it
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from coordinator.client.connection import Connection
from coordinator.client.run_folder import LOG, RunFolder
from coordinator.client.saved_run import RunLocation, is_running
from coordinator.planner.make_plan import plan_memory
from coordinator.run.run_text import STEP_KIND
from coordinator.screen.progress import Progress
from coordinator.server.restart import resumed_by
from coordinator.server.run_record import RunRecord
from ringtune.costs.measurement import REHEARSAL_S
from ringtune.costs.profile import Profile
from ringtune.errors import ConnectionFailedError, RingTuneError, UsageError, error_from_name
from ringtune.job.job import Job, parse_job
from ringtune.schedule.placement import Placement
from ringtune.schedule.plan import Plan
from ringtune.storage.strict import read_object
from ringtune.texts import inert
from ringtune.v1 import control_pb2


class Outcome:
    """The state of a run, from its events.

    Attributes:
        is_kept: whether the coordinator stores the run, which continues without its submitter.
        memory: needs of each node in bytes, once there is a plan.
        has_begun: set as soon as the id of the run is known, or is known never to be.
    """

    def __init__(self, job: Job) -> None:
        self.run_id = ""
        self.has_begun = threading.Event()
        self.is_kept = False
        self.phase = ""
        self.plan: Plan | None = None
        self.profile: Profile | None = None
        self.memory: dict[str, int] = {}
        self.report: dict[str, Any] = {}
        self.notes: list[str] = []
        self.error: RingTuneError | None = None
        self._job = job
        self.is_done = False

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Take one event. Raises ``RingTuneError``: the event is not readable."""
        match event.WhichOneof("event"):
            case "run_id":
                self.run_id = event.run_id
                self.has_begun.set()
            case "kept":
                self.is_kept = event.kept
            case "state":
                self.phase = event.state
            case "profile_json":
                self.profile = Profile.from_json(read_object(event.profile_json, "the profile"))
            case "plan_json":
                self.plan = Plan.from_json(read_object(event.plan_json, "the plan"))
                if self.profile is not None:
                    memory = plan_memory(self._job, self.plan, self.profile.by_name)
                    self.memory = {node: estimate.total_bytes for node, estimate in memory.items()}
            case "note":
                self.notes.append(event.note)
            case "report_json":
                self.report = read_object(event.report_json, "the report")
            case "failure":
                self.error = error_from_name(event.failure.error, event.failure.message)
            case "done":
                self.is_done = True

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, well or not."""
        return self.is_done or self.error is not None

    def require_end(self) -> None:
        """Refuse a run that did not end well.

        Raises:
            RingTuneError: the run failed.
            ConnectionFailedError: the events stopped before the end of the run.
        """
        if self.error is not None:
            raise self.error
        if not self.is_done:
            raise ConnectionFailedError("the coordinator ended before the run did; see its log and repeat the run")


class ShownEvents:
    """Shows events on ``progress``; ``outcome`` must have got the same event before."""

    def __init__(self, progress: Progress, outcome: Outcome) -> None:
        self._progress, self._outcome = progress, outcome
        self._placement: Placement | None = None  # that is shown, of the present run

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Show one event. Raises ``IntegrityError``: the event is not readable."""
        match event.WhichOneof("event"):
            case "run_id":
                self._placement = None
            case "state":
                self._progress.state(event.state)
            case "plan_json" if (plan := self._outcome.plan) is not None:  # of a recovery or a move: the newest one
                self._show_plan(plan if self._placement is None else plan.parts[-1])
            case "step_json":
                self._progress.item(read_object(event.step_json, "a step"))
            case "note":
                self._progress.note(event.note)
            case "resumed_json":
                self._show_resumed(read_object(event.resumed_json, "the step where the run continues"))
            case "done" if self._outcome.report:
                self._progress.report(self._outcome.report)

    def _show_plan(self, plan: Plan) -> None:
        self._placement = plan.placement
        self._progress.plan(plan, self._outcome.memory)

    def _show_resumed(self, resumed: dict[str, Any]) -> None:
        for reason in resumed["passed_over"]:
            self._progress.note(str(reason))
        step, plan = int(resumed["step"]), self._outcome.plan
        if plan is not None and (part := plan.after(step)).placement != self._placement:
            self._progress.note(f"resuming after step {step}, in placement {part.placement.placement_number}:")
            self._show_plan(part)
        else:
            self._progress.note(f"resuming after step {step}")


class RehearsalLimit:
    """An event sink that ends a rehearsal after so many steps, or after ``REHEARSAL_S`` seconds of training.

    Args:
        end: ends the run with this id.
    """

    def __init__(
        self, num_steps: int, end: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_enough = False
        self._left = num_steps
        self._end = end
        self._clock = clock
        self._run_id = ""
        self._until_s = float("inf")

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Take one event."""
        match event.WhichOneof("event"):
            case "run_id":
                self._run_id = event.run_id
            case "state" if event.state == "training":
                self._until_s = self._clock() + REHEARSAL_S
            case "step_json":
                self._left -= read_object(event.step_json, "a step").get("kind") == STEP_KIND
        if not self.is_enough and (self._left <= 0 or self._clock() > self._until_s):
            self.is_enough = True
            self._end(self._run_id)


class FollowerState:
    """The state of a follower of a stored run, from the run's events.

    Args:
        outcome: of the run, which gets all events.
        folder: of the run; None = no files.
        submission: identifies the run where its id has not arrived.
        say: takes a line for the user.

    Attributes:
        is_left: whether the coordinator is back and does not resume the run.
    """

    def __init__(
        self,
        client: Connection,
        outcome: Outcome,
        folder: RunFolder | None,
        *,
        submission: str,
        say: Callable[[str], None],
    ) -> None:
        self.is_left = False
        self.submission = submission
        self._client, self._outcome, self._folder, self._say = client, outcome, folder, say
        self._run_id = ""
        self._num_heard = 0

    def __call__(self, event: control_pb2.RunEvent) -> None:
        """Count an event if it is stored with the run."""
        match event.WhichOneof("event"):
            case "kept":
                return
            case "run_id":
                self._run_id, self._num_heard = event.run_id, 0
        self._num_heard += 1

    @property
    def may_continue(self) -> bool:
        """Whether the run may continue without its follower: it is stored, or no event of it has arrived."""
        return not self._outcome.is_over and (self._outcome.is_kept or not self._num_heard)

    def go_on(self, wait_s: float, hear: Callable[[Iterable[control_pb2.RunEvent]], object]) -> None:
        """Follow the run to its end, however often the connection breaks.

        Args:
            wait_s: time limit for the coordinator's return each time, in seconds.
            hear: takes events until they end or the run is over.

        Raises:
            ConnectionFailedError: the coordinator was not back in time, or does not resume the run.
            RingTuneError: the run can't be followed any more.
        """
        while not self._outcome.is_over:
            self._await(wait_s)
            try:
                self._run_id = self._run_id or self._find()
                if self._run_id in self._client.records():  # one that began anew as another may be dropped
                    events = self._client.events(self._run_id, wait=True, whole=False, with_files=True)
                    hear(itertools.islice(events, self._num_heard, None))
                records = self._client.records()
            except ConnectionFailedError:
                if self.is_left:
                    raise
                continue
            if not self._outcome.is_over:
                self._turn_to(records)

    def _await(self, wait_s: float) -> None:
        address = self._client.address

        def say() -> None:
            self._say(f"coordinator {address} does not answer; waiting up to {wait_s:g} s until it does")

        if not self._client.await_answer(wait_s, on_silence=say):
            self._say(f"coordinator {address} answers again")

    def _find(self) -> str:
        """Find the run by its submission, before its id has arrived."""
        if run_id := self._client.run_of(self.submission):
            return run_id
        self.is_left = True
        raise ConnectionFailedError(f"coordinator {self._client.address} has not begun the run; submit it again")

    def _turn_to(self, records: Mapping[str, RunRecord]) -> None:
        """Follow the run that took up the present one from now on."""
        after, before = resumed_by(records, self._run_id), records.get(self._run_id)
        if after is None:
            self.is_left = True
            raise ConnectionFailedError(
                f"coordinator {self._client.address} ended before run {self._run_id} did, and does not resume it "
                "by itself: its first output lines give the reason"
            )
        is_anew = after.first_run == after.run_id
        self._say(
            f"run {self._run_id} was interrupted{f': {before.message}' if before else ''}; run {after.run_id} "
            + (
                "starts from the beginning, as there was no checkpoint"
                if is_anew
                else "resumes from the state that its nodes have saved"
            )
        )
        if is_anew and self._folder is not None:
            aside = self._folder.begin_anew()
            if aside is not None:
                self._say(f"its earlier files are in {aside}")
        self._run_id, self._num_heard = after.run_id, 0


_POLL_S = 0.5
_PIECE_BYTES = 1 << 16


def show_events(client: Connection, run_id: str, *, follow: bool, progress: Progress) -> Outcome | None:
    """Show the events of a run as its own command does; return the outcome so far, None if it has not begun.

    ``follow``: until the end of the run, or of that which takes it up; else the present events.

    Raises ``RingTuneError``: unknown run, or the connection is lost.
    """
    outcome: Outcome | None = None
    after = run_id
    while after:
        for event in client.events(after, wait=follow, whole=False, with_files=False):
            if event.WhichOneof("event") == "job_toml":
                outcome = Outcome(parse_job(event.job_toml, source=f"run {after}"))
            if outcome is not None:
                outcome(event)
                ShownEvents(progress, outcome)(event)
        records = {} if (outcome is not None and outcome.is_over) or not follow else client.records()
        resuming = resumed_by(records, after)
        after = resuming.run_id if resuming is not None else ""
    if outcome is not None and outcome.error is not None:
        progress.note(f"the run ended: {outcome.error}")
    return outcome


def show_file(folder: Path, place: RunLocation, *, follow: bool) -> None:
    """Print the log of a detached local run; with ``follow`` until its process has ended.

    Raises ``UsageError``: the run was not detached.
    """
    path = folder / LOG
    if not path.is_file():
        raise UsageError(f"{path} is not there: the run was not detached, so its output is in its own terminal")
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            goes_on = follow and is_running(place.pid)
            while piece := file.read(_PIECE_BYTES):
                sys.stdout.write(inert(piece))  # the folder may be of another machine
                sys.stdout.flush()
            if not goes_on:
                return
            time.sleep(_POLL_S)
