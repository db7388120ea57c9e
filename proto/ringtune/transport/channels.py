"""gRPC channels and servers with one set of options: encryption, check of callers, threads, and silent connections.

Every channel and server port of the process is opened here. If the process has an identity (``transport.credentials``),
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

import contextlib
import ctypes
import functools
import logging
import math
import os
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar

import grpc

from ringtune.errors import BusyError, ConnectionFailedError, RingTuneError, TrustError, UsageError
from ringtune.machine.process import carry_out
from ringtune.texts import RepeatCounter, times
from ringtune.transport.credentials import Credentials, process_credentials
from ringtune.transport.endpoints import CLIENT_OPTIONS, SERVER_OPTIONS, Options, join_address, split_address, target_of
from ringtune.transport.open_calls import OpenCall, OpenCalls, TokenBucket, address_of, numeric_host, place_of
from ringtune.transport.parties import (
    COORDINATOR_ROLE,
    NODE_ROLE,
    SUBMITTER_ROLE,
    Party,
    find_permission,
    require_permission,
    require_sender,
)
from ringtune.transport.retry import IdempotencyInterceptor
from ringtune.transport.status import abort

if TYPE_CHECKING:
    from ringtune.transport.identity import CertificateFacts

_LOG = logging.getLogger(__name__)
DEFER_S: Final = 60
"""Seconds that the system holds a silent connection; after them the time limit of a handshake begins."""
_OWN: Final = Path("/proc/self/fd")


def defer_accept(port: int) -> int:
    """Set ``TCP_DEFER_ACCEPT`` on the listening sockets of this process on a port; return their number."""
    count = 0
    for entry in sorted(_OWN.glob("*")) if hasattr(socket, "TCP_DEFER_ACCEPT") else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(entry.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                    is_of_port = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == port
                    if is_of_port and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, DEFER_S)
                        count += 1
    if not count:
        _LOG.debug("port %d: silent connections are taken at once", port)
    return count


class Connections:
    """The connections to one port of this process, by peer; closes one of them, which gRPC has no way to do.

    A system call of Python's lets other threads go on and then waits for them, 5 ms where they are busy, and a look
    takes one for each file descriptor. So they are called without that (``ctypes.PyDLL``); none of them waits.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._c: Any = ctypes.PyDLL(None)
        self._address, self._size = ctypes.create_string_buffer(128), ctypes.c_uint32()
        self._lock = threading.Lock()
        self._numbers: dict[tuple[str, int], int] = {}
        self._looked_s = -math.inf

    def has(self, peers: Mapping[str, float]) -> set[str]:
        """Return who is connected of these peers, given when each was heard last (monotonic seconds).

        One that was heard since the last look is, too, and one that has gone since may be.
        """
        with self._lock:
            self._look()
            return {peer for peer, at_s in peers.items() if at_s >= self._looked_s or place_of(peer) in self._numbers}

    def places(self) -> tuple[list[tuple[str, int]], float]:
        """Return addresses and ports of all peers, those that came last at the end, and when they were looked up."""
        with self._lock:
            self._look()
            return [place for place in self._numbers if place[0]], self._looked_s

    def close(self, place: tuple[str, int]) -> None:
        """End the connection of a peer's address and port, if it was there at the last look."""
        with self._lock:
            self._look()
            number = self._numbers.pop(place, None)
            if number is not None and self._end(number, "getpeername") == place:  # else the number is another one's
                self._c.shutdown(number, socket.SHUT_RDWR)

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s >= _SEEN_S:
            of_port = (number for number in range(_MAX_NUMBERS) if self._end(number, "getsockname")[1] == self._port)
            numbers = {self._end(number, "getpeername"): number for number in of_port}
            self._numbers = {place: numbers.pop(place) for place in self._numbers if place in numbers} | numbers
            self._looked_s = now_s

    def _end(self, number: int, name: str) -> tuple[str, int]:
        """Return the address and port of one end of a socket; (``""``, -1) = it is none."""
        self._size.value = len(self._address)
        if getattr(self._c, name)(number, self._address, ctypes.byref(self._size)):
            return "", -1
        raw = self._address.raw
        family, port = int.from_bytes(raw[:2], sys.byteorder), int.from_bytes(raw[2:4], "big")
        if family == socket.AF_INET:
            return numeric_host(socket.inet_ntop(family, raw[4:8])), port
        if family == socket.AF_INET6:
            return numeric_host(socket.inet_ntop(family, raw[8:24])), port
        return "", -1


