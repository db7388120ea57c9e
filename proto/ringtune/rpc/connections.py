"""Both ends of every connection: channels and servers with the project's options, and nobody's port shared.

Everything that binds or dials goes through here. Where the process has an identity (``ringtune.trust.speaking``), both
ends show a certificate and everything is encrypted; otherwise all is plain text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import grpc

from ringtune.errors import ConnectionFailedError
from ringtune.rpc.addresses import join_address, split_address
from ringtune.rpc.channel_options import CLIENT_OPTIONS, SERVER_OPTIONS, Options
from ringtune.rpc.guard import Guard, Refusal
from ringtune.rpc.listening import defer_accept
from ringtune.rpc.repeating.once import Once
from ringtune.rpc.workers import Workers
from ringtune.trust import speaking
from ringtune.trust.parties import Party
from ringtune.trust.speaking import Speaker

_LOG = logging.getLogger(__name__)
MAX_WORKERS: Final = 1024
"""Calls that a server carries out at a time."""

_STOP_S: Final = 5.0


def open_channel(address: str, more: Options = (), *, peer: Party | None = None) -> grpc.Channel:
    """Open a channel, which connects at the first call; the caller closes it.

    Args:
        address: ``host:port``.
        more: options besides those that every channel has.
        peer: whose certificate is expected there; None = that of any member. Means nothing in plain text.
    """
    options, speaker = (*CLIENT_OPTIONS, *more), speaking.speaker()
    if speaker is None:
        return grpc.insecure_channel(address, options=options)
    from ringtune.rpc.credentials import secure_channel

    return secure_channel(address, options, speaker, peer)


class Server:
    """A gRPC server on one address, with its own threads; it listens at once.

    Args:
        address: ``host:port``; port 0 takes a free one.
        add: adds servicers to the server before it starts.
        max_workers: calls at a time; every incoming link holds one for as long as its run. Threads are started when
            they are needed, so a large number costs nothing.
        max_calls: calls that may wait or run, others are refused; None = any number.
        is_public: callers need no certificate; nothing else is served there then.
        refusal: says why a caller with a valid certificate is refused, empty = it is not; None = as the process's
            identity knows.
        before: called with the address, which is taken, before the first call is answered; calls wait for it. If it
            raises, the address stays taken until the process ends.

    Attributes:
        address: with the port that was taken.

    Raises:
        ConnectionFailedError: the port is busy, or the host is not one of this machine.
    """

    def __init__(
        self,
        address: str,
        add: Callable[[grpc.Server], None],
        *,
        max_workers: int = MAX_WORKERS,
        max_calls: int | None = None,
        is_public: bool = False,
        refusal: Refusal | None = None,
        before: Callable[[str], object] = lambda address: None,
    ) -> None:
        self._workers = Workers(max_workers, "ringtune-rpc")
        pool: Any = self._workers  # gRPC asks for a ThreadPoolExecutor, and calls its submit only
        speaker = speaking.speaker()
        guards: list[grpc.ServerInterceptor] = [Guard(refusal or speaker.refusal)] if speaker and not is_public else []
        guards.append(Once())
        self._server = grpc.server(pool, options=SERVER_OPTIONS, maximum_concurrent_rpcs=max_calls, interceptors=guards)
        add(self._server)
        host, _ = split_address(address, option="--bind")
        try:
            self.port = self._bind(address, speaker, asks_certificate=not is_public)
        except RuntimeError as error:
            raise ConnectionFailedError(
                f"can't listen on {address}: the port is in use or the host is not this machine's; take another --bind"
            ) from error
        self.address = join_address(host, self.port)
        before(self.address)
        self._server.start()
        defer_accept(self.port)

    def _bind(self, address: str, speaker: Speaker | None, *, asks_certificate: bool) -> int:
        if speaker is None:
            return self._server.add_insecure_port(address)
        from ringtune.rpc.credentials import server_credentials

        return self._server.add_secure_port(address, server_credentials(speaker, asks_certificate=asks_certificate))

    def stop(self, grace_s: float = 0.5, *, wait: bool = True) -> None:
        """Refuse new calls, let the running ones end for ``grace_s``, cancel the rest, end all threads.

        Takes some seconds at most: a call that does not end, because its handler waits for something else or because
        gRPC could start no thread to cancel it, is left to the end of the process, which does not wait for it.

        Args:
            grace_s: seconds.
            wait: for the threads too; a handler that waits for something else than its call may hold one.
        """
        try:
            self._server.stop(grace_s).wait(grace_s + _STOP_S)
        except RuntimeError as error:  # no thread left for gRPC's own timer
            _LOG.warning("the server at %s stops without cancelling its calls: %s", self.address, error)
        if not self._workers.close(_STOP_S if wait else 0.0) and wait:
            _LOG.warning("the server at %s stops while a call is still under way", self.address)
