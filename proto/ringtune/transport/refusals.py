"""Reasons of failed connections: gRPC reports "Socket closed" for every problem of a handshake.

Both certificates, both clocks and the chain are checked from here, and a second handshake shows whether the other side
takes this one's certificate. Called after a failure only.
"""

from __future__ import annotations

import socket
import ssl
import tempfile
import time
from typing import Final

from ringtune.errors import ConnectionFailedError, TrustError
from ringtune.transport.endpoints import split_address
from ringtune.transport.parties import Party
from ringtune.transport.speaker import Speaker, speaker

_WAIT_S: Final = 3.0
_BETWEEN_S: Final = 0.5


def refusal_reason(address: str, peer: Party | None, now_unix_s: float) -> str:
    """Say why certificates prevent a connection to an address that answers; empty = they are not the reason.

    Args:
        address: ``host:port``.
        peer: who should be there; None = any member.
        now_unix_s: this machine's clock.
    """
    from ringtune.transport.enrollment import certificate_at

    who = speaker()
    problem = who.identity.facts.problem_at(now_unix_s) if who else ""
    if problem:
        return f"the certificate of this process {problem}"
    try:
        there_pem = certificate_at(address, timeout_s=_WAIT_S)
    except ConnectionFailedError as error:
        is_plain = isinstance(error.__cause__, ssl.SSLError)
        return _plain(address) if is_plain and who is not None else ""
    if who is None:
        return (
            f"who answers at {address} takes certificates only, and this process has none; join with a token "
            "('ringtune node --token-file FILE', for a user 'ringtune join'), or correct --trust"
        )
    return problem_of_certificate(there_pem, address, peer, who, now_unix_s) or _answer_to(address, who)


def _plain(address: str) -> str:
    return (
        f"who answers at {address} speaks plain text, and this process encrypts; start it with a trust folder, or add "
        "--insecure if the network is trusted"
    )


def problem_of_certificate(pem: bytes, address: str, peer: Party | None, who: Speaker, now_unix_s: float) -> str:
    """Say what is wrong with the certificate of another party; empty = nothing.

    Args:
        pem: the certificate.
        address: where it was shown.
        peer: whose it should be; None = any member's.
        who: as whom this process speaks.
        now_unix_s: this machine's clock.
    """
    from ringtune.transport.identity import facts_of, is_issued_by

    if not is_issued_by(pem, who.identity.authority_pem):
        return (
            f"the certificate of {address} is of another authority than {who.identity.party}'s; join with a token of "
            "that coordinator, or correct the address"
        )
    try:
        facts = facts_of(pem)
    except TrustError as error:
        return f"the certificate of {address}: {error}"
    problem = facts.problem_at(now_unix_s)
    if problem:
        return f"the certificate of {address} {problem}"
    if peer is not None and facts.party != peer:
        return f"at {address} is {facts.party}, not {peer}; correct the address"
    return ""


def _answer_to(address: str, who: Speaker) -> str:
    """Say how the other side answers to this one's certificate; empty = it takes it.

    A gRPC server hangs up on a certificate that it does not take; one that is being stopped does so too, but not twice.
    """
    if not _drops_connection(address, who):
        return ""
    time.sleep(_BETWEEN_S)
    if not _drops_connection(address, who):
        return ""
    return (
        f"{address} refuses the certificate of {who.identity.party}: its clock may be wrong, or its authority was made "
        "anew; run 'ringtune doctor' on both machines, or join with a new token"
    )


def _drops_connection(address: str, who: Speaker) -> bool:
    """Whether a party that can be reached ends the connection after this side's certificate."""
    identity = who.identity
    context = ssl.create_default_context(cadata=identity.authority_pem.decode("ascii"))
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    with tempfile.NamedTemporaryFile(prefix="ringtune-") as file:  # for this user's eyes only
        file.write(identity.key_pem + identity.certificate_pem)
        file.flush()
        context.load_cert_chain(file.name)
    try:
        with (
            socket.create_connection(split_address(address, option="--coordinator"), timeout=_WAIT_S) as plain,
            context.wrap_socket(plain) as encrypted,
        ):
            return _ends(encrypted)
    except OSError:  # nobody is there, or the handshake itself failed
        return False


def _ends(encrypted: ssl.SSLSocket) -> bool:
    try:
        return not encrypted.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return True
