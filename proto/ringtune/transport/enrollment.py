"""Enrollment at a coordinator: a first certificate for a token, later ones for the current certificate.

With a token, in this order: the certificate of the answering party is read without trust; over a connection pinned to
it the authority's certificate is requested; its hash must be the token's; and only over a connection that the authority
has authenticated the token's secret is sent. So nobody in between can learn it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

import grpc

from ringtune.errors import BusyError, ConnectionFailedError, DeadlineError, RingTuneError, StorageError, TrustError
from ringtune.transport.channels import open_channel
from ringtune.transport.credentials import Credentials, using_credentials
from ringtune.transport.endpoints import CLIENT_OPTIONS, join_address, split_address
from ringtune.transport.identity import (
    Identity,
    began_unix_s,
    facts_of,
    fingerprint,
    is_issued_by,
    key_pem,
    make_key,
    make_request,
    write_identity,
)
from ringtune.transport.parties import COORDINATOR, Token
from ringtune.transport.status import error_of_call
from ringtune.transport.tls import certificate_at, pinned_channel
from ringtune.v1 import control_pb2, control_pb2_grpc, trust_pb2, trust_pb2_grpc

_LOG = logging.getLogger(__name__)
_CALL_S: Final = 10.0
_RENEW_S: Final = 3.0
"""Time limit of a renewal, short because a node's next heartbeat waits for it."""
_REFUSAL_S: Final = 20.0
_RENEW_AGAIN_S: Final = 600.0
_MOVE_AGAIN_S: Final = 20.0
_TRIES: Final = 3
"""Attempts with a token and one key: an answer may be lost, and the same key gets the same certificate."""
_BUSY_S: Final = 1.0
"""Pause after an attempt for which the coordinator had too many other calls."""
_SERVES_OTHERS: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED)
"""Of a port that wants a certificate, or has other services."""
Reply = TypeVar("Reply", trust_pb2.AuthorityReply, trust_pb2.CertifyReply)


def join(
    coordinator: str,
    token: Token,
    folder: Path,
    *,
    clock: Callable[[], float] = time.time,
    instead_of: Identity | None = None,
) -> Identity:
    """Get a certificate for a token and store it in a folder.

    Args:
        coordinator: ``host:port``; callers without a certificate use the token's port of that host, or the next port.
            Of several the first that answers.
        token: with the party, and the hash of the coordinator's authority.
        folder: for the identity.
        clock: this machine's wall clock.
        instead_of: present identity in the folder, which one of an older authority does not replace: that may be the
            one that its authority has replaced.
    """
    address, authority_pem = _answering(coordinator, token, clock())
    if instead_of is not None and began_unix_s(authority_pem) < max(map(began_unix_s, instead_of.authorities)):
        raise TrustError(
            f"the token is of an older authority than the certificate in {folder}; ask for a new token, or remove the "
            "certificate"
        )
    key = make_key()
    request = trust_pb2.CertifyRequest(secret=token.secret, request_pem=make_request(key))
    credentials = grpc.ssl_channel_credentials(authority_pem)
    with pinned_channel(address, credentials, COORDINATOR.server_name, CLIENT_OPTIONS) as channel:
        stub = trust_pb2_grpc.JoiningStub(channel)
        reply = _repeated(lambda: stub.Certify(request, timeout=_CALL_S), address)
    identity = Identity.of(key_pem(key), reply.certificate_pem, *reply.authorities_pem)
    if identity.party != token.party:
        raise TrustError(f"coordinator {address} made {token.party} {identity.party}; use one version on all machines")
    write_identity(folder, identity)
    _LOG.info("%s has a certificate in %s", identity.party, folder)
    return identity


def refusal(coordinator: str, who: Credentials) -> str:
    """Ask a coordinator, ``host:port``, why it refuses a party; empty = it does not, or does not answer."""
    with using_credentials(who), open_channel(coordinator, peer=COORDINATOR) as channel:
        try:
            control_pb2_grpc.CoordinatorStub(channel).Status(control_pb2.Empty(), timeout=_REFUSAL_S)
        except grpc.RpcError as error:
            failure = error_of_call(error, peer="the coordinator")
            return str(failure) if isinstance(failure, TrustError) else ""
    return ""


def _answering(coordinators: str, token: Token, now_unix_s: float) -> tuple[str, bytes]:
    """Return the first address for callers without a certificate that answers, and the authority's certificate."""
    coordinator, _, others = coordinators.partition(",")
    host, port = split_address(coordinator, option="--coordinator")
    address = join_address(host, token.port or port + 1)
    try:
        return address, _authority(address, token, now_unix_s)
    except ConnectionFailedError:
        if not others:
            raise
    return _answering(others, token, now_unix_s)


