"""Calls to one node: one after the other, each with a deadline, each cancellable.

A node has one worker thread, so that grants arrive in the order in which they were given. A call whose request or
answer is lost is made again for a lease, and carried out once (``ringtune.rpc.repeating``). What went wrong is told in
the node's own words if it answered, and as a lost node if it did not.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from coordinator.drive.calls.failures import call_error
from coordinator.drive.calls.files import FileCalls
from ringtune.errors import RingTuneError, internal_error
from ringtune.files.pieces import Pieces
from ringtune.models.result_files import part_files
from ringtune.rpc.codecs.grants import GrantWriter
from ringtune.rpc.connections import open_channel
from ringtune.rpc.repeating.asking import Asking
from ringtune.schedule.frozen_weights import FrozenWeights
from ringtune.schedule.turns.turns import Turn
from ringtune.trust.parties import node_party
from ringtune.v1 import control_pb2, control_pb2_grpc

_LOG = logging.getLogger(__name__)
_RELEASE_S = 3.0
_RELEASES = 2
_TOTALS = "totals.json"


def ask_frozen(request: control_pb2.InspectRequest, frozen: FrozenWeights | None) -> None:
    """Ask a node to time itself with frozen weights held so."""
    if frozen is not None:
        request.frozen_dtype, request.frozen_native = frozen.dtype, frozen.native


class AgentCalls:
    """The coordinator's calls to one node in one run.

    Args:
        node: its name.
        address: ``host:port``.
        run_id: of the run.
        lease_s: a node that does not answer for so long is lost.
        on_failure: called with the error of a failed call, from the worker thread.
    """

    def __init__(
        self,
        node: str,
        address: str,
        run_id: str,
        *,
        lease_s: float,
        on_failure: Callable[[str, RingTuneError], None],
    ) -> None:
        self.node = node
        self._lease_s = lease_s
        self.address = address
        self._run_id = run_id
        self._on_failure = on_failure
        self._placement_number, self._grants = 0, GrantWriter(run_id)
        self._moving: Asking | None = None
        self._fetching: Asking | None = None
        self._num_moves = 0
        self._channel = open_channel(address, peer=node_party(node))
        self._stub = control_pb2_grpc.AgentStub(self._channel)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"calls-{node}")
        self._lock = threading.Lock()
        self._call: Any = None
        self._cancelled = threading.Event()
        self._peer = f"node {node} at {address}"
        self._files = FileCalls(
            self._stub, run_id, node, address, lease_s=lease_s, track=self._track, over=self._cancelled
        )

    # ---- what is asked ----------------------------------------------------------------------------

    def inspect(
        self,
        job_toml: str,
        *,
        measure: bool,
        timeout_s: float,
        on_result: Callable[[control_pb2.InspectReply], None],
        extend: Callable[[control_pb2.InspectRequest], None] = lambda request: None,
    ) -> None:
        """Ask for the node's facts, and for whatever else ``extend`` asks."""
        request = control_pb2.InspectRequest(run_id=self._run_id, job_toml=job_toml, measure=measure)
        extend(request)
        self._submit(lambda: on_result(self._unary(self._stub.Inspect, request, timeout_s)))

    def measure_link(
        self,
        target: str,
        address: str,
        message_bytes: int,
        *,
        timeout_s: float,
        on_result: Callable[[control_pb2.MeasureLinkReply], None],
        brief: bool = False,
        computing_s: float = 0.0,
    ) -> None:
        """Ask the node to measure its link to the node ``target``.

        ``brief`` with fewer messages; with ``computing_s`` only what messages take from its computing.
        """
        request = control_pb2.MeasureLinkRequest(
            target=target, address=address, message_bytes=message_bytes, brief=brief, computing_s=computing_s
        )
        self._submit(lambda: on_result(self._unary(self._stub.MeasureLink, request, timeout_s)))

    def prepare(
        self,
        plan_json: str,
        job_toml: str,
        addresses: Mapping[str, str],
        *,
        timeout_s: float,
        on_result: Callable[[int], None],
        on_progress: Callable[[], None] = lambda: None,
        saved: Mapping[str, Pieces] | None = None,
        extend: Callable[[control_pb2.PrepareRequest], None] = lambda request: None,
    ) -> None:
        """Send the plan, and files of a saved result to begin with; ``on_result`` gets the bytes hosted.

        The files may take as long as they do: ``on_progress`` is called while they go.
        """
        named, number = dict(addresses), self._num_moves
        request = control_pb2.PrepareRequest(
            run_id=self._run_id,
            placement_number=self._placement_number,
            plan_json=plan_json,
            job_toml=job_toml,
            addresses=named,
        )
        extend(request)

        def work() -> None:
            if (reply := self._unless_off(number, self._stub.Prepare, request, timeout_s)) is None:
                return
            if saved is not None:
                self._files.load(saved, on_progress)
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
        timeout_s: float,
        on_result: Callable[[int], None],
        on_failed: Callable[[RingTuneError], None],
    ) -> None:
        """Let the node fetch base weights, beside all other calls, in place of others that it fetches."""
        request.run_id = self._run_id
        asking = self._asking(self._stub.FetchAhead, request, timeout_s)
        with self._lock:
            if self._fetching is not None:
                self._fetching.cancel()
            self._fetching = asking

        def work() -> None:
            with contextlib.suppress(grpc.FutureCancelledError):
                on_result(asking.result().fetched_bytes)

        threading.Thread(
            target=self._guarded, args=(work, on_failed), name=f"fetching-{self.node}", daemon=True
        ).start()

    def rest(
        self,
        placement_number: int,
        *,
        timeout_s: float,
        on_result: Callable[[control_pb2.RestReply], None],
        on_failed: Callable[[RingTuneError], None],
    ) -> None:
        """Let the node keep what it has trained and offer it to others."""
        request = control_pb2.RestRequest(run_id=self._run_id, placement_number=placement_number)
        self._submit(lambda: on_result(self._unary(self._stub.Rest, request, timeout_s)), on_failed)

    def move(
        self,
        request: control_pb2.MoveRequest,
        *,
        timeout_s: float,
        on_result: Callable[[control_pb2.MoveReply], None],
        on_failed: Callable[[RingTuneError], None],
    ) -> None:
        """Let the node move to another placement, in place of a move that is under way."""
        request.prepare.run_id, number = self._run_id, self._call_move_off()

        def work() -> None:
            if (reply := self._unless_off(number, self._stub.Move, request, timeout_s)) is not None:
                on_result(reply)

        self._submit(work, on_failed)

    def halt(
        self, *, timeout_s: float, on_result: Callable[[], None], on_failed: Callable[[RingTuneError], None]
    ) -> None:
        """Let the node stop at once, whatever it does; what it prepares is given up, and a move too."""
        request = control_pb2.RestRequest(run_id=self._run_id, halts=True)
        self._call_move_off()

        def work() -> None:
            self._unary(self._stub.Rest, request, timeout_s)
            on_result()

        self._submit(work, on_failed)

    def _unless_off(self, number: int, method: Any, request: Any, timeout_s: float) -> Any:
        """Let the node prepare or move; None where it stops or moves elsewhere instead, and need not hear of this."""
        with self._lock:
            if number != self._num_moves:
                return None
            self._moving = moving = self._asking(method, request, timeout_s)
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

    def grant(self, turns: Sequence[Turn], *, keep_from_step: int = 0) -> None:
        """Grant turns to the node, and let it drop shards of steps before ``keep_from_step``."""
        request = self._grants.request(turns, keep_from_step=keep_from_step)
        again = Asking(self._stub.Grant, request, peer=self._peer, lease_s=self._lease_s, is_held=False)
        self._submit(lambda: self._track(again).result())

    def collect(
        self,
        folder: Path,
        *,
        with_head: bool,
        with_private: bool,
        max_bytes: int,
        goes_on: bool = False,
        users: Sequence[str] = (),
        on_result: Callable[[dict[str, Pieces]], None],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Fetch the node's results into an empty folder, with files of ``users``; ``on_result`` gets them by name.

        A node that sends more than ``max_bytes`` fails; one of a run that ``goes_on`` sends no totals. That may take
        as long as it does: ``on_progress`` is called while bytes come.
        """
        request = control_pb2.CollectRequest(
            run_id=self._run_id, with_head=with_head, with_private=with_private, goes_on=goes_on
        )
        names = (*part_files(users), _TOTALS)
        self._submit(lambda: on_result(self._files.collect(request, folder, names, max_bytes, on_progress)))

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
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._channel.close()

    # ---- how it is asked --------------------------------------------------------------------------

    def _submit(self, work: Callable[[], object], on_failed: Callable[[RingTuneError], None] | None = None) -> None:
        """Do some work after all that was submitted before; a failure of it need not be that of the node."""
        self._worker.submit(self._guarded, work, on_failed or (lambda error: self._on_failure(self.node, error)))

    def _guarded(self, work: Callable[[], object], tell: Callable[[RingTuneError], None]) -> None:
        if self._cancelled.is_set():
            return
        try:
            work()
        except grpc.RpcError as error:
            if not self._cancelled.is_set():
                tell(call_error(error, node=self.node, address=self.address))
        except Exception as error:
            if not self._cancelled.is_set():
                tell(error if isinstance(error, RingTuneError) else self._bug(error))

    def _asking(self, method: Any, request: Any, timeout_s: float) -> Asking:
        return Asking(method, request, peer=self._peer, lease_s=self._lease_s, timeout_s=timeout_s)

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

    def _bug(self, error: Exception) -> RingTuneError:
        _LOG.error("a call to node %s failed by a bug", self.node, exc_info=error)
        return internal_error(error, where=f"node {self.node}")
