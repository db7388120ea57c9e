"""gRPC channels and servers with one set of options: encryption, check of callers, threads, and silent connections.

Every channel and server port of the process is opened here. If the process has an identity (``transport.speaker``),
both ends show a certificate and all is encrypted; otherwise all is plain text. A port is never shared. ``Guard`` checks
the certificate of every caller before the call reaches a servicer.

``defer_accept``: gRPC allocates 45 KiB for a TLS handshake when a connection opens, measured with grpcio 1.85, and half
of it stays in the heap afterwards. A client sends first, also in plain text, so Linux can hold a connection until its
first byte (``TCP_DEFER_ACCEPT``). gRPC has no option for it, so the listening socket is found among those of this
process.

``Workers``: ``concurrent.futures.ThreadPoolExecutor`` fails a server in two ways. If the system has no more threads,
its ``submit`` raises on gRPC's own thread, which ends: no call is answered or cancelled from then on. And the
interpreter waits at exit for every worker, for ever if one of them is blocked. Here a call waits for a free thread,
threads are daemons, and ``close`` has a time limit.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc

from ringtune.errors import ConnectionFailedError, TrustError
from ringtune.texts import RepeatCounter, times
from ringtune.transport import speaker as speaking
from ringtune.transport.endpoints import CLIENT_OPTIONS, SERVER_OPTIONS, Options, join_address, split_address
from ringtune.transport.parties import Party, permission_of, require_permission, require_sender
from ringtune.transport.retry import IdempotencyInterceptor
from ringtune.transport.speaker import Speaker
from ringtune.transport.status import abort

if TYPE_CHECKING:
    from ringtune.transport.identity import CertificateFacts

_LOG = logging.getLogger(__name__)
DEFER_S: Final = 60
"""Seconds that the system holds a silent connection; after them the time limit of a handshake begins."""
_OWN: Final = Path("/proc/self/fd")


def defer_accept(port: int) -> int:
    """Set ``TCP_DEFER_ACCEPT`` on the listening sockets of this process on a port.

    Returns:
        Number of these sockets; 0 on a system without the option.
    """
    if not hasattr(socket, "TCP_DEFER_ACCEPT"):
        return 0
    count = 0
    for number in _numbers():
        try:
            copy = socket.socket(fileno=os.dup(number))
        except OSError:  # no socket, or closed meanwhile
            continue
        with copy:
            count += _defer(copy, port)
    if not count:
        _LOG.debug("port %d: silent connections are taken at once", port)
    return count


def _numbers() -> Iterator[int]:
    """Yield the file descriptors of this process that are sockets."""
    try:
        entries = sorted(_OWN.iterdir())
    except OSError:
        return
    for entry in entries:
        try:
            if str(entry.readlink()).startswith("socket:"):
                yield int(entry.name)
        except OSError:  # the descriptor of the folder itself, or closed meanwhile
            continue


def _defer(found: socket.socket, port: int) -> bool:
    try:
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.getsockname()[1] != port:
            return False
        if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, DEFER_S)
    except OSError as error:
        _LOG.debug("port %d: silent connections are taken at once: %s", port, error)
        return False
    return True


T = TypeVar("T")
_IDLE_S: Final = 30.0
"""Seconds that an idle thread waits for a call before it ends."""


class Workers(Executor):
    """Executor with at most ``max_workers`` daemon threads; further calls wait."""

    def __init__(self, max_workers: int, name: str) -> None:
        self._max_workers = max_workers
        self._name = name
        self._changed = threading.Condition()
        self._pending: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._num_started = 0
        self._is_closed = False

    def submit(self, function: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        """Run a call as soon as a thread is free; after ``close`` it is cancelled at once. Never raises."""
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                future.cancel()
                return future
            self._pending.append((future, lambda: function(*arguments, **named)))
            if self._num_idle >= len(self._pending):
                self._changed.notify()
            elif len(self._threads) < self._max_workers:
                self._start()
        return future

    def close(self, timeout_s: float) -> bool:
        """Cancel waiting calls and end the threads; return False if one still runs after ``timeout_s`` seconds."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._is_closed = True
            for future, _ in self._pending:
                future.cancel()
            self._pending.clear()
            self._changed.notify_all()
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}_{self._num_started}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads
            _LOG.warning("%s: %s; a call waits until one of %d is free", self._name, error, len(self._threads))
            return
        self._num_started += 1
        self._threads.add(thread)

    # ---- a thread ---------------------------------------------------------------------------------

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            _carry_out(*entry)
            del entry  # an idle thread must not keep a call's objects alive

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """Wait for a call; None if this thread is to end."""
        with self._changed:
            self._num_idle += 1
            self._changed.wait_for(lambda: self._pending or self._is_closed, _IDLE_S)
            self._num_idle -= 1
            if self._pending:
                return self._pending.popleft()
            self._threads.discard(threading.current_thread())
            return None


