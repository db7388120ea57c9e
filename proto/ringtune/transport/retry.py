"""Calls that are retried until they are answered, for at most a lease of silence, and carried out once.

A call that takes minutes is made of attempts. The server holds each for a while, then answers "at work"; the next
attempt asks for the result of the same work, and a repeated attempt gets the same result again::

    attempt 1   held    "at work"        a sign of life
    attempt 2   held    "at work"        a sign of life
    attempt 3   the connection breaks    silence begins
    attempt 4   refused                  silence continues
    attempt 5   the result

So a lost answer, or a connection that is down for less than the lease, does not fail the run; and a server that is
silent for a lease is lost, however long the work may take.

The terms of an attempt (``AttemptTerms``) are metadata of its request; a call without terms may be carried out
repeatedly:

============== =======================================================================================
ringtune-call   random key of the call, equal in all its attempts
ringtune-hold   seconds after which the caller expects a sign of life
ringtune-for    seconds that the work may take
ringtune-again  "1": the server has the request already, this one is empty
============== =======================================================================================

``IdempotencyInterceptor`` keeps the results of the last calls; a node has at most two calls of its coordinator at a
time.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import grpc

from ringtune.errors import BusyError, ConnectionFailedError, DeadlineError, FrameError, PeerLostError, RingTuneError
from ringtune.transport.status import WireStatus, abort, error_of_status, status_of_error

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
RETRY_S: Final = 0.2
"""Seconds between two attempts."""
_LONGEST_S: Final = 24 * 3600.0
_SLOWEST_BYTES_PER_S: Final = 32 << 10
"""Rate of the slowest link on which a request must arrive within an attempt."""
_MIN_SILENT: Final = 2
"""Fewest attempts without an answer before a peer is lost, as the caller itself may have been stopped in the first."""


class RetryState:
    """Time limits and outcomes of the attempts of one call.

    Args:
        lease_s: a peer that is silent for this time is lost.
        timeout_s: for the whole call, from now on.
        request_bytes: of the request, which adds time on a slow link.
        now_s: a monotonic clock.
    """

    def __init__(
        self, *, lease_s: float, timeout_s: float, request_bytes: int = 0, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._now_s = now_s
        self._heard_s = now_s()
        self._end_s = self._heard_s + timeout_s
        self._lease_s = lease_s
        self._way_s = request_bytes / _SLOWEST_BYTES_PER_S
        self._num_silent = 0
        self.was_silent = False

    def attempt(self) -> tuple[float, float]:
        """Return seconds until the server should answer "at work", and the timeout of the attempt.

        The last attempt is held until the end of the call.
        """
        third_s, left_s = self._lease_s / 3, self.left_s()
        timeout_s = 2 * third_s + self._way_s
        return (third_s, timeout_s) if timeout_s < left_s else (left_s + third_s, left_s)

    def left_s(self) -> float:
        """Seconds until the end of the call, at least 0.01."""
        return max(0.01, self._end_s - self._now_s())

    def hear(self) -> None:
        """Note a sign of life."""
        self._heard_s, self._num_silent = self._now_s(), 0

    def miss(self) -> bool:
        """Note an attempt without an answer; return whether another one follows."""
        self._num_silent, self.was_silent = self._num_silent + 1, True
        next_s = self._now_s() + RETRY_S
        is_lost = self._num_silent >= _MIN_SILENT and next_s > self._heard_s + self._lease_s + self._way_s
        return not is_lost and next_s < self._end_s

    def repeat(self, once: Callable[[], T], *, peer: str, given_up: threading.Event | None = None) -> T:
        """Make attempts until there is an answer; raises ``grpc.RpcError``.

        Args:
            once: makes one; a call that may be carried out twice, such as a fetch, calls ``hear`` with each sign of
                life.
            peer: description of the server, for the log.
            given_up: set to stop.
        """
        given_up = given_up or threading.Event()
        while True:
            try:
                return once()
            except grpc.RpcError as error:
                if given_up.is_set():
                    raise
                if is_at_work(error):
                    self.hear()
                elif is_silence(error) and self.miss():
                    _LOG.info("%s does not answer (%s), it is asked again", peer, _code(error))
                else:
                    raise
            given_up.wait(RETRY_S)


AT_WORK: Final = "still at work"
"""Details of the status of an attempt without a result yet."""
AT_WORK_STATUS: Final = grpc.StatusCode.ABORTED
_CALL, _HOLD, _FOR, _AGAIN = "ringtune-call", "ringtune-hold", "ringtune-for", "ringtune-again"
_MAX_KEY: Final = 64
_LONGEST_HOLD_S: Final = 600.0


class AttemptTerms(NamedTuple):
    """Terms of one attempt of the call ``key``, see the table above."""

    key: str
    hold_s: float
    work_s: float
    is_again: bool = False

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Encode as metadata."""
        again = ((_AGAIN, "1"),) if self.is_again else ()
        return ((_CALL, self.key), (_HOLD, f"{self.hold_s:.3f}"), (_FOR, f"{self.work_s:.3f}"), *again)

    @classmethod
    def read(cls, metadata: Iterable[tuple[str, Any]] | None) -> AttemptTerms | None:
        """Decode from metadata; None without valid terms."""
        values = {name: value for name, value in metadata or () if isinstance(value, str)}
        key = values.get(_CALL, "")
        try:
            hold_s, work_s = float(values.get(_HOLD, "nan")), float(values.get(_FOR, "nan"))
        except ValueError:
            return None
        if not 0 < len(key) <= _MAX_KEY or not math.isfinite(hold_s) or not math.isfinite(work_s):
            return None
        return cls(key, min(max(0.0, hold_s), _LONGEST_HOLD_S), max(0.0, work_s), values.get(_AGAIN) == "1")


