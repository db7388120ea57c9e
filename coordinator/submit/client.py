"""Submit a run: start it on a coordinator, write its folder, show its progress."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc

from coordinator.planner.alternatives import NO_CHOICES, Choices
from coordinator.planner.given_plan import GivenPlan
from coordinator.records.events import EventSink
from coordinator.run_folder.event_files import EventFiles
from coordinator.run_folder.folder import RunFolder
from coordinator.screen.progress import Progress
from coordinator.submit.interrupts import Interrupts
from coordinator.submit.outcome import Outcome
from coordinator.submit.shown_events import ShownEvents
from ringtune.costs.profile import Profile
from ringtune.errors import ConnectionFailedError, IntegrityError, InterruptedRunError
from ringtune.files.chunks import ADAPTER_FILES, cut_folder
from ringtune.hints import hint_to_start_coordinator
from ringtune.jobs.job import Job
from ringtune.rounds.checkpoint import Resume
from ringtune.rpc.addresses import require_private
from ringtune.rpc.connections import open_channel
from ringtune.rpc.statuses import error_of_call
from ringtune.rpc.versions import require_compatible
from ringtune.schedule.plan import Plan
from ringtune.v1 import control_pb2, control_pb2_grpc

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
CONNECT_S = 5.0
_CALL_S = 10.0
_DRAINING = "stopping after the turns that are under way, with a checkpoint; Ctrl-C again stops at once"
_NOTHING_YET = "stopping; nothing is being trained now, so no checkpoint is added"


class Client:
    """A connection to a coordinator of a compatible version, checked when it is made.

    Args:
        address: ``host:port``.
        insecure: whether it may be on another machine, without encryption.

    Raises:
        UsageError: the address is no address, or leaves this machine without ``insecure``; or the versions differ.
        ConnectionFailedError: nobody answers there within a few seconds.
    """

    def __init__(self, address: str, *, insecure: bool = False) -> None:
        require_private(address, option="--coordinator", insecure=insecure)
        self._address = address
        self._channel = open_channel(address)
        self._stub = control_pb2_grpc.CoordinatorStub(self._channel)
        try:
            grpc.channel_ready_future(self._channel).result(timeout=CONNECT_S)
        except grpc.FutureTimeoutError as error:
            self.close()
            raise ConnectionFailedError(
                f"no coordinator answers at {address} (waited {CONNECT_S:g} s); start it there with "
                f"'{hint_to_start_coordinator(address)}', or correct --coordinator"
            ) from error
        try:
            require_compatible(f"coordinator {address}", self.status().version)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> Client:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self.close()

    def nodes(self) -> list[control_pb2.NodeEntry]:
        """List the coordinator's members."""
        return list(self._checked(lambda: self._stub.Nodes(control_pb2.Empty(), timeout=_CALL_S)).nodes)

    def status(self) -> control_pb2.StatusReply:
        """Ask where the run stands, and for the members."""
        return self._checked(lambda: self._stub.Status(control_pb2.Empty(), timeout=_CALL_S))

    def run(
        self,
        job: Job,
        *,
        progress: Progress,
        folder: RunFolder | None,
        plan_only: bool = False,
        num_nodes: int = 0,
        join_s: float = 60.0,
        resume: Resume | None = None,
        profile: Profile | None = None,
        plan: GivenPlan | None = None,
        choices: Choices = NO_CHOICES,
        interrupts: Interrupts | None = None,
        sinks: Sequence[EventSink] = (),
    ) -> Outcome:
        """Start a run, or go on with one, and follow it to its end.

        Args:
            job: what is wanted; its paths have to be right on the nodes.
            progress: where it is shown.
            folder: where its files go; None = nowhere.
            plan_only: stop after planning.
            num_nodes: wait until so many nodes have joined; 0 = take those that are there.
            join_s: how long to wait for them, seconds.
            resume: what to go on from; None = begin.
            profile: times to plan with; None = the nodes measure.
            plan: to carry out as it is; None = the coordinator plans.
            choices: what the planner may choose from.
            interrupts: asks the run to end in order at the first Ctrl-C; None = Ctrl-C ends it at once.
            sinks: further readers of the run's events.

        Raises:
            InterruptedRunError: Ctrl-C.
            RingTuneError: whatever the run failed with.
        """
        request = control_pb2.RunRequest(
            job_toml=job.to_toml(),
            plan_only=plan_only,
            num_nodes=num_nodes,
            join_s=join_s,
            resume_json=resume.to_text() if resume else "",
            profile_json=json.dumps(profile.to_json()) if profile else "",
            plan_json=json.dumps(plan.to_json()) if plan else "",
            microbatches=choices.microbatches,
            wire_dtypes=choices.wire_dtypes,
        )
        outcome = Outcome(job)
        files = [EventFiles(folder, on_saved=self._note_saved)] if folder is not None else []
        with (interrupts or Interrupts()).asking(lambda: self._drain(outcome, progress)):
            # no deadline: a run may take days; keepalive sees a dead coordinator
            return self._follow(self._stub.Run(request), outcome, *files, ShownEvents(progress, outcome), *sinks)

    def measure(
        self,
        job: Job,
        *,
        progress: Progress,
        num_nodes: int = 0,
        join_s: float = 60.0,
        with_links: bool = True,
        is_fresh: bool = False,
        one_by_one: bool = False,
    ) -> Profile:
        """Let the nodes measure themselves and their links.

        Args:
            job: for what; its paths have to be right on the nodes.
            progress: where it is shown.
            num_nodes: wait until so many nodes have joined; 0 = take those that are there.
            join_s: how long to wait for them, seconds.
            with_links: whether links are measured too.
            is_fresh: anew even where a node remembers.
            one_by_one: nodes of one machine one after another, not all at once.

        Raises:
            InterruptedRunError: Ctrl-C.
            RingTuneError: whatever it failed with.
        """
        request = control_pb2.MeasureRequest(
            job_toml=job.to_toml(),
            num_nodes=num_nodes,
            join_s=join_s,
            without_links=not with_links,
            fresh=is_fresh,
            one_by_one=one_by_one,
        )
        outcome = Outcome(job)
        found = self._follow(self._stub.Measure(request), outcome, ShownEvents(progress, outcome)).profile
        if found is None:
            raise IntegrityError("the coordinator sent no profile; use one version on all machines")
        return found

    def plan(
        self, job: Job, *, num_nodes: int, join_s: float, choices: Choices = NO_CHOICES
    ) -> tuple[Plan, Profile, str]:
        """Let the nodes measure themselves, and plan for them; see ``run``.

        Returns:
            The plan, the profile that it was made with, and what is to be said of it, if anything.

        Raises:
            RingTuneError: whatever inspecting or planning failed with.
        """
        came = self.run(
            job,
            progress=Progress(),
            folder=None,
            plan_only=True,
            num_nodes=num_nodes,
            join_s=join_s,
            choices=choices,
        )
        if came.plan is None or came.profile is None:
            raise IntegrityError("the coordinator sent no plan; use one version on all machines")
        return came.plan, came.profile, "; ".join(came.notes)

    def _drain(self, outcome: Outcome, progress: Progress) -> None:
        progress.note(_DRAINING if outcome.phase == "training" else _NOTHING_YET)
        request = control_pb2.DrainRequest(run_id=outcome.run_id, reason="stopped by the user")
        try:
            self._stub.Drain(request, timeout=_CALL_S)
        except grpc.RpcError as error:
            _LOG.info("the coordinator was not asked to end the run: %s", error)
            progress.note("the coordinator can't be asked to end the run; Ctrl-C again stops at once")

    def _note_saved(self, run_id: str, step: int) -> None:
        """Tell the coordinator that the manifest of ``step`` is on disk; nobody waits for the answer."""
        self._stub.Noted.future(control_pb2.CheckpointNoted(run_id=run_id, step=step), timeout=_CALL_S)

    def evaluate(self, job: Job, *, owner: str, saved: Path, progress: Progress) -> Outcome:
        """Evaluate a saved adapter on the nodes, and follow the evaluation to its end.

        Args:
            job: that the adapter came from.
            owner: the member whose evaluation rows count; empty = all who have some.
            saved: folder of the adapter.
            progress: where it is shown.

        Raises:
            RingTuneError: whatever it failed with.
        """
        request = control_pb2.EvaluateRequest(job_toml=job.to_toml(), owner=owner)

        def inputs() -> Iterator[control_pb2.EvaluateInput]:
            yield control_pb2.EvaluateInput(request=request)
            for chunk in cut_folder(saved, ADAPTER_FILES):
                yield control_pb2.EvaluateInput(file=chunk)

        outcome = Outcome(job)
        return self._follow(self._stub.Evaluate(inputs()), outcome, ShownEvents(progress, outcome))

    def _follow(self, call: Any, outcome: Outcome, *sinks: EventSink) -> Outcome:
        try:
            self._checked(lambda: _hear(call, outcome, sinks))
        except KeyboardInterrupt as error:
            raise InterruptedRunError("stopped; every node was told to forget the run") from error
        finally:
            call.cancel()
        return outcome

    def _checked(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except grpc.RpcError as error:
            raise error_of_call(error, peer=f"coordinator {self._address}") from error


def _hear(call: Any, outcome: Outcome, sinks: Sequence[EventSink]) -> None:
    """Hand every event to the outcome first, then to the sinks."""
    for event in call:
        outcome(event)
        for sink in sinks:
            sink(event)
        if outcome.error is not None:
            break
    outcome.require_end()