_SEEN_S: Final = 0.1
_MAX_NUMBERS: Final = 4096
"""File descriptors that are looked at, twice the connections of two servers."""


T = TypeVar("T")
_IDLE_S: Final = 30.0
"""Seconds that an idle thread waits for a call before it ends."""


class Workers(ThreadPoolExecutor):
    """Executor with at most ``max_workers`` daemon threads; further calls wait.

    It has nothing of its base class but the name, for which gRPC asks of the threads of a single method.
    """

    def __init__(self, max_workers: int, name: str) -> None:
        self._max_workers = max_workers
        self._name = name
        self._changed = threading.Condition()
        self._pending: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
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
            self._pending.append((lambda: function(*arguments, **named), future))
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
            for _, future in self._pending:
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
            carry_out(*entry)
            del entry  # an idle thread must not keep a call's objects alive

    def _next(self) -> tuple[Callable[[], Any], Future[Any]] | None:
        """Wait for a call; None if this thread is to end."""
        with self._changed:
            self._num_idle += 1
            self._changed.wait_for(lambda: self._pending or self._is_closed, _IDLE_S)
            self._num_idle -= 1
            if self._pending:
                return self._pending.popleft()
            self._threads.discard(threading.current_thread())
            return None


MAX_WORKERS: Final = 1024
"""Most concurrent calls of a server, and as many urgent ones."""


