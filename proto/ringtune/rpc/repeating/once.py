"""Carry a call out once however often it is made: a later attempt waits for, or gets, the result of the first.

::

    attempt 1   starts the work, and waits with it until its caller wants to hear of it: "still at work"
    attempt 2   waits for the same work                                                  the result
    attempt 3   the result was lost on its way                                           the result again

Only calls that come with terms (``held``) are carried out so. Results of the last calls are kept; a node has two calls
of its coordinator under way at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn

import grpc

from ringtune.errors import BusyError, FrameError, RingTuneError
from ringtune.rpc.repeating.held import AT_WORK, AT_WORK_STATUS, Held
from ringtune.rpc.statuses import WireStatus, abort, status_of_error

MOST_AT_WORK: Final = 64
"""Calls that are carried out at a time; further ones are refused."""
KEPT_RESULTS: Final = 32
"""Results of calls that are over."""


class _EndedError(Exception):
    """Carries the status with which a handler ended its call."""

    def __init__(self, status: WireStatus) -> None:
        super().__init__(status.details)
        self.status = status


class _WorkContext:
    """Stands for the context of a call in a handler: the work goes on when an attempt is over."""

    def __init__(self, first: grpc.ServicerContext, held: Held) -> None:
        self._first = first
        self._end_s = time.monotonic() + held.work_s

    def time_remaining(self) -> float:
        """Seconds that the work may still take."""
        return max(0.0, self._end_s - time.monotonic())

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call with a status."""
        raise _EndedError(WireStatus(code.name, details))

    def is_active(self) -> bool:
        """Return that the work is wanted: nobody can tell an attempt that was lost from one that was given up."""
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


class Once(grpc.ServerInterceptor):
    """Stands before the servicers of a server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: dict[tuple[str, str], _Work] = {}

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Let a call with terms be carried out once; leave any other as it is."""
        handler = continuation(details)
        held = Held.read(details.invocation_metadata)
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
        held: Held,
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
        if len(self._works) - len(over) >= MOST_AT_WORK:
            raise BusyError(f"{MOST_AT_WORK} calls are under way here; try again later")
        for key in over[: max(0, len(over) + 1 - KEPT_RESULTS)]:
            del self._works[key]
