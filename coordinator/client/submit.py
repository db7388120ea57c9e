"""Submission of a run: start, folder, progress, and the end by a signal.

Ctrl-C drains a run, a second Ctrl-C ends it at once; SIGTERM and a closed terminal (SIGHUP) count as Ctrl-C. Writes to
a closed terminal fail, so later output goes to a file.

A signal handler runs between any two instructions of the main thread, so it only starts a thread or raises.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import grpc

from coordinator.client.connection import CALL_S, Connection, submitter_name
from coordinator.client.follow import FollowerState, Outcome, RehearsalLimit, ShownEvents
from coordinator.client.run_folder import RunFolder
from coordinator.planner.limits import NO_CHOICES, Choices
from coordinator.run.events import EventSink
from coordinator.run.requests import MeasureRequest, RunRequest, run_request_messages
from coordinator.run.result_files import saved_files
from coordinator.screen.progress import Progress
from ringtune.costs.measurement import rehearsal_of, rehearsal_steps, rehearsed
from ringtune.costs.profile import Profile
from ringtune.errors import ConnectionFailedError, IntegrityError, InterruptedRunError, RingTuneError, UsageError
from ringtune.hints import hint
from ringtune.job.job import Job, result_of
from ringtune.machine.process import end_within, handled, unbreakable_stream
from ringtune.schedule.plan import Plan
from ringtune.storage.chunks import cut_pieces
from ringtune.v1 import control_pb2

GRACE_S = 30.0
"""Time limit for the end of a command after a second signal, whatever its threads wait for."""


class Interrupts:
    """Handler of SIGINT, SIGTERM and SIGHUP in its context; without effect beside the main thread, which gets signals.

    Args:
        log: gets the output after the terminal was closed; None, or a file that can't be written = it is dropped.
    """

    def __init__(self, log: Path | None = None) -> None:
        self._log = log
        self._ask: Callable[[], None] | None = None
        self._terminals: list[int] = []
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Interrupts:
        """Install the handlers, and note which outputs are terminals."""
        if threading.current_thread() is not threading.main_thread():
            return self
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        if self._terminals:
            self._undo.enter_context(contextlib.redirect_stdout(unbreakable_stream(sys.stdout)))
            self._undo.enter_context(contextlib.redirect_stderr(unbreakable_stream(sys.stderr)))
        self._undo.enter_context(handled(self._on_signal))
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the former handlers and outputs; those of a closed terminal stay redirected."""
        self._undo.close()

    @contextmanager
    def asking(self, ask: Callable[[], None]) -> Iterator[None]:
        """Let the first signal in this context call ``ask`` on a new thread, and the second one raise.

        ``ask`` requests an orderly end; it may take a while, and must not raise.
        """
        self._ask = ask
        try:
            yield
        finally:
            self._ask = None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._terminals:
            target = self._open_log()
            for terminal in self._terminals:
                os.dup2(target, terminal)
            os.close(target)
        ask, self._ask = self._ask, None
        if ask is None:
            end_within(GRACE_S, InterruptedRunError.exit_code)
            raise KeyboardInterrupt
        threading.Thread(target=ask, name="drain", daemon=True).start()

    def _open_log(self) -> int:
        if self._log is not None:
            with contextlib.suppress(OSError):
                return os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        return os.open(os.devnull, os.O_WRONLY)


_LOG = logging.getLogger(__name__)
_LOOK_S = 0.2
_DRAINING = "stopping after the turns that train now, with a checkpoint; Ctrl-C again stops at once"
_NOTHING_YET = "stopping; nothing is being trained now, so no checkpoint is added"


