"""Calls that are repeated until they are answered, for a lease at most, and carried out once.

A call that takes minutes is made of attempts. The server holds each for a while, then answers "at work"; the next
attempt asks for the result of the same work, and a repeated attempt gets the same result again::

    attempt 1   held    "at work"        a sign of life
    attempt 2   held    "at work"        a sign of life
    attempt 3   the connection breaks    silence begins
    attempt 4   refused                  silence continues
    attempt 5   the result

So a lost answer, or a connection that is gone for less than the lease, costs a moment and not the run; and a server
that is silent for a lease is lost, however long the work may take.

The terms of an attempt (``AttemptTerms``) travel beside its request; a call without terms is not carried out once:

============== =======================================================================================
ringtune-call   caller; random, the same in every attempt of one call
ringtune-hold   caller; seconds after which it wants a sign of life
ringtune-for    caller; seconds that the work may take
ringtune-again  caller; "1": the other one has the request, this one is empty
============== =======================================================================================

``IdempotencyInterceptor`` keeps the results of the last calls; a node has two calls of its coordinator under way at a
time.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import grpc

from ringtune.errors import BusyError, FrameError, PeerLostError, RingTuneError
from ringtune.transport.status import WireStatus, abort, error_of_status, status_of_error

RETRY_S: Final = 0.2
"""Between two attempts."""
_SLOWEST_BYTES_PER_S: Final = 32 << 10
"""The slowest link on which a request still has to arrive within an attempt."""
_MIN_SILENT: Final = 2
"""Attempts without an answer before anybody is lost: the one who asks may have stood still during the first."""


class Attempt(NamedTuple):
    """The time that one attempt may take.

    Attributes:
        hold_s: after so long the other one says that it is still at work.
        timeout_s: without any answer by then the attempt has failed.
    """

    hold_s: float
    timeout_s: float


class RetryState:
    """Counts what became of the attempts of one call.

    Args:
        now_s: when it begins, on any clock that does not jump.
        lease_s: who is silent for so long is lost.
        timeout_s: for the whole call.
        request_bytes: of the request, which takes its time on a slow link.
    """

    def __init__(self, now_s: float, *, lease_s: float, timeout_s: float, request_bytes: int = 0) -> None:
        self._heard_s = now_s
        self._end_s = now_s + timeout_s
        self._lease_s = lease_s
        self._way_s = request_bytes / _SLOWEST_BYTES_PER_S
        self._num_silent = 0

    def attempt(self, now_s: float) -> Attempt:
        """Say how long the next attempt may take; the last one is held until the end of the call."""
        third_s, left_s = self._lease_s / 3, self.left_s(now_s)
        timeout_s = 2 * third_s + self._way_s
        return Attempt(third_s, timeout_s) if timeout_s < left_s else Attempt(left_s + third_s, left_s)

    def left_s(self, now_s: float) -> float:
        """Seconds until the end of the call, at least a hundredth."""
        return max(0.01, self._end_s - now_s)

    def hear(self, now_s: float) -> None:
        """Note a sign of life."""
        self._heard_s, self._num_silent = now_s, 0

    def miss(self, now_s: float) -> bool:
        """Note an attempt without an answer; return whether another one follows."""
        self._num_silent += 1
        is_lost = self._num_silent >= _MIN_SILENT and now_s + RETRY_S > self._heard_s + self._lease_s + self._way_s
        return not is_lost and now_s + RETRY_S < self._end_s


AT_WORK: Final = "still at work"
"""Details of an answer that is none yet."""
AT_WORK_STATUS: Final = grpc.StatusCode.ABORTED
_CALL, _HOLD, _FOR, _AGAIN = "ringtune-call", "ringtune-hold", "ringtune-for", "ringtune-again"
_MAX_KEY: Final = 64
_LONGEST_HOLD_S: Final = 600.0
_SILENT: Final = ("ConnectionFailedError", "DeadlineError")


class AttemptTerms(NamedTuple):
    """The terms of one attempt.

    Attributes:
        key: of the call.
        hold_s: see above.
        work_s: that the work may take.
        is_again: whether the request is empty.
    """

    key: str
    hold_s: float
    work_s: float
    is_again: bool = False

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the terms as they travel."""
        again = ((_AGAIN, "1"),) if self.is_again else ()
        return ((_CALL, self.key), (_HOLD, f"{self.hold_s:.3f}"), (_FOR, f"{self.work_s:.3f}"), *again)

    @classmethod
    def read(cls, metadata: Iterable[tuple[str, Any]] | None) -> AttemptTerms | None:
        """Read the terms of an attempt; None where a call has none, or none that are readable."""
        came = {name: value for name, value in metadata or () if isinstance(value, str)}
        key = came.get(_CALL, "")
        try:
            hold_s, work_s = float(came.get(_HOLD, "nan")), float(came.get(_FOR, "nan"))
        except ValueError:
            return None
        if not 0 < len(key) <= _MAX_KEY or not math.isfinite(hold_s) or not math.isfinite(work_s):
            return None
        return cls(key, min(max(0.0, hold_s), _LONGEST_HOLD_S), max(0.0, work_s), came.get(_AGAIN) == "1")


