"""The coordinator's gRPC service: decode, one call, encode; and the one object behind it.

``Coordinator`` holds the members and at most one run. A servicer method checks nothing itself.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

import grpc

from coordinator.drive.answers import read_object
from coordinator.drive.evaluation_request import Evaluation
from coordinator.drive.measure_driver import MeasureDriver, MeasureRequest
from coordinator.drive.run_driver import RunDriver, RunRequest
from coordinator.drive.status_board import StatusBoard
from coordinator.members.addresses import require_private
from coordinator.members.member_codec import entry_of, member_of
from coordinator.members.registry import Member, Registry
from coordinator.server.weights_servicer import model_folder
from ringtune import __version__
from ringtune.costs.profile import Profile
from ringtune.errors import BusyError, FrameError, JobError, RingTuneError, UsageError
from ringtune.files.chunks import ADAPTER_FILES, MAX_ADAPTER_BYTES, write_files
from ringtune.ids import check_node_name, make_run_id
from ringtune.jobs.job import Job, parse_job
from ringtune.rounds.checkpoint import Resume
from ringtune.rpc.codec import status_of_error
from ringtune.v1 import control_pb2, control_pb2_grpc
from ringtune.weights.source import Offers

T = TypeVar("T")
Driver = TypeVar("Driver", RunDriver, MeasureDriver)
_LOG = logging.getLogger(__name__)
_UPLOAD_S = 600.0


class Coordinator:
    """Members and the run that is driven; safe to call from any thread.

    Args:
        lease_s: a node that was not heard of for so long is lost.
        insecure: whether nodes may be on other machines.
        clock: monotonic seconds.
    """

    def __init__(
        self, *, lease_s: float = 10.0, insecure: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lease_s = lease_s
        self.offers = Offers()
        self._insecure = insecure
        self._clock = clock
        self._lock = threading.Lock()
        self._registry = Registry(lease_s)
        self._driver: RunDriver | MeasureDriver | None = None
        self._board: StatusBoard | None = None

    # ---- members ----------------------------------------------------------------------------------

    def join(self, member: Member) -> None:
        """Take a member in.

        Raises:
            BusyError: the name is taken.
            UsageError: name, address or version can't be used.
        """
        check_node_name(member.node)
        require_private(member.address, option=f"node {member.node}: its address", insecure=self._insecure)
        if member.version.split(".")[:2] != __version__.split(".")[:2]:
            raise UsageError(
                f"node {member.node} runs ringtune {member.version}, this coordinator {__version__}; install the "
                "same version on both"
            )
        with self._lock:
            self._registry.join(member, self._clock())
        _LOG.info("node %s at %s joined", member.node, member.address)

    def heartbeat(self, node: str, instance: str, rss_bytes: int) -> tuple[bool, str]:
        """Renew a lease: whether the node is known, and the run that is driven."""
        with self._lock:
            known = self._registry.heartbeat(node, instance, rss_bytes, self._clock())
            return known, self._driver.run_id if self._driver else ""

    def leave(self, node: str, instance: str) -> None:
        """Forget a member."""
        with self._lock:
            if self._registry.leave(node, instance):
                _LOG.info("node %s left", node)

    def living(self) -> tuple[Member, ...]:
        """Living members by name."""
        with self._lock:
            return self._registry.living(self._clock())

    def silent_for_s(self, node: str, instance: str) -> float:
        """Seconds since the last sign of life of a node's process; infinite if it is no member."""
        with self._lock:
            return self._registry.silent_for_s(node, instance, self._clock())

    def members(self) -> tuple[tuple[Member, str, float], ...]:
        """Every member with its state (idle, running, lost) and the seconds since its last sign of life."""
        with self._lock:
            now_s = self._clock()
            busy = self._driver.nodes if self._driver else frozenset()
            return tuple(
                (member, self._state(member, busy, now_s), now_s - member.seen_at_s)
                for member in self._registry.all(now_s)
            )

    def _state(self, member: Member, busy: frozenset[str], now_s: float) -> str:
        if not self._registry.is_alive(member.node, now_s):
            return "lost"
        return "running" if member.node in busy else "idle"

    # ---- runs -------------------------------------------------------------------------------------

    def run(
        self,
        job: Job,
        *,
        plan_only: bool,
        num_nodes: int,
        join_s: float,
        evaluation: Evaluation | None = None,
        resume: Resume | None = None,
        profile: Profile | None = None,
    ) -> RunDriver:
        """Start a run, go on with one, or evaluate a saved adapter; nodes measure unless a profile is given.

        Raises:
            BusyError: there is one already.
            JobError: the job wants a shorter lease than this coordinator has.
            PlanError: what to go on from is of another job or plan.
        """
        request = RunRequest(
            job=job,
            plan_only=plan_only,
            num_nodes=num_nodes,
            join_s=join_s,
            evaluation=evaluation,
            resume=resume,
            profile=profile,
        )
        return self._begin(
            job, lambda run_id, on_end: RunDriver(run_id, request, self, lease_s=job.runtime.lease_s, on_end=on_end)
        )

    def measure(self, request: MeasureRequest) -> MeasureDriver:
        """Start a measurement.

        Raises:
            BusyError: there is a run or another measurement.
            JobError: the job wants a shorter lease than this coordinator has.
        """
        lease_s = request.job.runtime.lease_s
        return self._begin(
            request.job, lambda run_id, on_end: MeasureDriver(run_id, request, self, lease_s=lease_s, on_end=on_end)
        )

    def _begin(self, job: Job, make: Callable[[str, Callable[[], None]], Driver]) -> Driver:
        if job.runtime.lease_s < self.lease_s:
            raise JobError(
                f"runtime.lease_s = {job.runtime.lease_s:g} is shorter than this coordinator's {self.lease_s:g}; "
                f"start it with --lease {job.runtime.lease_s:g}"
            )
        with self._lock:
            if self._driver is not None:
                raise BusyError(
                    f"this coordinator drives run {self._driver.run_id} already; wait for its end or stop it"
                )
            run_id = make_run_id(time.time(), secrets.token_bytes(4))
            driver: Driver = make(run_id, lambda: self._forget(driver))
            self._registry.lease_s = max(self.lease_s, job.runtime.lease_s)
            self._driver, self._board = driver, driver.board
            self.offers.put(run_id, model_folder(job))
            driver.start()
        return driver

    def run_status(self) -> control_pb2.RunStatus | None:
        """Where the run stands, or how the last one ended; None before the first."""
        with self._lock:
            board = self._board
        return board.read() if board else None

    def report(self, request: control_pb2.ReportRequest) -> None:
        """Pass a node's report to its run.

        Raises:
            FrameError: that run is not driven.
        """
        with self._lock:
            driver = self._driver
            self._registry.touch(request.node, self._clock())
        if driver is None or driver.run_id != request.run_id:
            raise FrameError(f"run {request.run_id} is not driven here; forget it")
        driver.report(request)

    def drain(self, run_id: str, reason: str) -> None:
        """Stop a run after the turns that were granted, with a checkpoint; again = at once.

        Raises:
            FrameError: that run is not driven.
        """
        self._driver_of(run_id).drain(reason)

    def noted(self, run_id: str, step: int) -> None:
        """The submitter of a run has the manifest of a checkpoint on disk.

        Raises:
            FrameError: that run is not driven.
        """
        self._driver_of(run_id).noted(step)

    def _driver_of(self, run_id: str) -> RunDriver | MeasureDriver:
        with self._lock:
            driver = self._driver
        if driver is None or driver.run_id != run_id:
            raise FrameError(f"run {run_id} is not driven here; it is over")
        return driver

    def node_failed(self, node: str, error: RingTuneError) -> None:
        """Tell the run, if there is one, that a node has ended."""
        with self._lock:
            driver = self._driver
        if driver is not None:
            driver.node_failed(node, error)

    def stop(self, reason: str, timeout_s: float) -> bool:
        """Stop the run, if there is one; False if it has not ended after ``timeout_s`` seconds."""
        with self._lock:
            driver = self._driver
        if driver is None:
            return True
        driver.stop(reason)
        return driver.join(timeout_s)

    def _forget(self, driver: RunDriver | MeasureDriver) -> None:
        with self._lock:
            if self._driver is driver:
                self._driver = None
                self._registry.lease_s = self.lease_s
                self.offers.drop(driver.run_id)


