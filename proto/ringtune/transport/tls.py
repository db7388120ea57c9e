"""TLS of both ends of a connection: mutual, with the identity of the process, and channels that outlive a certificate.

gRPC can't change the certificate of a channel. So a call uses a channel with the newest certificate; calls that are
under way stay on theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc

from ringtune.transport.endpoints import Options
from ringtune.transport.identity import Identity
from ringtune.transport.parties import ANY_MEMBER, Party
from ringtune.transport.speaker import Speaker


class RenewingChannel(grpc.Channel):
    """Stands for the channel of the newest version.

    Args:
        version: counts how often the certificate was renewed.
        open_one: opens a channel with the certificate that there is.
    """

    def __init__(self, version: Callable[[], int], open_one: Callable[[], grpc.Channel]) -> None:
        self._newest = version
        self._open = open_one
        self._lock = threading.Lock()
        self._version = version()
        self._channels = [open_one()]

    def current(self) -> tuple[int, grpc.Channel]:
        """Return the channel for new calls, and its version; older ones stay for the calls that are under way."""
        with self._lock:
            if self._version != self._newest() and self._channels:
                self._version = self._newest()
                self._channels.append(self._open())
            return self._version, self._channels[-1]

    def subscribe(
        self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool | None = False
    ) -> None:
        """Tell of the newest channel whether it is connected."""
        self.current()[1].subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Tell no more."""
        for channel in self._channels:
            channel.unsubscribe(callback)

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """Make a call with one message each way."""
        return _Method(self, "unary_unary", arguments, named)

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """Make a call that is answered by many messages."""
        return _Method(self, "unary_stream", arguments, named)

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        """Make a call of many messages."""
        return _Method(self, "stream_unary", arguments, named)

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        """Make a call of many messages each way."""
        return _Method(self, "stream_stream", arguments, named)

    def close(self) -> None:
        """Close it, and all calls that are under way."""
        with self._lock:
            for channel in self._channels:
                channel.close()

    def __enter__(self) -> RenewingChannel:
        """Return the channel."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the channel."""
        self.close()


class _Method:
    """One method of the channel; each call uses the newest channel."""

    def __init__(self, channel: RenewingChannel, kind: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._channel = channel
        self._make: Callable[[grpc.Channel], Any] = lambda newest: getattr(newest, kind)(*arguments, **named)
        self._made: tuple[int, Any] = (-1, None)

    def _newest(self) -> Any:
        version, channel = self._channel.current()
        if self._made[0] != version:
            self._made = (version, self._make(channel))
        return self._made[1]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._newest()(*arguments, **named)

    def future(self, *arguments: Any, **named: Any) -> Any:
        return self._newest().future(*arguments, **named)

    def with_call(self, *arguments: Any, **named: Any) -> Any:
        return self._newest().with_call(*arguments, **named)


def secure_channel(address: str, options: Options, speaker: Speaker, peer: Party | None) -> grpc.Channel:
    """Open a channel to a party that proves itself by a certificate.

    Args:
        address: ``host:port``; what stands there proves nothing.
        options: of the channel.
        speaker: as whom.
        peer: to whom; None = any member.
    """
    name = peer.server_name if peer else ANY_MEMBER

    def open_one() -> grpc.Channel:
        identity = speaker.identity
        credentials = grpc.ssl_channel_credentials(identity.authority_pem, identity.key_pem, identity.certificate_pem)
        return pinned_channel(address, credentials, name, options)

    return RenewingChannel(lambda: speaker.now()[1], open_one)


def pinned_channel(
    address: str, credentials: grpc.ChannelCredentials, server_name: str, options: Options
) -> grpc.Channel:
    """Open an encrypted channel to the bearer of a certificate of that name."""
    return grpc.secure_channel(address, credentials, options=(*options, ("grpc.ssl_target_name_override", server_name)))


def server_credentials(speaker: Speaker, *, asks_certificate: bool) -> grpc.ServerCredentials:
    """Make the credentials of a server, which takes up a renewed certificate without a restart.

    Args:
        speaker: as whom.
        asks_certificate: whether callers need one too.
    """
    served = -1

    def newest() -> Any:  # None where nothing has changed, which the types do not foresee
        nonlocal served
        identity, version = speaker.now()
        if version == served:
            return None
        served = version
        return _configuration(identity, asks_certificate=asks_certificate)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(speaker.identity, asks_certificate=asks_certificate), newest, asks_certificate
    )


def _configuration(identity: Identity, *, asks_certificate: bool) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(identity.key_pem, identity.certificate_pem)], identity.authority_pem if asks_certificate else None
    )
