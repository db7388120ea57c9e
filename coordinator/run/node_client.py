"""Calls to one node, each with a deadline and cancellable: its answers, its files and its failures.

A node has one worker thread, so grants arrive in the order in which they were given. A call with a lost request or
answer is repeated for a lease, and carried out once (``ringtune.transport.retry``). An error has the node's own words
if it answered; else the node counts as lost.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc

from ringtune.costs.profile import NodeFacts
from ringtune.errors import (
    ConnectionFailedError,
    DeadlineError,
    FrameError,
    IntegrityError,
    InvalidInputError,
    ModelError,
    PeerLostError,
    RingTuneError,
    internal_error,
)
from ringtune.ids import naming_node
from ringtune.job.job import Job
from ringtune.models.result_files import part_files
from ringtune.models.weights_by_digest import ModelManifest, agreed_manifest, manifest_from_proto, odd_manifests
from ringtune.quantities import format_seconds
from ringtune.schedule.actions import TensorKey
from ringtune.schedule.course import FrozenWeights
from ringtune.schedule.turns import Turn
from ringtune.storage.chunks import cut_pieces, in_time, write_any_files
from ringtune.storage.pieces import FilePieces, Pieces
from ringtune.storage.strict import read_object
from ringtune.transport.channels import Workers, open_channel
from ringtune.transport.codecs import GrantWriter
from ringtune.transport.parties import node_party
from ringtune.transport.retry import RetriedCall, RetryState
from ringtune.transport.status import error_of_call, error_of_status
from ringtune.v1 import control_pb2, control_pb2_grpc, weights_pb2, weights_pb2_grpc


def call_error(error: grpc.RpcError, *, node: str, address: str) -> RingTuneError:
    """Make the error of a call to a node; see ``node_error``."""
    if not isinstance(error, grpc.Call):
        return PeerLostError(f"node {node} at {address}: {error}; start it again")
    return node_error(error.code().name, error.details() or "", node=node, address=address)


def node_error(status: str, details: str, *, node: str, address: str) -> RingTuneError:
    """Make the error of a failed call: the node's own error, or ``PeerLostError`` if no answer came.

    Example: status ``UNAVAILABLE`` without an error's name in its details is a lost node.
    """
    error = error_of_status(status, details, peer=f"node {node} at {address}")
    if type(error) in (ConnectionFailedError, DeadlineError) and not details.startswith("ringtune."):
        return PeerLostError(
            f"node {node} at {address} does not answer ({status}); start it again and repeat or --resume the run"
        )
    named = type(error)(naming_node(node, str(error)))
    named.peer = error.peer
    return named


T = TypeVar("T")
_PROGRESS_S = 0.2
_AGAIN_S: Final = 3600.0
"""Files first sent longer ago are not sent again."""


def watched(messages: Iterable[T], *tell: Callable[[], None]) -> Iterator[T]:
    """Pass messages on, and call ``tell`` of it now and then."""
    told_s = -math.inf
    for message in messages:
        if time.monotonic() >= told_s + _PROGRESS_S:
            told_s = time.monotonic()
            for call in tell:
                call()
        yield message


def _empty(folder: Path) -> None:
    """Remove what an attempt before has left."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


_LOG = logging.getLogger(__name__)
_RELEASE_S = 3.0
_RELEASES = 2
_TOTALS = "totals.json"
_OF_COORDINATOR: Final = "of the coordinator"


