"""The gRPC server of a coordinator: its services, its address, and its announcement on the local network."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import ipaddress
import logging
import platform
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import grpc

import ringtune
from coordinator.run.driver import Driver
from coordinator.run.events import now_unix_s
from coordinator.run.members import Member, rack_of
from coordinator.run.requests import Evaluation, MeasureRequest, RunRequest, receive_run_request
from coordinator.server.certificate_authority import TrustKeeper
from coordinator.server.coordinator import Coordinator
from ringtune import __version__
from ringtune.errors import BusyError, ConnectionFailedError, StorageError, TokenError, TrustError, UsageError
from ringtune.hints import hint_to_install
from ringtune.job.job import parse_job, result_of
from ringtune.quantities import format_seconds
from ringtune.storage.chunks import write_files
from ringtune.texts import RepeatCounter, one_line, printable, times
from ringtune.transport.channels import Server, caller_of
from ringtune.transport.codecs import removal_to_proto
from ringtune.transport.discovery import SERVICE, is_announced, words_of
from ringtune.transport.endpoints import (
    FEW_BYTES,
    is_loopback,
    is_wildcard,
    join_address,
    machine_address,
    require_private,
    split_address,
)
from ringtune.transport.identity import authorities_version, fingerprint
from ringtune.transport.open_calls import TokenBucket, address_of
from ringtune.transport.parties import SUBMITTER_ROLE, Party, node_party
from ringtune.transport.status import abort, answer, answer_stream
from ringtune.transport.weights_servicer import WeightsServicer
from ringtune.v1 import control_pb2, control_pb2_grpc, trust_pb2, trust_pb2_grpc, weights_pb2_grpc

if TYPE_CHECKING:
    from ringtune.transport.identity import CertificateFacts

_LOG = logging.getLogger(__name__)
_MAX_TEXT: Final = 300
_SAID = tuple(field.name for field in dataclasses.fields(Member) if field.name not in ("seen_at_s", "rss_bytes"))
_OPTIONAL: tuple[Literal["train_rows"], Literal["eval_rows"]] = ("train_rows", "eval_rows")
_TOLD = tuple(name for name in _SAID if name != "instance")


def member_of(request: control_pb2.JoinRequest) -> Member:
    """Make a member from the fields of an agent's join request."""
    said: dict[str, Any] = {name: getattr(request, name) for name in _SAID}
    for name, value in said.items():
        if isinstance(value, str):  # of an agent; it is shown and logged later
            said[name] = one_line(value, most=_MAX_TEXT)
    return Member(**said | {name: None for name in _OPTIONAL if not request.HasField(name)})


def entry_of(member: Member, state: str, seen_s: float) -> control_pb2.NodeEntry:
    """Make the entry of a member in a list for users, without its ``instance``."""
    joined = control_pb2.JoinRequest(**{name: getattr(member, name) for name in _TOLD})
    joined.rack = rack_of(member)
    return control_pb2.NodeEntry(joined=joined, state=state, seen_s=seen_s, rss_bytes=member.rss_bytes)


_UPLOAD_S = 600.0
_MAX_UPLOADS = 8
"""Most uploads at a time, which occupy the disk; half of them by one user."""


