"""A connection to a coordinator: members, the present run, and stored runs."""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Self, TypeVar

import grpc

from coordinator.server.run_record import RunRecord
from ringtune.errors import ConnectionFailedError, DeadlineError, RingTuneError, TrustError
from ringtune.hints import hint_to_start_coordinator
from ringtune.transport.channels import open_channel
from ringtune.transport.credentials import is_encrypted, process_credentials, use_credentials_of_user
from ringtune.transport.endpoints import require_compatible, require_private
from ringtune.transport.parties import COORDINATOR
from ringtune.transport.status import error_of_call
from ringtune.transport.tls import handshake_problem
from ringtune.v1 import control_pb2, control_pb2_grpc, trust_pb2, trust_pb2_grpc

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
CONNECT_S = 5.0
_ASK_AGAIN_S = 0.5
CALL_S = 10.0
"""Deadline of a call that is answered at once."""
_RENEW_S = 60.0
"""Time between two looks, of a command that follows a run, whether its certificate is to be renewed."""


class Connection:
    """A connection to a coordinator of a compatible version, which is checked at once.

    Each call raises the coordinator's error, or ``ConnectionFailedError`` where it does not answer.

    Args:
        insecure: plain text, even to another machine; False = with the user's identity, if there is one; None = with
            the present identity of the process, to a coordinator of its own.

    Raises:
        UsageError: wrong address, plain text to another machine without ``insecure``, or another version.
        ConnectionFailedError: no coordinator answers within ``CONNECT_S``.
        TrustError: a certificate is refused, or only one side encrypts.
    """

    def __init__(self, address: str, *, insecure: bool | None = None) -> None:
        self._trust = None if insecure is None else use_credentials_of_user(insecure=insecure)
        require_private(address, option="--coordinator", insecure=insecure or False)
        self.address = address
        self._channel = open_channel(address, peer=COORDINATOR)
        self._stub = control_pb2_grpc.CoordinatorStub(self._channel)
        self._membership = trust_pb2_grpc.MembershipStub(self._channel)
        self._renewed_s = time.monotonic()
        try:
            status = self._connect()
            require_compatible(f"coordinator {address}", status.version)
            self._renew(status)
        except BaseException:
            self.close()
            raise

    def _connect(self) -> control_pb2.StatusReply:
        """Wait for the first answer; say why there is none.

        ``grpc.channel_ready_future`` is not used: its thread may raise when the channel is closed soon afterwards.
        """
        with contextlib.suppress(DeadlineError):
            return self._asked(CONNECT_S, wait_for_ready=True)
        try:
            return self._asked()  # without a connection it fails at once, and says why
        except (ConnectionFailedError, DeadlineError) as error:
            why = handshake_problem(str(error), self.address, COORDINATOR)
            if why:
                raise TrustError(why) from error
            doctor = f"; 'ringtune doctor --coordinator {self.address}' checks clocks and certificates"
            raise ConnectionFailedError(
                f"no coordinator answers at {self.address} (waited {CONNECT_S:g} s); start it there with "
                f"'{hint_to_start_coordinator(self.address)}', or correct --coordinator"
                f"{doctor if is_encrypted() else ''}"
            ) from error

    def _renew(self, status: control_pb2.StatusReply) -> None:
        """Trust the coordinator's authorities, and renew this user's certificate if that is due.

        A failure does not stop the command.
        """
        credentials = process_credentials()
        if self._trust is not None and credentials is not None:
            from ringtune.transport.enrollment import renew_if_due, take_authorities

            take_authorities(status.authorities_pem, credentials, self._trust)
            if renew_if_due(self._membership, credentials, self._trust, time.time()):
                self._asked()  # with the new certificate, so that the coordinator knows that it has arrived

    def _reread(self) -> None:
        """Use a newer certificate on disk, which another command of this user has got for both."""
        credentials = process_credentials()
        if self._trust is not None and credentials is not None:
            from ringtune.transport.identity import read_identity

            with contextlib.suppress(TrustError):
                identity = read_identity(self._trust, time.time())
                if identity.facts.ends_unix_s > credentials.identity.facts.ends_unix_s:
                    credentials.identity = identity

    def heard(self, events: Iterable[control_pb2.RunEvent]) -> Iterator[control_pb2.RunEvent]:
        """Pass events on, which may take days; renew this user's certificate meanwhile, as commands do, at times."""
        for event in events:
            if self._trust is not None and time.monotonic() - self._renewed_s > _RENEW_S:
                self._renewed_s = time.monotonic()
                try:
                    self.status()
                except RingTuneError as error:  # the events may still come
                    _LOG.info("the certificate is not renewed now: %s", error)
            yield event

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def nodes(self) -> list[control_pb2.NodeEntry]:
        """List the coordinator's members."""
        return list(self._checked(lambda: self._stub.Nodes(control_pb2.Empty(), timeout=CALL_S)).nodes)

    def status(self) -> control_pb2.StatusReply:
        """Return the members and the state of the present run; renew this user's certificate if that is due."""
        reply = self._asked()
        self._renew(reply)
        return reply

    def _asked(self, timeout_s: float = CALL_S, *, wait_for_ready: bool = False) -> control_pb2.StatusReply:
        return self._checked(
            lambda: self._stub.Status(control_pb2.Empty(), timeout=timeout_s, wait_for_ready=wait_for_ready)
        )

    # ---- stored runs ------------------------------------------------------------------------------

    def runs(self) -> list[RunRecord]:
        """List the stored runs, oldest first."""
        reply = self._checked(lambda: self._stub.Runs(control_pb2.Empty(), timeout=CALL_S))
        return [RunRecord.parse(run.record_json) for run in reply.runs]

    def records(self) -> dict[str, RunRecord]:
        """Return the stored runs by id, oldest first."""
        return {record.run_id: record for record in self.runs()}

    def run_of(self, submission: str) -> str:
        """Return the id of the stored run that was submitted so; empty if there is none."""
        return next((record.run_id for record in self.runs() if record.submission == submission), "")

    def await_answer(self, wait_s: float, *, on_silence: Callable[[], None]) -> bool:
        """Ask until the coordinator answers; return whether it answered at once, else call ``on_silence`` first.

        With ``wait_s`` = 0 it is asked once, and nobody is told. Raises ``ConnectionFailedError``: it did not answer
        within ``wait_s``.
        """
        deadline_s, is_first = time.monotonic() + wait_s, True
        while True:
            try:
                self._reread()
                require_compatible(f"coordinator {self.address}", self.status().version)
            except (ConnectionFailedError, DeadlineError) as error:
                if is_first and wait_s:  # however long the first answer was waited for
                    on_silence()
                is_first = False
                if time.monotonic() + _ASK_AGAIN_S > deadline_s:
                    text = (
                        f"coordinator {self.address} has not answered for {wait_s:g} s; once it is restarted, it "
                        "resumes the run by itself"
                    )
                    raise ConnectionFailedError(text) from error
            else:
                return is_first
            time.sleep(_ASK_AGAIN_S)

    def events(self, run_id: str, *, wait: bool, whole: bool, with_files: bool) -> Iterator[control_pb2.RunEvent]:
        """Yield the events of a stored run.

        ``wait``: until the end of the run, else the present ones; ``whole``: preceded by those of the runs that
        it resumes; ``with_files``: with the pieces of result files.
        """
        request = control_pb2.FollowRequest(run_id=run_id, wait=wait, without_files=not with_files, whole=whole)
        call = self._stub.Follow(request)  # no deadline: a run may take days
        try:
            yield from self.heard(call)
        except grpc.RpcError as error:
            raise error_of_call(error, peer=f"coordinator {self.address}") from error
        finally:
            call.cancel()

    def fetched(self, run_id: str) -> None:
        """Confirm that all events of a run have arrived; without it the coordinator keeps them longer."""
        try:
            self._stub.Fetched(control_pb2.RunRef(run_id=run_id), timeout=CALL_S)
        except grpc.RpcError as error:
            _LOG.info("the coordinator was not notified that run %s was fetched: %s", run_id, error)

    # ---- membership -------------------------------------------------------------------------------

    def invite(self, node: str) -> str:
        """Get a token for a node of this machine for one evaluation."""
        request = trust_pb2.InviteRequest(node=node)
        return self._checked(lambda: self._membership.Invite(request, timeout=CALL_S)).token

    def remove(self, node: str, *, role: str, reason: str) -> trust_pb2.RemoveReply:
        """Make the coordinator refuse a node or a user from now on."""
        request = trust_pb2.RemoveRequest(node=node, role=role, reason=reason)
        return self._checked(lambda: self._membership.Remove(request, timeout=CALL_S))

    def drain_node(self, node: str, *, undo: bool) -> str:
        """Exclude a node from new runs, or undo that; return the run that it still works on."""
        request = trust_pb2.DrainNodeRequest(node=node, undo=undo)
        return self._checked(lambda: self._membership.DrainNode(request, timeout=CALL_S)).run_id

    def rotate(self, within_s: float | None) -> trust_pb2.RotateReply:
        """Replace the coordinator's authority within so many seconds; None = only see how far that is.

        Raises ``RingTuneError``: a rotation is under way, or the coordinator has no authority or does not answer.
        """
        request = trust_pb2.RotateRequest(within_s=within_s or 0.0, only_looks=within_s is None)
        return self._checked(lambda: self._membership.Rotate(request, timeout=CALL_S))

    def stop_run(self, run_id: str, reason: str, *, now: bool) -> None:
        """Ask for the end of a run: after the granted turns with a checkpoint, or at once (``now``)."""
        request = control_pb2.DrainRequest(run_id=run_id, reason=reason, now=now)
        self._checked(lambda: self._stub.Drain(request, timeout=CALL_S))

    def _checked(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except grpc.RpcError as error:
            raise error_of_call(error, peer=f"coordinator {self.address}") from error


def submitter_name() -> str:
    """``user@host`` of this process, for the list of runs."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
