"""The submitter's side of a run: start it on a coordinator, write its folder, show its progress."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc

from coordinator.drive.answers import read_object
from coordinator.planner.make_plan import plan_memory
from coordinator.run_folder.folder import RunFolder
from coordinator.screen.progress import Progress
from coordinator.submit.interrupts import Interrupts
from ringtune.costs.profile import Profile
from ringtune.errors import ConnectionFailedError, IntegrityError, InterruptedRunError, error_from_name
from ringtune.files.chunks import ADAPTER_FILES, cut_folder
from ringtune.jobs.job import Job
from ringtune.rounds.checkpoint import CheckpointManifest, Resume
from ringtune.rpc.addresses import require_private
from ringtune.rpc.connections import open_channel
from ringtune.rpc.statuses import error_of_call
from ringtune.schedule.plan import Plan
from ringtune.v1 import control_pb2, control_pb2_grpc

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
CONNECT_S = 5.0
_CALL_S = 10.0


class Client:
    """A connection to a coordinator, checked when it is made.

    Args:
        address: ``host:port``.
        insecure: whether it may be on another machine, without encryption.

    Raises:
        UsageError: the address is no address, or leaves this machine without ``insecure``.
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
                f"no coordinator answers at {address} (waited {CONNECT_S:g} s); start it with 'ringtune coordinator' "
                "or correct --coordinator"
            ) from error

    def close(self) -> None:
        """Drop the connection."""
        self._channel.close()

    def __enter__(self) -> Client:
        """The client itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Drop the connection."""
        self.close()

    def nodes(self) -> list[control_pb2.NodeEntry]:
        """The members."""
        return list(self._checked(lambda: self._stub.Nodes(control_pb2.Empty(), timeout=_CALL_S)).nodes)

    def status(self) -> control_pb2.StatusReply:
        """What the coordinator does now."""
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
        interrupts: Interrupts | None = None,
    ) -> Submission:
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
            interrupts: asks the run to end in order at the first Ctrl-C; None = Ctrl-C ends it at once.

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
        )
        submission = Submission(job, progress, folder, on_saved=self._note_saved)
        with (interrupts or Interrupts()).asking(lambda: self._drain(submission.run_id, progress)):
            # no deadline: a run may take days; keepalive sees a dead coordinator
            return self._follow(self._stub.Run(request), submission)

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
        found = self._follow(self._stub.Measure(request), Submission(job, progress, None)).profile
        if found is None:
            raise IntegrityError("the coordinator sent no profile; use one version on all machines")
        return found

    def plan(self, job: Job, *, num_nodes: int, join_s: float) -> tuple[Plan, Profile]:
        """Let the nodes measure themselves, and plan for them; see ``run``.

        Raises:
            RingTuneError: whatever inspecting or planning failed with.
        """
        came = self.run(job, progress=Progress(), folder=None, plan_only=True, num_nodes=num_nodes, join_s=join_s)
        if came.plan is None or came.profile is None:
            raise IntegrityError("the coordinator sent no plan; use one version on all machines")
        return came.plan, came.profile

    def _drain(self, run_id: str, progress: Progress) -> None:
        progress.note("stopping after the turns that are under way, with a checkpoint; Ctrl-C again stops at once")
        request = control_pb2.DrainRequest(run_id=run_id, reason="stopped by the user, with a checkpoint")
        try:
            self._stub.Drain(request, timeout=_CALL_S)
        except grpc.RpcError as error:
            _LOG.info("the coordinator was not asked to end the run: %s", error)
            progress.note("the coordinator can't be asked to end the run; Ctrl-C again stops at once")

    def _note_saved(self, run_id: str, step: int) -> None:
        """Tell that a manifest is on disk; nobody waits for the answer."""
        self._stub.Noted.future(control_pb2.CheckpointNoted(run_id=run_id, step=step), timeout=_CALL_S)

    def evaluate(self, job: Job, *, owner: str, saved: Path, progress: Progress) -> Submission:
        """Evaluate a saved adapter on the nodes, and follow it to its end.

        Args:
            job: that the adapter came from.
            owner: the member whose evaluation rows count.
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

        return self._follow(self._stub.Evaluate(inputs()), Submission(job, progress, None))

    def _follow(self, call: Any, submission: Submission) -> Submission:
        try:
            self._checked(lambda: _follow(call, submission))
        except KeyboardInterrupt as error:
            raise InterruptedRunError("stopped; every node was told to forget the run") from error
        finally:
            call.cancel()
        return submission

    def _checked(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except grpc.RpcError as error:
            raise error_of_call(error, peer=f"coordinator {self._address}") from error


def _follow(call: Any, submission: Submission) -> None:
    for event in call:
        submission.take(event)
    submission.require_end()


class Submission:
    """What has come of a run so far.

    Args:
        job: of the run.
        progress: where it is shown.
        folder: where its files go.
        on_saved: called with run and step when the manifest of a checkpoint is on disk.

    Attributes:
        run_id: once it has begun.
        plan: once it is made.
        profile: once it is measured.
        memory: what each node needs at most, in bytes.
        report: once the run is done.
    """

    def __init__(
        self,
        job: Job,
        progress: Progress,
        folder: RunFolder | None,
        *,
        on_saved: Callable[[str, int], None] = lambda run_id, step: None,
    ) -> None:
        self.run_id = ""
        self.plan: Plan | None = None
        self.profile: Profile | None = None
        self.memory: dict[str, int] = {}
        self.report: dict[str, Any] = {}
        self._job = job
        self._progress = progress
        self._folder = folder
        self._on_saved = on_saved
        self._is_done = False

    def take(self, event: control_pb2.RunEvent) -> None:
        """Write and show one event.

        Raises:
            RingTuneError: the event says that the run failed, or is not readable.
        """
        kind = event.WhichOneof("event")
        match kind:
            case "state":
                self._progress.state(event.state)
            case "job_toml":
                self._write_text("job.toml", event.job_toml)
            case "profile_json":
                self.profile = Profile.from_json(read_object(event.profile_json, "the profile"))
                self._write_json("profile.json", event.profile_json)
            case "plan_json":
                self._take_plan(event.plan_json)
            case "metrics_json":
                if self._folder is not None:
                    self._folder.add_metrics(event.metrics_json)
            case "step_json":
                self._take_step(read_object(event.step_json, "a step"))
            case "report_json":
                self.report = read_object(event.report_json, "the report")
                self._write_json("report.json", event.report_json)
            case "file":
                self._take_file(event.file)
            case "run_id":
                self.run_id = event.run_id
            case "checkpoint_json":
                self._take_checkpoint(CheckpointManifest.parse(event.checkpoint_json))
            case "resumed_json":
                self._take_resumed(read_object(event.resumed_json, "where the run goes on"))
            case "failure":
                raise error_from_name(event.failure.error, event.failure.message)
            case "done":
                self._is_done = True
                if self.report:
                    self._progress.report(self.report)

    def require_end(self) -> None:
        """Refuse a stream that ends without saying how the run ended.

        Raises:
            ConnectionFailedError: it did.
        """
        if not self._is_done:
            raise ConnectionFailedError("the coordinator ended before the run did; see its log and repeat the run")

    def _take_plan(self, text: str) -> None:
        self.plan = plan = Plan.from_json(read_object(text, "the plan"))
        self._write_json("plan.json", text)
        if self.profile is not None:
            facts = {node.node: node for node in self.profile.nodes}
            memory = plan_memory(self._job, plan, facts)
            self.memory = {node: estimate.total_bytes for node, estimate in memory.items()}
        self._progress.plan(plan, self.memory)

    def _take_checkpoint(self, manifest: CheckpointManifest) -> None:
        if self._folder is not None:
            self._folder.add_checkpoint(manifest)
            self._on_saved(self.run_id, manifest.step)

    def _take_resumed(self, resumed: dict[str, Any]) -> None:
        step = int(resumed["step"])
        for reason in resumed["passed_over"]:
            self._progress.note(str(reason))
        self._progress.note(f"going on after step {step}")
        if self._folder is not None:
            self._folder.go_back_to(step)

    def _take_step(self, step: dict[str, Any]) -> None:
        if step.get("kind") == "evaluation":
            self._progress.evaluation(step)
        elif step.get("kind") == "unfreeze":
            self._progress.unfreeze(step)
        else:
            self._progress.step(step)

    def _take_file(self, file: control_pb2.FileChunk) -> None:
        if self._folder is not None:
            self._folder.add_chunk(file)

    def _write_text(self, name: str, text: str) -> None:
        if self._folder is not None:
            self._folder.write_text(name, text)

    def _write_json(self, name: str, text: str) -> None:
        if self._folder is not None:
            self._folder.write_json(name, text)