def is_at_work(error: grpc.RpcError) -> bool:
    """Whether a failed attempt says that the work continues."""
    return isinstance(error, grpc.Call) and error.code() is AT_WORK_STATUS and error.details() == AT_WORK


def is_silence(error: grpc.RpcError) -> bool:
    """Whether an attempt failed without an answer; an error of the server itself is an answer."""
    if not isinstance(error, grpc.Call) or error.code() in (None, grpc.StatusCode.UNIMPLEMENTED):
        return False
    details = error.details() or ""
    meant = error_of_status(error.code().name, details, peer="the other one")
    return type(meant) in (ConnectionFailedError, DeadlineError) and not details.startswith("ringtune.")


class RetriedCall:
    """One unary call, attempted until it is answered, cancelled or too late.

    ``is_held``: whether the server carries it out once (``IdempotencyInterceptor``); else repeatedly, and soon.
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
    ) -> None:
        self._method, self._request, self._peer = method, request, peer
        self._lease_s, self._timeout_s = lease_s, _LONGEST_S if timeout_s is None else timeout_s
        self._key = secrets.token_hex(16) if is_held else ""
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._attempt: Any = None
        self._is_known = False

    def result(self) -> Any:
        """Wait for the answer.

        Raises ``grpc.RpcError`` without an answer or with an error as answer, ``grpc.FutureCancelledError`` after
        ``cancel``, and ``PeerLostError`` if the server was started again meanwhile.
        """
        state = RetryState(lease_s=self._lease_s, timeout_s=self._timeout_s, request_bytes=self._request.ByteSize())
        try:
            return state.repeat(lambda: self._once(state), peer=self._peer, given_up=self._cancelled)
        except grpc.RpcError as error:
            if self._cancelled.is_set():
                raise grpc.FutureCancelledError from error
            if state.was_silent and isinstance(error, grpc.Call) and (error.details() or "").startswith(_UNKNOWN):
                raise PeerLostError(
                    f"{self._peer} did not answer for a while and knows nothing of the run now, as if it was started "
                    "again; repeat or --resume the run"
                ) from error
            raise

    def cancel(self) -> None:
        """Cancel the call; a waiting thread gets an error."""
        with self._lock:
            self._cancelled.set()
            if self._attempt is not None:
                self._attempt.cancel()

    def _once(self, state: RetryState) -> Any:
        hold_s, timeout_s = state.attempt()
        terms: dict[str, Any] = {}
        if self._key:
            terms["metadata"] = AttemptTerms(self._key, hold_s, state.left_s(), self._is_known).metadata()
        request = type(self._request)() if self._is_known else self._request
        with self._lock:
            if self._cancelled.is_set():
                raise grpc.FutureCancelledError
            self._attempt = attempt = self._method.future(request, timeout=timeout_s, **terms)
        try:
            return attempt.result()
        except grpc.RpcError as error:
            self._is_known = self._is_known or is_at_work(error)
            raise


_UNKNOWN = f"ringtune.{FrameError.__name__}:"


def _code(error: grpc.RpcError) -> str:
    return error.code().name if isinstance(error, grpc.Call) else "no status"


MAX_AT_WORK: Final = 64
"""Most concurrent calls with terms; further ones are refused."""
KEPT_RESULTS: Final = 32
"""Results of finished calls that are kept."""


class _EndedError(Exception):
    """Status with which a handler has aborted its call."""

    def __init__(self, status: WireStatus) -> None:
        super().__init__(status.details)
        self.status = status


class _WorkContext:
    """Context of a call for its handler; unlike an attempt's context it lasts as long as the work."""

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
        """Return True: a lost attempt is not distinguishable from a cancelled one."""
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)


