"""The process of an agent: start, gRPC server, membership, wait for a reason to end, and orderly end.

The process ends within seconds whatever the compute thread does: that is a daemon thread, and the process exits without
waiting for its torch call. If the coordinator is lost, the run is stopped and its last turns are saved to disk, so that
a restarted coordinator can resume it.

Membership: one thread sends a heartbeat every third of the lease. Outcomes::

    known, driving our run      continue
    known, driving another run  our run is over: its Release got lost
    unknown                     the coordinator has restarted or declared us lost: stop the run, join again
    silence for 12 leases       stop the run; join again when it answers, or end if a parent started us

A coordinator that is frozen or unreachable for less than 12 leases finds the run at the end of the granted turns.

Only the lease decides which nodes are alive. An open connection proves nothing, nor does one unanswered heartbeat: a
node that was frozen has lost its connection, and its next heartbeat reaches the coordinator.

The time to keep trying to join and the time to wait for one answer are separate: a coordinator on a busy machine may
need seconds for an answer, and a late answer says nothing about name or version.

The servicer decodes a request, calls ``edge.agent.agent.Agent`` once and encodes the answer. The ring's servicer is
added later, because it needs torch, which is loaded after the agent has joined.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import platform
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

import grpc

from edge.agent.agent import Agent
from edge.agent.migration import NextPlacement
from edge.agent.node_metrics import MetricsServer, NodeMetrics
from edge.checkpoint.shard_saver import ResumeShard, SavedStart, ShardRequest, check_shards, list_parts
from edge.checkpoint.snapshot_servicer import SnapshotServicer
from edge.machine import resources
from edge.machine.libraries import limit_libraries
from edge.machine.resources import has_cuda_device, keep_freed_memory
from edge.options import AgentOptions, advertised_address, bind_address
from edge.profiler.timing import DEFAULT_BUDGET_S, TimingRequest
from edge.runtime.reporter import SharedClock
from edge.transport.probe import add_probe_sink
from edge.weights.weight_fetch import ModelFetcher
from ringtune import __version__
from ringtune.errors import (
    BusyError,
    ConnectionFailedError,
    DeadlineError,
    IntegrityError,
    PeerLostError,
    RingTuneError,
    TrustError,
)
from ringtune.ids import check_run_id
from ringtune.machine.process import end_within, handled
from ringtune.machine.resources import usable_cores
from ringtune.schedule.access import CopyBytes
from ringtune.schedule.batches import even_share
from ringtune.schedule.course import FrozenWeights
from ringtune.schedule.migration import Source
from ringtune.schedule.turns import StartPoint
from ringtune.storage.arrow_files import is_arrow
from ringtune.storage.chunks import cut_pieces
from ringtune.storage.durable import keep_files_private
from ringtune.storage.tables import TABLE_SUFFIXES, table_rows
from ringtune.storage.text_files import form_suffix
from ringtune.texts import indented
from ringtune.transport.channels import Server, open_channel
from ringtune.transport.codecs import removals_from_proto, step_kind
from ringtune.transport.credentials import Removals, process_credentials
from ringtune.transport.endpoints import WIRE
from ringtune.transport.parties import COORDINATOR
from ringtune.transport.retry import RetryState
from ringtune.transport.status import answer, answer_stream, error_of_call
from ringtune.transport.tls import handshake_problem
from ringtune.transport.weights_servicer import WeightsServicer
from ringtune.v1 import control_pb2, control_pb2_grpc, trust_pb2_grpc, weights_pb2_grpc

_LOG = logging.getLogger(__name__)
_REPORT_S = 5.0
_NODES_S = 10.0
GRACE_S = 20.0
"""Longest time, in seconds, from the first reason to end to the forced end of the process."""
_CLOSE_S = 2.0
# Short: a signal may go to any thread and then does not wake the main thread, which runs the handlers.
_WAIT_S = 0.5


@dataclass(slots=True)
class _ExitReason:
    """The reason for the end of the process; only the first one counts."""

    wanted: threading.Event = field(default_factory=threading.Event)
    code: int = 0
    reason: str = ""
    error: RingTuneError | None = None

    def ask(self, code: int, reason: str, error: RingTuneError | None = None) -> None:
        if not self.wanted.is_set():
            self.code, self.reason, self.error = code, reason, error
            self.wanted.set()
            end_within(GRACE_S, code)


def run_agent(options: AgentOptions, *, on_joined: Callable[[str], object] = lambda address: None) -> int:
    """Run an agent until a signal, its parent's end or its membership ends it.

    ``on_joined`` is called once it is a member, with its address for other nodes.

    Returns:
        The exit code: 143 after SIGTERM, 130 after SIGINT, 129 after SIGHUP, 0 if the parent has ended.

    Raises:
        ConnectionFailedError: the address can't be bound, or the coordinator can't be reached.
        BusyError: the name is taken.
    """
    keep_files_private()
    keep_freed_memory()  # before a second thread exists, which would have a heap of its own
    ending = _ExitReason()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        # on a thread: the main thread may hold the lock of ``ending.wanted`` just now, twice in each wait
        exit_reason = (128 + number, signal.Signals(number).name)
        threading.Thread(target=ending.ask, args=exit_reason, name="signal", daemon=True).start()

    with handled(on_signal):
        if options.watch_parent:
            threading.Thread(target=_watch_parent, args=(ending,), name="watch-parent", daemon=True).start()
        limit_libraries(options.threads or usable_cores())
        with contextlib.ExitStack() as channels:
            return _serve(options, CoordinatorCalls(options, channels), ending, on_joined)


class CoordinatorCalls:
    """The calls of a node to its coordinator."""

    def __init__(self, options: AgentOptions, channels: contextlib.ExitStack) -> None:
        self._folder = options.trust
        channel = channels.enter_context(open_channel(options.coordinator, peer=COORDINATOR))
        self.stub = control_pb2_grpc.CoordinatorStub(channel)
        self._membership = trust_pb2_grpc.MembershipStub(channel)  # made of a closed channel it ends the process

    def hear(self, removed: Removals, authorities: Sequence[bytes] = ()) -> None:
        """Refuse peers with removed certificates, trust ``authorities``, and renew the own certificate if that is due.

        ``authorities`` are certificates, PEM, the signing one first; none = as before.
        """
        who = process_credentials()
        if who is None:
            return
        from ringtune.transport.enrollment import renew_if_due, take_authorities

        who.removed = removed
        if self._folder is not None:
            take_authorities(authorities, who, self._folder)
            renew_if_due(self._membership, who, self._folder, time.time())


def _serve(
    options: AgentOptions, coordinator: CoordinatorCalls, ending: _ExitReason, on_joined: Callable[[str], object]
) -> int:
    clock = SharedClock()

    def report(request: control_pb2.ReportRequest) -> object:
        request.instance = identity.instance
        return coordinator.stub.Report(request, timeout=_REPORT_S)

    agent = Agent(
        options,
        lambda servicer: server.add_ring(servicer),
        report,
        models=ModelFetcher(options, lambda: _peers(options, coordinator.stub)),
        clock=clock,
    )
    server = AgentServer(agent, bind_address(options))
    identity = _identity(options, server.port)
    membership = Membership(
        stub=coordinator.stub,
        where=options.coordinator,
        identity=identity,
        current_run=lambda: agent.current_run,
        on_run_over=lambda run_id, reason: give_up(agent, run_id, reason),
        on_gone=lambda error: ending.ask(error.exit_code, str(error), error),
        rss_bytes=resources.rss_bytes,
        rejoin=not options.watch_parent,
        clock=clock,
        on_answer=coordinator.hear,
    )
    beside = contextlib.ExitStack()
    try:
        if options.metrics:
            figures = beside.enter_context(_figures(options, agent, identity.memory_bytes))
            sys.stderr.write(f"{figures.line()}\n")  # once, and not to the log: it may contain a token
        membership.join(timeout_s=options.join_s, give_up=ending.wanted)
        if not ending.wanted.is_set():
            on_joined(identity.address)
            agent.preload()
        while not ending.wanted.wait(_WAIT_S):
            pass
        _LOG.info("node %s ends: %s", options.name, ending.reason)
        agent.abandon(PeerLostError(f"node {options.name} was stopped ({ending.reason}); start it again"))
    finally:
        beside.close()
        membership.leave()
        if not agent.close(_CLOSE_S):
            _exit_now(ending)
        server.stop()
    if ending.error is not None:
        raise ending.error
    return ending.code


def _figures(options: AgentOptions, agent: Agent, budget_bytes: int) -> MetricsServer:
    def now() -> NodeMetrics:
        totals = agent.totals
        return NodeMetrics(
            node=options.name,
            run_id=agent.current_run,
            rss_bytes=resources.rss_bytes(),
            budget_bytes=budget_bytes,
            actions=totals.actions,
            busy_s=totals.busy_s,
            sent_bytes=dict(totals.sent_bytes),
        )

    return MetricsServer(options.metrics, now, token_file=options.metrics_token)


def _exit_now(ending: _ExitReason) -> None:
    """Exit without waiting for a thread inside a long torch call, or for calls that wait for that thread."""
    if ending.error is not None:
        sys.stderr.write(f"error: {indented(str(ending.error))}\n")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ending.code)


def _watch_parent(ending: _ExitReason) -> None:
    while True:
        try:
            if not os.read(0, 4096):
                break
        except OSError:
            break
    ending.ask(0, "its parent has ended")


def _peers(options: AgentOptions, stub: control_pb2_grpc.CoordinatorStub) -> list[str]:
    """List the addresses of the other members that are not lost."""
    members = RetryState(lease_s=_NODES_S, timeout_s=_NODES_S).repeat(
        lambda: stub.Nodes(control_pb2.Empty(), timeout=_REPORT_S).nodes, peer=f"coordinator {options.coordinator}"
    )
    return [entry.joined.address for entry in members if entry.joined.node != options.name and entry.state != "lost"]


def _identity(options: AgentOptions, port: int) -> control_pb2.JoinRequest:
    return control_pb2.JoinRequest(
        node=options.name,
        address=advertised_address(options, port),
        version=__version__,
        has_data=options.data is not None,
        memory_bytes=options.memory_bytes or resources.memory_budget(),
        # a guess without torch: there is a device file of NVIDIA's
        device=options.device if options.device != "auto" else "cuda" if has_cuda_device() else "cpu",
        threads=options.threads or usable_cores(),
        system=f"{platform.system()} {platform.machine()}",
        instance=secrets.token_hex(8),
        is_guest=options.is_guest,
        # a local run has just counted the rows, and starts sooner without counting them in every process
        train_rows=None if options.watch_parent else count_rows(options.data, options.share),
        eval_rows=None if options.watch_parent else count_rows(options.eval_data, options.share),
        cores=usable_cores(),
        wire=WIRE,
        rack=options.rack,
    )


_SAVE_S: Final = 60.0
"""Seconds for the current action and the disk; turns that are not saved by then are repeated."""


def give_up(agent: Agent, run_id: str, reason: str) -> None:
    """Stop a run, save the ends of its last turns on this node's disk, and release it.

    An empty ``run_id`` means any run; ``reason`` is for the log.
    """
    active = agent.current()
    if active is not None and run_id in ("", active.run_id):
        agent.end(active, reason)
    agent.await_end(_SAVE_S)  # else the run that another thread ends still has the lock of the node's folder
    kept, files = agent.moves.kept.everything()
    if files and run_id in ("", kept):
        try:
            agent.on_compute_thread(agent.moves.save, "save the last turns", timeout_s=_SAVE_S)
        except RingTuneError as error:
            _LOG.warning("the last turns of run %s are not saved: %s", kept, error)
    agent.release(run_id, reason)


def count_rows(path: Path | None, share: tuple[int, int]) -> int | None:
    """Count one share of a table's rows; None without a file, and for other files, which only a job's task can read.

    Example: part 1 of 4 of 10 rows has the rows [2, 5), which are 3. A job with another split changes these rows.

    ``share`` is (index, number of parts). Raises ``DataError``.
    """
    if path is None or not (is_arrow(path) or form_suffix(path) in TABLE_SUFFIXES):
        return None
    count, (index, parts) = sum(1 for _ in table_rows(path, {}, only_needed=True)), share
    return len(even_share(count, num_owners=parts, share=index))


_JOIN_CALL_S = 5.0
_JOIN_RETRY_S = 0.5
_LEAVE_S = 1.0
_LONGEST_RETRY_S = 5.0
BEATS_PER_LEASE = 3
_MAX_MISSED = 1
_PATIENCE_LEASES = 12
"""Leases for which a run is kept in memory while its coordinator does not answer."""


class Membership:
    """Keeps one node a member of one coordinator.

    Args:
        on_run_over: called from the heartbeat thread if a run is no longer driven; gets its id (empty = whatever
            runs: another one may have begun while a heartbeat was under way) and the reason.
        on_gone: called once if the coordinator is lost and ``rejoin`` is false.
        rejoin: whether to join again after the coordinator was lost.
        on_answer: called at each answer to a heartbeat or a request to join, with the removed certificates, and the
            certificates (PEM) of the authorities to trust; none = as before.
    """

    def __init__(
        self,
        *,
        stub: control_pb2_grpc.CoordinatorStub,
        where: str,
        identity: control_pb2.JoinRequest,
        current_run: Callable[[], str],
        on_run_over: Callable[[str, str], None],
        on_gone: Callable[[RingTuneError], None],
        rss_bytes: Callable[[], int],
        rejoin: bool = True,
        clock: SharedClock | None = None,
        on_answer: Callable[[Removals, Sequence[bytes]], None] = lambda removed, authorities: None,
    ) -> None:
        self._stub, self._where, self._identity = stub, where, identity
        self._current_run, self._on_run_over, self._on_gone = current_run, on_run_over, on_gone
        self._rss_bytes, self._rejoin, self._on_answer = rss_bytes, rejoin, on_answer
        self._removed, self._removals_version = Removals(), ""
        self._clock = clock or SharedClock()
        self._lease_s = 10.0
        self._heard_s = time.monotonic()
        self._missed = 0
        self._is_lost = self._is_silent = False
        self._complained: type[RingTuneError] | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def join(self, *, timeout_s: float, give_up: threading.Event | None = None) -> None:
        """Join the coordinator and start to renew the lease; wait for a name that a dead node still holds.

        Args:
            timeout_s: how long to try; an attempt that began within it may take ``_JOIN_CALL_S`` more.
            give_up: set to return without having joined.

        Raises:
            ConnectionFailedError: nothing answers within ``timeout_s``, or not in time.
            BusyError: the name stays taken.
            TrustError: one side does not take the other's certificate.
            RingTuneError: the coordinator refuses for another reason.
        """
        deadline_s = time.monotonic() + timeout_s
        wait_s = _JOIN_RETRY_S
        while True:
            try:
                self._join_once()
                break
            except (BusyError, ConnectionFailedError) as error:
                left_s = deadline_s - time.monotonic()
                if left_s < _JOIN_RETRY_S:
                    raise
                self._complain(error, f"trying for {left_s:.0f} s more")
            if (give_up or self._leaving).wait(min(wait_s, left_s)):
                return
            wait_s = min(2 * wait_s, _LONGEST_RETRY_S)
        self._thread.start()

    def _complain(self, error: RingTuneError, what_now: str) -> None:
        """Log why the node can't join, once for each kind of reason until it has joined."""
        if type(error) is not self._complained:
            self._complained = type(error)
            _LOG.warning("node %s can't join yet, %s: %s", self._identity.node, what_now, error)

    def leave(self) -> None:
        """Stop the heartbeats and notify the coordinator; one that does not answer is no error."""
        is_member = self._thread.is_alive()  # it may end as soon as it is told to
        self._leaving.set()
        if not is_member:
            return
        request = control_pb2.LeaveRequest(node=self._identity.node, instance=self._identity.instance)
        try:
            RetryState(lease_s=_LEAVE_S, timeout_s=_LEAVE_S).repeat(
                lambda: self._stub.Leave(request, timeout=_LEAVE_S), peer=f"coordinator {self._where}"
            )
        except grpc.RpcError as error:
            _LOG.debug("leaving without an answer: %s", error)
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _LEAVE_S)

    def _join_once(self) -> None:
        sent_s = time.monotonic()
        try:
            reply = self._stub.Join(self._identity, timeout=_JOIN_CALL_S)
        except grpc.RpcError as error:
            refusal = error_of_call(error, peer=f"coordinator {self._where}")
            if isinstance(refusal, DeadlineError):  # not a member yet, so not a lost peer
                raise ConnectionFailedError(
                    f"coordinator {self._where} did not answer within {_JOIN_CALL_S:g} s; check that it runs"
                ) from error
            why = handshake_problem(str(refusal), self._where, COORDINATOR)
            if why and isinstance(refusal, ConnectionFailedError):
                raise TrustError(f"node {self._identity.node} can't join: {why}") from error
            raise refusal from error
        self._on_answer(self._removed, reply.authorities_pem)
        self._lease_s = reply.lease_s if reply.lease_s > 0 else self._lease_s
        self._heard_s = time.monotonic()
        self._clock.forget()
        self._clock.compare(sent_s, self._heard_s, reply.now_unix_s)
        self._is_lost = self._is_silent = False
        self._complained = None
        _LOG.info("node %s joined %s, lease %g s", self._identity.node, self._where, self._lease_s)

    # ---- the heartbeat thread ---------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._leaving.wait(self._lease_s / BEATS_PER_LEASE):
            try:
                self.send_heartbeat()
            except TrustError as error:  # permanent
                self._on_run_over("", str(error))
                self._on_gone(error)
                return
            except RingTuneError as error:  # another node may have this name now
                self._complain(error, "trying again")
            if self._is_lost and not self._rejoin:
                self._on_gone(ConnectionFailedError(self._gone(_PATIENCE_LEASES * self._lease_s)))
                return

    def send_heartbeat(self) -> None:
        """Send one heartbeat and act on the answer; raises ``TrustError`` or ``RingTuneError``."""
        run_id = self._current_run()
        request = control_pb2.HeartbeatRequest(
            node=self._identity.node,
            instance=self._identity.instance,
            run_id=run_id,
            rss_bytes=self._rss_bytes(),
            sent_unix_s=time.time(),
            removals_version=self._removals_version,
            authorities_version=who.identity.authorities_version if (who := process_credentials()) else "",
        )
        sent_s = time.monotonic()
        try:
            reply = self._stub.Heartbeat(request, timeout=max(0.5, self._lease_s / 3))
        except grpc.RpcError as error:
            refusal = error_of_call(error, peer=f"coordinator {self._where}")
            if isinstance(refusal, TrustError):
                raise refusal from error
            self._on_silence(error)
            return
        self._heard_s = time.monotonic()
        self._clock.compare(sent_s, self._heard_s, reply.now_unix_s)
        self._missed = 0
        if reply.removals_version != self._removals_version:
            self._removed, self._removals_version = removals_from_proto(reply.removed), reply.removals_version
        self._on_answer(self._removed, reply.authorities_pem)
        if self._is_silent:
            self._is_lost = self._is_silent = False
            _LOG.info("coordinator %s answers again", self._where)
        if not reply.known:
            self._on_run_over("", f"coordinator {self._where} no longer knows node {self._identity.node}")
            if not self._leaving.is_set():
                self._join_once()
        elif run_id and reply.run_id != run_id:
            self._on_run_over(run_id, f"coordinator {self._where} no longer drives run {run_id}")

    def _on_silence(self, error: grpc.RpcError) -> None:
        _LOG.debug("no answer to a heartbeat: %s", error)
        self._missed += 1
        silent_s, patience_s = time.monotonic() - self._heard_s, _PATIENCE_LEASES * self._lease_s
        if self._is_lost or self._missed <= _MAX_MISSED or silent_s < self._lease_s:
            return
        if not self._is_silent:
            self._is_silent = True
            _LOG.warning("%s; a run is kept for it for %g s", self._gone(self._lease_s), patience_s - self._lease_s)
        if silent_s >= patience_s:
            self._is_lost = True
            _LOG.warning("%s", self._gone(patience_s))
            self._on_run_over("", self._gone(patience_s))

    def _gone(self, silent_s: float) -> str:
        return f"coordinator {self._where} has not answered for {silent_s:g} s; check that it runs"


