"""Serve the coordinator's gRPC calls: decode the request, call ``Coordinator`` once, encode the answer."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc

from coordinator.drive.driver import Driver
from coordinator.drive.request_codec import run_request_from_proto
from coordinator.drive.requests import Evaluation, MeasureRequest, RunRequest
from coordinator.drive.run_driver import RunDriver
from coordinator.members.member_codec import entry_of, member_of
from coordinator.records.run_clock import now_unix_s
from coordinator.server.coordinator import Coordinator
from ringtune import __version__
from ringtune.errors import BusyError
from ringtune.files.chunks import write_files
from ringtune.jobs.job import parse_job
from ringtune.jobs.result import result_of
from ringtune.rpc.statuses import answer, answer_stream
from ringtune.trust import speaking
from ringtune.v1 import control_pb2, control_pb2_grpc

_UPLOAD_S = 600.0
_MOST_UPLOADS = 8
"""Saved results that may be sent here at a time; each takes a worker, also of somebody who sends nothing."""


class CoordinatorServicer(control_pb2_grpc.CoordinatorServicer):
    """The calls of agents and users to the coordinator."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._speaker = speaking.speaker()
        self._uploads = threading.BoundedSemaphore(_MOST_UPLOADS)

    def Join(self, request: control_pb2.JoinRequest, context: grpc.ServicerContext) -> control_pb2.JoinReply:
        """Add the calling node to the members."""
        answer(context, lambda: self._coordinator.join(member_of(request)))
        return control_pb2.JoinReply(
            lease_s=self._coordinator.lease_s, coordinator_version=__version__, now_unix_s=now_unix_s()
        )

    def Heartbeat(
        self, request: control_pb2.HeartbeatRequest, context: grpc.ServicerContext
    ) -> control_pb2.HeartbeatReply:
        """Renew the lease of the calling node."""
        beat = answer(context, lambda: self._coordinator.heartbeat(request.node, request.instance, request.rss_bytes))
        removed = self._speaker.removed if self._speaker else {}
        return control_pb2.HeartbeatReply(
            known=beat[0],
            run_id=beat[1],
            now_unix_s=now_unix_s(),
            removed=[control_pb2.RemovedCertificate(serial=serial, reason=why) for serial, why in removed.items()],
        )

    def Leave(self, request: control_pb2.LeaveRequest, context: grpc.ServicerContext) -> control_pb2.Empty:
        """Remove the calling node from the members."""
        answer(context, lambda: self._coordinator.leave(request.node, request.instance))
        return control_pb2.Empty()

    def Report(self, request: control_pb2.ReportRequest, context: grpc.ServicerContext) -> control_pb2.Empty:
        """Pass a node's report to its run."""
        answer(context, lambda: self._coordinator.report(request))
        return control_pb2.Empty()

    def Nodes(self, request: control_pb2.Empty, context: grpc.ServicerContext) -> control_pb2.NodesReply:
        """List the members."""
        members = answer(context, self._coordinator.members)
        return control_pb2.NodesReply(nodes=[entry_of(*member) for member in members])

    def Status(self, request: control_pb2.Empty, context: grpc.ServicerContext) -> control_pb2.StatusReply:
        """Return where the run stands, and the members."""
        members = answer(context, self._coordinator.members)
        return control_pb2.StatusReply(
            version=__version__,
            now_unix_s=time.time(),
            run=answer(context, self._coordinator.run_status),
            nodes=[entry_of(*member) for member in members],
        )

    def Run(self, request: control_pb2.RunRequest, context: grpc.ServicerContext) -> Iterator[control_pb2.RunEvent]:
        """Start a run and follow it; unless it is kept, the run stops if nobody follows it any more."""
        driver = answer(context, lambda: self._coordinator.run(run_request_from_proto(request)))
        kept = self._coordinator.keeps(driver.run_id)
        if kept is None:
            yield from _follow(driver, context)
        else:
            yield control_pb2.RunEvent(kept=True)
            events = kept.events(driver.run_id, wait=True, is_over=lambda: not context.is_active())
            yield from answer_stream(context, events)

    def Runs(self, request: control_pb2.Empty, context: grpc.ServicerContext) -> control_pb2.RunsReply:
        """List the runs that are kept."""
        records = answer(context, lambda: self._coordinator.require_kept().records())
        return control_pb2.RunsReply(
            runs=[control_pb2.KeptRun(record_json=record.to_text()) for record in records.values()]
        )

    def Follow(
        self, request: control_pb2.FollowRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.RunEvent]:
        """Send the events of a run that is kept."""
        kept = answer(context, self._coordinator.require_kept)
        answer(context, lambda: kept.require(request.run_id))
        events = kept.events(
            request.run_id, wait=request.wait, whole=request.whole, is_over=lambda: not context.is_active()
        )
        for event in answer_stream(context, events):
            if not (request.without_files and event.WhichOneof("event") == "file"):
                yield event

    def Fetched(self, request: control_pb2.RunRef, context: grpc.ServicerContext) -> control_pb2.Empty:
        """Hear that all events of a run have arrived."""
        answer(context, lambda: self._coordinator.require_kept().fetched(request.run_id))
        return control_pb2.Empty()

    def Measure(
        self, request: control_pb2.MeasureRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.RunEvent]:
        """Start a measurement and follow it; the measurement stops if nobody follows it any more."""
        driver = answer(context, lambda: self._coordinator.measure(_measure_request(request)))
        yield from _follow(driver, context)

    def Drain(self, request: control_pb2.DrainRequest, context: grpc.ServicerContext) -> control_pb2.Empty:
        """End a run in order, or at once."""
        end = self._coordinator.stop_run if request.now else self._coordinator.drain
        answer(context, lambda: end(request.run_id, request.reason))
        return control_pb2.Empty()

    def Noted(self, request: control_pb2.CheckpointNoted, context: grpc.ServicerContext) -> control_pb2.Empty:
        """Hear that the submitter has the manifest of a checkpoint on disk."""
        answer(context, lambda: self._coordinator.noted(request.run_id, request.step))
        return control_pb2.Empty()

    def Evaluate(
        self, request_iterator: Iterator[control_pb2.EvaluateInput], context: grpc.ServicerContext
    ) -> Iterator[control_pb2.RunEvent]:
        """Evaluate a saved result and follow the evaluation, which stops if nobody follows it any more."""
        answer(context, self._begin_upload)
        with contextlib.ExitStack() as stack:
            stack.callback(self._uploads.release)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringtune-")))
            too_slow = threading.Timer(_UPLOAD_S, context.cancel)
            too_slow.daemon = True
            too_slow.start()
            try:
                driver = answer(context, lambda: self._evaluate(request_iterator, folder))
            finally:
                too_slow.cancel()
            yield from _follow(driver, context)

    def _begin_upload(self) -> None:
        if not self._uploads.acquire(blocking=False):
            raise BusyError(f"{_MOST_UPLOADS} results are sent here, or evaluated, already; try again soon")

    def _evaluate(self, inputs: Iterator[control_pb2.EvaluateInput], folder: Path) -> RunDriver:
        asked = next(inputs, control_pb2.EvaluateInput()).request
        job = parse_job(asked.job_toml, source="the submitted job")
        source, result = "the submitter", result_of(job)
        files = (entry.file for entry in inputs)
        write_files(files, folder, names=result.loaded, max_bytes=result.max_bytes, source=source)
        evaluation = Evaluation(owner=asked.owner, folder=folder)
        return self._coordinator.run(
            RunRequest(job=job, plan_only=False, num_nodes=0, join_s=0.0, evaluation=evaluation)
        )


def _measure_request(request: control_pb2.MeasureRequest) -> MeasureRequest:
    return MeasureRequest(
        job=parse_job(request.job_toml, source="the submitted job"),
        num_nodes=request.num_nodes,
        join_s=request.join_s,
        with_links=not request.without_links,
        is_fresh=request.fresh,
        one_by_one=request.one_by_one,
    )


def _follow(driver: Driver, context: grpc.ServicerContext) -> Iterator[control_pb2.RunEvent]:
    gone = "the submitter stopped the run or is gone"
    if not context.add_callback(lambda: driver.stop(gone)):
        driver.stop(gone)
    yield from driver.events()