Work = Future[tuple[Any, WireStatus | None]]
"""Work of one call on a thread of its own; the result is (reply, None) or (None, status of the failure)."""


def _begin(behaviour: Callable[[Any, Any], Any], request: Any, context: _WorkContext) -> Work:
    work: Work = Future()

    def carry_out() -> None:
        try:
            work.set_result((behaviour(request, context), None))
        except _EndedError as error:
            work.set_result((None, error.status))
        except BaseException as error:
            work.set_result((None, status_of_error(error)))

    threading.Thread(target=carry_out, name="held-call", daemon=True).start()
    return work


def _answer(work: Work, context: grpc.ServicerContext, hold_s: float) -> Any:
    """Answer an attempt with the result, or after ``hold_s`` seconds with "at work"."""
    over = threading.Event()
    work.add_done_callback(lambda _: over.set())
    if context.add_callback(over.set):
        over.wait(hold_s)
    if not work.done():
        context.abort(AT_WORK_STATUS, AT_WORK)
    reply, status = work.result()
    if status is not None:
        context.abort(grpc.StatusCode[status.name], status.details)
    return reply


class IdempotencyInterceptor(grpc.ServerInterceptor):
    """Carries out a unary call with terms once, whatever the number of its attempts; other calls are unchanged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: dict[tuple[str, str], Work] = {}

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Wrap the handler of a call with terms."""
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
            return _answer(work, context, held.hold_s)

        return grpc.unary_unary_rpc_method_handler(once, handler.request_deserializer, handler.response_serializer)

    def _work(
        self,
        key: tuple[str, str],
        held: AttemptTerms,
        behaviour: Callable[[Any, Any], Any],
        request: Any,
        context: grpc.ServicerContext,
    ) -> Work:
        """Return the work of a call, or begin it."""
        with self._lock:
            work = self._works.get(key)
            if work is not None:
                return work
            if held.is_again:
                raise FrameError("this call is not under way here; the process was started again")
            over = [known for known, other in self._works.items() if other.done()]
            if len(self._works) - len(over) >= MAX_AT_WORK:
                raise BusyError(f"{MAX_AT_WORK} calls are under way here; try again later")
            for known in over[: max(0, len(over) + 1 - KEPT_RESULTS)]:
                del self._works[known]
            try:
                work = self._works[key] = _begin(behaviour, request, _WorkContext(context, held))
            except RuntimeError as error:
                raise BusyError("the system has no more threads; try again") from error
            return work
