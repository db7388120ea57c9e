"""Mutual TLS with the identity of the process, and diagnosis of failed handshakes.

A channel keeps the certificate with which it was opened; a server uses the newest one in each handshake.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from typing import TYPE_CHECKING, Any, Final

import grpc

from ringtune.errors import ConnectionFailedError
from ringtune.transport import speaker as speaking
from ringtune.transport.endpoints import Options, split_address
from ringtune.transport.parties import ANY_MEMBER, Party
from ringtune.transport.speaker import Speaker

if TYPE_CHECKING:
    from ringtune.transport.identity import Identity


def secure_channel(address: str, options: Options, speaker: Speaker, peer: Party | None) -> grpc.Channel:
    """Open a channel to a party with a certificate; ``peer`` None = any member. The address is not authenticated."""
    identity = speaker.identity
    credentials = grpc.ssl_channel_credentials(identity.authority_pem, identity.key_pem, identity.certificate_pem)
    return pinned_channel(address, credentials, peer.server_name if peer else ANY_MEMBER, options)


def pinned_channel(
    address: str, credentials: grpc.ChannelCredentials, server_name: str, options: Options
) -> grpc.Channel:
    """Open an encrypted channel to the holder of a certificate for ``server_name``."""
    return grpc.secure_channel(address, credentials, options=(*options, ("grpc.ssl_target_name_override", server_name)))


def server_credentials(speaker: Speaker, *, asks_certificate: bool) -> grpc.ServerCredentials:
    """Make the credentials of a server, with the newest certificate in each handshake."""
    served = speaker.identity

    def newest() -> Any:  # None where nothing has changed, which gRPC's types lack
        nonlocal served
        if speaker.identity is served:
            return None
        served = speaker.identity
        return _configuration(served, asks_certificate=asks_certificate)

    first = _configuration(served, asks_certificate=asks_certificate)
    return grpc.dynamic_ssl_server_credentials(first, newest, asks_certificate)


def _configuration(identity: Identity, *, asks_certificate: bool) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(identity.key_pem, identity.certificate_pem)], identity.authority_pem if asks_certificate else None
    )


_CLOSED: Final = "Socket closed"
_PEEK_S: Final = 3.0
_HANDSHAKE: Final = {
    "WRONG_VERSION_NUMBER": "speaks plain text, and this process encrypts; start it with a trust folder, or add "
    "--insecure if the network is trusted",
    "certificate has expired": "has a certificate that has expired; set the clocks, or start it again (a node: with a "
    "new token)",
    "certificate is not yet valid": "has a certificate that is not valid yet; set the clocks",
    "unable to get local issuer certificate": "has a certificate of another authority; join with a token of that "
    "coordinator, or correct the address",
    "Hostname Verification Check failed": "is another party than {peer}; correct the address",
}
"""Part of gRPC's text of a failed handshake -> meaning for the party at the address."""
_TAKES_CERTIFICATES: Final = (
    "who answers at {address} takes certificates only, and this process has none; join with a token ('ringtune node "
    "--token-file FILE', for a user 'ringtune join'), or correct --trust"
)


def handshake_problem(failure: str, address: str, peer: Party) -> str:
    """Say why certificates prevented a connection, given gRPC's text; empty = no such reason is known."""
    who = speaking.speaker()
    if who is None:
        return _TAKES_CERTIFICATES.format(address=address) if _CLOSED in failure and _is_encrypted(address) else ""
    problem = who.identity.facts.problem_at(time.time())
    if problem:
        return f"the certificate of this process {problem}"
    meaning = next((meaning for text, meaning in _HANDSHAKE.items() if text in failure), "")
    return f"who answers at {address} {meaning.format(peer=peer)}" if meaning else ""


def _is_encrypted(address: str) -> bool:
    try:
        certificate_at(address, timeout_s=_PEEK_S)
    except ConnectionFailedError:
        return False
    return True


def certificate_at(address: str, *, timeout_s: float = 10.0) -> bytes:
    """Return the certificate of the party that answers at an address, or first at several, PEM, unverified.

    Raises:
        ConnectionFailedError: nobody answers, or without a certificate.
    """
    address, _, others = address.partition(",")
    if others:
        with contextlib.suppress(ConnectionFailedError):
            return certificate_at(address, timeout_s=timeout_s)
        return certificate_at(others, timeout_s=timeout_s)
    host, port = split_address(address, option="--coordinator")
    try:
        return ssl.get_server_certificate((host, port), timeout=timeout_s).encode("ascii")
    except ssl.SSLError as error:
        raise ConnectionFailedError(
            f"who answers at {address} shows no certificate, but speaks plain text; correct --coordinator, or start it "
            "with a trust folder"
        ) from error
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ConnectionFailedError(
            f"nobody answers at {address} ({why}); check that the coordinator runs with a trust folder, and address "
            "and firewall"
        ) from error