def _carry_out(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


_CERTIFICATE = "x509_pem_cert"
Refusal = Callable[["CertificateFacts"], str]


def caller_of(context: grpc.ServicerContext) -> CertificateFacts | None:
    """Return the facts in the caller's certificate; None on a connection in plain text."""
    found = context.auth_context().get(_CERTIFICATE)
    return _facts(bytes(found[0])) if found else None


@functools.lru_cache(maxsize=1024)
def _facts(pem: bytes) -> CertificateFacts:
    from ringtune.transport.identity import facts_of

    return facts_of(pem)


class Guard(grpc.ServerInterceptor):
    """Admits a call if the caller's certificate is valid now, permits it, and is of the sender in the request.

    A connection outlives its certificate, so dates and removals are checked in every call. ``refusal`` returns the
    reason to refuse a party with a valid certificate; empty = none.
    """

    def __init__(self, refusal: Refusal) -> None:
        self._refusal = refusal
        self._repeats = RepeatCounter()

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Wrap the handler of a call with the check."""
        handler = continuation(details)
        if handler is None:
            return None
        ways = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if is_stream else "unary" for is_stream in ways)
        behaviour = getattr(handler, kind)

        def checked(request: Any, context: grpc.ServicerContext) -> Any:
            self._require(details.method, request, context)
            return behaviour(request, context)

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(checked, handler.request_deserializer, handler.response_serializer)

    def _require(self, method: str, request: Any, context: grpc.ServicerContext) -> None:
        try:
            caller = caller_of(context)
            if caller is None:
                raise TrustError("there is no certificate; join with a token first")
            if problem := caller.problem_at(time.time()):
                raise TrustError(f"the certificate of {caller.party} is refused: {problem}")
            if removal := self._refusal(caller):
                raise TrustError(f"the certificate of {caller.party} is refused: {removal}; join with a new token")
            require_permission(caller.party, method)
            sender = permission_of(method).sender
            if sender:
                require_sender(caller.party, getattr(request, sender))
        except TrustError as error:
            count = self._repeats.told((method, str(error)))
            if count:
                _LOG.warning("a call from %s is refused: %s%s", context.peer(), error, times(count))
            abort(context, error)


MAX_WORKERS: Final = 1024
"""Most concurrent calls of a server."""

_STOP_S: Final = 5.0


def open_channel(address: str, more: Options = (), *, peer: Party | None = None) -> grpc.Channel:
    """Open a channel, which connects at the first call; the caller closes it.

    Args:
        address: ``host:port``.
        more: further options; they override those of every channel.
        peer: expected party; None = any member. Not used in plain text.
    """
    options, speaker = (*more, *CLIENT_OPTIONS), speaking.speaker()  # of two with one name gRPC takes the first
    if speaker is None:
        return grpc.insecure_channel(address, options=options)
    from ringtune.transport.tls import secure_channel

    return secure_channel(address, options, speaker, peer)


class Server:
    """A gRPC server on one address, with its own threads; the constructor starts it.

    Args:
        address: ``host:port``; port 0 = a free one.
        add: adds servicers to the server before it starts.
        max_workers: most concurrent calls; every incoming link holds one for its whole run. Threads are started on
            demand.
        max_calls: most calls that wait or run, others are refused; None = any number.
        is_public: whether callers need no certificate; such a server has no other services.
        refusal: as for ``Guard``; None = that of the process's identity.
        before: called with the bound address before the first call is answered. If it raises, the address stays bound
            until the process ends.

    Attributes:
        address: with the bound port.

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
        guards.append(IdempotencyInterceptor())
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
        from ringtune.transport.tls import server_credentials

        return self._server.add_secure_port(address, server_credentials(speaker, asks_certificate=asks_certificate))

    def stop(self, grace_s: float = 0.5, *, wait: bool = True) -> None:
        """Refuse new calls, let running ones end for ``grace_s`` seconds, cancel the rest, end all threads.

        It takes some seconds at most: a call that can't be ended is left to the end of the process, which does not wait
        for it. With ``wait`` it waits for the threads too; a handler may block one for other reasons than its call.
        """
        try:
            self._server.stop(grace_s).wait(grace_s + _STOP_S)
        except RuntimeError as error:  # no thread left for gRPC's own timer
            _LOG.warning("the server at %s stops without cancelling its calls: %s", self.address, error)
        if not self._workers.close(_STOP_S if wait else 0.0) and wait:
            _LOG.warning("the server at %s stops while a call is still under way", self.address)
