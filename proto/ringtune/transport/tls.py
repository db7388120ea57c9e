"""Mutual TLS with the identity of the process, and diagnosis of failed handshakes.

A server uses the newest identity in each handshake. gRPC keeps a channel's for its life; so a ``RenewedChannel`` is a
channel for each identity that the process had, of which calls use the newest.
"""

from __future__ import annotations

import contextlib
import functools
import ssl
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from ringtune.errors import ConnectionFailedError
from ringtune.transport.credentials import Credentials, process_credentials
from ringtune.transport.endpoints import Options, split_address
from ringtune.transport.parties import ANY_MEMBER, Party

if TYPE_CHECKING:
    from ringtune.transport.identity import Identity


def secure_channel(address: str, options: Options, credentials: Credentials, peer: Party | None) -> grpc.Channel:
    """Open a channel to a party with a certificate; ``peer`` None = any member. The address is not authenticated."""

    def open_as(identity: Identity) -> grpc.Channel:
        encrypted = grpc.ssl_channel_credentials(identity.authorities_pem, identity.key_pem, identity.certificate_pem)
        return pinned_channel(address, encrypted, peer.server_name if peer else ANY_MEMBER, options)

    return RenewedChannel(open_as, credentials)


class RenewedChannel(grpc.Channel):
    """A channel of which each call uses the identity that the process has when the call begins; safe for threads.

    Calls that are under way when the identity changes stay on the connection on which they began.
    """

    def __init__(self, open_as: Callable[[Identity], grpc.Channel], credentials: Credentials) -> None:
        self._open_as, self._credentials = open_as, credentials
        self._lock = threading.RLock()
        self._is_closed = False
        self._identity = credentials.identity
        self._channels = [open_as(self._identity)]

    def bound(self, method: _Method) -> Any:
        """Return the callable of a method on the newest channel; of a closed one the last, which refuses calls."""
        with self._lock:
            if self._is_closed:  # a new method of a closed channel ends the process
                if method.made is None:
                    raise ValueError("the channel is closed")
                return method.made
            if self._identity is not self._credentials.identity:
                self._identity = self._credentials.identity
                self._channels.append(self._open_as(self._identity))
            if method.channel is not self._channels[-1]:
                method.channel = self._channels[-1]
                method.made = getattr(method.channel, method.kind)(*method.arguments, **method.named)
            return method.made

    def close(self) -> None:
        """End all calls and connections."""
        with self._lock:
            self._is_closed = True
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def subscribe(
        self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool | None = False
    ) -> None:
        """Report the state of the newest connection."""
        self._channels[-1].subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Report no more."""
        for channel in self._channels:
            channel.unsubscribe(callback)

    def _method(self, kind: str, *arguments: Any, **named: Any) -> Any:
        return _Method(self, kind, arguments, named)

    unary_unary: Any = functools.partialmethod(_method, "unary_unary")
    unary_stream: Any = functools.partialmethod(_method, "unary_stream")
    stream_unary: Any = functools.partialmethod(_method, "stream_unary")
    stream_stream: Any = functools.partialmethod(_method, "stream_stream")


class _Method:
    """Callable of a method of a ``RenewedChannel``, as gRPC's, with what its channel has made of it last."""

    def __init__(self, owner: RenewedChannel, kind: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._owner = owner
        self.kind, self.arguments, self.named = kind, arguments, named
        self.channel: grpc.Channel | None = None
        self.made: Any = None
        owner.bound(self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._owner.bound(self)(*arguments, **named)

    def future(self, *arguments: Any, **named: Any) -> Any:
        return self._owner.bound(self).future(*arguments, **named)

    def with_call(self, *arguments: Any, **named: Any) -> Any:
        return self._owner.bound(self).with_call(*arguments, **named)


def pinned_channel(
    address: str, credentials: grpc.ChannelCredentials, server_name: str, options: Options
) -> grpc.Channel:
    """Open an encrypted channel to the holder of a certificate for ``server_name``."""
    return grpc.secure_channel(address, credentials, options=(*options, ("grpc.ssl_target_name_override", server_name)))


def server_credentials(credentials: Credentials, *, asks_certificate: bool) -> grpc.ServerCredentials:
    """Make the credentials of a server, with the newest certificate in each handshake."""
    served = credentials.identity

    def newest() -> Any:  # None where nothing has changed, which gRPC's types lack
        nonlocal served
        if credentials.identity is served:
            return None
        served = credentials.identity
        return _configuration(served, asks_certificate=asks_certificate)

    first = _configuration(served, asks_certificate=asks_certificate)
    return grpc.dynamic_ssl_server_credentials(first, newest, asks_certificate)


def _configuration(identity: Identity, *, asks_certificate: bool) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(identity.key_pem, identity.certificate_pem)], identity.authorities_pem if asks_certificate else None
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
    who = process_credentials()
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
    """Return the certificate of the party that answers at an address, or first at several, PEM, unverified."""
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