class CoordinatorServicer(control_pb2_grpc.CoordinatorServicer):
    """What agents and users call."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def Join(self, request: control_pb2.JoinRequest, context: grpc.ServicerContext) -> control_pb2.JoinReply:  # noqa: N802
        """Become a member."""
        _answer(context, lambda: self._coordinator.join(member_of(request)))
        return control_pb2.JoinReply(lease_s=self._coordinator.lease_s, coordinator_version=__version__)

    def Heartbeat(  # noqa: N802
        self, request: control_pb2.HeartbeatRequest, context: grpc.ServicerContext
    ) -> control_pb2.HeartbeatReply:
        """Renew a lease."""
        beat = _answer(context, lambda: self._coordinator.heartbeat(request.node, request.instance, request.rss_bytes))
        return control_pb2.HeartbeatReply(known=beat[0], run_id=beat[1])

    def Leave(self, request: control_pb2.LeaveRequest, context: grpc.ServicerContext) -> control_pb2.Empty:  # noqa: N802
        """Stop being a member."""
        _answer(context, lambda: self._coordinator.leave(request.node, request.instance))
        return control_pb2.Empty()

    def Report(self, request: control_pb2.ReportRequest, context: grpc.ServicerContext) -> control_pb2.Empty:  # noqa: N802
        """Tell what happened in a run."""
        _answer(context, lambda: self._coordinator.report(request))
        return control_pb2.Empty()

    def Nodes(self, request: control_pb2.Empty, context: grpc.ServicerContext) -> control_pb2.NodesReply:  # noqa: N802
        """List the members."""
        members = _answer(context, self._coordinator.members)
        return control_pb2.NodesReply(nodes=[entry_of(*member) for member in members])

    def Status(self, request: control_pb2.Empty, context: grpc.ServicerContext) -> control_pb2.StatusReply:  # noqa: N802
        """The run and the members."""
        members = _answer(context, self._coordinator.members)
        return control_pb2.StatusReply(
            version=__version__,
            now_unix_s=time.time(),
            run=_answer(context, self._coordinator.run_status),
            nodes=[entry_of(*member) for member in members],
        )

    def Run(  # noqa: N802
        self, request: control_pb2.RunRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.RunEvent]:
        """Start a run and follow it; the run stops if nobody follows it any more."""
        driver = _answer(
            context,
            lambda: self._coordinator.run(
                parse_job(request.job_toml, source="the submitted job"),
                plan_only=request.plan_only,
                num_nodes=request.num_nodes,
                join_s=request.join_s,
                resume=Resume.parse(request.resume_json) if request.resume_json else None,
                profile=_profile(request.profile_json) if request.profile_json else None,
            ),
        )
        yield from _follow(driver, context)

    def Measure(  # noqa: N802
        self, request: control_pb2.MeasureRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.RunEvent]:
        """Let the nodes measure themselves; stops if nobody follows it any more."""
        driver = _answer(context, lambda: self._coordinator.measure(_measure_request(request)))
        yield from _follow(driver, context)

    def Drain(self, request: control_pb2.DrainRequest, context: grpc.ServicerContext) -> control_pb2.Empty:  # noqa: N802
        """End a run in order."""
        _answer(context, lambda: self._coordinator.drain(request.run_id, request.reason))
        return control_pb2.Empty()

    def Noted(self, request: control_pb2.CheckpointNoted, context: grpc.ServicerContext) -> control_pb2.Empty:  # noqa: N802
        """A checkpoint is complete."""
        _answer(context, lambda: self._coordinator.noted(request.run_id, request.step))
        return control_pb2.Empty()

    def Evaluate(  # noqa: N802
        self, request_iterator: Iterator[control_pb2.EvaluateInput], context: grpc.ServicerContext
    ) -> Iterator[control_pb2.RunEvent]:
        """Evaluate a saved adapter; the same rules as for a run."""
        with tempfile.TemporaryDirectory(prefix="ringtune-") as name:
            folder = Path(name)
            too_slow = threading.Timer(_UPLOAD_S, context.cancel)
            too_slow.daemon = True
            too_slow.start()
            try:
                driver = _answer(context, lambda: self._evaluate(request_iterator, folder))
            finally:
                too_slow.cancel()
            yield from _follow(driver, context)

    def _evaluate(self, inputs: Iterator[control_pb2.EvaluateInput], folder: Path) -> RunDriver:
        asked = next(inputs, control_pb2.EvaluateInput()).request
        job = parse_job(asked.job_toml, source="the submitted job")
        source = "the submitter"
        files = (entry.file for entry in inputs)
        write_files(files, folder, names=ADAPTER_FILES, max_bytes=MAX_ADAPTER_BYTES, source=source)
        evaluation = Evaluation(owner=asked.owner, folder=folder)
        return self._coordinator.run(job, plan_only=False, num_nodes=0, join_s=0.0, evaluation=evaluation)


def _profile(text: str) -> Profile:
    return Profile.from_json(read_object(text, "the profile"))


def _measure_request(request: control_pb2.MeasureRequest) -> MeasureRequest:
    return MeasureRequest(
        job=parse_job(request.job_toml, source="the submitted job"),
        num_nodes=request.num_nodes,
        join_s=request.join_s,
        with_links=not request.without_links,
        is_fresh=request.fresh,
        one_by_one=request.one_by_one,
    )


def _follow(driver: RunDriver | MeasureDriver, context: grpc.ServicerContext) -> Iterator[control_pb2.RunEvent]:
    gone = "the submitter stopped the run or is gone"
    if not context.add_callback(lambda: driver.stop(gone)):
        driver.stop(gone)
    yield from driver.events()


def _answer(context: grpc.ServicerContext, call: Callable[[], T]) -> T:
    """The result of ``call``, or its error as a status."""
    try:
        return call()
    except Exception as error:
        if not isinstance(error, RingTuneError):
            _LOG.exception("a call failed by a bug")
        _abort(context, error)


def _abort(context: grpc.ServicerContext, error: Exception) -> NoReturn:
    status = status_of_error(error)
    context.abort(grpc.StatusCode[status.name], status.details)
    raise AssertionError("abort raises")