class CoordinatorServicer(control_pb2_grpc.CoordinatorServicer):
    """The calls of agents and users to the coordinator."""

    def __init__(self, coordinator: Coordinator, keeper: TrustKeeper | None) -> None:
        self._coordinator = coordinator
        self._keeper = keeper
        self._began_s = time.monotonic()
        self._repeats = RepeatCounter()
        self._lock = threading.Lock()
        self._uploads: Counter[str] = Counter()

    def Join(self, request: control_pb2.JoinRequest, context: grpc.ServicerContext) -> control_pb2.JoinReply:
        """Add the calling node to the members."""
        caller = caller_of(context)

        def join() -> None:
            if caller is not None and caller.party.is_guest and not request.is_guest:
                raise TrustError(
                    f"{caller.party} is a guest of one evaluation, no host; make a token for it with 'ringtune "
                    "coordinator token NAME'"
                )
            self._coordinator.join(member_of(request))
            refusal = (
                self._keeper.credentials.refusal(caller) if self._keeper is not None and caller is not None else ""
            )
            if refusal:  # it was removed since this call began, and perhaps before it was a member
                self._coordinator.remove(request.node, refusal, forever=False)
                raise TrustError(f"node {request.node} is refused: {refusal}; join with a new token")

        answer(context, join)
        return control_pb2.JoinReply(
            lease_s=self._coordinator.lease_s,
            now_unix_s=now_unix_s(),
            authorities_pem=self._keeper.authorities if self._keeper is not None else (),
        )

    def Heartbeat(
        self, request: control_pb2.HeartbeatRequest, context: grpc.ServicerContext
    ) -> control_pb2.HeartbeatReply:
        """Renew the lease of the calling node."""
        beat = answer(context, lambda: self._coordinator.heartbeat(request.node, request.instance, request.rss_bytes))
        reply = control_pb2.HeartbeatReply(known=beat[0], run_id=beat[1], now_unix_s=now_unix_s())
        if self._keeper is not None:
            self._hear(context, request.authorities_version)
            authorities = self._keeper.authorities
            if request.authorities_version != authorities_version(authorities):
                reply.authorities_pem.extend(authorities)
            removed = self._keeper.credentials.removed
            reply.removals_version = removed.version
            if request.removals_version != removed.version:
                reply.removed.extend(map(removal_to_proto, removed.entries))
        return reply

    def _hear(self, context: grpc.ServicerContext, authorities: str = "") -> None:
        """Let a rotation of the authority go on with a call: of whom, and which authorities a node trusts."""
        keeper, caller = self._keeper, caller_of(context)
        if keeper is not None and caller is not None:
            answer(context, lambda: self._try(lambda: keeper.heard(caller, authorities)))
            answer(context, self.advance_rotation)

    def advance_rotation(self) -> None:
        """Go on with a rotation of the authority, if one is under way and it is time."""
        keeper = self._keeper
        if keeper is None:
            return
        is_settled = time.monotonic() - self._began_s > self._coordinator.lease_s
        if line := self._try(lambda: keeper.advance(self._coordinator.names(), is_settled=is_settled)):
            self._coordinator.tell(line)

    def _try(self, step: Callable[[], str | None]) -> str | None:
        """Make a step of a rotation; one that the disk prevents is logged and made later, as no run depends on it."""
        try:
            return step()
        except StorageError as error:
            if count := self._repeats.told(str(error)):
                _LOG.warning("the rotation of the authority does not go on now: %s%s", error, times(count))
            return None

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
        """Return the state of the run, without its course for a user who has no part in it, and the members."""
        self._hear(context)
        members = answer(context, self._coordinator.members)
        run = answer(context, self._coordinator.run_status)
        if run is not None and not self._is_own(context, run.run_id):
            run = control_pb2.RunStatus(
                run_id=run.run_id, is_over=run.is_over, phase=run.phase, phase_s=run.phase_s, run_s=run.run_s
            )
        return control_pb2.StatusReply(
            version=__version__,
            now_unix_s=time.time(),
            run=run,
            nodes=[entry_of(*member) for member in members],
            authorities_pem=self._keeper.authorities if self._keeper is not None else (),
            rotation=_rotation_status(self._keeper),
        )

    def Run(
        self, request_iterator: Iterator[control_pb2.RunRequest], context: grpc.ServicerContext
    ) -> Iterator[control_pb2.RunEvent]:
        """Start a run and follow it; a run that is not stored stops when its follower disconnects."""
        with contextlib.ExitStack() as stack:
            with _in_time(context):
                folder = functools.partial(self._upload_folder, stack, context)
                request = answer(context, lambda: receive_run_request(request_iterator, folder))
            if request.resume is not None:
                self._require_known(context, request.resume.run_id)
            driver = answer(context, lambda: self._coordinator.run(request, owner=_user(context)))
            kept = self._coordinator.keeps(driver.run_id)
            if kept is None:
                yield from _follow(driver, context)
                return
        yield control_pb2.RunEvent(kept=True)
        events = kept.events(driver.run_id, wait=True, is_over=lambda: not context.is_active())
        yield from answer_stream(context, events)

    def Runs(self, request: control_pb2.Empty, context: grpc.ServicerContext) -> control_pb2.RunsReply:
        """List the stored runs."""
        records = answer(context, lambda: self._coordinator.require_kept().records())
        return control_pb2.RunsReply(
            runs=[
                control_pb2.KeptRun(record_json=record.to_text())
                for record in records.values()
                if _is_for(caller_of(context), record.owner)
            ]
        )

    def _require_own(self, context: grpc.ServicerContext, run_id: str) -> None:
        """End the call of a user with own runs only if the run, stored or driven here, is of another one."""
        if not self._is_own(context, run_id):
            owner = self._owner_of(run_id) or "another user"
            abort(context, TrustError(f"run {run_id} is of {owner}; ask them, or an administrator"))

    def _require_known(self, context: grpc.ServicerContext, run_id: str) -> None:
        """End the call also if nobody knows any more whose run it was: nodes keep trained state for longer."""
        self._require_own(context, run_id)
        if self._owner_of(run_id) is None and not _is_for(caller_of(context), ""):
            abort(context, TrustError(f"run {run_id} is not stored here any more; ask an administrator to resume it"))

    def _is_own(self, context: grpc.ServicerContext, run_id: str) -> bool:
        """Whether a caller has a part in a run; also if the run is not known here."""
        owner = self._owner_of(run_id)
        return owner is None or _is_for(caller_of(context), owner)

    def _owner_of(self, run_id: str) -> str | None:
        """Return whose a run is, also where only runs are stored that resumed it; None = it is not known here."""
        records = self._coordinator.kept.records() if self._coordinator.kept is not None else {}
        if run_id in records:
            return records[run_id].owner
        resumed = (record.owner for record in records.values() if record.first_run == run_id)
        return self._coordinator.owners.get(run_id, next(resumed, None))

    def Follow(
        self, request: control_pb2.FollowRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.RunEvent]:
        """Send the events of a stored run."""
        kept = answer(context, self._coordinator.require_kept)
        self._require_own(context, request.run_id)
        answer(context, lambda: kept.require(request.run_id))
        events = kept.events(
            request.run_id, wait=request.wait, whole=request.whole, is_over=lambda: not context.is_active()
        )
        for event in answer_stream(context, events):
            if not (request.without_files and event.WhichOneof("event") == "file"):
                yield event

    def Fetched(self, request: control_pb2.RunRef, context: grpc.ServicerContext) -> control_pb2.Empty:
        """Note that a user has all events of a run."""
        self._require_own(context, request.run_id)
        answer(context, lambda: self._coordinator.require_kept().fetched(request.run_id))
        return control_pb2.Empty()

    def Measure(
        self, request: control_pb2.MeasureRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.RunEvent]:
        """Start a measurement and follow it; it stops when its follower disconnects."""
        driver = answer(context, lambda: self._coordinator.measure(_measure_request(request), owner=_user(context)))
        yield from _follow(driver, context)

    def Drain(self, request: control_pb2.DrainRequest, context: grpc.ServicerContext) -> control_pb2.Empty:
        """End a run after the granted turns, or at once."""
        self._require_own(context, request.run_id)
        driver = answer(context, lambda: self._coordinator.driver_of(request.run_id))
        reason = printable(" ".join(request.reason.split()), most=_MAX_TEXT)
        answer(context, lambda: (driver.stop if request.now else driver.drain)(reason))
        return control_pb2.Empty()

    def Noted(self, request: control_pb2.CheckpointNoted, context: grpc.ServicerContext) -> control_pb2.Empty:
        """Note that the submitter has the manifest of a checkpoint on disk."""
        self._require_own(context, request.run_id)
        answer(context, lambda: self._coordinator.driver_of(request.run_id).noted(request.step))
        return control_pb2.Empty()

    def Evaluate(
        self, request_iterator: Iterator[control_pb2.EvaluateInput], context: grpc.ServicerContext
    ) -> Iterator[control_pb2.RunEvent]:
        """Evaluate an uploaded result and follow the evaluation; it stops when its follower disconnects."""
        with contextlib.ExitStack() as stack:
            with _in_time(context):
                folder = functools.partial(self._upload_folder, stack, context)
                driver = answer(context, lambda: self._evaluate(request_iterator, folder, caller_of(context)))
            upload = stack.pop_all()

        def end_upload() -> None:  # also that of a follower who reads nothing and stays
            driver.join(threading.TIMEOUT_MAX)
            upload.close()

        threading.Thread(target=end_upload, name="end-upload", daemon=True).start()
        yield from _follow(driver, context)

    def _upload_folder(self, stack: contextlib.ExitStack, context: grpc.ServicerContext) -> Path:
        """Make an empty folder for the files of an upload, which counts until the stack is closed."""
        caller = caller_of(context)
        who = str(caller.party) if caller else ""
        with self._lock:
            most = _MAX_UPLOADS // 2 if caller else _MAX_UPLOADS
            if self._uploads.total() >= _MAX_UPLOADS or self._uploads[who] >= most:
                raise BusyError(
                    f"{self._uploads[who]} results of {who or 'users'} are already being uploaded or evaluated; try "
                    "again soon"
                )
            self._uploads[who] += 1
        stack.callback(self._end_upload, who)
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringtune-")))

    def _end_upload(self, who: str) -> None:
        with self._lock:
            self._uploads[who] -= 1
            self._uploads += Counter()  # drops those without uploads

    def _evaluate(
        self,
        inputs: Iterator[control_pb2.EvaluateInput],
        make_folder: Callable[[], Path],
        caller: CertificateFacts | None,
    ) -> Driver:
        first, folder = next(inputs, control_pb2.EvaluateInput()).request, make_folder()
        if first.owner and self._keeper is not None and caller is not None and caller.has_own_runs_only:
            self._keeper.require_inviter(first.owner, caller.party.name)
        job = parse_job(first.job_toml, source="the submitted job")
        source, result = "the submitter", result_of(job)
        files = (entry.file for entry in inputs)
        write_files(files, folder, names=result.loaded, max_bytes=result.max_bytes, source=source)
        evaluation = Evaluation(owner=first.owner, folder=folder)
        request = RunRequest(job=job, plan_only=False, num_nodes=0, join_s=0.0, evaluation=evaluation)
        return self._coordinator.run(request, owner=caller.party.name if caller else "")