# ---- the calls of the coordinator ------------------------------------------------------------------

_LONGEST_CALL_S = 3600.0


class AgentServicer(control_pb2_grpc.AgentServicer):
    """The calls of the coordinator to this node."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def Inspect(self, request: control_pb2.InspectRequest, context: grpc.ServicerContext) -> control_pb2.InspectReply:
        """Return the node's facts for the planner, and its state on disk of the run to be resumed."""
        facts = answer(
            context,
            lambda: self._agent.inspect(
                request.run_id,
                request.job_toml,
                _timing(request),
                timeout_s=_left_s(context),
                nodes=tuple(request.nodes),
                shards_run=request.checkpoint_run,
                model_sha256=request.model_sha256,
                rows_run=request.rows_run,
            ),
        )
        if not facts:
            return control_pb2.InspectReply(lacks_model=True)
        return control_pb2.InspectReply(
            facts_json=facts,
            shards=answer(context, lambda: self._shards(request, context)),
            saved=answer(context, lambda: self._saved(request)),
        )

    def _saved(self, request: control_pb2.InspectRequest) -> list[control_pb2.SavedPart]:
        if not request.checkpoint_run:
            return []
        options = self._agent.options
        parts = list_parts(options.state, options.name, request.checkpoint_run)
        return [control_pb2.SavedPart(**part._asdict()) for part in parts]  # fields have the same names

    def _shards(
        self, request: control_pb2.InspectRequest, context: grpc.ServicerContext
    ) -> list[control_pb2.ShardState]:
        if not request.shards:
            return []
        shards = [ShardRequest(shard.step, shard.sha256) for shard in request.shards]
        options, left_s = self._agent.options, _left_s(context)
        problems = self._agent.on_compute_thread(
            lambda: check_shards(options.state, options.name, request.checkpoint_run, shards, timeout_s=left_s),
            "check its shards",
            timeout_s=left_s,
        )
        pairs = zip(shards, problems, strict=True)
        return [control_pb2.ShardState(step=shard.step, problem=problem) for shard, problem in pairs]

    def MeasureLink(
        self, request: control_pb2.MeasureLinkRequest, context: grpc.ServicerContext
    ) -> control_pb2.MeasureLinkReply:
        """Measure the link to another node, or the computing time that messages to it cost."""
        return answer(context, lambda: self._agent.measure(request, timeout_s=_left_s(context)))

    def Prepare(self, request: control_pb2.PrepareRequest, context: grpc.ServicerContext) -> control_pb2.PrepareReply:
        """Build this node's slice of a plan, and open its links."""
        hosted_bytes = answer(
            context,
            lambda: self._agent.prepare(
                request.run_id,
                request.placement_number,
                plan_json=request.plan_json,
                job_toml=request.job_toml,
                addresses=dict(request.addresses),
                timeout_s=_left_s(context),
                resume=_resume_shard(request),
                sizes=CopyBytes(request.block_bytes, request.head_bytes),
            ),
        )
        return control_pb2.PrepareReply(hosted_bytes=hosted_bytes)

    def Load(
        self, request_iterator: Iterator[control_pb2.LoadChunk], context: grpc.ServicerContext
    ) -> control_pb2.Empty:
        """Replace the initial values of trained tensors by a saved result."""
        answer(context, lambda: self._load(request_iterator, _left_s(context)))
        return control_pb2.Empty()

    def _load(self, chunks: Iterator[control_pb2.LoadChunk], timeout_s: float) -> None:
        first = next(chunks, control_pb2.LoadChunk())
        files = (chunk.file for chunk in itertools.chain([first], chunks))
        self._agent.load(first.run_id, files, timeout_s=timeout_s)

    def FetchAhead(
        self, request: control_pb2.PrepareRequest, context: grpc.ServicerContext
    ) -> control_pb2.FetchAheadReply:
        """Fetch the base weights of this node's slice in another placement."""
        fetched = answer(
            context,
            lambda: self._agent.moves.fetch_ahead(
                request.run_id, request.plan_json, request.job_toml, timeout_s=_left_s(context)
            ),
        )
        return control_pb2.FetchAheadReply(fetched_bytes=fetched)

    def Rest(self, request: control_pb2.RestRequest, context: grpc.ServicerContext) -> control_pb2.RestReply:
        """Pause the run and offer a snapshot to other nodes; or, with ``halts``, stop it because a node is lost."""
        moves = self._agent.moves
        if request.halts:
            answer(context, lambda: moves.halt(request.run_id, timeout_s=_left_s(context)))
            return control_pb2.RestReply()
        totals = answer(
            context, lambda: moves.rest(request.run_id, request.placement_number, timeout_s=_left_s(context))
        )
        return control_pb2.RestReply(totals_json=totals)

    def Move(self, request: control_pb2.MoveRequest, context: grpc.ServicerContext) -> control_pb2.MoveReply:
        """Build the slice of another placement with the trained state."""

        def move() -> control_pb2.MoveReply:
            try:
                hosted, fetched = self._agent.moves.move(_next_placement(request), timeout_s=_left_s(context))
            except IntegrityError as error:
                if not (error.peer and request.takes_holder):
                    raise
                return control_pb2.MoveReply(problem=str(error), holder=error.peer)
            return control_pb2.MoveReply(hosted_bytes=hosted, fetched_bytes=fetched)

        return answer(context, move)

    def Grant(self, request: control_pb2.GrantRequest, context: grpc.ServicerContext) -> control_pb2.Empty:
        """Grant turns to the node, and drop shards that are not needed any more."""
        answer(
            context,
            lambda: self._agent.grant(
                request.run_id,
                request.placement_number,
                self._agent.turns_of(request),
                keep_from_step=request.keep_from_step,
                keep=request.keep,
            ),
        )
        return control_pb2.Empty()

    def Repeat(self, request: control_pb2.RepeatRequest, context: grpc.ServicerContext) -> control_pb2.RepeatReply:
        """Repeat a part of another host's work."""
        return answer(context, lambda: self._agent.repeat(request, timeout_s=_left_s(context)))

    def Collect(
        self, request: control_pb2.CollectRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.FileChunk]:
        """Stream the trained tensors and the node's totals as files."""
        files = answer(
            context,
            lambda: self._agent.collect(
                request.run_id,
                with_head=request.with_head,
                with_private=request.with_private,
                goes_on=request.goes_on,
                best_step=request.best_step,
                needed_steps=request.needed_steps,
                timeout_s=_left_s(context),
            ),
        )
        # a file is read while it is sent
        chunks = (chunk for name, content in sorted(files.items()) for chunk in cut_pieces(name, content))
        yield from answer_stream(context, chunks)

    def Alive(self, request: control_pb2.Empty, context: grpc.ServicerContext) -> control_pb2.Empty:
        """Answer the coordinator, to which another node has reported a lost link."""
        return control_pb2.Empty()

    def Release(self, request: control_pb2.ReleaseRequest, context: grpc.ServicerContext) -> control_pb2.Empty:
        """Stop and forget a run."""
        answer(
            context,
            lambda: self._agent.release(request.run_id, request.reason or "released", is_finished=request.is_finished),
        )
        return control_pb2.Empty()