class AgreedModel:
    """The base model that nodes of a run without a copy fetch: the one on which those agree that have it.

    It is asked for only if a node has no copy: then all others hash their model, at the same time.

    Args:
        own_manifest: returns the manifest of the coordinator's copy; None = it has none.

    Attributes:
        owners: nodes with rows, whose files of tokenizer or image processor other nodes get where they have a copy.
    """

    def __init__(self, own_manifest: Callable[[], ModelManifest | None]) -> None:
        self._own = own_manifest
        self.owners: Collection[str] = ()
        self._changed = threading.Condition()
        self._expected: frozenset[str] = frozenset()
        self._holders: dict[str, Callable[[float], ModelManifest]] = {}
        self._answered: set[str] = set()
        self._agreeing = threading.Lock()
        self._sha256 = ""
        self._spare: Collection[str] = ()
        self._leave_out: Callable[[str, RingTuneError], None] | None = None

    def may_leave_out(self, nodes: Collection[str], leave_out: Callable[[str, RingTuneError], None]) -> None:
        """Agree without these nodes where most have another model than they, and without any of unusable manifests.

        ``leave_out`` is called with each, and ends the run where it needs the node.
        """
        self._spare, self._leave_out = nodes, leave_out

    def expect(self, nodes: Iterable[str]) -> None:
        """Wait for the answers of these nodes too, before any is told of a model."""
        with self._changed:
            self._expected |= {*nodes}

    def answered(self, node: str, manifest: Callable[[float], ModelManifest] | None) -> None:
        """Note that a node has a copy, and how to get its manifest in some seconds; None = it has none, or failed."""
        with self._changed:
            self._answered.add(node)
            if manifest is not None:
                self._holders[node] = manifest
            self._changed.notify_all()

    def sha256(self, timeout_s: float) -> str:
        """Return the digest of the model's manifest, once all expected nodes have answered.

        Raises:
            ModelError: no node has a copy, or two have different ones; names both.
            DeadlineError: a node has not answered.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            if not self._changed.wait_for(lambda: self._expected <= self._answered, timeout_s):
                missing = ", ".join(sorted(self._expected - self._answered))
                raise DeadlineError(
                    f"waited {format_seconds(timeout_s)} for node {missing} to say whether it has the model"
                )
            holders = dict(self._holders)
        with self._agreeing:
            if not self._sha256:
                manifests = self._manifests(holders, deadline_s)
                owners = (*self.owners, _OF_COORDINATOR)
                odd = odd_manifests(manifests, owners)
                if self._leave_out is not None and all(node in self._spare for node in odd):
                    for node, error in odd.items():
                        del manifests[node]
                        self._leave_out(node, IntegrityError(f"it has another model than most: {error}"))
                self._sha256 = agreed_manifest(manifests, owners).sha256
            return self._sha256

    def _manifests(
        self, holders: Mapping[str, Callable[[float], ModelManifest]], deadline_s: float
    ) -> dict[str, ModelManifest]:
        """Return the manifests of all copies; a node that is lost meanwhile counts no more.

        They have half of the time: who waits for the digest needs the rest to fetch.
        """
        workers = Workers(1 + len(holders), "manifests")
        own_manifest = workers.submit(self._own)
        half_s = (deadline_s - time.monotonic()) / 2
        answers = {node: workers.submit(ask, half_s) for node, ask in holders.items()}
        try:
            mine = own_manifest.result()
            manifests = {} if mine is None else {_OF_COORDINATOR: mine}
            for node, answer in answers.items():
                try:
                    manifests[node] = answer.result()
                except grpc.RpcError as error:
                    _LOG.warning("node %s does not say which model it has: %s", node, error_of_call(error, peer=node))
                except PeerLostError as error:
                    _LOG.info("the model of node %s does not count: %s", node, error)
                except IntegrityError as error:
                    if self._leave_out is None:
                        raise
                    self._leave_out(node, error)
        finally:
            workers.close(0.0)
        if not manifests:
            raise ModelError("no node has a copy of the model (model.path); name its folder with --model DIR")
        return manifests


class AgentCalls:
    """The coordinator's calls to one node in one run.

    Args:
        lease_s: a node that does not answer for so long is lost.
        wait_s: time limit of a call that works at the node, in seconds; results may take as long as they do.
        on_failure: called with the error of a failed call, from the worker thread.
        nodes: of the run, which the node admits.
    """

    def __init__(
        self,
        node: str,
        address: str,
        run_id: str,
        *,
        lease_s: float,
        wait_s: float,
        on_failure: Callable[[str, RingTuneError], None],
        nodes: Collection[str] = (),
        models: AgreedModel | None = None,
    ) -> None:
        self.node, self._nodes = node, tuple(nodes)
        self._models = models or AgreedModel(lambda: None)
        self._lease_s, self._wait_s = lease_s, wait_s
        self.address = address
        self._run_id = run_id
        self._on_failure = on_failure
        self._placement_number, self._grants = 0, GrantWriter(run_id)
        self._moving: RetriedCall | None = None
        self._fetching: RetriedCall | None = None
        self._num_moves = 0
        self._channel = open_channel(address, peer=node_party(node))
        self._stub = control_pb2_grpc.AgentStub(self._channel)
        self._weights = weights_pb2_grpc.WeightsStub(self._channel)  # made of a closed channel it ends the process
        self._worker = Workers(1, f"calls-{node}")  # takes a release also at the end of the process
        self._lock = threading.Lock()
        self._call: Any = None
        self._cancelled = threading.Event()
        self._peer = f"node {node} at {address}"

    # ---- what is asked ----------------------------------------------------------------------------

    def inspect(
        self, request: control_pb2.InspectRequest, on_result: Callable[[control_pb2.InspectReply], None]
    ) -> None:
        """Ask for the node's facts (see ``inspect_request``), and for whatever else the request asks."""
        request.run_id = self._run_id
        request.nodes.extend(self._nodes)
        self._submit(lambda: on_result(self._inspected(request)))

    def _inspected(self, request: control_pb2.InspectRequest) -> control_pb2.InspectReply:
        """Inspect a node; if it has no copy of the model, tell it which one to fetch, and inspect it then."""
        deadline_s, manifest = time.monotonic() + self._wait_s, None
        try:
            reply: control_pb2.InspectReply = self._unary(self._stub.Inspect, request, self._wait_s)
            manifest = None if reply.lacks_model else self._manifest
        finally:
            self._models.answered(self.node, manifest)
        if reply.lacks_model:
            request.model_sha256 = self._models.sha256(deadline_s - time.monotonic())
            reply = self._unary(self._stub.Inspect, request, deadline_s - time.monotonic())
        return reply

    def _manifest(self, timeout_s: float) -> ModelManifest:
        if self._cancelled.is_set():
            raise PeerLostError(f"node {self.node} takes no part in run {self._run_id}; let it join again")
        request = weights_pb2.ManifestRequest(run_id=self._run_id)
        reply = self._weights.Manifest(request, timeout=max(0.1, timeout_s))
        try:
            return manifest_from_proto(reply)
        except IntegrityError as error:  # another node asked, whose failure it is not
            raise IntegrityError(f"the model of node {self.node} can't be used: {error}") from error

    def measure_link(
        self, request: control_pb2.MeasureLinkRequest, on_result: Callable[[control_pb2.MeasureLinkReply], None]
    ) -> None:
        """Ask the node to measure its link to another one.

        With ``brief`` it sends fewer messages; with ``computing_s`` it measures only what they take from its computing.
        """
        self._ask(self._stub.MeasureLink, request, on_result)

    def prepare(
        self,
        request: control_pb2.PrepareRequest,
        *,
        on_result: Callable[[int], None],
        on_progress: Callable[[], None] = lambda: None,
        saved: Mapping[str, Pieces] | None = None,
    ) -> None:
        """Send the plan, and files of a saved result to begin with; ``on_result`` gets the bytes hosted.

        The files may take as long as they do: ``on_progress`` is called while they go.
        """
        number = self._num_moves
        request.run_id, request.placement_number = self._run_id, self._placement_number

        def work() -> None:
            if (reply := self._unless_off(number, self._stub.Prepare, request)) is None:
                return
            if saved is not None:
                self._load(saved, on_progress)
            on_result(reply.hosted_bytes)

        self._submit(work)

    def place(self, placement_number: int) -> None:
        """Prepare and grant in the placement with this number from now on."""
        if placement_number != self._placement_number:
            self._placement_number, self._grants = placement_number, GrantWriter(self._run_id, placement_number)

    def fetch_ahead(
        self,
        request: control_pb2.PrepareRequest,
        *,
        on_result: Callable[[int], None],
        on_failed: Callable[[RingTuneError], None],
    ) -> None:
        """Let the node fetch base weights, beside all other calls, in place of others that it fetches."""
        request.run_id = self._run_id
        asking = self._asking(self._stub.FetchAhead, request, self._wait_s)
        with self._lock:
            if self._fetching is not None:
                self._fetching.cancel()
            self._fetching = asking
        self._answer_beside("fetching", asking, lambda reply: on_result(reply.fetched_bytes), on_failed)

    def _answer_beside(
        self,
        what: str,
        asking: RetriedCall,
        on_result: Callable[[Any], None],
        on_failed: Callable[[RingTuneError], None],
    ) -> None:
        def work() -> None:
            with contextlib.suppress(grpc.FutureCancelledError):
                on_result(asking.result())

        threading.Thread(target=self._guarded, args=(work, on_failed), name=f"{what}-{self.node}", daemon=True).start()

    def rest(
        self,
        placement_number: int,
        *,
        on_result: Callable[[control_pb2.RestReply], None],
        on_failed: Callable[[RingTuneError], None],
    ) -> None:
        """Let the node keep what it has trained and offer it to others."""
        request = control_pb2.RestRequest(run_id=self._run_id, placement_number=placement_number)
        self._ask(self._stub.Rest, request, on_result, on_failed)

    def move(
        self,
        request: control_pb2.MoveRequest,
        *,
        on_result: Callable[[control_pb2.MoveReply], None],
        on_failed: Callable[[RingTuneError], None],
    ) -> None:
        """Let the node move to another placement, in place of a move that is under way."""
        request.prepare.run_id, number = self._run_id, self._call_move_off()

        def work() -> None:
            if (reply := self._unless_off(number, self._stub.Move, request)) is not None:
                on_result(reply)

        self._submit(work, on_failed)

    def halt(
        self, *, on_result: Callable[[control_pb2.RestReply], None], on_failed: Callable[[RingTuneError], None]
    ) -> None:
        """Let the node stop at once, whatever it does; what it prepares is given up, and a move too."""
        request = control_pb2.RestRequest(run_id=self._run_id, halts=True)
        self._call_move_off()
        self._ask(self._stub.Rest, request, on_result, on_failed)

    def ask_alive(self, on_answer: Callable[[bool], None]) -> None:
        """Ask, beside all other calls, whether the node answers within ``ALIVE_S``.

        ``on_answer`` is called on a thread of gRPC.
        """

        def answered(call: Any) -> None:
            on_answer(call.code() is grpc.StatusCode.OK)

        self._stub.Alive.future(control_pb2.Empty(), timeout=ALIVE_S).add_done_callback(answered)

    def _unless_off(self, number: int, method: Any, request: Any) -> Any:
        """Let the node prepare or move; None where it stops or moves elsewhere instead, and needs no such call."""
        with self._lock:
            if number != self._num_moves:
                return None
            self._moving = moving = self._asking(method, request, self._wait_s)
        with contextlib.suppress(grpc.FutureCancelledError):
            return self._track(moving).result()
        return None

    def _call_move_off(self) -> int:
        """Give up the move that is under way, or waits to be asked for; return the number of the next one."""
        with self._lock:
            self._num_moves += 1
            if self._moving is not None:
                self._moving.cancel()
            return self._num_moves

    def grant(
        self, turns: Sequence[Turn], *, keep_from_step: int = 0, keep: Mapping[TensorKey, str] | None = None
    ) -> None:
        """Grant turns to the node, let it drop shards of steps before ``keep_from_step``, and ``keep`` some tensors."""
        request = self._grants.request(turns, keep_from_step=keep_from_step, keep=keep)
        again = RetriedCall(self._stub.Grant, request, peer=self._peer, lease_s=self._lease_s, is_held=False)
        self._submit(lambda: self._track(again).result(), self._lost)

    def repeat(
        self,
        request: control_pb2.RepeatRequest,
        *,
        on_result: Callable[[control_pb2.RepeatReply], None],
        on_failed: Callable[[RingTuneError], None],
    ) -> None:
        """Let the node repeat a part of another host's work, beside all other calls."""
        request.run_id, request.placement_number = self._run_id, self._placement_number
        self._answer_beside("audit", self._asking(self._stub.Repeat, request, self._wait_s), on_result, on_failed)

    def collect(
        self,
        request: control_pb2.CollectRequest,
        folder: Path,
        *,
        max_bytes: int,
        users: Sequence[str] = (),
        on_result: Callable[[dict[str, Pieces]], None],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Fetch the node's results into an empty folder, with files of ``users``; ``on_result`` gets them by name.

        A node that sends more than ``max_bytes``, or less than ``in_time`` allows, fails; one of a run that continues
        sends no totals. Else that may take as long as it does: ``on_progress`` is called while bytes arrive. With
        ``best_step`` a node keeps its results on its disk, beside those of ``needed_steps``, and sends none if the run
        continues, else those that it kept at that step.
        """
        request.run_id = self._run_id
        names = (*part_files(users), _TOTALS)

        def attempt(hear: Callable[[], None]) -> dict[str, Path]:
            _empty(folder)
            call = self._track(self._stub.Collect(request))
            chunks = watched(in_time(call, self._wait_s, source=f"node {self.node}"), hear, on_progress)
            try:
                return write_any_files(chunks, folder, names=names, max_bytes=max_bytes, source=f"node {self.node}")
            finally:
                call.cancel()  # of a node that sends on

        def collect() -> None:
            on_result({name: FilePieces(path) for name, path in self._repeated(attempt).items()})

        self._submit(collect, self._lost)

    def release(self, reason: str, *, is_finished: bool = False) -> Future[None]:
        """Cancel the call under way and tell the node that the run is over; errors are only logged."""
        self._cancel()
        request = control_pb2.ReleaseRequest(run_id=self._run_id, reason=reason, is_finished=is_finished)

        def work() -> None:
            for _ in range(_RELEASES):  # a node that hears of none learns from its next heartbeat
                try:
                    self._stub.Release(request, timeout=_RELEASE_S / _RELEASES)
                    return
                except grpc.RpcError as error:
                    _LOG.info("node %s was not released: %s", self.node, error)

        return self._worker.submit(work)

    def close(self) -> None:
        """Cancel all calls and close the connection."""
        self._cancel()
        self._worker.close(0.0)
        self._channel.close()

    # ---- how it is asked --------------------------------------------------------------------------

    def _submit(self, work: Callable[[], object], on_failed: Callable[[RingTuneError], None] | None = None) -> None:
        """Do some work after all that was submitted before; a failure of it need not be that of the node."""
        self._worker.submit(self._guarded, work, on_failed or (lambda error: self._on_failure(self.node, error)))

    def _ask(
        self,
        method: Any,
        request: Any,
        on_result: Callable[[Any], None],
        on_failed: Callable[[RingTuneError], None] | None = None,
    ) -> None:
        self._submit(lambda: on_result(self._unary(method, request, self._wait_s)), on_failed)

    def _guarded(self, work: Callable[[], object], tell: Callable[[RingTuneError], None]) -> None:
        if self._cancelled.is_set():
            return
        try:
            work()
        except Exception as error:
            if self._cancelled.is_set():
                return
            if isinstance(error, grpc.RpcError):
                tell(call_error(error, node=self.node, address=self.address))
            elif isinstance(error, RingTuneError):
                tell(error)
            else:
                _LOG.exception("a call to node %s failed by a bug", self.node)
                tell(internal_error(error, where=f"node {self.node}"))

    def _load(self, files: Mapping[str, Pieces], on_progress: Callable[[], None]) -> None:
        """Send the files of a saved result; a node that gets them twice loads them twice."""

        def messages() -> Iterator[control_pb2.LoadChunk]:
            run_id = self._run_id
            for name, content in files.items():
                for chunk in cut_pieces(name, content):
                    yield control_pb2.LoadChunk(run_id=run_id, file=chunk)
                    run_id = ""  # the first one says it for all

        def attempt(hear: Callable[[], None]) -> None:
            self._track(self._stub.Load.future(watched(messages(), hear, on_progress))).result()

        self._repeated(attempt)

    def _repeated(self, attempt: Callable[[Callable[[], None]], T]) -> T:
        state = RetryState(lease_s=self._lease_s, timeout_s=_AGAIN_S)
        return state.repeat(lambda: attempt(state.hear), peer=self._peer, given_up=self._cancelled)

    def _asking(self, method: Any, request: Any, timeout_s: float) -> RetriedCall:
        return RetriedCall(method, request, peer=self._peer, lease_s=self._lease_s, timeout_s=timeout_s)

    def _unary(self, method: Any, request: Any, timeout_s: float) -> Any:
        return self._track(self._asking(method, request, timeout_s)).result()

    def _track(self, call: Any) -> Any:
        with self._lock:
            self._call = call
            if self._cancelled.is_set():
                call.cancel()
        return call

    def _cancel(self) -> None:
        with self._lock:
            self._cancelled.set()
            for call in (self._call, self._fetching):
                if call is not None:
                    call.cancel()

    def _lost(self, error: RingTuneError) -> None:
        """Tell of a failed call in training or collecting: a node that does not know the run has lost its state."""
        if isinstance(error, FrameError):
            error = PeerLostError(f"node {self.node} was started again, or has given the run up: {error}")
        self._on_failure(self.node, error)


def read_facts(node: str, reply: control_pb2.InspectReply, *, is_timed: bool) -> NodeFacts:
    """Read the facts of a node from its answer; raises ``IntegrityError``. ``is_timed``: it was to time its work."""
    try:
        facts = NodeFacts.from_message(read_object(reply.facts_json, f"the answer of node {node} with its facts"))
        if is_timed:
            facts.check_times()
    except InvalidInputError as error:
        remedy = "" if "; " in str(error) else "; use one version on all machines"
        raise IntegrityError(naming_node(node, f"{error}{remedy}")) from error
    if facts.node != node:
        raise IntegrityError(f"node {node} sent the facts of node {facts.node}; use one version on all machines")
    return facts


ALIVE_S: Final = 2.0
"""Seconds in which a node answers that another one has reported as lost."""

MEASURE_S: Final = 1.0
"""A run measures briefly as it starts; 'ringtune measure' takes longer, and nodes remember the better one."""


def inspect_request(
    job: Job, *, measure: bool, neighbours: int, frozen: FrozenWeights | None, measure_s: float = MEASURE_S
) -> control_pb2.InspectRequest:
    """Make the request for a node's facts; the answer takes ``runtime.wait_s`` at most.

    With ``measure`` it times its work, for ``measure_s``, at the same moment as so many ``neighbours`` on its machine,
    as they will compute, with frozen weights held as in ``frozen``; None = as it computes.
    """
    request = control_pb2.InspectRequest(
        job_toml=job.to_toml(), measure=measure, measure_s=measure_s, neighbours=neighbours
    )
    if frozen is not None:
        request.frozen_dtype, request.frozen_native = frozen.dtype, frozen.native
    return request