def _rotation_status(keeper: TrustKeeper | None) -> control_pb2.RotationStatus | None:
    state = keeper.last_state if keeper is not None else None
    return state and control_pb2.RotationStatus(
        phase=state.rotation.phase,
        old_sha256=fingerprint(state.rotation.old),
        new_sha256=fingerprint(state.rotation.new),
        waiting=len(state.waiting),
        ends_unix_s=state.rotation.ends_unix_s,
    )


def _user(context: grpc.ServicerContext) -> str:
    """Return the caller's name; empty in plain text."""
    caller = caller_of(context)
    return caller.party.name if caller else ""


def _is_for(caller: CertificateFacts | None, owner: str) -> bool:
    """Whether a caller has a part in a run of ``owner``: this user, an administrator, or anybody in plain text.

    No node has, as any user can invite a guest.
    """
    if caller is None:
        return True
    return caller.party.role == SUBMITTER_ROLE and (not caller.has_own_runs_only or caller.party.name == owner)


@contextmanager
def _in_time(context: grpc.ServicerContext) -> Iterator[None]:
    """Cancel a call that takes longer than ``_UPLOAD_S`` for this block."""
    too_slow = threading.Timer(_UPLOAD_S, context.cancel)
    too_slow.daemon = True
    too_slow.start()
    try:
        yield
    finally:
        too_slow.cancel()


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
    gone = "the submitter stopped the run or disconnected"
    if not context.add_callback(lambda: driver.stop(gone)):
        driver.stop(gone)
    yield from driver.events()


