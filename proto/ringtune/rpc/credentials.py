"""The encryption of both ends of a connection: mutual TLS with the identity of the process, and its renewal."""

from __future__ import annotations

from typing import Any

import grpc

from ringtune.rpc.channel_options import Options
from ringtune.rpc.renewing_channel import RenewingChannel
from ringtune.trust.identity import Identity
from ringtune.trust.parties import ANY_MEMBER, Party
from ringtune.trust.speaking import Speaker


def secure_channel(address: str, options: Options, speaker: Speaker, peer: Party | None) -> grpc.Channel:
    """Open a channel to somebody who is known by a certificate.

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
    """Open an encrypted channel to whoever has a certificate of that name."""
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