def _timing(request: control_pb2.InspectRequest) -> TimingRequest | None:
    if not request.measure:
        return None
    frozen = None
    if request.frozen_dtype:
        frozen = FrozenWeights(dtype=request.frozen_dtype, native=request.frozen_native)
    return TimingRequest(request.measure_s or DEFAULT_BUDGET_S, request.neighbours, request.fresh, frozen)


def _resume_shard(request: control_pb2.PrepareRequest) -> ResumeShard | None:
    run, holder = request.checkpoint_run, request.start_holder
    if request.HasField("saved"):
        saved = request.saved
        sources = tuple(Source(source.node, source.start, source.stop, source.sha256) for source in saved.sources)
        digests = {digest.unit: digest.sha256 for digest in saved.digests}
        start = SavedStart(check_run_id(saved.attempt), sources, saved.head_sha256, saved.head_from, digests)
        return ResumeShard(run, ShardRequest(saved.step, ""), holder, saved=start)
    if not request.HasField("shard"):
        return None
    return ResumeShard(run, ShardRequest(request.shard.step, request.shard.sha256), holder, request.checkpoint_plan)


def _next_placement(request: control_pb2.MoveRequest) -> NextPlacement:
    prepare = request.prepare
    return NextPlacement(
        run_id=prepare.run_id,
        placement_number=prepare.placement_number,
        plan_json=prepare.plan_json,
        job_toml=prepare.job_toml,
        addresses=dict(prepare.addresses),
        shards_run=prepare.checkpoint_run or prepare.run_id,
        start=StartPoint(
            step=request.step,
            holder=request.holder,
            first_turn=request.first_turn,
            first_seq=request.first_seq,
            placement_number=prepare.placement_number,
            repeats=tuple(step_kind(kind) for kind in request.repeats),
        ),
        from_placement_number=request.from_placement_number,
        sources=tuple(Source(source.node, source.start, source.stop) for source in request.sources),
        from_step=request.step if request.recovers else None,
        head_from=request.head_from if request.recovers else "",
        digests={digest.unit: digest.sha256 for digest in request.digests},
        others=tuple(Source(source.node, source.start, source.stop) for source in request.others),
        other_head=request.other_head,
        sizes=CopyBytes(prepare.block_bytes, prepare.head_bytes),
    )