class JoiningServicer(trust_pb2_grpc.JoiningServicer):
    """The calls of parties without a certificate."""

    def __init__(self, keeper: TrustKeeper) -> None:
        self._keeper = keeper
        self._wrong = TokenBucket(_WRONG_TOKENS, _WRONG_TOKENS / 60.0)

    def Authority(self, request: trust_pb2.AuthorityRequest, context: grpc.ServicerContext) -> trust_pb2.AuthorityReply:
        """Return the certificate of the authority."""
        return trust_pb2.AuthorityReply(authority_pem=self._keeper.authority_pem)

    def Certify(self, request: trust_pb2.CertifyRequest, context: grpc.ServicerContext) -> trust_pb2.CertifyReply:
        """Return a certificate for a token."""
        address = address_of(context.peer())

        def certify() -> bytes:
            if not self._wrong.allows(address):
                raise BusyError(f"{_WRONG_TOKENS} wrong tokens came from {address} within a minute; try in a minute")
            try:
                return self._keeper.certify(request.secret, request.request_pem)
            except TokenError:
                self._wrong.take(address)
                raise

        pem = answer(context, certify)
        return trust_pb2.CertifyReply(certificate_pem=pem, authorities_pem=self._keeper.authorities)


class MembershipServicer(trust_pb2_grpc.MembershipServicer):
    """The calls that renew certificates, invite, remove and drain.

    ``keeper`` is None if the coordinator works without encryption.
    """

    def __init__(self, coordinator: Coordinator, keeper: TrustKeeper | None) -> None:
        self._coordinator = coordinator
        self._keeper = keeper

    def Renew(self, request: trust_pb2.RenewRequest, context: grpc.ServicerContext) -> trust_pb2.CertifyReply:
        """Return a certificate for the caller's new key."""
        caller = caller_of(context)

        def renew() -> trust_pb2.CertifyReply:
            if caller is None:
                raise UsageError(_PLAIN)
            keeper = self._required()
            pem = keeper.renew(caller, request.request_pem)
            return trust_pb2.CertifyReply(certificate_pem=pem, authorities_pem=keeper.authorities)

        return answer(context, renew)

    def Invite(self, request: trust_pb2.InviteRequest, context: grpc.ServicerContext) -> trust_pb2.InviteReply:
        """Make a token for a node that evaluates once."""
        user = _user(context)
        return trust_pb2.InviteReply(token=answer(context, lambda: self._required().invite(request.node, user=user)))

    def Remove(self, request: trust_pb2.RemoveRequest, context: grpc.ServicerContext) -> trust_pb2.RemoveReply:
        """Remove a node or user: its certificates are revoked, or without encryption its name is refused."""

        def remove() -> trust_pb2.RemoveReply:
            is_user = request.role == SUBMITTER_ROLE
            party = Party("submitter", request.node) if is_user else node_party(request.node)
            reason = f"{party} was removed" + (f": {request.reason}" if request.reason else "")
            number = self._keeper.remove(party, reason) if self._keeper is not None else 0
            if is_user and self._coordinator.kept is not None:
                self._coordinator.kept.disown(request.node)
            was_member = not is_user and self._coordinator.remove(request.node, reason, forever=self._keeper is None)
            return trust_pb2.RemoveReply(certificates=number, was_member=was_member)

        return answer(context, remove)

    def DrainNode(self, request: trust_pb2.DrainNodeRequest, context: grpc.ServicerContext) -> trust_pb2.DrainNodeReply:
        """Exclude a node from new runs, or undo that."""
        run_id = answer(context, lambda: self._coordinator.drain_node(request.node, undo=request.undo))
        return trust_pb2.DrainNodeReply(run_id=run_id)

    def Rotate(self, request: trust_pb2.RotateRequest, context: grpc.ServicerContext) -> trust_pb2.RotateReply:
        """Begin to replace the authority, or say how far that is."""

        def rotate() -> trust_pb2.RotateReply:
            keeper, least_s = self._required(), _LEAST_ROTATION_LEASES * self._coordinator.lease_s
            if not request.only_looks:
                if not least_s <= request.within_s <= _LONGEST_ROTATION_S:
                    raise UsageError(
                        f"--within has to be {format_seconds(least_s)} to 365 days here, not "
                        f"{request.within_s:g} s: members learn of it at their heartbeats"
                    )
                keeper.rotate(request.within_s)
                self._coordinator.tell(
                    f"{_user(context)} rotates the authority: a new one is introduced to the members"
                )
            return _rotate_reply(keeper, self._coordinator.names())

        return answer(context, rotate)

    def _required(self) -> TrustKeeper:
        if self._keeper is None:
            raise UsageError(_PLAIN)
        return self._keeper