class Client(Connection):
    """A connection that submits and follows runs.

    Attributes:
        goes_on: whether the followed run continues after the command has stopped following it.

    Raises:
        RingTuneError: as ``Connection``.
    """

    def __init__(self, address: str, *, insecure: bool | None = None) -> None:
        super().__init__(address, insecure=insecure)
        self.goes_on = False
        self._notes = set[Any]()

    def run(
        self,
        request: RunRequest,
        *,
        progress: Progress,
        folder: RunFolder | None,
        interrupts: Interrupts | None = None,
        sinks: Sequence[EventSink] = (),
        coordinator_wait_s: float = 0.0,
    ) -> Outcome:
        """Start or resume a run, and follow it to its end.

        The job's paths have to be valid on the nodes; ``folder`` = None: no files. ``interrupts`` drains the
        run at the first Ctrl-C; None = Ctrl-C ends it at once. ``sinks`` are further readers of the run's
        events. A coordinator that stores the run has ``coordinator_wait_s`` seconds to return.

        Raises:
            InterruptedRunError: Ctrl-C.
            RingTuneError: the run failed.
        """
        outcome = Outcome(request.job)
        if folder is not None:
            folder.on_saved = self._note_saved
        files = [folder.take] if folder is not None else []
        with (interrupts or Interrupts()).asking(lambda: self._drain(outcome, progress)):
            request = request._replace(submission=secrets.token_hex(8))
            following = FollowerState(self, outcome, folder, submission=request.submission, say=progress.note)
            heard_by: tuple[EventSink, ...] = (following, *files, ShownEvents(progress, outcome), *sinks)
            try:
                self._follow_run(self._submit(request), outcome, heard_by, following, coordinator_wait_s)
            finally:
                outcome.has_begun.set()  # or never will
        return outcome

    def start(self, request: RunRequest) -> str:
        """Start a run without following it; return its id as soon as it trains.

        Raises:
            InterruptedRunError: Ctrl-C before it trains.
            RingTuneError: the coordinator stores no runs, or the run failed before it trained.
        """
        request = request._replace(submission=secrets.token_hex(8))
        call = self._submit(request)
        outcome = Outcome(request.job)
        try:
            self._checked(lambda: _hear_until_it_trains(call, outcome))
            return outcome.run_id
        except KeyboardInterrupt as error:
            if run_id := outcome.run_id or self._begun(call, request.submission):
                self._stop_at_once(run_id)
            raise InterruptedRunError("stopped before it trained; nothing is saved") from error
        finally:
            call.cancel()

    def _begun(self, call: Any, submission: str) -> str:
        """Wait for the id of a submitted run that is stored; empty if the call ends first.

        Raises ``InterruptedRunError``: the coordinator has not begun the run within ``CALL_S`` seconds.
        """
        end_s = time.monotonic() + CALL_S
        try:
            while call.is_active() and time.monotonic() < end_s:
                if run_id := self.run_of(submission):
                    return run_id
                time.sleep(_LOOK_S)
        except RingTuneError:  # as where no runs are stored: they end with their call
            return ""
        if not call.is_active():
            return ""
        words = [hint(*words, coordinator=self.address) for words in (("runs",), ("stop", "RUN"))]
        raise InterruptedRunError(
            f"stopped here, but coordinator {self.address} has not begun the run within {CALL_S:g} s; if '{words[0]}' "
            f"lists it later, end it with '{words[1]}'"
        )

    def _submit(self, request: RunRequest) -> Any:
        """Begin the call of a run, without a deadline: a run may take days, and keepalive finds a dead coordinator."""
        return self._stub.Run(run_request_messages(request._replace(submitted_by=submitter_name())))

    def _follow_run(
        self, call: Any, outcome: Outcome, sinks: Sequence[EventSink], following: FollowerState, wait_s: float
    ) -> None:
        try:
            self._follow_stored(call, outcome, sinks, following, wait_s)
        except RingTuneError as error:
            if not outcome.is_kept or outcome.error is not None or not outcome.run_id or following.is_left:
                raise
            if isinstance(error, InterruptedRunError):  # the run does not end with the call
                self._stop_at_once(outcome.run_id)
                raise
            self.goes_on = True
            raise type(error)(f"{error}. {self._reattach_hint(outcome.run_id)}") from error
        finally:
            if outcome.is_kept and outcome.is_over:
                self.fetched(outcome.run_id)

    def _follow_stored(
        self, call: Any, outcome: Outcome, sinks: Sequence[EventSink], following: FollowerState, wait_s: float
    ) -> None:
        """Follow a run; continue after a lost connection once the coordinator is back."""
        try:
            self._follow(call, outcome, *sinks, submission=following.submission)
        except ConnectionFailedError as error:
            if not (following.may_continue and (wait_s or outcome.is_kept)):
                raise
            _LOG.info("the connection with the coordinator broke: %s", error)
            try:
                following.go_on(wait_s, lambda events: _hear(events, outcome, sinks))
            except KeyboardInterrupt as interrupt:
                raise InterruptedRunError("stopped by the user") from interrupt
            outcome.require_end()

    def _stop_at_once(self, run_id: str) -> None:
        try:
            self.stop_run(run_id, "stopped by the user", now=True)
        except RingTuneError as error:
            self.goes_on = True
            come_back = self._reattach_hint(run_id)
            raise InterruptedRunError(f"stopped here, but not at the coordinator: {error}. {come_back}") from error

    def _reattach_hint(self, run_id: str) -> str:
        words = [hint(*words, coordinator=self.address) for words in (("logs", run_id, "--follow"), ("fetch", run_id))]
        return (
            f"Run {run_id} continues without this command; follow it with '{words[0]}', "
            f"fetch its files with '{words[1]}'"
        )

    def measure(self, request: MeasureRequest, *, progress: Progress) -> Profile:
        """Make the nodes measure themselves and their links; the job's paths have to be valid on the nodes.

        Raises:
            InterruptedRunError: Ctrl-C.
            RingTuneError: the measurement failed.
        """
        message = control_pb2.MeasureRequest(
            job_toml=request.job.to_toml(),
            num_nodes=request.num_nodes,
            join_s=request.join_s,
            without_links=not request.with_links,
            fresh=request.is_fresh,
            one_by_one=request.one_by_one,
        )
        outcome = Outcome(request.job)
        profile = self._follow(self._stub.Measure(message), outcome, ShownEvents(progress, outcome)).profile
        if profile is None:
            raise IntegrityError("the coordinator sent no profile; use one version on all machines")
        return profile

    def rehearse(self, job: Job, profile: Profile, *, progress: Progress, num_nodes: int, join_s: float) -> Profile:
        """Train some steps of a job without keeping the result; return the corrected profile.

        See ``ringtune.costs.measurement``. If the rehearsal fails, that is shown and the profile returned unchanged.

        Raises ``InterruptedRunError``: Ctrl-C.
        """
        num_blocks = profile.nodes[0].model.num_blocks
        short = rehearsal_of(job, num_blocks)
        sink = RehearsalLimit(rehearsal_steps(job, num_blocks), self._end_rehearsal)
        request = RunRequest(job=short, num_nodes=num_nodes, join_s=join_s, profile=profile, is_rehearsal=True)
        outcome = Outcome(short)
        progress.note("rehearsing: some steps, whose results are discarded")
        try:
            self._follow(self._submit(request), outcome, sink)
        except RingTuneError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise
            if not (sink.is_enough and isinstance(error, InterruptedRunError)):
                progress.note(f"the rehearsal failed, so the times are as they were measured before it: {error}")
                return profile
        return rehearsed(profile, outcome.profile) if outcome.profile is not None else profile

    def _end_rehearsal(self, run_id: str) -> None:
        try:
            self.stop_run(run_id, "it is rehearsed", now=True)
        except RingTuneError as error:  # it is over: its last event says why
            _LOG.info("rehearsal %s was not asked to end: %s", run_id, error)

    def plan(
        self,
        job: Job,
        *,
        progress: Progress | None = None,
        num_nodes: int,
        join_s: float,
        choices: Choices = NO_CHOICES,
    ) -> tuple[Plan, Profile, tuple[str, ...]]:
        """Let the nodes measure themselves, and plan for them (see ``run``): plan, profile and notes.

        Raises ``RingTuneError``: inspection or planning failed.
        """
        request = RunRequest(job=job, plan_only=True, num_nodes=num_nodes, join_s=join_s, choices=choices)
        came = self.run(request, progress=progress or Progress(), folder=None)
        if came.plan is None or came.profile is None:
            raise IntegrityError("the coordinator sent no plan; use one version on all machines")
        return came.plan, came.profile, tuple(came.notes)

    def _drain(self, outcome: Outcome, progress: Progress) -> None:
        progress.note(_DRAINING if outcome.phase == "training" else _NOTHING_YET)
        if outcome.has_begun.wait(CALL_S) and not outcome.run_id:
            return  # the run was refused
        request = control_pb2.DrainRequest(run_id=outcome.run_id, reason="stopped by the user")
        try:
            self._stub.Drain(request, timeout=CALL_S)
        except ValueError as error:  # of gRPC: the run has ended meanwhile, and the connection is closed
            _LOG.info("the coordinator is not asked to end a run that has ended: %s", error)
        except grpc.RpcError as error:
            _LOG.info("the coordinator was not asked to end the run: %s", error)
            if error.code() not in _IS_OVER:
                progress.note("the coordinator can't be asked to end the run; Ctrl-C again stops at once")

    def _note_saved(self, run_id: str, step: int) -> None:
        """Tell the coordinator that the manifest of ``step`` is on disk, without waiting for the answer."""
        note = self._stub.Noted.future(control_pb2.CheckpointNoted(run_id=run_id, step=step), timeout=CALL_S)
        self._notes.add(note)  # gRPC cancels a call that nobody refers to
        note.add_done_callback(self._notes.discard)

    def evaluate(self, job: Job, *, owner: str, saved: Path, progress: Progress) -> Outcome:
        """Evaluate a saved adapter or model on the nodes, and follow the evaluation to its end.

        ``owner`` is the member with the evaluated rows; empty = all with evaluation rows.

        Raises ``RingTuneError``: the evaluation failed.
        """
        request = control_pb2.EvaluateRequest(job_toml=job.to_toml(), owner=owner)

        def inputs() -> Iterator[control_pb2.EvaluateInput]:
            yield control_pb2.EvaluateInput(request=request)
            for name, content in saved_files(saved, result_of(job)).items():
                for chunk in cut_pieces(name, content):
                    yield control_pb2.EvaluateInput(file=chunk)

        outcome = Outcome(job)
        return self._follow(self._stub.Evaluate(inputs()), outcome, ShownEvents(progress, outcome))

    def _follow(self, call: Any, outcome: Outcome, *sinks: EventSink, submission: str = "") -> Outcome:
        """Follow a call to its end; a run with this ``submission`` may be stored before its first event arrives."""
        try:
            self._checked(lambda: _hear(self.heard(call), outcome, sinks))
            outcome.require_end()
        except KeyboardInterrupt as error:
            if submission and not outcome.run_id and (run_id := self._begun(call, submission)):
                self._stop_at_once(run_id)
            raise InterruptedRunError("stopped; every node was asked to release the run") from error
        finally:
            call.cancel()
        return outcome


_IS_OVER: Final = (grpc.StatusCode.CANCELLED, grpc.StatusCode.FAILED_PRECONDITION)
"""A run that is to be drained has ended: the command closes its connection, or the coordinator drives it no more."""


def _hear_until_it_trains(call: Any, outcome: Outcome) -> None:
    for event in call:
        outcome(event)
        if not outcome.is_kept:
            raise UsageError(
                "this coordinator stores no runs, so a run can't continue without the command that submitted it"
            )
        if outcome.error is not None:
            raise outcome.error
        if outcome.phase == "training":
            break


def _hear(call: Iterable[control_pb2.RunEvent], outcome: Outcome, sinks: Sequence[EventSink]) -> None:
    """Pass every event to the outcome first, then to the sinks.

    Raises ``IntegrityError``: one lacks a field, or has another thing there.
    """
    for event in call:
        try:
            outcome(event)
            for sink in sinks:
                sink(event)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            what = f"{event.WhichOneof('event')} that is not readable ({type(error).__name__}: {error})"
            raise IntegrityError(f"the coordinator sent {what}; use one version on all machines") from error
        if outcome.error is not None:
            break