def is_at_work(error: grpc.RpcError) -> bool:
    """Whether a failed attempt says that the work continues."""
    return isinstance(error, grpc.Call) and error.code() is AT_WORK_STATUS and error.details() == AT_WORK


def is_silence(error: grpc.RpcError) -> bool:
    """Whether an attempt failed without an answer; an error of the server itself is its answer."""
    if not isinstance(error, grpc.Call) or error.code() in (None, grpc.StatusCode.UNIMPLEMENTED):
        return False
    details = error.details() or ""
    meant = error_of_status(error.code().name, details, peer="the other one")
    return type(meant).__name__ in _SILENT and not details.startswith("ringtune.")


T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_LONGEST_S = 24 * 3600.0


class RetriedCall:
    """One call with one answer, in as many attempts as it takes.

    Args:
        method: of a stub.
        request: of the call.
        peer: who is asked, in words.
        lease_s: who is silent for so long is lost.
        timeout_s: for the whole call; None = as long as there are signs of life.
        is_held: whether the server carries it out once, see ``IdempotencyInterceptor``; else it may get it twice, and
            answers soon.
        now_s: a monotonic clock.
    """

    def __init__(
        self,
        method: Any,
        request: Any,
        *,
        peer: str,
        lease_s: float,
        timeout_s: float | None = None,
        is_held: bool = True,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._method, self._request, self._peer = method, request, peer
        self._lease_s, self._timeout_s = lease_s, timeout_s or _LONGEST_S
        self._key, self._now_s = secrets.token_hex(16) if is_held else "", now_s
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._attempt: Any = None
        self._is_known = False

    def result(self) -> Any:
        """Wait for the answer.

        Raises:
            grpc.RpcError: no answer came, or it is an error.
            grpc.FutureCancelledError: the call was given up.
            PeerLostError: who was asked has been started again meanwhile.
        """
        patience = RetryState(
            self._now_s(),
            lease_s=self._lease_s,
            timeout_s=self._timeout_s,
            request_bytes=self._request.ByteSize(),
        )
        was_silent = False
        while True:
            try:
                return self._once(patience)
            except grpc.RpcError as error:
                self._require_wanted(error)
                if is_at_work(error):
                    patience.hear(self._now_s())
                    self._is_known = True
                elif is_silence(error) and patience.miss(self._now_s()):
                    was_silent = True
                    _LOG.info("%s does not answer (%s), it is asked again", self._peer, _code(error))
                else:
                    self._require_same(error, was_silent=was_silent)
                    raise
            self._cancelled.wait(RETRY_S)

    def cancel(self) -> None:
        """Give the call up; a waiting thread gets an error."""
        with self._lock:
            self._cancelled.set()
            if self._attempt is not None:
                self._attempt.cancel()

    def _once(self, patience: RetryState) -> Any:
        now_s = self._now_s()
        hold_s, timeout_s = patience.attempt(now_s)
        terms: dict[str, Any] = {}
        if self._key:
            terms["metadata"] = AttemptTerms(self._key, hold_s, patience.left_s(now_s), self._is_known).metadata()
        request = type(self._request)() if self._is_known else self._request
        with self._lock:
            if self._cancelled.is_set():
                raise grpc.FutureCancelledError
            self._attempt = attempt = self._method.future(request, timeout=timeout_s, **terms)
        return attempt.result()

    def _require_wanted(self, error: grpc.RpcError) -> None:
        if self._cancelled.is_set():
            raise grpc.FutureCancelledError from error

    def _require_same(self, error: grpc.RpcError, *, was_silent: bool) -> None:
        """Refuse an answer of who knew of the run before it was silent, and now does not."""
        if was_silent and isinstance(error, grpc.Call) and (error.details() or "").startswith(f"ringtune.{_UNKNOWN}:"):
            raise PeerLostError(
                f"{self._peer} did not answer for a while and knows nothing of the run now, as if it was started "
                "again; repeat or --resume the run"
            ) from error


_UNKNOWN = FrameError.__name__


def repeated(
    call: Callable[[Callable[[], None]], T],
    *,
    peer: str,
    lease_s: float,
    timeout_s: float,
    given_up: threading.Event | None = None,
    now_s: Callable[[], float] = time.monotonic,
) -> T:
    """Do what a node may do twice, such as to fetch a file, until there is an answer.

    Args:
        call: makes one attempt; it ends by itself if nothing arrives, and calls what it gets with each sign of life.
        peer: who is called, in words.
        lease_s: who is silent for so long is lost.
        timeout_s: for all attempts.
        given_up: set when no thread waits any more.
        now_s: a monotonic clock.

    Raises:
        grpc.RpcError: no answer came, or it is an error.
    """
    patience, given_up = RetryState(now_s(), lease_s=lease_s, timeout_s=timeout_s), given_up or threading.Event()
    while True:
        try:
            return call(lambda: patience.hear(now_s()))
        except grpc.RpcError as error:
            if given_up.is_set() or not is_silence(error) or not patience.miss(now_s()):
                raise
            _LOG.info("%s does not answer (%s), it is asked again", peer, _code(error))
        given_up.wait(RETRY_S)


def _code(error: grpc.RpcError) -> str:
    return error.code().name if isinstance(error, grpc.Call) else "no status"


MAX_AT_WORK: Final = 64
"""Calls that are carried out at a time; further ones are refused."""
KEPT_RESULTS: Final = 32
"""Results of calls that are over."""


class _EndedError(Exception):
    """Carries the status with which a handler ended its call."""

    def __init__(self, status: WireStatus) -> None:
        super().__init__(status.details)
        self.status = status


class _WorkContext:
    """Stands for the context of a call in a handler: the work continues when an attempt is over."""

    def __init__(self, first: grpc.ServicerContext, held: AttemptTerms) -> None:
        self._first = first
        self._end_s = time.monotonic() + held.work_s

    def time_remaining(self) -> float:
        """Seconds that the work may still take."""
        return max(0.0, self._end_s - time.monotonic())

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call with a status."""
        raise _EndedError(WireStatus(code.name, details))

    def is_active(self) -> bool:
        """Return that the work is wanted: a lost attempt can't be told from a cancelled one."""
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)


