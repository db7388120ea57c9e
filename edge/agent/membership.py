"""The membership of a node: join, heartbeats that renew the lease, reaction to a lost coordinator, leave.

One thread sends a heartbeat every third of the lease. Outcomes::

    known, driving our run      continue
    known, driving another run  our run is over: its Release got lost
    unknown                     the coordinator has restarted or declared us lost: stop the run, join again
    silence for 12 leases       stop the run; join again when it answers, or end if a parent started us

A coordinator that is frozen or unreachable for less than 12 leases finds the run unchanged, at the end of the granted
turns. One that has restarted does not know the node, and says so in its first answer.

Only the lease decides which nodes are alive. An open connection proves nothing, nor does one unanswered heartbeat: a
node that was frozen has lost its connection, and its next heartbeat reaches the coordinator.

The time to keep trying to join and the time to wait for one answer are separate: a coordinator on a busy machine may
need seconds for an answer, and a late answer says nothing about name or version.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import grpc

from edge.runtime.reporter import SharedClock
from ringtune.errors import BusyError, ConnectionFailedError, DeadlineError, RingTuneError, TrustError
from ringtune.transport.codecs import removals_from_proto
from ringtune.transport.parties import COORDINATOR
from ringtune.transport.retry import RetryState
from ringtune.transport.speaker import Removals, speaker
from ringtune.transport.status import error_of_call
from ringtune.transport.tls import handshake_problem
from ringtune.v1 import control_pb2, control_pb2_grpc

_LOG = logging.getLogger(__name__)
_JOIN_CALL_S = 5.0
_JOIN_RETRY_S = 0.5
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
        coordinator: Callable[[], control_pb2_grpc.CoordinatorStub],
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
        self._coordinator, self._where, self._identity = coordinator, where, identity
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
                self._join_once(_JOIN_CALL_S)
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

    def leave(self, *, timeout_s: float = 2.0) -> None:
        """Stop the heartbeats and notify the coordinator; one that does not answer is no error."""
        self._leaving.set()
        if not self._thread.is_alive():
            return
        request = control_pb2.LeaveRequest(node=self._identity.node, instance=self._identity.instance)
        try:
            RetryState(lease_s=timeout_s / 2, timeout_s=timeout_s / 2).repeat(
                lambda: self._coordinator().Leave(request, timeout=timeout_s / 2), peer=f"coordinator {self._where}"
            )
        except grpc.RpcError as error:
            _LOG.debug("leaving without an answer: %s", error)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _join_once(self, timeout_s: float) -> None:
        sent_s = time.monotonic()
        try:
            reply = self._coordinator().Join(self._identity, timeout=timeout_s)
        except grpc.RpcError as error:
            refusal = error_of_call(error, peer=f"coordinator {self._where}")
            if isinstance(refusal, DeadlineError):  # not a member yet, so not a lost peer
                raise ConnectionFailedError(
                    f"coordinator {self._where} did not answer within {timeout_s:g} s; check that it runs"
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
            authorities_version=who.identity.authorities_version if (who := speaker()) else None,
        )
        sent_s = time.monotonic()
        try:
            reply = self._coordinator().Heartbeat(request, timeout=max(0.5, self._lease_s / 3))
        except grpc.RpcError as error:
            refusal = error_of_call(error, peer=f"coordinator {self._where}")
            if isinstance(refusal, TrustError):
                raise refusal from error
            self._on_silence(error)
            return
        self._heard_s = time.monotonic()
        self._clock.compare(sent_s, self._heard_s, reply.now_unix_s)
        self._missed = 0
        # a coordinator of an earlier version has no version of them, and sends all each time
        if not reply.HasField("removals_version") or reply.removals_version != self._removals_version:
            self._removed, self._removals_version = removals_from_proto(reply.removed), reply.removals_version
        self._on_answer(self._removed, reply.authorities_pem)
        if self._is_silent:
            self._is_lost = self._is_silent = False
            _LOG.info("coordinator %s answers again", self._where)
        if not reply.known:
            self._on_run_over("", f"coordinator {self._where} no longer knows node {self._identity.node}")
            if not self._leaving.is_set():
                self._join_once(_JOIN_CALL_S)
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
