"""The gRPC servicer of an agent: decode the request, call ``edge.agent.agent.Agent`` once, encode the answer.

The ring's servicer is added later, because it needs torch, which is loaded after the agent has joined.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc

from edge.agent.migration import NextPlacement
from edge.checkpoint.shard_saver import ResumeShard, SavedStart, ShardRequest, check_shards, list_parts
from edge.checkpoint.snapshot_servicer import SnapshotServicer
from edge.profiler.timing import DEFAULT_BUDGET_S, TimingRequest
from edge.transport.probe import add_probe_sink
from ringtune.errors import IntegrityError
from ringtune.ids import check_run_id
from ringtune.schedule.access import CopyBytes
from ringtune.schedule.course import FrozenWeights
from ringtune.schedule.migration import Source
from ringtune.schedule.turns import StartPoint
from ringtune.storage.chunks import cut_pieces
from ringtune.transport.channels import Server
from ringtune.transport.codecs import step_kind
from ringtune.transport.status import answer, answer_stream
from ringtune.transport.weights_servicer import WeightsServicer
from ringtune.v1 import control_pb2, control_pb2_grpc, weights_pb2_grpc

if TYPE_CHECKING:
    from edge.agent.agent import Agent

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
                goes_on=_resume_shard(request),
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
        start = SavedStart(check_run_id(saved.attempt), sources, saved.head_sha256, saved.head_from)
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