def _authority(address: str, token: Token, now_unix_s: float) -> bytes:
    leaf_pem = certificate_at(address)
    problem = coordinator_problem(leaf_pem, now_unix_s)
    if problem:
        raise TrustError(f"the certificate of {address} {problem}")
    credentials = grpc.ssl_channel_credentials(leaf_pem)
    with pinned_channel(address, credentials, COORDINATOR.server_name, CLIENT_OPTIONS) as channel:
        stub = trust_pb2_grpc.JoiningStub(channel)
        reply = _repeated(lambda: stub.Authority(trust_pb2.AuthorityRequest(), timeout=_CALL_S), address)
    try:
        is_right = fingerprint(reply.authority_pem) == token.authority_sha256
    except TrustError:
        is_right = False
    if not is_right or not is_issued_by(leaf_pem, reply.authority_pem):
        raise TrustError(
            f"who answers at {address} is not the coordinator that made the token: its authority is another one; "
            "correct --coordinator, or ask for a new token"
        )
    return reply.authority_pem


def coordinator_problem(pem: bytes, now_unix_s: float) -> str:
    """Say why a certificate is not a coordinator's valid one; empty = it is."""
    try:
        facts = facts_of(pem)
    except TrustError as error:
        return f"is of no coordinator ({error})"
    return facts.problem_at(now_unix_s) if facts.party == COORDINATOR else f"is of {facts.party}, not of a coordinator"


def _repeated(call: Callable[[], Reply], address: str) -> Reply:
    for left in reversed(range(_TRIES)):
        try:
            return call()
        except grpc.RpcError as error:
            failure = error_of_call(error, peer=f"coordinator {address}")
            if not left and isinstance(error, grpc.Call) and error.code() in _SERVES_OTHERS:
                raise ConnectionFailedError(
                    f"at {address} no coordinator gives certificates; check that it runs with a trust folder, and ask "
                    "for a new token: it has the port"
                ) from error
            if not left or not isinstance(failure, (BusyError, ConnectionFailedError, DeadlineError)):
                raise failure from error
            if isinstance(failure, BusyError):
                time.sleep(_BUSY_S)
    raise AssertionError("the last try returns or raises")  # pragma: no cover


# ---- renewal ---------------------------------------------------------------------------------------


def renew(stub: trust_pb2_grpc.MembershipStub, credentials: Credentials, folder: Path) -> None:
    """Get a new certificate for the current one, store it, and use it in connections opened from now on."""
    before, key = credentials.identity, make_key()
    try:
        request = trust_pb2.RenewRequest(request_pem=make_request(key))
        reply = stub.Renew(request, timeout=_RENEW_S)
    except grpc.RpcError as error:
        raise error_of_call(error, peer="the coordinator") from error
    after = Identity.of(key_pem(key), reply.certificate_pem, *reply.authorities_pem)
    if after.party != before.party:
        raise TrustError(f"the coordinator made {before.party} {after.party}; use one version on all machines")
    write_identity(folder, after)
    credentials.identity = after
    _LOG.info("the certificate of %s is renewed", after.party)


def renew_if_due(
    stub: trust_pb2_grpc.MembershipStub, credentials: Credentials, folder: Path, now_unix_s: float
) -> bool:
    """Renew a certificate that is due; return whether it was renewed.

    It is from ``renew_at_unix_s`` on, and where another authority signs by now. A failure is logged, and the next
    attempt is made ten minutes later; for another authority, which may be the only one soon, 20 s.
    """
    identity = credentials.identity
    is_due = now_unix_s >= identity.facts.renew_at_unix_s or not identity.is_of_signing_authority
    if not is_due or now_unix_s < credentials.renew_after_unix_s:
        return False
    again_s = _RENEW_AGAIN_S if identity.is_of_signing_authority else _MOVE_AGAIN_S
    credentials.renew_after_unix_s = now_unix_s + again_s
    try:
        renew(stub, credentials, folder)
    except RingTuneError as error:
        _LOG.warning("the certificate of %s can't be renewed yet: %s", credentials.identity.party, error)
        return False
    if credentials.identity.is_of_signing_authority:
        credentials.renew_after_unix_s = 0.0
    return True


def take_authorities(authorities: Iterable[bytes], credentials: Credentials, folder: Path) -> None:
    """Trust the authorities that the coordinator names from now on, in connections opened later, and store that.

    The signing one is first; none = nothing changes. Those that leave out the authority of the own certificate are
    not taken: nobody would accept that any more. If they can't be stored they are trusted until this process ends.
    """
    before, authorities = credentials.identity, tuple(authorities)
    if authorities in ((), before.authorities):
        return
    try:
        after = Identity.of(before.key_pem, before.certificate_pem, *authorities)
    except TrustError as error:
        _LOG.warning("other authorities are not taken: %s", error)
        return
    credentials.identity = after
    _LOG.info("%s trusts other authorities now (%d)", after.party, len(authorities))
    try:
        write_identity(folder, after)
    except StorageError as error:
        _LOG.warning("the authorities that %s trusts are not stored: %s", after.party, error)