def _rotate_reply(keeper: TrustKeeper, members: Collection[str]) -> trust_pb2.RotateReply:
    state = keeper.rotation_state(members)
    if state is None:
        return trust_pb2.RotateReply(old_sha256=fingerprint(keeper.authority_pem))
    rotation = state.rotation
    return trust_pb2.RotateReply(
        phase=rotation.phase,
        old_sha256=fingerprint(rotation.old),
        new_sha256=fingerprint(rotation.new),
        began_unix_s=rotation.began_unix_s,
        issues_unix_s=rotation.issues_unix_s,
        ends_unix_s=rotation.ends_unix_s,
        unconfirmed=state.unconfirmed,
        waiting=state.waiting,
        folder=state.folder,
        problem=state.problem,
    )


_LEAST_ROTATION_LEASES: Final = 10
_LONGEST_ROTATION_S: Final = 365 * 86400.0
_PLAIN: Final = "this coordinator gives no certificates; start it with a trust folder"

_MAX_CALLS = 4096
_STOP_RUN_S = 8.0
_GRACE_S = 1.0
_MAX_JOINING = 64
"""Threads for callers without a certificate, apart from those of members, whom they must not delay."""
_JOINING_CALLS = 256
_WRONG_TOKENS = 20
"""Most wrong tokens of an address within a minute: each is looked up in the register, which members need too."""