class AgentServer:
    """Serves an agent: control calls from the start, the ring's links after ``add_ring``.

    Args:
        agent: its ``attach_ring`` is this object's ``add_ring``.

    Raises:
        ConnectionFailedError: the address can't be bound.
    """

    def __init__(self, agent: Agent, bind: str) -> None:
        self._grpc_server: grpc.Server | None = None

        def add(server: grpc.Server) -> None:
            self._grpc_server = server
            control_pb2_grpc.add_AgentServicer_to_server(AgentServicer(agent), server)
            add_probe_sink(server, agent.access)
            control_pb2_grpc.add_SnapshotsServicer_to_server(
                SnapshotServicer(
                    agent.moves.shelf,
                    agent.moves.kept,
                    agent.access,
                    agent.moves.saved,
                    agent.moves.save_copy,
                    agent.options.state,
                    agent.audited,
                ),
                server,
            )
            if agent.models is not None:
                weights_pb2_grpc.add_WeightsServicer_to_server(WeightsServicer(agent.models.offers), server)

        self._server = Server(bind, add)
        self.port = self._server.port

    def add_ring(self, servicer: Any) -> None:
        """Add the ring's servicer to the running server."""
        servicer.add_to(self._grpc_server)

    def stop(self) -> None:
        """Refuse new calls, cancel the running ones, end the threads."""
        self._server.stop()


def _left_s(context: grpc.ServicerContext) -> float:
    left = context.time_remaining()
    return _LONGEST_CALL_S if left is None else min(_LONGEST_CALL_S, max(0.0, left))