class Lane(NamedTuple):
    """The threads of some methods, and their open calls."""

    workers: Workers
    calls: OpenCalls

    @classmethod
    def of(cls, max_workers: int, name: str) -> Lane:
        """Make one; some threads are left for calls that are refused."""
        return cls(Workers(max_workers, name), OpenCalls(max_workers - max_workers // 8))


_CERTIFICATE = "x509_pem_cert"
Refusal = Callable[["CertificateFacts"], str]


def caller_of(context: grpc.ServicerContext) -> CertificateFacts | None:
    """Return the facts in the caller's certificate; None on a connection in plain text."""
    certificates = context.auth_context().get(_CERTIFICATE)
    return _facts(bytes(certificates[0])) if certificates else None


@functools.lru_cache(maxsize=1024)
def _facts(pem: bytes) -> CertificateFacts:
    from ringtune.transport.identity import facts_of

    return facts_of(pem)


_MAX_OPEN: Final = {COORDINATOR_ROLE: 64, NODE_ROLE: 32, SUBMITTER_ROLE: 64}
"""Open calls of one certificate's party at a server, by role, and as many urgent ones; a node needs a handful."""
_MAX_PARTY_CONNECTIONS: Final = {COORDINATOR_ROLE: 12, NODE_ROLE: 12, SUBMITTER_ROLE: 32}
"""Connections of one certificate's party to a server, by role: each may hold some megabytes that nobody has read."""
_MAX_AT_ONCE: Final = 5000
_MAX_PER_S: Final = 500.0
"""Calls of one certificate's party at a server; a node makes a few a second, and a stream is one call."""
_MAX_PUBLIC: Final = 16
"""Open calls of one address where no certificate is needed; several boards may have one address."""
_PUBLIC_FIRST_S: Final = 5.0
_UNCALLED_S: Final = 30.0
"""Seconds until the first call of a connection, which clients open for one."""
_MAX_UNCALLED: Final = 64
"""Connections of one address without a call; more close the oldest of them."""
_MAX_REFUSED: Final = 500
"""Calls beyond the rate that are told so, and silent ones that were replaced; more close their connections."""


class Guard(grpc.ServerInterceptor):
    """Admits a call if the caller's certificate is valid now, permits it, and is of the sender in the request.

    A connection outlives its certificate, so dates and removals are checked in every call, before its first message is
    read. Then the limits of ``open_calls`` apply: every method is served as one with a stream of requests, because only
    of such a method gRPC calls the handler before the first message.

    Args:
        refusal: returns the reason to refuse a party with a valid certificate; empty = none. None = callers have no
            certificates.
        general: threads, and limit of open calls.
        urgent: those of urgent calls (``Permission.is_urgent``).
        most_of_address: open calls of one address, where callers have no certificates.
        first_message_s: time limit of the first message, where a method has none.
        keeps_called: whether a connection stays once it was called; else it ends as one without a call.
    """

    def __init__(
        self,
        refusal: Refusal | None,
        general: Lane,
        urgent: Lane,
        *,
        most_of_address: int = MAX_WORKERS // 2,
        first_message_s: float = 256.0,
        keeps_called: bool = True,
    ) -> None:
        self._refusal, self._keeps_called = refusal, keeps_called
        self._general, self._urgent = general, urgent
        self._most_of_address, self._first_message_s = most_of_address, first_message_s
        self._repeats = RepeatCounter()
        self._rate = TokenBucket(_MAX_AT_ONCE, _MAX_PER_S)
        self._patience = TokenBucket(_MAX_REFUSED, _MAX_REFUSED / 10)
        self._lock = threading.Lock()
        self._peers: dict[Party, dict[str, float]] = {}  # when each was heard last
        self._called: dict[tuple[str, int], float] = {}  # the last call of each connection
        self._uncalled: dict[tuple[str, int], float] = {}  # when connections without a call were seen first
        self.connections = Connections(0)

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Wrap the handler of a call with the checks."""
        handler = continuation(details)
        if handler is None:
            return None
        method = details.method
        permission = find_permission(method)
        lane = self._urgent if permission is not None and permission.is_urgent else self._general
        ways = (handler.request_streaming, handler.response_streaming)
        behaviour = getattr(handler, "_".join("stream" if is_stream else "unary" for is_stream in ways))

        def begin(call: OpenCall, messages: Any, context: grpc.ServicerContext) -> Any:
            messages = lane.calls.noted(call, messages)
            if handler.request_streaming:
                return behaviour(messages, context)
            try:
                request = next(messages, None)
                if request is None:
                    raise UsageError("the call has no request; use one version on all machines")
            except RingTuneError as error:
                abort(context, error)
            self._check_sender(method, request, context)
            return behaviour(request, context)

        def answer(messages: Any, context: grpc.ServicerContext) -> Any:
            with self._admitted(method, lane, context) as call:
                return begin(call, messages, context)

        def answers(messages: Any, context: grpc.ServicerContext) -> Any:
            with self._admitted(method, lane, context) as call:
                yield from begin(call, messages, context)

        checked: Any = answers if handler.response_streaming else answer
        checked.experimental_thread_pool = lane.workers  # where gRPC looks for the threads of a method
        make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else _STREAM_UNARY
        return make(checked, handler.request_deserializer, handler.response_serializer)

    @contextlib.contextmanager
    def _admitted(self, method: str, lane: Lane, context: grpc.ServicerContext) -> Iterator[OpenCall]:
        """Count a call of a permitted caller while the context is open."""
        if self._keeps_called:
            self._called[place_of(context.peer())] = time.monotonic()
        permission = find_permission(method)
        first_s = permission.first_message_s if permission else self._first_message_s
        if self._refusal is None:
            call = OpenCall(address_of(context.peer()), context, first_s, lambda: False)
            most = self._most_of_address
        else:
            caller = self._permitted(method, context, self._refusal)
            refusal, most = self._refusal, _MAX_OPEN[caller.party.role]
            call = OpenCall(str(caller.party), context, first_s, lambda: refusal(caller))
        try:
            has_replaced = lane.calls.admit(call, most)
        except BusyError as error:
            self._refuse(method, context, error)
        if has_replaced and not self._patience.take(call.caller):
            self.connections.close(place_of(context.peer()))
        try:
            yield call
        finally:
            lane.calls.leave(call)

    def _permitted(self, method: str, context: grpc.ServicerContext, refusal: Refusal) -> CertificateFacts:
        """Return the facts of the caller's certificate; end the call if they do not permit it."""
        try:
            caller = caller_of(context)
            if caller is None:
                raise TrustError("there is no certificate; join with a token first")
            self._count_connection(caller.party, context.peer())
            if not self._rate.take(caller.party):
                if not self._patience.take(str(caller.party)):
                    self.connections.close(place_of(context.peer()))
                raise BusyError(f"{caller.party} makes more than {_MAX_PER_S:.0f} calls a second here; make fewer")
            if problem := caller.problem_at(time.time()):
                raise TrustError(f"the certificate of {caller.party} is refused: {problem}")
            if removal := refusal(caller):
                raise TrustError(f"the certificate of {caller.party} is refused: {removal}; join with a new token")
            permission = require_permission(caller.party, method)
            if caller.has_own_runs_only and permission.of_administrators:
                raise TrustError(
                    f"{caller.party} is no administrator; ask one, or for a token made with --role administrator"
                )
        except (TrustError, BusyError) as error:
            self._refuse(method, context, error)
        return caller

    def _count_connection(self, party: Party, peer: str) -> None:
        """Close the connection of a party that has too many; gRPC itself knows no limit for one party."""
        most = _MAX_PARTY_CONNECTIONS[party.role]
        with self._lock:
            peers = self._peers.setdefault(party, {})
            peers[peer] = time.monotonic()
            if len(peers) <= most:
                return
            for gone in peers.keys() - self.connections.has(peers):
                del peers[gone]
            if len(peers) <= most:
                return
            del peers[peer]
        self.connections.close(place_of(peer))
        raise BusyError(f"{party} has {most} connections here already; close some")

    def end_uncalled(self, now_s: float) -> None:
        """Close connections on which nobody calls: those that are old, and of an address the oldest of too many.

        Nobody knows whose they are, and a server has room for ``MAX_CONNECTIONS``.
        """
        places, looked_s = self.connections.places()
        here, called = set(places), self._called.copy()  # others call meanwhile
        known = {place for place, at_s in called.items() if at_s >= looked_s or place in here}
        for place in called.keys() - known:
            del self._called[place]
        self._uncalled = {place: self._uncalled.get(place, now_s) for place in places if place not in known}
        of_address = Counter(address for address, _ in self._uncalled)
        for place, since_s in self._uncalled.items():
            if now_s - since_s > _UNCALLED_S or of_address[place[0]] > _MAX_UNCALLED:
                of_address[place[0]] -= 1
                self.connections.close(place)

    def _check_sender(self, method: str, request: Any, context: grpc.ServicerContext) -> None:
        caller, permission = caller_of(context), find_permission(method)
        if self._refusal is None or caller is None or permission is None or not permission.sender:
            return
        try:
            require_sender(caller.party, getattr(request, permission.sender))
        except TrustError as error:
            self._refuse(method, context, error)

    def _refuse(self, method: str, context: grpc.ServicerContext, error: RingTuneError) -> NoReturn:
        count = self._repeats.told((method, str(error)))
        if count:
            _LOG.warning("a call from %s is refused: %s%s", context.peer(), error, times(count))
        abort(context, error)


_STREAM_UNARY: Any = grpc.stream_unary_rpc_method_handler


_STOP_S: Final = 5.0
_LOOK_S: Final = 1.0
"""Between two looks for silent calls."""
_CONNECTIONS_S: Final = 5.0
"""Between two looks for connections without a call; a look takes 3 ms."""


def open_channel(address: str, more: Options = (), *, peer: Party | None = None) -> grpc.Channel:
    """Open a channel, which connects at the first call; the caller closes it.

    Of several addresses of one party the first that answers is called. ``peer`` None = any member.
    """
    options, credentials = (*more, *CLIENT_OPTIONS), process_credentials()  # of two with one name gRPC takes the first
    target = target_of(address)
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    from ringtune.transport.tls import secure_channel

    return secure_channel(target, options, credentials, peer)


class Server:
    """A gRPC server on one address, with its own threads; the constructor starts it; raises ``ConnectionFailedError``.

    Args:
        address: ``host:port``; port 0 = a free one.
        add: adds servicers to the server before it starts.
        max_workers: most concurrent calls; every incoming link holds one for its whole run. Threads are started on
            demand.
        max_calls: most calls that wait or run, others are refused; None = any number.
        is_public: whether callers need no certificate; such a server has no other services.
        before: called with the bound address before the first call is answered. If it raises, the address stays bound
            until the process ends.
        more: further options; they override those of every server.

    Attributes:
        address: with the bound port.
        guard: of its calls and connections.
    """

    def __init__(
        self,
        address: str,
        add: Callable[[grpc.Server], None],
        *,
        max_workers: int = MAX_WORKERS,
        max_calls: int | None = None,
        is_public: bool = False,
        before: Callable[[str], object] = lambda address: None,
        more: Options = (),
    ) -> None:
        self._lanes = (Lane.of(max_workers, "ringtune-rpc"), Lane.of(max_workers, "ringtune-urgent"))
        credentials = process_credentials()
        if is_public:
            guard = Guard(
                None, *self._lanes, most_of_address=_MAX_PUBLIC, first_message_s=_PUBLIC_FIRST_S, keeps_called=False
            )
        else:
            guard = Guard(credentials.refusal if credentials else None, *self._lanes)
        self._server = grpc.server(
            self._lanes[0].workers,
            options=(*more, *SERVER_OPTIONS),  # of two with one name gRPC takes the first
            maximum_concurrent_rpcs=max_calls,
            interceptors=[guard, IdempotencyInterceptor()],
        )
        add(self._server)
        host, _ = split_address(address, option="--bind")
        try:
            self.port = self._bind(address, credentials, asks_certificate=not is_public)
        except RuntimeError as error:
            raise ConnectionFailedError(
                f"can't listen on {address}: the port is in use or the host is not this machine's; take another --bind"
            ) from error
        self.guard, guard.connections = guard, Connections(self.port)
        self.address = join_address(host, self.port)
        before(self.address)
        self._server.start()
        defer_accept(self.port)
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._end_silent, name="silent-calls", daemon=True)
        self._watch.start()

    def _bind(self, address: str, credentials: Credentials | None, *, asks_certificate: bool) -> int:
        if credentials is None:
            return self._server.add_insecure_port(address)
        from ringtune.transport.tls import server_credentials

        return self._server.add_secure_port(address, server_credentials(credentials, asks_certificate=asks_certificate))

    def _end_silent(self) -> None:
        looked_s = time.monotonic()
        while not self._is_over.wait(_LOOK_S):
            now_s = time.monotonic()
            for lane in self._lanes:
                lane.calls.end_silent(now_s)
            if now_s - looked_s >= _CONNECTIONS_S:
                looked_s = now_s
                self.guard.end_uncalled(now_s)

    def stop(self, grace_s: float = 0.5, *, wait: bool = True) -> None:
        """Refuse new calls, let running ones end for ``grace_s`` seconds, cancel the rest, end all threads.

        It takes some seconds at most: a call that can't be ended is left to the end of the process, which does not wait
        for it. With ``wait`` it waits for the threads too; a handler may block one for other reasons than its call.
        """
        self._is_over.set()
        try:
            self._server.stop(grace_s).wait(grace_s + _STOP_S)
        except RuntimeError as error:  # no thread left for gRPC's own timer
            _LOG.warning("the server at %s stops without cancelling its calls: %s", self.address, error)
        are_closed = [lane.workers.close(_STOP_S if wait else 0.0) for lane in self._lanes]
        self._watch.join(_STOP_S if wait else 0.0)
        if wait and not all(are_closed):
            _LOG.warning("the server at %s stops while a call is still under way", self.address)