class CoordinatorServer:
    """A coordinator that listens once it is constructed; as a context manager it shuts down in order.

    Args:
        bind: ``host:port``; port 0 = any free one.
        lease_s: a node without a heartbeat for so long is lost.
        insecure: whether ``bind`` and nodes may be on other machines without encryption.
        keeper: of the trust; None = without encryption.
        join_port: for callers without a certificate, on the same host; 0 = the port after that of ``bind``, or any if
            that is any.
        before: called with the coordinator and the bound address before the first call is answered.

    Attributes:
        address: ``host:port`` where it listens.
        advance_rotation: continues a rotation of the authority that is due, as heartbeats do.

    Raises:
        UsageError: ``bind`` leaves this machine without ``insecure``.
        ConnectionFailedError: the address can't be bound.
    """

    def __init__(
        self,
        bind: str,
        *,
        lease_s: float,
        insecure: bool = False,
        keeper: TrustKeeper | None = None,
        join_port: int = 0,
        before: Callable[[Coordinator, str], object] = lambda coordinator, address: None,
    ) -> None:
        require_private(bind, option="--bind", insecure=insecure)
        self.coordinator = Coordinator(lease_s=lease_s, insecure=insecure)
        servicer = CoordinatorServicer(self.coordinator, keeper)
        self.advance_rotation = servicer.advance_rotation

        def add(server: grpc.Server) -> None:
            control_pb2_grpc.add_CoordinatorServicer_to_server(servicer, server)
            weights_pb2_grpc.add_WeightsServicer_to_server(WeightsServicer(self.coordinator.offers), server)
            trust_pb2_grpc.add_MembershipServicer_to_server(MembershipServicer(self.coordinator, keeper), server)

        self._server = Server(
            bind, add, max_calls=_MAX_CALLS, before=lambda address: before(self.coordinator, address), more=FEW_BYTES
        )
        self.address = self._server.address
        self._joining: Server | None = None
        if keeper is not None:
            try:
                self._joining = _serve_joining(keeper, bind, join_port)
            except BaseException:
                self._server.stop()
                raise

    def __enter__(self) -> CoordinatorServer:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the driven run, so that its nodes are released; then stop listening."""
        if self._joining is not None:
            self._joining.stop(0.0, wait=False)
        self.coordinator.stop("the coordinator ends", _STOP_RUN_S)
        self._server.stop(_GRACE_S, wait=False)


def _serve_joining(keeper: TrustKeeper, bind: str, join_port: int) -> Server:
    host, port = split_address(bind, option="--bind")
    address = join_address(host, join_port or (port + 1 if port else 0))
    add = functools.partial(trust_pb2_grpc.add_JoiningServicer_to_server, JoiningServicer(keeper))

    try:
        server = Server(
            address, add, max_workers=_MAX_JOINING, max_calls=_JOINING_CALLS, is_public=True, more=FEW_BYTES
        )
    except ConnectionFailedError as error:
        raise ConnectionFailedError(
            f"can't listen on {address}, the port for joining with a token; take another --join-port"
        ) from error
    keeper.serves_at(server.port)
    return server


_LONGEST_HOST = 40


@contextmanager
def announcing(
    address: str, *, asked: bool | None, authority_sha256: str, say: Callable[[str], object]
) -> Iterator[bool]:
    """Announce the coordinator on the local network while the context is open; yield whether it is announced.

    Args:
        address: ``host:port`` where it listens.
        asked: ``--announce`` or ``--no-announce``; None = announce if other machines can reach it.
        authority_sha256: of its authority, hex; empty = without encryption.
        say: gets the reason if it can't be announced although other machines can reach it.

    Raises:
        UsageError: ``asked`` is true, and it can't be announced.
    """
    if not is_announced(is_loopback=is_loopback(address), asked=asked):
        yield False
        return
    network, problem = _announce(address, authority_sha256)
    if problem and asked:
        raise UsageError(f"--announce: {problem}")
    if problem:
        say(f"not announced on the network: {problem}")
    try:
        yield network is not None
    finally:
        if network is not None:
            network.unregister_all_services()
            network.close()


def _announce(address: str, authority_sha256: str) -> tuple[Any, str]:
    """Register the service; return the library's object, or None and the reason."""
    host, port = split_address(address, option="--bind")
    host = machine_address() if is_wildcard(address) else host
    try:
        from zeroconf import Error, InterfaceChoice, ServiceInfo, Zeroconf
    except ImportError:
        return None, f"the library for it is missing: {hint_to_install('discovery')}"
    try:
        packed = ipaddress.ip_address(host).packed
    except ValueError:
        return None, f"{host or 'this machine'} is no address on a network; give an address to --bind"
    label = "".join(letter for letter in platform.node() if letter.isalnum() or letter in "-_")[:_LONGEST_HOST]
    try:
        network = Zeroconf(interfaces=["127.0.0.1"] if is_loopback(address) else InterfaceChoice.All)
    except OSError as error:
        return None, f"the network can't be used for it ({error})"
    info = ServiceInfo(
        SERVICE,
        f"{label or 'coordinator'} {port}.{SERVICE}",
        addresses=[packed],
        port=port,
        properties=words_of(ringtune.__version__, authority_sha256),
    )
    try:
        network.register_service(info, allow_name_change=True)
    except (Error, OSError) as error:
        network.close()
        return None, f"the network refused it ({type(error).__name__})"
    return network, ""