class _Work:
    """The work of one call, on a thread of its own."""

    def __init__(self, behaviour: Callable[[Any, Any], Any], request: Any, context: _WorkContext) -> None:
        self._changed = threading.Condition()
        self._reply: Any = None
        self._status: WireStatus | None = None
        self.is_over = False
        threading.Thread(target=self._do, args=(behaviour, request, context), name="held-call", daemon=True).start()

    def _do(self, behaviour: Callable[[Any, Any], Any], request: Any, context: _WorkContext) -> None:
        reply, status = None, None
        try:
            reply = behaviour(request, context)
        except _EndedError as error:
            status = error.status
        except BaseException as error:
            status = status_of_error(error)
        with self._changed:
            self._reply, self._status, self.is_over = reply, status, True
            self._changed.notify_all()

    def answer(self, context: grpc.ServicerContext, hold_s: float) -> Any:
        """Answer an attempt: with the result, or after a while with the news that there is none yet."""
        gone = threading.Event()

        def end() -> None:
            with self._changed:
                gone.set()
                self._changed.notify_all()

        if context.add_callback(end):
            with self._changed:
                self._changed.wait_for(lambda: self.is_over or gone.is_set(), hold_s)
        if not self.is_over:
            context.abort(AT_WORK_STATUS, AT_WORK)
        if self._status is not None:
            context.abort(grpc.StatusCode[self._status.name], self._status.details)
        return self._reply


class IdempotencyInterceptor(grpc.ServerInterceptor):
    """Stands before the servicers of a server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: dict[tuple[str, str], _Work] = {}

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Let a call with terms be carried out once; leave any other as it is."""
        handler = continuation(details)
        held = AttemptTerms.read(details.invocation_metadata)
        if handler is None or held is None or handler.unary_unary is None:
            return handler
        behaviour, method = handler.unary_unary, str(details.method)

        def once(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                work = self._work((method, held.key), held, behaviour, request, context)
            except RingTuneError as error:
                abort(context, error)
            return work.answer(context, held.hold_s)

        return grpc.unary_unary_rpc_method_handler(once, handler.request_deserializer, handler.response_serializer)

    def _work(
        self,
        key: tuple[str, str],
        held: AttemptTerms,
        behaviour: Callable[[Any, Any], Any],
        request: Any,
        context: grpc.ServicerContext,
    ) -> _Work:
        """Find the work of a call, or begin it.

        Raises:
            FrameError: this process was never asked for it.
            BusyError: it does too much already.
        """
        with self._lock:
            work = self._works.get(key)
            if work is not None:
                return work
            if held.is_again:
                raise FrameError("this call is not under way here; the process was started again")
            self._forget_old()
            try:
                work = self._works[key] = _Work(behaviour, request, _WorkContext(context, held))
            except RuntimeError as error:
                raise BusyError("the system has no more threads; try again") from error
            return work

    def _forget_old(self) -> None:
        over = [key for key, work in self._works.items() if work.is_over]
        if len(self._works) - len(over) >= MAX_AT_WORK:
            raise BusyError(f"{MAX_AT_WORK} calls are under way here; try again later")
        for key in over[: max(0, len(over) + 1 - KEPT_RESULTS)]:
            del self._works[key]
